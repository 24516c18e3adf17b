"""Factors of blocks of a product's operands, of sums of k tiles that are as long:

  out[b, i, j] = sum_s row_scales[b, s, i] * col_scales[b, s, j // 128]
                 * (lhs[b][:, block s] @ rhs[b][block s, :])[i, j]

TMA brings those of a k tile into the ring, beside the tiles of lhs and rhs: loads out of
the L2 by the consumers took as long as a k tile, one tile ahead (4096x4096x7168 on an
H100: 225 us, 175 with constants in their place).

Source: the block scales of DeepGEMM, and "DeepSeek-V3 technical report" (2024).
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import padding, tiles
from pallas_kernels.problem import SCALE_BLOCK, Problem
from pallas_kernels.scales import COLS, ROWS

NUM_COPIES = 2  # TMA copies of a k tile's factors.
_STEP = tiles.tma_stride_elems("float32")  # TMA's copies begin at such, and are such.
_ALIGNED = 32  # Factors: slots begin at multiples of 128 bytes.
_ROW_SLOTS, _COL_SLOTS = "row_scale_slots", "col_scale_slots"
Ref = Any


@dataclasses.dataclass(frozen=True)
class BlockScales:
  """Where a CTA's factors are.

  Attributes:
    tile_m: rows of its tile, which may begin anywhere.
  """

  tile_m: int

  @classmethod
  def of(cls, problem: Problem, config) -> BlockScales | None:
    """Those of a config's CTAs, or None: the problem has none."""
    return cls(config.tile_m) if problem.epilogue.scaling == "blocks" else None

  @property
  def num_rows(self) -> int:
    """Rows whose factors a slot holds."""
    return self.tile_m + _STEP

  @property
  def slot_bytes(self) -> int:
    return 4 * (tiles.round_up(self.num_rows, _ALIGNED) + _ALIGNED)

  def scratch(self, num_slots: int) -> dict[str, Any]:
    return {
        name: plgpu.SMEM((num_slots, tiles.round_up(size, _ALIGNED)), jnp.float32)
        for name, size in ((_ROW_SLOTS, self.num_rows), (_COL_SLOTS, _STEP))
    }

  def load(self, refs: Mapping[str, Ref], slot, barrier, *, batch, m, n, k) -> None:
    """Starts the copies of those of the k tile at (m, n, k); they arrive on `barrier`."""
    for name, slots, start, most in (
        (ROWS, _ROW_SLOTS, m, self.num_rows), (COLS, _COL_SLOTS, _block(n), _STEP)
    ):
      several, _, there = refs[name].shape
      size = min(most, there)  # What lies beyond an array is in nobody's result.
      plgpu.copy_gmem_to_smem(
          refs[name].at[
              batch if several > 1 else 0, _block(k),
              pl.ds(start - _skipped(start), size),
          ],
          refs[slots].at[slot, pl.ds(0, size)], barrier,
      )

  def read(
      self, refs: Mapping[str, Ref], slot, *, m, n, row, col, rows: int
  ) -> tuple[Any, Any]:
    """The factors of `rows` rows, and that of the columns, at (row, col) of the tile.

    The tile is at (m, n).
    """
    of_rows = plgpu.load(
        refs[_ROW_SLOTS].at[slot, pl.ds(_skipped(m) + row, rows)],
        layout=plgpu.Layout.WGMMA.reduce(1), optimized=False,
    )
    block = _block(n + col)  # A tile has several, of which the first is even, or one.
    return of_rows, refs[_COL_SLOTS][slot, _skipped(block)]


def _skipped(start):
  """Factors of a copy in front of those that are wanted from `start` on."""
  return lax.rem(jnp.int32(start), jnp.int32(_STEP))


def _block(element):
  return lax.div(jnp.int32(element), jnp.int32(SCALE_BLOCK))


def apply(factors: tuple[Any, Any], sums):
  """The factors that `read` gave times the sums [rows, cols] of that block."""
  of_rows, of_cols = factors
  return lax.broadcast_in_dim(of_rows * of_cols, sums.shape, (0,)) * sums


def prepare(
    row_scales: jax.Array, col_scales: jax.Array, config, *, emulated: bool
) -> dict[str, jax.Array]:
  """Factors [batch, k blocks, .] of rows, and of blocks of columns, as TMA reads them.

  For the emulator, which reads no more than there is, they are padded to whole tiles.
  """
  arrays = {}
  for name, x, most in ((ROWS, row_scales, config.tile_m), (COLS, col_scales, _STEP)):
    arrays[name] = padding.mend_stride(x, x.dtype)
    if emulated:
      size = tiles.round_up(x.shape[2], most * config.cluster) + most + _STEP
      pad = (0, size - x.shape[2], 0)
      arrays[name] = lax.pad(x, jnp.ones((), x.dtype), ((0, 0, 0), (0, 0, 0), pad))
  return arrays


def check(config, wg_tile: tuple[int, int]) -> str | None:
  """Why the sums of such tiles cannot be scaled by blocks, or None."""
  if config.promote != 1 or config.tile_k != SCALE_BLOCK:
    return (
        f"promote={config.promote}: factors of blocks of k are those of k tiles: want 1"
    )
  if SCALE_BLOCK % wg_tile[1]:
    return f"{wg_tile[1]} columns a warpgroup must divide the {SCALE_BLOCK} of a block"
  if (rows := BlockScales(config.tile_m).num_rows) > tiles.TMA_BOX_LIMIT:
    return f"tile_m={config.tile_m}: factors of {rows} rows are more than TMA copies"
  return None
