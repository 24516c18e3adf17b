"""Pieces of whole rows of a result that TMA cannot store, each one run of memory.

A tile that has all columns of a result holds rows that follow one another in memory
without a gap, whatever their length. So a piece stands in shared memory as it is to lie
in GMEM, at the same place within 16 bytes, and leaves in one bulk copy, which wants
addresses and a size in 16 bytes and nothing else; threads store the few elements
before the first and behind the last of those.

  registers -> shared memory -> one bulk copy (and up to 14 elements) -> GMEM

Source: the PTX manual's cp.async.bulk.
"""

from __future__ import annotations

from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from pallas_kernels import tiles
from pallas_kernels.integers import (
  behind,
  const64,
  i32,
  i32_type,
  i64_address,
  i64_of_unsigned,
  less,
  place_of_fragment,
)

UNIT = 16  # Bytes that the copy's addresses and its size are multiples of.
_SCALAR = plgpu.Layout.WG_SPLAT(())
Ref = Any


def slot_elements(rows: int, cols: int, dtype: str) -> int:
  """Of a slot for a piece: it may begin anywhere within 16 bytes."""
  unit = UNIT // jnp.dtype(dtype).itemsize
  return tiles.round_up(rows * cols, unit) + unit


def store(piece, slot: Ref, out_gmem: Ref, row, col) -> None:
  """Stores a piece [64, cols] at (row, col) of an array [num_rows, num_cols].

  `slot` is flat, of `slot_elements`. A piece that begins at a column has none of the
  array's: col is 0 or at least num_cols. The copy is the warpgroup's youngest bulk group;
  this waits until the one before has read the slot.
  """
  rows, _ = piece.shape
  itemsize = jnp.dtype(piece.dtype).itemsize

  @plgpu.inline_mgpu(
      arg_types=(
          plgpu.Layout.WGMMA, plgpu.RefType(), plgpu.RefType(), _SCALAR, _SCALAR,
      )
  )
  def write(context, piece, slot, out, row, col):
    row, col = row.registers.item(), col.registers.item()
    num_rows, num_cols = ir.MemRefType(out.type).shape
    row_bytes = num_cols * itemsize
    begin = arith.addi(
        i64_address(mgpu.utils.memref_ptr(out)),
        arith.muli(i64_of_unsigned(row), const64(row_bytes)),
    )
    phase = arith.trunci(i32_type(), arith.andi(begin, const64(UNIT - 1)))
    context.await_async_copy(0, await_read_only=True)
    base = mgpu.utils.memref_ptr(slot)
    _write_fragments(piece, behind(base, phase), num_cols, itemsize)
    mgpu.utils.commit_shared()

    valid = arith.minsi(arith.subi(i32(num_rows), row), i32(rows))
    valid = arith.select(less(col, 1), arith.maxsi(valid, i32(0)), i32(0))
    end = arith.addi(phase, arith.muli(valid, i32(row_bytes)))
    thread = arith.andi(mgpu.utils.thread_idx(), i32(tiles.WG_THREADS - 1))
    where = arith.subi(begin, i64_of_unsigned(phase))  # Of the slot's first byte.
    _leave(base, where, phase, end, thread, itemsize)

  write(piece, slot, out_gmem, jnp.int32(row), jnp.int32(col))


def _write_fragments(piece, start, num_cols: int, itemsize: int) -> None:
  """Writes each element of the array's columns where it lies in the run."""
  warp, group, lane = place_of_fragment()
  row = arith.addi(arith.shli(warp, i32(4)), group)
  element = arith.addi(arith.muli(row, i32(num_cols)), arith.shli(lane, i32(1)))
  address = behind(start, arith.muli(element, i32(itemsize)))
  bits = ir.IntegerType.get_signless(8 * itemsize)
  for i, pair in enumerate(piece.registers.flat):
    block, half = divmod(i, 2)
    if 8 * block >= num_cols:
      continue
    for odd in range(2):
      value = vector.extract(pair, dynamic_position=[], static_position=[odd])
      offset = (8 * half * num_cols + 8 * block + odd) * itemsize
      inside = less(arith.shli(lane, i32(1)), num_cols - 8 * block - odd)
      mgpu.utils.inline_ptx(
          "{ .reg .pred p; setp.ne.b32 p, $2, 0;"
          f" @p st.shared.b{8 * itemsize} [$0 + {offset}], $1; }}",
          address, arith.bitcast(bits, value), arith.extui(i32_type(), inside),
          has_side_effects=True,
      )


def _leave(base, where, phase, end, thread, itemsize: int) -> None:
  """Has the bytes of the slot from `phase` to `end` stored, by all threads together."""
  # Whole units lie between these two.
  first = arith.andi(arith.addi(phase, i32(UNIT - 1)), i32(-UNIT))
  last = arith.maxsi(arith.andi(end, i32(-UNIT)), first)
  _copy(base, where, first, arith.subi(last, first), thread)
  # The first eight threads store what lies before, the next eight what lies behind.
  element = arith.muli(arith.andi(thread, i32(7)), i32(itemsize))
  at = arith.addi(arith.select(less(thread, 8), phase, last), element)
  limit = arith.select(less(thread, 8), arith.minsi(first, end), end)
  _store_element(base, where, at, limit, thread, itemsize)


def _copy(base, where, first, num_bytes, thread) -> None:
  """Starts the bulk copy, by one thread, if there is anything to copy."""
  wanted = arith.andi(less(thread, 1), less(i32(0), num_bytes))
  mgpu.utils.inline_ptx(
      "{ .reg .pred p; setp.ne.b32 p, $3, 0;"
      " @p cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], $2;"
      " @p cp.async.bulk.commit_group; }",
      arith.addi(where, i64_of_unsigned(first)), behind(base, first), num_bytes,
      arith.extui(i32_type(), wanted), has_side_effects=True,
  )


def _store_element(base, where, at, limit, thread, itemsize: int) -> None:
  """Stores the element at byte `at` of the slot, by the first 16 threads."""
  wanted = arith.andi(less(thread, 16), less(at, limit))
  kind = f"b{8 * itemsize}"
  mgpu.utils.inline_ptx(
      f"{{ .reg .pred p; .reg .{kind} v; setp.ne.b32 p, $2, 0;"
      f" @p ld.shared.{kind} v, [$1]; @p st.global.{kind} [$0], v; }}",
      arith.addi(where, i64_of_unsigned(at)), behind(base, at),
      arith.extui(i32_type(), wanted), has_side_effects=True,
  )
