"""tensor_cores: wgmma on operands that already lie in shared memory, nothing else.

  out[cta] = the sum over `steps` k tiles of lhs[:, k tile] @ rhs[k tile], which are
             `NUM_SLOTS` that take turns; columns `FOLD` apart are added up

One CTA an SM, and two warpgroups that share out its rows (experiments/resident_tiles.py).
The first loads each slot once, through TMA. Then both multiply slot after slot: loads,
the ring's barriers and the epilogue of a product are left off. What is stored depends on
every sum, and is folded so that it takes little time.

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
from experiments.resident_tiles import NUM_WARPGROUPS, TILE_M, WG_ROWS, ResidentTiles

NAME = "tensor_cores"
NUM_SLOTS = 4
FOLD = 64  # Columns that are stored.


def operand_shapes(tile_n: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
  """Returns the shapes of lhs and rhs, which fill the slots."""
  return ResidentTiles(tile_n, NUM_SLOTS).operand_shapes


def flops(tile_n: int, steps: int, num_ctas: int) -> int:
  """Returns the operations of a launch."""
  return ResidentTiles(tile_n, NUM_SLOTS).flops * steps * num_ctas


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
  resident = ResidentTiles(rhs.shape[2], NUM_SLOTS)
  prepared = resident.prepare(lhs, rhs, emulated=interpret is not None)

  def _kernel(lhs_gmem, rhs_gmem, out_gmem, **refs):
    wg = lax.axis_index("wg")

    @pl.when(wg == 0)
    def _load():
      resident.load(prepared, (lhs_gmem, rhs_gmem), refs)

    sums = resident.sums(prepared, refs, wg, steps)
    pieces = [sums[:, col : col + FOLD] for col in range(0, resident.tile_n, FOLD)]
    rows = pl.ds(wg * WG_ROWS, WG_ROWS)
    kernels_stores.store(
        out_gmem.at[lax.axis_index("cta"), rows], functools.reduce(operator.add, pieces)
    )

  return plgpu.kernel(
      _kernel,
      out_type=jax.ShapeDtypeStruct((num_ctas, TILE_M, FOLD), jnp.float32),
      scratch_types=resident.scratch(prepared),
      grid=(num_ctas,),
      grid_names=("cta",),
      num_threads=NUM_WARPGROUPS,
      thread_name="wg",
      interpret=interpret,
      kernel_name=f"jaxgemm_{NAME}",
  )(*prepared.lhs, *prepared.rhs)


def truth(lhs: jax.Array, rhs: jax.Array, steps: int) -> np.ndarray:
  """Returns the folded sums of a CTA in float64, [TILE_M, FOLD]."""
  sums = ResidentTiles(rhs.shape[2], NUM_SLOTS).truth(lhs, rhs, steps)
  return sums.reshape(TILE_M, -1, FOLD).sum(axis=1)
