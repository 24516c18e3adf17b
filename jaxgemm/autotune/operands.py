"""The operands of one problem: their types as stored, and random ones."""

from __future__ import annotations

from collections.abc import Callable
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from jaxgemm.quantisation import num_blocks
from pallas_kernels.problem import Problem

# lhs, rhs and, where there are some, c, the scales of both, the rows of each group.
Inputs = tuple[jax.Array, ...]
_EVENNESS = 4.0  # Of a Dirichlet distribution: groups differ by half their mean.


def stored_shapes(problem: Problem) -> tuple[tuple[int, ...], ...]:
  """Returns the shapes of lhs, rhs and maybe c as stored.

  None has a batch dimension if the batch is one product, nor has an operand that
  serves the whole batch. What has scales, or a matrix for each group, has always one.
  """
  shapes = [
      problem.lhs_shape if problem.lhs_batched else problem.lhs_shape[1:],
      problem.rhs_shape if problem.rhs_batched else problem.rhs_shape[1:],
  ]
  if problem.epilogue.has_c:
    shapes.append(problem.out_shape)
  if _is_alone(problem):
    shapes = [shape[-2:] for shape in shapes]
  return tuple(shapes)


def out_shape(problem: Problem) -> tuple[int, ...]:
  """Returns the shape of the result; it has a batch dimension as `stored_shapes` say."""
  if problem.grouped == "m" or _is_alone(problem):
    return problem.out_shape[1:]
  return problem.out_shape


def _is_alone(problem: Problem) -> bool:
  """Whether its arrays are matrices: of one product of gemm_p."""
  return problem.batch == 1 and not (problem.grouped or has_scales(problem))


def has_scales(problem: Problem) -> bool:
  return problem.epilogue.scaling != "none"


def _scale_shapes(problem: Problem) -> list[tuple[int, ...]]:
  """Of lhs and of rhs, as the primitives take them."""
  if not has_scales(problem):
    return []
  lead = () if problem.grouped else (problem.batch,)
  rows, cols = (*lead, problem.m), (problem.batch, problem.n)
  if problem.epilogue.scaling == "blocks":
    blocks = num_blocks(problem.k)
    rows = *lead, blocks, problem.m
    cols = problem.batch, blocks, num_blocks(problem.n)
  return [rows, cols]


def group_sizes(problem: Problem) -> np.ndarray:
  """Returns the rows of each group, the same whenever they are asked for."""
  rows = problem.m if problem.grouped == "m" else problem.k
  return uneven_sizes(str(problem), rows, problem.batch)


def uneven_sizes(name: str, rows: int, groups: int) -> np.ndarray:
  """Returns the rows of each group, drawn by the name of what has them."""
  rng = np.random.default_rng(zlib.crc32(name.encode()))
  shares = rng.dirichlet(np.full(groups, _EVENNESS))
  return rng.multinomial(rows, shares).astype(np.int32)


def operand_types(problem: Problem) -> tuple[jax.ShapeDtypeStruct, ...]:
  """Returns the types of the operands as stored, in the order of `Inputs`."""
  shapes = stored_shapes(problem)
  dtypes = [*problem.stored_dtypes, problem.epilogue.c_dtype][: len(shapes)]
  found = list(zip(shapes, dtypes, strict=True))
  found += [(shape, "float32") for shape in _scale_shapes(problem)]
  if problem.grouped:
    found.append(((problem.batch,), "int32"))
  return tuple(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in found)


def make_inputs(problem: Problem) -> Callable[[jax.Array], Inputs]:
  """Returns a jitted function of a PRNG key: operands, made on the device.

  They are normal, or integers of all sizes, but for the rows of groups.
  """
  types, rows = operand_types(problem), ()
  if problem.grouped:
    types, rows = types[:-1], (group_sizes(problem),)

  @jax.jit
  def inputs(key: jax.Array) -> Inputs:
    keys = jax.random.split(key, len(types))
    return (*(drawn(keys[i], operand) for i, operand in enumerate(types)), *rows)

  return inputs


def drawn(key: jax.Array, operand: jax.ShapeDtypeStruct) -> jax.Array:
  """Returns an array of this type: normal, or of integers of all sizes."""
  if operand.dtype == jnp.int8:
    return jax.random.randint(key, operand.shape, -128, 128, jnp.int8)
  if operand.dtype.itemsize == 1:
    return jax.random.normal(key, operand.shape, jnp.bfloat16).astype(operand.dtype)
  return jax.random.normal(key, operand.shape, operand.dtype)
