"""What bytes cost on their way: from memory, and from the L2 into shared memory.

Rows make the difference. TMA asks for one row of a tile after the other, and the L2
and the memory answer in lines of 128 bytes: rows that begin within a line (crooked
ones) ask for more lines than they fill, short ones for more requests.

See `cost_model`, which makes a time of it.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from jaxgemm.cost_constants import Model
from jaxgemm.device import Device
from jaxgemm.operand_passes import misaligned
from jaxgemm.work import Work
from pallas_kernels import direct, tiles, ways
from pallas_kernels.problem import Problem


class Supply(NamedTuple):
  """Time to bring a k tile into shared memory.

  Attributes:
    us: all of it.
    crooked_us: what of it is due to rows that are crooked, or share lines.
  """

  us: float
  crooked_us: float


def row_costs(work: Work, model: Model) -> tuple[tuple[float, float], ...]:
  """What it costs to fetch lhs and rhs, in multiples of their bytes.

  Of each what it would cost if it were straight, and how much of it is crooked. A tile
  is fetched in rows: a k tile of a k-major operand, else the tile's whole width. Short
  ones make poor use of the memory's pages and of the L2's lines.
  """
  problem, config = work.problem, work.config
  costs, (lhs_way, rhs_way) = [], ways.of(problem)
  for operand, shape, layout, tile_mn, way in (
      ("lhs", problem.lhs_shape, problem.lhs_layout, config.tile_m, lhs_way),
      ("rhs", problem.rhs_shape, problem.rhs_layout, config.tile_n, rhs_way),
  ):
    if operand == "lhs" and work.lhs_way == "runs":
      costs.append((1.0, 0.0))  # It has no rows.
      continue
    k_major, tile_bytes = layout == "k-major", tile_mn * problem.itemsize
    # Tiles that end within a block are copied by blocks, and begin where the last ends.
    between = not k_major and tile_bytes % tiles.SWIZZLE_BYTES > 0
    short = k_major or between or way == "chunks"
    lines = 1.0 if short else tiles.SWIZZLE_BYTES / tile_bytes  # A row's bytes in one.
    extra = 0.0 if k_major else model.short_rows  # The next k tile follows in memory.
    share = crooked(tile_bytes, model) if between else 0.0
    if operand not in work.padded:
      share = max(share, crooked(shape[-1] * problem.itemsize, model))
    costs.append((1.0 + extra * lines, share * lines))
  return tuple(costs)


def crooked(num_bytes: int, model: Model) -> float:
  """How much of rows of so many bytes lies in lines of 128 that other rows share."""
  for line, share in ((128, 0.0), (64, model.crooked_64), (32, model.crooked_32)):
    if num_bytes % line == 0:
      return share
  return 1.0


def supplies(work: Work, model: Model) -> tuple[Supply, Supply]:
  """What brings a k tile, and the last one, of which less may be wanted."""
  costs = row_costs(work, model)
  whole = _supply(work, model, costs, 1.0)
  if work.last_share == 1.0:
    return whole, whole
  return whole, _supply(work, model, costs, work.last_share)


def _supply(
    work: Work, model: Model, costs: tuple[tuple[float, float], ...], share: float
) -> Supply:
  """The same of a k tile of which a share is wanted: so many of its rows of k."""
  problem, config = work.problem, work.config
  rows = config.tile_m  # A producer loads none beyond the last, if lhs is k-major.
  if work.has_roles and problem.lhs_layout == "k-major" or work.lhs_way == "runs":
    rows = min(rows, problem.product_m)
  cols = tiles.round_up(config.tile_n, tiles.rhs_block(problem))
  share_rhs, share_lhs = work.multicast
  lhs, rhs = costs
  lhs_rows, rhs_rows = rows * work.loads[0], cols * work.loads[1]
  lhs_rows *= 1.0 if problem.lhs_layout == "k-major" else share
  rhs_rows *= 1.0 if problem.rhs_layout == "k-major" else share

  def by_tma(crooked_rows: float) -> float:
    lhs_cost = lhs_rows * (lhs[0] + crooked_rows * lhs[1])
    rhs_cost = rhs_rows * (rhs[0] + crooked_rows * rhs[1])
    asked = lhs_cost / share_lhs + rhs_cost / share_rhs
    received = lhs_cost + rhs_cost
    return tiles.SWIZZLE_BYTES * max(asked, model.multicast * received) / model.l2_rate

  time = by_tma(model.crooked_rows)
  crooked_us = time - by_tma(0.0) if lhs[1] or rhs[1] else 0.0
  if work.loaded:
    valid = {"lhs": min(rows, problem.m), "rhs": min(config.tile_n, problem.n)}
    rates = model.aligned_rate, model.load_rate
    shifted = misaligned(problem, 16)
    by_loads = sum(
        valid[operand] / rates[operand in shifted] for operand in work.loaded
    )
    return Supply(max(time, tiles.SWIZZLE_BYTES * by_loads), crooked_us)
  crowding = tiles.SWIZZLE_BYTES * model.same_lines * _crowding(work) / model.l2_rate
  time, crooked_us = time + crowding, crooked_us + crowding
  # The lines of the only tile along m, or n, are asked for by all clusters at once.
  hot = 0.0
  if problem.product_m <= config.tile_m and "lhs" not in work.padded:
    hot += crooked(problem.lhs_shape[-1] * problem.itemsize, model) / share_lhs
  if problem.product_n <= config.tile_n and "rhs" not in work.padded:
    hot += crooked(problem.rhs_shape[-1] * problem.itemsize, model) / share_rhs
  return Supply(time + model.hot * hot, crooked_us)


def _crowding(work: Work) -> float:
  """Requests of a k tile for lines that rows beside them ask for as well.

  Rows of a k of less than a line lie several in one: all SMs ask for few lines at once.
  """
  problem, crowded = work.problem, 0.0
  share_rhs, share_lhs = work.multicast
  for operand, shape, layout, tile_mn, share in (
      ("lhs", problem.lhs_shape, problem.lhs_layout, work.config.tile_m, share_lhs),
      ("rhs", problem.rhs_shape, problem.rhs_layout, work.config.tile_n, share_rhs),
  ):
    row_bytes = tiles.round_up(shape[-1] * problem.itemsize, 16)  # Padded, if need be.
    in_rows = operand != "lhs" or work.lhs_way is None
    if layout == "k-major" and in_rows:
      crowded += tile_mn * max(tiles.SWIZZLE_BYTES / row_bytes - 1, 0.0) / share
  return crowded


def memory(work: Work, device: Device, model: Model) -> float:
  """Time of the memory for the bytes that must move."""
  lhs_bytes, rhs_bytes, other_bytes = _operand_bytes(work.problem)
  lhs_cost, rhs_cost = (
      straight + model.crooked_memory * share
      for straight, share in row_costs(work, model)
  )
  lhs_bytes *= lhs_cost * work.weights[0]
  rhs_bytes *= rhs_cost * work.weights[1]
  problem, config = work.problem, work.config
  if problem.lhs_layout == "k-major":
    lhs_bytes *= _many_rows(min(config.tile_m, problem.product_m), model)
  if problem.rhs_layout == "k-major":
    rhs_bytes *= _many_rows(min(config.tile_n, problem.n), model)
  if work.tiles_n > 1:
    lhs_bytes *= 1 + model.reread
  if work.tiles_m > 1:
    rhs_bytes *= 1 + model.reread
  row_bytes = tiles.SECTOR_BYTES if work.halo else work.row_bytes  # Or as if it were.
  cost = stored(
      row_bytes, model, wide=work.stored_wide, together=work.kernel == direct.NAME
  )
  other_bytes *= cost * work.sent
  moved = lhs_bytes + rhs_bytes + other_bytes
  time = moved / (device.bandwidth_tbps * 1e6 * model.memory)
  return time * (1 + model.apart * (1 - 1 / work.splits))


def stored_share(work: Work) -> float:
  """The result's share of all bytes."""
  *_, other_bytes = _operand_bytes(work.problem)
  return other_bytes / work.problem.num_bytes


def stored(
    row_bytes: int, model: Model, *, wide: bool = False, together: bool = False
) -> float:
  """What it costs to store a result of such rows, in multiples of its bytes.

  Of rows that begin within a sector of 32 bytes, each piece fills some in part: fewer,
  if pieces are `wide`. `together`: neighbours are stored at once, by as many CTAs as the
  SMs have room for, as `direct` stores them.
  """
  if row_bytes % tiles.SWIZZLE_BYTES == 0:
    return model.stores
  if row_bytes % tiles.SECTOR_BYTES == 0:
    return model.stores + model.crooked_sectors
  if row_bytes % 16 and not together:
    return model.stores + model.odd_stores
  if row_bytes % 16:
    units = model.direct_half_units if row_bytes % 8 == 0 else model.direct_units
    return model.stores + units
  return model.stores + (model.crooked_wide if wide else model.crooked_stores)


def _many_rows(rows: int, model: Model) -> float:
  """What the memory takes longer for rows that each CTA asks for at once, far apart."""
  return 1 + model.many_rows * max(math.log2(rows / 64), 0.0)


@functools.lru_cache(maxsize=1024)
def _operand_bytes(problem: Problem) -> tuple[int, int, int]:
  """Bytes of lhs, of rhs, and of everything else."""
  itemsizes = problem.stored_itemsizes
  lhs = math.prod(problem.lhs_shape) * itemsizes[0] * problem.matrices_of("lhs")
  rhs = math.prod(problem.rhs_shape) * itemsizes[1] * problem.matrices_of("rhs")
  return lhs, rhs, problem.num_bytes - lhs - rhs
