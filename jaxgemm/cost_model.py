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

`direct` and `gemv`, which have no pipeline, have sums of their own.

`work` counts tiles and steps, `traffic` says what bytes cost, `cost_constants` has the
constants. Nothing here knows a shape by name.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from jaxgemm import traffic
from jaxgemm.cost_constants import MODEL, Model
from jaxgemm.device import Device
from jaxgemm.operand_passes import Pass, misaligned, warpgroup_tile
from jaxgemm.work import Work
from pallas_kernels import (
  KERNELS,
  blocked,
  direct,
  fragments,
  gemv,
  pipelined,
  register_loads,
  tiles,
)
from pallas_kernels.configs import Config, DirectConfig, GemvConfig
from pallas_kernels.problem import Problem

_FEW_CTAS = 4  # Of direct on an SM, that wait together.


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
  if isinstance(config, DirectConfig):
    return _direct(problem, config, device, model)
  work = Work(problem, kernel, config, device)
  supplies = traffic.supplies(work, model)
  busy = _busy(work, device, model, supplies)
  energy = _energy(problem, config, device, model)
  bound = "power" if energy > busy else "the SMs"
  busy = _limited(busy, energy)
  memory = traffic.memory(work, device, model)
  crooked_us = (work.k_steps - 1) * supplies[0].crooked_us + supplies[1].crooked_us
  memory += model.crooked_beside * traffic.stored_share(work) * work.per_sm * crooked_us
  if work.per_sm > 1:
    missing = -work.num_tiles % work.at_once  # Of the last wave.
    memory += model.tail * missing / work.at_once * busy / work.per_sm
  if memory > busy:
    bound = "the memory"
  # blocked loads nothing while it multiplies.
  main = busy + memory if kernel == blocked.NAME else soft_max(busy, memory)
  time = _start(work, model) + main + _extra(work, model)
  return Estimate(
      time, work.num_tiles, work.per_sm, work.k_steps, bound, work.sums, work.passes,
      work.loaded,
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


def _direct(
    problem: Problem, config: DirectConfig, device: Device, model: Model
) -> Estimate:
  """Of CTAs that wait for memory once: what their threads load, one chunk after another.

  Those that are on an SM at once load and store in each other's waits. Copies of rows
  that begin within lines ask for lines that rows beside them ask for, too.
  """
  work = Work(problem, direct.NAME, config, device)
  shifted, crooked = misaligned(problem, 16), misaligned(problem, tiles.SWIZZLE_BYTES)
  found, busy = tuple(direct.loads(problem, config)), 0.0
  copied = register_loads.copied([loads for _, loads in found])
  for (operand, loads), is_copied in zip(found, copied, strict=True):
    chunk = model.direct_shifted if operand in shifted else model.direct_aligned
    if is_copied:
      chunk = model.direct_copied + model.direct_copied_crooked * (operand in crooked)
    busy += loads.num_chunks * chunk
  busy *= work.k_steps / direct.num_slots(problem, config)  # Groups of k tiles.
  if any(copied):
    busy += model.direct_step * work.k_steps
  area = config.tile_m * config.tile_n / 64**2
  store = model.direct_odd if work.row_bytes % 16 else model.direct_store
  if work.halo:
    store = model.direct_sectors
  store *= area / config.splits * problem.out_itemsize / 2
  busy += store * (1 + problem.epilogue.num_others)
  time = model.direct + model.direct_spread * math.log2(work.num_tiles)
  time += model.direct_small * (work.halo > 0 or work.row_bytes % 16 > 0)
  if config.splits > 1:
    busy += model.direct_sums * area
    time += model.direct_cluster + model.direct_cta * config.splits
  # CTAs that come later are launched one by one, and no longer wait together.
  at_once = _resident(problem, direct.NAME, config)
  later = max(0, work.per_sm - max(at_once, _FEW_CTAS))
  as_if = work.per_sm - later * (1 - model.direct_later)
  rounds = tiles.cdiv(work.per_sm, at_once)
  rounds *= as_if / work.per_sm
  busy *= rounds + model.direct_beside * (as_if - rounds)
  exposed = model.direct_copies_memory if any(copied) else model.direct_memory
  exposed += model.direct_later_memory * later / work.per_sm
  memory = exposed * traffic.memory(work, device, model)
  bound = "the memory" if memory > busy else "the SMs"
  return Estimate(
      time + busy + memory, work.num_tiles, work.per_sm, work.k_steps, bound, 1, (),
      work.loaded,
  )


def _start(work: Work, model: Model) -> float:
  """Time before the first k tile is there, and what the launch adds to that."""
  time = model.latency + model.descriptors
  if work.has_roles:
    time += model.roles + model.team * (work.config.consumers - 1)
  if work.cluster > 1:
    time += model.cluster * work.cluster
  return time


def _busy(
    work: Work, device: Device, model: Model,
    supplies: tuple[traffic.Supply, traffic.Supply],
) -> float:
  """Time of the busiest SM for its tiles."""
  problem, config = work.problem, work.config
  in_turn = work.has_roles and config.wg_dim == "tile"
  matrix = _matrix(work, device, model)
  # blocked has one slot, and loads nothing while it multiplies.
  ahead = max(getattr(config, "num_stages", 1) - 1, 0.5) * work.num_products
  at_once = work.has_roles and config.consumers > 1 and not in_turn
  bookkeeping = model.shared_step if at_once else model.step
  promotion = model.promotion / config.promote if work.promotes else 0.0
  if problem.epilogue.scaling == "blocks":
    promotion = model.factors
  registers, power = 0.0, model.beside  # To make lhs of what its slots hold.
  if work.splits_lhs:
    of_slot = (model.lhs_split, model.lhs_split_two, model.lhs_split_three)
    registers = of_slot[config.consumers - 1] / work.num_products
  elif work.lhs_way == "converted":
    waits = model.convert_alone if config.consumers == 1 else 0.0
    registers = model.convert * (config.tile_m / 64 + waits)
    if problem.lhs_layout == "k-major":
      registers *= model.convert_rows
      if config.consumers > 1 and warpgroup_tile(config)[0] > fragments.ROWS:
        registers *= model.convert_strips
    if problem.lhs_source != "int8":
      registers *= model.convert_floats
    power = model.beside if config.consumers > 1 else 1.0  # One waits for itself.
  if registers:
    promotion = soft_max(matrix, registers, power) - matrix - bookkeeping
  if work.num_products == 1:  # Parts stay for several products.
    matrix = max(matrix, work.shared_bytes / model.shared_rate)
  reading = 0.0  # Of lhs, into registers.
  if work.lhs_way == "runs":
    reading = model.run * work.conflicts * warpgroup_tile(config)[0] / 64
  elif work.lhs_way == "skewed":
    reading = model.skew
  store = _store(work, model)

  def step_with(together: int, reading: float, share: float, supply: float) -> float:
    """Time of a k tile of which a share is multiplied."""
    alone = model.solo if not work.has_roles and together == 1 else 1.0
    wait = (model.wait + supply) / (together * ahead)
    step = soft_max(max((matrix * share + reading) * alone, supply), wait)
    if work.cluster_k > 1:
      step *= model.k_cluster
    step += bookkeeping / together + promotion
    if work.shares_crooked:
      step += model.shared_slot
    return step

  def busy_with(together: int, reading: float = reading) -> float:
    """Time of as many tiles on one SM, at once: they hide each other's waits."""
    whole, last = supplies
    steps = work.k_steps * step_with(together, reading, 1.0, whole.us)
    if work.last_share < 1.0:
      steps *= (work.k_steps - 1) / work.k_steps
      steps += step_with(together, reading, work.last_share, last.us)
    # CTAs that share an SM store while others multiply, unless the stores are masked:
    # those occupy the SM's own pipes.
    own_store = store if work.masked else store / together
    return together * (steps + own_store)

  if in_turn:  # Each tile but the last is stored while the next is multiplied.
    tile = busy_with(1)
    hidden = busy_with(1, reading / 2) if work.lhs_way == "runs" else tile
    again = max(hidden - store, tile / 2, store if work.masked else 0.0)
    return tile + (work.per_sm - 1) * again
  resident = 1 if work.has_roles else _resident(problem, work.kernel, config)
  rounds, rest = divmod(work.per_sm, resident)
  busy = rounds * busy_with(resident) + (busy_with(rest) if rest else 0.0)
  if work.kernel == pipelined.NAME:
    busy += model.launch * work.num_tiles / device.num_sms
  return busy


def _matrix(work: Work, device: Device, model: Model) -> float:
  """Time of the tensor cores for one k tile."""
  problem, config = work.problem, work.config
  rate = device.tflops(problem.dtype) * 1e6 / device.num_sms  # FLOP/us
  in_registers = work.splits_lhs or work.lhs_way == "converted"
  tile_n = config.tile_n if in_registers else max(config.tile_n, model.narrow)
  matrix = 2 * config.tile_m * tile_n * config.tile_k / rate
  if work.has_roles and (config.wg_dim == "tile" or config.consumers == 1):
    matrix *= model.single
    if warpgroup_tile(config)[1] > tiles.WGMMA_COLS:
      matrix *= model.wide
  return matrix


def _store(work: Work, model: Model) -> float:
  """Time of the epilogue of a tile."""
  config, fused = work.config, work.problem.epilogue
  wg_m, wg_n = warpgroup_tile(config)
  out_bytes = 4 if work.sums > 1 else work.problem.out_itemsize
  rates = model.masked_rate, model.odd_rate
  rate = rates[work.row_bytes % 16 > 0] if work.masked else model.store_rate
  # Of a gated product half as much is stored, but all of it enters its arithmetic.
  store = wg_m * wg_n * out_bytes / (rate * work.num_shares)
  if work.stored_within:
    store *= model.half_sectors
  store += model.piece * work.more_pieces
  store *= 1 + fused.num_others
  if work.cluster_k > 1:
    store += 4 * wg_m * wg_n / model.exchange_rate
  return store


def sustained_us(
    time_us: float, problem: Problem, config: Config, device: Device
) -> float:
  """The time under a load that lasts, of what takes `time_us` in turns with others.

  Those that share their clocks with others do not pay for the energy that they take.
  """
  return _limited(time_us, _energy(problem, config, device, MODEL))


def _energy(problem: Problem, config: Config, device: Device, model: Model) -> float:
  """The time in which the chip may use the energy of the product.

  Known of operands of 16 bits alone: float32 products in parts, which wait for their
  promotion, ran 3 to 27% longer where this weighed. What lies beyond the result does not
  count.
  """
  if problem.itemsize != 2 or isinstance(config, GemvConfig):  # No tensor cores.
    return 0.0
  elements = 1 / config.tile_m + 1 / config.tile_n  # Fetched for each multiplication.
  # An instruction reads 64 rows and its columns, of which each meets 64 rows alone.
  (_, cols), *_ = tiles.instruction_columns(warpgroup_tile(config)[1])
  ideal = problem.flops / (device.tflops(problem.dtype) * 1e6)
  moved = model.fill_energy * elements + model.read_energy / cols
  return ideal * model.energy * (1 + moved)


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


def _extra(work: Work, model: Model) -> float:
  """Time of the passes beside the product."""
  time, problem = 0.0, work.problem
  if work.sums > 1:
    partial_bytes = 4 * problem.batch * problem.m * problem.n * work.sums
    time += model.reduce + model.part * work.sums + partial_bytes / model.reduce_rate
  padded = [num_bytes for what, _, num_bytes in work.passes if what == "padding"]
  if padded:
    time += model.pad_launch + sum(padded) / model.pad_rate
  for what, _, num_bytes in work.passes:
    if what != "padding":
      time += model.pass_launch + num_bytes / model.pass_rate
  is_scaled, scaled_by_xla = work.scaled_parts
  if is_scaled:
    time += model.guard + model.scales * scaled_by_xla
  return time
