"""Pieces of an array, 64 rows x up to 128 bytes, and their slots in shared memory.

Through these they go from registers to GMEM, or come from there. `epilogue` says what the
ways are; `cotangents` and `losses` take them, too.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import run_stores, sector_stores, tiles

PIECE_ROWS = 64
NUM_SLOTS = 2
WIDE_COLS = 128  # Of a piece that threads store, at most: 256 were no faster.
_LEAST_BYTES = 32  # Of a piece's rows: Mosaic has no narrower swizzle.
Ref = Any


def piece_cols(tile_n: int, itemsize: int, least: int) -> list[int]:
  """Columns that a piece may have, the most first: 128 bytes, or a half or less.

  Each piece costs a barrier, and short rows fill no line of memory. So pieces may have
  up to a third of the tile's columns in common.
  """
  found = [tiles.SWIZZLE_BYTES // itemsize >> i for i in range(4)]
  found = [
      cols for cols in found
      if cols * least >= _LEAST_BYTES and cols <= tile_n
      and 3 * (tiles.round_up(tile_n, cols) - tile_n) <= tile_n
  ]
  return found[:1] if tile_n % found[0] == 0 else found


def wide_cols(tile_n: int) -> int:
  """Columns of pieces that threads store, where few pieces matter."""
  count = tiles.cdiv(tile_n, WIDE_COLS)
  return tiles.round_up(tiles.cdiv(tile_n, count), 8)


def sector_cols(tile_n: int, halo: int) -> int:
  """Columns of pieces that have `halo` in common, as few of them as wide ones can be."""
  count = tiles.cdiv(tile_n - halo, WIDE_COLS - halo)
  return tiles.round_up(tiles.cdiv(tile_n - halo, count), 8) + halo


def piece_rows(tile_n: int) -> list[int]:
  """The same, of rows of a piece that is stored transposed."""
  least = tiles.cdiv(tile_n, PIECE_ROWS)
  found = {
      tiles.round_up(tiles.cdiv(tile_n, count), 8)
      for count in range(least, max(least, tile_n // 16) + 1)
  }
  return [PIECE_ROWS] if tile_n % PIECE_ROWS == 0 else sorted(found, reverse=True)


def starts(size: int, step: int) -> list[tuple[int, int]]:
  """(where it begins, what the last one has of it) of pieces of `step` of `size`."""
  begin = [min(start, size - step) for start in range(0, size, step)]
  return [(start, i * step - start) for i, start in enumerate(begin)]


@dataclasses.dataclass(frozen=True)
class Staging:
  """How pieces of an array of dtype `dtype` stand in shared memory.

  Attributes:
    way: "flat", "masked", "sectors", "run" or "tiled".
    cols: columns of a piece.
    num_wgs: warpgroups that store.
    rows: rows of a piece.
    num_slots: pieces of each warpgroup that have room at once.
  """

  way: str
  dtype: str
  cols: int
  num_wgs: int
  rows: int = PIECE_ROWS
  num_slots: int = NUM_SLOTS

  @property
  def swizzle(self) -> int:
    return self.cols * jnp.dtype(self.dtype).itemsize

  @property
  def pitch(self) -> int:
    """Row pitch of a masked slot: 16 bytes more, against bank conflicts.

    So that eight rows begin in different banks, it is an odd number of 16 bytes.
    """
    unit = tiles.tma_stride_elems(self.dtype)
    return unit * (tiles.cdiv(self.cols, unit) // 2 * 2 + 1)

  @property
  def is_by_threads(self) -> bool:
    """Whether threads read the slots, and store what they read."""
    return self.way in ("masked", "sectors")

  @property
  def _shape_for_threads(self) -> tuple[int, int, int]:
    spare = sector_stores.SPARE_ROWS if self.way == "sectors" else 0
    return self.num_wgs, PIECE_ROWS + spare, self.pitch

  @property
  def num_bytes(self) -> int:
    itemsize = jnp.dtype(self.dtype).itemsize
    if self.is_by_threads:
      return tiles.round_up(math.prod(self._shape_for_threads) * itemsize, 1024)
    if self.way == "run":
      return tiles.round_up(self.num_wgs * self._run * itemsize, 1024)
    return self.num_wgs * self.num_slots * self.rows * self.cols * itemsize

  @property
  def _run(self) -> int:
    """Elements of a run: of all columns that a tile may have."""
    return run_stores.slot_elements(PIECE_ROWS, self.cols, self.dtype)

  def slots(self) -> Any:
    dtype = jnp.dtype(self.dtype)
    if self.is_by_threads:
      return plgpu.SMEM(self._shape_for_threads, dtype)
    if self.way == "run":
      return plgpu.SMEM((self.num_wgs, self._run), dtype)
    shape = (self.num_wgs, self.num_slots, self.rows, self.cols)
    transforms = tiles.swizzled(dtype, self.swizzle)
    tiled = plgpu.SMEM(shape, dtype, transforms=transforms)
    if self.way == "tiled":
      return tiled
    return plgpu.RefUnion(
        plgpu.SMEM(shape, dtype, transforms=transforms[1:]), tiled
    )

  def views(self, slots: Ref) -> tuple[Ref, Ref]:
    """(the view that TMA uses, the view that registers use)."""
    return (slots[0], slots[1]) if self.way == "flat" else (slots, slots)

  def write(self, piece, slots: Ref, wg, slot, *, transposed: bool) -> None:
    """Writes a piece into a slot of a warpgroup, for TMA to copy.

    All threads have to know before that the slot is free; `commit_smem` comes behind. On
    the chip neither has a barrier here: Pallas would put two around each of its own.
    """
    to = self.views(slots)[1].at[wg, slot]
    if self.way == "tiled":
      to = to.transpose((1, 0)) if transposed else to
      to[...] = piece
      return
    in_smem = plgpu.RefType(tiles.swizzled(self.dtype, self.swizzle))

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, in_smem))
    def store(_, piece, to):
      if transposed:
        to = mgpu.memref_transpose(to, (1, 0, 3, 2))
      piece.store_tiled(to, swizzle=self.swizzle)

    store(piece, to)
