"""Meshes, shapes and functions that the tests of sharded products share."""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
import numpy as np

from experiments.collectives import collectives

MATRICES = ((64, 128), (128, 32))
BATCHES = ((4, 16, 128), (4, 128, 32))
FOLDED = ((4, 16, 128), (128, 32))
SHARED = ((16, 128), (4, 128, 32))


def make_mesh(axis_type=AxisType.Auto, shape=(2, 2)) -> jax.sharding.Mesh:
  devices = np.array(jax.devices("cpu")[:4]).reshape(shape)
  names = ("x", "y")[: len(shape)]
  return jax.sharding.Mesh(devices, names, axis_types=(axis_type,) * len(shape))


def collectives_of(function, *args, **options) -> Counter:
  """Kinds and sorted shapes of the collectives in the compiled text."""
  return collectives(jax.jit(function, **options).lower(*args).compile().as_text())


def loss_of(matmul):
  """A sum of sines: no operand's gradient is trivial."""
  return lambda a, b: jnp.sum(jnp.sin(matmul(a, b)))
