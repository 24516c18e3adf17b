"""How many slots the ring of a warp-specialised config gets.

As many as shared memory has room for, but no more than the memory needs to be asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import functools
import math
from typing import Any

from jaxgemm.device import Device
from pallas_kernels import (
  ALL_KERNELS,
  KERNELS,
  lhs_registers,
  parts,
  specialised,
  tiles,
)
from pallas_kernels.configs import Config, PersistentConfig, SplitKConfig
from pallas_kernels.problem import Problem

Shape = tuple[int, int, int, str, bool]  # One of tile_shapes, and `swap`.
_MAX_STAGES = 16
_ENOUGH_STAGES = 4  # With fewer, one more may be worth smaller pieces of the result.
_IN_FLIGHT_US = 1.7  # That loads are under way at least, where the memory is busy.
_AHEAD_BYTES = 80_000  # That an SM asks for ahead, so that its own latency is hidden.


@functools.lru_cache(maxsize=256)
def alike(problem: Problem) -> Problem:
  """A problem that takes as much shared memory, whatever the sizes."""
  # Threads store rows that begin within sectors.
  n = math.gcd(problem.n, tiles.SECTOR_BYTES // problem.out_itemsize)
  if n % tiles.tma_stride_elems(problem.out_dtype):
    # In steps of tiles' columns: some have all of the result's.
    n = min(tiles.round_up(problem.n, 8), specialised.MAX_TILE_N + 8) - 1
  return dataclasses.replace(problem, batch=1, m=64, n=n, k=64)


@functools.lru_cache(maxsize=4096)
def staged(
    like: Problem, shape: Shape, promote: int, splits: int = 1, cluster_k: int = 1,
    **fields,
) -> tuple[PersistentConfig, ...]:
  """The config with as many stages as shared memory holds; `like`: see `alike`.

  If they are few, also with one more, if the result then leaves in smaller pieces.
  """
  tile_m, tile_n, consumers, wg_dim, swap = shape
  fields = fields | dict(
      tile_m=tile_m, tile_n=tile_n, tile_k=tile_k_of(like, fields), consumers=consumers,
      wg_dim=wg_dim, promote=promote, swap=swap,
  )
  kernel, config = KERNELS["persistent"], PersistentConfig(**fields, num_stages=0)
  if splits > 1:
    kernel = KERNELS["split_k"]
    config = SplitKConfig(**fields, num_stages=0, splits=splits, cluster_k=cluster_k)
  stages = _most_stages(kernel, like, config)
  found = dataclasses.replace(config, num_stages=min(_MAX_STAGES, stages))
  if stages < _ENOUGH_STAGES:
    more = dataclasses.replace(config, num_stages=stages + 1)
    if kernel.smem_bytes(like, more) <= tiles.SMEM_LIMIT_BYTES:
      return found, more
  return (found,)


def _most_stages(kernel, like: Problem, config: PersistentConfig) -> int:
  """Slots that shared memory has room for."""
  if config.misaligned == "runs":  # Those of lhs are not as many as the ring's.
    for stages in range(_MAX_STAGES, 0, -1):
      more = dataclasses.replace(config, num_stages=stages)
      if kernel.smem_bytes(like, more) <= tiles.SMEM_LIMIT_BYTES:
        return stages
    return 0
  left = tiles.SMEM_LIMIT_BYTES - kernel.smem_bytes(like, config)
  return left // specialised.slot_bytes(like, config)


def without_queue(
    problem: Problem, config: PersistentConfig, num_tiles: int, device: Device
) -> PersistentConfig:
  """The config without slots whose loads would only wait in the memory's queues.

  What all SMs ask the memory for, and have not got yet, is worth what it delivers in its
  latency. With more of it, products that the memory bounds took up to 9% longer (H200,
  16 bits): 7x7520x32x416 TN 15.2 us with 13 slots, 13.9 with eight; 1x6144x4096 14.8 with
  12, 14.1 with nine. An SM alone needs some slots for its own latency.
  """
  if problem.itemsize != 2:
    return config
  slot = specialised.slot_bytes(problem, config)
  product = specialised.multiplied(problem, config)
  asked = _bytes_at_once(product, config, num_tiles, device)
  enough = max(
      round(_IN_FLIGHT_US * device.bandwidth_tbps * 1e6 / asked),
      1 + tiles.cdiv(_AHEAD_BYTES, slot), _ENOUGH_STAGES,
  )
  return dataclasses.replace(config, num_stages=min(config.num_stages, enough))


def with_room(problem: Problem, kernel: str, config: Config) -> Config | None:
  """The config as it serves a problem that may fuse more than the one it was made for.

  Its slots leave room for what is fused: up to one of eight. None: it does not serve.
  """
  most = getattr(config, "num_stages", 0)
  fewer = (most - less for less in range(1, most // 8 + 1))
  configs = [config, *(dataclasses.replace(config, num_stages=n) for n in fewer)]
  serves = (c for c in configs if ALL_KERNELS[kernel].supports(problem, c) is None)
  return next(serves, None)


def _bytes_at_once(
    product: Problem, config: PersistentConfig, num_tiles: int, device: Device
) -> int:
  """Of a k tile of all CTAs at once: rows of lhs and columns of rhs, each once."""
  at_once = min(num_tiles, device.num_sms)
  tiles_m = tiles.cdiv(product.product_m, config.tile_m)
  tiles_n = tiles.cdiv(product.product_n, config.tile_n)
  along_m = min(tiles_m, tiles.GRID_WIDTH)  # Of the band that they walk.
  products = max(1, at_once // (tiles_m * tiles_n))
  along_n = min(tiles_n, tiles.cdiv(at_once, products * along_m))
  along_m = min(tiles_m, tiles.cdiv(at_once, products * along_n))
  lhs, rhs = (config.tile_k * itemsize for itemsize in product.stored_itemsizes)
  rows, cols = (
      min(config.tile_m, product.product_m), min(config.tile_n, product.product_n)
  )
  return products * (along_m * rows * lhs + along_n * cols * rhs)


def tile_k_of(problem: Problem, fields: Mapping[str, Any]) -> int:
  if fields.get("split_lhs"):
    return lhs_registers.TILE_K
  return tiles.swizzle_elems(parts.product(problem).dtype)
