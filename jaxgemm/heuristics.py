"""Candidates: the kernels and configs that may serve a problem, the best first.

Pure functions of (Problem, Device), and of the times that `cost_model` estimates.
"""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import functools
from typing import Any

from jaxgemm import cost_model
from jaxgemm.device import Device
from pallas_kernels import KERNELS, persistent, tiles
from pallas_kernels.exchange import MAX_CTAS
from pallas_kernels.problem import (
  BlockedConfig,
  Config,
  PersistentConfig,
  PipelinedConfig,
  Problem,
  SplitKConfig,
)


@dataclasses.dataclass(frozen=True)
class Candidate:
  """A kernel and config that serve a problem, and their estimated time."""

  kernel: str
  config: Config | None
  time_us: float
  reason: str


@functools.lru_cache(maxsize=4096)
def candidates(problem: Problem, device: Device) -> tuple[Candidate, ...]:
  """Every candidate for a problem, the fastest by estimate first."""
  found = []
  for kernel, config in _configs(problem, device):
    if KERNELS[kernel].supports(problem, config) is None:
      time_us, reason = cost_model.estimate(problem, kernel, config, device)
      found.append(Candidate(kernel, config, time_us, reason))
  found.sort(key=lambda candidate: candidate.time_us)
  if problem.dtype == "float32":
    xla = Candidate("xla", None, *cost_model.estimate_xla(problem, device))
    exact = min(problem.m, problem.n, problem.k) < _LEAST_TF32
    faster = [c for c in found if c.time_us < xla.time_us and not exact]
    found = [*faster, xla, *found[len(faster):]]
  return tuple(found)


# -- Which configs there are -------------------------------------------------------

# (tile_m, tile_n, consumers, wg_dim)
_PERSISTENT_TILES = (
    (128, 256, 2, "m"), (256, 128, 2, "m"), (192, 256, 2, "n"), (128, 224, 2, "m"),
    (128, 192, 2, "m"), (192, 128, 2, "n"), (128, 160, 2, "m"), (128, 128, 2, "m"),
    (64, 256, 2, "n"), (128, 64, 2, "m"), (128, 128, 1, "m"), (128, 64, 1, "m"),
    (64, 192, 1, "m"), (64, 128, 1, "m"), (64, 64, 1, "m"), (64, 32, 1, "m"),
    (128, 384, 2, "m"), (128, 320, 2, "m"), (64, 384, 1, "m"), (64, 320, 1, "m"),
    (192, 192, 3, "m"), (192, 128, 3, "m"),
)
# The same for consumers that take tiles in turn.
_PING_PONG_TILES = (
    (128, 192, 2, "tile"), (192, 128, 2, "tile"), (128, 128, 2, "tile"),
    (64, 320, 2, "tile"), (64, 256, 2, "tile"), (64, 128, 2, "tile"),
)
# (tile_m, tile_n, stages), for results whose tiles all run at once. CTAs that come and
# go fall out of step, and no longer ask the L2 for the same rows at the same time.
_PIPELINED_TILES = ((64, 128, 4), (128, 64, 4), (64, 64, 6), (64, 32, 8))
_MAX_STAGES = 16
_LEAST_TF32 = 16  # XLA multiplies smaller float32 operands without tensor cores.
_BIG_TILE = 128 * 192  # From here on multicast has been seen to win.


def _configs(problem: Problem, device: Device) -> Iterator[tuple[str, Config]]:
  tile_k = tiles.swizzle_elems(problem.dtype)
  k_steps = tiles.cdiv(problem.k, tile_k)
  promote = promotion(problem, k_steps)
  for tile_m, tile_n in ((128, 128), (64, 64)):
    yield "blocked", BlockedConfig(tile_m, tile_n, tile_k, promote)
  for tile_m, tile_n, num_stages in _PIPELINED_TILES:
    at_once = _num_tiles(problem, tile_m, tile_n) <= 2 * device.num_sms
    if at_once and not _wasteful(problem, tile_m, tile_n):
      yield "pipelined", PipelinedConfig(tile_m, tile_n, tile_k, num_stages, promote)
  for tile_m, tile_n, consumers, wg_dim in (*_PERSISTENT_TILES, *_PING_PONG_TILES):
    if _wasteful(problem, tile_m, tile_n):
      continue
    shape = dict(
        tile_m=tile_m, tile_n=tile_n, tile_k=tile_k, consumers=consumers, wg_dim=wg_dim
    )
    num_tiles = _num_tiles(problem, tile_m, tile_n)
    # Larger tiles are of no use where most SMs get none.
    enough = device.num_sms // 4 if tile_m * tile_n > 64 * 64 else 1
    turns = wg_dim != "tile" or num_tiles > device.num_sms
    if turns and num_tiles >= enough:
      yield from _whole_configs(problem, shape, promote)
    if wg_dim == "m":  # The others have been seen never to win where k is split.
      for splits, cluster_k in _splits(device, num_tiles, k_steps):
        if num_tiles * splits >= enough:
          yield from _split_configs(problem, shape, k_steps, splits, cluster_k)


def _whole_configs(
    problem: Problem, shape: dict[str, Any], promote: int
) -> Iterator[tuple[str, Config]]:
  stages = _stages(problem, "persistent", PersistentConfig(**shape, num_stages=0))
  whole = PersistentConfig(**shape, num_stages=stages, promote=promote)
  for shared_rhs, shared_lhs in _multicasts(problem, whole):
    yield "persistent", dataclasses.replace(
        whole, cluster_m=shared_rhs, cluster_n=shared_lhs
    )
  if _may_load(problem, whole):
    yield "persistent", _by_loads(whole)


def _multicasts(problem: Problem, config: PersistentConfig) -> list[tuple[int, int]]:
  """(cluster_m, cluster_n) that may pay."""
  found = [(1, 1)]
  if config.tile_m * config.tile_n >= _BIG_TILE and problem.m > config.tile_m:
    # First among equals: multicast moves less data, which tells when clocks fall.
    found = [(2, 1), (1, 1)]
  if cost_model.crooked(problem):  # What takes long to fetch is worth sharing.
    found += [(4, 1)] if problem.m > 2 * config.tile_m else []
    found += [(1, size) for size in (2, 4) if problem.n > size // 2 * config.tile_n]
  return found


def _split_configs(
    problem: Problem, shape: dict[str, Any], k_steps: int, splits: int, cluster_k: int
) -> Iterator[tuple[str, Config]]:
  promote = promotion(problem, tiles.cdiv(k_steps, splits))
  split = dict(shape, splits=splits, cluster_k=cluster_k, promote=promote)
  stages = _stages(problem, "split_k", SplitKConfig(**split, num_stages=0))
  found = SplitKConfig(**split, num_stages=stages)
  yield "split_k", found
  if cluster_k == 1 and cost_model.crooked(problem) and problem.n > 2 * found.tile_n:
    yield "split_k", dataclasses.replace(found, cluster_n=4)
  if _may_load(problem, found):
    yield "split_k", _by_loads(found)


def _may_load(problem: Problem, config: PersistentConfig) -> bool:
  """Whether there is something that registers could load in place of a pass."""
  if config.consumers != 1 or problem.itemsize != 2:
    return False
  return bool(cost_model.passes(problem, config))


def _by_loads(config: PersistentConfig) -> PersistentConfig:
  """The same, but operands that TMA cannot take are loaded through registers."""
  producers = persistent.LOADING_PRODUCERS
  stages = config.num_stages // producers * producers
  return dataclasses.replace(config, pad=False, num_stages=stages)


def _num_tiles(problem: Problem, tile_m: int, tile_n: int) -> int:
  return problem.batch * tiles.cdiv(problem.m, tile_m) * tiles.cdiv(problem.n, tile_n)


def _wasteful(problem: Problem, tile_m: int, tile_n: int) -> bool:
  """Whether more than half of the tile lies outside the result, needlessly."""
  return tile_m > 2 * max(problem.m, 64) or tile_n > 2 * max(problem.n, 64)


def _stages(problem: Problem, kernel: str, config) -> int:
  """As many stages as shared memory holds beside the rest; `config` has none."""
  slot = tiles.slot_bytes(problem, config.tile_m, config.tile_n, config.tile_k)
  rest = KERNELS[kernel].smem_bytes(problem, config)
  return min(_MAX_STAGES, (tiles.SMEM_LIMIT_BYTES - rest) // slot)


def _splits(device: Device, num_tiles: int, k_steps: int) -> list[tuple[int, int]]:
  """(splits, cluster_k) that fill the SMs once, as far as they can."""
  most = min(device.num_sms // num_tiles, k_steps // 2)
  if most < 2:
    return []
  # With cdiv(k_steps, s) steps each, fewer splits may already cover k.
  found = [(tiles.cdiv(k_steps, tiles.cdiv(k_steps, most)), 1)]
  fit = [
      size for size in range(2, min(most, MAX_CTAS) + 1)
      if num_tiles <= device.max_clusters(size)
  ]
  found += [(size, size) for size in fit[-2:]]
  for size in (4, MAX_CTAS):
    sums = min(most // size, device.max_clusters(size) // num_tiles)
    if sums >= 2:
      found.append((sums * size, size))
  return sorted(set(found))


def promotion(problem: Problem, k_steps: int) -> int:
  """The `promote` that keeps a sum of `k_steps` k tiles as exact as its result.

  Only a float32 result of 16-bit operands shows the tensor cores' truncation. A
  quarter of a short sum, or four tiles of a long one, truncate less than the
  float32 sum around them rounds.
  """
  if problem.out_dtype != "float32" or problem.dtype == "float32":
    return 0
  return max(1, min(4, k_steps // 4))
