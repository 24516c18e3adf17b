"""Operands padded: copies whose rows begin where TMA wants them, in one launch.

TMA wants rows that begin a multiple of 16 bytes apart. What has an odd number of columns
is copied first, into longer rows, with zeros behind. XLA does that element by element,
in a kernel for each operand. Here each thread writes aligned pieces of 16 bytes, which
lie in two aligned pieces of the source; it loads both and shifts them together, as
`register_loads` does. All its loads are under way before the first store.

Source: `register_loads`.
"""

from __future__ import annotations

from collections.abc import Sequence
import math

import jax
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf

from pallas_kernels import dependent, tiles
from pallas_kernels.integers import (
  const64,
  i32,
  i32_type,
  i64,
  i64_address,
  i64_of_unsigned,
  less,
  u32,
)
from pallas_kernels.register_loads import (
  CHUNK,
  Shift,
  first_elements,
  load_16_bytes,
  masked,
)

NAME = "pads"
AT_ONCE = 4  # Pieces of a thread.
_SCALAR = plgpu.Layout.WG_SPLAT(())


def serves(shape: tuple[int, ...], itemsize: int) -> bool:
  """Whether an array of this shape can be written.

  Pieces are counted in 32 bits, as are a row's units of 16 bits.
  """
  of_ctas = math.prod(shape) * itemsize // 16 + tiles.WG_THREADS * AT_ONCE
  counted = of_ctas < 2**32 and shape[-1] * itemsize // 2 < 2**31
  return itemsize in (2, 4) and counted


def pad(
    arrays: Sequence[jax.Array], shapes: Sequence[tuple[int, int, int]]
) -> list[jax.Array]:
  """Returns arrays [batch, rows, cols], of 16 or 32 bits, as arrays of larger shapes.

  What is new is zeros, at the end of each dimension but the first, which stays as it is.
  New rows are a multiple of 16 bytes.
  """
  outs = [
      jax.ShapeDtypeStruct(shape, x.dtype)
      for x, shape in zip(arrays, shapes, strict=True)
  ]
  units = [x.dtype.itemsize // 2 for x in arrays]  # Of an element, each 16 bits.
  of_cta = CHUNK * tiles.WG_THREADS * AT_ONCE
  counts = [  # CTAs of each array.
      tiles.cdiv(math.prod(shape) * its, of_cta)
      for shape, its in zip(shapes, units, strict=True)
  ]

  def body(*refs):
    @plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * len(refs), _SCALAR))
    def run(_, *args):
      *refs, cta = args
      cta, begin = cta.registers.item(), 0
      for source, target, its, count in zip(
          refs[: len(arrays)], refs[len(arrays) :], units, counts, strict=True
      ):
        own = arith.subi(cta, i32(begin))
        # As unsigned numbers, those of the arrays before are large.
        branch = scf.IfOp(arith.cmpi(arith.CmpIPredicate.ult, own, i32(count)))
        with ir.InsertionPoint(branch.then_block):
          _copy(source, target, its, own)
          scf.yield_([])
        begin += count

    run(*refs, jnp.int32(lax.axis_index("cta")))

  return dependent.kernel(
      body, out_type=outs, grid=(sum(counts),), grid_names=("cta",), num_threads=1,
      thread_name="wg", kernel_name=f"jaxgemm_{NAME}",
  )(*arrays)


def _copy(source, target, units: int, cta) -> None:
  """Writes the pieces of a CTA, the `cta`-th of an array of so many units an element."""
  _, rows, cols = ir.MemRefType(source.type).shape
  batch, out_rows, out_cols = ir.MemRefType(target.type).shape
  cols, out_cols = cols * units, out_cols * units
  per_row = out_cols // CHUNK
  source, target = (i64_address(mgpu.utils.memref_ptr(x)) for x in (source, target))
  thread = arith.remui(mgpu.utils.thread_idx(), i32(tiles.WG_THREADS))
  first = arith.addi(arith.muli(cta, i32(tiles.WG_THREADS * AT_ONCE)), thread)
  stores = []
  for i in range(AT_ONCE):
    piece = arith.addi(first, i32(i * tiles.WG_THREADS))
    out_row = arith.divui(piece, i32(per_row))
    col = arith.muli(arith.subi(piece, arith.muli(out_row, i32(per_row))), i32(CHUNK))
    index = arith.divui(out_row, i32(out_rows))
    row = arith.subi(out_row, arith.muli(index, i32(out_rows)))
    last = u32(batch * out_rows * per_row)
    exists = arith.cmpi(arith.CmpIPredicate.ult, piece, last)
    valid = arith.minsi(arith.subi(i32(cols), col), i32(CHUNK))
    inside = arith.andi(exists, less(row, rows))
    valid = arith.select(inside, arith.maxsi(valid, i32(0)), i32(0))
    row = arith.addi(arith.muli(i64(index), const64(rows)), i64(row))
    element = arith.addi(arith.muli(row, const64(cols)), i64(col))
    address = arith.addi(source, arith.shli(element, const64(1)))
    shift = Shift(address)
    begin = arith.andi(address, const64(-16))
    end = arith.addi(shift.num_bytes, arith.muli(valid, i32(2)))
    words = load_16_bytes(begin, arith.cmpi(arith.CmpIPredicate.sgt, valid, i32(0)))
    words += load_16_bytes(
        arith.addi(begin, const64(16)),
        arith.cmpi(arith.CmpIPredicate.sgt, end, i32(16)),
    )
    out = arith.addi(target, arith.shli(i64_of_unsigned(piece), const64(4)))
    stores.append((out, shift, words, valid, exists))
  for out, shift, words, valid, exists in stores:
    mgpu.utils.inline_ptx(
        "{ .reg .pred p; setp.ne.b32 p, $5, 0;"
        " @p st.global.v4.b32 [$0], {$1, $2, $3, $4}; }",
        out, *masked(shift.of(words), first_elements(valid)),
        arith.extui(i32_type(), exists), has_side_effects=True,
    )
