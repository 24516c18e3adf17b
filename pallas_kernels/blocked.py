"""blocked: tiles through shared memory, one after the other.

  out[b] = alpha * lhs[b] @ rhs[b] + beta * c[b]

One warpgroup computes one output tile. For each k tile it loads, waits,
multiplies, waits: nothing overlaps but what several CTAs of one SM overlap by
chance. This is the reference of the other kernels and the first rung of the
ladder: the same tiles, swizzle and accumulator, without a pipeline.

  barrier  arrives                        waits
  full     the TMA copies of lhs and rhs  the warpgroup, before wgmma

Constraints: see `supports`.
Source: the tiled product of the CUDA C++ programming guide (shared memory), with
TMA and wgmma in place of loads and FMAs.
"""

from __future__ import annotations

from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import accumulate, calls, slot_products, tiles
from pallas_kernels.configs import BlockedConfig
from pallas_kernels.problem import Problem

NAME = "blocked"
Config = BlockedConfig


def supports(problem: Problem, config: BlockedConfig) -> str | None:
  """The reason why this kernel cannot serve, or None."""
  return (
      tiles.check_problem(problem)
      or tiles.check_tile(problem, config.tile_m, config.tile_n, config.tile_k)
      or accumulate.check(config.tile_m, config.tile_n, config.promote)
      or tiles.check_smem(smem_bytes(problem, config))
  )


def smem_bytes(problem: Problem, config: BlockedConfig) -> int:
  """Shared memory of one CTA: one slot, the staging slots, the barrier."""
  slot = tiles.slot_bytes(problem, config.tile_m, config.tile_n, config.tile_k)
  return slot + calls.epilogue_bytes(problem, config.tile_n, 1) + tiles.BARRIER_BYTES


def launch(
    operands, problem: Problem, config: BlockedConfig, *, num_sms: int, interpret=None
) -> calls.Results:
  """Returns the results; operands as `problem` stores them."""
  del num_sms  # One CTA a tile, however many SMs there are.
  call = calls.make_call(
      operands, problem, config, stored_cols=config.tile_n, num_wgs=1,
      interpret=interpret,
  )
  lhs, rhs = call.prepared.lhs_operand, call.prepared.rhs_operand
  tile_shape = config.tile_m, config.tile_n
  grid = tiles.TileGrid.of(problem, *tile_shape)

  def _kernel(lhs_gmem, rhs_gmem, c_gmem, out_gmem, refs):
    batch, m, n = grid.locate(lax.axis_index("cta"))
    at = dict(wg=0, batch=batch, row=m, col=n)
    vectors = call.epilogue.begin(c_gmem, refs, shape=tile_shape, **at)

    def _load(k):
      full = refs["full"].at[0]
      at = dict(batch=batch, k=k * config.tile_k)
      lhs.load(lhs_gmem, refs["lhs_slot"], 0, full, mn=m, **at)
      rhs.load(rhs_gmem, refs["rhs_slot"], 0, full, mn=n, **at)
      plgpu.barrier_wait(full)

    def _multiply(acc, first, count):
      def step(i, _):
        _load(first + i)
        slot_products.multiply(
            acc, call.prepared, (refs["lhs_slot"], refs["rhs_slot"]), 0
        )
        plgpu.wgmma_wait(0)  # The next load overwrites what this one reads.

      lax.fori_loop(jnp.int32(0), jnp.int32(count), step, None)

    acc = accumulate.sum_over_k(
        _multiply, shape=tile_shape, k_steps=tiles.cdiv(problem.k, config.tile_k),
        promote=config.promote, dtype=problem.acc_dtype,
    )
    call.epilogue.store(acc, out_gmem, c_gmem, refs, vectors=vectors, **at)
    call.epilogue.finish()

  scratch = dict(
      lhs_slot=lhs.slots(1),
      rhs_slot=rhs.slots(1),
      full=plgpu.Barrier(num_arrivals=call.prepared.num_arrivals, num_barriers=1),
  )
  return call(_kernel, name=NAME, scratch=scratch, grid=grid.num_tiles, num_wgs=1)
