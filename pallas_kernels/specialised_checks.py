"""Why a config of the warp-specialised kernels cannot be: in words, or None where it can.

What the fields of a config mean: see `specialised`.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import math

from pallas_kernels import (
  accumulate,
  block_scales,
  conversions,
  fragments,
  lhs_registers,
  parts,
  register_loads,
  roles,
  run_loads,
  skewed,
  specialised,
  tiles,
  ways,
)
from pallas_kernels.configs import PersistentConfig
from pallas_kernels.problem import Problem

MAX_BARRIERS = 32  # In one array of barriers.
MAX_SUMS_BESIDE_RUN = 128  # Registers of an accumulator beside lhs that comes in runs.
MAX_UNTRADED_SUMS = 64  # Registers of an accumulator beside producers that need some.
# Why lhs of what is multiplied cannot come in these ways.
_CHECKS = {
    "converted": conversions.check, "skewed": skewed.check, "runs": run_loads.check,
}
Supports = Callable[[Problem, PersistentConfig], str | None]


def check_config(problem: Problem, config: PersistentConfig) -> str | None:
  """Why the tiles, the ring or the cluster cannot be, or None."""
  if config.consumers not in roles.CONSUMER_REGISTERS:
    return f"consumers={config.consumers} must be 1, 2 or 3"
  if config.consumers == 3 and config.wg_dim != "m":
    return f"wg_dim={config.wg_dim}: three consumers share out m"
  if config.wg_dim == "k" and problem.norm_eps is None:
    return "wg_dim='k': consumers share out k where they normalise lhs alone"
  wg_m, wg_n = specialised.wg_tile(config)
  if wg_m % 64:
    return (
        f"tile_m={config.tile_m} over {config.consumers} warpgroups: each needs a"
        " multiple of 64"
    )
  if config.num_stages < 2:
    return f"num_stages={config.num_stages}: a ring has at least 2 slots"
  teams = specialised.num_teams(config)
  if config.num_stages > (most := MAX_BARRIERS // teams):
    return f"num_stages={config.num_stages}: of {teams} teams each has at most {most}"
  along = config.cluster_m, config.cluster_n
  if min(along) < 1 or math.prod(along) not in (1, 2, 4):
    return (
        f"cluster_m={config.cluster_m}, cluster_n={config.cluster_n}: clusters that share"
        " tiles have 1, 2 or 4 CTAs"
    )
  if config.grid_width < 1:
    return f"grid_width={config.grid_width} must be at least 1"
  for shared, tile_mn in (
      (config.cluster_n, config.tile_m), (config.cluster_m, config.tile_n)
  ):
    if shared > 1 and tile_mn < tiles.SWIZZLE_ROWS * shared:
      return f"tiles of {tile_mn} rows: {shared} CTAs load at least 8 each"
  product, split = specialised.multiplied(problem, config), parts.of(problem, config)
  return (
      _check_loads(problem, config)
      or check_swap(problem, config)
      or _check_tile(product, config)
      or accumulate.check(
          wg_m, wg_n, config.promote, specialised.registers(config),
          num_accs=len(split.groups) if split else 1,
          in_blocks=problem.epilogue.scaling == "blocks",
      )
      or tiles.check_smem(specialised.smem_bytes(problem, config))
  )


def _check_loads(problem: Problem, config: PersistentConfig) -> str | None:
  """Why registers cannot load operands, or None."""
  if config.misaligned != "loads":
    return None
  if problem.itemsize != 2:
    return f"misaligned='loads': registers load 16-bit operands, not {problem.dtype}"
  if config.cluster_m * config.cluster_n > 1:
    return "misaligned='loads' excludes cluster_m and cluster_n: only TMA multicasts"
  if config.consumers > 1:
    return "misaligned='loads' leaves registers for one consumer"
  if (reason := register_loads.check_columns(config.tile_n)) is not None:
    return f"misaligned='loads': {reason}"
  if config.num_stages % specialised.LOADING_PRODUCERS:
    return (
        f"misaligned='loads': num_stages={config.num_stages} must be a multiple of"
        f" {specialised.LOADING_PRODUCERS}, the number of producers"
    )
  sums = config.tile_m * config.tile_n // tiles.WG_THREADS
  if sums * (2 if config.promote else 1) > MAX_UNTRADED_SUMS:
    return (
        f"misaligned='loads': sums of {config.tile_m}x{config.tile_n} leave too few"
        " registers to load with"
    )
  return None


def check_in_registers(problem: Problem, config: PersistentConfig) -> str | None:
  """Why lhs cannot come skewed, in runs or in 8 bits, or None."""
  if not problem.converts and config.misaligned not in _CHECKS:
    return None
  product = specialised.multiplied(problem, config)
  its_way = "converted" if problem.converts else config.misaligned
  if (reason := _CHECKS[its_way](product, config)) is not None:
    return reason
  way = "lhs that is converted" if problem.converts else f"misaligned={its_way!r}"
  reordered = specialised.row_order(problem, config) != "as they are"
  if config.cluster_n > 1:
    return f"{way} excludes cluster_n: no lhs is multicast so"
  wg_m, wg_n = specialised.wg_tile(config)
  if wg_n != config.tile_n:
    return f"{way}: each consumer takes all columns of a tile"
  if its_way == "skewed" and wg_m != fragments.ROWS:
    return f"{way}: each consumer takes {fragments.ROWS} rows of a tile"
  if its_way != "skewed" and wg_m * wg_n > MAX_SUMS_BESIDE_RUN * tiles.WG_THREADS:
    return f"{way}: sums of {wg_m}x{wg_n} leave too few registers for lhs"
  epilogue = problem.epilogue
  if epilogue.gated or epilogue.has_c or epilogue.scaling != "none":
    return f"{way} excludes c, scales and gated products"
  if config.swap and epilogue.has_bias and (reordered or its_way == "skewed"):
    return f"{way} with swap=True excludes bias"
  return None


def check_swap(problem: Problem, config: PersistentConfig) -> str | None:
  """Why the result cannot be stored transposed, or None."""
  epilogue = problem.epilogue
  if config.swap and config.split_lhs and epilogue.has_bias:
    return "swap=True with split_lhs=True excludes bias"
  if not config.swap or config.split_lhs:
    return None
  if problem.out_itemsize != 2:
    return f"swap=True stores 16-bit results, not {problem.out_dtype}"
  if epilogue.c_dtype == "float32":
    return "swap=True takes c of 16 bits, not float32"
  odd = problem.n % tiles.tma_stride_elems(problem.out_dtype) > 0
  if odd and ways.of_lhs(specialised.multiplied(problem, config), config) is None:
    return f"swap=True: TMA cannot store rows of n={problem.n} elements"
  return None


def check_scales(problem: Problem, config: PersistentConfig) -> str | None:
  """Why the scales of the problem cannot be applied, or None."""
  scaling = problem.epilogue.scaling
  if scaling != "none" and config.swap:
    return f"swap=True excludes scaling={scaling!r}"
  if scaling == "blocks":
    return block_scales.check(config, specialised.wg_tile(config))
  return None


def check_gated(problem: Problem, config: PersistentConfig) -> str | None:
  """Why the columns of two rhs cannot lie side by side in a tile, or None."""
  if not problem.epilogue.gated:
    return None
  if problem.itemsize != 2:
    return f"gated products are of 16-bit operands, not of {problem.dtype}"
  if config.wg_dim == "n":
    return "wg_dim='n': each consumer of a gated product needs columns of both rhs"
  for name, wanted in (("promote", 0), ("misaligned", "padded")):
    if getattr(config, name) != wanted:
      return f"{name}={getattr(config, name)!r}: gated products take {wanted!r}"
  if config.swap:
    step = 2 * fragments.ROWS
    if specialised.wg_tile(config)[0] != config.tile_m:
      return (
          f"wg_dim={config.wg_dim!r}, swap=True: each consumer of a gated product needs"
          " rows of both matrices"
      )
    if config.tile_m % step:
      return f"tile_m={config.tile_m} must be a multiple of {step} for two matrices"
    return None
  step = 2 * max(tiles.rhs_block(problem), tiles.LEAST_COLUMNS)
  if config.tile_n % step:
    return f"tile_n={config.tile_n} must be a multiple of {step} for two rhs"
  return None


def check_terms(problem: Problem, config: PersistentConfig) -> str | None:
  """Why the products of several pairs of operands cannot be added up, or None."""
  terms, epilogue = problem.terms, problem.epilogue
  if terms == 1:
    return None
  if problem.itemsize != 2 or problem.converts:
    return f"terms={terms}: of 16-bit operands, not {'/'.join(problem.stored_dtypes)}"
  if epilogue.gated or epilogue.scaling != "none" or problem.norm_eps is not None:
    return f"terms={terms} excludes two rhs, scales and a norm"
  if config.misaligned != "padded":
    return f"misaligned={config.misaligned!r}: TMA brings the operands of several terms"
  if problem.k % (terms * config.tile_k):
    return (
        f"k={problem.k} of {terms} terms: each has a multiple of tile_k={config.tile_k}"
    )
  return None


def _check_tile(product: Problem, config: PersistentConfig) -> str | None:
  """Why TMA and wgmma cannot work on the tile, or None."""
  if config.split_lhs:
    reason = lhs_registers.check(config, specialised.registers(config))
    return reason or tiles.check_count(product, config.tile_m, config.tile_n)
  reason = tiles.check_tile(
      product, config.tile_m, config.tile_n, config.tile_k, most_n=specialised.MAX_TILE_N
  )
  wg_n, step = specialised.wg_tile(config)[1], tiles.rhs_block(product)
  few = wg_n < tiles.LEAST_COLUMNS
  if reason is None and wg_n < config.tile_n and (wg_n % step or few):
    reason = (
        f"{wg_n} columns a warpgroup must be a multiple of {step}, at least"
        f" {tiles.LEAST_COLUMNS}"
    )
  return reason


def of_bfloat16_parts(
    problem: Problem, config: PersistentConfig, supports: Supports
) -> PersistentConfig | None:
  """The config of the same kernel where float16 parts lose bits; None: there is none."""
  for tile_n in (128, 64):
    found = dataclasses.replace(
        config, float16_parts=False, tile_m=128, tile_n=tile_n, num_stages=2,
        consumers=2, wg_dim="m",
    )
    if supports(problem, found) is None:
      return found
  return None


def check_parts(
    problem: Problem, config: PersistentConfig, supports: Supports
) -> str | None:
  """Why a kernel cannot take the parts that the config says, or None."""
  if (reason := parts.check(problem, config)) is not None:
    return reason
  if config.float16_parts and of_bfloat16_parts(problem, config, supports) is None:
    return "float16_parts=True: bfloat16 parts do not fit in their place"
  return None
