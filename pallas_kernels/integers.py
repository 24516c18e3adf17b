"""Integers and addresses in MLIR, for code that Pallas has no words for."""

from __future__ import annotations

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm


def i32_type():
  return ir.IntegerType.get_signless(32)


def i32(value: int) -> ir.Value:
  return arith.constant(i32_type(), value)


def const64(value: int) -> ir.Value:
  return arith.constant(ir.IntegerType.get_signless(64), value)


def i64(value) -> ir.Value:
  return arith.extsi(ir.IntegerType.get_signless(64), value)


def less(value, limit: int) -> ir.Value:
  """Whether a signed value of 32 bits is less than a number."""
  return arith.cmpi(arith.CmpIPredicate.slt, value, i32(limit))


def i64_address(pointer) -> ir.Value:
  return llvm.ptrtoint(ir.IntegerType.get_signless(64), pointer)
