"""Operands in 8 bits with scales, and what they stand for."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"


def normal(rng, *shape) -> jax.Array:
  return jnp.asarray(rng.standard_normal(shape), jnp.float32)


def wide(x) -> np.ndarray:
  return np.asarray(x).astype(np.float64)


def of(values, scale) -> np.ndarray:
  """What values and scale stand for, in float64."""
  for axis in (-2, -1):
    if scale.shape[axis] not in (1, values.shape[axis]):
      scale = np.repeat(scale, 128, axis=axis).take(range(values.shape[axis]), axis)
  return wide(values) * wide(scale)
