"""Which configs of which kernels are worth weighing for a problem.

Pure functions of (Problem, Device). `multicasts` adds the same in clusters whose CTAs
share tiles, `exactness` says which sums may be formed so.
"""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import itertools
import math

from jaxgemm import exactness, ring_slots, tile_shapes
from jaxgemm.device import Device
from jaxgemm.operand_passes import misaligned, passes
from pallas_kernels import (
  direct,
  fragments,
  gemv,
  norms,
  parts,
  persistent,
  run_loads,
  sector_stores,
  specialised,
  tiles,
)
from pallas_kernels.configs import (
  BlockedConfig,
  Config,
  DirectConfig,
  GemvConfig,
  PersistentConfig,
  PipelinedConfig,
)
from pallas_kernels.problem import Problem

_Shape = ring_slots.Shape
_DIRECT_SPLITS = (2, 3, 4, 6, 8)  # CTAs of a cluster that share k.
_MOST_DIRECT = 6  # k tiles of all CTAs of an SM, where a CTA has more than one.
# k tiles of tiles larger than 64x64, whose slots leave an SM one CTA: 8152x112x296 TN
# took 5.4 us by 64x128 and 4.5 with a ring, 8x327x188x242 TN 8.0 by 128x64 and 5.3.
_MOST_OF_LARGE = 3
_MOST_SHARED = 7  # k tiles that each of them shifts; eight took up to half longer.
_MOST_SHIFTED = 4  # k tiles that direct shifts; with six it took up to 6 times as long.
_LEAST_STAGES = 4  # Where consumers split lhs: one slot is split, one multiplied.
_LEAST_SKEWED = 9e6  # Bytes of an operand: a pass over fewer takes less.
_LEAST_RUNS = 1e6  # The same, in tiles of whole rows.
# Columns of tiles whose lhs is normalised, consumers, what they share out, and slots at
# most: 64x6144x4096 takes 14.9 us by 12 of them, by 10 15.4; 64x14336x4096 of two rhs
# takes 56.3 within a block by 3 and 57.0 by 4, and by itself 55.1 by 4 and 56.2 by 5.
_NORMED = (64, 2, "k", 12), (128, 1, "m", 7)
_NORMED_GATED = (256, 1, "m", 3), (128, 1, "m", 7)
# k tiles of tiles in turns that hide the slopes of a transposed product. Of 12 and 16
# 16384x3072x768 NT takes 5% longer than in its place, 16384x4096x1024 2%; of 32 to 224
# six take 0.93 to 1.012 times as long; five by other tiles than in turns 0.99 to 1.07.
_LEAST_HIDING = 32
_MOST_CONFLICTS = 4.0  # Of runs; with 7.5 256x257x64x257 took 35 us, skewed 21.


def listed(problem: Problem, device: Device) -> Iterator[tuple[str, Config]]:
  """Kernels by name and their configs, some of which may not serve the problem."""
  if problem.converts:
    yield from _converted_configs(problem, device)
    return
  if problem.norm_eps is not None:
    yield from _normed_configs(problem)
    return
  yield from _gemv_configs(problem, device)
  if parts.is_split(problem):
    yield from _configs_of_parts(problem, device)
    return
  tile_k = tiles.swizzle_elems(problem.dtype)
  k_steps = tiles.cdiv(problem.k, tile_k)
  promote = exactness.promotion(problem, k_steps)
  for tile_m, tile_n in ((128, 128), (64, 64)):
    yield "blocked", BlockedConfig(tile_m, tile_n, tile_k, promote)
  # Parts of a block of rhs: to load all of it for them has been seen to gain nothing.
  block = tiles.rhs_block(problem)
  for tile_m, tile_n, num_stages in tile_shapes.PIPELINED:
    at_once = _num_tiles(problem, tile_m, tile_n) <= 2 * device.num_sms
    if tile_n % block == 0 and at_once and not _wasteful(problem, tile_m, tile_n):
      yield "pipelined", PipelinedConfig(tile_m, tile_n, tile_k, num_stages, promote)
  if problem.itemsize == 2:
    yield from _direct_configs(problem, device)
  crooked = tile_shapes.crooked(problem)
  usual = dict.fromkeys((  # Each once.
      *tile_shapes.COOPERATIVE, *tile_shapes.PING_PONG, *crooked,
      *tile_shapes.fitted(problem),
  ))
  swapped = dict.fromkeys((
      *crooked, *tile_shapes.swapped(problem), *tile_shapes.evenly(problem),
      *tile_shapes.wide(problem),
  ))
  for product, swap, shapes in (
      (problem, False, usual), (problem.transposed, True, swapped)
  ):
    for shape in shapes:
      yield from _specialised(problem, product, device, (*shape, swap))
    more = *tile_shapes.filling(product, device), *tile_shapes.in_turns(product, device)
    for shape in more:
      if shape not in shapes:
        yield from _specialised(problem, product, device, (*shape, swap), splits=False)
    yield from _skewed_configs(problem, product, device, swap)
    yield from _run_configs(problem, product, device, swap)


def _skewed_configs(
    problem: Problem, product: Problem, device: Device, swap: bool
) -> Iterator[tuple[str, Config]]:
  """Those without a pass over a large lhs of `product`: the problem, or transposed."""
  odd = product.lhs_shape[2] % tiles.tma_stride_elems(product.dtype)
  if not odd or product.itemsize != 2:
    return
  if math.prod(product.lhs_shape) * product.itemsize < _LEAST_SKEWED:
    return
  for consumers in (1, 2):
    for cols in tile_shapes.skewed(product, device, consumers):
      shape = fragments.ROWS * consumers, cols, consumers, "m", swap
      yield from _specialised(problem, product, device, shape, misaligned="skewed")


def _run_configs(
    problem: Problem, product: Problem, device: Device, swap: bool
) -> Iterator[tuple[str, Config]]:
  """The same in tiles of whole rows of lhs, whose threads find their words in many banks.
  """
  cols = product.lhs_shape[2]
  k_major = product.lhs_layout == "k-major"
  if not cols % tiles.tma_stride_elems(product.dtype) or product.itemsize != 2:
    return
  if math.prod(product.lhs_shape) * product.itemsize < _LEAST_RUNS:
    return
  if run_loads.conflicts(cols, k_major=k_major) > _MOST_CONFLICTS:
    return
  for rows, consumers, wg_dim in tile_shapes.of_runs(product):
    for tile_n in tile_shapes.skewed(product, device, consumers):
      shape = rows, tile_n, consumers, wg_dim, swap
      yield from _specialised(problem, product, device, shape, misaligned="runs")


def _converted_configs(
    problem: Problem, device: Device
) -> Iterator[tuple[str, Config]]:
  """Those whose consumers convert lhs of what is multiplied."""
  for product, swap in ((problem, False), (problem.transposed, True)):
    if product.lhs_source:
      for rows, consumers in tile_shapes.CONVERTED:
        for cols in tile_shapes.skewed(product, device, consumers):
          shape = rows, cols, consumers, "m", swap
          yield from _specialised(problem, product, device, shape)


def _normed_configs(problem: Problem) -> Iterator[tuple[str, Config]]:
  """Those whose kernel normalises lhs.

  Where a k tile has few columns two consumers normalise in turn: see `norms`.
  """
  promote = exactness.promotion(problem, tiles.cdiv(problem.k, norms.COLS))
  shapes = _NORMED_GATED if problem.epilogue.gated else _NORMED
  for tile_n, consumers, wg_dim, most in shapes:
    for num_stages in range(most, 1, -1):
      config = PersistentConfig(
          norms.ROWS, tile_n, num_stages=num_stages, consumers=consumers, wg_dim=wg_dim,
          promote=promote,
      )
      if persistent.supports(problem, config) is None:
        yield persistent.NAME, config
        break


def _direct_configs(
    problem: Problem, device: Device
) -> Iterator[tuple[str, Config]]:
  """Few k tiles a CTA: of all of a short k, or of a cluster's shares of a longer one."""
  tile_k = tiles.swizzle_elems(problem.dtype)
  k_steps = tiles.cdiv(problem.k, tile_k)
  promote = exactness.promotion(problem, k_steps)
  most, shared = direct.MAX_SLOTS, direct.MAX_SLOTS
  if misaligned(problem, 16):
    most, shared = _MOST_SHIFTED, _MOST_SHARED
  shapes = tile_shapes.DIRECT + tile_shapes.DIRECT_LARGE * (k_steps <= 2)
  for tile_m, tile_n in shapes:
    num_tiles = _num_tiles(problem, tile_m, tile_n)
    if _wasteful(problem, tile_m, tile_n):
      continue
    few = k_steps == 1 or num_tiles * k_steps <= _MOST_DIRECT * device.num_sms
    large = tile_m * tile_n > 64 * 64
    if k_steps <= min(most, _MOST_OF_LARGE if large else most) and few:
      yield "direct", DirectConfig(tile_m, tile_n, tile_k, promote)
    if (tile_m, tile_n) in tile_shapes.DIRECT_SPLIT:
      for splits in _DIRECT_SPLITS:
        steps = tiles.cdiv(k_steps, splits)
        if num_tiles > device.max_clusters(splits) or steps > shared:
          continue
        if _even(k_steps, splits) == splits:
          fewer = exactness.promotion(problem, steps)
          yield "direct", DirectConfig(tile_m, tile_n, tile_k, fewer, splits)
  if k_steps == 1 and sector_stores.halo(problem.n):
    for tile_m, tile_n in tile_shapes.DIRECT_OVERLAPPING:
      if problem.n > tile_n:
        yield "direct", DirectConfig(tile_m, tile_n, tile_k, promote, overlap=True)


def _gemv_configs(
    problem: Problem, device: Device
) -> Iterator[tuple[str, Config]]:
  """Splits that fill the SMs with as many loads as the memory wants, or with fewer."""
  if gemv.supports(problem, GemvConfig()) is not None:
    return
  if problem.itemsize == 2 and not misaligned(problem, 16):
    return  # Tiles are as fast, where TMA brings them.
  shape = gemv.Geometry.of(problem, 1)
  enough = device.num_sms * max(2, shape.resident // 2)
  groups = gemv.num_groups(problem)
  most = min(max(enough // (problem.batch * shape.chunks), 1), groups)
  wanted = {min(2 * most, groups), most, tiles.cdiv(most, 2), tiles.cdiv(most, 4), 1}
  for splits in sorted({_even(groups, each) for each in wanted}):
    yield "gemv", GemvConfig(splits)


def _configs_of_parts(
    problem: Problem, device: Device
) -> Iterator[tuple[str, Config]]:
  """Those of operands in parts.

  Consumers that take tiles in turn, or share out n, have been seen never to win by more
  than 3% there.
  """
  shapes = [shape for shape in tile_shapes.COOPERATIVE if shape[3] == "m"]
  found = [_specialised(problem, problem, device, (*shape, False)) for shape in shapes]
  if problem.algorithm == "bf16_x6":
    for shape in shapes:
      found.append(
          _specialised(problem, problem, device, (*shape, False), float16_parts=True)
      )
    for product, swap in ((problem, False), (problem.transposed, True)):
      for consumers in (1, 2, 3):
        for cols in tile_shapes.narrow(product.n, 64 if consumers == 3 else 96):
          shape = 64 * consumers, cols, consumers, "m", swap
          found.append(_specialised(problem, product, device, shape, split_lhs=True))
  for kernel, config in itertools.chain(*found):
    if exactness.is_as_exact(problem, config):
      if not config.split_lhs or config.num_stages >= _LEAST_STAGES:
        yield kernel, config


def _specialised(
    problem: Problem, product: Problem, device: Device, shape: _Shape, *,
    splits: bool = True, **fields,
) -> Iterator[tuple[str, Config]]:
  """The warp-specialised configs of a tile of `product`: the problem, or transposed.

  `splits` asks for those that split k, too; `fields` are those of a config that say how
  operands are split, or come.
  """
  tile_m, tile_n, _, wg_dim, swap = shape
  tile_k = ring_slots.tile_k_of(problem, fields)
  split_lhs = fields.get("split_lhs", False)
  k_steps = tiles.cdiv(problem.k, tile_k)
  if _wasteful(product, tile_m, tile_n) or _breaks_lines(product, tile_n):
    return
  if swap and problem.epilogue.slopes and (wg_dim != "tile" or k_steps < _LEAST_HIDING):
    return
  like, num_tiles = ring_slots.alike(problem), _num_tiles(product, tile_m, tile_n)
  if fields.get("misaligned") == "runs":
    like = problem  # Its slots have whole rows.
  # Larger tiles are of no use where most SMs get none.
  smallest = 64 * 64 * (1 + problem.epilogue.gated)
  enough = device.num_sms // 4 if tile_m * tile_n > smallest else 1
  turns = wg_dim != "tile" or num_tiles > device.num_sms
  if turns and num_tiles >= enough and not _fetches_in_vain(product, tile_n):
    promote = exactness.promotion(problem, k_steps, split_lhs=split_lhs)
    for config in ring_slots.staged(like, shape, promote, **fields):
      yield from _with_loads(problem, "persistent", config, num_tiles, device)
  # Others have been seen never to win where k is split.
  if splits and wg_dim == "m":
    waves = 2 if parts.is_split(problem) else 1
    # With split_lhs, tiles take long.
    for count, cluster_k in _splits(
        device, num_tiles, k_steps, waves, balances=split_lhs
    ):
      # To transpose partial sums may take longer than all else, and gained at most 4%,
      # but where that spares a pass over the larger operand.
      spares = parts.is_split(problem) or fields.get("misaligned") == "skewed"
      turned = swap and count > cluster_k and not spares
      if num_tiles * count >= enough and not turned:
        fewer = exactness.promotion(
            problem, tiles.cdiv(k_steps, count), split_lhs=split_lhs
        )
        for config in ring_slots.staged(like, shape, fewer, count, cluster_k, **fields):
          yield from _with_loads(problem, "split_k", config, num_tiles * count, device)


def _with_loads(
    problem: Problem, kernel: str, config: PersistentConfig, num_tiles: int,
    device: Device,
) -> Iterator[tuple[str, Config]]:
  """The config, and the same with loads through registers in place of passes.

  Those wait for their bytes one k tile at a time, and use all slots: by tiles of 128x64
  512x197x64x197 TN took 23.5 us with six, 25.8 with three.
  """
  if config.misaligned == "runs":
    yield kernel, config
    return
  yield kernel, ring_slots.without_queue(problem, config, num_tiles, device)
  may_load = config.misaligned == "padded" and config.consumers == 1
  if may_load and problem.itemsize == 2:
    if passes(problem, config):
      producers = specialised.LOADING_PRODUCERS
      stages = config.num_stages // producers * producers
      yield kernel, dataclasses.replace(config, misaligned="loads", num_stages=stages)


def _num_tiles(problem: Problem, tile_m: int, tile_n: int) -> int:
  tiles_n = tiles.cdiv(problem.product_n, tile_n)
  return problem.batch * tiles.cdiv(problem.product_m, tile_m) * tiles_n


def _wasteful(problem: Problem, tile_m: int, tile_n: int) -> bool:
  """Whether more than half of the tile lies outside the result, needlessly."""
  too_high = tile_m > 2 * max(problem.product_m, 64)
  return too_high or tile_n > 2 * max(problem.product_n, 64)


def _breaks_lines(problem: Problem, tile_n: int) -> bool:
  """Whether tiles begin within lines of an rhs whose rows are whole ones, or padded so.

  Of 27 such products of the suite 23 took 2 to 24% longer than by whole blocks, two 7 and
  8% less. Where rows begin within lines anyway it hardly matters.
  """
  if tile_n % tiles.rhs_block(problem) == 0 or tile_n >= problem.product_n:
    return False
  in_lines = "rhs" not in misaligned(problem, tiles.SWIZZLE_BYTES)
  return in_lines or "rhs" in misaligned(problem, 16)


def _fetches_in_vain(problem: Problem, tile_n: int) -> bool:
  """Whether more than a fifth of the blocks of rhs that tiles take belongs to others."""
  fetched = min(tiles.round_up(tile_n, tiles.rhs_block(problem)), problem.product_n)
  return fetched > 1.25 * tile_n


def _splits(
    device: Device, num_tiles: int, k_steps: int, waves: int, balances: bool
) -> list[tuple[int, int]]:
  """(splits, cluster_k) that fill the SMs once, as far as they can, or `waves` times.

  Shorter sums of parts are more exact. With `balances` also the fewest splits that
  share out the work more evenly than tiles of the whole k do.
  """
  found = [
      (_even(k_steps, most), 1) for each in range(1, waves + 1)
      if (most := min(each * device.num_sms // num_tiles, k_steps // 2)) > 1
  ]
  if balances:
    steps = {  # Of the busiest SM.
        splits: tiles.cdiv(num_tiles * splits, device.num_sms)
        * tiles.cdiv(k_steps, splits)
        for splits in range(1, min(tiles.MAX_CTAS, k_steps // 2) + 1)
    }
    least = min(steps.values(), default=0)
    found += [
        (splits, 1) for splits in steps
        if splits > 1 and steps[splits] <= min(1.03 * least, 0.9 * steps[1])
    ][:1]
  most = min(device.num_sms // num_tiles, k_steps // 2)
  fit = [
      size for size in range(2, min(most, tiles.MAX_CTAS) + 1)
      if num_tiles <= device.max_clusters(size)
  ]
  found += [(size, size) for size in fit[-2:]]
  for size in (4, tiles.MAX_CTAS):
    sums = min(most // size, device.max_clusters(size) // num_tiles)
    if sums >= 2:
      found.append((sums * size, size))
  return sorted(set(found))


def _even(k_steps: int, most: int) -> int:
  """Splits that cover `k_steps` in as few steps each as `most` do; maybe fewer do."""
  return tiles.cdiv(k_steps, tiles.cdiv(k_steps, most))
