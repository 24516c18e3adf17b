"""Which operands TMA cannot take as they are, and what a pass makes of them.

TMA wants rows that begin a multiple of 16 bytes apart; an operand that it tiles as it
copies (see `operand_tiles`) has to fit the tiles as well. Zeros behind its rows, or
below the last, do not change the product.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax import lax
import jax.numpy as jnp

from pallas_kernels import pads, tiles


def needs_padding(rows: int, cols: int, dtype, way: str) -> bool:
  """Whether TMA cannot take an operand stored [rows, cols] as it is."""
  if cols % tiles.tma_stride_elems(dtype):
    return True
  if way != "tiled":
    return False
  elems = tiles.swizzle_elems(dtype)
  return bool((rows % 8 and rows > 8) or (cols % elems and cols > elems))


def padded_shape(shape: tuple[int, ...], dtype, way: str) -> tuple[int, int, int]:
  """The shape that TMA takes in place of an operand's [batch, rows, cols].

  See `needs_padding`. Most need only their row stride mended; one that is read tiled
  may need both dimensions.
  """
  batch, rows, cols = shape
  elems = tiles.swizzle_elems(dtype)
  if cols <= elems:
    elems = tiles.tma_stride_elems(dtype)
  if rows > 8 and way == "tiled":
    rows = tiles.round_up(rows, 8)
  return batch, rows, tiles.round_up(cols, elems)


def pad_for_tma(x: jax.Array, dtype, way: str) -> jax.Array:
  """Pads an operand that TMA cannot take as it is. Zeros do not change the product."""
  shape = padded_shape(x.shape, dtype, way)
  widths = [(0, new - old, 0) for old, new in zip(x.shape, shape, strict=True)]
  return lax.pad(x, jnp.zeros((), x.dtype), widths)


def pad_all(
    operands: list[tuple[jax.Array, ...]], dtypes: Sequence[str],
    ways: Sequence[str | None], *, by_kernel: bool,
) -> list[tuple[jax.Array, ...]]:
  """The operands, of the arrays of which those with a way are padded for it.

  By one kernel of ours, if a chip runs it and it serves them all; or by XLA, in the pass
  that makes the arrays, if one does.
  """
  arrays, shapes = [], []
  for its, dtype, way in zip(operands, dtypes, ways, strict=True):
    if way is not None:
      arrays += its
      shapes += [padded_shape(x.shape, dtype, way) for x in its]
  if not arrays:
    return operands
  served = all(map(pads.serves, shapes, (x.dtype.itemsize for x in arrays)))
  if not (by_kernel and served):
    return [
        its if way is None else tuple(pad_for_tma(x, dtype, way) for x in its)
        for its, dtype, way in zip(operands, dtypes, ways, strict=True)
    ]
  padded = iter(pads.pad(arrays, shapes))
  return [
      its if way is None else tuple(next(padded) for _ in its)
      for its, way in zip(operands, ways, strict=True)
  ]


def mend_stride(x: jax.Array, dtype) -> jax.Array:
  """x, padded where an array of `dtype` of its shape had a stride that TMA refuses.

  Before the elements are converted, so that one pass does both.
  """
  if x.shape[-1] % tiles.tma_stride_elems(dtype):
    return pad_for_tma(x, dtype, "tiled")
  return x
