"""The operands of one problem: their types as stored, and random ones."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.problem import Problem

Inputs = tuple[jax.Array, ...]  # lhs, rhs and, where the epilogue has one, c


def stored_shapes(problem: Problem) -> tuple[tuple[int, ...], ...]:
  """Returns the shapes of lhs, rhs and maybe c as stored.

  None has a batch dimension if the batch is one product, nor has an operand that
  serves the whole batch.
  """
  shapes = [
      problem.lhs_shape if problem.lhs_batched else problem.lhs_shape[1:],
      problem.rhs_shape if problem.rhs_batched else problem.rhs_shape[1:],
  ]
  if problem.epilogue.has_c:
    shapes.append(problem.out_shape)
  if problem.batch == 1:
    shapes = [shape[-2:] for shape in shapes]
  return tuple(shapes)


def operand_types(problem: Problem) -> tuple[jax.ShapeDtypeStruct, ...]:
  """Returns the types of lhs, rhs and maybe c as stored."""
  dtypes = [*problem.stored_dtypes, problem.epilogue.c_dtype]
  return tuple(
      jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
      for shape, dtype in zip(stored_shapes(problem), dtypes, strict=False)
  )


def make_inputs(problem: Problem) -> Callable[[jax.Array], Inputs]:
  """Returns a jitted function of a PRNG key: operands, made on the device.

  They are normal, or integers of all sizes.
  """
  types = operand_types(problem)

  @jax.jit
  def inputs(key: jax.Array) -> Inputs:
    keys = jax.random.split(key, len(types))
    return tuple(drawn(keys[i], operand) for i, operand in enumerate(types))

  return inputs


def drawn(key: jax.Array, operand: jax.ShapeDtypeStruct) -> jax.Array:
  """Returns an array of this type: normal, or of integers of all sizes."""
  if operand.dtype == jnp.int8:
    return jax.random.randint(key, operand.shape, -128, 128, jnp.int8)
  if operand.dtype.itemsize == 1:
    return jax.random.normal(key, operand.shape, jnp.bfloat16).astype(operand.dtype)
  return jax.random.normal(key, operand.shape, operand.dtype)
