"""Tiles of 128 rows of lhs and of all columns of rhs that stay in shared memory.

Two warpgroups multiply them again and again, with the instructions, the swizzle and the
reads of shared memory of a product (pallas_kernels/ring.py) and one wgmma in flight; what
else a product has is left off.

  barrier  arrives                        waits
  full[s]  the TMA copies of lhs and rhs  each warpgroup, before its first wgmma
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
from typing import Any

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from pallas_kernels import accumulate, operand_tiles, preparing, slot_products
from pallas_kernels.configs import PersistentConfig
from pallas_kernels.problem import Problem

Refs = Mapping[str, Any]
TILE_M, TILE_K = 128, 64
WG_ROWS = 64  # Rows of a warpgroup's accumulator.
NUM_WARPGROUPS = TILE_M // WG_ROWS


@dataclasses.dataclass(frozen=True)
class ResidentTiles:
  """So many k tiles of operands; rhs has 64, 128, 192 or 256 columns."""

  tile_n: int
  num_slots: int

  @property
  def operand_shapes(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """The shapes of lhs and rhs, bfloat16, which fill the slots."""
    k = self.num_slots * TILE_K
    return (1, TILE_M, k), (1, k, self.tile_n)

  @property
  def flops(self) -> int:
    """Operations of a k tile."""
    return 2 * TILE_M * self.tile_n * TILE_K

  def prepare(
      self, lhs: jax.Array, rhs: jax.Array, *, emulated: bool
  ) -> operand_tiles.Prepared:
    return preparing.prepare(
        (lhs,), (rhs,), Problem(TILE_M, self.tile_n, self.num_slots * TILE_K),
        PersistentConfig(TILE_M, self.tile_n, TILE_K, self.num_slots), emulated=emulated,
    )

  def scratch(self, prepared: operand_tiles.Prepared) -> dict[str, Any]:
    """Returns the scratch of a kernel that `load` and `sums` take."""
    return dict(
        lhs_slots=prepared.lhs_operand.slots(self.num_slots),
        rhs_slots=prepared.rhs_operand.slots(self.num_slots),
        tile_full=plgpu.Barrier(
            num_arrivals=prepared.num_arrivals, num_barriers=self.num_slots
        ),
    )

  def load(self, prepared: operand_tiles.Prepared, gmem: tuple[Any, Any], refs: Refs):
    """Fills the slots; one warpgroup does."""
    operands = prepared.lhs_operand, prepared.rhs_operand
    slots_of = refs["lhs_slots"], refs["rhs_slots"]
    for slot in range(self.num_slots):
      full, at = refs["tile_full"].at[slot], dict(batch=0, mn=0, k=slot * TILE_K)
      for operand, source, slots in zip(operands, gmem, slots_of, strict=True):
        operand.load((source,), slots, slot, full, **at)

  def sums(self, prepared: operand_tiles.Prepared, refs: Refs, wg, steps: int):
    """Returns a warpgroup's sums [WG_ROWS, tile_n] over `steps` >= num_slots k tiles."""

    def multiply(acc, first, count):
      def again(step, _):
        groups = slot_products.multiply(
            acc, prepared, (refs["lhs_slots"], refs["rhs_slots"]),
            lax.rem(step, jnp.int32(self.num_slots)), lhs_start=wg * WG_ROWS,
        )
        plgpu.wgmma_wait(groups)  # Those of the step before are done.

      def for_the_first_time(step, _):
        plgpu.barrier_wait(refs["tile_full"].at[step])
        again(step, None)

      loaded = first + self.num_slots
      lax.fori_loop(first, loaded, for_the_first_time, None)
      lax.fori_loop(loaded, first + count, again, None)

    # Of a length that the compiler does not know: it would spend minutes on unrolling.
    steps = steps + jnp.minimum(wg, 0)
    shape = WG_ROWS, self.tile_n
    return accumulate.sum_over_k(multiply, shape=shape, k_steps=steps, promote=0)

  def truth(self, lhs: jax.Array, rhs: jax.Array, steps: int) -> np.ndarray:
    """Returns the sums of both warpgroups in float64, [TILE_M, tile_n]."""
    lhs, rhs = (np.asarray(x[0]).astype(np.float64) for x in (lhs, rhs))
    times = np.bincount(np.arange(steps) % self.num_slots, minlength=self.num_slots)
    return (lhs * np.repeat(times, TILE_K)) @ rhs
