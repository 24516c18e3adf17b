"""Tiles of operands whose rows TMA cannot stride over, loaded through registers.

TMA wants rows that begin a multiple of 16 bytes apart, and even its windows must
begin at such an address: with an odd number of columns it reads nothing. Here the
producer's threads do it. Each takes 16 bytes of a row of the tile at a time: it loads
the two aligned pieces of 16 bytes in which they lie, shifts them together, and stores
them where wgmma looks for them, swizzled. What lies beyond the array is zeros. All
loads of a round are under way before the first is used.

The slot is filled when the stores are visible to wgmma: a fence, then an arrival on
the slot's barrier. Several producers take k tiles in turn (see `ring`), so that one
waits for memory while another stores: three of them are twice as fast as one.

Source: the swizzle of 128 bytes is that of the PTX manual's wgmma matrix layouts.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels.integers import const64, i32, i32_type, i64, i64_address

WG_THREADS = 128
CHUNK = 8  # Elements of 16 bits that a thread stores at once: 16 bytes.
ROUND = 8  # Chunks of a thread whose loads are under way at once.
_SCALAR = plgpu.Layout.WG_SPLAT(())
Ref = Any


@dataclasses.dataclass(frozen=True)
class RegisterLoads:
  """Loads tiles of `tile_rows` x `tile_cols` 16-bit elements.

  Attributes:
    rows, cols: of one product's operand, as it is stored.
    tile_rows, tile_cols: of the tile; multiples of 8 and 64.
    transforms: of the slots.
  """

  rows: int
  cols: int
  tile_rows: int
  tile_cols: int
  transforms: tuple[Any, ...]

  @property
  def aligned(self) -> bool:
    """Whether chunks lie in aligned pieces, and the array has all of each or none."""
    return self.cols % CHUNK == 0

  def _start(self, source, first_row, row, col, place):
    """Starts the loads of one chunk of the tile."""
    per_row = self.tile_cols // CHUNK
    tile_row = arith.divui(place, i32(per_row))
    chunk = arith.remui(place, i32(per_row))
    column = arith.addi(col, arith.muli(chunk, i32(CHUNK)))
    # Elements of the chunk that the array has; none of a row that it has not.
    valid = arith.minsi(arith.subi(i32(self.cols), column), i32(CHUNK))
    inside = arith.cmpi(
        arith.CmpIPredicate.slt, arith.addi(row, tile_row), i32(self.rows)
    )
    valid = arith.select(inside, arith.maxsi(valid, i32(0)), i32(0))
    element = arith.addi(
        arith.muli(arith.addi(first_row, i64(tile_row)), const64(self.cols)),
        i64(column),
    )
    address = arith.addi(source, arith.shli(element, const64(1)))
    shift = arith.andi(arith.trunci(i32_type(), address), i32(15))  # Bytes.
    aligned = arith.andi(address, const64(-16))
    some = arith.cmpi(arith.CmpIPredicate.sgt, valid, i32(0))
    end = arith.addi(shift, arith.muli(valid, i32(2)))
    more = arith.cmpi(arith.CmpIPredicate.sgt, end, i32(16))
    words = _load_16_bytes(aligned, some)
    if not self.aligned:
      words += _load_16_bytes(arith.addi(aligned, const64(16)), more)
    return words, shift, valid, tile_row, chunk

  def _finish(self, started, target) -> None:
    """Shifts what was loaded together and stores it."""
    words, shift, valid, tile_row, chunk = started
    if not self.aligned:
      words = _shifted(words, shift, valid)
    # Blocks of 8 rows x 128 bytes, in which row r has its 16-byte units XORed with r.
    per_block = 64 // CHUNK
    in_block = arith.remui(tile_row, i32(8))
    block = arith.addi(
        arith.muli(
            arith.divui(tile_row, i32(8)), i32(self.tile_cols // 64)
        ),
        arith.divui(chunk, i32(per_block)),
    )
    unit = arith.xori(arith.remui(chunk, i32(per_block)), in_block)
    offset = arith.addi(
        arith.muli(block, i32(1024)),
        arith.addi(arith.muli(in_block, i32(128)), arith.muli(unit, i32(16))),
    )
    address = mgpu.utils.getelementptr(
        target, [offset], ir.IntegerType.get_signless(8)
    )
    mgpu.utils.inline_ptx(
        "st.shared.v4.b32 [$0], {$1, $2, $3, $4};", address, *words,
        has_side_effects=True,
    )


def load(
    *tiles: tuple[RegisterLoads, Ref, Ref, Any, Any, Any], at_once: int = ROUND
) -> None:
  """Fills slots with tiles; a thread has the loads of `at_once` chunks under way.

  Each tile is (its loads, gmem, slot, batch, row, col): `slot` gets the tile at
  (row, col) of the product `batch`; col is a multiple of CHUNK.
  """
  all_loads = [tile[0] for tile in tiles]
  refs = [ref for tile in tiles for ref in tile[1:3]]
  places = [jnp.int32(at) for tile in tiles for at in tile[3:]]
  types = [
      ref for one in all_loads for ref in (plgpu.RefType(), plgpu.RefType(one.transforms))
  ]

  @plgpu.inline_mgpu(arg_types=(*types, *[_SCALAR] * len(places)))
  def run(_, *args):
    refs, places = args[:len(types)], [x.registers.item() for x in args[len(types):]]
    thread = arith.remui(mgpu.utils.thread_idx(), i32(WG_THREADS))
    chunks = []
    for i, loads in enumerate(all_loads):
      source = i64_address(mgpu.utils.memref_ptr(refs[2 * i]))
      target = mgpu.utils.memref_ptr(refs[2 * i + 1])
      batch, row, col = places[3 * i : 3 * i + 3]
      first_row = arith.addi(arith.muli(i64(batch), const64(loads.rows)), i64(row))
      for place in range(0, loads.tile_rows * loads.tile_cols // CHUNK, WG_THREADS):
        chunks.append((loads, source, first_row, row, col, place, target))
    for first in range(0, len(chunks), at_once):
      started = [
          (loads, target, loads._start(
              source, first_row, row, col, arith.addi(thread, i32(place))
          ))
          for loads, source, first_row, row, col, place, target
          in chunks[first : first + at_once]
      ]
      for loads, target, chunk in started:
        loads._finish(chunk, target)

  run(*refs, *places)


def _shifted(words: list[ir.Value], shift, valid) -> list[ir.Value]:
  """The `valid` elements from byte `shift` of eight words on, then zeros: four words."""
  # By two words, by one, by half of one: as the bits of `shift` say.
  for bit, step in ((8, 2), (4, 1)):
    apart = _is_set(shift, bit)
    words = [
        arith.select(apart, words[i + step], words[i]) for i in range(len(words) - step)
    ]
  bits = arith.shli(arith.andi(shift, i32(2)), i32(3))
  words = [_funnel_shift(words[i], words[i + 1], bits) for i in range(CHUNK // 2)]
  for i in range(CHUNK // 2):
    left, half = arith.subi(valid, i32(2 * i)), arith.andi(words[i], i32(0xFFFF))
    word = arith.select(_at_least(left, 2), words[i], half)
    words[i] = arith.select(_at_least(left, 1), word, i32(0))
  return words


def _load_16_bytes(address, predicate) -> list[ir.Value]:
  """Four words from an aligned address, zeros where `predicate` is false."""
  words = mgpu.utils.inline_ptx(
      "{ .reg .pred p; setp.ne.b32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0;"
      " mov.b32 $2, 0; mov.b32 $3, 0;"
      " @p ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4]; }",
      address, arith.extui(i32_type(), predicate), result_types=[i32_type()] * 4,
      has_side_effects=True,
  )
  return list(words)


def _funnel_shift(low, high, bits):
  return mgpu.utils.inline_ptx(
      "shf.r.wrap.b32 $0, $1, $2, $3;", low, high, bits, result_types=i32_type()
  )


def _is_set(value, bit: int):
  return arith.cmpi(
      arith.CmpIPredicate.ne, arith.andi(value, i32(bit)), i32(0)
  )


def _at_least(value, least: int):
  return arith.cmpi(arith.CmpIPredicate.sge, value, i32(least))
