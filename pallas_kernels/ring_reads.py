"""What becomes of the ring's slots: products, by its consumers.

A consumer waits for a slot, multiplies out of it, and lets it go when its wgmma have come
to their end. It does so in one of four ways: slot after slot (`consume`), part by part of
the operands (`consume_parts`; `consume_step` while it adds up the parts before), or each
slot into sums of its own, which factors of blocks wait for (`begin`). lhs may go through
its registers, where it may be normalised. Barriers: see `ring`.
"""

from __future__ import annotations

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import lhs_registers, slot_products
from pallas_kernels.ring import Ring

# Of slots: two are held then. 50257x768x8192 TN took 1174 us with three, 900 without.
_ENOUGH_TO_LOAD_AHEAD = 4


def consume(
    ring: Ring, acc, refs, *, first_step, num_steps, lhs_start, rhs_start,
    tile=(0, 0, 0), reader=0,
):
  """acc += the product of `num_steps` slots; one slot's wgmma stays in flight.

  This warpgroup's share of them begins at `lhs_start` and `rhs_start`. They are of
  the tile that begins at `tile`, (batch, m, k); with `last_depth` all of them.
  Of consumers that share out k this is number `reader`.
  """
  if ring.lhs.in_registers:
    _consume_fragments(
        ring, acc, refs, first_step=first_step, num_steps=num_steps, start=lhs_start,
        tile=tile,
    )
    return
  if ring.norm is not None:
    _consume_normalised(
        ring, acc, refs, first_step=first_step, num_steps=num_steps, reader=reader
    )
    return
  slots, full = (refs["lhs_slots"], refs["rhs_slots"]), refs["full"]
  barriers = ring.team(first_step) * ring.num_stages

  def multiply(i, places, depth=None):
    slot, last = places
    plgpu.barrier_wait(full.at[slot + barriers])
    groups = slot_products.multiply(
        acc, ring.prepared, slots, slot, lhs_start=lhs_start, rhs_start=rhs_start,
        depth=depth,
    )
    plgpu.wgmma_wait(groups)

    @pl.when(i > 0)
    def _free_the_last_slot():
      plgpu.barrier_arrive(refs["empty"].at[last + barriers])

    return ring.after(slot), slot

  first = ring.slot_of(jnp.int32(first_step))
  count = jnp.int32(num_steps - 1 if ring.last_depth else num_steps)
  places = lax.fori_loop(jnp.int32(0), count, multiply, (first, first))
  if ring.last_depth:
    places = multiply(count, places, ring.last_depth)
  plgpu.wgmma_wait(0)
  _let_go(refs["empty"].at[places[1] + barriers], first_step)


def _let_go(barrier, step):
  """Arrives on `barrier`, before anything that follows.

  Nothing ties the arithmetic of an epilogue to that, and ptxas put 526 of its
  instructions in front: the producer had the slot so much later that a tile of 52,600
  cycles took 1,400 more. They pass a branch as well, but no loop whose first turn is
  certain. So this is one, and its only turn: no step is negative, which compilers do not
  know.
  """
  sign = lax.shift_right_arithmetic(
      lax.optimization_barrier(jnp.int32(step)), jnp.int32(31)
  )
  turns = 1 + lax.bitwise_and(sign, jnp.int32(15))  # A loop of few is unrolled.
  lax.fori_loop(
      jnp.int32(0), turns, lambda *_: plgpu.barrier_arrive(barrier), None
  )


def _consume_fragments(
    ring: Ring, acc, refs, *, first_step, num_steps, start, tile
):
  """The same, of lhs that goes through registers.

  With enough slots the loads of the next are on their way before a slot's wgmma
  begin. While these are in flight loads gained nothing: the tensor cores' own reads of
  shared memory, and TMA, are in their way.
  """
  barriers, (batch, m, k) = ring.team(first_step) * ring.num_stages, tile
  kept = ring.lhs_slot(first_step) if ring.lhs.stays else None
  first_of_tile = lax.rem(jnp.int32(first_step), jnp.int32(ring.k_steps))

  def load(slot, i):
    plgpu.barrier_wait(refs["full"].at[slot + barriers])
    return ring.lhs.load_fragments(
        refs["lhs_slots"], kept if ring.lhs.stays else slot, start, acc.shape[0],
        batch=batch, mn=m, k=k, step=first_of_tile + i,
    )

  def multiply(slot, loaded, following=None):
    lhs = ring.lhs.fragments(loaded)
    loaded = None if following is None else load(*following)
    slot_products.multiply_fragments(acc, lhs, ring.prepared, refs["rhs_slots"], slot)
    plgpu.wgmma_wait(0)
    plgpu.barrier_arrive(refs["empty"].at[slot + barriers])
    return loaded

  def alone(i, slot):
    multiply(slot, load(slot, i))
    return ring.after(slot)

  def ahead(i, places):
    slot, loaded = places
    following = ring.after(slot)
    return following, multiply(slot, loaded, (following, i + 1))

  first, zero = ring.slot_of(jnp.int32(first_step)), jnp.int32(0)
  if ring.num_stages < _ENOUGH_TO_LOAD_AHEAD:
    lax.fori_loop(zero, jnp.int32(num_steps), alone, first)
    return
  places = lax.fori_loop(
      zero, jnp.int32(num_steps) - 1, ahead, (first, load(first, zero))
  )
  multiply(*places)


def _consume_normalised(
    ring: Ring, acc, refs, *, first_step, num_steps: int, reader: int
):
  """The same, of lhs that is normalised on its way through registers: see `norms`.

  Several slots at a turn: what wgmma waits for in between takes as long as it does, and
  loads are slow where it reads shared memory, too.
  """
  norm, slots, of = ring.norm, (refs["lhs_slots"], refs["rhs_slots"]), ring.norm.readers
  first_step = jnp.int32(first_step)
  first_of_tile = lax.rem(first_step, jnp.int32(ring.k_steps))
  # A reader's slots are its own, and so are their barriers.
  skipped = lax.rem(first_step + reader, jnp.int32(of)) if of > 1 else jnp.int32(0)
  count = lax.div(num_steps - skipped + of - 1, jnp.int32(of))

  def multiply(step, carry, at_once):
    slot, squares = carry
    k_step = first_of_tile + skipped + step * of
    places, loaded = [ring.after(slot, i * of) for i in range(at_once)], []
    for i, place in enumerate(places):
      plgpu.barrier_wait(refs["full"].at[place])
      tile = ring.lhs.stored(slots[0], place, 0, ring.lhs.tile_mn)
      loaded.append(norm.load(tile, refs, (k_step + i * of) * ring.lhs.tile_k))
    weighed = lax.optimization_barrier([norm.weighed(tile) for tile in loaded])
    for place, rows in zip(places, weighed, strict=True):
      if not ring.lhs.emulated:
        slot_products.multiply_fragments(acc, rows, ring.prepared, slots[1], place)
        continue
      slots[0][place] = rows  # The emulator's wgmma reads no registers.
      plgpu.commit_smem()
      slot_products.multiply(acc, ring.prepared, slots, place)
    squares = norm.with_squares(loaded, squares, is_true=slot >= 0)
    plgpu.wgmma_wait(0)
    for place in places:
      plgpu.barrier_arrive(refs["empty"].at[place])
    return ring.after(slot, at_once * of), squares

  zero, turns = jnp.int32(0), lax.div(count, jnp.int32(norm.at_once))
  carry = ring.slot_of(first_step + skipped), norm.no_squares()
  carry = lax.fori_loop(
      zero, turns, lambda i, carry: multiply(i * norm.at_once, carry, norm.at_once),
      carry,
  )
  carry = lax.fori_loop(
      turns * norm.at_once, count, lambda i, carry: multiply(i, carry, 1), carry
  )
  norm.keep(refs, carry[1], reader=reader, is_first=first_of_tile == 0)


def consume_step(
    ring: Ring, accs, refs, slot, *, first_step, k_step, groups, in_flight, lhs_start,
    rhs_start,
):
  """Each of `accs` += the products of parts of its group, of one slot; see `parts`.

  The wgmma of the last `in_flight` groups stay in flight; those of the k tile before,
  if this is not the first of a tile that begins with `first_step`, have come to their
  end. After the last: `finish`.
  """
  slots, issued = (refs["lhs_slots"], refs["rhs_slots"]), []
  barriers = ring.team(first_step) * ring.num_stages
  plgpu.barrier_wait(refs["full"].at[slot + barriers])
  lhs_parts = None
  if ring.splits_lhs:
    lhs_parts = lhs_registers.load(
        ring.lhs, refs, slot, lhs_start,
        wg=lax.div(lhs_start, jnp.int32(lhs_registers.ROWS)),
        turn=lax.rem(first_step + k_step, jnp.int32(2)),
    )
  for acc, group in zip(accs, groups, strict=True):
    for pair in group.pairs:
      if lhs_parts is None:
        count = slot_products.multiply(
            acc, ring.prepared, slots, slot, lhs_start=lhs_start, rhs_start=rhs_start,
            parts=pair,
        )
      else:
        count, (part, other) = 1, pair
        rhs = ring.rhs.view(slots[1], slot, rhs_start, acc.shape[1], other)
        plgpu.wgmma(acc, lhs_parts[part], rhs)
      issued.append(count)
  late = sum(len(group.pairs) for group in groups[len(groups) - in_flight :])
  plgpu.wgmma_wait(sum(issued[len(issued) - late :]))

  @pl.when(k_step > 0)
  def _free_the_last_slot():
    plgpu.barrier_arrive(refs["empty"].at[ring.before(slot) + barriers])


def begin(
    ring: Ring, refs, slot, *, first_step, shape, is_first, lhs_start, rhs_start, m, n
):
  """The next slot, and the sums [rows, cols] of this one with their factors.

  The sums are in flight, those of the slot before are not any more. The first slot of
  the tile at (m, n), which begins with `first_step`, is that of `slot_of`; after the
  last: `finish`.
  """
  barriers = ring.team(first_step) * ring.num_stages
  plgpu.barrier_wait(refs["full"].at[slot + barriers])
  factors = ring.factors.read(
      refs, slot, m=m, n=n, row=lhs_start, col=rhs_start, rows=shape[0]
  )
  if ring.lhs.emulated:  # Which knows barriers as no fence between reads and TMA.
    plgpu.commit_smem()
  if not is_first:
    plgpu.wgmma_wait(0)
  sums = slot_products.product(
      ring.prepared, (refs["lhs_slots"], refs["rhs_slots"]), slot, shape,
      lhs_start=lhs_start, rhs_start=rhs_start,
  )
  if not is_first:
    plgpu.barrier_arrive(refs["empty"].at[ring.before(slot) + barriers])
  return ring.after(slot), sums, factors


def finish(ring: Ring, refs, *, step):
  """Waits for all wgmma, the last of which read the slot of `step`.

  And lets it go, but not as `_let_go`: bf16_x6 took 5% longer so.
  """
  plgpu.wgmma_wait(0)
  plgpu.barrier_arrive(ring.barrier(refs["empty"], step))


def consume_parts(
    ring: Ring, acc, refs, slot, *, first_step, pairs, is_first, is_last, lhs_start,
    rhs_start,
):
  """acc += the products of some pairs of parts of one slot; see `parts`.

  The first of a slot's calls waits until it is full, the last lets it go. The slot is of
  the tile that begins with `first_step`.
  """
  barriers = ring.team(first_step) * ring.num_stages
  if is_first:
    plgpu.barrier_wait(refs["full"].at[slot + barriers])
  for pair in pairs:
    slot_products.multiply(
        acc, ring.prepared, (refs["lhs_slots"], refs["rhs_slots"]), slot,
        lhs_start=lhs_start, rhs_start=rhs_start, parts=pair,
    )
  plgpu.wgmma_wait(0)
  if is_last:
    plgpu.barrier_arrive(refs["empty"].at[slot + barriers])
