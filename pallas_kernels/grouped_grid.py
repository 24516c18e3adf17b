"""Which CTAs do which tiles of products in groups of rows, whose sizes are data.

A row tile has rows of one group, from its first one on in steps of the tile's rows; the
last tile of a group has fewer. A table says for each row tile which rows of which group
it has; XLA computes it from the sizes in front of the kernel, once for all products that
have the same sizes and tiles:

  [row tiles of groups, row tiles in all, group of each, first row of each, its end]

The rows behind those of the last group are nobody's, and become zeros: their row tiles
follow those of the groups.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from pallas_kernels import tiles
from pallas_kernels.cluster_grid import Place

MOST_ROWS = 2**30
_COUNTS = 2  # In front of the table.
TABLE = "row_tiles"  # Its name among the references.


@dataclasses.dataclass(frozen=True)
class GroupedGrid:
  """CTAs that walk over row tiles x tiles of n.

  In bands of `width` row tiles, in which rows come first, then n: CTAs that run at the
  same time share rows of lhs and, of large groups, columns of rhs.

  Attributes:
    tile_rows, tile_cols: of a tile of the result.
    most: row tiles that there may be.
    tiles_n: along n, of a cluster.
    cluster: CTAs of a cluster, along n.
    axis: their axis.
    transposed: whether the product is that of the transposed operands.
    at_once: clusters that run at once.
    width: of a band.
    table: what the kernel reads, or None outside.
  """

  tile_rows: int
  tile_cols: int
  most: int
  tiles_n: int
  cluster: int
  axis: str
  transposed: bool
  at_once: int
  width: int
  table: Any = None

  @classmethod
  def of(
      cls, m: int, n: int, groups: int, *, tile_rows: int, tile_cols: int, cluster: int,
      axis: str, transposed: bool, width: int, num_sms: int,
  ) -> GroupedGrid:
    most = most_row_tiles(m, groups, tile_rows)
    tiles_n = tiles.cdiv(n, tile_cols * cluster)
    at_once = min(most * tiles_n, max(1, num_sms // cluster))
    return cls(
        tile_rows, tile_cols, most, tiles_n, cluster, axis, transposed, at_once, width
    )

  @property
  def num_clusters(self) -> int:
    return self.at_once

  def of_cta(self, refs) -> GroupedGrid:
    return dataclasses.replace(self, table=refs[TABLE])

  def _count(self, row_tiles):
    """Tiles of this CTA, of those of so many row tiles."""
    left = row_tiles * self.tiles_n - lax.axis_index("cta") + self.at_once - 1
    return lax.div(jnp.maximum(left, 0), jnp.int32(self.at_once))

  def local_count(self):
    """Tiles of this CTA that have rows of a group."""
    return self._count(self.table[0])

  def empty_count(self):
    """Tiles of this CTA that have nobody's rows."""
    return self._count(self.table[1] - self.table[0])

  def locate(self, local) -> Place:
    """The place of this CTA's `local`-th tile."""
    return self._locate(local, jnp.int32(0), self.table[0])

  def locate_empty(self, local) -> Place:
    """The place of its `local`-th tile of nobody's rows."""
    return self._locate(local, self.table[0], self.table[1] - self.table[0])

  def _locate(self, local, first, row_tiles) -> Place:
    """Of row tiles from `first` on."""
    index = lax.axis_index("cta") + local * self.at_once
    band = lax.div(index, jnp.int32(self.width * self.tiles_n))
    begin = band * self.width
    within = index - begin * self.tiles_n
    rows = jnp.minimum(row_tiles - begin, self.width)
    col = lax.div(within, rows)
    row_tile = first + begin + within - col * rows
    if self.cluster > 1:
      col = col * self.cluster + lax.axis_index(self.axis)
    group, row, end = (
        self.table[_COUNTS + i * self.most + row_tile] for i in range(3)
    )
    m, n = row, col * self.tile_cols
    if self.transposed:
      m, n = n, m
    return Place(group, m, n, jnp.int32(0), end)


def most_row_tiles(m: int, groups: int, tile_rows: int) -> int:
  """Row tiles of so many rows in so many groups, and of those that are in none."""
  return min(m, m // tile_rows + groups + 1)


def as_sizes(group_sizes: jax.Array, rows: int) -> jax.Array:
  """The sizes, of any dtype of integers, from 0 to `rows` in int32."""
  if group_sizes.dtype.itemsize < 4:
    group_sizes = group_sizes.astype(jnp.int32)
  return jnp.clip(group_sizes, 0, rows).astype(jnp.int32)


def sums_until(x: jax.Array) -> jax.Array:
  """The sum up to each of the numbers, none negative; 2**30 where it is no less.

  Numbers that are no sizes must not make tiles at negative rows.
  """
  until = jnp.tri(x.shape[0], dtype=jnp.int32)
  rough = (until * x.astype(jnp.float32)).sum(1)
  return jnp.where(rough < MOST_ROWS, _sum(until * x), MOST_ROWS)


def _sum(x: jax.Array) -> jax.Array:
  """Of each row, in int32 also where JAX's own integers have 64 bits."""
  return x.sum(1, dtype=jnp.int32)


def row_tiles(group_sizes: jax.Array, m: int, tile_rows: int) -> jax.Array:
  """The table of groups of these sizes [groups], int32; rows from m on are in none.

  XLA computes it in two kernels: sums over groups, then each tile's choice. The sums do
  not know of m: tiles of rows that it cuts off come last, as far as the table has room.
  """
  groups, most = group_sizes.shape[0], most_row_tiles(m, group_sizes.shape[0], tile_rows)
  sizes = as_sizes(group_sizes, m)
  counts = _tiles_of(sizes, tile_rows)
  ends, last = (sums_until(x) for x in (sizes, counts))  # Behind each group.
  total = jnp.minimum(ends[-1:], m)
  tile = jnp.arange(most, dtype=jnp.int32)
  # One hot: what is selected needs no gather.
  within = tile[:, None] - (last - counts)
  of = (within >= 0) & (within < counts)

  def chosen(values, behind):
    return jnp.where(tile < last[-1], _sum(jnp.where(of, values, 0)), behind)

  first = chosen(
      ends - sizes + within * tile_rows, total + (tile - last[-1]) * tile_rows
  )
  end = jnp.minimum(first + tile_rows, chosen(jnp.minimum(ends, m), m))
  group = chosen(jnp.arange(groups, dtype=jnp.int32), 0)
  behind = last[-1:] + _tiles_of(m - total, tile_rows)
  counted = jnp.minimum(jnp.concatenate([last[-1:], behind]), most)
  return jnp.concatenate([counted, group, first, end])


def _tiles_of(rows: jax.Array, tile_rows: int) -> jax.Array:
  return lax.div(rows + (tile_rows - 1), jnp.int32(tile_rows))
