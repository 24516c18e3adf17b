"""Which configs are worth weighing in clusters whose CTAs share tiles (multicast)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
import dataclasses

from jaxgemm.operand_passes import as_read, misaligned
from pallas_kernels import parts, specialised, tiles
from pallas_kernels.configs import Config, PersistentConfig
from pallas_kernels.problem import Problem

_BIG_TILE = 128 * 192  # From here on multicast has been seen to win.
_LEAST_SHARE = 0.3  # Of what a CTA loads, that is worth sharing.


def shared(
    problem: Problem, configs: Iterable[tuple[str, Config]]
) -> Iterator[tuple[str, Config]]:
  """The same configs with clusters whose CTAs share tiles of an operand."""
  crooked = misaligned(as_read(problem), tiles.SWIZZLE_BYTES)  # Slow to fetch.
  for kernel, config in configs:
    if not isinstance(config, PersistentConfig) or config.cluster > 1:
      continue
    if config.misaligned == "loads":  # TMA alone multicasts.
      continue
    sizes = []  # Along m and n.
    if crooked:
      sizes = [(1, 4)]
      if kernel != "split_k":
        sizes = [(2, 1), (4, 1), (1, 2), (1, 4), (2, 2)]
    elif kernel != "split_k":
      if parts.is_split(problem):  # Each tile brings as many as there are parts.
        sizes = [(2, 1), (1, 2)]
      elif config.tile_m * config.tile_n >= _BIG_TILE and not _alone(problem, config):
        sizes = [(2, 1)]
    product = specialised.multiplied(problem, config)
    for along_m, along_n in sizes:
      if along_m == 1 < along_n and _shares_little(product, config):
        continue
      if _shares_out(product.product_m, config.tile_m, along_m):
        if _shares_out(product.product_n, config.tile_n, along_n):
          yield kernel, dataclasses.replace(
              config, cluster_m=along_m, cluster_n=along_n
          )


def _alone(problem: Problem, config: PersistentConfig) -> bool:
  """Whether clusters have been seen to lose: of tiles of a gated product in turns.

  In pairs eight took 0.997 to 1.118 times as long as alone (H200, five problems;
  4096x3072x768 TN 56.2 us and 50.3), and 8192x14336x4096, both sums saved, 3% longer
  under a load that lasts (192x128).
  """
  return problem.epilogue.gated and config.wg_dim == "tile"


def _shares_little(product: Problem, config: PersistentConfig) -> bool:
  """Whether lhs, shared by CTAs along n, is a small part of what each of them loads.

  Then they wait for each other more than they save: 5984x312x2816 TT took 27.8 us by
  64x256 tiles in pairs, 20.2 alone. But where there is one row of tiles, all CTAs ask
  for the same lines of lhs at once, which takes longer. Seen of 16-bit operands.
  """
  few = config.tile_m < _LEAST_SHARE * (config.tile_m + config.tile_n)
  return few and product.product_m > config.tile_m and product.itemsize == 2


def _shares_out(size: int, tile: int, cluster: int) -> bool:
  """Whether few CTAs of the clusters have no tile."""
  count = tiles.cdiv(size, tile)
  return cluster == 1 or count > 1 and tiles.round_up(count, cluster) <= 1.125 * count
