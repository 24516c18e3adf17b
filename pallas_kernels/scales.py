"""Factors of a product's rows and columns, before the epilogue:

  out[b, i, j] = row_scales[b, :, i] * col_scales[b, :, j] * (lhs[b] @ rhs[b])[i, j]

Several factors of each may stand for one that float32 cannot hold. They are taken in
turn, a row's first, then a column's: so neither alone brings a sum beyond float32.

Factors of blocks of k are in `block_scales`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import dataclasses
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import l2_prefetch, tiles

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

  def prefetch(
      self, refs: Mapping[str, Ref], shape: tuple[int, int], *, batch, row, col
  ) -> None:
    """Asks the memory for the factors of a tile of `shape` at (row, col)."""
    for factors, dim, start in self._factors(refs, batch, row, col):
      l2_prefetch.prefetch(factors, start, shape[dim])

  def apply(self, piece, refs: Mapping[str, Ref], *, batch, row, col):
    """The factors times `piece`, sums [rows, cols] at (row, col) of product `batch`."""
    for factors, dim, start in self._factors(refs, batch, row, col):
      factors = plgpu.load(
          factors.at[pl.ds(start, piece.shape[dim])],
          layout=plgpu.Layout.WGMMA.reduce(1 - dim), optimized=False,
      )
      piece = piece * lax.broadcast_in_dim(factors, piece.shape, (dim,))
    return piece

  def _factors(
      self, refs: Mapping[str, Ref], batch, row, col
  ) -> Iterator[tuple[Ref, int, Any]]:
    """Each vector in its turn, of rows (0) or columns (1), and where a tile's begin."""
    for i in range(self.count):
      for name, dim, start, batched in (
          (ROWS, 0, row, self.rows_batched), (COLS, 1, col, self.cols_batched)
      ):
        yield refs[name].at[batch if batched else 0, i], dim, start


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
