"""Batch invariance: which configs give a row the same bits, whatever else is multiplied.

An element of a result is a sum over k. The tensor cores add up 16 or 8 products at a
time, in the order of k, the same for each tile that the element may lie in. So its bits
depend on the config only where that

  splits k              the parts are rounded before they are added;
  promotes              every so many k tiles are rounded: as many in each config;
  multiplies in parts   float16 ones are taken or left for the sake of all rows, those
                        that are split in registers are others, and rounding errors are
                        kept where a tile leaves the registers for it.

What is left chooses among kernels, tiles, stages, clusters, orders of tiles and the way
of lhs: out of registers the tensor cores add up as out of shared memory (float32 results
of lhs that comes skewed, or in runs, are those of lhs that is padded, bit by bit:
tests/test_gpu.py, tests/test_run_loads.py).

Source: He et al., "Defeating nondeterminism in LLM inference" (2025).
"""

from __future__ import annotations

from jaxgemm import exactness
from pallas_kernels import accumulate, parts, specialised, tiles
from pallas_kernels.configs import Config, GemvConfig, TritonConfig
from pallas_kernels.problem import Problem


def why_not(problem: Problem, config: Config | None) -> str | None:
  """The reason why a row's bits may depend on other rows, or None; config None: XLA's."""
  if config is None:
    return "XLA sums as it sees fit"
  if isinstance(config, TritonConfig):
    return "the portable kernel multiplies tiles in other orders"
  if isinstance(config, GemvConfig):
    return "gemv serves few rows alone, without tensor cores"
  if getattr(config, "splits", 1) > 1:
    return "k is split, and the more the fewer rows there are"
  tile_k = tiles.swizzle_elems(parts.product(problem).dtype)
  if config.tile_k != tile_k:
    return f"tile_k={config.tile_k} is not {tile_k}, as where other rows are planned"
  promote = exactness.promotion(problem, tiles.cdiv(problem.k, tile_k))
  if config.promote != promote:
    return f"promote={config.promote} is not {promote}, as where other rows are planned"
  if parts.is_split(problem):
    if config.float16_parts or config.split_lhs:
      return "float32 operands are split as other rows need it"
    if promote and not accumulate.fits(3, specialised.wg_tile(config)):
      return "its tile leaves no registers for the rounding errors of sums"
  return None
