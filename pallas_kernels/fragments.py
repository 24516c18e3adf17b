"""Operands that go to wgmma from registers: from words in shared memory to fragments.

wgmma's lhs may be registers, each of two elements of 16 bits that are neighbours of k.
Whoever knows where the elements lie loads them one by one, or two at once, as integers
(`words`); when wgmma wants them they are joined (`joined`).

Source: the fragments are those of the PTX manual for wgmma's matrix A in registers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import jax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector
import numpy as np

from pallas_kernels.integers import i32, i32_type

TILE_K = 64
ROWS = 64  # Of what wgmma multiplies at once.
BLOCKS = TILE_K // 8  # Of 8 columns; a thread has two registers of each, 8 rows apart.
Words = Sequence[tuple[ir.Value, ir.Value]]
# Which of its 64 rows of lhs those of an accumulator stand for: see `row_of`.
RowOrder = Literal["as they are", "eighths", "pairs"]


def words(found: Words, rows: int = ROWS) -> mgpu.FragmentedArray:
  """Registers' pairs of integers, in the fragment's order, as int32 [rows, 64].

  Each integer is one element, or the first of each two is both.
  """
  return _array([_pair(i32_type(), each) for each in found], rows, True)


def joined(
    loaded: jax.Array, dtype: str, is_whole: Callable[[int], bool]
) -> jax.Array:
  """The `words` of an array of `dtype` as wgmma takes it.

  `is_whole` says of a half, 0 or 1, whether the first word of each two is both elements.
  """
  rows, dtype = loaded.shape[0], jnp.dtype(dtype)

  @plgpu.inline_mgpu(
      arg_types=(plgpu.Layout.WGMMA,),
      return_type=plgpu.ShapeDtypeStruct(
          (rows, TILE_K), dtype, layout=plgpu.Layout.WGMMA
      ),
  )
  def join(_, loaded):
    found = []
    for i, pair in enumerate(loaded.registers.flat):
      word, high = (
          vector.extract(pair, dynamic_position=[], static_position=[at])
          for at in range(2)
      )
      if not is_whole(i % 2):
        word = mgpu.utils.inline_ptx(
            "prmt.b32 $0, $1, $2, 0x5410;", word, high, result_types=i32_type()
        )
      found.append(word)
    return of_words(found, dtype, rows)

  return join(loaded)


def of_words(
    found: Sequence[ir.Value], dtype, rows: int, cols: int = TILE_K
) -> mgpu.FragmentedArray:
  """Words of two elements of `dtype` each, in the fragment's order, as [rows, cols]."""
  pair_type = ir.VectorType.get((2,), mgpu.utils.dtype_to_ir_type(jnp.dtype(dtype)))
  one = ir.VectorType.get((1,), i32_type())
  pairs = [vector.bitcast(pair_type, vector.broadcast(one, word)) for word in found]
  return _array(pairs, rows, None, cols)


def row_of(order: RowOrder, row: ir.Value) -> ir.Value:
  """The row of 64 for which a row of the accumulator stands.

  "eighths": rows that follow each other lie eight apart, as those of `skewed` lhs that is
  k-major; "pairs": a thread's two of each 16 follow each other, as those of lhs in 8 bits
  that is m-major (see `conversions`).
  """
  if order == "as they are":
    return row
  if order == "eighths":
    return arith.addi(
        arith.shli(arith.andi(row, i32(7)), i32(3)), arith.shrui(row, i32(3))
    )
  second = arith.andi(arith.shrui(row, i32(3)), i32(1))
  within = arith.addi(arith.shli(arith.andi(row, i32(7)), i32(1)), second)
  return arith.addi(arith.andi(row, i32(-16)), within)


def address(slot: ir.Value, element: ir.Value) -> ir.Value:
  """Of an element of 16 bits of a slot."""
  return byte_address(slot, arith.shli(element, i32(1)))


def byte_address(slot: ir.Value, num_bytes: ir.Value) -> ir.Value:
  """So many bytes behind the begin of a slot."""
  return mgpu.utils.getelementptr(
      mgpu.utils.memref_ptr(slot), [num_bytes], ir.IntegerType.get_signless(8)
  )


def load(kind: str, address: ir.Value, offset: int) -> ir.Value:
  """A word from `offset` bytes behind an address; of kind "u16" or "b32"."""
  return mgpu.utils.inline_ptx(
      f"ld.shared.{kind} $0, [$1 + {offset}];", address, result_types=i32_type(),
      has_side_effects=True,
  )


def load_within(
    kind: str, address: ir.Value, offset: int, valid: ir.Value, place: int
) -> ir.Value:
  """The same where `place` is less than `valid`, else 0."""
  return mgpu.utils.inline_ptx(
      f"{{ .reg .pred p; setp.gt.s32 p, $2, {place}; mov.b32 $0, 0;"
      f" @p ld.shared.{kind} $0, [$1 + {offset}]; }}",
      address, valid, result_types=i32_type(), has_side_effects=True,
  )


def _pair(element: ir.Type, values) -> ir.Value:
  """A vector of two."""
  return vector.from_elements(ir.VectorType.get((2,), element), values)


def _array(
    registers: list[ir.Value], rows: int, is_signed: bool | None, cols: int = TILE_K
) -> mgpu.FragmentedArray:
  layout, found = mgpu.WGMMA_LAYOUT, np.empty((len(registers),), dtype=object)
  found[:] = registers
  return mgpu.FragmentedArray(
      _registers=found.reshape(layout.registers_shape((rows, cols))), _layout=layout,
      _is_signed=is_signed,
  )
