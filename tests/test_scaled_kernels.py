"""Factors of rows, columns and blocks in the kernels, and what they cost beside them."""

from __future__ import annotations

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxgemm
from jaxgemm import reference
from pallas_kernels import KERNELS
from pallas_kernels.problem import Epilogue
from tests import kernel_cases
from tests.kernel_cases import make_problem, small_config
from tests.product_cases import equations
from tests.scaled_cases import E4M3, E5M2, normal, of, wide


@pytest.mark.slow
@pytest.mark.parametrize("scaling", ["rows", "blocks"])
@pytest.mark.parametrize(
    "algorithm",
    kernel_cases.mostly_more(["e4m3_e5m2_f32", "e4m3_f32", "e5m2_e4m3_f32"]),
)
def test_kernel(algorithm, scaling, rng):
  dtype = E5M2 if algorithm.startswith("e5m2") else E4M3
  other = E5M2 if "_e5m2" in algorithm else E4M3
  problem = dataclasses.replace(
      make_problem(133, 203, 391, "NN", dtype, out_dtype="float32", batch=2),
      algorithm=algorithm, epilogue=Epilogue(scaling=scaling),
  )
  assert problem.rhs_dtype == other and problem.transposed.dtype == other
  assert problem.transposed.transposed == problem
  lhs = normal(rng, 2, 133, 391).astype(dtype)
  rhs = normal(rng, 2, 391, 203).astype(other)
  rows, cols = ((2, 133), (2, 203)) if scaling == "rows" else ((2, 4, 133), (2, 4, 2))
  rows, cols = (rng.uniform(0.5, 2, shape).astype(np.float32) for shape in (rows, cols))
  if scaling == "rows":
    truth = wide(lhs) @ wide(rhs) * rows[:, :, None] * cols[:, None]
  else:
    truth = of(lhs, rows.swapaxes(1, 2)) @ of(rhs, cols)
  config = small_config("persistent", dtype, num_stages=2, promote=1)
  operands = lhs, rhs, jnp.asarray(rows), jnp.asarray(cols)
  result = kernel_cases.emulate("persistent", problem, config, operands, num_sms=2)
  assert reference.relative_error(result, truth) < 2e-7


@pytest.mark.slow
@pytest.mark.parametrize("k", kernel_cases.mostly_more([256, 100, 384], kept=2))
def test_sums_of_few_k_tiles(k, rng):
  """Two sets of sums take turns, from the first k tile to the last."""
  problem = make_problem(
      72, 264, k, "NT", E4M3, out_dtype="float32", epilogue=Epilogue(scaling="blocks")
  )
  lhs, rhs = (normal(rng, 1, rows, k).astype(E4M3) for rows in (72, 264))
  blocks = -(-k // 128)
  rows, cols = (
      rng.uniform(0.5, 2, (1, blocks, size)).astype(np.float32) for size in (72, 3)
  )
  truth = of(lhs, rows.swapaxes(1, 2)) @ of(rhs.swapaxes(1, 2), cols)
  config = small_config(
      "persistent", E4M3, tile_m=64, tile_n=256, wg_dim="n", num_stages=3, promote=1
  )
  result = kernel_cases.emulate(
      "persistent", problem, config, (lhs, rhs, jnp.asarray(rows), jnp.asarray(cols)),
      num_sms=2,
  )
  assert reference.relative_error(result, truth) < 2e-7


def test_no_pass_pads_factors_of_rows():
  lhs, rhs = (jax.ShapeDtypeStruct(shape, E4M3) for shape in ((3, 256), (1000, 256)))
  scales = [jax.ShapeDtypeStruct((size,), "float32") for size in (3, 1000)]
  run = lambda lhs, rhs, rows, cols: jaxgemm.scaled_matmul(
      lhs, rhs.T, rows[:, None], cols[None]
  )
  with jaxgemm.target("NVIDIA H200"):
    lowered = jax.jit(run).trace(lhs, rhs, *scales).lower(lowering_platforms=("cuda",))
  text = lowered.as_text()
  assert "jaxgemm_persistent" in text and "stablehlo.pad" not in text


def test_one_factor_for_all_stays_one():
  lhs, rhs = jnp.zeros((3, 256), E4M3), jnp.zeros((256, 1000), E4M3)
  for scales, shapes in (
      ((2.0, jnp.ones((1, 1))), [(1,), (1,)]),
      ((jnp.ones((3, 1)), 2.0), [(1, 3), (1,)]),
      ((1.0, jnp.ones((1, 1000))), [(1,), (1, 1000)]),
      ((jnp.ones((3, 2)), 2.0), [(1, 2, 3), (1, 2, 8)]),  # Of blocks of k.
  ):
    eqns = equations(jax.make_jaxpr(jaxgemm.scaled_matmul)(lhs, rhs, *scales).jaxpr)
    (found,) = (eqn for eqn in eqns if eqn.primitive.name == "jaxgemm_scaled")
    assert [x.aval.shape for x in found.invars[2:]] == shapes


@pytest.mark.parametrize(
    ("in_axes", "emulated"),
    [((0, None), False), ((None, 0), False), ((0, 0), False), ((0, 0), True)],
)
def test_vmap_of_one_factor_for_all(in_axes, emulated, rng):
  lhs = normal(rng, *((3,) if in_axes[0] == 0 else ()), 8, 128).astype(E4M3)
  rhs = normal(rng, 128, 16).astype(E4M3)
  scales = jnp.asarray([1.0, -2.0, 3.0]) if in_axes[1] == 0 else jnp.float32(5)
  run = lambda lhs, scale: jaxgemm.scaled_matmul(lhs, rhs, 0.5, scale)
  with jaxgemm.emulate() if emulated else contextlib.nullcontext():
    found = jax.vmap(run, in_axes)(lhs, scales)
  wanted = 0.5 * wide(lhs) @ wide(rhs) * wide(scales).reshape(-1, 1, 1)
  assert reference.relative_error(found, wanted) < 3.4e-3


def test_aligned_scales_are_not_copied():
  """TMA takes rows of factors as they are, if they are multiples of 16 bytes."""

  def text(m, n):
    types = [((m, 512), E4M3), ((512, n), E4M3), ((4, m), "float32")]
    types.append(((4, -(-n // 128)), "float32"))
    with jaxgemm.target("NVIDIA H200"):
      return jax.jit(
          lambda x, w, rows, cols: jaxgemm.scaled_matmul(x, w, rows.T, cols)
      ).trace(*(jax.ShapeDtypeStruct(*each) for each in types)).lower(
          lowering_platforms=("cuda",)
      ).as_text()

  assert "jaxgemm_persistent" in (found := text(512, 1024)) and "pad" not in found
  assert "stablehlo.pad" in text(512, 640)  # Of five blocks of columns.


@pytest.mark.parametrize(
    ("kernel", "fields", "scaling", "named"),
    [
        ("blocked", {}, "rows", "only persistent"),
        ("split_k", {}, "blocks", "only persistent"),
        ("persistent", dict(promote=0), "blocks", "promote=0"),
        ("persistent", dict(promote=1, tile_n=192), "blocks", "192 columns a warpgroup"),
        (
            "persistent", dict(promote=1, tile_m=192, tile_n=128, wg_dim="n"), "blocks",
            "two accumulators and a promoted sum of 192x64",
        ),
        (
            "persistent", dict(promote=1, tile_m=256, tile_n=64), "blocks",
            "tile_m=256: factors of 260 rows",
        ),
        ("persistent", dict(swap=True), "rows", "swap=True excludes"),
    ],
)
def test_supports_names_the_constraint(kernel, fields, scaling, named):
  problem = make_problem(
      256, 256, 1024, "NT", E4M3, out_dtype="bfloat16", epilogue=Epilogue(scaling=scaling)
  )
  config = small_config(kernel, E4M3, **fields)
  assert named in KERNELS[kernel].supports(problem, config)
  sixteen = dataclasses.replace(problem, dtype="bfloat16", algorithm="bf16_f32")
  reason = KERNELS["persistent"].supports(sixteen, small_config("persistent"))
  assert "8-bit" in reason
