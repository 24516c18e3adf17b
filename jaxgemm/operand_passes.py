"""Passes over operands before a kernel: which there are, and over how many bytes.

What `preparing` and `parts` do to operands that a kernel cannot take as they are.
"""

from __future__ import annotations

import dataclasses
import functools
import math

from pallas_kernels import (
  halves_pass,
  lhs_registers,
  norms,
  padding,
  parts,
  specialised,
  tiles,
  ways,
)
from pallas_kernels.configs import Config, PersistentConfig
from pallas_kernels.problem import Problem

# What is done to an operand before the kernel, to which, and the bytes read and written.
Pass = tuple[str, str, int]


def passes(problem: Problem, config: Config) -> tuple[Pass, ...]:
  """The passes over operands that a config needs if it loads none through registers."""
  product = product_of(problem, config)
  found = of_product(product)
  if problem.norm_eps is not None and norms.pads(problem.k):
    found += (("padding", "the norm's weights", 2 * problem.k * problem.itemsize),)
  if ways.of_lhs(product, config) is not None:
    return tuple(each for each in found if each[1] != "lhs")
  return found


@functools.lru_cache(maxsize=1024)
def of_product(problem: Problem) -> tuple[Pass, ...]:
  """The same of what is multiplied."""
  found = []
  lhs_way, rhs_way = ways.of(problem)
  for name, shape, k_major, way in (
      ("lhs", problem.lhs_shape, problem.lhs_layout == "k-major", lhs_way),
      ("rhs", problem.rhs_shape, problem.rhs_layout == "k-major", rhs_way),
  ):
    what = _pass_over(problem, shape, k_major, way)
    if what is not None:
      found.append((what, name, 2 * math.prod(shape) * problem.itemsize))
  return tuple(found)


def splitting(
    problem: Problem, config: Config, split: parts.Parts
) -> tuple[Pass, ...]:
  """The passes that make the parts: each reads 4 bytes an element, and writes 2 a part.

  They pad as well. Where the parts are scaled, one more reads the operand first, unless a
  kernel keeps whole rows. lhs that is split in registers is only padded, if at all, but
  the product of swapped operands is transposed.
  """
  lhs, rhs = (
      ("splitting", operand, math.prod(shape) * _split_bytes(shape, layout, split))
      for operand, shape, layout in (
          ("lhs", problem.lhs_shape, problem.lhs_layout),
          ("rhs", problem.rhs_shape, problem.rhs_layout),
      )
  )
  if not split.lhs_in_registers:
    return lhs, rhs
  found = [lhs if config.swap else rhs]
  product = specialised.multiplied(problem, config)
  n_major = product.rhs_layout == "n-major"
  if n_major and not lhs_registers.takes_n_major(config):
    found.append(("transposing", found[0][1], 8 * math.prod(product.rhs_shape)))
  way = "flat" if product.lhs_layout == "k-major" else "tiled"
  if padding.needs_padding(*product.lhs_shape[1:], "float32", way):
    operand = "rhs" if config.swap else "lhs"
    found.append(("padding", operand, 8 * math.prod(product.lhs_shape)))
  if config.swap and min(problem.m, problem.n) > 1:
    stored = problem.batch * problem.m * problem.n * problem.out_itemsize
    found.append(("transposing", "the result", 2 * stored))
  return tuple(found)


def scaled_by_xla(problem: Problem) -> int:
  """The operands whose scaled parts no kernel makes: 0 to 2."""
  return sum(
      not halves_pass.serves(shape, layout == "k-major")
      for shape, layout in (
          (problem.lhs_shape, problem.lhs_layout), (problem.rhs_shape, problem.rhs_layout)
      )
  )


def _split_bytes(shape: tuple[int, ...], layout: str, split: parts.Parts) -> int:
  """The bytes that splitting reads and writes for each element."""
  along_cols = layout == "k-major"
  read_once = along_cols and halves_pass.serves(shape, along_cols)
  reads = 2 if split.scaled and not read_once else 1
  return 4 * reads + 2 * split.count


def product_of(problem: Problem, config: Config) -> Problem:
  """What the kernel multiplies."""
  if isinstance(config, PersistentConfig):
    return specialised.multiplied(problem, config)
  return problem


@functools.lru_cache(maxsize=1024)
def as_read(problem: Problem) -> Problem:
  """The problem with the layouts that the kernel reads, 8 bits behind a transposition."""
  if problem.itemsize > 1:
    return problem
  return dataclasses.replace(problem, lhs_layout="k-major", rhs_layout="k-major")


def warpgroup_tile(config: Config) -> tuple[int, int]:
  """Rows and columns that one warpgroup multiplies."""
  if isinstance(config, PersistentConfig):
    return specialised.wg_tile(config)
  return config.tile_m, config.tile_n


@functools.lru_cache(maxsize=1024)
def misaligned(problem: Problem, num_bytes: int) -> tuple[str, ...]:
  """The operands whose rows do not all begin at multiples of `num_bytes`."""
  shapes = (("lhs", problem.lhs_shape), ("rhs", problem.rhs_shape))
  return tuple(
      operand for operand, shape in shapes if shape[-1] * problem.itemsize % num_bytes
  )


def _pass_over(problem: Problem, shape, k_major: bool, way: str) -> str | None:
  """What `preparing` does to an operand before the kernel, or None."""
  if problem.dtype == "float32":
    return "rounding" if k_major else "rounding and transposing"
  if tiles.reads_k_major_only(problem.dtype) and not k_major:
    return "transposing"
  padded = padding.needs_padding(*shape[1:], problem.dtype, way)
  return "padding" if padded else None
