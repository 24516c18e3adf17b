"""The ring of shared-memory slots, as warp-specialised kernels turn it.

Roles and barriers, for a ring of S slots:

  barrier    arrives                                  waits
  full[s]    the TMA copies of lhs and rhs            consumers, before wgmma
  empty[s]   each consumer, one step after its wgmma  the producer, before TMA

Steps are numbered without a break over all tiles of a CTA (step = local tile *
k_steps + k step), so the producer loads the next tile while the consumers still
multiply or store the last one.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import tiles

PRODUCER_REGISTERS = 40
CONSUMER_REGISTERS = 232
Ref = Any


@dataclasses.dataclass(frozen=True)
class Ring:
  """A ring of `num_stages` slots, each a tile of lhs and a tile of rhs.

  Attributes:
    lhs, rhs: the operands.
    num_stages: slots.
    num_consumers: warpgroups that read each slot.
    lhs_axes, rhs_axes: cluster axes over which a copy is multicast.
  """

  lhs: tiles.Operand
  rhs: tiles.Operand
  num_stages: int
  num_consumers: int
  lhs_axes: tuple[str, ...] = ()
  rhs_axes: tuple[str, ...] = ()

  def scratch(self) -> dict[str, Any]:
    axes = (*self.lhs_axes, *self.rhs_axes)
    arrivals = dict(num_arrivals=self.num_consumers, num_barriers=self.num_stages)
    if axes:
      empty = plgpu.ClusterBarrier(collective_axes=axes, **arrivals)
    else:
      empty = plgpu.Barrier(**arrivals)
    return {
        "lhs_slots": self.lhs.slots(self.num_stages),
        "rhs_slots": self.rhs.slots(self.num_stages),
        "full": plgpu.Barrier(
            num_arrivals=self.lhs.num_copies + self.rhs.num_copies,
            num_barriers=self.num_stages,
        ),
        "empty": empty,
    }

  def produce(self, lhs_gmem, rhs_gmem, refs, *, first_step, num_steps, batch, m, n, k):
    """Loads `num_steps` k tiles of the output tile at element (m, n), from k on."""
    tile_k = self.lhs.tile_k

    def step(i, _):
      slot = lax.rem(first_step + i, jnp.int32(self.num_stages))

      @pl.when(first_step + i >= self.num_stages)
      def _wait_until_read():
        plgpu.barrier_wait(refs["empty"].at[slot])

      at = dict(batch=batch, k=k + i * tile_k)
      full = refs["full"].at[slot]
      self.lhs.load(lhs_gmem, refs["lhs_slots"], slot, full, mn=m, **at,
                    collective_axes=self.lhs_axes or None)
      self.rhs.load(rhs_gmem, refs["rhs_slots"], slot, full, mn=n, **at,
                    collective_axes=self.rhs_axes or None)

    lax.fori_loop(jnp.int32(0), jnp.int32(num_steps), step, None)

  def consume(self, acc, refs, *, first_step, num_steps, lhs_part, rhs_part):
    """acc += the product of `num_steps` slots; one wgmma stays in flight.

    `lhs_part` and `rhs_part` are (start, size): this warpgroup's share.
    """
    num_stages = jnp.int32(self.num_stages)

    def step(i, _):
      slot = lax.rem(first_step + i, num_stages)
      plgpu.barrier_wait(refs["full"].at[slot])
      plgpu.wgmma(
          acc,
          self.lhs.view(refs["lhs_slots"], slot, *lhs_part),
          self.rhs.view(refs["rhs_slots"], slot, *rhs_part),
      )
      plgpu.wgmma_wait(1)

      @pl.when(i > 0)
      def _free_the_last_slot():
        plgpu.barrier_arrive(refs["empty"].at[lax.rem(first_step + i - 1, num_stages)])

    lax.fori_loop(jnp.int32(0), jnp.int32(num_steps), step, None)
    plgpu.wgmma_wait(0)
    plgpu.barrier_arrive(
        refs["empty"].at[lax.rem(first_step + num_steps - 1, num_stages)]
    )

  def drain(self, refs, *, total_steps):
    """The producer's last act: waits until every slot has been read.

    A CTA must not leave while a neighbour may still arrive on its barriers.
    """
    pending = lax.min(total_steps, jnp.int32(self.num_stages))

    def wait(i, _):
      slot = lax.rem(total_steps - pending + i, jnp.int32(self.num_stages))
      plgpu.barrier_wait(refs["empty"].at[slot])

    lax.fori_loop(jnp.int32(0), pending, wait, None)


def specialise(wg, num_consumers: int, produce, consume) -> None:
  """Runs `consume` in the first `num_consumers` warpgroups, `produce` in the next.

  The producer gives most of its registers to the consumers, whose accumulators
  need them.
  """

  @pl.when(wg == num_consumers)
  def _produce():
    plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
    produce()

  @pl.when(wg < num_consumers)
  def _consume():
    plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
    consume()
