"""Operands of a problem, drawn in several ways."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxgemm.autotune.operands import Inputs, operand_types
from pallas_kernels.problem import Problem

_LARGEST_INTEGER = 8  # Exact in every dtype, as are its products.
Draw = Callable[[jax.Array, tuple[int, ...], jnp.dtype], jax.Array]


def _integers(key, shape, dtype):
  drawn = jax.random.randint(key, shape, -_LARGEST_INTEGER, _LARGEST_INTEGER + 1)
  return drawn.astype(dtype)


def _uniform(key, shape, dtype):
  return jax.random.uniform(key, shape, dtype)


DRAWS: dict[str, Draw] = {
    "normal": jax.random.normal,
    "uniform": _uniform,  # From 0 to 1.
    "integers": _integers,
    "zeros": lambda key, shape, dtype: jnp.zeros(shape, dtype),
}


def make_inputs(problem: Problem, how: str) -> Callable[[jax.Array], Inputs]:
  """Returns a jitted function of a PRNG key: operands, made on the device.

  `how` is a key of DRAWS.
  """
  types, draw = operand_types(problem), DRAWS[how]

  @jax.jit
  def inputs(key: jax.Array) -> Inputs:
    keys = jax.random.split(key, len(types))
    return tuple(draw(keys[i], x.shape, x.dtype) for i, x in enumerate(types))

  return inputs
