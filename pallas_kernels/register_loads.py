"""Tiles of operands whose rows TMA cannot stride over, loaded through registers.

TMA wants rows that begin a multiple of 16 bytes apart, and even its windows must begin
at such an address: with an odd number of columns it brings lhs alone, and that skewed
(see `skewed`). Here the producer's threads do it. Each takes 16 bytes of a row of the
tile at a time: it loads the two aligned pieces of 16 bytes in which they lie, shifts
them together, and stores them where wgmma looks for them, swizzled. All loads of a
round are under way before the first is used. Where nothing is shifted, the same pieces
may be copied without registers (see `copied`).

A slot is made of blocks of 8 rows x 128 bytes. A thread takes the same 16 bytes of
every second block. Blocks begin a multiple of 16 bytes apart in memory, whatever the
stride of a row, so what a thread shifts by, and where it stores within a block, never
changes. Little more is loaded than is wanted: of a k tile of which wgmma reads `depth`
alone that much, of an operand of few columns, or a tile of less than a block, a power of
two of chunks. Of rows so short the warpgroup takes 32, 64 or 128 at a time, each thread
its 16 bytes again.

What lies beyond k is zeros. What lies beyond the rows of lhs or the columns of rhs is
whatever can be read nearby, or was there before, as nothing that comes of it is stored.

The slot is filled when the stores are visible to wgmma: a fence, then an arrival on
the slot's barrier. Several producers take k tiles in turn (see `ring`), so that one
waits for memory while another stores.

Source: the swizzle of 128 bytes is that of the PTX manual's wgmma matrix layouts; its
cp.async copies 16 bytes, or zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools
import math
from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf

from pallas_kernels import tiles
from pallas_kernels.integers import const64, i32, i32_type, i64, i64_address, less

CHUNK = 8  # Elements of 16 bits that a thread stores at once: 16 bytes.
ROUND = 8  # Chunks of a thread whose loads are under way at once.
_MANY_CHUNKS = 8  # Of a thread, of which some are copied.
_MOST_HOT = 32  # Of a thread, that are loaded all the same; 36 took 1.04 of the time.
_BLOCK_ROWS, _BLOCK_COLS, _BLOCK_BYTES = 8, 64, 1024
ROW_STEP = 2 * _BLOCK_ROWS  # Of a tile: what a round of loads takes at least.
_SCALAR = plgpu.Layout.WG_SPLAT(())
Ref = Any


@dataclasses.dataclass(frozen=True)
class RegisterLoads:
  """Loads tiles of `tile_rows` x `tile_cols` 16-bit elements.

  Attributes:
    rows, cols: of one product's operand, as it is stored.
    tile_rows, tile_cols: of the tile; multiples of `ROW_STEP` and 64.
    k_major: whether a row holds elements of k, else a column.
    transforms: of the slots.
    depth: elements of k that are wanted of a tile, a multiple of 16.
    width: rows of lhs or columns of rhs that are wanted of it.
    halo: of those, that the next tile has, too.
  """

  rows: int
  cols: int
  tile_rows: int
  tile_cols: int
  k_major: bool
  transforms: tuple[Any, ...]
  depth: int
  width: int
  halo: int = 0

  def __post_init__(self):
    assert self.tile_rows % ROW_STEP == 0 == self.tile_cols % _BLOCK_COLS

  @classmethod
  def of(
      cls, mn: int, k: int, tile_mn: int, tile_k: int, *, k_major: bool, depth: int,
      transforms: tuple[Any, ...] = (), halo: int = 0,
  ) -> RegisterLoads:
    """Those of tiles of an operand of [mn, k], or [k, mn], into slots of whole blocks."""
    size, tile = (mn, k), (tile_mn, tile_k)
    if not k_major:
      size, tile = (k, mn), (tile_k, tiles.round_up(tile_mn, _BLOCK_COLS))
    return cls(*size, *tile, k_major, transforms, depth, tile_mn, halo)

  @property
  def aligned(self) -> bool:
    """Whether chunks lie in aligned pieces, and the array has all of each or none."""
    return self.cols % CHUNK == 0

  @property
  def is_hot(self) -> bool:
    """Whether all CTAs of a product ask for the same rows, which share lines."""
    shared = self.rows <= self.tile_rows if self.k_major else self.cols <= self.width
    return shared and 2 * self.cols % tiles.SWIZZLE_BYTES > 0

  @property
  def k_is_short(self) -> bool:
    """Whether no tile lies within k."""
    return (self.cols if self.k_major else self.rows) < self.taken

  @property
  def wanted(self) -> tuple[int, int]:
    """Rows and columns of a tile of which something is wanted that there is."""
    if self.k_major:
      return min(self.width, self.rows), self.depth
    return self.depth, min(self.width, self.cols)

  @property
  def taken(self) -> int:
    """Elements of k that are loaded of a tile."""
    return self.depth if self.k_major else tiles.round_up(self.depth, self.round_rows)

  @property
  def chunks_across(self) -> int:
    """Threads that share a row of blocks, a chunk each: a power of two.

    Of those that hold what is wanted, if a round then takes no part of the tile's rows,
    the most with which each thread has fewest chunks; of k-major rows the fewest.
    """
    rows, cols = self.wanted
    enough = [
        count for count in (1, 2, 4, 8)
        if count * CHUNK >= min(cols, _BLOCK_COLS)
        and self.tile_rows % (tiles.WG_THREADS // count) == 0
    ]
    if self.k_major:
      return enough[0]
    return min(
        reversed(enough), key=lambda count: tiles.cdiv(rows * count, tiles.WG_THREADS)
    )

  @property
  def round_rows(self) -> int:
    """Rows of a block's width that all threads take at once."""
    return tiles.WG_THREADS // self.chunks_across

  @property
  def has_edge(self) -> bool:
    """Whether some tiles reach beyond the rows of lhs or the columns of rhs."""
    if self.k_major:
      last = tiles.last_start(self.rows, self.tile_rows, self.halo)
      return last + self.tile_rows > self.rows
    across = tiles.round_up(self.wanted[1], self.chunks_across * CHUNK)
    return tiles.last_start(self.cols, self.width, self.halo) + across > self.cols

  @property
  def num_chunks(self) -> int:
    """Of a thread."""
    rows, cols = self.wanted
    return tiles.cdiv(rows, self.round_rows) * tiles.cdiv(cols, _BLOCK_COLS)

  def blocks(self) -> Iterator[tuple[int, int]]:
    """(row, col) in the tile of what all threads take at once: `round_rows`, 64 columns.

    None where every tile reaches beyond the rows of lhs or the columns of rhs.
    """
    rows, cols = self.wanted
    for col in range(0, cols, _BLOCK_COLS):
      for row in range(0, rows, self.round_rows):
        yield row, col


def check_columns(tile_n: int) -> str | None:
  """Why no rhs tile of so many columns can be loaded so, or None."""
  if tile_n % ROW_STEP:
    return f"tile_n={tile_n}: registers load a multiple of {ROW_STEP} columns"
  return None


class _Tile:
  """One tile, and what this thread has of each of its blocks."""

  def __init__(
      self, loads: RegisterLoads, copied: bool, source, target, batch, row, col
  ):
    self.loads, self.copied = loads, copied
    shape = ir.MemRefType(source.type).shape
    self._source = i64_address(mgpu.utils.memref_ptr(source))
    self._last_byte = const64(2 * math.prod(shape) - 1)
    thread = arith.remui(mgpu.utils.thread_idx(), i32(tiles.WG_THREADS))
    across = loads.chunks_across
    own_row = arith.shrui(thread, i32(across.bit_length() - 1))
    row_in_block = arith.andi(own_row, i32(_BLOCK_ROWS - 1))
    block = arith.shrui(own_row, i32(3))  # Of those of a round.
    chunk = arith.andi(thread, i32(across - 1))
    if loads.k_major and across * CHUNK > loads.depth:  # Some take what others take.
      chunk = arith.minui(chunk, i32(loads.depth // CHUNK - 1))
    self._row = arith.addi(row, own_row)
    self._col = arith.addi(col, arith.shli(chunk, i32(3)))
    self._first_row = arith.muli(i64(batch), const64(loads.rows))
    if loads.k_major:
      self.within_k = _at_most(arith.addi(col, i32(loads.taken)), loads.cols)
    else:
      self.within_k = _at_most(arith.addi(row, i32(loads.taken)), loads.rows)
    # Rows of blocks lie `blocks_across` blocks apart; in row r, units are XORed with r.
    self._blocks_across = loads.tile_cols // _BLOCK_COLS
    place = arith.addi(
        arith.muli(block, i32(self._blocks_across * _BLOCK_BYTES)),
        arith.addi(
            arith.shli(row_in_block, i32(7)),
            arith.shli(arith.xori(chunk, row_in_block), i32(4)),
        ),
    )
    self._target = mgpu.utils.getelementptr(
        mgpu.utils.memref_ptr(target), [place], ir.IntegerType.get_signless(8)
    )

  def _address(self, row, col):
    element = arith.addi(
        arith.muli(arith.addi(self._first_row, i64(row)), const64(self.loads.cols)),
        i64(col),
    )
    return arith.addi(self._source, arith.shli(element, const64(1)))

  def readers(self, masked: bool) -> list[Callable[[], Callable[[], None]]]:
    """For each chunk: what starts its loads, and returns what stores it."""
    read = self._masked() if masked else self._within_k()
    return [functools.partial(self._start, read, *at) for at in self.loads.blocks()]

  def _start(self, read, row: int, col: int) -> Callable[[], None]:
    block = row // _BLOCK_ROWS * self._blocks_across + col // _BLOCK_COLS
    address = mgpu.utils.getelementptr(
        self._target, [i32(block * _BLOCK_BYTES)], ir.IntegerType.get_signless(8)
    )
    finish = read(row, col, address)

    def store():
      if finish is None:  # The copy stores it.
        return
      mgpu.utils.inline_ptx(
          "st.shared.v4.b32 [$0], {$1, $2, $3, $4};", address, *finish(),
          has_side_effects=True,
      )

    return store

  def _within_k(self):
    """Reads the chunk of a block, all of which lies within k."""
    loads, row, col = self.loads, self._row, self._col
    if loads.has_edge and loads.k_major:
      row = arith.minsi(row, i32(loads.rows - 1))
    elif loads.has_edge:
      col = arith.minsi(col, i32(loads.cols - 1))
    address = self._address(row, col)
    shift = Shift(address)
    first = arith.andi(address, const64(-16))
    # Where nothing is shifted, the next piece may lie beyond the array.
    apart = arith.select(shift.is_zero, const64(0), const64(16))
    last = arith.andi(arith.addi(self._source, self._last_byte), const64(-16))

    def read(block_row: int, block_col: int, target):
      by_rows = const64(2 * block_row * loads.cols)
      by_cols, inside = const64(2 * block_col), None
      if loads.has_edge and loads.k_major:
        inside = less(arith.addi(self._row, i32(block_row)), loads.rows)
        by_rows = arith.select(inside, by_rows, const64(0))
      elif loads.has_edge:
        inside = less(arith.addi(self._col, i32(block_col)), loads.cols)
        by_cols = arith.select(inside, by_cols, const64(0))
      piece = arith.addi(first, arith.addi(by_rows, by_cols))
      if self.copied:
        return _copy_16_bytes(target, piece, inside)
      words = load_16_bytes(piece)
      if loads.aligned:
        return lambda: words
      following = arith.addi(piece, apart)
      if loads.has_edge and not loads.k_major:  # The end of a row: perhaps the last.
        following = arith.minsi(following, last)
      words += load_16_bytes(following)
      return lambda: shift.of(words)

    return read

  def _masked(self):
    """Reads the chunk of a block: zeros for what lies beyond k."""
    loads = self.loads
    address = self._address(self._row, self._col)
    shift = Shift(address)
    first = arith.andi(address, const64(-16))

    @functools.cache  # Of all rows alike.
    def columns(block_col: int):
      """Whether the array has some of the chunk, and of its second piece; masks."""
      col = arith.addi(self._col, i32(block_col))
      valid = arith.minsi(arith.subi(i32(loads.cols), col), i32(CHUNK))
      valid = arith.maxsi(valid, i32(0))
      end = arith.addi(shift.num_bytes, arith.muli(valid, i32(2)))
      more = arith.cmpi(arith.CmpIPredicate.sgt, end, i32(16))
      return _at_least(valid, 1), more, first_elements(valid) if loads.k_major else None

    def read(block_row: int, block_col: int, target):
      some, more, masks = columns(block_col)
      inside = less(arith.addi(self._row, i32(block_row)), loads.rows)
      piece = arith.addi(
          first, const64(2 * (block_row * loads.cols + block_col))
      )
      if self.copied:
        return _copy_16_bytes(target, piece, arith.andi(inside, some))
      words = load_16_bytes(piece, arith.andi(inside, some))
      if loads.aligned:
        return lambda: words
      following = arith.addi(piece, const64(16))
      words += load_16_bytes(following, arith.andi(inside, more))
      if masks is None:  # Rows of k: those beyond the last were not loaded.
        return lambda: shift.of(words)
      return lambda: masked(shift.of(words), masks)

    return read


def copied(loads: Sequence[RegisterLoads]) -> list[bool]:
  """Which of them copy chunks into shared memory, past the registers and the L1.

  As they can where none is shifted. Many loads at once wait for each other's lines of
  the L1: 256x256x384 NN by 64x32 tiles took 3.7 us through registers, and takes 2.4
  copied. A few copies take up to 0.1 us longer than loads (H200; 134 configs).

  Copies ask the L2 for each row apart, loads for what the L1 makes of a warp's: where all
  CTAs ask for the same few lines, in rows that share them, copies wait for each other's.
  24x3728x328 TT by 64x32 tiles took 4.6 us all copied, and takes 2.7; 48x1592x192 TT by
  64x16 tiles 3.5 and 2.0.
  """
  many = sum(each.num_chunks for each in loads) >= _MANY_CHUNKS
  if not many or not all(each.aligned for each in loads):
    return [False] * len(loads)
  few = sum(each.num_chunks for each in loads if each.is_hot) <= _MOST_HOT
  return [not (each.is_hot and few) for each in loads]


def load(
    *tiles: tuple[RegisterLoads, Ref, Ref, Any, Any, Any], at_once: int = ROUND
) -> None:
  """Fills slots with tiles; a thread has the loads of `at_once` chunks under way.

  Each tile is (its loads, gmem, slot, batch, row, col): `slot` gets the tile at
  (row, col) of the product `batch`; col is a multiple of CHUNK.
  """
  all_loads = [tile[0] for tile in tiles]
  are_copied = copied(all_loads)
  refs = [ref for tile in tiles for ref in tile[1:3]]
  places = [jnp.int32(at) for tile in tiles for at in tile[3:]]
  types = [
      ref for one in all_loads for ref in (plgpu.RefType(), plgpu.RefType(one.transforms))
  ]

  @plgpu.inline_mgpu(arg_types=(*types, *[_SCALAR] * len(places)))
  def run(_, *args):
    refs, places = args[:len(types)], [x.registers.item() for x in args[len(types):]]
    found = [
        _Tile(loads, is_copied, *refs[2 * i : 2 * i + 2], *places[3 * i : 3 * i + 3])
        for i, (loads, is_copied) in enumerate(zip(all_loads, are_copied, strict=True))
    ]
    found.sort(key=lambda tile: not tile.copied)  # Copies first: they wait for nothing.

    def fill(masked: bool) -> None:
      chunks = [start for tile in found for start in tile.readers(masked)]
      for first in range(0, len(chunks), at_once):
        stores = [start() for start in chunks[first : first + at_once]]
        for store in stores:
          store()

    if any(loads.k_is_short for loads in all_loads):
      fill(masked=True)
    else:
      within_k = functools.reduce(arith.andi, [tile.within_k for tile in found])
      branches = scf.IfOp(within_k, has_else=True)
      for block, masked in ((branches.then_block, False), (branches.else_block, True)):
        with ir.InsertionPoint(block):
          fill(masked)
          scf.yield_([])
    if any(are_copied):
      mgpu.utils.inline_ptx("cp.async.wait_all;", has_side_effects=True)

  run(*refs, *places)


class Shift:
  """What lies at an address, out of the two aligned pieces of 16 bytes around it."""

  def __init__(self, address):
    self.num_bytes = arith.andi(arith.trunci(i32_type(), address), i32(15))
    self.is_zero = arith.cmpi(arith.CmpIPredicate.eq, self.num_bytes, i32(0))
    self._bits = arith.shli(arith.andi(self.num_bytes, i32(2)), i32(3))

  def of(self, words: list[ir.Value]) -> list[ir.Value]:
    """The 16 bytes from there on, of eight words: four."""
    # By two words, by one, by half of one: as the bits of the shift say.
    for bit, step in ((8, 2), (4, 1)):
      is_set = arith.cmpi(
          arith.CmpIPredicate.ne, arith.andi(self.num_bytes, i32(bit)), i32(0)
      )
      words = [
          arith.select(is_set, words[i + step], words[i])
          for i in range(len(words) - step)
      ]
    pairs = zip(words[: CHUNK // 2], words[1:], strict=True)
    return [_funnel_shift(low, high, self._bits) for low, high in pairs]


def first_elements(valid) -> list[ir.Value]:
  """Masks of four words that keep their first `valid` elements."""
  found = []
  for i in range(CHUNK // 2):
    left = arith.subi(valid, i32(2 * i))
    first = arith.select(_at_least(left, 1), i32(0xFFFF), i32(0))
    found.append(arith.select(_at_least(left, 2), i32(-1), first))
  return found


def masked(words: list[ir.Value], masks: list[ir.Value]) -> list[ir.Value]:
  return [arith.andi(*pair) for pair in zip(words, masks, strict=True)]


def load_16_bytes(address, predicate=None) -> list[ir.Value]:
  """Four words from an aligned address, zeros where `predicate` is false.

  Not `ld.global.nc`, which promises that nobody writes there while the kernel runs: one
  that begins early runs while others write what it reads (see `dependent`), and ptxas
  has been seen to move such loads before the wait for them.
  """
  if predicate is None:
    words = mgpu.utils.inline_ptx(
        "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];", address,
        result_types=[i32_type()] * 4, has_side_effects=True,
    )
    return list(words)
  words = mgpu.utils.inline_ptx(
      "{ .reg .pred p; setp.ne.b32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0;"
      " mov.b32 $2, 0; mov.b32 $3, 0;"
      " @p ld.global.v4.b32 {$0, $1, $2, $3}, [$4]; }",
      address, arith.extui(i32_type(), predicate), result_types=[i32_type()] * 4,
      has_side_effects=True,
  )
  return list(words)


def _copy_16_bytes(target, address, predicate=None) -> None:
  """Starts to copy them from an aligned address; zeros where `predicate` is false."""
  if predicate is None:
    mgpu.utils.inline_ptx(
        "cp.async.cg.shared.global [$0], [$1], 16;", target, address,
        has_side_effects=True,
    )
    return
  mgpu.utils.inline_ptx(
      "cp.async.cg.shared.global [$0], [$1], 16, $2;", target, address,
      arith.select(predicate, i32(16), i32(0)), has_side_effects=True,
  )


def _funnel_shift(low, high, bits):
  return mgpu.utils.inline_ptx(
      "shf.r.wrap.b32 $0, $1, $2, $3;", low, high, bits, result_types=i32_type()
  )


def _at_most(value, limit: int):
  return arith.cmpi(arith.CmpIPredicate.sle, value, i32(limit))


def _at_least(value, least: int):
  return arith.cmpi(arith.CmpIPredicate.sge, value, i32(least))
