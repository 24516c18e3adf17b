"""The table of row tiles of groups, and which CTA does which of them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import grouped_grid
from tests.grouped_cases import bounds, random_sizes

TABLES = [  # m, groups, rows of a tile
    (1, 1, 8), (5, 3, 8), (100, 1, 16), (100, 7, 16), (96, 12, 32), (500, 40, 64),
    (257, 3, 256), (16, 50, 8),
]


def owners(sizes, m: int) -> np.ndarray:
  """The group of each row; that of nobody's is their number."""
  found = np.full(m, len(sizes))
  for group, (first, end) in enumerate(bounds(sizes, m)):
    found[first:end] = group
  return found


@pytest.mark.parametrize("m, groups, tile_rows", TABLES)
def test_row_tiles(m, groups, tile_rows, rng):
  make = jax.jit(lambda sizes: grouped_grid.row_tiles(sizes, m, tile_rows))
  most = grouped_grid.most_row_tiles(m, groups, tile_rows)
  edges = [
      np.zeros(groups), np.full(groups, m), np.full(groups, -1), np.eye(groups)[-1],
      np.full(groups, 2**31 - 1),
  ]
  for sizes in edges + [random_sizes(rng, m, groups) for _ in range(40)]:
    sizes = sizes.astype(np.int32)
    table = np.asarray(make(sizes))
    assert table.shape == (2 + 3 * most,)
    of_groups, in_all = table[:2]
    assert 0 <= of_groups <= in_all <= most
    group, first, end = table[2:].reshape(3, most)[:, :in_all]
    assert (0 <= first).all() and (end <= m).all() and (end - first <= tile_rows).all()
    if sizes.clip(0).sum(dtype=np.int64) <= m:
      assert (first < end).all()  # Only tiles of rows that are cut off have none.
    assert (0 <= group).all() and (group < groups).all()
    found = np.full(m, -1)
    for i in range(in_all):
      rows = slice(first[i], max(first[i], end[i]))
      assert (found[rows] == -1).all()  # No row is in two tiles.
      found[rows] = group[i] if i < of_groups else groups
    np.testing.assert_array_equal(found, owners(sizes, m))
    # No more tiles than each group needs.
    assert of_groups == min(most, (-(-sizes.clip(0, m) // tile_rows)).sum())


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "uint32"])
def test_row_tiles_of_other_integers(dtype):
  sizes = np.array([100, 0, 27, 100])
  wanted = grouped_grid.row_tiles(jnp.asarray(sizes, jnp.int32), 250, 16)
  found = grouped_grid.row_tiles(jnp.asarray(sizes, dtype), 250, 16)
  np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("cluster, transposed", [(1, False), (2, True)])
@pytest.mark.parametrize(
    "m, groups, width, num_sms", [(100, 7, 4, 5), (300, 3, 1, 8), (40, 9, 8, 132)]
)
def test_each_tile_has_one_cta(m, groups, width, num_sms, cluster, transposed, rng):
  axis, n, tile_rows, tile_cols = "along", 200, 16, 32
  grid = grouped_grid.GroupedGrid.of(
      m, n, groups, tile_rows=tile_rows, tile_cols=tile_cols, cluster=cluster, axis=axis,
      transposed=transposed, width=width, num_sms=num_sms,
  )

  def over_ctas(f, *args):
    per_cta = jax.vmap(
        lambda cta, *x: jax.vmap(lambda _: f(*x), axis_name=axis)(jnp.arange(cluster)),
        in_axes=(0, *[None] * len(args)), axis_name="cta",
    )
    return per_cta(jnp.arange(grid.num_clusters), *args)

  def walk(table):
    known = dataclasses.replace(grid, table=table)
    return [
        (over_ctas(count), jax.vmap(lambda i: over_ctas(locate, i))(jnp.arange(most)))
        for count, locate in (
            (known.local_count, known.locate), (known.empty_count, known.locate_empty)
        )
    ]

  most = -(-grid.most * grid.tiles_n // grid.num_clusters)
  walk = jax.jit(walk)
  for _ in range(3):
    sizes = random_sizes(rng, m, groups)
    table = grouped_grid.row_tiles(jnp.asarray(sizes), m, tile_rows)
    of_groups, in_all = np.asarray(table[:2])
    group, first, end = np.asarray(table[2:]).reshape(3, -1)
    tiles_n = grid.tiles_n * cluster
    for (counts, places), (begin, stop) in zip(
        walk(table), ((0, of_groups), (of_groups, in_all)), strict=True
    ):
      wanted = {
          (group[i], first[i], end[i], j * tile_cols)
          for i in range(begin, stop) for j in range(tiles_n)
      }
      found = []
      for i in range(most):
        place = jax.tree.map(lambda x: np.asarray(x)[i], places)
        rows, cols = (place.n, place.m) if transposed else (place.m, place.n)
        at = np.stack(np.broadcast_arrays(place.index, rows, place.end, cols), -1)
        found += map(tuple, at[np.asarray(counts) > i].tolist())
      assert len(found) == len(wanted) and set(found) == wanted
