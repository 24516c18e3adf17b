"""pipelined: a ring of shared-memory slots, turned by one warpgroup.

  out[b] = alpha * lhs[b] @ rhs[b] + beta * c[b]

One warpgroup computes one output tile out of `num_stages` (S) slots. It starts
the copies itself, S - 1 k tiles ahead of its wgmma, and keeps one wgmma in
flight:

  prologue      load 0 .. S-2
  steady state  wait full[i % S] | wgmma i | wait wgmma i-1 | load i+S-1
  drain         wait full[i % S] | wgmma i                     (the last S-1)

  barrier  arrives                        waits
  full[s]  the TMA copies of lhs and rhs  the warpgroup, before wgmma

No barrier says that a slot is free: the warpgroup that reads a slot is the one
that refills it, after it waited for the wgmma that read it.

Constraints: see `supports`.
Source: multi-stage software pipelining as in CUTLASS (sm80 multistage mainloop).
"""

from __future__ import annotations

from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import accumulate, calls, slot_products, tiles
from pallas_kernels.configs import PipelinedConfig
from pallas_kernels.problem import Problem

NAME = "pipelined"
Config = PipelinedConfig


def supports(problem: Problem, config: PipelinedConfig) -> str | None:
  """The reason why this kernel cannot serve, or None."""
  if config.num_stages < 2:
    return f"num_stages={config.num_stages}: a ring has at least 2 slots"
  return (
      tiles.check_problem(problem)
      or tiles.check_tile(problem, config.tile_m, config.tile_n, config.tile_k)
      or accumulate.check(config.tile_m, config.tile_n, config.promote)
      or tiles.check_smem(smem_bytes(problem, config))
  )


def smem_bytes(problem: Problem, config: PipelinedConfig) -> int:
  """Shared memory of one CTA: the ring, the staging slots, the barriers."""
  slot = tiles.slot_bytes(problem, config.tile_m, config.tile_n, config.tile_k)
  staging = calls.epilogue_bytes(problem, config.tile_n, 1)
  return config.num_stages * slot + staging + tiles.BARRIER_BYTES


def launch(
    operands, problem: Problem, config: PipelinedConfig, *, num_sms: int, interpret=None
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
  k_steps = tiles.cdiv(problem.k, config.tile_k)
  num_stages = config.num_stages
  ahead = min(num_stages - 1, k_steps)  # Loads in flight before the first wgmma.

  def _kernel(lhs_gmem, rhs_gmem, c_gmem, out_gmem, refs):
    batch, m, n = grid.locate(lax.axis_index("cta"))
    def _load(step, slot):
      full = refs["full"].at[slot]
      at = dict(batch=batch, k=step * config.tile_k)
      lhs.load(lhs_gmem, refs["lhs_slots"], slot, full, mn=m, **at)
      rhs.load(rhs_gmem, refs["rhs_slots"], slot, full, mn=n, **at)

    def _multiply(acc, slot):
      plgpu.barrier_wait(refs["full"].at[slot])
      slots = refs["lhs_slots"], refs["rhs_slots"]
      groups = slot_products.multiply(acc, call.prepared, slots, slot)
      plgpu.wgmma_wait(groups)  # Those of the step before have read their slot.
      return tiles.wrapped(slot + 1, num_stages)

    for step in range(ahead):
      _load(jnp.int32(step), step)
    at = dict(wg=0, batch=batch, row=m, col=n)
    vectors = call.epilogue.begin(c_gmem, refs, shape=tile_shape, **at)

    def _pipeline(acc, first, count):
      def steady(step, slot):
        following = _multiply(acc, slot)
        _load(step + ahead, tiles.wrapped(slot + ahead, num_stages))
        return following

      def drain(_, slot):
        return _multiply(acc, slot)

      end, all_loaded = first + count, jnp.int32(k_steps - ahead)
      slot = lax.rem(jnp.int32(first), jnp.int32(num_stages))
      slot = lax.fori_loop(first, lax.min(end, all_loaded), steady, slot)
      lax.fori_loop(lax.max(first, all_loaded), end, drain, slot)

    acc = accumulate.sum_over_k(
        _pipeline, shape=tile_shape, k_steps=k_steps, promote=config.promote,
        dtype=problem.acc_dtype,
    )
    call.epilogue.store(acc, out_gmem, c_gmem, refs, vectors=vectors, **at)
    call.epilogue.finish()

  scratch = dict(
      lhs_slots=lhs.slots(num_stages),
      rhs_slots=rhs.slots(num_stages),
      full=plgpu.Barrier(
          num_arrivals=call.prepared.num_arrivals, num_barriers=num_stages
      ),
  )
  return call(_kernel, name=NAME, scratch=scratch, grid=grid.num_tiles, num_wgs=1)
