"""Integers and addresses in MLIR, for code that Pallas has no words for."""

from __future__ import annotations

from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm


def i32_type():
  return ir.IntegerType.get_signless(32)


def i32(value: int) -> ir.Value:
  assert -(2**31) <= value < 2**31, value
  return arith.constant(i32_type(), value)


def u32(value: int) -> ir.Value:
  """The same 32 bits, of a number without a sign."""
  assert 0 <= value < 2**32, value
  return i32(value - 2**32 if value >= 2**31 else value)


def const64(value: int) -> ir.Value:
  return arith.constant(ir.IntegerType.get_signless(64), value)


def i64(value) -> ir.Value:
  return arith.extsi(ir.IntegerType.get_signless(64), value)


def i64_of_unsigned(value) -> ir.Value:
  return arith.extui(ir.IntegerType.get_signless(64), value)


def less(value, limit) -> ir.Value:
  """Whether one signed value of 32 bits, or number, is less than another."""
  value, limit = (i32(x) if isinstance(x, int) else x for x in (value, limit))
  return arith.cmpi(arith.CmpIPredicate.slt, value, limit)


def i64_address(pointer) -> ir.Value:
  return llvm.ptrtoint(ir.IntegerType.get_signless(64), pointer)


def behind(pointer, num_bytes) -> ir.Value:
  """The pointer so many bytes further on."""
  return mgpu.utils.getelementptr(
      pointer, [num_bytes], ir.IntegerType.get_signless(8)
  )


def place_of_fragment() -> tuple[ir.Value, ir.Value, ir.Value]:
  """(warp, row, pair of columns) that a thread has of a wgmma fragment's blocks.

  A warp has 16 rows, in two blocks of 8 rows x 8 columns a step of columns.
  """
  thread = arith.andi(mgpu.utils.thread_idx(), i32(127))
  lane = arith.andi(thread, i32(31))
  return (
      arith.shrui(thread, i32(5)), arith.shrui(lane, i32(2)), arith.andi(lane, i32(3))
  )
