"""Pieces of a result that TMA cannot store, stored through registers.

TMA wants rows that begin a multiple of 16 bytes apart. Here the threads of a
warpgroup write the piece instead, each as many bytes at once as every row is aligned
to, and only what lies inside the result:

  registers -> shared memory -> registers -> GMEM

A wgmma fragment scatters pairs of elements over eight rows; the way through shared
memory gives the neighbours of a row to neighbouring threads. All loads come first:
each guarded store would else wait for a load of its own.
"""

from __future__ import annotations

from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from pallas_kernels import fragments, tiles
from pallas_kernels.integers import (
  const64,
  i32,
  i32_type,
  i64,
  i64_address,
  less,
  place_of_fragment,
)

MAX_BYTES = 16  # That a thread stores at once.
_SCALAR = plgpu.Layout.WG_SPLAT(())
Ref = Any


def store(
    piece, slot: Ref, out_gmem: Ref, row, col, end=None, *, transposed: bool = False,
    row_order: fragments.RowOrder = "as they are",
) -> None:
  """Stores a piece [rows, cols] at (row, col) of an array [num_rows, num_cols].

  Of its rows those before `end`, if it is given: those behind are others'.
  With `transposed` the transposed piece. `row_order` says for which of its 64 rows each
  stands: see `fragments.row_of`.
  `slot` is a piece of shared memory of its shape, or with a longer row pitch that is
  a multiple of 16 bytes. `col` is a multiple of 16.
  """
  rows, cols = piece.shape[::-1] if transposed else piece.shape
  itemsize = jnp.dtype(piece.dtype).itemsize

  @plgpu.inline_mgpu(
      arg_types=(
          plgpu.Layout.WGMMA, plgpu.RefType(), plgpu.RefType(), _SCALAR, _SCALAR,
          _SCALAR,
      )
  )
  def write(_, piece, slot, out, row, col, end):
    row, col, end = (x.registers.item() for x in (row, col, end))
    _, num_cols = ir.MemRefType(out.type).shape
    _, pitch = ir.MemRefType(slot.type).shape
    width = _width(rows, cols, num_cols, itemsize)
    words = _Words(width * itemsize)
    mgpu.utils.warpgroup_barrier()  # The last piece has been read.
    if transposed:
      _write_transposed(piece, slot, pitch, row_order)
    else:
      piece.store_untiled(
          mgpu.utils.memref_slice(slot, (slice(None), slice(0, cols))), optimized=False
      )
    mgpu.utils.warpgroup_barrier()
    per_row = cols // width
    thread = arith.remui(mgpu.utils.thread_idx(), i32(tiles.WG_THREADS))
    first_row = arith.divui(thread, i32(per_row))
    lane_col = arith.muli(arith.remui(thread, i32(per_row)), i32(width))
    start = arith.addi(arith.muli(first_row, i32(pitch)), lane_col)
    slot_address = mgpu.utils.getelementptr(
        mgpu.utils.memref_ptr(slot), [arith.muli(start, i32(itemsize))],
        ir.IntegerType.get_signless(8),
    )
    step = tiles.WG_THREADS // per_row  # Rows that the warpgroup writes at once.
    found = [
        words.load(slot_address, i * step * pitch * itemsize) for i in range(rows // step)
    ]
    out_row, out_col = arith.addi(row, first_row), arith.addi(col, lane_col)

    def address_of(out_row):
      element = arith.addi(arith.muli(i64(out_row), const64(num_cols)), i64(out_col))
      return arith.addi(
          i64_address(mgpu.utils.memref_ptr(out)),
          arith.muli(element, const64(itemsize)),
      )

    address = address_of(out_row)
    in_cols = arith.cmpi(arith.CmpIPredicate.slt, out_col, i32(num_cols))
    left = arith.select(in_cols, arith.subi(end, out_row), i32(0))
    for i, values in enumerate(found):
      if row_order != "as they are" and not transposed:
        stored = fragments.row_of(row_order, arith.addi(first_row, i32(i * step)))
        at = arith.addi(row, stored)
        inside = arith.andi(in_cols, less(at, end))
        words.store(address_of(at), 0, values, inside)
        continue
      inside = arith.cmpi(arith.CmpIPredicate.sgt, left, i32(i * step))
      words.store(address, i * step * num_cols * itemsize, values, inside)

  if end is None:
    end = out_gmem.shape[0]
  write(piece, slot, out_gmem, jnp.int32(row), jnp.int32(col), jnp.int32(end))


def _write_transposed(
    piece, slot, pitch: int, row_order: fragments.RowOrder
) -> None:
  """Writes a fragment's columns into the slot's rows."""
  element = piece.mlir_dtype
  itemsize = mgpu.bytewidth(element)
  bits = ir.IntegerType.get_signless(8 * itemsize)
  warp, group, lane = place_of_fragment()
  for i, pair in enumerate(piece.registers.flat):
    block, half = divmod(i, 2)
    row = arith.addi(arith.addi(arith.shli(warp, i32(4)), group), i32(8 * half))
    row = fragments.row_of(row_order, row)
    col = arith.shli(lane, i32(1))
    place = arith.addi(arith.muli(col, i32(pitch)), row)
    address = mgpu.utils.getelementptr(
        mgpu.utils.memref_ptr(slot), [arith.muli(place, i32(itemsize))],
        ir.IntegerType.get_signless(8),
    )
    for odd in range(2):
      value = vector.extract(pair, dynamic_position=[], static_position=[odd])
      mgpu.utils.inline_ptx(
          f"st.shared.b{8 * itemsize} [$0 + {(8 * block + odd) * pitch * itemsize}], $1;",
          address, arith.bitcast(bits, value), has_side_effects=True,
      )


def _width(rows: int, cols: int, num_cols: int, itemsize: int) -> int:
  """Elements that a thread stores at once."""
  width = MAX_BYTES // itemsize
  while num_cols % width or cols % width or rows * cols % (tiles.WG_THREADS * width):
    width //= 2
  return width


class _Words:
  """Loads and stores of 2 to 16 bytes."""

  def __init__(self, num_bytes: int):
    self.count = max(1, num_bytes // 4)
    kind = "b16" if num_bytes == 2 else "b32"
    self.kind = f"v{self.count}.{kind}" if self.count > 1 else kind
    self.type = ir.IntegerType.get_signless(16 if num_bytes == 2 else 32)

  def load(self, address, offset: int) -> list[ir.Value]:
    names = self._names(0)
    words = mgpu.utils.inline_ptx(
        f"ld.shared.{self.kind} {names}, [${self.count} + {offset}];", address,
        result_types=[self.type] * self.count, has_side_effects=True,
    )
    return list(words)

  def store(self, address, offset: int, words: list[ir.Value], inside) -> None:
    address = arith.addi(address, const64(offset))
    mgpu.utils.inline_ptx(
        f"{{ .reg .pred p; setp.ne.b32 p, $1, 0; @p st.global.{self.kind} [$0],"
        f" {self._names(2)}; }}",
        address, arith.extui(i32_type(), inside), *words,
        has_side_effects=True,
    )

  def _names(self, first: int) -> str:
    names = ", ".join(f"${first + i}" for i in range(self.count))
    return f"{{{names}}}" if self.count > 1 else names
