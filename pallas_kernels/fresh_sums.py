"""wgmma whose sums begin with the product, in place of zeros to which it is added.

Pallas's accumulators begin as zeros in registers. Where each k tile has sums of its own
these are 64 moves a k tile, in front of its first wgmma, which then wait for whoever
reads the sums of the one before. The instruction itself can leave out what was there.

The sums come back as a value that is in flight: whoever reads it waits first, with
`plgpu.wgmma_wait`, and takes it through an optimization barrier.

Source: the PTX manual's scale-d of wgmma; CUTLASS's ScaleOut::Zero.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array, mma_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm
import numpy as np

from pallas_kernels import tiles
from pallas_kernels.integers import const64

_ROWS = 64  # Of a wgmma.
_STEP_BYTES = 32  # Of k, that one wgmma takes.
_NAMES = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
_REGISTERS = fragmented_array.WGMMA_LAYOUT_ACC_32BIT
Ref = Any


def multiply(lhs: Ref, rhs: Ref) -> jax.Array:
  """Returns lhs @ rhs.T as float32 [rows, cols] that is in flight: one group of wgmma.

  Args:
    lhs: [rows, 128] of 8 bits, swizzled by 128 bytes; rows a multiple of 64.
    rhs: [cols, 128], likewise; cols a multiple of 8 and at most 256.
  """
  (rows, k), (cols, _) = lhs.shape, rhs.shape
  of_lhs, of_rhs = (tiles.swizzled(x.dtype) for x in (lhs, rhs))
  ptx = _instructions(cols, _NAMES[lhs.dtype.name], _NAMES[rhs.dtype.name], k)

  @plgpu.inline_mgpu(
      arg_types=(plgpu.RefType(of_lhs), plgpu.RefType(of_rhs)),
      return_type=plgpu.ShapeDtypeStruct(
          (rows, cols), jnp.float32, layout=plgpu.Layout.WGMMA
      ),
  )
  def issue(_, lhs, rhs):
    f32 = ir.F32Type.get()
    zero = arith.constant(f32, ir.FloatAttr.get(f32, 0.0))
    sums = mgpu.FragmentedArray.splat(zero, (rows, cols), _REGISTERS)
    registers = sums.registers.copy()
    begin, apart = _descriptor(lhs, _ROWS)
    of_rhs, _ = _descriptor(rhs, cols)
    nvvm.wgmma_fence_aligned()  # The registers may have been read just before.
    for group in range(rows // _ROWS):
      of_lhs = arith.addi(begin, const64(mma_utils.encode_addr(group * apart)))
      registers[group] = _issue(ptx, of_lhs, of_rhs, registers[group].shape)
    nvvm.wgmma_commit_group_sync_aligned()
    return mgpu.FragmentedArray(
        _registers=registers, _layout=_REGISTERS, _is_signed=None
    ).to_layout(fragmented_array.WGMMA_LAYOUT)

  return issue(lhs, rhs)


def _descriptor(ref: ir.Value, rows: int) -> tuple[ir.Value, int]:
  """(descriptor of the first `rows` rows [rows, 128], bytes from these to the next)."""
  (begin, _), (apart, _), _ = mma_utils.create_descriptor(
      ref, swizzle=tiles.SWIZZLE_BYTES, group_size=(rows, tiles.SWIZZLE_BYTES),
      logical_k_major=False,
  )
  return begin, apart


def _instructions(cols: int, lhs: str, rhs: str, k: int) -> str:
  """PTX of all wgmma of 64 rows, from descriptors of lhs and rhs; the first adds nothing.
  """
  count = cols // 2
  sums = "{" + ", ".join(f"${i}" for i in range(count)) + "}"
  name = f"wgmma.mma_async.sync.aligned.m64n{cols}k{_STEP_BYTES}.f32.{lhs}.{rhs}"
  lines = [
      ".reg .pred first, other;", ".reg .b64 of_lhs, of_rhs;",
      "setp.ne.b32 first, 0, 0;", "setp.eq.b32 other, 0, 0;",
      f"mov.b64 of_lhs, ${count};", f"mov.b64 of_rhs, ${count + 1};",
  ]
  for step in range(k // _STEP_BYTES):
    if step:
      ahead = mma_utils.encode_addr(_STEP_BYTES)
      lines += [f"add.s64 {x}, {x}, {ahead};" for x in ("of_lhs", "of_rhs")]
    adds = "other" if step else "first"
    lines.append(f"{name} {sums}, of_lhs, of_rhs, {adds}, 1, 1;")
  return "{ " + " ".join(lines) + " }"


def _issue(ptx: str, lhs: ir.Value, rhs: ir.Value, shape: tuple[int, ...]) -> np.ndarray:
  """The registers of 64 rows, of one float32 each."""
  count = int(np.prod(shape))
  kind = ir.VectorType.get((1,), ir.F32Type.get())
  found = llvm.inline_asm(
      llvm.StructType.get_literal([kind] * count), [lhs, rhs], ptx,
      ",".join(["=f"] * count + ["l"] * 2), asm_dialect=0, has_side_effects=True,
  )
  registers = [llvm.extractvalue(kind, found, [i]) for i in range(count)]
  return np.array(registers, object).reshape(shape)
