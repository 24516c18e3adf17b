"""The estimated time of a candidate: a pure function of (Problem, Device).

The model follows what the chip does with it:

  step      one k tile of one CTA: the tensor cores, or the way from the L2 into
            shared memory, whichever takes longer, and a part of the wait for a slot
            that is not filled in time
  tile      its steps, then the epilogue, unless another consumer's steps hide it
  CTA, SM   the tiles that fall to one SM, one after the other; the slowest SM
            counts, so a last wave that is not full costs as much as a full one
  power     where that takes more energy than the chip may use in this time, clocks fall
  chip      the time of the memory for the bytes that must move, short rows at more
            than their bytes
  extra     passes of their own: padding, rounding to TF32, adding partial sums

The constants (`Model`) are fitted to measured times: see
experiments/fit_heuristics.py. Nothing here knows a shape by name.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

from jaxgemm import operand_passes
from jaxgemm.device import Device
from jaxgemm.operand_passes import Pass, misaligned, multiplied, wg_tile
from pallas_kernels import (
  KERNELS,
  blocked,
  direct,
  epilogue,
  gemv,
  operand_tiles,
  parts,
  specialised,
  tiles,
)
from pallas_kernels.problem import Config, GemvConfig, PersistentConfig, Problem


@dataclasses.dataclass(frozen=True)
class Model:
  """Constants of the cost model; times in us, rates in bytes/us of one SM."""

  roles: float = 0.574  # Of a kernel with a producer: to part the registers.
  team: float = 0.571  # Of each consumer but the first, to get going.
  cluster: float = 0.0757  # Of each CTA of a cluster, to be launched together.
  latency: float = 0.868  # From asking for a tile to having it.
  wait: float = 0.692  # The same, while all SMs ask, beside what its bytes take.
  descriptors: float = 0.454  # Until TMA has fetched them, and of its last store.
  l2_rate: float = 137e3  # L2 to shared memory.
  multicast: float = 0.352  # What an SM receives, beside what it asks for.
  short_rows: float = 0.0108  # Of operands copied in rows of 128 bytes; less if longer.
  crooked_rows: float = 2.0  # The same, where rows begin in the midst of 128 bytes.
  crooked_memory: float = 0.21  # What crooked rows cost the memory itself.
  crooked_stores: float = 1.5  # Of the result's bytes, where its rows begin so.
  crooked_32: float = 0.367  # Of all three, where they begin at multiples of 32 bytes.
  crooked_64: float = 0.271  # The same, of 64 bytes.
  hot: float = 0.1  # A k tile of an operand that all CTAs ask for at once, if crooked.
  reread: float = 0.221  # Share of an operand that each second tile fetches anew.
  load_rate: float = 23.9e3  # Memory to shared memory through registers, shifted.
  direct_rate: float = 39.3e3  # The same, where rows are aligned to 16 bytes.
  round: float = 0.211  # Of direct's loads that wait for the ones before.
  store_rate: float = 33.9e3  # Registers of a warpgroup to memory.
  masked_rate: float = 48.3e3  # The same, not by TMA.
  piece: float = 0.11  # Each piece beyond the fewest that a tile could be stored in.
  step: float = 0.0262  # Barriers and bookkeeping of a k tile.
  shared_step: float = 0.0134  # The same, where another consumer's wgmma runs meanwhile.
  solo: float = 0.32  # Of pipelined's steps, where one CTA has an SM to itself.
  single: float = 0.945  # Of the tensor cores' time, one warpgroup at a time.
  wide: float = 1.09  # The same, two wgmma a k tile: one holds 256 columns at most.
  narrow: float = 83.6  # Columns of a wgmma that takes no less time with fewer.
  chunks: float = 1.03  # The same, wgmma of 64 columns, as rhs comes in chunks.
  promotion: float = 0.0181  # Of the sums, once.
  lhs_split: float = 0.41  # Of 32 of k in registers, by one consumer.
  lhs_split_two: float = 0.61  # The same, by two at once.
  lhs_split_three: float = 0.70
  beside: float = 1.8  # Power of the mean of that and its wgmma: partly at once.
  exchange_rate: float = 11e3  # Through distributed shared memory.
  k_cluster: float = 1.09  # Of k tiles, where a cluster shares out k.
  energy: float = 1.18  # Of an operation, at the highest clocks: 1 is what power allows.
  fill_energy: float = 12.6  # The same, of an element on its way into shared memory.
  memory: float = 1.09  # Share of the bandwidth that a product reaches.
  tail: float = 1.68  # Of a tile that some SMs have more than others, beside the memory.
  apart: float = 0.235  # What the memory loses where k is split: rows far apart.
  reduce: float = 1.61  # Launch of the kernel that adds the parts of split-k.
  reduce_rate: float = 4.87e6  # Its bytes, out of the L2; of the whole chip.
  part: float = 0.0175  # Of each part of an element, one after the other.
  guard: float = 8.0  # Of float16 parts: to see whether they do, in small kernels.
  scales: float = 4.0  # Of an operand that XLA's kernels scale, not ours.
  pass_launch: float = 0.809  # Launch of a pass over an operand.
  pass_rate: float = 3.57e6  # Bytes read and written; of the whole chip.
  pad_launch: float = 1.3  # The same two of a pass that pads rows of odd lengths, both
  pad_rate: float = 4.2e6  # operands' in one launch; by hand, of cold operands.
  gemv: float = 0.44  # Launch of gemv. Its seven: 72 times of 36 products, off by 10%.
  gemv_memory: float = 0.955  # Of the memory's time.
  gemv_narrow: float = 0.16  # More of it, each time that a thread loads half of 16 bytes.
  gemv_group: float = 0.73  # Of rows of the matrix that are loaded at once.
  gemv_row: float = 0.13  # Share of both that a further row adds, of 32 bits.
  gemv_sum: float = 0.33  # To add up the sums of splits,
  gemv_part: float = 0.04  # and of each of them.


MODEL = Model()


class Estimate(NamedTuple):
  """The estimated time, and what it consists of.

  Attributes:
    time_us: all kernels' together.
    num_tiles, per_sm, k_steps: tiles, tiles of the busiest SM, k tiles of each.
    bound: what bounds it: "the memory", "the SMs" or "power".
    sums: partial sums of each element that a second kernel adds up; 1: none.
    passes: over operands.
    loaded: operands that come through registers.
  """

  time_us: float
  num_tiles: int
  per_sm: int
  k_steps: int
  bound: str
  sums: int
  passes: tuple[Pass, ...]
  loaded: tuple[str, ...]

  def __str__(self) -> str:
    extra = [", + adding the parts"] if self.sums > 1 else []
    extra += [f", + {what} {operand}" for what, operand, _ in self.passes]
    if self.loaded:
      extra.append(f", {' and '.join(self.loaded)} through registers")
    return (
        f"{self.num_tiles} tiles, {self.per_sm} an SM, {self.k_steps} k tiles each;"
        f" bound by {self.bound}{''.join(extra)}"
    )


def estimate(
    problem: Problem, kernel: str, config: Config, device: Device, model: Model = MODEL
) -> Estimate:
  """What the model expects of a config that serves the problem."""
  if isinstance(config, GemvConfig):
    return _gemv(problem, config, device, model)
  split = parts.of(problem, config)
  splits_lhs = split is not None and split.lhs_in_registers
  stored = problem.transposed if splits_lhs and config.swap else problem
  row_bytes = stored.n * stored.out_itemsize
  masked = kernel == direct.NAME or row_bytes % 16 > 0
  splitting = operand_passes.splitting(problem, config, split) if split else ()
  num_parts, num_products = (split.count, split.num_products) if split else (1, 1)
  # Of lhs and rhs, beside those of one k tile of one part.
  loads = num_parts / num_products, num_parts / num_products
  weights = num_parts, num_parts
  if splits_lhs:  # 32 of k: as many bytes of float32 lhs as of 64 of k of a part.
    loads, weights = (1 / num_products, num_parts / 2 / num_products), (2, num_parts)
  promotes = config.promote and not (
      isinstance(config, PersistentConfig) and specialised.overlaps(problem, config)
  )
  energy = _energy(problem, config, device, model)
  more_pieces = _more_pieces(problem, config)
  problem = multiplied(problem, config)
  shared_rhs, shared_lhs = _multicast(config)
  splits = getattr(config, "splits", 1)
  cluster_k = getattr(config, "cluster_k", 1)
  has_roles = isinstance(config, PersistentConfig)
  tiles_m = tiles.round_up(tiles.cdiv(problem.m, config.tile_m), shared_rhs)
  tiles_n = tiles.round_up(tiles.cdiv(problem.product_n, config.tile_n), shared_lhs)
  num_tiles = problem.batch * tiles_m * tiles_n * splits
  k_steps = tiles.cdiv(tiles.cdiv(problem.k, config.tile_k), splits)
  k_steps *= num_products
  sums = splits // cluster_k  # Of each element, that go through memory.

  cluster = shared_rhs * shared_lhs * cluster_k
  at_once = device.ctas_at_once(cluster)
  per_sm = tiles.cdiv(num_tiles, at_once)

  needed = operand_passes.of_product(problem)
  loaded = ()  # Through registers.
  if kernel == direct.NAME:
    loaded, needed = ("lhs", "rhs"), ()
  elif operand_tiles.takes_loads(problem, config):
    loaded, needed = tuple(operand for _, operand, _ in needed), ()
  padded = tuple(operand for _, operand, _ in needed)
  costs = _row_costs(
      problem, config.tile_m, config.tile_n, padded, model, model.crooked_rows
  )
  memory_costs = _row_costs(
      problem, config.tile_m, config.tile_n, padded, model, model.crooked_memory
  )
  busy = _busy(
      problem, kernel, config, device, model, per_sm=per_sm, k_steps=k_steps, sums=sums,
      masked=masked and sums == 1, steps_of_slot=num_products, more_pieces=more_pieces,
      promotes=promotes, splits_lhs=splits_lhs,
      supply=_supply(problem, config, model, costs, loaded, loads),
  )
  bound = "power" if energy > busy else "the SMs"
  busy = _limited(busy, energy)
  memory_costs += (1.0 + model.crooked_stores * _crooked(row_bytes, model),)
  memory = _memory(problem, device, model, memory_costs, tiles_m, tiles_n, weights)
  memory *= 1 + model.apart * (1 - 1 / splits)
  if per_sm > 1:
    memory += model.tail * (-num_tiles % at_once) / at_once * busy / per_sm
  main = model.latency + soft_max(busy, memory)
  if kernel == blocked.NAME:  # It loads nothing while it multiplies.
    main = model.latency + busy + memory
  if kernel == direct.NAME:
    main += model.round * (direct.num_rounds(problem, config) - 1)
  else:
    main += model.descriptors
  if has_roles:
    main += model.roles + model.team * (config.consumers - 1)
  if cluster > 1:
    main += model.cluster * cluster
  needed = splitting if split else needed
  extra = _extra(problem, needed, sums, model)
  if split and split.scaled:
    extra += model.guard + model.scales * operand_passes.scaled_by_xla(stored)
  if memory > busy:
    bound = "the memory"
  return Estimate(
      main + extra, num_tiles, per_sm, k_steps, bound, sums, needed, loaded
  )


def _gemv(
    problem: Problem, config: GemvConfig, device: Device, model: Model
) -> Estimate:
  """Of loads that wait for nothing: the memory's time, or those of the longest split."""
  shape = gemv.Geometry.of(problem, config.splits)
  ctas = problem.batch * config.splits * shape.chunks
  per_sm = tiles.cdiv(ctas, device.num_sms)
  groups = tiles.cdiv(shape.depth, gemv.ROWS)
  more_rows = gemv.oriented(problem).m - 1
  rows = 1 + model.gemv_row * more_rows * 4 / problem.itemsize
  halved = math.log2(16 / (shape.vector * problem.itemsize))
  memory = model.gemv_memory * problem.num_bytes / (device.bandwidth_tbps * 1e6)
  memory *= 1 + model.gemv_narrow * halved
  # As many CTAs as registers allow wait at once.
  waits = groups * model.gemv_group * tiles.cdiv(per_sm, shape.resident)
  time = model.gemv + rows * soft_max(memory, waits, 4.0)
  if config.splits > 1:
    partial_bytes = 4 * problem.batch * problem.m * problem.n * config.splits
    time += model.gemv_sum + model.gemv_part * config.splits
    time += partial_bytes / model.reduce_rate
  bound = "the memory" if memory > waits else "the SMs"
  return Estimate(time, ctas, per_sm, groups, bound, config.splits, (), ())


def _supply(
    problem: Problem, config: Config, model: Model, costs, loaded,
    loads: tuple[float, float],
) -> float:
  """Time to bring what one step multiplies into shared memory.

  `costs` are those of `_row_costs`; `loaded` names what comes through registers, and
  `loads` says how often a step brings 128 bytes of each row of lhs and of rhs.
  """
  rows = config.tile_m  # Those beyond the last are not loaded, if lhs is k-major.
  if problem.lhs_layout == "k-major":
    rows = min(rows, problem.m)
  shared_rhs, shared_lhs = _multicast(config)
  cols = tiles.round_up(config.tile_n, tiles.rhs_block(problem))
  lhs_rows, rhs_rows = rows * loads[0], cols * loads[1]
  asked = lhs_rows * costs[0] / shared_lhs + rhs_rows * costs[1] / shared_rhs
  received = lhs_rows * costs[0] + rhs_rows * costs[1]
  by_tma = max(asked, model.multicast * received) / model.l2_rate
  valid = {"lhs": min(rows, problem.m), "rhs": min(cols, problem.n)}
  shifted = misaligned(problem, 16)
  by_loads = sum(
      valid[operand] / (model.load_rate if operand in shifted else model.direct_rate)
      for operand in loaded
  )
  if loaded:
    return tiles.SWIZZLE_BYTES * max(by_tma, by_loads)
  # The lines of the only tile along m, or n, are asked for by all clusters at once.
  hot = 0.0
  if problem.m <= config.tile_m:
    hot += _crooked(problem.lhs_shape[-1] * problem.itemsize, model) / shared_lhs
  if problem.product_n <= config.tile_n:
    hot += _crooked(problem.rhs_shape[-1] * problem.itemsize, model) / shared_rhs
  return tiles.SWIZZLE_BYTES * by_tma + model.hot * hot


def _busy(
    problem: Problem, kernel: str, config: Config, device: Device, model: Model, *,
    per_sm: int, k_steps: int, sums: int, masked: bool, steps_of_slot: int,
    more_pieces: int, promotes: bool, supply: float, splits_lhs: bool,
) -> float:
  """Time of the busiest SM for its tiles."""
  has_roles = isinstance(config, PersistentConfig)
  in_turn = has_roles and config.wg_dim == "tile"
  cluster_k = getattr(config, "cluster_k", 1)
  rate = device.tflops(problem.dtype) * 1e6 / device.num_sms  # FLOP/us
  tile_n = config.tile_n if splits_lhs else max(config.tile_n, model.narrow)
  matrix = 2 * config.tile_m * tile_n * config.tile_k / rate
  if has_roles and (in_turn or config.consumers == 1):
    matrix *= model.single
  wg_m, wg_n = wg_tile(config)
  if wg_n > tiles.WGMMA_COLS:
    matrix *= model.wide
  block = tiles.swizzle_elems(problem.dtype)
  if wg_n > block and wg_n % block == 0:
    if operand_tiles.ways(problem)[1] == "chunks":
      matrix *= model.chunks
  # blocked has one slot, and loads nothing while it multiplies; direct asks for all.
  ahead = max(getattr(config, "num_stages", 1) - 1, 0.5) * steps_of_slot
  if kernel == direct.NAME:
    ahead = math.inf
  at_once = has_roles and config.consumers > 1 and not in_turn
  bookkeeping = model.shared_step if at_once else model.step
  promotion = model.promotion / config.promote if promotes else 0.0
  if splits_lhs:
    of_slot = (model.lhs_split, model.lhs_split_two, model.lhs_split_three)
    splitting = of_slot[config.consumers - 1] / steps_of_slot
    promotion = soft_max(matrix, splitting, model.beside) - matrix - bookkeeping

  # The epilogue of a tile. CTAs that share an SM store while others multiply, unless
  # the stores are masked: those occupy the SM's own pipes.
  out_bytes = 4 if sums > 1 else problem.out_itemsize
  rate = model.masked_rate if masked else model.store_rate
  store = wg_m * wg_n * out_bytes / (rate * cluster_k * (1 + problem.epilogue.gated))
  store += model.piece * more_pieces
  store *= 1 + problem.epilogue.num_others
  if cluster_k > 1:
    store += 4 * wg_m * wg_n / model.exchange_rate

  def busy_with(together: int) -> float:
    """Time of as many tiles on one SM, at once: they hide each other's waits."""
    alone = model.solo if not has_roles and together == 1 else 1.0
    wait = (model.wait + supply) / (together * ahead)
    step = soft_max(max(matrix * alone, supply), wait)
    if cluster_k > 1:
      step *= model.k_cluster
    step += bookkeeping / together + promotion
    return together * (k_steps * step + store / (1 if masked else together))

  if in_turn:  # Each tile but the last is stored while the next is multiplied.
    tile = busy_with(1)
    again = max(tile - store, tile / 2, store if masked else 0.0)
    return tile + (per_sm - 1) * again
  resident = 1 if has_roles else _resident(problem, kernel, config)
  rounds, rest = divmod(per_sm, resident)
  return rounds * busy_with(resident) + (busy_with(rest) if rest else 0.0)


def _more_pieces(problem: Problem, config: Config) -> int:
  """Pieces of a consumer's tile beyond the fewest, which have 128 bytes of its rows."""
  if not isinstance(config, PersistentConfig) or hasattr(config, "splits"):
    return 0
  row_bytes = specialised.stored_cols(problem, config) * problem.out_itemsize
  if row_bytes % tiles.SWIZZLE_BYTES == 0:
    return 0
  rows = wg_tile(config)[0] // epilogue.PIECE_ROWS
  fewest = rows * tiles.cdiv(row_bytes, tiles.SWIZZLE_BYTES)
  return max(specialised.pieces(problem, config) - fewest, 0)


def sustained_us(
    time_us: float, problem: Problem, config: Config, device: Device,
    model: Model = MODEL,
) -> float:
  """The time under a load that lasts, of what takes `time_us` in turns with others.

  Those that share their clocks with others do not pay for the energy that they take.
  """
  return _limited(time_us, _energy(problem, config, device, model))


def _energy(problem: Problem, config: Config, device: Device, model: Model) -> float:
  """The time in which the chip may use the energy of the product.

  Known of operands of 16 bits alone: float32 products in parts, which wait for their
  promotion, ran 3 to 27% longer where this weighed. What lies beyond the result are
  zeros, which cost little.
  """
  if problem.itemsize != 2:
    return 0.0
  elements = 1 / config.tile_m + 1 / config.tile_n  # Fetched for each multiplication.
  ideal = problem.flops / (device.tflops(problem.dtype) * 1e6)
  return ideal * model.energy * (1 + model.fill_energy * elements)


def _limited(busy: float, energy: float) -> float:
  """The time of what is busy for `busy` at the highest clocks.

  A slower clock needs a lower voltage, and so less energy: time grows by the root of the
  energy only. On an H200, of configs that each ran alone until clocks settled, by its
  power of 0.5 (12 problems, 8 to 19 configs each; off by 1.5%, root mean square).
  """
  return math.sqrt(busy * max(busy, energy))


def _memory(
    problem: Problem, device: Device, model: Model, costs, tiles_m: int, tiles_n: int,
    weights: tuple[int, int],
) -> float:
  """Time of the memory for the bytes that must move.

  `costs` are those of `_row_costs`, and of the result. Operands count as often as
  `weights` says.
  """
  lhs_bytes, rhs_bytes, other_bytes = _operand_bytes(problem)
  lhs_bytes, rhs_bytes = lhs_bytes * weights[0], rhs_bytes * weights[1]
  if tiles_n > 1:
    lhs_bytes *= 1 + model.reread
  if tiles_m > 1:
    rhs_bytes *= 1 + model.reread
  moved = lhs_bytes * costs[0] + rhs_bytes * costs[1] + other_bytes * costs[2]
  return moved / (device.bandwidth_tbps * 1e6 * model.memory)


def _multicast(config: Config) -> tuple[int, int]:
  """CTAs of a cluster that share an rhs tile, and an lhs tile."""
  return getattr(config, "cluster_m", 1), getattr(config, "cluster_n", 1)


def _resident(problem: Problem, kernel: str, config: Config) -> int:
  """CTAs of one warpgroup that share an SM."""
  by_smem = tiles.SMEM_LIMIT_BYTES // KERNELS[kernel].smem_bytes(problem, config)
  sums = 2 if config.promote else 1
  registers = min(sums * config.tile_m * config.tile_n // 128 + 56, 255)
  by_registers = 65536 // (128 * tiles.round_up(registers, 8))
  return max(1, min(by_smem, by_registers))


def soft_max(a: float, b: float, power: float = 6.0) -> float:
  """A little over the larger: two bounds that are close hinder each other."""
  return (a**power + b**power) ** (1 / power)


def _extra(
    problem: Problem, needed: tuple[Pass, ...], sums: int, model: Model
) -> float:
  """Time of the passes beside the product."""
  time = 0.0
  if sums > 1:
    partial_bytes = 4 * problem.batch * problem.m * problem.n * sums
    time += model.reduce + model.part * sums + partial_bytes / model.reduce_rate
  padded = [num_bytes for what, _, num_bytes in needed if what == "padding"]
  if padded:
    time += model.pad_launch + 2 * sum(padded) / model.pad_rate
  for what, _, num_bytes in needed:
    if what != "padding":
      time += model.pass_launch + 2 * num_bytes / model.pass_rate
  return time


@functools.lru_cache(maxsize=1024)
def _operand_bytes(problem: Problem) -> tuple[int, int, int]:
  """Bytes of lhs, of rhs, and of everything else."""
  lhs = math.prod(problem.lhs_shape) * problem.itemsize
  rhs = math.prod(problem.rhs_shape) * problem.itemsize * (1 + problem.epilogue.gated)
  return lhs, rhs, problem.num_bytes - lhs - rhs


def _row_costs(
    problem: Problem, tile_m: int, tile_n: int, padded: tuple[str, ...], model: Model,
    crooked_rows: float,
) -> tuple[float, float]:
  """What it costs to fetch lhs and rhs, in multiples of their bytes.

  A tile is fetched in rows: a k tile of a k-major operand, else the tile's whole
  width. Short ones make poor use of the memory's pages and of the L2's lines.
  """
  costs, ways = [], operand_tiles.ways(problem)
  for operand, shape, k_major, tile_mn, way in (
      ("lhs", problem.lhs_shape, problem.lhs_layout == "k-major", tile_m, ways[0]),
      ("rhs", problem.rhs_shape, problem.rhs_layout == "k-major", tile_n, ways[1]),
  ):
    # Tiles that end within a block are copied by blocks, and begin where the last ends.
    between = not k_major and tile_mn % tiles.swizzle_elems(problem.dtype) > 0
    short = k_major or between or way == "chunks"
    row_bytes = tiles.SWIZZLE_BYTES if short else tile_mn * problem.itemsize
    extra = 0.0 if k_major else model.short_rows  # The next k tile follows in memory.
    crooked = _crooked(tile_mn * problem.itemsize, model) if between else 0.0
    if operand not in padded:
      crooked = max(crooked, _crooked(shape[-1] * problem.itemsize, model))
    extra += crooked_rows * crooked
    costs.append(1.0 + extra * tiles.SWIZZLE_BYTES / row_bytes)
  return costs[0], costs[1]


def _crooked(num_bytes: int, model: Model) -> float:
  """How much of rows of so many bytes lies in lines of 128 that other rows share."""
  for line, share in ((128, 0.0), (64, model.crooked_64), (32, model.crooked_32)):
    if num_bytes % line == 0:
      return share
  return 1.0
