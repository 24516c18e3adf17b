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
# Of tiles in turns of more k tiles than the first and fewer than the second, CTAs that
# share some wait for each other longer than they save; of fewer, stores take longer.
_FEW_STEPS = 8, 32
_LARGE = 50 << 20  # An H100's L2. Operands that it does not hold are worth sharing.


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
      if _shares_unevenly(config, along_m) and (crooked or config.wg_dim != "tile"):
        continue
      if along_m == 1 < along_n and _shares_little(product, config):
        continue
      if _shares_out(product.product_m, config.tile_m, along_m):
        if _shares_out(product.product_n, config.tile_n, along_n):
          yield kernel, dataclasses.replace(
              config, cluster_m=along_m, cluster_n=along_n
          )


def _alone(problem: Problem, config: PersistentConfig) -> bool:
  """Whether clusters have been seen to lose: of tiles in turns.

  Those that take few k tiles. Of 12 to 30 sixteen products took 0.98 to 1.03 times as
  long in pairs as alone, mean 1.004, six of them 1.006 under load; before, eleven of 12
  to 16 had 1.013, the median of 48 times, and three gated ones up to 1.12. But seven of
  1 to 8 had 0.997, and one whose operands are larger than the L2 0.96
  (16384x50304x768). Of 32 to 128 twelve of swapped operands or gated took 0.98 to 1.001.

  And tiles of a gated product that have more rows than columns, which are what pairs
  share: two of 48 k tiles by 192x128 took 1.05 times as long (H200, in a burst). Under a
  load that lasts pairs take less energy: 8192x14336x4096, gated, both sums saved, 2,777
  us by pairs of 128x200, and 2,887.
  """
  if config.wg_dim != "tile":
    return False
  gated = problem.epilogue.gated
  least, most = _FEW_STEPS
  steps = tiles.cdiv(problem.k, config.tile_k)
  held = (problem.m + problem.n) * problem.k * problem.itemsize <= _LARGE
  few = steps < most and (gated or config.swap or steps > least and held)
  return few or gated and config.tile_m > config.tile_n


def _shares_unevenly(config: PersistentConfig, along_m: int) -> bool:
  """Whether so many CTAs load a rest of the tile's columns each for itself.

  Large tiles in turns of whole lines alone have been seen to gain in clusters then. By
  others 2048x14336x4096 NN took 1.04 times as long in pairs of 128x296 as alone,
  2048x8192x28672 NT 1.05 times in pairs of 128x200, 4096x8192x28672 NT as long in pairs
  of 256x200 (H200); of crooked rows none has been measured.
  """
  return config.tile_n % (tiles.SWIZZLE_ROWS * along_m) > 0


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
