"""Quantisation to 8-bit floating point, with a scale for each block of an array.

  x ~ values * scale, every scale repeated over its block

The shape of a scale says what its blocks are: along each of the last two dimensions it
has 1 element, as many as x, or one for every 128 of x (the last of them for what is
left).
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax import lax
import jax.numpy as jnp

from jaxgemm.arguments import as_array, as_dtype, check_real
from pallas_kernels.problem import SCALE_BLOCK

FLOAT8 = ("float8_e4m3fn", "float8_e5m2")


def quantise(
    x: jax.Array, dtype="float8_e4m3fn", *, block: Sequence[int] = (-1, -1)
) -> tuple[jax.Array, jax.Array]:
  """Returns (values, scale): x over its scale, rounded to `dtype`.

  The largest magnitude of each block becomes the largest finite one of `dtype`.

  Args:
    x: [*batch, rows, cols], floating point.
    dtype: "float8_e4m3fn" or "float8_e5m2".
    block: rows and columns that share a scale: 1, 128, or -1 for all. (-1, -1) is one
      scale a matrix, (1, -1) one a row, (-1, 1) one a column, (128, 128) and (1, 128)
      blocks.
  Returns: values of x's shape, and the scale, float32, [*batch, ., .].
  Raises:
    TypeError: x is no array.
    ValueError: x is no matrix of floating point, or the dtype or block none of these.
  Example: values, scale = jaxgemm.quantise(w, block=(-1, 1))
  """
  x = as_array("quantise", "x", x)
  if x.ndim < 2:
    raise ValueError(f"quantise: x has shape {x.shape}; it must be a matrix or a batch")
  if not jnp.issubdtype(x.dtype, jnp.floating):
    raise ValueError(f"quantise: x is {x.dtype}; it must be floating point")
  if as_dtype("quantise: dtype", dtype).name not in FLOAT8:
    raise ValueError(f"quantise: dtype {dtype} must be one of {', '.join(FLOAT8)}")
  lengths = (1, SCALE_BLOCK, -1)
  if not isinstance(block, Sequence) or len(block) != 2 or any(
      length not in lengths for length in block
  ):
    raise ValueError(f"quantise: block {block!r} must be two of 1, {SCALE_BLOCK} and -1")
  size = jnp.abs(x.astype(jnp.float32))
  for axis, length in zip((-2, -1), block, strict=True):
    size = _largest(size, axis, length)
  scale = size / float(jnp.finfo(dtype).max)
  scale = jnp.where(scale > 0, scale, 1.0)
  return rounded(x, scale, dtype), scale


def rounded(x: jax.Array, scale: jax.Array, dtype) -> jax.Array:
  """x over its scale in `dtype`; what would be beyond its largest becomes that."""
  most = float(jnp.finfo(dtype).max)
  values = x.astype(jnp.float32) / expand(scale, x.shape)
  return jnp.clip(values, -most, most).astype(dtype)


def dequantise(values: jax.Array, scale: jax.Array, dtype=jnp.float32) -> jax.Array:
  """Returns values times their scale, in `dtype`; see `quantise`.

  Args:
    values: [*batch, m, n], of any real dtype.
    scale: [*batch, ., .] with 1, m or one for every 128 of m, by 1, n or one for every
      128 of n.
    dtype: of the result; the product is float32 before it is rounded to that.
  Returns: [*batch, m, n].
  Raises:
    TypeError: an operand is no array or is complex, or dtype is none.
    ValueError: values are no matrix, or the scale's shape does not fit them.
  """
  values = as_array("dequantise", "values", values)
  scale = as_array("dequantise", "scale", scale)
  dtype = as_dtype("dequantise: dtype", dtype)
  for name, x in (("values", values), ("scale", scale)):
    check_real("dequantise", name, x, "the result", jnp.float32)
  if values.ndim < 2:
    raise ValueError(
        f"dequantise: values have shape {values.shape}; they must be a matrix or a batch"
    )
  check_scale("dequantise: scale", scale, values.shape)
  return (values.astype(jnp.float32) * expand(scale, values.shape)).astype(dtype)


def expand(scale: jax.Array, shape: Sequence[int]) -> jax.Array:
  """The scale, repeated over its blocks, so that it broadcasts to `shape`."""
  for axis in (-2, -1):
    if scale.shape[axis] not in (1, shape[axis]):
      scale = jnp.repeat(scale, SCALE_BLOCK, axis=axis)
      scale = lax.slice_in_dim(scale, 0, shape[axis], axis=axis % scale.ndim)
  return scale


def num_blocks(size: int) -> int:
  """Blocks of 128 of `size` elements, the last of what is left."""
  return -(-size // SCALE_BLOCK)


def check_scale(name: str, scale: jax.Array, shape: Sequence[int]) -> None:
  """Raises ValueError unless the scale's shape fits an operand of `shape`."""
  fits = scale.ndim == len(shape) and scale.shape[:-2] in (
      tuple(shape[:-2]), (1,) * (len(shape) - 2)
  )
  for axis in (-2, -1):
    fits = fits and scale.shape[axis] in (
        1, shape[axis], num_blocks(shape[axis])
    )
  if not fits:
    raise ValueError(
        f"{name} has shape {scale.shape}, its operand {tuple(shape)}: along each of the"
        " last two dimensions it must have 1 element, as many, or one for every"
        f" {SCALE_BLOCK}; along the others as many"
    )


def _largest(size: jax.Array, axis: int, length: int) -> jax.Array:
  """The largest of every `length` along an axis, of all for -1."""
  if length == 1:
    return size
  if length == -1:
    return jnp.max(size, axis=axis, keepdims=True, initial=0.0)  # There may be none.
  axis %= size.ndim
  blocks = num_blocks(size.shape[axis])
  pad = [(0, 0)] * size.ndim
  pad[axis] = (0, blocks * length - size.shape[axis])
  size = jnp.pad(size, pad)
  shape = (*size.shape[:axis], blocks, length, *size.shape[axis + 1 :])
  return jnp.max(size.reshape(shape), axis=axis + 1, initial=0.0)
