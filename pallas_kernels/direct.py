"""direct: operands and result through registers, for products that are soon over.

  out[b] = alpha * lhs[b] @ rhs[b] + beta * c[b]

One warpgroup computes one output tile. It asks for the whole k of both operands at
once, stores what comes into shared memory, multiplies, and stores the result itself:

  load k tiles 0 .. K-1 | store them into shared memory | wgmma 0 .. K-1 | store

Where nothing need be shifted, and there is more than a little, copies do the first two at
once, but of what all CTAs ask for (see `register_loads.copied`). (A longer k comes in
groups of as many k tiles as there are slots, one after the other.) With `splits`, the
CTAs of a cluster take a part of k each, and add up their sums through distributed shared
memory, in one order (see `exchange`). With `overlap` tiles have some columns of the next,
so that each stores whole sectors (see `sector_stores`).

Where there are only a few k tiles, a pipeline has nothing to overlap, and what remains
is latency: of launching, of fetching TMA's descriptors, of one way from memory and one
back. Registers need no descriptor, and take any stride: no pass pads an operand. Of
the last k tile no more is loaded, and multiplied, than there is (see `depths`).

There are no barriers but the warpgroup's own, those of c, which TMA copies (see
`epilogue`), and the exchange's. The emulator, which knows no such loads, copies tiles as
other kernels do:

  barrier  arrives                        waits
  full     the copies of lhs and rhs      the warpgroup, before wgmma

Constraints: see `supports`.
Source: the loads are those of `register_loads`; measured against `pipelined`.
"""

from __future__ import annotations

from collections.abc import Iterator

from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import (
  accumulate,
  calls,
  register_loads,
  sector_stores,
  slot_products,
  tiles,
)
from pallas_kernels.configs import ALONG_K, DirectConfig
from pallas_kernels.exchange import Exchange, first_col
from pallas_kernels.problem import Problem

NAME = "direct"
Config = DirectConfig
MAX_SLOTS = 16  # k tiles that it holds; more have not been measured.
LOADS_AT_ONCE = 16  # Of 16 or 32 bytes a thread.


def supports(problem: Problem, config: DirectConfig) -> str | None:
  """The reason why this kernel cannot serve, or None."""
  if problem.itemsize != 2:
    return f"direct loads 16-bit operands, not {problem.dtype}"
  return (
      tiles.check_problem(problem)
      or tiles.check_tile(problem, config.tile_m, config.tile_n, config.tile_k)
      or register_loads.check_columns(config.tile_n)
      or _check_splits(problem, config)
      or _check_overlap(problem, config)
      or accumulate.check(config.tile_m, config.tile_n, config.promote)
      or tiles.check_smem(smem_bytes(problem, config))
  )


def _check_splits(problem: Problem, config: DirectConfig) -> str | None:
  most = max(1, min(tiles.MAX_CTAS, tiles.cdiv(problem.k, config.tile_k)))
  if 1 <= config.splits <= most:
    return None
  return (
      f"splits={config.splits} must be in [1, {most}]: the CTAs of a cluster share out"
      f" the k tiles of k={problem.k}"
  )


def _check_overlap(problem: Problem, config: DirectConfig) -> str | None:
  """Why tiles cannot overlap, or None."""
  if not config.overlap:
    return None
  if config.splits > 1:
    return "overlap=True excludes splits: each CTA of a cluster stores some columns"
  reason = sector_stores.check(problem, config.tile_n)
  return reason and f"overlap=True: {reason}"


def smem_bytes(problem: Problem, config: DirectConfig) -> int:
  """Shared memory of one CTA: a slot for each k tile of a group, the staging slot.

  With splits, an inbox besides.
  """
  slots = num_slots(problem, config) * _slot_bytes(problem, config)
  return slots + _other_bytes(problem, config)


def _slot_bytes(problem: Problem, config: DirectConfig) -> int:
  return tiles.slot_bytes(problem, config.tile_m, config.tile_n, config.tile_k)


def _other_bytes(problem: Problem, config: DirectConfig) -> int:
  """Shared memory beside the slots."""
  exchange, cols = make_exchange(config, emulated=False), config.tile_n
  inbox = 0
  if exchange is not None:
    inbox, cols = exchange.smem_bytes, exchange.share_cols
  staging = calls.epilogue_bytes(
      problem, cols, 1, by_registers=True, overlapping=config.overlap
  )
  return inbox + staging + tiles.BARRIER_BYTES


def make_exchange(config: DirectConfig, *, emulated: bool) -> Exchange | None:
  """How the CTAs that share k add up their sums; None where one has all of it."""
  if config.splits == 1:
    return None
  return Exchange(config.splits, config.tile_m, config.tile_n, 1, emulated)


def num_steps(problem: Problem, config: DirectConfig) -> int:
  """k tiles of a CTA; the last of those that share k may have fewer within it."""
  return tiles.cdiv(tiles.cdiv(problem.k, config.tile_k), config.splits)


def num_slots(problem: Problem, config: DirectConfig) -> int:
  """k tiles that are loaded at once: all, if there is room."""
  room = tiles.SMEM_LIMIT_BYTES - _other_bytes(problem, config)
  fit = max(1, room // _slot_bytes(problem, config))
  return min(num_steps(problem, config), MAX_SLOTS, fit)


def depths(problem: Problem, config: DirectConfig) -> tuple[int, ...]:
  """Elements of k that are loaded of each slot's k tile, and multiplied.

  All of it, but of the last k tile no more than there are, in multiples of 16, as wgmma
  takes them: where it is known which one it is.
  """
  held, steps = num_slots(problem, config), num_steps(problem, config)
  found = [config.tile_k] * held
  apart = 0 < config.promote < steps  # The last is summed up with others like it.
  if config.splits == 1 and held == steps and not apart:
    found[-1] = tiles.last_depth(problem.k, config.tile_k)
  return tuple(found)


def loads(
    problem: Problem, config: DirectConfig
) -> Iterator[tuple[str, register_loads.RegisterLoads]]:
  """What a thread loads of each operand, by name, for each slot."""
  for operand, mn, tile_mn, layout in (
      ("lhs", problem.m, config.tile_m, problem.lhs_layout),
      ("rhs", problem.n, config.tile_n, problem.rhs_layout),
  ):
    for depth in depths(problem, config):
      yield operand, register_loads.RegisterLoads.of(
          mn, problem.k, tile_mn, config.tile_k, k_major=layout == "k-major", depth=depth
      )


def launch(
    operands, problem: Problem, config: DirectConfig, *, num_sms: int, interpret=None
) -> calls.Results:
  """Returns the results; operands as `problem` stores them."""
  del num_sms  # One CTA a tile, however many SMs there are.
  emulated = interpret is not None
  exchange = make_exchange(config, emulated=emulated)
  stored_cols = exchange.share_cols if exchange else config.tile_n
  call = calls.make_call(
      operands, problem, config, stored_cols=stored_cols, num_wgs=1, interpret=interpret,
      by_registers=True, overlapping=config.overlap,
  )
  lhs, rhs = call.prepared.lhs_operand, call.prepared.rhs_operand
  halo = call.epilogue.halo
  grid = tiles.TileGrid.of(problem, config.tile_m, config.tile_n, halo)
  k_steps, held = num_steps(problem, config), num_slots(problem, config)
  wanted = depths(problem, config)

  def _kernel(lhs_gmem, rhs_gmem, c_gmem, out_gmem, refs):
    batch, m, n = grid.locate(lax.axis_index("cta"))
    slots, begin = (refs["lhs_slots"], refs["rhs_slots"]), jnp.int32(0)
    if exchange is not None:
      exchange.start(refs, wg=0)
      begin = lax.axis_index(ALONG_K) * k_steps

    at = dict(wg=0, batch=batch, row=m, col=n + first_col(exchange))
    vectors = call.epilogue.begin(
        c_gmem, refs, shape=(config.tile_m, stored_cols), exchange=exchange, **at
    )

    def _load(first, count):
      """Brings k tiles first .. first + count - 1 of this CTA into the first slots."""
      steps = [(i, (begin + first + i) * config.tile_k) for i in range(count)]
      if emulated:
        for i, k in steps:
          full = refs["full"].at[i]
          lhs.load(lhs_gmem, slots[0], i, full, batch=batch, mn=m, k=k)
          rhs.load(rhs_gmem, slots[1], i, full, batch=batch, mn=n, k=k)
          plgpu.barrier_wait(full)
        return
      found = []
      for i, k in steps:
        at = dict(batch=batch, k=k, depth=wanted[i])
        found.append(lhs.by_registers(lhs_gmem, slots[0], i, mn=m, **at))
        found.append(rhs.by_registers(rhs_gmem, slots[1], i, mn=n, halo=halo, **at))
      register_loads.load(*found, at_once=LOADS_AT_ONCE)
      plgpu.commit_smem()

    def _multiply_slots(acc, first, count):
      def step(i, _, depth=config.tile_k):
        slot_products.multiply(acc, call.prepared, slots, first + i, depth=depth)

      is_short = wanted[-1] < config.tile_k
      lax.fori_loop(jnp.int32(0), jnp.int32(count - is_short), step, None)
      if is_short:
        step(count - 1, None, wanted[-1])
      plgpu.wgmma_wait(0)  # The next group overwrites what this one reads.

    def _multiply(acc, first, count):
      if k_steps == held:
        return _multiply_slots(acc, first, count)
      groups, rest = divmod(count, held)

      def group(i, _, count=held):
        _load(first + i * held, count)
        _multiply_slots(acc, jnp.int32(0), count)
        plgpu.commit_smem()  # A barrier: other warps may still read the slots.

      lax.fori_loop(jnp.int32(0), jnp.int32(groups), group, None)
      if rest:
        group(jnp.int32(groups), None, rest)

    if k_steps == held:
      _load(jnp.int32(0), k_steps)
    acc = accumulate.sum_over_k(
        _multiply, shape=(config.tile_m, config.tile_n), k_steps=k_steps,
        promote=config.promote,
    )

    def store(sums):
      call.epilogue.store(sums, out_gmem, c_gmem, refs, vectors=vectors, **at)

    if exchange is None:
      store(acc)
    else:
      one = dict(index=jnp.int32(0), count=jnp.int32(1))
      exchange.add_up(acc, refs, wg=0, **one, store=store)
    call.epilogue.finish()

  scratch, workspace, cluster = {}, {}, {}
  if exchange is not None:
    scratch, cluster = exchange.scratch(), {ALONG_K: config.splits}
    workspace = exchange.workspace(grid.num_tiles)
  scratch |= dict(lhs_slots=lhs.slots(held), rhs_slots=rhs.slots(held))
  if emulated:
    scratch["full"] = plgpu.Barrier(
        num_arrivals=call.prepared.num_arrivals, num_barriers=held
    )
  return call(
      _kernel, name=NAME, scratch=scratch, workspace=workspace, grid=grid.num_tiles,
      cluster=cluster, num_wgs=1,
  )
