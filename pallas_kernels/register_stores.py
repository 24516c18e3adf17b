"""Pieces of rows of a result that TMA cannot store, stored by threads.

TMA wants rows that begin a multiple of 16 bytes apart. Here the rows of a piece stand in
shared memory as they are to lie in GMEM, each at its own place within a unit of 16 bytes.
The threads of a warpgroup store whole units. What a row has of its first unit and of its
last leaves by threads of their own, as many bytes at once as all rows are aligned to:

  registers -> shared memory -> registers -> GMEM

A wgmma fragment scatters pairs of elements over eight rows; the way through shared
memory gives the neighbours of a row to neighbouring threads. Rows that a thread stores
one after the other lie alike within units, so that it knows one address and one place.
All loads come first: each guarded store would else wait for a load of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import math
from typing import Any, NamedTuple

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from pallas_kernels import skewed, tiles
from pallas_kernels.integers import (
  const64,
  i32,
  i32_type,
  i64_address,
  i64_of_unsigned,
  less,
  place_of_fragment,
)

MAX_UNIT = 16  # Bytes that a thread stores at once.
_WARP = 32
_SCALAR = plgpu.Layout.WG_SPLAT(())
Ref = Any


def store(
    piece, slot: Ref, out_gmem: Ref, row, col, *, stored: int = 0,
    transposed: bool = False, interleaved: bool = False,
) -> None:
  """Stores a piece [rows, cols] at (row, col) of an array [num_rows, num_cols].

  With `transposed` the transposed piece. `interleaved` says that row i of its 64 is the
  one that `skewed.row_of(i)` names. The first `stored` of the piece's columns are left
  out: these, `col`, and those of the piece are multiples of 8.
  `slot` has a row for each that is stored, whose pitch is a multiple of a unit and has
  room for one more than the columns.
  """

  @plgpu.inline_mgpu(
      arg_types=(
          plgpu.Layout.WGMMA, plgpu.RefType(), plgpu.RefType(), _SCALAR, _SCALAR,
      )
  )
  def write(_, piece, slot, out, row, col):
    registers = list(piece.registers.flat)[stored // 4 :]  # Four of each 8 columns.
    rows, cols = piece.shape[0], piece.shape[1] - stored
    row, col = row.registers.item(), col.registers.item()
    if transposed:
      rows, cols, row = cols, rows, arith.addi(row, i32(stored))
    else:
      col = arith.addi(col, i32(stored))
    num_rows, num_cols = ir.MemRefType(out.type).shape
    itemsize = mgpu.bytewidth(piece.mlir_dtype)
    part = Part(
        mgpu.utils.memref_ptr(slot), i64_address(mgpu.utils.memref_ptr(out)), row, col,
        rows, cols, num_rows, num_cols, ir.MemRefType(slot.type).shape[1], itemsize,
        interleaved and not transposed,
    )
    mgpu.utils.warpgroup_barrier()  # The last piece has been read.
    if transposed:
      part.write_transposed(registers, place_of_fragment(), interleaved=interleaved)
    else:
      part.write(registers, place_of_fragment())
    mgpu.utils.warpgroup_barrier()
    part.store(arith.andi(mgpu.utils.thread_idx(), i32(tiles.WG_THREADS - 1)))

  write(piece, slot, out_gmem, jnp.int32(row), jnp.int32(col))


class _Move(NamedTuple):
  """What a thread moves: from shared memory to GMEM, if it should."""

  source: Any
  target: Any
  inside: Any
  num_bytes: int


class _Row(NamedTuple):
  """A row of the slot.

  Attributes:
    source: where the unit stands in shared memory in which it begins.
    target: where that unit lies in GMEM.
    phase: bytes of the unit before the row.
    there: whether the array has such a row.
  """

  source: Any
  target: Any
  phase: Any
  there: Any


@dataclasses.dataclass(frozen=True)
class Part:
  """A piece on its way: [rows, cols] at (row, col) of [num_rows, num_cols] at `out`.

  Attributes:
    slot, pitch: where it stands in shared memory, and elements from row to row.
    interleaved: whether row i of the slot is the piece's row `skewed.row_of(i)`.
  """

  slot: Any
  out: Any
  row: Any
  col: Any
  rows: int
  cols: int
  num_rows: int
  num_cols: int
  pitch: int
  itemsize: int
  interleaved: bool

  @property
  def width(self) -> int:
    """Bytes that all rows begin a multiple of apart: 2 to 16."""
    return math.gcd(self.num_cols * self.itemsize, MAX_UNIT)

  @property
  def unit(self) -> int:
    """Bytes that a thread stores at once: a warp a row of the piece, or several."""
    return max(self.width, min(_power_of_two(-(-self.num_bytes // _WARP)), MAX_UNIT))

  @property
  def num_bytes(self) -> int:
    """Of a row of the piece."""
    return self.cols * self.itemsize

  def _begin(self, row) -> Any:
    """The address in GMEM of row `row` of the piece, as it lies there."""
    element = arith.addi(
        arith.muli(i64_of_unsigned(arith.addi(self.row, row)), const64(self.num_cols)),
        i64_of_unsigned(self.col),
    )
    return arith.addi(self.out, arith.muli(element, const64(self.itemsize)))

  def _phase(self, address) -> Any:
    """Bytes by which it lies behind the beginning of a unit."""
    return arith.trunci(i32_type(), arith.andi(address, const64(self.unit - 1)))

  def _slot_at(self, row, num_bytes) -> Any:
    place = arith.muli(row, i32(self.pitch * self.itemsize))
    return _behind(self.slot, arith.addi(place, num_bytes))

  # -- Into shared memory ----------------------------------------------------------

  def write(self, registers: list, place) -> None:
    """Writes a fragment; `place` is the thread's: see `place_of_fragment`."""
    warp, group, lane = place
    starts = []
    for half in range(2):
      row = arith.addi(arith.addi(arith.shli(warp, i32(4)), group), i32(8 * half))
      begin = self._begin(skewed.row_of(row) if self.interleaved else row)
      pair = arith.muli(lane, i32(2 * self.itemsize))
      starts.append(self._slot_at(row, arith.addi(self._phase(begin), pair)))
    at_once = self.itemsize == 2 and self.width > 2
    for i, pair in enumerate(registers):
      block, half = divmod(i, 2)
      offset = 8 * block * self.itemsize
      if at_once:
        _write_shared(starts[half], offset, mgpu.utils.bitcast(pair, i32_type()), 4)
        continue
      for odd in range(2):
        self._write_element(pair, odd, starts[half], offset + odd * self.itemsize)

  def write_transposed(self, registers: list, place, *, interleaved: bool) -> None:
    """Writes a fragment's columns as rows."""
    warp, group, lane = place
    starts = {}
    for half in range(2):
      col = arith.addi(arith.addi(arith.shli(warp, i32(4)), group), i32(8 * half))
      col = skewed.row_of(col) if interleaved else col
      for odd in range(2):  # Each eighth row lies alike within a unit.
        row = arith.addi(arith.shli(lane, i32(1)), i32(odd))
        phase = self._phase(self._begin(row))
        offset = arith.addi(phase, arith.muli(col, i32(self.itemsize)))
        starts[half, odd] = self._slot_at(row, offset)
    for i, pair in enumerate(registers):
      block, half = divmod(i, 2)
      for odd in range(2):
        offset = 8 * block * self.pitch * self.itemsize
        self._write_element(pair, odd, starts[half, odd], offset)

  def _write_element(self, pair, odd: int, start, offset: int) -> None:
    value = vector.extract(pair, dynamic_position=[], static_position=[odd])
    bits = ir.IntegerType.get_signless(8 * self.itemsize)
    _write_shared(start, offset, arith.bitcast(bits, value), self.itemsize)

  # -- Into GMEM -------------------------------------------------------------------

  def store(self, thread) -> None:
    """Stores what lies inside the array."""
    moves = list(self._units(thread))
    if self.width < self.unit:
      moves += self._edges(thread)
    loaded = [_load(move.source, move.num_bytes) for move in moves]
    for move, words in zip(moves, loaded, strict=True):
      _store(move, words)

  def _end(self, phase) -> Any:
    """Bytes from the beginning of a row's first unit to where the row ends."""
    left = arith.minsi(arith.subi(i32(self.num_cols), self.col), i32(self.cols))
    return arith.addi(phase, arith.muli(left, i32(self.itemsize)))

  def _units(self, thread) -> Iterator[_Move]:
    """Whole units of rows."""
    units = self.num_bytes // self.unit
    lanes = _power_of_two(units)
    at = arith.muli(arith.andi(thread, i32(lanes - 1)), i32(self.unit))
    for row in self._rows(thread, lanes):
      behind = less(arith.addi(at, i32(self.unit - 1)), self._end(row.phase))
      inside = arith.andi(behind, less(arith.subi(row.phase, i32(1)), at))
      yield _of_row(row, at, inside, self.unit)

  def _edges(self, thread) -> Iterator[_Move]:
    """What rows have of their first unit, and of their last, if they fill neither."""
    lanes = self.unit // self.width
    number = arith.andi(thread, i32(2 * lanes - 1))
    at = arith.muli(arith.andi(number, i32(lanes - 1)), i32(self.width))
    of_first = less(number, lanes)
    for row in self._rows(thread, 2 * lanes):
      end = self._end(row.phase)
      last = arith.andi(end, i32(-self.unit))
      place = arith.addi(at, arith.select(of_first, i32(0), last))
      begun = less(arith.select(of_first, row.phase, i32(0)), arith.addi(at, i32(1)))
      # A row that begins with a unit has no first one of this kind; one that begins
      # within its only one, no last.
      least = arith.select(of_first, i32(1), row.phase)
      most = arith.select(of_first, row.phase, last)
      inside = arith.andi(begun, less(least, arith.addi(most, i32(1))))
      inside = arith.andi(inside, less(place, end))
      yield _of_row(row, place, inside, self.width)

  def _rows(self, thread, lanes: int) -> Iterator[_Row]:
    """The rows of a thread, where each row has as many `lanes`."""
    first = arith.shrui(thread, i32(lanes.bit_length() - 1))
    step = tiles.WG_THREADS // lanes
    row_bytes = self.num_cols * self.itemsize
    # Every so many rows of a thread lie alike within units.
    alike = self.unit // math.gcd(self.unit, step * row_bytes)
    left = arith.minsi(arith.subi(i32(self.num_rows), self.row), i32(self.rows))
    known: dict[int, tuple[Any, Any]] = {}
    for index in range(tiles.cdiv(self.rows, step)):
      row = arith.addi(first, i32(index * step))
      source = self._slot_at(row, i32(0))
      if self.interleaved:
        at = skewed.row_of(row)
        phase, target = self._unit_of(at)
        yield _Row(source, target, phase, less(at, left))
        continue
      if index < alike:
        known[index] = self._unit_of(row)
      phase, target = known[index % alike]
      behind = (index - index % alike) * step * row_bytes
      target = arith.addi(target, const64(behind))
      yield _Row(source, target, phase, less(row, left))

  def _unit_of(self, row) -> tuple[Any, Any]:
    """(where in a unit row `row` of the piece begins, where in GMEM that unit lies)."""
    begin = self._begin(row)
    phase = self._phase(begin)
    return phase, arith.subi(begin, i64_of_unsigned(phase))


def _of_row(row: _Row, at, inside, num_bytes: int) -> _Move:
  """The move of the bytes that stand `at` behind the beginning of a row's first unit."""
  target = arith.addi(row.target, i64_of_unsigned(at))
  return _Move(_behind(row.source, at), target, arith.andi(inside, row.there), num_bytes)


def _power_of_two(count: int) -> int:
  """The first that is not less."""
  return 1 << (count - 1).bit_length()


def _behind(pointer, num_bytes) -> ir.Value:
  return mgpu.utils.getelementptr(
      pointer, [num_bytes], ir.IntegerType.get_signless(8)
  )


def _write_shared(start, offset: int, bits, num_bytes: int) -> None:
  mgpu.utils.inline_ptx(
      f"st.shared.b{8 * num_bytes} [$0 + {offset}], $1;", start, bits,
      has_side_effects=True,
  )


def _kind(num_bytes: int) -> tuple[str, int, Any]:
  """(suffix of the instruction, words, type of each) of 2 to 16 bytes."""
  if num_bytes < 4:
    return "b16", 1, ir.IntegerType.get_signless(16)
  count = num_bytes // 4
  return (f"v{count}.b32" if count > 1 else "b32"), count, i32_type()


def _names(first: int, count: int) -> str:
  names = ", ".join(f"${first + i}" for i in range(count))
  return f"{{{names}}}" if count > 1 else names


def _load(source, num_bytes: int) -> list[ir.Value]:
  kind, count, word = _kind(num_bytes)
  return list(mgpu.utils.inline_ptx(
      f"ld.shared.{kind} {_names(0, count)}, [${count}];", source,
      result_types=[word] * count, has_side_effects=True,
  ))


def _store(move: _Move, words) -> None:
  kind, count, _ = _kind(move.num_bytes)
  mgpu.utils.inline_ptx(
      f"{{ .reg .pred p; setp.ne.b32 p, $1, 0;"
      f" @p st.global.{kind} [$0], {_names(2, count)}; }}",
      move.target, arith.extui(i32_type(), move.inside), *words, has_side_effects=True,
  )
