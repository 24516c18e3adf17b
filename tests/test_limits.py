"""Sizes at the limits: empty, one, beyond 2**31 elements, 2**16 tiles and batches."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxgemm
from jaxgemm import reference
from pallas_kernels import TILE_KERNELS as KERNELS
from tests.kernel_cases import LAYOUTS
from tests.product_cases import normal

# They take gigabytes: in one process, whatever the number.
MEMORY = pytest.mark.xdist_group("memory")
EDGES = [(0, 5, 3), (5, 0, 3), (5, 3, 0), (0, 0, 0), (1, 1, 1), (1, 70, 1), (70, 1, 9)]


@pytest.mark.parametrize("emulated", [False, True])
@pytest.mark.parametrize("size", EDGES, ids=str)
def test_empty_and_one(size, emulated, rng):
  """As jnp.matmul, with gradients; a sum of nothing is 0."""
  m, n, k = size
  a, b = normal(rng, m, k, dtype="bfloat16"), normal(rng, k, n, dtype="bfloat16")

  def run(matmul):
    out, back = jax.vjp(matmul, a, b)
    return out, *back(jnp.ones_like(out))

  wanted = run(jnp.matmul)
  if emulated:
    with jaxgemm.emulate():
      found = run(jaxgemm.matmul)
  else:
    found = run(jaxgemm.matmul)
  for ours, theirs in zip(found, wanted, strict=True):
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    np.testing.assert_allclose(
        np.asarray(ours, np.float32), np.asarray(theirs, np.float32), 1e-2, 1e-2
    )


def _draw(shape, seed: int) -> jax.Array:
  """Normal values; of large arrays no float32 copy is made."""
  draw = lambda key: jax.random.normal(key, shape, jnp.bfloat16)
  return jax.jit(draw)(jax.random.key(seed))


def _check(m: int, n: int, k: int, layouts: str = "NN", batch: int = 0, **options):
  """Some rows of the result, the last among them, against float64 and XLA's own."""
  stack = (batch,) if batch else ()
  a = _draw(stack + ((m, k) if layouts[0] == "N" else (k, m)), 0)
  b = _draw(stack + ((k, n) if layouts[1] == "N" else (n, k)), 1)
  first = len(stack)
  summed = (first + (layouts[0] == "N"),), (first + (layouts[1] == "T"),)
  numbers = summed, ((0,) * first, (0,) * first)
  rows = np.array(sorted({0, m // 2, max(m - 2, 0), m - 1}))

  @jax.jit
  def both(a, b):
    found = jaxgemm.dot_general(a, b, numbers, **options)
    some = jnp.take(a, rows, first + (layouts[0] == "T"))
    return found[..., rows, :], some, jax.lax.dot_general(some, b, numbers)

  found, some, theirs = both(a, b)
  with jax.enable_x64(True):
    wide = [jnp.asarray(np.asarray(x), "float64") for x in (some, b)]
    truth = np.asarray(jax.lax.dot_general(*wide, numbers))
  # A row of few columns may be rounded less well than all of XLA's.
  limit = 2 * reference.relative_error(theirs, truth) + 2.0**-9
  for i, row in enumerate(rows):  # A lost row would hide among the others.
    ours = reference.relative_error(found[..., i, :], truth[..., i, :])
    assert ours <= limit, row


@MEMORY
@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS)
def test_gpu_results_of_more_than_2_to_the_31(kernel):
  _check(46400, 46400, 64 if kernel != "split_k" else 256, implementation=kernel)


@MEMORY
@pytest.mark.gpu
@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize("size", [(65600, 64, 32800), (64, 65600, 32800)], ids=str)
def test_gpu_operands_of_more_than_2_to_the_31(size, layouts):
  _check(*size, layouts)


@MEMORY
@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if kernel != "direct"])
@pytest.mark.parametrize("layouts", ["NN", "TT"])
def test_gpu_a_million_terms(kernel, layouts):
  _check(264, 136, 1_000_000, layouts, implementation=kernel)


@MEMORY
@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS)
def test_gpu_more_than_2_to_the_16_tiles_and_batches(kernel):
  k = 16 if kernel != "split_k" else 256
  _check(64 * 65_600, 8, k, implementation=kernel)
  _check(16, 24, k, batch=65_600, implementation=kernel)


@MEMORY
@pytest.mark.gpu
@pytest.mark.parametrize("layouts", LAYOUTS)
def test_gpu_strides_at_the_limits_of_tma(layouts):
  """16 bytes at least; and 32 MB."""
  _check(264, 8, 8, layouts)
  _check(8, 264, 8, layouts)
  _check(8, 8, 1 << 24, layouts)


@MEMORY
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_gpu_inf_and_nan_as_in_xla(kernel, dtype, rng):
  a, b = np.array(normal(rng, 130, 200)), np.array(normal(rng, 200, 136))
  a[3, 5], a[70, 0], a[129, 199] = np.inf, np.nan, -np.inf
  b[7, 9], b[100, 135] = np.nan, np.inf
  a, b = jnp.asarray(a, dtype), jnp.asarray(b, dtype)
  if dtype == "float32" and kernel == "direct":
    pytest.skip("direct multiplies operands of 16 bits")
  found = np.asarray(jaxgemm.matmul(a, b, implementation=kernel), np.float32)
  wanted = np.asarray(jnp.matmul(a, b), np.float32)
  np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted))
  np.testing.assert_array_equal(np.isposinf(found), np.isposinf(wanted))
  np.testing.assert_array_equal(np.isneginf(found), np.isneginf(wanted))
