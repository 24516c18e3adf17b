"""Tiles of a result whose rows begin within sectors of 32 bytes, in whole sectors.

What the L2 and the memory write at least is a sector, and one that two stores fill in
part costs them several times as much (H200, kernels that only store, 34 MB of 16 bits:
9.1 us of rows of 6208 elements; of 6177, in pieces of 64 columns, 19 to 24; in whole
sectors 9.8). So a sector belongs to the tile, and to the piece of it, that has its first
element; and as it may end among the columns of the next, tiles overlap: each has `halo`
columns of the next one, and the grid advances by so many less.

  sectors   |   0   |   1   |   2   |   3   |   4   |   5   |    of one row
  tile 0     ............................---                     -: its halo
  tile 1                                 ............................---
  stored    00000000000000000000000000000000111111111111111111111111...

  registers -> shared memory -> registers, shifted to units of the array -> GMEM

Before a row's first sector lie up to 15 elements that the first tile stores one by one,
as the last does with up to 7 behind the last whole unit.

Source: the PTX manual's stmatrix, which takes wgmma's fragments as they are.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from pallas_kernels import register_loads, tiles
from pallas_kernels.integers import (
  behind,
  const64,
  i32,
  i32_type,
  i64,
  i64_address,
  less,
)
from pallas_kernels.problem import Problem
from pallas_kernels.register_stores import Words

_ITEMSIZE = 2
_SECTOR = tiles.SECTOR_BYTES // _ITEMSIZE  # Elements.
_UNIT = _SECTOR // 2  # Elements that a thread stores at once.
_ACROSS = 8  # Threads that share a row, and so store 16 rows at once.
SPARE_ROWS = 1  # Of a slot: threads that store nothing read behind the last row.
_SCALAR = plgpu.Layout.WG_SPLAT(())
Ref = Any


def halo(num_cols: int) -> int:
  """Columns that a tile of rows of so many elements needs of the next; 0: none."""
  return tiles.round_up(_SECTOR - math.gcd(num_cols, _SECTOR), 8)


def check(problem: Problem, tile_n: int) -> str | None:
  """Why tiles of so many columns are not stored so, or None."""
  if problem.out_itemsize != _ITEMSIZE:
    return f"whole sectors are stored of 16-bit results, not of {problem.out_dtype}"
  if not halo(problem.n):
    return f"rows of n={problem.n} begin with sectors of {tiles.SECTOR_BYTES} bytes"
  if tile_n <= 2 * halo(problem.n):
    return f"tile_n={tile_n} is too narrow to share {halo(problem.n)} columns"
  if problem.epilogue.num_c:
    return "pieces of c would overlap, too"
  return None


def store(piece, slot: Ref, out_gmem: Ref, row, col, *, halo: int) -> None:
  """Stores the sectors of a piece [64, cols] of 16 bits at (row, col) of an array.

  Those that begin before the last `halo` columns; where the piece has the end of the
  rows, all. `slot` has `SPARE_ROWS` more, and a row pitch of an odd number of 16 bytes.
  """

  @plgpu.inline_mgpu(
      arg_types=(
          plgpu.Layout.WGMMA, plgpu.RefType(), plgpu.RefType(), _SCALAR, _SCALAR,
      )
  )
  def write(_, piece, slot, out, row, col):
    _, pitch = ir.MemRefType(slot.type).shape
    to = _Piece(
        piece.shape, ir.MemRefType(out.type).shape, pitch, halo,
        mgpu.utils.memref_ptr(slot), i64_address(mgpu.utils.memref_ptr(out)),
        row.registers.item(), col.registers.item(),
    )
    thread = arith.andi(mgpu.utils.thread_idx(), i32(tiles.WG_THREADS - 1))
    mgpu.utils.warpgroup_barrier()  # The last piece has been read.
    to.write([_word(pair) for pair in piece.registers.flat], thread)
    mgpu.utils.warpgroup_barrier()
    to.store_units(thread)
    with mgpu.utils.when(to.has_begin):
      to.store_first(thread)
    with mgpu.utils.when(to.has_end):
      to.store_last(thread)

  write(piece, slot, out_gmem, jnp.int32(row), jnp.int32(col))


class _Row(NamedTuple):
  """A row of a piece.

  Attributes:
    slot: where it begins in the slot.
    address: where the array has its first sector.
    shift: elements of the piece before that.
    left: rows of the array from this one on.
  """

  slot: ir.Value
  address: ir.Value
  shift: ir.Value
  left: ir.Value


class _Piece:
  """Where the elements of a piece lie, in its slot and in an array."""

  def __init__(
      self, shape: tuple[int, int], out_shape: tuple[int, int], pitch: int, halo: int,
      slot, out, row, col,
  ):
    (self.rows, self.cols), (self.num_rows, self.num_cols) = shape, out_shape
    self.row, self.pitch_bytes = row, pitch * _ITEMSIZE
    self.row_bytes = self.num_cols * _ITEMSIZE
    self.left = arith.subi(i32(self.num_cols), col)  # Elements from the first one on.
    # Whether the piece has the first, or the last, element of rows.
    self.has_begin, self.has_end = less(col, 1), less(self.left, self.cols + 1)
    self.stop = arith.select(self.has_end, self.left, i32(self.cols - halo))
    self._slot = slot
    self._base = arith.addi(out, arith.muli(i64(col), const64(_ITEMSIZE)))

  def _row(self, within) -> _Row:
    stored = arith.addi(self.row, within)
    begin = arith.addi(self._base, arith.muli(i64(stored), const64(self.row_bytes)))
    before = arith.subi(i32(0), arith.trunci(i32_type(), begin))
    shift_bytes = arith.andi(before, i32(tiles.SECTOR_BYTES - 1))
    return _Row(
        behind(self._slot, arith.muli(within, i32(self.pitch_bytes))),
        arith.addi(begin, i64(shift_bytes)), arith.shrui(shift_bytes, i32(1)),
        arith.subi(i32(self.num_rows), stored),
    )

  def write(self, words: list[ir.Value], thread) -> None:
    """Writes a fragment into the slot: 16 rows x 16 columns a warp at once."""
    lane = arith.andi(thread, i32(31))
    of_warp = arith.shli(arith.shrui(thread, i32(5)), i32(4))
    # Lanes have the addresses of 8 rows of each matrix: of two below each other, then of
    # the two to the right.
    row = arith.addi(of_warp, arith.andi(lane, i32(15)))
    col_bytes = arith.andi(lane, i32(16))
    address = behind(
        self._slot, arith.addi(arith.muli(row, i32(self.pitch_bytes)), col_bytes)
    )
    for first in range(0, len(words), 4):
      some = words[first : first + 4]
      names = ", ".join(f"${1 + i}" for i in range(len(some)))
      mgpu.utils.inline_ptx(
          f"stmatrix.sync.aligned.m8n8.x{len(some)}.shared.b16"
          f" [$0 + {8 * first}], {{{names}}};",
          address, *some, has_side_effects=True,
      )

  def store_units(self, thread) -> None:
    """Stores what lies in whole units of the piece's sectors, by all threads.

    Each has the same unit of every eight, of every 16th row: those have the same shift,
    whatever the length of a row.
    """
    at_once = tiles.WG_THREADS // _ACROSS
    row = self._row(arith.shrui(thread, i32(_ACROSS.bit_length() - 1)))
    unit = arith.andi(thread, i32(_ACROSS - 1))
    shift = register_loads.Shift(arith.muli(i64(row.shift), const64(_ITEMSIZE)))
    first_unit = arith.addi(unit, arith.divui(row.shift, i32(_UNIT)))
    slot = behind(row.slot, arith.shli(first_unit, i32(4)))
    address = arith.addi(row.address, i64(arith.shli(unit, i32(4))))
    words, shifted = Words(_UNIT, _ITEMSIZE), self.num_cols % _UNIT > 0
    found = []
    for first in range(0, self.cols // _UNIT, _ACROSS):
      in_cols = self._in_sectors(row, arith.addi(unit, i32(first)))
      for again in range(0, self.rows, at_once):
        offset = again * self.pitch_bytes + first * words.num_bytes
        values = words.load(slot, offset)
        if shifted:
          values = shift.of(values + words.load(slot, offset + words.num_bytes))
        inside = arith.andi(in_cols, less(again, row.left))
        at = again * self.row_bytes + first * words.num_bytes
        found.append((at, values, inside))
    for at, values, inside in found:
      words.store(address, at, values, inside)

  def _in_sectors(self, row: _Row, unit):
    """Whether a unit of a row lies in one of the piece's sectors, and in the array."""
    begin = arith.addi(row.shift, arith.muli(unit, i32(_UNIT)))
    sector = arith.subi(begin, arith.muli(arith.andi(unit, i32(1)), i32(_UNIT)))
    return arith.andi(
        less(sector, self.stop), less(arith.addi(begin, i32(_UNIT - 1)), self.left)
    )

  def store_first(self, thread) -> None:
    """Stores what lies before rows' first sectors, by a thread an element."""
    element = arith.andi(thread, i32(_SECTOR - 1))
    first = arith.shrui(thread, i32(_SECTOR.bit_length() - 1))
    for within in range(0, self.rows, tiles.WG_THREADS // _SECTOR):
      row = self._row(arith.addi(first, i32(within)))
      self._store_element(row, element, arith.minsi(row.shift, self.left))

  def store_last(self, thread) -> None:
    """Stores what lies behind rows' last whole units, by a thread an element."""
    first = arith.shrui(thread, i32(_UNIT.bit_length() - 1))
    for within in range(0, self.rows, tiles.WG_THREADS // _UNIT):
      row = self._row(arith.addi(first, i32(within)))
      rest = arith.maxsi(arith.subi(self.left, row.shift), i32(0))
      begin = arith.addi(row.shift, arith.andi(rest, i32(-_UNIT)))
      element = arith.addi(begin, arith.andi(thread, i32(_UNIT - 1)))
      self._store_element(row, element, self.left)

  def _store_element(self, row: _Row, element, last) -> None:
    """Stores an element of the piece's row that comes before `last`."""
    words = Words(1, _ITEMSIZE)
    inside = arith.andi(less(0, row.left), less(element, last))
    place = arith.select(inside, element, i32(0))
    values = words.load(behind(row.slot, arith.shli(place, i32(1))), 0)
    at = arith.shli(arith.subi(element, row.shift), i32(1))
    words.store(arith.addi(row.address, i64(at)), 0, values, inside)


def _word(pair) -> ir.Value:
  """Two elements of 16 bits as one integer."""
  whole = vector.bitcast(ir.VectorType.get((1,), i32_type()), pair)
  return vector.extract(whole, dynamic_position=[], static_position=[0])
