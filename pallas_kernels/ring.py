"""The ring of shared-memory slots: whose they are, and how producers fill them.

Roles and barriers, for a ring of S slots:

  barrier      arrives                                  waits
  full[t,s]    the TMA copies, what registers loaded    consumers, before wgmma
  empty[t,s]   each consumer, one step after its wgmma  the producer, before TMA

What becomes of full slots: see `ring_reads`.

Steps are numbered without a break over all tiles of a CTA (step = local tile *
k_steps + k step), so the producer loads the next tile while the consumers still
multiply or store the last one.

The consumers are one team (t = 0), which shares out each tile, or two teams, which
take tiles in turn: one multiplies while the other stores. Both use the same slots,
in the order of the steps, so neither overtakes the other. Each has barriers of its
own: whoever waits on one must see all of its phases. For the same reason several
producers, which take steps in turn, must divide the number of slots.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import (
  block_scales,
  lhs_registers,
  norms,
  operand_tiles,
  register_loads,
  run_loads,
  tiles,
)

Ref = Any


class _Read(NamedTuple):
  """A step that a producer waits for: whose it is, and which k tile of its tile."""

  k_step: Any
  team: Any


@dataclasses.dataclass(frozen=True)
class Ring:
  """A ring of `num_stages` slots, each a tile of lhs and a tile of rhs.

  Attributes:
    prepared: the operands.
    num_stages: slots.
    num_consumers: warpgroups that read each slot.
    teams: 1 or 2, see the module's docstring.
    k_steps: slots that a tile takes.
    num_producers: warpgroups that load, see the module's docstring.
    factors: where the product has some of blocks, which come with each k tile.
    last_depth: elements of k that are loaded and multiplied of a tile's last k tile, a
      multiple of 16; 0: all. One producer loads then.
    norm: what consumers do to lhs on its way to wgmma, or None.
  """

  prepared: operand_tiles.Prepared
  num_stages: int
  num_consumers: int
  teams: int
  k_steps: int
  num_producers: int = 1
  factors: block_scales.BlockScales | None = None
  last_depth: int = 0
  norm: norms.Norm | None = None

  @property
  def splits_lhs(self) -> bool:
    """Whether the consumers split lhs in registers."""
    return self.lhs.dtype == "float32" and self.rhs.dtype == "bfloat16"

  @property
  def lhs(self) -> operand_tiles.Operand:
    return self.prepared.lhs_operand

  @property
  def rhs(self) -> operand_tiles.Operand:
    return self.prepared.rhs_operand

  def scratch(self) -> dict[str, Any]:
    # Whoever copies into the slots of this CTA: its neighbours along either axis.
    operands = self.lhs, self.rhs
    axes = tuple(each.shared_along for each in operands if each.shared > 1)
    num_barriers = self.teams * self.num_stages
    arrivals = dict(num_arrivals=self.num_consumers, num_barriers=num_barriers)
    # The emulator copies without multicast. So what a CTA has in its slots does not wait
    # for the neighbours of its neighbours there, and they would arrive out of turn.
    if len(axes) > 1 and self.lhs.emulated:
      axes = ()
    if axes:
      empty = plgpu.ClusterBarrier(collective_axes=axes, **arrivals)
    else:
      empty = plgpu.Barrier(**arrivals)
    staged = self.splits_lhs and self.lhs.emulated
    others = lhs_registers.scratch(self.num_consumers) if staged else {}
    if self.factors is not None:
      others |= self.factors.scratch(self.num_stages)
    if self.norm is not None:
      others |= self.norm.scratch()
    return others | {
        "lhs_slots": self.lhs.slots(self._num_lhs_slots),
        "rhs_slots": self.rhs.slots(self.num_stages),
        "full": plgpu.Barrier(
            num_arrivals=self._num_arrivals, num_barriers=num_barriers
        ),
        "empty": empty,
    }

  @property
  def _num_arrivals(self) -> int:
    """On a slot's barrier: one for each TMA copy, and what registers load."""
    copies = 0 if self.factors is None else block_scales.NUM_COPIES
    return self.prepared.num_arrivals + copies

  @property
  def _num_lhs_slots(self) -> int:
    return run_loads.num_slots(
        self.num_stages, self.k_steps, k_major=self.lhs.stays
    )

  def lhs_slot(self, first_step):
    """The slot of an lhs that stays for all k tiles from `first_step` on."""
    local = lax.div(jnp.int32(first_step), jnp.int32(self.k_steps))
    return lax.rem(local, jnp.int32(self._num_lhs_slots))

  def slot_of(self, step):
    """The slot of a step, counted over all tiles."""
    return lax.rem(step, jnp.int32(self.num_stages))

  def after(self, slot, steps: int = 1):
    """The slot so many steps later."""
    return tiles.wrapped(slot + steps, self.num_stages)

  def before(self, slot):
    """The slot one step earlier."""
    return lax.select(slot == 0, jnp.int32(self.num_stages), slot) - 1

  def team(self, step):
    """The team of a step."""
    if self.teams == 1:
      return 0
    return lax.rem(lax.div(step, jnp.int32(self.k_steps)), jnp.int32(self.teams))

  def _read_before(self, step) -> _Read | None:
    """Who is to have read the slot of `step` before that; None: the only team."""
    if self.teams == 1:
      return None
    turn = self.teams * self.k_steps
    step = step + (-self.num_stages % turn)  # Not negative, and of the same place.
    return _Read(lax.rem(step, jnp.int32(self.k_steps)), self.team(step))

  def _read_after(self, read: _Read | None) -> _Read | None:
    """The same one step later; several producers have one team."""
    if read is None:
      return None
    k_step = tiles.wrapped(read.k_step + 1, self.k_steps)
    team = tiles.wrapped(read.team + 1, self.teams)
    return _Read(k_step, lax.select(k_step == 0, team, read.team))

  def barrier(self, barriers: Ref, step) -> Ref:
    """The one of `barriers` that belongs to the slot and the team of `step`."""
    return barriers.at[self.slot_of(step) + self.team(step) * self.num_stages]

  def produce(self, lhs_gmem, rhs_gmem, refs, *, producer, local, batch, m, n, k):
    """Loads the share of one producer of the `local`-th tile of this CTA.

    The tile is at element (m, n) and begins with element `k`. The k tiles of several
    terms follow each other, each term's from its own arrays.
    """
    tile_k, turns = self.lhs.tile_k, jnp.int32(self.num_producers)
    first_step = local * self.k_steps
    first = lax.rem(producer - lax.rem(first_step, turns) + turns, turns)
    barriers = self.team(first_step) * self.num_stages
    kept = self.lhs_slot(first_step) if self.lhs.stays else None

    def load(turn, places, arrays, first_k, depth=None):
      slot, read = places
      i = first + turn * turns

      @pl.when(first_step + i >= self.num_stages)
      def _wait_until_read():
        of_team = 0 if read is None else read.team * self.num_stages
        plgpu.barrier_wait(refs["empty"].at[slot + of_team])

      at = dict(batch=batch, m=m, n=n, k=first_k + i * tile_k)
      full = refs["full"].at[slot + barriers]
      self.fill(*arrays, refs, slot, full, kept=kept, depth=depth, **at)
      return self.after(slot, self.num_producers), self._read_after(read)

    count = lax.div(self.k_steps - first + turns - 1, turns)
    step = first_step + first
    places = self.slot_of(step), self._read_before(step)
    if self.last_depth:
      count = jnp.int32(self.k_steps - 1)
    if self.prepared.num_terms == 1:
      load_its = functools.partial(load, arrays=(lhs_gmem, rhs_gmem), first_k=k)
      places = lax.fori_loop(jnp.int32(0), count, load_its, places)
      if self.last_depth:
        load_its(count, places, depth=self.last_depth)
      return
    steps = self.k_steps // self.prepared.num_terms
    for term, (lhs, rhs) in enumerate(zip(lhs_gmem, rhs_gmem, strict=True)):
      begin = term * steps
      load_its = functools.partial(
          load, arrays=((lhs,), (rhs,)), first_k=k - begin * tile_k
      )
      places = lax.fori_loop(
          jnp.int32(begin), jnp.int32(begin + steps), load_its, places
      )

  def fill(
      self, lhs_gmem, rhs_gmem, refs, slot, full, *, batch, m, n, k, kept=None,
      depth: int | None = None,
  ):
    """Loads the k tile at (m, n, k) into a slot; what arrives does so on `full`.

    An lhs that stays goes into its slot `kept`. `depth` of k are wanted, by default all.
    """
    at = dict(batch=batch, k=k)
    loads = [
        (self.lhs, lhs_gmem, refs["lhs_slots"], m),
        (self.rhs, rhs_gmem, refs["rhs_slots"], n),
    ]
    # First what comes to several CTAs, each of which waits for the others' copies: of
    # pairs that share rhs 4096x2048x7168 by 128x128 takes 156 us so, 171 lhs in front.
    loads.sort(key=lambda load: -load[0].shared)
    by_registers = []  # TMA's copies are under way while registers load the rest.
    for operand, gmem, slots, mn in loads:
      if operand.way == "loads":
        by_registers.append(operand.by_registers(gmem, slots, slot, mn=mn, **at))
        continue
      for part in range(operand.num_parts):
        to = kept if operand.stays else slot
        operand.load(gmem, slots, to, full, mn=mn, part=part, depth=depth, **at)
    if self.factors is not None:
      self.factors.load(refs, slot, full, m=m, n=n, **at)
    if by_registers:
      register_loads.load(*by_registers)
      plgpu.commit_smem()
      plgpu.barrier_arrive(full)

  def drain(self, refs, *, producer, total_steps):
    """A producer's last act: waits until every slot that it filled has been read.

    A CTA must not leave while a neighbour may still arrive on its barriers.
    """
    pending = lax.min(total_steps, jnp.int32(self.num_stages))

    def wait(i, _):
      step = total_steps - pending + i

      @pl.when(lax.rem(step, jnp.int32(self.num_producers)) == producer)
      def _wait():
        plgpu.barrier_wait(self.barrier(refs["empty"], step))

    lax.fori_loop(jnp.int32(0), pending, wait, None)
