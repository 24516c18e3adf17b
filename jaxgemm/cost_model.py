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

What bytes cost on their way is `traffic`'s. The constants are those of a
`cost_constants.Model`. Nothing here knows a shape by name.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from jaxgemm import operand_passes, traffic
from jaxgemm.cost_constants import MODEL, Model
from jaxgemm.device import Device
from jaxgemm.operand_passes import Pass, multiplied, wg_tile
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
  shared_rhs, shared_lhs = traffic.multicast(config)
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
  costs = traffic.row_costs(
      problem, config.tile_m, config.tile_n, padded, model, model.crooked_rows
  )
  memory_costs = traffic.row_costs(
      problem, config.tile_m, config.tile_n, padded, model, model.crooked_memory
  )
  busy = _busy(
      problem, kernel, config, device, model, per_sm=per_sm, k_steps=k_steps, sums=sums,
      masked=masked and sums == 1, steps_of_slot=num_products, more_pieces=more_pieces,
      promotes=promotes, splits_lhs=splits_lhs,
      supply=traffic.supply(problem, config, model, costs, loaded, loads),
  )
  bound = "power" if energy > busy else "the SMs"
  busy = _limited(busy, energy)
  memory_costs += (1.0 + model.crooked_stores * traffic.crooked(row_bytes, model),)
  memory = traffic.memory(problem, device, model, memory_costs, tiles_m, tiles_n, weights)
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
