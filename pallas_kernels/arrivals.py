"""Barriers on which copies arrive that Pallas has no words for, by their addresses.

Inside `plgpu.inline_mgpu`, by one warp of a producer; see `compat.barrier_address`.
"""

from __future__ import annotations

from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_kernels import tiles
from pallas_kernels.integers import i32


def expect(address: ir.Value, num_bytes: ir.Value, predicate: ir.Value) -> None:
  """Arrives once, and has the barrier wait for so many bytes of copies.

  Pallas counts an arrival of each thread of a warpgroup.
  """
  for instruction in (
      "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [$0], $1;",
      f"mbarrier.arrive.shared::cta.b64 _, [$0], {tiles.WG_THREADS};",
  ):
    operands = (address, num_bytes) if "$1" in instruction else (address,)
    mgpu.utils.inline_ptx(
        instruction, *operands, predicate=predicate, has_side_effects=True
    )


def barrier(address: ir.Value) -> mgpu.utils.BarrierRef:
  """The barrier, for Mosaic's copies."""
  pointer = llvm.inttoptr(ir.Type.parse("!llvm.ptr<3>"), address)
  return mgpu.utils.BarrierRef(pointer, i32(0), None, 1)
