"""In which order the tiles of a config are done: see `pallas_kernels.tiles.tile_order`.

CTAs that run at the same time share rows and columns of the operands, which the memory
then brings once; those that begin beside each other share a way to the L2, which then
is asked for them once. Both want as square a block of tiles as there is.

256x160 tiles of 2848x1760x2984 TT, 12 by 11 of them, took 44.3 us on an H200 in bands of
eight along m, in which eight CTAs ask for eight tiles of lhs, and 41.6 in bands of four;
256x128 tiles of 5904x1288x1400 TT 41.2 and 38.1 in bands of two. Of 51 configs of such
products, and of aligned ones, the orders below take 1.3% less time than bands of eight
along m alone, up to 14%, at worst 1.4% more, and 0.3% more than the best of them.

Of one k tile the result is most of what moves, and rows of it should leave as a whole:
8 x 4096x4096x64 NT took 78.5 us row by row on an H200, 80.8 in bands of two, 82.5 of 16
(192x128 tiles), 16384x12288x64 NN 110, and 118 to 124 in bands; results that the L2 holds
take the same either way, but for 2500x6001x33 NN, 22.6 of 20.7.

Source: the raster order of CUTLASS's tile schedulers, along either dimension.
"""

from __future__ import annotations

import dataclasses
import functools

from jaxgemm.device import Device
from pallas_kernels import specialised, tiles
from pallas_kernels.configs import PersistentConfig
from pallas_kernels.problem import Problem

_BESIDE = 8  # CTAs in a row that ask the L2 as one: of 6 to 16, what explains most.
# `grid_minor` and `grid_width`: the first of the best.
_ORDERS = (("m", tiles.GRID_WIDTH), ("m", 4), ("m", 2), ("n", tiles.GRID_WIDTH), ("n", 4))


def ordered(
    problem: Problem, config: PersistentConfig, device: Device
) -> PersistentConfig:
  """Returns the config in the order that suits its tiles."""
  if problem.k <= config.tile_k:
    return _in(config, "n" if config.swap else "m", 1)
  if config.cluster > 1:
    # Clusters come to the GPCs of a chip in turn. In bands along the cluster those of a
    # GPC share what a cluster's CTAs do not share among them.
    along_n = config.cluster_n > 1 == config.cluster_m
    return _in(config, "n" if along_n else "m", tiles.GRID_WIDTH)
  product = specialised.multiplied(problem, config)
  counts = (
      tiles.cdiv(product.product_m, config.tile_m),
      tiles.cdiv(product.product_n, config.tile_n),
  )
  return _in(config, *_best(counts, (config.tile_m, config.tile_n), device.num_sms))


def _in(config: PersistentConfig, minor: str, width: int) -> PersistentConfig:
  if (config.grid_minor, config.grid_width) == (minor, width):
    return config
  return dataclasses.replace(config, grid_minor=minor, grid_width=width)


@functools.lru_cache(maxsize=4096)
def _best(
    counts: tuple[int, int], sizes: tuple[int, int], num_sms: int
) -> tuple[str, int]:
  """The order of single CTAs' tiles; counts and sizes of these along m and n."""
  if 1 in counts:  # There is no other.
    return _ORDERS[0]

  def brought(order: tuple[str, int]) -> float:
    return sum(_brought(count, counts, sizes, order) for count in (_BESIDE, num_sms))

  return min(_ORDERS, key=brought)


def _brought(
    ctas: int, counts: tuple[int, int], sizes: tuple[int, int], order: tuple[str, int]
) -> float:
  """Rows and columns that so many CTAs in a row bring, each once, by their number."""
  minor, width = order
  if minor == "n":
    counts, sizes = counts[::-1], sizes[::-1]
  width = counts[0] / tiles.cdiv(counts[0], width)  # On average.
  length = ctas / width  # Of their part of a band, or of several.
  along = width * max(1.0, length / counts[1])
  across = min(max(1.0, length), counts[1])
  return (along * sizes[0] + across * sizes[1]) / ctas
