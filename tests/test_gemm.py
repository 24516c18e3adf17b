"""alpha * (a @ b) + beta * c: what is read, added and rounded, once."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxgemm
from jaxgemm import reference
from tests.product_cases import assert_close, normal, products


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int32"])
@pytest.mark.parametrize("factors", [(1, 0), (2, 0), (1, 1), (0.5, -2.0)], ids=str)
@pytest.mark.parametrize("traced", [False, True], ids=["static", "traced"])
def test_gemm(dtype, factors, traced, rng):
  a, b, c = (
      (8 * normal(rng, *shape)).astype(dtype) for shape in ((8, 16), (16, 4), (8, 4))
  )
  alpha, beta = factors
  if dtype == "int32":
    alpha, beta = int(2 * alpha), int(beta)
  truth = reference.matmul(a, b, c, alpha=alpha, beta=beta)
  if traced:
    f = jax.jit(lambda a, b, c, x, y: jaxgemm.gemm(a, b, c, alpha=x, beta=y))
    result = f(a, b, c, alpha, beta)
  else:
    result = jaxgemm.gemm(a, b, c, alpha=alpha, beta=beta)
  if dtype == "int32":
    assert result.dtype == jnp.int32 and np.array_equal(result, truth)
  else:
    assert_close(result, truth, dtype)


def test_gemm_fuses_python_numbers(rng):
  a, b, c = normal(rng, 4, 5), normal(rng, 5, 6), normal(rng, 4, 6, dtype="bfloat16")
  (product,) = products(lambda *x: jaxgemm.gemm(*x, alpha=2, beta=np.float32(3)), a, b, c)
  assert (product.alpha, product.beta) == (2.0, 3.0)
  (product,) = products(lambda *x: jaxgemm.gemm(*x, alpha=jnp.float32(2)), a, b)
  assert (product.alpha, product.beta) == (1.0, 0.0)


def test_gemm_broadcasts(rng):
  a, b, c = normal(rng, 2, 1, 4, 5), normal(rng, 3, 5, 6), normal(rng, 6)
  result = jaxgemm.gemm(a, b, c, beta=1)
  truth = reference.matmul(a, b, c, beta=1)
  assert result.shape == (2, 3, 4, 6)
  assert_close(result, truth, "float32")


def test_gemm_rounds_once(rng):
  """With 16-bit results, alpha, beta and c act before the rounding."""
  a, b, c = (normal(rng, 64, 64, dtype="bfloat16") for _ in range(3))
  truth = reference.matmul(a, b, c, alpha=3.0, beta=-3.0)
  once = np.asarray(jnp.asarray(truth, "float32").astype("bfloat16"))
  for alpha in (3.0, jnp.float32(3.0)):
    result = jaxgemm.gemm(a, b, c, alpha=alpha, beta=-3.0)
    same = np.mean(np.asarray(result) == once)
    assert same > 0.99


def test_gemm_reads_no_c_where_beta_is_0(rng):
  a = normal(rng, 4, 4)
  result = jaxgemm.gemm(a, a, jnp.full((4, 4), jnp.nan))
  assert np.all(np.isfinite(result))


def test_eight_bits_with_c_and_alpha_are_exact():
  """Sums of int8 wrap, and are no float32 on the way."""
  a, b = jnp.full((4, 64), 100, jnp.int8), jnp.full((64, 4), 100, jnp.int8)
  c = jnp.full((4, 4), 2**30 + 1, jnp.int32)
  gemm = functools.partial(jaxgemm.gemm, preferred_element_type="int32")
  assert gemm(a, b, c, beta=1)[0, 0] == 2**30 + 1 + 640_000
  found = jax.vmap(lambda c: gemm(a, b, c, beta=1))(jnp.stack([c, 0 * c]))
  assert found[:, 0, 0].tolist() == [2**30 + 1 + 640_000, 640_000]
  most = jnp.full((1, 2**16), 127, jnp.int8)
  wrapped = np.array(3 * 127 * 127 * 2**16).astype(np.int32)
  assert gemm(most, most.T, alpha=3)[0, 0] == wrapped


@pytest.mark.parametrize("alpha", [1 / 64, jnp.float32(1 / 64)], ids=["known", "array"])
def test_eight_bits_of_a_result_are_rounded_last(alpha):
  """4096 is beyond float8_e4m3fn, and 64 is not."""
  a, b = jnp.full((2, 64), 8, "float8_e4m3fn"), jnp.full((64, 2), 8, "float8_e4m3fn")
  found = jaxgemm.gemm(a, b, alpha=alpha)
  assert found.dtype == a.dtype and found.astype("float32").tolist() == [[64.0] * 2] * 2
  c = jnp.full((2, 2), -62.0)
  assert jaxgemm.gemm(a, b, c, alpha=alpha, beta=1)[0, 0] == 2.0
