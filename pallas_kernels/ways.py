"""The ways that operands go: see `operand_tiles`, which brings them.

What a problem and a config say of them, for plans, checks and launches alike.
"""

from __future__ import annotations

import functools
from typing import Literal

from pallas_kernels import fragments, padding, tiles
from pallas_kernels.configs import Config
from pallas_kernels.problem import Problem

LhsWay = Literal["converted", "skewed", "runs"]


def of_lhs(product: Problem, config: Config) -> LhsWay | None:
  """How lhs comes if it goes to wgmma through the consumers' registers; else None.

  `product` is what the kernel multiplies: operands may have changed places.
  """
  if product.lhs_source:
    return "converted"
  misaligned = getattr(config, "misaligned", "padded")
  return misaligned if misaligned in ("skewed", "runs") else None


def row_order(way: str | None, *, k_major: bool) -> fragments.RowOrder:
  """Which rows those of a sum stand for, of lhs that comes in this way."""
  if way == "skewed" and k_major:
    return "eighths"
  return "pairs" if way == "converted" and not k_major else "as they are"


@functools.lru_cache(maxsize=1024)  # A plan asks for the same few again and again.
def of(problem: Problem) -> tuple[str, str]:
  """The ways of lhs and rhs."""
  lhs, rhs = (problem.matrices_of(operand) for operand in ("lhs", "rhs"))
  return (
      _way(problem.lhs_shape, problem.lhs_layout, problem.dtype, lhs),
      _way(problem.rhs_shape, problem.rhs_layout, problem.dtype, rhs),
  )


def _way(shape, layout: str, dtype, matrices: int) -> str:
  _, rows, cols = shape
  if layout == "k-major":
    return "flat"
  if matrices > 1:  # A tiled copy of some columns of a slot would bring 8 rows at once.
    return "chunks"
  fits = not padding.needs_padding(rows, cols, dtype, "tiled")
  # A pass that mends the stride pads whatever else is wanted.
  return "tiled" if fits or cols % tiles.tma_stride_elems(dtype) else "chunks"


def takes_loads(problem: Problem, config) -> bool:
  """Whether the kernel of `config` loads through registers what TMA cannot take.

  float32 operands take a pass anyway, which pads them at no cost.
  """
  return getattr(config, "misaligned", None) == "loads" and problem.itemsize == 2
