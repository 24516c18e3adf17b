"""The ring of shared-memory slots, as warp-specialised kernels turn it.

Roles and barriers, for a ring of S slots:

  barrier      arrives                                  waits
  full[t,s]    the TMA copies, what registers loaded    consumers, before wgmma
  empty[t,s]   each consumer, one step after its wgmma  the producer, before TMA

A warpgroup that normalises lhs stands between the two: see `norms`.

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
  slot_products,
  tiles,
)
from pallas_kernels.configs import ALONG_M, ALONG_N

# Of slots: two are held then. 50257x768x8192 TN took 1174 us with three, 900 without.
_ENOUGH_TO_LOAD_AHEAD = 4
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
    lhs_shared, rhs_shared: CTAs of a cluster that share a tile: those along n one of
      lhs, those along m one of rhs. Each copies a part of it, by multicast.
    factors: where the product has some of blocks, which come with each k tile.
    last_depth: elements of k that are loaded and multiplied of a tile's last k tile, a
      multiple of 16; 0: all. One producer loads then.
    norm: what a warpgroup of its own does to lhs between its load and wgmma, or None.
  """

  prepared: operand_tiles.Prepared
  num_stages: int
  num_consumers: int
  teams: int
  k_steps: int
  num_producers: int = 1
  lhs_shared: int = 1
  rhs_shared: int = 1
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
    shared = {ALONG_N: self.lhs_shared, ALONG_M: self.rhs_shared}
    axes = tuple(axis for axis, ctas in shared.items() if ctas > 1)
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
      others |= self.norm.scratch(self.num_stages)
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

  def _lhs_slot(self, first_step):
    """The slot of an lhs that stays for all k tiles from `first_step` on."""
    local = lax.div(jnp.int32(first_step), jnp.int32(self.k_steps))
    return lax.rem(local, jnp.int32(self._num_lhs_slots))

  def slot_of(self, step):
    """The slot of a step, counted over all tiles."""
    return lax.rem(step, jnp.int32(self.num_stages))

  def _after(self, slot, steps: int = 1):
    """The slot so many steps later."""
    return tiles.wrapped(slot + steps, self.num_stages)

  def _team(self, step):
    if self.teams == 1:
      return 0
    return lax.rem(lax.div(step, jnp.int32(self.k_steps)), jnp.int32(self.teams))

  def _read_before(self, step) -> _Read | None:
    """Who is to have read the slot of `step` before that; None: the only team."""
    if self.teams == 1:
      return None
    turn = self.teams * self.k_steps
    step = step + (-self.num_stages % turn)  # Not negative, and of the same place.
    return _Read(lax.rem(step, jnp.int32(self.k_steps)), self._team(step))

  def _read_after(self, read: _Read | None) -> _Read | None:
    """The same one step later; several producers have one team."""
    if read is None:
      return None
    k_step = tiles.wrapped(read.k_step + 1, self.k_steps)
    team = tiles.wrapped(read.team + 1, self.teams)
    return _Read(k_step, lax.select(k_step == 0, team, read.team))

  def _barrier(self, barriers: Ref, step) -> Ref:
    """The one of `barriers` that belongs to the slot and the team of `step`."""
    return barriers.at[self.slot_of(step) + self._team(step) * self.num_stages]

  def produce(self, lhs_gmem, rhs_gmem, refs, *, producer, local, batch, m, n, k):
    """Loads the share of one producer of the `local`-th tile of this CTA.

    The tile is at element (m, n) and begins with element `k`. The k tiles of several
    terms follow each other, each term's from its own arrays.
    """
    tile_k, turns = self.lhs.tile_k, jnp.int32(self.num_producers)
    first_step = local * self.k_steps
    first = lax.rem(producer - lax.rem(first_step, turns) + turns, turns)
    barriers = self._team(first_step) * self.num_stages
    kept = self._lhs_slot(first_step) if self.lhs.stays else None

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
      return self._after(slot, self.num_producers), self._read_after(read)

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
        (self.lhs, lhs_gmem, refs["lhs_slots"], m, ALONG_N, self.lhs_shared),
        (self.rhs, rhs_gmem, refs["rhs_slots"], n, ALONG_M, self.rhs_shared),
    ]
    # First what comes to several CTAs, each of which waits for the others' copies: of
    # pairs that share rhs 4096x2048x7168 by 128x128 takes 156 us so, 171 lhs in front.
    loads.sort(key=lambda load: -load[-1])
    by_registers = []  # TMA's copies are under way while registers load the rest.
    for operand, gmem, slots, mn, axis, ctas in loads:
      if operand.way == "loads":
        by_registers.append(operand.by_registers(gmem, slots, slot, mn=mn, **at))
        continue
      shared = dict(collective_axes=(axis,), cluster=ctas) if ctas > 1 else {}
      for part in range(operand.num_parts):
        to = kept if operand.stays else slot
        operand.load(
            gmem, slots, to, full, mn=mn, part=part, depth=depth, **at, **shared
        )
    if self.factors is not None:
      self.factors.load(refs, slot, full, m=m, n=n, **at)
    if by_registers:
      register_loads.load(*by_registers)
      plgpu.commit_smem()
      plgpu.barrier_arrive(full)

  def consume(
      self, acc, refs, *, first_step, num_steps, lhs_start, rhs_start,
      tile=(0, 0, 0),
  ):
    """acc += the product of `num_steps` slots; one slot's wgmma stays in flight.

    This warpgroup's share of them begins at `lhs_start` and `rhs_start`. They are of
    the tile that begins at `tile`, (batch, m, k); with `last_depth` all of them.
    """
    if self.lhs.in_registers:
      self._consume_fragments(
          acc, refs, first_step=first_step, num_steps=num_steps, start=lhs_start,
          tile=tile,
      )
      return
    slots = refs["lhs_slots"], refs["rhs_slots"]
    full = refs["full" if self.norm is None else "ready"]
    barriers = self._team(first_step) * self.num_stages

    def multiply(i, places, depth=None):
      slot, last = places
      plgpu.barrier_wait(full.at[slot + barriers])
      groups = slot_products.multiply(
          acc, self.prepared, slots, slot, lhs_start=lhs_start, rhs_start=rhs_start,
          depth=depth,
      )
      plgpu.wgmma_wait(groups)

      @pl.when(i > 0)
      def _free_the_last_slot():
        plgpu.barrier_arrive(refs["empty"].at[last + barriers])

      return self._after(slot), slot

    first = self.slot_of(jnp.int32(first_step))
    count = jnp.int32(num_steps - 1 if self.last_depth else num_steps)
    places = lax.fori_loop(jnp.int32(0), count, multiply, (first, first))
    if self.last_depth:
      multiply(count, places, self.last_depth)
    self.finish(refs, step=first_step + num_steps - 1)

  def normalise(self, refs, *, local) -> None:
    """The work of the warpgroup that `norm` wants, of the `local`-th tile of this CTA."""
    at_once = min(norms.at_once(self.num_stages), self.k_steps)

    def weigh(first, places, count):
      slot, squares = places
      slots, found = [self._after(slot, i) for i in range(count)], []
      for place in slots:
        plgpu.barrier_wait(refs["full"].at[place])
        found.append(self.lhs.stored(refs["lhs_slots"], place, 0, self.lhs.tile_mn))
      squares = self.norm.weigh(found, refs, first * self.lhs.tile_k, squares)
      plgpu.commit_smem()
      for place in slots:
        plgpu.barrier_arrive(refs["ready"].at[place])
      return self._after(slot, count), squares

    turns, rest = divmod(self.k_steps, at_once)
    places = lax.fori_loop(
        jnp.int32(0), jnp.int32(turns),
        lambda turn, places: weigh(turn * at_once, places, at_once),
        (self.slot_of(local * self.k_steps), self.norm.no_squares()),
    )
    if rest:
      places = weigh(jnp.int32(turns * at_once), places, rest)
    self.norm.hand_over(refs, places[1], local)

  def _consume_fragments(self, acc, refs, *, first_step, num_steps, start, tile):
    """The same, of lhs that goes through registers.

    With enough slots the loads of the next are on their way before a slot's wgmma
    begin. While these are in flight loads gained nothing: the tensor cores' own reads of
    shared memory, and TMA, are in their way.
    """

    barriers, (batch, m, k) = self._team(first_step) * self.num_stages, tile
    kept = self._lhs_slot(first_step) if self.lhs.stays else None
    first_of_tile = lax.rem(jnp.int32(first_step), jnp.int32(self.k_steps))

    def load(slot, i):
      plgpu.barrier_wait(refs["full"].at[slot + barriers])
      return self.lhs.load_fragments(
          refs["lhs_slots"], kept if self.lhs.stays else slot, start, acc.shape[0],
          batch=batch, mn=m, k=k, step=first_of_tile + i,
      )

    def multiply(slot, loaded, following=None):
      lhs = self.lhs.fragments(loaded)
      loaded = None if following is None else load(*following)
      slot_products.multiply_fragments(acc, lhs, self.prepared, refs["rhs_slots"], slot)
      plgpu.wgmma_wait(0)
      plgpu.barrier_arrive(refs["empty"].at[slot + barriers])
      return loaded

    def alone(i, slot):
      multiply(slot, load(slot, i))
      return self._after(slot)

    def ahead(i, places):
      slot, loaded = places
      following = self._after(slot)
      return following, multiply(slot, loaded, (following, i + 1))

    first, zero = self.slot_of(jnp.int32(first_step)), jnp.int32(0)
    if self.num_stages < _ENOUGH_TO_LOAD_AHEAD:
      lax.fori_loop(zero, jnp.int32(num_steps), alone, first)
      return
    places = lax.fori_loop(
        zero, jnp.int32(num_steps) - 1, ahead, (first, load(first, zero))
    )
    multiply(*places)

  def consume_step(
      self, accs, refs, *, step, is_first, groups, in_flight, lhs_start, rhs_start
  ):
    """Each of `accs` += the products of parts of its group, of one slot; see `parts`.

    The wgmma of the last `in_flight` groups stay in flight; those of the step before,
    but for the first, have come to their end. After the last step: `finish`.
    """
    slots, issued = (refs["lhs_slots"], refs["rhs_slots"]), []
    plgpu.barrier_wait(self._barrier(refs["full"], step))
    lhs_parts = None
    if self.splits_lhs:
      lhs_parts = lhs_registers.load(
          self.lhs, refs, self.slot_of(step), lhs_start,
          wg=lax.div(lhs_start, jnp.int32(lhs_registers.ROWS)),
          turn=lax.rem(step, jnp.int32(2)),
      )
    for acc, group in zip(accs, groups, strict=True):
      for pair in group.pairs:
        if lhs_parts is None:
          count = slot_products.multiply(
              acc, self.prepared, slots, self.slot_of(step), lhs_start=lhs_start,
              rhs_start=rhs_start, parts=pair,
          )
        else:
          count, (part, other) = 1, pair
          slot = self.slot_of(step)
          rhs = self.rhs.view(slots[1], slot, rhs_start, acc.shape[1], other)
          plgpu.wgmma(acc, lhs_parts[part], rhs)
        issued.append(count)
    late = sum(len(group.pairs) for group in groups[len(groups) - in_flight :])
    plgpu.wgmma_wait(sum(issued[len(issued) - late :]))

    @pl.when(jnp.logical_not(is_first))
    def _free_the_last_slot():
      plgpu.barrier_arrive(self._barrier(refs["empty"], step - 1))

  def begin(
      self, refs, slot, *, first_step, shape, is_first, lhs_start, rhs_start, m, n
  ):
    """The next slot, and the sums [rows, cols] of this one with their factors.

    The sums are in flight, those of the slot before are not any more. The first slot of
    the tile at (m, n), which begins with `first_step`, is that of `slot_of`; after the
    last: `finish`.
    """
    barriers = self._team(first_step) * self.num_stages
    plgpu.barrier_wait(refs["full"].at[slot + barriers])
    factors = self.factors.read(
        refs, slot, m=m, n=n, row=lhs_start, col=rhs_start, rows=shape[0]
    )
    if self.lhs.emulated:  # Which knows barriers as no fence between reads and TMA.
      plgpu.commit_smem()
    if not is_first:
      plgpu.wgmma_wait(0)
    sums = slot_products.product(
        self.prepared, (refs["lhs_slots"], refs["rhs_slots"]), slot, shape,
        lhs_start=lhs_start, rhs_start=rhs_start,
    )
    if not is_first:
      last = lax.select(slot == 0, jnp.int32(self.num_stages), slot) - 1
      plgpu.barrier_arrive(refs["empty"].at[last + barriers])
    return self._after(slot), sums, factors

  def finish(self, refs, *, step):
    """Waits for all wgmma, the last of which read the slot of `step`."""
    plgpu.wgmma_wait(0)
    plgpu.barrier_arrive(self._barrier(refs["empty"], step))

  def consume_parts(
      self, acc, refs, *, step, pairs, is_first, is_last, lhs_start, rhs_start
  ):
    """acc += the products of some pairs of parts of one slot; see `parts`.

    The first of a slot's calls waits until it is full, the last lets it go.
    """
    if is_first:
      plgpu.barrier_wait(self._barrier(refs["full"], step))
    slots = refs["lhs_slots"], refs["rhs_slots"]
    for pair in pairs:
      slot_products.multiply(
          acc, self.prepared, slots, self.slot_of(step), lhs_start=lhs_start,
          rhs_start=rhs_start, parts=pair,
      )
    plgpu.wgmma_wait(0)
    if is_last:
      plgpu.barrier_arrive(self._barrier(refs["empty"], step))

  def drain(self, refs, *, producer, total_steps):
    """A producer's last act: waits until every slot that it filled has been read.

    A CTA must not leave while a neighbour may still arrive on its barriers.
    """
    pending = lax.min(total_steps, jnp.int32(self.num_stages))

    def wait(i, _):
      step = total_steps - pending + i

      @pl.when(lax.rem(step, jnp.int32(self.num_producers)) == producer)
      def _wait():
        plgpu.barrier_wait(self._barrier(refs["empty"], step))

    lax.fori_loop(jnp.int32(0), pending, wait, None)
