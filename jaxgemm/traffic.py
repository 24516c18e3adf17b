"""What bytes cost on their way: from memory, and from the L2 into shared memory.

Rows make the difference. TMA asks for one row of a tile after the other, and the L2
and the memory answer in lines of 128 bytes: rows that begin within a line (crooked
ones) ask for more lines than they fill, short ones for more requests.

See `cost_model`, which makes a time of it.
"""

from __future__ import annotations

import functools
import math

from jaxgemm.cost_constants import Model
from jaxgemm.device import Device
from jaxgemm.operand_passes import misaligned
from pallas_kernels import operand_tiles, tiles
from pallas_kernels.problem import Config, Problem


def multicast(config: Config) -> tuple[int, int]:
  """CTAs of a cluster that share an rhs tile, and an lhs tile."""
  return getattr(config, "cluster_m", 1), getattr(config, "cluster_n", 1)


def row_costs(
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
    share = crooked(tile_mn * problem.itemsize, model) if between else 0.0
    if operand not in padded:
      share = max(share, crooked(shape[-1] * problem.itemsize, model))
    extra += crooked_rows * share
    costs.append(1.0 + extra * tiles.SWIZZLE_BYTES / row_bytes)
  return costs[0], costs[1]


def crooked(num_bytes: int, model: Model) -> float:
  """How much of rows of so many bytes lies in lines of 128 that other rows share."""
  for line, share in ((128, 0.0), (64, model.crooked_64), (32, model.crooked_32)):
    if num_bytes % line == 0:
      return share
  return 1.0


def supply(
    problem: Problem, config: Config, model: Model, costs, loaded,
    loads: tuple[float, float],
) -> float:
  """Time to bring what one step multiplies into shared memory.

  `costs` are those of `row_costs`; `loaded` names what comes through registers, and
  `loads` says how often a step brings 128 bytes of each row of lhs and of rhs.
  """
  rows = config.tile_m  # Those beyond the last are not loaded, if lhs is k-major.
  if problem.lhs_layout == "k-major":
    rows = min(rows, problem.m)
  shared_rhs, shared_lhs = multicast(config)
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
    hot += crooked(problem.lhs_shape[-1] * problem.itemsize, model) / shared_lhs
  if problem.product_n <= config.tile_n:
    hot += crooked(problem.rhs_shape[-1] * problem.itemsize, model) / shared_rhs
  return tiles.SWIZZLE_BYTES * by_tma + model.hot * hot


def memory(
    problem: Problem, device: Device, model: Model, costs, tiles_m: int, tiles_n: int,
    weights: tuple[int, int],
) -> float:
  """Time of the memory for the bytes that must move.

  `costs` are those of `row_costs`, and of the result. Operands count as often as
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


@functools.lru_cache(maxsize=1024)
def _operand_bytes(problem: Problem) -> tuple[int, int, int]:
  """Bytes of lhs, of rhs, and of everything else."""
  lhs = math.prod(problem.lhs_shape) * problem.itemsize
  rhs = math.prod(problem.rhs_shape) * problem.itemsize * (1 + problem.epilogue.gated)
  return lhs, rhs, problem.num_bytes - lhs - rhs
