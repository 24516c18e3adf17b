"""Which CTAs of a persistent kernel do which tiles, in which order."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from jax import lax
import jax.numpy as jnp

from pallas_kernels import tiles
from pallas_kernels.configs import ALONG_M, ALONG_N, PersistentConfig
from pallas_kernels.problem import Problem


class Place(NamedTuple):
  """Where a tile is.

  Attributes:
    index: of the product that it is of: its operands', in their batch.
    m, n: its first row and column, in elements.
    result: which of the results it is stored into.
    end: the row of the result, or column of a transposed product, at which those that
      are stored end; None: they end with the result.
  """

  index: Any
  m: Any
  n: Any
  result: Any
  end: Any = None


@dataclasses.dataclass(frozen=True)
class ClusterGrid:
  """Clusters of CTAs that walk over copies x batch x (output tiles).

  All clusters run at once, or in rounds, each of which has a run of the tiles: tiles
  come in the same order, but there are moments at which other kernels get SMs.

    one round    0 4 8 | 1 5 9 | 2 6 10 | 3 7 11
    two          0 4   | 1 5   | 2 6    | 3 7     then  8 | 9 | 10 | 11

  Attributes:
    config: of the tiles and clusters.
    tile_m, tile_n: rows and columns of the result.
    tiles_m, tiles_n: tiles of a cluster along m and n.
    num_tiles: of the clusters, over copies and batch.
    at_once: clusters of a round.
    share: tiles of a cluster, at most.
  """

  config: PersistentConfig
  tile_m: int
  tile_n: int
  tiles_m: int
  tiles_n: int
  num_tiles: int
  at_once: int
  share: int

  @classmethod
  def of(
      cls, problem: Problem, config: PersistentConfig, *, num_sms: int, copies: int = 1,
      rounds: int = 1,
  ) -> ClusterGrid:
    """The grid of `problem`, every tile of which is done `copies` times."""
    tile_m = config.tile_m // problem.matrices_of("lhs")
    tile_n = config.tile_n // problem.matrices_of("rhs")
    tiles_m = tiles.cdiv(problem.m, tile_m * config.cluster_m)
    tiles_n = tiles.cdiv(problem.n, tile_n * config.cluster_n)
    num_tiles = copies * problem.batch * tiles_m * tiles_n
    at_once = min(num_tiles, max(1, num_sms // config.cluster))
    share = tiles.cdiv(num_tiles, at_once * rounds)
    return cls(config, tile_m, tile_n, tiles_m, tiles_n, num_tiles, at_once, share)

  @property
  def num_clusters(self) -> int:
    whole, rest = divmod(self.num_tiles, self.at_once * self.share)
    return whole * self.at_once + min(rest, self.at_once)

  def of_cta(self, refs) -> ClusterGrid:
    """The same as a CTA knows it, which has the references `refs`."""
    del refs
    return self

  def _first(self):
    """The first tile of this CTA."""
    cta = lax.axis_index("cta")
    if self.num_clusters == self.at_once:
      return cta
    before, cta = tiles.divmod_of(cta, self.at_once)  # Rounds.
    return cta + before * (self.at_once * self.share)

  def local_count(self):
    """Tiles of this CTA."""
    left = lax.div(
        self.num_tiles - self._first() + self.at_once - 1, jnp.int32(self.at_once)
    )
    if self.num_clusters == self.at_once:
      return left
    return jnp.minimum(left, self.share)

  def locate(self, local) -> Place:
    """The place of this CTA's `local`-th tile."""
    config = self.config
    index = self._first() + local * self.at_once
    batch, index = tiles.apart(index, self.num_tiles, self.tiles_m * self.tiles_n)
    mi, ni = tiles.tile_order(
        index, self.tiles_m, self.tiles_n, config.grid_minor, config.grid_width
    )
    if config.cluster_m > 1:
      mi = mi * config.cluster_m + lax.axis_index(ALONG_M)
    if config.cluster_n > 1:
      ni = ni * config.cluster_n + lax.axis_index(ALONG_N)
    return Place(batch, mi * self.tile_m, ni * self.tile_n, batch)

  def empty_count(self) -> None:
    """Tiles of this CTA behind those, which are zeros: there are none."""
