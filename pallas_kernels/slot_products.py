"""Products of slots: what wgmma makes of a k tile of both operands.

The slots are those of `operand_tiles`, which says how an operand may lie in them.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import fresh_sums, partial_wgmma, tiles
from pallas_kernels.operand_tiles import Prepared

Ref = Any  # A Pallas reference.


def multiply_fragments(acc: Ref, lhs: jax.Array, prepared: Prepared, slots: Ref, slot):
  """acc += rows of lhs in registers times all columns of a slot of rhs."""
  rhs = prepared.rhs_operand
  if not rhs.k_major:
    partial_wgmma.multiply(
        acc, lhs, rhs.stored(slots, slot, 0, rhs.slot_mn), k_major_lhs=True,
        transforms=tiles.swizzled(rhs.dtype, rhs.swizzle), in_registers=True,
    )
    return
  for first, size in rhs.parts(acc.shape[1]):
    part = acc if size == acc.shape[1] else acc.at[:, pl.ds(first, size)]
    plgpu.wgmma(part, lhs, rhs.view(slots, slot, first, size))


def multiply(
    acc: Ref, prepared: Prepared, slots: tuple[Ref, Ref], slot, *, lhs_start=0,
    rhs_start=0, parts: tuple[int, int] = (0, 0), depth: int | None = None,
) -> int:
  """acc += the product of a slot of lhs and one of rhs, from the given rows on.

  Of all k, or of the first `depth`, a multiple of 16, of 16-bit operands.
  Returns the number of wgmma groups: one where an instruction holds all columns.
  """
  lhs, rhs = prepared.lhs_operand, prepared.rhs_operand
  rows, cols = acc.shape
  depth = depth or rhs.tile_k
  some_cols = cols % tiles.swizzle_elems(rhs.dtype) > 0 and not rhs.k_major
  in_chunks = "chunks" in (lhs.way, rhs.way)  # Pallas would multiply each by itself.
  if (some_cols or in_chunks or depth < rhs.tile_k) and not rhs.emulated:
    columns = (0, rhs.slot_mn) if some_cols else (rhs_start, cols)
    partial_wgmma.multiply(
        acc, lhs.stored(slots[0], slot, lhs_start, rows, parts[0]),
        rhs.stored(slots[1], slot, *columns, parts[1]), k_major_lhs=lhs.k_major,
        transforms=tiles.swizzled(rhs.dtype, rhs.swizzle), k_major_rhs=rhs.k_major,
        depth=depth,
    )
    return 1
  row_parts, col_parts = lhs.parts(rows), rhs.parts(cols)
  for first_row, num_rows in row_parts:
    for first_col, num_cols in col_parts:
      whole = (num_rows, num_cols) == (rows, cols)
      part = acc if whole else acc.at[
          pl.ds(first_row, num_rows), pl.ds(first_col, num_cols)
      ]
      plgpu.wgmma(
          part,
          lhs.view(slots[0], slot, lhs_start + first_row, num_rows, parts[0], depth),
          rhs.view(slots[1], slot, rhs_start + first_col, num_cols, parts[1], depth),
      )
  return len(row_parts) * len(col_parts)


def product(
    prepared: Prepared, slots: tuple[Ref, Ref], slot, shape: tuple[int, int], *,
    lhs_start, rhs_start,
) -> jax.Array:
  """The product [rows, cols] of a slot of lhs and one of rhs, in flight: one wgmma group.

  Of 8-bit operands; see `fresh_sums`.
  """
  lhs, rhs = prepared.lhs_operand, prepared.rhs_operand
  if lhs.emulated:

    def run(acc):
      multiply(acc, prepared, slots, slot, lhs_start=lhs_start, rhs_start=rhs_start)
      return acc[...]

    return pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))
  return fresh_sums.multiply(
      lhs.stored(slots[0], slot, lhs_start, shape[0]),
      rhs.stored(slots[1], slot, rhs_start, shape[1]),
  )
