"""float32 products of parts, and 8 bits, on the chip: `make test-gpu`."""

from __future__ import annotations

import dataclasses

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import accuracy
import jaxgemm
from jaxgemm import heuristics, reference
from jaxgemm.device import current_device
from pallas_kernels import TILE_KERNELS as KERNELS
from pallas_kernels import halves, parts
from tests import kernel_cases
from tests.gpu_cases import check, launch
from tests.kernel_cases import LAYOUTS, make_problem, small_config

pytestmark = pytest.mark.gpu


# -- float32 products of parts -----------------------------------------------------


DRAWS = accuracy.DRAWS | {
    "subnormal": lambda rng, shape: rng.standard_normal(shape) * 2.0**-70,
}
SIZES = [(2048, 2304, 2048), (512, 768, 4096), (133, 203, 1001), (64, 72, 65536)]


def _exact_operands(size, layouts, draw):
  """A problem as exact as float32, its operands, and XLA's errors."""
  problem = dataclasses.replace(
      make_problem(*size, layouts, "float32"), algorithm="bf16_x6"
  )
  rng = np.random.default_rng(1)
  operands = [
      jnp.asarray(DRAWS[draw](rng, shape), jnp.float32)
      for shape in (problem.lhs_shape, problem.rhs_shape)
  ]
  truth = kernel_cases.truth(problem, operands)
  lhs, rhs = (2 - "NT".index(layouts[0])), 1 + "NT".index(layouts[1])
  xla = lax.dot_general(
      *operands, (((lhs,), (rhs,)), ((0,), (0,))), precision="highest"
  )
  return problem, operands, truth, accuracy.errors(xla, truth)


def _is_as_exact(result, truth, theirs):
  """At most half as far again from the truth as XLA's float32 product, or its last bit.
  """
  for ours, others in zip(accuracy.errors(result, truth), theirs, strict=True):
    assert ours <= 1.5 * max(others, 2.0**-23), (ours, others)


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_best_kernel_is_as_exact_as_float32(size, layouts, draw):
  problem, operands, truth, theirs = _exact_operands(size, layouts, draw)
  best = next(
      c for c in heuristics.candidates(problem, current_device()) if c.kernel in KERNELS
  )
  result = launch(best.kernel, problem, best.config, operands)
  _is_as_exact(result, truth, theirs)


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize(
    ("k", "fields"),
    [(4096, dict(tile_n=192)), (2048, dict(tile_n=128, cluster_m=2))], ids=str,
)
def test_float16_parts_are_as_exact_as_float32(k, fields, layouts, draw):
  """Also where some elements are lost in float16: then others take their place."""
  problem, operands, truth, theirs = _exact_operands((2048, 2304, k), layouts, draw)
  config = small_config(
      "persistent", promote=1, num_stages=2, float16_parts=True, **fields
  )
  _is_as_exact(launch("persistent", problem, config, operands), truth, theirs)
  lhs, rhs = (np.array(x) for x in operands)
  lhs[0, 3, 5], rhs[0, 7, 9] = 1e-30, 0.0  # A bit is lost, and may count.
  operands = jnp.asarray(lhs), jnp.asarray(rhs)
  assert not halves.split(*operands, problem).exact
  truth = kernel_cases.truth(problem, operands)
  _is_as_exact(launch("persistent", problem, config, operands), truth, theirs)


def test_float16_parts_of_odd_sizes_and_batches():
  for size, layouts, batch in (((1001, 517, 777), "NN", 1), ((130, 1003, 205), "TT", 3)):
    problem = dataclasses.replace(
        make_problem(*size, layouts, "float32", batch=batch), algorithm="bf16_x6"
    )
    operands = kernel_cases.random_operands(problem)
    truth = kernel_cases.truth(problem, operands)
    for kernel, fields in (("persistent", {}), ("split_k", dict(splits=2, tile_n=64)),
                           ("split_k", dict(splits=2, cluster_k=2, tile_n=64))):
      config = small_config(
          kernel, promote=1, num_stages=2, float16_parts=True, **fields
      )
      result = launch(kernel, problem, config, operands)
      assert reference.relative_error(result, truth) < 4e-7


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize(
    ("kernel", "fields"),
    [("persistent", {}), ("split_k", dict(splits=4)),
     ("split_k", dict(splits=4, cluster_k=4))],
    ids=str,
)
def test_lhs_split_in_registers(kernel, fields, layouts, draw):
  fields = fields | dict(tile_k=32, num_stages=4, split_lhs=True)
  for size, swap, tile_n, promote in (
      ((2048, 40, 4096), False, 48, 1), ((7, 1001, 1024), True, 48, 2),
      ((1000, 136, 2048), False, 64, 2),
  ):
    problem, operands, truth, theirs = _exact_operands(size, layouts, draw)
    config = small_config(
        kernel, **fields, swap=swap, tile_n=tile_n, promote=promote
    )
    _is_as_exact(launch(kernel, problem, config, operands), truth, theirs)


@pytest.mark.parametrize(("algorithm", "bound"), [("bf16_x3", 6e-6), ("bf16_x9", 1e-6)])
@pytest.mark.parametrize("layouts", LAYOUTS)
def test_parts(layouts, algorithm, bound):
  for fields in ({}, dict(cluster_m=2), dict(wg_dim="tile", tile_n=64)):
    config = small_config("persistent", promote=1, num_stages=2, **fields)
    for size in ((1000, 520, 2048), (70, 1001, 333)):
      problem = dataclasses.replace(
          make_problem(*size, layouts, "float32", batch=2), algorithm=algorithm
      )
      operands = kernel_cases.random_operands(problem)
      result = launch("persistent", problem, config, operands)
      truth = kernel_cases.truth(problem, operands)
      assert reference.relative_error(result, truth) < bound


def test_splits_are_exact_for_every_float32():
  rng = np.random.default_rng(0)
  bits = rng.integers(0, 2**32, size=1 << 20, dtype=np.uint64).astype(np.uint32)
  x = bits.view(np.float32)
  x = x[np.isfinite(x)][None, :, None]
  split = jax.jit(lambda x: parts.split(x, 3))(jnp.asarray(x))
  high, mid, low = (np.asarray(part).astype(np.float64) for part in split)
  whole = high + mid / 2**8 + low / 2**16
  np.testing.assert_array_equal(whole, x.astype(np.float64))


@pytest.mark.parametrize("algorithm", ["bf16_x6", "bf16_x9"])
def test_products_with_the_identity_are_exact(algorithm):
  """Every float32, subnormal ones too, comes through the tensor cores."""
  rng = np.random.default_rng(0)
  bits = rng.integers(0, 2**32, size=256 * 256, dtype=np.uint64).astype(np.uint32)
  x = bits.view(np.float32).reshape(1, 256, 256)
  x = np.where(np.isfinite(x), x, 1.0)
  problem = dataclasses.replace(
      make_problem(256, 256, 256, "NN", "float32"), algorithm=algorithm
  )
  operands = jnp.asarray(x), jnp.eye(256, dtype=jnp.float32)[None]
  config = small_config("persistent", promote=1, num_stages=2)
  result = launch("persistent", problem, config, operands)
  np.testing.assert_array_equal(np.asarray(result), x)


# -- operands of 8 bits --------------------------------------------------------------


@pytest.mark.parametrize("size", [(256, 384, 512), (1000, 520, 1200), (133, 208, 391)],
                         ids=str)
@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_operands_of_8_bits(dtype, layouts, size):
  """float8 is promoted: XLA's error, which the kernel is held to, is that of float32."""
  for fields in ({}, dict(cluster_m=2), dict(wg_dim="tile", tile_n=64)):
    out_dtype = "int32" if dtype == "int8" else "bfloat16"
    problem = make_problem(*size, layouts, dtype, batch=2, out_dtype=out_dtype)
    if dtype != "int8":
      config = small_config("persistent", dtype, promote=1, **fields)
      check("persistent", problem, config)
      continue
    operands = kernel_cases.random_operands(problem)
    config = small_config("persistent", dtype, **fields)
    result = launch("persistent", problem, config, operands)
    np.testing.assert_array_equal(
        np.asarray(result), kernel_cases.truth(problem, operands)
    )


@pytest.mark.parametrize("other", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize(
    ("lhs_block", "rhs_block"),
    [((-1, -1), (-1, -1)), ((1, -1), (-1, 1)), ((128, 128), (128, 128)),
     ((1, 128), (128, 128))],
)
def test_scaled_products(lhs_block, rhs_block, other):
  rng = np.random.default_rng(0)
  for m, n, k in ((512, 768, 1024), (133, 208, 391)):
    x, w = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((m, k), (k, n)))
    q, s = jaxgemm.quantise(x, block=lhs_block)
    r, u = jaxgemm.quantise(w, other, block=rhs_block)
    truth = np.asarray(jaxgemm.dequantise(q, s)).astype(np.float64) @ np.asarray(
        jaxgemm.dequantise(r, u)
    ).astype(np.float64)
    f = jax.jit(lambda *a: jaxgemm.scaled_matmul(*a, implementation="persistent"))
    assert reference.relative_error(f(q, r, s, u), truth) < 4e-3
    f = jax.jit(
        lambda *a: jaxgemm.scaled_matmul(
            *a, preferred_element_type=jnp.float32, implementation="persistent"
        )
    )
    # The tensor cores keep 14 bits of a sum, or so.
    assert reference.relative_error(f(q, r, s, u), truth) < 2e-3
