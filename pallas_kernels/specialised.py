"""What a config of the warp-specialised kernels, persistent and split_k, means.

The shares of the consumers, registers and shared memory. What cannot be: see
`specialised_checks`.
"""

from __future__ import annotations

from pallas_kernels import (
  accumulate,
  block_scales,
  conversions,
  epilogue_choice,
  fragments,
  lhs_registers,
  norms,
  parts,
  roles,
  run_loads,
  skewed,
  tiles,
  ways,
)
from pallas_kernels.configs import PersistentConfig
from pallas_kernels.epilogue import Epilogue
from pallas_kernels.problem import Problem

MAX_TILE_N = 384  # Columns of a tile: those of two wgmma that need 192 registers.
LOADING_PRODUCERS = 3  # Where registers load operands: see `num_producers`.


def wg_tile(config: PersistentConfig) -> tuple[int, int]:
  """The share of one consumer of the CTA's tile."""
  if config.wg_dim in ("tile", "k"):
    return config.tile_m, config.tile_n
  if config.wg_dim == "m":
    return config.tile_m // config.consumers, config.tile_n
  return config.tile_m, config.tile_n // config.consumers


def num_readers(config: PersistentConfig) -> int:
  """Consumers that read each slot."""
  return 1 if config.wg_dim in ("tile", "k") else config.consumers


def num_storing(config: PersistentConfig) -> int:
  """Consumers that store: of those that share out k the first."""
  return 1 if config.wg_dim == "k" else config.consumers


def stored_tile(problem: Problem, config: PersistentConfig) -> tuple[int, int]:
  """Rows and columns that a consumer stores: of one of a gated product's sums."""
  (rows, cols), matrices = wg_tile(config), 1 + problem.epilogue.gated
  return (rows // matrices, cols) if config.swap else (rows, cols // matrices)


def stored_cols(problem: Problem, config: PersistentConfig) -> int:
  """Of these the columns."""
  return stored_tile(problem, config)[1]


def multiplied(problem: Problem, config: PersistentConfig) -> Problem:
  """What the kernel multiplies: the problem, or the transposed one, or its parts'."""
  return parts.product(
      problem.transposed if config.swap else problem, config.float16_parts
  )


def smem_bytes(
    problem: Problem, config: PersistentConfig, others: int = 0, cols: int | None = None
) -> int:
  """Shared memory of one CTA: the ring, the staging slots, the barriers, and `others`.

  `cols` are those that a consumer stores, if not those of its tile.
  """
  room = epilogue_room(problem, config, others)
  return tiles.SMEM_LIMIT_BYTES - room + _epilogue(problem, config, room, cols).smem_bytes


def pieces(problem: Problem, config: PersistentConfig) -> int:
  """Pieces in which a consumer stores its tile."""
  found = _epilogue(problem, config, epilogue_room(problem, config))
  return len(found.pieces(stored_tile(problem, config)))


def stores_runs(problem: Problem, config: PersistentConfig) -> bool:
  """Whether a consumer stores its tile in bulk copies: see `run_stores`."""
  found = _epilogue(problem, config, epilogue_room(problem, config))
  return found.out.way == "run"


def stores_wide(problem: Problem, config: PersistentConfig) -> bool:
  """Whether threads store what TMA could: see `epilogue_choice.stores_wide`."""
  if config.swap:
    return False
  if not epilogue_choice.stores_wide(problem, stored_cols(problem, config)):
    return False
  found = _epilogue(problem, config, epilogue_room(problem, config))
  return found.out.way == "masked"


def _epilogue(
    problem: Problem, config: PersistentConfig, room: int, cols: int | None = None
) -> Epilogue:
  """That on the chip."""
  cols, transposed = cols or stored_cols(problem, config), config.swap
  if config.split_lhs and config.swap:  # The transposed product, stored as it is.
    problem, transposed = problem.transposed, False
  return epilogue_choice.make_epilogue(
      problem, cols, num_storing(config), emulated=False, transposed=transposed,
      room=room, row_order=row_order(problem, config),
  )


def row_order(problem: Problem, config: PersistentConfig) -> fragments.RowOrder:
  """Which rows those of a consumer's sums stand for."""
  product = multiplied(problem, config)
  return ways.row_order(
      ways.of_lhs(product, config), k_major=product.lhs_layout == "k-major"
  )


def epilogue_room(
    problem: Problem, config: PersistentConfig, others: int = 0
) -> int:
  """Shared memory that the ring, the barriers and `others` leave; less than 0: too much.
  """
  ring = config.num_stages * slot_bytes(problem, config)
  if config.misaligned == "runs":
    ring += run_loads.slots_bytes(multiplied(problem, config), config)
  ring += norms.smem_bytes(problem, config)
  return tiles.SMEM_LIMIT_BYTES - ring - tiles.BARRIER_BYTES - others


def slot_bytes(problem: Problem, config: PersistentConfig) -> int:
  """Shared memory of one slot of the ring, but for an lhs that comes in runs."""
  if config.split_lhs:
    return lhs_registers.slot_bytes(config)
  split, product = parts.of(problem, config), multiplied(problem, config)
  lhs_parts = rhs_parts = split.count if split else 1
  lhs_bytes, way = 0, ways.of_lhs(product, config)
  if way is not None:
    lhs_parts = 0
  if way == "converted":
    lhs_bytes = conversions.slot_bytes(config.tile_m)
  if way == "skewed":
    k_major = product.lhs_layout == "k-major"
    lhs_bytes = skewed.slot_bytes(config.tile_m, k_major=k_major)
  factors = block_scales.BlockScales.of(problem, config)
  return lhs_bytes + (factors.slot_bytes if factors else 0) + tiles.slot_bytes(
      product, config.tile_m, config.tile_n, config.tile_k, lhs_parts=lhs_parts,
      rhs_parts=rhs_parts,
  )


def registers(config: PersistentConfig) -> int:
  """Registers that a thread of a consumer has for its sums.

  Of three consumers ptxas refuses a wgmma that needs more than the 128 which a thread
  has at launch, whatever the producer gives away later; around others it uses up to 157.
  Three that take tiles of 128x128 in turns, 128 sums each, spill nothing, but are no
  faster than two (GPT-2's layers, H200).
  """
  kept = roles.CONSUMER_REGISTERS[config.consumers]
  if config.consumers == 3 and not config.split_lhs:
    kept = 128
  return kept - accumulate.OTHER_REGISTERS


def overlaps(problem: Problem, config: PersistentConfig) -> bool:
  """Whether the tensor cores go on with smaller products while others are promoted."""
  split = parts.of(problem, config)
  if split is None:
    return False
  if config.split_lhs:
    return True
  return not config.promote or (split.scaled and accumulate.fits(3, wg_tile(config)))


def last_depth(product: Problem, config: PersistentConfig) -> int:
  """Elements of k that are wanted of the last of all k tiles; 0: all of them.

  `product` is what the kernel multiplies, of operands that are no parts.
  """
  by_registers = ways.of_lhs(product, config) or ways.takes_loads(product, config)
  # The last is summed up with others like it.
  apart = 0 < config.promote < tiles.cdiv(product.k, config.tile_k)
  if product.itemsize != 2 or by_registers or apart or product.norm_eps is not None:
    return 0
  return tiles.last_depth(product.k, config.tile_k) % config.tile_k


def num_teams(config: PersistentConfig) -> int:
  """1, or 2 if the consumers take tiles in turn."""
  return config.consumers if config.wg_dim == "tile" else 1


def num_producers(config: PersistentConfig) -> int:
  """Warpgroups that load; several wait for memory at once, where TMA does not."""
  return LOADING_PRODUCERS if config.misaligned == "loads" else 1
