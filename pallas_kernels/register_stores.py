"""Pieces of a result that TMA cannot store, or not as fast, stored through registers.

TMA wants rows that begin a multiple of 16 bytes apart, and pieces of 128 bytes of them
(see `epilogue_choice.stores_wide`). Here the threads of a warpgroup write the piece
instead, each as many bytes at once as every row is aligned to, a unit, and only what lies
inside the result:

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
  behind,
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
  a multiple of 16 bytes. `col` is a multiple of 8.
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
    words = Words(width, itemsize)
    mgpu.utils.warpgroup_barrier()  # The last piece has been read.
    if transposed:
      _write_transposed(piece, slot, pitch, row_order)
    else:
      piece.store_untiled(
          mgpu.utils.memref_slice(slot, (slice(None), slice(0, cols))), optimized=False
      )
    mgpu.utils.warpgroup_barrier()
    out = _Out(out, row, col, end, itemsize)
    thread = arith.remui(mgpu.utils.thread_idx(), i32(tiles.WG_THREADS))
    slot = mgpu.utils.memref_ptr(slot), pitch * itemsize
    order = "as they are" if transposed else row_order
    if _step(rows, cols // width):
      _store_rows(words, thread, slot, out, rows, cols // width, order)
    else:
      _store_units(words, thread, slot, out, rows, cols // width, order)

  if end is None:
    end = out_gmem.shape[0]
  write(piece, slot, out_gmem, jnp.int32(row), jnp.int32(col), jnp.int32(end))


class _Out:
  """Where the elements of a piece at (row, col) lie in the array."""

  def __init__(self, out, row, col, end, itemsize: int):
    _, self.num_cols = ir.MemRefType(out.type).shape
    self.row, self.col, self.end, self._itemsize = row, col, end, itemsize
    self._base = i64_address(mgpu.utils.memref_ptr(out))

  @property
  def row_bytes(self) -> int:
    return self.num_cols * self._itemsize

  def address(self, row, col):
    element = arith.addi(arith.muli(i64(row), const64(self.num_cols)), i64(col))
    return arith.addi(self._base, arith.muli(element, const64(self._itemsize)))


def _store_rows(
    words: Words, thread, slot: tuple[Any, int], out: _Out, rows: int, per_row: int,
    row_order: fragments.RowOrder,
) -> None:
  """Stores rows of `per_row` units, which divide the warpgroup: whole rows at once."""
  base, pitch_bytes = slot
  first_row = arith.divui(thread, i32(per_row))
  unit = arith.remui(thread, i32(per_row))
  slot_address = behind(base, arith.addi(
      arith.muli(first_row, i32(pitch_bytes)), arith.muli(unit, i32(words.num_bytes))
  ))
  step = _step(rows, per_row)
  found = [words.load(slot_address, i * step * pitch_bytes) for i in range(rows // step)]
  out_row = arith.addi(out.row, first_row)
  out_col = arith.addi(out.col, arith.muli(unit, i32(words.num_elements)))
  address = out.address(out_row, out_col)
  in_cols = less(out_col, out.num_cols)
  left = arith.select(in_cols, arith.subi(out.end, out_row), i32(0))
  for i, values in enumerate(found):
    if row_order != "as they are":
      stored = fragments.row_of(row_order, arith.addi(first_row, i32(i * step)))
      at = arith.addi(out.row, stored)
      inside = arith.andi(in_cols, less(at, out.end))
      words.store(out.address(at, out_col), 0, values, inside)
      continue
    inside = less(i32(i * step), left)
    words.store(address, i * step * out.row_bytes, values, inside)


def _store_units(
    words: Words, thread, slot: tuple[Any, int], out: _Out, rows: int, per_row: int,
    row_order: fragments.RowOrder,
) -> None:
  """The same of any number of units a row: the threads take one after the other."""
  (base, pitch_bytes), total = slot, rows * per_row
  # Else places are computed before all tiles, and kept beside their sums: 192 spill.
  thread = mgpu.utils.inline_ptx(
      "mov.b32 $0, $1;", thread, result_types=i32_type(), has_side_effects=True
  )

  def load(first: int):
    unit = arith.addi(thread, i32(first))
    is_one = less(unit, total)
    row, unit = (op(unit, i32(per_row)) for op in (arith.divui, arith.remui))
    row = arith.minui(row, i32(rows - 1))
    address = behind(base, arith.addi(
        arith.muli(row, i32(pitch_bytes)), arith.muli(unit, i32(words.num_bytes))
    ))
    return row, unit, is_one, words.load(address, 0)

  found = [load(first) for first in range(0, total, tiles.WG_THREADS)]
  for row, unit, is_one, values in found:
    row = arith.addi(out.row, fragments.row_of(row_order, row))
    col = arith.addi(out.col, arith.muli(unit, i32(words.num_elements)))
    inside = arith.andi(less(col, out.num_cols), less(row, out.end))
    words.store(out.address(row, col), 0, values, arith.andi(is_one, inside))


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
    address = behind(
        mgpu.utils.memref_ptr(slot), arith.muli(place, i32(itemsize))
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
  while num_cols % width or cols % width or _step(rows, cols // width) is None:
    width //= 2
  return width


def _step(rows: int, per_row: int) -> int | None:
  """Rows of so many units that the warpgroup stores at once; None: no whole number.

  0: units, rather: their rows do not divide the warpgroup.
  """
  step, rest = divmod(tiles.WG_THREADS, per_row)
  if rest:
    return 0
  return step if rows % step == 0 else None


class Words:
  """Loads and stores of 2 to 16 bytes: units of `num_elements`."""

  def __init__(self, num_elements: int, itemsize: int):
    self.num_elements, self.num_bytes = num_elements, num_elements * itemsize
    num_bytes = self.num_bytes
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
