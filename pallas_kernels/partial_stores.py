"""Pieces of which only the first rows are stored, as the others are another group's.

TMA clips what it stores at the end of an array, nowhere else. So the threads of a
warpgroup store such a piece from their fragments, pair by pair: eight rows of 16 bytes an
instruction, which costs twice the transactions of whole lines. Whole pieces leave
through TMA, and nothing is done here.
"""

from __future__ import annotations

from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from pallas_kernels.integers import (
  const64,
  i32,
  i32_type,
  i64,
  i64_address,
  less,
  place_of_fragment,
)

_SCALAR = plgpu.Layout.WG_SPLAT(())
Ref = Any


def store(piece, out_gmem: Ref, row, col, end, *, transposed: bool) -> None:
  """Stores rows before `end` of a piece at (row, col), if it has any from `end` on.

  Args:
    piece: [64, cols] of an array [num_rows, num_cols], or with `transposed` [64, rows]
      of the transposed one, whose elements have 16 bits.
    row, col: where it begins; both are even, as is num_cols.
    end: of the rows.
  """
  rows = piece.shape[int(transposed)]
  itemsize = jnp.dtype(piece.dtype).itemsize

  @plgpu.inline_mgpu(
      arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(), _SCALAR, _SCALAR, _SCALAR)
  )
  def write(_, piece, out, row, col, end):
    row, col, end = (x.registers.item() for x in (row, col, end))
    _, num_cols = ir.MemRefType(out.type).shape
    warp, group, lane = place_of_fragment()
    along = arith.addi(arith.shli(warp, i32(4)), group)  # Of the 64 that a piece has.
    across = arith.shli(lane, i32(1))
    if transposed:
      row, col = arith.addi(row, across), arith.addi(col, along)
    else:
      row, col = arith.addi(row, along), arith.addi(col, across)
    element = arith.addi(arith.muli(i64(row), const64(num_cols)), i64(col))
    address = arith.addi(
        i64_address(mgpu.utils.memref_ptr(out)),
        arith.muli(element, const64(itemsize)),
    )
    begin = arith.subi(row, across if transposed else along)
    partial = less(end, arith.addi(begin, i32(rows)))

    def put(value, rows_on: int, cols_on: int):
      inside = arith.andi(
          less(arith.addi(row, i32(rows_on)), end),
          less(arith.addi(col, i32(cols_on)), num_cols),
      )
      _store(
          arith.addi(address, const64((rows_on * num_cols + cols_on) * itemsize)),
          value, arith.andi(inside, partial),
      )

    for i, pair in enumerate(piece.registers.flat):
      block, half = divmod(i, 2)
      if not transposed:
        put(_bits(pair, 2 * itemsize), 8 * half, 8 * block)
        continue
      for odd in range(2):
        value = vector.extract(pair, dynamic_position=[], static_position=[odd])
        kind = ir.IntegerType.get_signless(8 * itemsize)
        put(arith.bitcast(kind, value), 8 * block + odd, 8 * half)

  write(piece, out_gmem, jnp.int32(row), jnp.int32(col), jnp.int32(end))


def _bits(pair, num_bytes: int) -> ir.Value:
  """A pair of elements as one integer."""
  kind = ir.IntegerType.get_signless(8 * num_bytes)
  cast = vector.bitcast(ir.VectorType.get((1,), kind), pair)
  return vector.extract(cast, dynamic_position=[], static_position=[0])


def _store(address, value, wanted) -> None:
  bits = ir.IntegerType(value.type).width
  mgpu.utils.inline_ptx(
      f"{{ .reg .pred p; setp.ne.b32 p, $2, 0; @p st.global.b{bits} [$0], $1; }}",
      address, value, arith.extui(i32_type(), wanted), has_side_effects=True,
  )
