"""A use of exact products: a linear solve, refined from its residuals."""

from __future__ import annotations

import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxgemm

STEPS = 6


def ill_conditioned(rng, n: int, condition: float) -> np.ndarray:
  """A matrix with singular values from 1 to 1 / condition."""
  left, right = (np.linalg.qr(rng.standard_normal((n, n)))[0] for _ in range(2))
  return (left * np.geomspace(1, 1 / condition, n)) @ right


def refined(matmul, a, rhs) -> list[float]:
  """Relative residuals, in float64, of a solve by an inverse of 16 bits' accuracy.

  Each step solves for what is left of the right-hand side.
  """
  wide = np.asarray(a).astype(np.float64)
  # What a low-precision factorisation would give: off by 1e-2 of what it is.
  inverse = np.linalg.inv(wide + 1e-6 * np.sign(wide))
  inverse = jnp.asarray(inverse, jnp.float32)
  x, found = jnp.zeros_like(rhs), []
  for _ in range(STEPS):
    residual = rhs - matmul(a, x)
    x = x + lax.dot(inverse, residual, precision="highest")
    left = np.asarray(rhs).astype(np.float64) - wide @ np.asarray(x).astype(np.float64)
    scale = np.linalg.norm(wide) * np.linalg.norm(np.asarray(x).astype(np.float64))
    found.append(float(np.linalg.norm(left) / scale))
  return found


def solve(n: int, num_rhs: int, **fields) -> dict[str, list[float]]:
  rng = np.random.default_rng(0)
  a = jnp.asarray(ill_conditioned(rng, n, 1e4), jnp.float32)
  rhs = jnp.asarray(rng.standard_normal((n, num_rhs)), jnp.float32)
  rounded = lambda x: lax.reduce_precision(x, 8, 10)
  products = {
      "ours": functools.partial(jaxgemm.matmul, precision="highest", **fields),
      "xla": functools.partial(jnp.matmul, precision="highest"),
      "tf32": lambda a, b: jnp.matmul(rounded(a), rounded(b), precision="highest"),
  }
  return {name: refined(jax.jit(f), a, rhs) for name, f in products.items()}


def _converges_as_far(found: dict[str, list[float]]) -> None:
  assert found["ours"][-1] <= 1.5 * found["xla"][-1]
  assert found["ours"][-1] < 0.2 * found["ours"][0]  # The steps had something to do.
  assert found["tf32"][-1] > 10 * found["ours"][-1]  # And needed exact products.


@pytest.mark.slow
def test_refinement_in_emulation():
  with jaxgemm.emulate():
    _converges_as_far(solve(128, 64, implementation="persistent"))


@pytest.mark.gpu
def test_refinement():
  _converges_as_far(solve(2048, 2048))
