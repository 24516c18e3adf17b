"""Factors of a product: of its rows and columns, or of blocks of its operands.

Of rows and columns, before the epilogue:

  out[b, i, j] = row_scales[b, :, i] * col_scales[b, :, j] * (lhs[b] @ rhs[b])[i, j]

Several factors of each may stand for one that float32 cannot hold. They are taken in
turn, a row's first, then a column's: so neither alone brings a sum beyond float32.

Of blocks, where the sum of a k tile is promoted, which is as long as a block:

  out[b, i, j] = sum_s row_scales[b, s, i] * col_scales[b, s, j // 128]
                 * (lhs[b][:, block s] @ rhs[b][block s, :])[i, j]

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

from pallas_kernels import tiles
from pallas_kernels.problem import SCALE_BLOCK

ROWS, COLS = "row_scales", "col_scales"
Ref = Any


@dataclasses.dataclass(frozen=True)
class Scales:
  """The static facts of a product's factors.

  Attributes:
    count: factors of each row, and of each column.
    rows_batched, cols_batched: False where they serve every product of the batch.
  """

  count: int
  rows_batched: bool
  cols_batched: bool

  def apply(self, piece, refs: Mapping[str, Ref], *, batch, row, col):
    """The factors times `piece`, sums [rows, cols] at (row, col) of product `batch`."""
    for i in range(self.count):
      for name, dim, start, batched in (
          (ROWS, 0, row, self.rows_batched), (COLS, 1, col, self.cols_batched)
      ):
        factors = plgpu.load(
            refs[name].at[batch if batched else 0, i, pl.ds(start, piece.shape[dim])],
            layout=plgpu.Layout.WGMMA.reduce(1 - dim), optimized=False,
        )
        piece = piece * lax.broadcast_in_dim(factors, piece.shape, (dim,))
    return piece


def make_scales(
    row_scales: jax.Array, col_scales: jax.Array, config
) -> tuple[Scales, dict[str, jax.Array]]:
  """The facts, and the arrays [batch, count, .] padded to whole tiles of `config`."""
  arrays = {}
  for name, x, tile in (
      (ROWS, row_scales, config.tile_m * config.cluster_m),
      (COLS, col_scales, config.tile_n * config.cluster_n),
  ):
    pad = tiles.round_up(x.shape[2], tile) - x.shape[2]
    arrays[name] = lax.pad(x, jnp.ones((), x.dtype), ((0, 0, 0), (0, 0, 0), (0, pad, 0)))
  facts = Scales(row_scales.shape[1], row_scales.shape[0] > 1, col_scales.shape[0] > 1)
  return facts, arrays


def pad_block_scales(
    row_scales: jax.Array, col_scales: jax.Array, config
) -> dict[str, jax.Array]:
  """Factors [batch, k blocks, .] of rows, padded to whole tiles, and of blocks of cols.

  Blocks of columns are padded to those of whole tiles, too.
  """
  padded = {}
  for name, x, tile in (
      (ROWS, row_scales, config.tile_m * config.cluster_m),
      (COLS, col_scales, tiles.cdiv(config.tile_n, SCALE_BLOCK) * config.cluster_n),
  ):
    pad = tiles.round_up(x.shape[2], tile) + tile - x.shape[2]
    padded[name] = lax.pad(x, jnp.ones((), x.dtype), ((0, 0, 0), (0, 0, 0), (0, pad, 0)))
  return padded


@dataclasses.dataclass(frozen=True)
class BlockFactors:
  """The factors of a warpgroup's sums of k tiles, in the order of k.

  Loaded a k tile ahead (`load`, then `apply`), so that no product waits for them: from
  the L2 they take longer than the tensor cores do.

  Attributes:
    refs: the arrays of `pad_block_scales`.
    shape: rows and columns of the sums.
    batch, row, col: of which product, and where they begin.
  """

  refs: Mapping[str, Ref]
  shape: tuple[int, int]
  batch: Any
  row: Any
  col: Any

  def load(self, block) -> tuple[Any, Any]:
    """Those of k block `block`: of each row, and of the columns."""
    rows_of, cols_of = (
        self.refs[name].at[self.batch if self.refs[name].shape[0] > 1 else 0, block]
        for name in (ROWS, COLS)
    )
    rows = plgpu.load(
        rows_of.at[pl.ds(self.row, self.shape[0])], layout=plgpu.Layout.WGMMA.reduce(1),
        optimized=False,
    )
    return rows, cols_of[lax.div(self.col, jnp.int32(SCALE_BLOCK))]

  def apply(self, factors: tuple[Any, Any], sums):
    """The factors that `load` gave times the sums [rows, cols] of that block."""
    rows, of_cols = factors
    return lax.broadcast_in_dim(rows * of_cols, self.shape, (0,)) * sums


def check_blocks(wg_tile: tuple[int, int], promote: int, tile_k: int) -> str | None:
  """Why the sums of such tiles cannot be scaled by blocks, or None."""
  if promote != 1 or tile_k != SCALE_BLOCK:
    return f"promote={promote}: factors of blocks of k are those of k tiles: want 1"
  if SCALE_BLOCK % wg_tile[1]:
    return f"{wg_tile[1]} columns a warpgroup must divide the {SCALE_BLOCK} of a block"
  return None
