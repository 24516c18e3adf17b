"""Partial sums of split-k: added in order, rounded once, then the epilogue."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import partial_sums
from pallas_kernels.problem import Epilogue
from tests.kernel_cases import make_problem

SPLITS = 5


def _parts(rng, *shape) -> jax.Array:
  return jnp.asarray(rng.standard_normal(shape), jnp.float32)


def _added(parts, problem, *others, **fields) -> jax.Array:
  run = jax.jit(
      lambda parts, others: partial_sums.add_up(parts, others, problem, SPLITS, **fields)
  )
  return run(parts, others)


def test_rounding_errors_are_given_back():
  """1 and many parts too small to change it: their sum does."""
  problem = make_problem(8, 8, 64, out_dtype="float32")
  parts = jnp.full((SPLITS, 8, 8), 2.0**-25).at[0].set(1.0)
  np.testing.assert_array_equal(_added(parts, problem), np.float32(1 + 2.0**-23))


@pytest.mark.parametrize("transposed", [False, True])
def test_what_lies_beyond_the_result_does_not_count(rng, transposed):
  """Of a batch, whose parts have rows and columns of padding, which hold nan."""
  problem = make_problem(10, 13, 64, batch=3, out_dtype="float32")
  rows, cols = (13, 10) if transposed else (10, 13)
  parts = _parts(rng, 3 * SPLITS, rows, 16)
  found = _added(parts.at[:, :, cols:].set(jnp.nan), problem, transposed=transposed)
  truth = np.asarray(parts, np.float64).reshape(3, SPLITS, rows, 16).sum(1)[..., :cols]
  if transposed:
    truth = truth.swapaxes(1, 2)
  np.testing.assert_allclose(found, truth, rtol=2.0**-23)


def test_epilogue(rng):
  epilogue = Epilogue(
      alpha=0.5, beta=2.0, c_dtype="float32", has_bias=True, activation="relu", saves=True
  )
  problem = make_problem(8, 16, 64, out_dtype="float32", epilogue=epilogue)
  parts, c = _parts(rng, SPLITS, 8, 16), _parts(rng, 1, 8, 16)
  bias = _parts(rng, 1, 1, 16)
  out, entering = _added(parts, problem, c, bias)

  def expected(dtype):
    sums = np.asarray(parts, dtype).sum(0)
    z = dtype(0.5) * sums + np.asarray(bias[0], dtype)
    return np.maximum(z, dtype(0)) + dtype(2) * np.asarray(c[0], dtype), z

  results = zip((out, entering), expected(np.float64), expected(np.float32), strict=True)
  for found, truth, baseline in results:
    np.testing.assert_array_less(
        np.abs(found[0] - truth).max(), 2 * np.abs(baseline - truth).max()
    )


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_stays(rng, value):
  problem = make_problem(8, 8, 64)
  parts = _parts(rng, SPLITS, 8, 8).at[2, 3, 4].set(value)
  found = np.asarray(_added(parts, problem), np.float32)[0]
  assert np.array_equal(found[3, 4], value, equal_nan=True)
  assert np.isfinite(np.delete(found.ravel(), 3 * 8 + 4)).all()


@pytest.mark.parametrize(
    "platform", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_result_is_rounded_whatever_follows(rng, platform, dtype):
  """Also where XLA could keep the float32 sum, for a conversion behind it."""
  problem = make_problem(8, 8, 64, dtype=dtype)
  parts = jax.device_put(_parts(rng, SPLITS, 8, 8), jax.devices(platform)[0])
  run = jax.jit(
      lambda parts: partial_sums.add_up(parts, (), problem, SPLITS).astype(jnp.float32)
  )
  assert "stablehlo.optimization_barrier" in run.lower(parts).as_text()
  np.testing.assert_array_equal(run(parts), _added(parts, problem).astype(jnp.float32))
