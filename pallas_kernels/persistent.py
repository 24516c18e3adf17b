"""persistent: one CTA an SM, a producer and one to three consumer warpgroups.

  out[b] = alpha * lhs[b] @ rhs[b] + beta * c[b]

lhs and rhs may be several arrays each, whose products are added up: the k tiles of one
follow those of the other (`Problem.terms`).

Every CTA (or cluster of CTAs) walks over output tiles in the order of
`tiles.tile_order`. Its producer warpgroup fills a ring of shared-memory slots
through TMA; its consumers multiply out of the ring with wgmma, and store. They
share out each tile along `wg_dim`, "m" or "n":

  producer    load 0 | load 1 | ... | load of the next tile | ...
  consumers          | wgmma  | ... | epilogue, store       | wgmma ...

or, with `wg_dim` "tile", take tiles in turn (ping-pong), so that the tensor cores
work while a tile is stored:

  producer    load of tile 0 | load of tile 1  | load of tile 2  | ...
  consumer 0                 | wgmma of tile 0 | epilogue, store | wgmma of tile 2
  consumer 1                                   | wgmma of tile 1 | epilogue, store

Of operands that TMA cannot take and no pass pads (`misaligned`), three producers load
them through registers, k tiles in turn; or TMA brings lhs all the same, skewed (see
`skewed`), or bulk copies bring whole rows of it (see `run_loads`). lhs in 8 bits comes as
it is, and consumers convert it (see `conversions`). Consumers may normalise lhs, too (see
`norms`). With clusters, two or four neighbours along m share the rhs tile, and neighbours
along n the lhs tile: each loads its part of it and multicasts it to all, and for itself
what they cannot share out in eights.

Barriers: see `ring`. Constraints: see `specialised_checks`.
Source: the warp-specialised persistent schedules, cooperative and ping-pong, of
CUTLASS 3 (sm90), and JAX's Pallas Mosaic GPU guide to Hopper matrix products.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from pallas_kernels import (
  accumulate,
  block_scales,
  calls,
  halves,
  norms,
  parts,
  ring_reads,
  roles,
  specialised,
  specialised_checks,
  tiles,
)
from pallas_kernels import ring as rings
from pallas_kernels.cluster_grid import ClusterGrid
from pallas_kernels.configs import PersistentConfig
from pallas_kernels.exchange import Exchange, first_col
from pallas_kernels.grouped_grid import GroupedGrid
from pallas_kernels.problem import Problem

NAME = "persistent"
Config = PersistentConfig


def supports(problem: Problem, config: PersistentConfig) -> str | None:
  """The reason why this kernel cannot serve, or None."""
  return (
      tiles.check_problem(problem, scales=True, converts=True, norms=True, terms=True)
      or norms.check(problem, config)
      or specialised_checks.check_scales(problem, config)
      or specialised_checks.check_gated(problem, config)
      or specialised_checks.check_terms(problem, config)
      or specialised_checks.check_in_registers(problem, config)
      or specialised_checks.check_parts(problem, config, supports)
      or specialised_checks.check_config(problem, config)
  )


smem_bytes = specialised.smem_bytes


def make_ring(
    call: calls.Call, config: PersistentConfig, k_steps: int, last_depth: int = 0
) -> rings.Ring:
  teams = specialised.num_teams(config)
  return rings.Ring(
      call.prepared, config.num_stages, specialised.num_readers(config), teams, k_steps,
      specialised.num_producers(config),
      factors=block_scales.BlockScales.of(call.result, config), last_depth=last_depth,
      norm=norms.of(call.result, config, emulated=call.interpret is not None),
  )


def launch(
    operands, problem: Problem, config: PersistentConfig, *, num_sms: int,
    rounds: int = 1, interpret=None,
) -> calls.Results:
  """Returns the results; operands as `problem` stores them.

  `rounds`: see `ClusterGrid`.
  """
  return guarded(
      functools.partial(_launch, num_sms=num_sms, rounds=rounds, interpret=interpret),
      operands, problem, config, supports, emulated=interpret is not None,
  )


def guarded(
    launch: Callable[..., jax.Array], operands, problem: Problem,
    config: PersistentConfig, supports: specialised_checks.Supports, *,
    emulated: bool,
) -> calls.Results:
  """`launch(operands, problem, config, split)` with the parts that the operands allow."""
  if config.split_lhs and config.swap:
    # The result has few rows or columns: a pass that transposes it costs little.
    config = dataclasses.replace(config, swap=False)
    out = launch(operands[1::-1], problem=problem.transposed, config=config, split=None)
    return lax.transpose(out, (0, 2, 1))
  if not config.float16_parts:
    return launch(operands, problem=problem, config=config, split=None)
  otherwise = specialised_checks.of_bfloat16_parts(problem, config, supports)
  return halves.guarded(
      *operands[:2], problem, by_kernels=not emulated,
      multiply=lambda split: launch(
          operands, problem=problem, config=config, split=split
      ),
      otherwise=lambda: launch(
          operands, problem=problem, config=otherwise, split=None
      ),
  )


def _launch(
    operands, *, problem: Problem, config: PersistentConfig, num_sms: int, rounds: int,
    interpret, split: halves.Halves | None,
) -> calls.Results:
  operands = _apart(operands, problem)
  call = calls.make_call(
      swapped(operands, config), specialised.multiplied(problem, config), config,
      stored_cols=specialised.stored_cols(problem, config),
      num_wgs=specialised.num_storing(config), interpret=interpret, result=problem,
      halves=split, room=specialised.epilogue_room(problem, config),
  )
  return run(
      call, specialised.multiplied(problem, config), config, name=NAME, num_sms=num_sms,
      k_steps=tiles.cdiv(problem.k, config.tile_k), rounds=rounds,
  )


def _apart(operands, problem: Problem):
  """The operands; two rhs in one array apart, if TMA cannot begin at the second."""
  whole = problem.n % tiles.swizzle_elems(problem.dtype) == 0
  if not problem.epilogue.gated or whole or problem.rhs_layout == "k-major":
    return operands
  lhs, rhs, *others = operands
  if len(rhs) == 1:
    rhs = tuple(jnp.split(rhs[0], 2, 2))
  return (lhs, rhs, *others)


def swapped(operands, config: PersistentConfig):
  """The operands (lhs, rhs, ...) in their places of what the kernel multiplies."""
  return (*operands[1::-1], *operands[2:]) if config.swap else operands


def run(
    call: calls.Call, problem: Problem, config: PersistentConfig, *, name: str,
    num_sms: int, k_steps: int, copies: int = 1, rounds: int = 1,
    operand_origin: Callable[..., Any] = lambda batch: (batch, 0),
    exchange: Exchange | None = None, grid: ClusterGrid | GroupedGrid | None = None,
) -> calls.Results:
  """Runs the schedule: `k_steps` k tiles for each tile of each result.

  Split-k asks for `copies` results a product, maps the index of a result to the
  (batch, k) at which its operands begin, and may have the CTAs of a cluster
  `exchange` their sums. Groups of rows have a `grid` of their own.
  """
  wg_tile_shape = specialised.wg_tile(config)
  stored_shape = specialised.stored_tile(call.result, config)
  if exchange:
    stored_shape = stored_shape[0], exchange.share_cols
  split, last_depth = parts.of(call.result, config), 0
  if split is None and k_steps == tiles.cdiv(problem.k, config.tile_k):
    last_depth = specialised.last_depth(problem, config)
  ring, epilogue = make_ring(call, config, k_steps, last_depth), call.epilogue
  lost = 0.0  # To truncation, of the sum between promotions; the emulator rounds.
  if split is not None and not ring.lhs.emulated:
    lost = split.lost * config.tile_k * max(config.promote, 1) / 64
  teams = specialised.num_teams(config)
  grid = grid or ClusterGrid.of(
      problem, config, num_sms=num_sms, copies=copies, rounds=rounds
  )

  def _kernel(lhs_gmem, rhs_gmem, c_gmem, out_gmem, refs):
    wg, tiles_of = lax.axis_index("wg"), grid.of_cta(refs)
    count = tiles_of.local_count()

    def _load():
      producer = wg - config.consumers

      def tile(local, _):
        place = tiles_of.locate(local)
        batch, k = operand_origin(place.index)
        ring.produce(
            lhs_gmem, rhs_gmem, refs, producer=producer, local=local, batch=batch,
            m=place.m, n=place.n, k=k,
        )

      lax.fori_loop(jnp.int32(0), count, tile, None)
      ring.drain(refs, producer=producer, total_steps=count * k_steps)

    def _sum_over_k(local, **where):
      def multiply(acc, first, count):
        ring_reads.consume(
            ring, acc, refs, first_step=local * k_steps + first, num_steps=count, **where
        )

      return accumulate.sum_over_k(
          multiply, shape=wg_tile_shape, k_steps=k_steps, promote=config.promote,
          dtype=problem.acc_dtype,
      )

    def _multiply_and_store():
      share = wg_share(config, wg)

      first = wg if teams > 1 else jnp.int32(0)  # Of this consumer's tiles.

      def tile(turn, _):
        local = first + turn * teams
        index, m, n, result, end = tiles_of.locate(local)
        of_batch, first_k = operand_origin(index)
        starts = dict(lhs_start=share.row, rhs_start=share.col)
        at = dict(
            wg=wg, batch=result, row=m + share.row,
            col=n + share.col + first_col(exchange),
        )
        vectors = epilogue.begin(
            c_gmem, refs, shape=stored_shape, of_batch=of_batch, exchange=exchange, **at
        )

        first_step = local * k_steps

        def multiply_group(acc, slot, index):
          ring_reads.consume_parts(
              ring, acc, refs, slot, first_step=first_step,
              pairs=split.groups[index].pairs, is_first=index == 0,
              is_last=index == len(split.groups) - 1, **starts,
          )

        def multiply_groups(accs, groups, k_step, slot, in_flight):
          ring_reads.consume_step(
              ring, accs, refs, slot, first_step=first_step, k_step=k_step,
              groups=groups, in_flight=in_flight, **starts,
          )

        def begin(slot, *, is_first):
          return ring_reads.begin(
              ring, refs, slot, first_step=first_step, shape=wg_tile_shape,
              is_first=is_first, m=m, n=n, **starts,
          )

        def finish():
          ring_reads.finish(ring, refs, step=first_step + k_steps - 1)

        if ring.factors is not None:
          acc = accumulate.sum_of_blocks(
              begin, finish, block_scales.apply, first=ring.slot_of(first_step),
              shape=wg_tile_shape, k_steps=k_steps,
          )
        elif split is None:
          acc = _sum_over_k(local, tile=(of_batch, m, first_k), **starts)
        elif specialised.overlaps(call.result, config):
          acc = accumulate.sum_of_groups(
              multiply_groups, finish, first=ring.slot_of(first_step), after=ring.after,
              shape=wg_tile_shape, k_steps=k_steps, of=split, promote=config.promote,
              lost=lost, registers=specialised.registers(config),
          )
        else:
          acc = accumulate.sum_of_parts(
              multiply_group, first=ring.slot_of(first_step), after=ring.after,
              shape=wg_tile_shape, k_steps=k_steps, of=split, lost=lost,
          )

        if ring.norm is not None:
          acc = ring.norm.apply(refs, acc)

        def store(sums):
          epilogue.store(
              sums, out_gmem, c_gmem, refs, vectors=vectors, end=end, **at
          )

        if exchange is None:
          store(acc)
        else:
          exchange.add_up(acc, refs, wg=wg, index=local, count=count, store=store)

      if exchange is not None:
        exchange.start(refs, wg=wg)
      if ring.norm is not None:
        ring.norm.begin(refs, 0)
      turns = lax.div(count - first + teams - 1, jnp.int32(teams))
      lax.fori_loop(jnp.int32(0), turns, tile, None)
      if (empty := tiles_of.empty_count()) is not None:

        def clear(turn, _):
          place = tiles_of.locate_empty(first + turn * teams)
          epilogue.store(
              accumulate.zeros(wg_tile_shape, problem.acc_dtype), out_gmem, c_gmem, refs,
              wg=wg, batch=place.result, row=place.m + share.row,
              col=place.n + share.col, end=place.end,
          )

        turns = lax.div(empty - first + teams - 1, jnp.int32(teams))
        lax.fori_loop(jnp.int32(0), turns, clear, None)
      epilogue.finish()

    def _share_k():
      ring.norm.begin(refs, 1)

      def tile(local, _):
        sums = _sum_over_k(local, lhs_start=0, rhs_start=0, reader=1)
        ring.norm.hand_over(refs, sums)

      lax.fori_loop(jnp.int32(0), count, tile, None)

    roles.specialise(
        wg, config.consumers, _load, _multiply_and_store,
        share_k=_share_k if config.wg_dim == "k" else None,
        only_copies=config.misaligned != "loads",
    )

  scratch, workspace = ring.scratch(), {}
  if exchange is not None:
    scratch |= exchange.scratch()
    workspace = exchange.workspace(grid.num_clusters)
  num_wgs = config.consumers + specialised.num_producers(config)
  return call(
      _kernel, name=name, scratch=scratch, workspace=workspace, grid=grid.num_clusters,
      cluster=config.cluster_axes, num_wgs=num_wgs,
  )


class Share(NamedTuple):
  """Where a consumer's share of the CTA's tile begins."""

  row: Any
  col: Any


def wg_share(config: PersistentConfig, wg) -> Share:
  wg_m, wg_n = specialised.wg_tile(config)
  if config.wg_dim in ("tile", "k"):
    return Share(0, 0)
  return Share(wg * wg_m, 0) if config.wg_dim == "m" else Share(0, wg * wg_n)
