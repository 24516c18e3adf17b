"""tensor_cores: wgmma on operands that already lie in shared memory, nothing else.

  out[cta] = the sum over `steps` k tiles of lhs[:, k tile] @ rhs[k tile], which are
             `NUM_SLOTS` that take turns; columns `FOLD` apart are added up

One CTA an SM, and two warpgroups that share out its rows, as in the persistent kernel.
The first loads each slot once, through TMA. Then both multiply slot after slot, with
one wgmma in flight: the instructions, the swizzle and the reads of shared memory are
those of the products; loads, the ring's barriers and the epilogue are left off. What is
stored depends on every sum, and is folded so that it takes little time.

  barrier  arrives                        waits
  full[s]  the TMA copies of lhs and rhs  each warpgroup, before its first wgmma

Source: the loop of the persistent kernel's consumers (pallas_kernels/ring.py).
"""

from __future__ import annotations

import functools
import operator

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from experiments.lab import kernels_stores
from pallas_kernels import accumulate, operand_tiles
from pallas_kernels.problem import PersistentConfig, Problem

NAME = "tensor_cores"
TILE_M, TILE_K = 128, 64
NUM_SLOTS = 4
FOLD = 64  # Columns that are stored.
_WG_ROWS = 64  # Rows of a warpgroup's accumulator.


def operand_shapes(tile_n: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
  """Returns the shapes of lhs and rhs, which fill the slots."""
  k = NUM_SLOTS * TILE_K
  return (1, TILE_M, k), (1, k, tile_n)


def flops(tile_n: int, steps: int, num_ctas: int) -> int:
  """Returns the operations of a launch."""
  return 2 * TILE_M * tile_n * TILE_K * steps * num_ctas


def launch(
    lhs: jax.Array, rhs: jax.Array, *, steps: int, num_ctas: int, interpret=None
) -> jax.Array:
  """Returns the folded sums of each CTA, float32 [num_ctas, TILE_M, FOLD].

  Args:
    lhs, rhs: bfloat16, see `operand_shapes`; rhs has 64, 128, 192 or 256 columns.
    steps: k tiles that each CTA multiplies, at least NUM_SLOTS.
    num_ctas: as many as there are SMs.
    interpret: of the emulator; None on the chip.
  """
  if steps < NUM_SLOTS:
    raise ValueError(f"steps={steps} must be at least {NUM_SLOTS}")
  tile_n = rhs.shape[2]
  prepared = operand_tiles.prepare(
      (lhs,), (rhs,), Problem(TILE_M, tile_n, NUM_SLOTS * TILE_K),
      PersistentConfig(TILE_M, tile_n, TILE_K, NUM_SLOTS),
      emulated=interpret is not None,
  )

  def _kernel(lhs_gmem, rhs_gmem, out_gmem, **refs):
    wg = lax.axis_index("wg")
    operands = (
        (prepared.lhs_operand, lhs_gmem, refs["lhs_slots"]),
        (prepared.rhs_operand, rhs_gmem, refs["rhs_slots"]),
    )

    @pl.when(wg == 0)
    def _load():
      for slot in range(NUM_SLOTS):
        full, at = refs["full"].at[slot], dict(batch=0, mn=0, k=slot * TILE_K)
        for operand, gmem, slots in operands:
          operand.load((gmem,), slots, slot, full, **at)

    def _multiply(acc, first, count):
      def again(step, _):
        groups = operand_tiles.multiply(
            acc, prepared, (refs["lhs_slots"], refs["rhs_slots"]),
            lax.rem(step, jnp.int32(NUM_SLOTS)), lhs_start=wg * _WG_ROWS,
        )
        plgpu.wgmma_wait(groups)  # Those of the step before are done.

      def for_the_first_time(step, _):
        plgpu.barrier_wait(refs["full"].at[step])
        again(step, None)

      loaded = first + NUM_SLOTS
      lax.fori_loop(first, loaded, for_the_first_time, None)
      lax.fori_loop(loaded, first + count, again, None)

    sums = accumulate.sum_over_k(
        _multiply, shape=(_WG_ROWS, tile_n), k_steps=steps, promote=0
    )
    pieces = [sums[:, col : col + FOLD] for col in range(0, tile_n, FOLD)]
    rows = pl.ds(wg * _WG_ROWS, _WG_ROWS)
    kernels_stores.store(
        out_gmem.at[lax.axis_index("cta"), rows], functools.reduce(operator.add, pieces)
    )

  return plgpu.kernel(
      _kernel,
      out_type=jax.ShapeDtypeStruct((num_ctas, TILE_M, FOLD), jnp.float32),
      scratch_types=dict(
          lhs_slots=prepared.lhs_operand.slots(NUM_SLOTS),
          rhs_slots=prepared.rhs_operand.slots(NUM_SLOTS),
          full=plgpu.Barrier(
              num_arrivals=prepared.num_arrivals, num_barriers=NUM_SLOTS
          ),
      ),
      grid=(num_ctas,),
      grid_names=("cta",),
      num_threads=TILE_M // _WG_ROWS,
      thread_name="wg",
      interpret=interpret,
      kernel_name=f"jaxgemm_{NAME}",
  )(*prepared.lhs, *prepared.rhs)


def truth(lhs: jax.Array, rhs: jax.Array, steps: int) -> np.ndarray:
  """Returns the folded sums of a CTA in float64, [TILE_M, FOLD]."""
  lhs, rhs = (np.asarray(x[0]).astype(np.float64) for x in (lhs, rhs))
  times = np.bincount(np.arange(steps) % NUM_SLOTS, minlength=NUM_SLOTS)
  sums = (lhs * np.repeat(times, TILE_K)) @ rhs
  return sums.reshape(TILE_M, -1, FOLD).sum(axis=1)
