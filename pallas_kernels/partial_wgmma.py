"""wgmma of a part of what lies in the slots: of columns, or of k; or of all chunks.

An rhs whose rows lie along n lies in shared memory in blocks of 8 rows x 64 columns (128
bytes), and Pallas takes as many columns as the blocks have. The instruction itself takes
any multiple of 8: it reads the blocks in the order that its descriptor gives, and of the
last one what it needs. Of chunks Pallas takes one at a time, and of k all 64, where each
instruction takes 16. Here the descriptors are Mosaic's, of all blocks, and the numbers of
columns and of k are said apart.

The accumulator passes through as a value; nothing waits for it, as each wgmma that adds
to it comes behind the last.

Source: the PTX manual's matrix descriptors of wgmma; cuBLAS's tiles for Hopper (288x128
of operands of which neither is k-major), as the names of its kernels tell.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array, mma_utils
from jax.experimental.mosaic.gpu.wgmma import wgmma_fence, wgmma_m64
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, nvvm

from pallas_kernels import tiles
from pallas_kernels.integers import const64

_BLOCK_COLS = 64  # Elements of 16 bits in 128 bytes; rows of a wgmma, too.
_REGISTERS = fragmented_array.WGMMA_LAYOUT_ACC_32BIT
Ref = Any


def multiply(
    acc: Ref, lhs: Ref | jax.Array, rhs: Ref, *, k_major_lhs: bool, transforms,
    k_major_rhs: bool = False, in_registers: bool = False, depth: int = _BLOCK_COLS,
) -> None:
  """acc += lhs @ rhs, of 16-bit operands in shared memory; one group of wgmma.

  Args:
    acc: accumulator [rows, cols]; rows a multiple of 64, cols one of 8.
    lhs: [rows, 64], or [64, rows], or in chunks [rows / 64, 64, 64] of which each is
      [k, m].
    rhs: [64, columns of the slot], or in chunks [chunks, 64, 64] of which each is [k, n],
      or [columns, 64].
    k_major_lhs: whether lhs is the first of the three.
    transforms: of both, in shared memory.
    k_major_rhs: whether rhs is the last of the three.
    in_registers: whether lhs is an array [rows, 64], no reference.
    depth: of k that is multiplied, a multiple of 16; all 64 of lhs in registers.
  """
  parts = tiles.instruction_columns(acc.shape[1])
  lhs_type = plgpu.Layout.WGMMA if in_registers else plgpu.RefType(transforms)

  @plgpu.inline_mgpu(
      arg_types=(plgpu.Layout.WGMMA, lhs_type, plgpu.RefType(transforms)),
      return_type=plgpu.ShapeDtypeStruct(
          acc.shape, acc.dtype, layout=plgpu.Layout.WGMMA
      ),
  )
  def issue(_, sums, lhs, rhs):
    layout, registers = sums.layout, sums.to_layout(_REGISTERS).registers.copy()
    if in_registers:
      lhs = wgmma_fence(lhs)
      lhs_of = lambda group: lhs[group * _BLOCK_COLS : (group + 1) * _BLOCK_COLS, :]
      facts = dict(a_transpose=None, a_k_stride=None)
    else:
      lhs = lhs if k_major_lhs else mgpu.memref_transpose(_blocks(lhs), (1, 0, 3, 2))
      (begin, step), (apart, _), major = _descriptor(lhs, is_lhs=True)
      lhs_of = lambda group: _behind(begin, group * apart)
      facts = dict(a_transpose=major != mma_utils.Dim.K, a_k_stride=step)
    rhs = mgpu.memref_transpose(rhs, (1, 0, 3, 2)) if k_major_rhs else _blocks(rhs)
    (rhs_begin, rhs_step), (rhs_apart, _), _ = _descriptor(rhs, is_lhs=False)
    dtype = ir.MemRefType(rhs.type).element_type
    for group in range(len(registers)):
      for start, size in parts:
        here = slice(group, group + 1), slice(start // 8, (start + size) // 8)
        registers[here] = wgmma_m64(
            registers[here], lhs_of(group),
            _behind(rhs_begin, start // _BLOCK_COLS * rhs_apart),
            b_transpose=not k_major_rhs, b_k_stride=rhs_step, n=size,
            swizzle=depth * 2,  # Its bytes of k alone: descriptors say how they lie.
            a_element_type=dtype, b_element_type=dtype, **facts,
        )
    nvvm.wgmma_commit_group_sync_aligned()
    found = mgpu.FragmentedArray(
        _registers=registers, _layout=_REGISTERS, _is_signed=None
    )
    return found.to_layout(layout)

  acc[...] = issue(plgpu.wgmma_accumulator_load(acc, wait_n=None), lhs, rhs)


def _descriptor(ref: ir.Value, *, is_lhs: bool):
  """((descriptor, bytes between 16 of k), (bytes between 64 of mn, of k), major)."""
  (begin, (_, (step,))), apart, major = mma_utils.create_descriptor(
      ref, swizzle=tiles.SWIZZLE_BYTES, group_size=(_BLOCK_COLS, _BLOCK_COLS),
      logical_k_major=not is_lhs,
  )
  return (begin, step), apart, major


def _behind(descriptor: ir.Value, num_bytes: int) -> ir.Value:
  return arith.addi(descriptor, const64(mma_utils.encode_addr(num_bytes)))


def _blocks(ref: ir.Value) -> ir.Value:
  """[k / 8, mn / 64, 8, 64], of such or of chunks [mn / 64, k / 8, 1, 8, 64]."""
  if len(ir.MemRefType(ref.type).shape) == 4:
    return ref
  ref = mgpu.memref_slice(ref, (slice(None), slice(None), 0))
  return mgpu.memref_transpose(ref, (1, 0, 2, 3))
