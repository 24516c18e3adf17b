"""Factors of a product's rows and columns, before the epilogue:

  out[b, i, j] = row_scales[b, :, i] * col_scales[b, :, j] * (lhs[b] @ rhs[b])[i, j]

Several factors of each may stand for one that float32 cannot hold. They are taken in
turn, a row's first, then a column's: so neither alone brings a sum beyond float32.

Factors of blocks of k are in `block_scales`.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from pallas_kernels import tiles
from pallas_kernels.problem import Problem
from pallas_kernels.vectors import Vector

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

  def vectors(
      self, refs: Mapping[str, Ref], *, batch, row, col, emulated: bool
  ) -> tuple[Vector, ...]:
    """The factors of a tile at (row, col) of product `batch`, in their order."""
    return tuple(
        Vector(refs[name].at[batch if batched else 0, i], dim, start, emulated)
        for i in range(self.count)
        for name, dim, start, batched in (
            (ROWS, 0, row, self.rows_batched), (COLS, 1, col, self.cols_batched)
        )
    )


def make_scales(
    row_scales: jax.Array, col_scales: jax.Array, problem: Problem, config, *,
    emulated: bool,
) -> tuple[Scales, dict[str, jax.Array]]:
  """The facts, and the arrays [batch, count, m or n], or 1: one factor for all.

  Emulated they have one for each row and column of whole tiles.
  """
  arrays = {ROWS: row_scales, COLS: col_scales}
  if emulated:
    for name, size, tile in (
        (ROWS, problem.m, config.tile_m * config.cluster_m),
        (COLS, problem.n, config.tile_n * config.cluster_n),
    ):
      x = arrays[name]
      if x.shape[2] == 1:
        x = jnp.broadcast_to(x, (*x.shape[:2], size))
      pad = tiles.round_up(x.shape[2], tile) - x.shape[2]
      arrays[name] = lax.pad(
          x, jnp.ones((), x.dtype), ((0, 0, 0), (0, 0, 0), (0, pad, 0))
      )
  facts = Scales(row_scales.shape[1], row_scales.shape[0] > 1, col_scales.shape[0] > 1)
  return facts, arrays
