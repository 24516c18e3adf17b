"""grouped_k: one product for each group of rows, which it sums over.

  out[g] = lhs[rows of g]^T @ rhs[rows of g]

lhs is [k, m] and rhs [k, n], their rows sorted by group: what the weights of a
`grouped_m` get of its operands and cotangents. The sizes of the groups are data; a group
of no rows has a product of zeros.

Roles and barriers, for a ring of S slots of 64 rows, and one team of consumers (t = 0),
which shares out each tile, or two, which take tiles in turn:

  barrier     arrives                             waits
  full[t,s]   the TMA copies                      consumers, before wgmma
  empty[s]    each consumer, one step later       the producer, before TMA
  masked      each consumer of the one team       all of them, before wgmma

The producer and the consumers walk over the tiles as those of `persistent` do; but how
many steps a tile has is read from the table of the groups' ends. TMA, which tiles what it
copies, begins at every eighth row. So the first and last slot of a tile may have rows of
the groups before and behind: consumers replace those with zeros, in both operands, as no
group may get what is not finite in another.

Constraints: 16-bit operands, both with k outermost; n a multiple of 16 bytes.
Source: the "k-grouped" products of DeepGEMM, and MegaBlocks (2022).
"""

from __future__ import annotations

import dataclasses

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import (
  accumulate,
  calls,
  padding,
  persistent,
  roles,
  slot_products,
  specialised,
  tiles,
)
from pallas_kernels import ring as rings
from pallas_kernels.cluster_grid import ClusterGrid
from pallas_kernels.configs import PersistentConfig
from pallas_kernels.grouped_grid import MOST_ROWS, as_sizes, sums_until
from pallas_kernels.problem import Problem

NAME = "grouped_k"
Config = PersistentConfig
_ALIGNED = 8  # Rows from which on TMA tiles.
_TABLE, _MASKED = "group_ends", "masked"


def supports(problem: Problem, config: PersistentConfig) -> str | None:
  """The reason why this kernel cannot serve, or None.

  `problem` has the rows of all groups, k, and a batch of as many products.
  """
  if problem.grouped != "k":
    return f"grouped_k is for groups of k, not for {problem}"
  if problem.k > MOST_ROWS:
    return f"k={problem.k}: groups have at most {MOST_ROWS} rows in all"
  epilogue = problem.epilogue
  if problem.itemsize != 2 or problem.converts:
    return f"groups of rows are of 16-bit operands, not of {problem.dtype}"
  if problem.layouts != "TN":
    return f"layouts {problem.layouts}: rows to sum over are those of TN"
  if epilogue.is_fused or epilogue.has_c or epilogue.scaling != "none":
    return "groups of rows exclude c, bias, activation and scales"
  if problem.n % tiles.tma_stride_elems(problem.out_dtype):
    return f"n={problem.n}: rows of the result must be a multiple of 16 bytes"
  for name, wanted in (("misaligned", "padded"), ("swap", False)):
    if (value := getattr(config, name)) != wanted:
      return f"{name}={value!r}: groups of rows that are summed take {wanted!r}"
  for name in ("tile_m", "tile_n"):
    step = specialised.num_readers(config) * tiles.swizzle_elems(problem.dtype)
    if getattr(config, name) % step:
      return (
          f"{name}={getattr(config, name)} must be a multiple of {step}: consumers mask"
          " whole blocks of columns"
      )
  return persistent.supports(dataclasses.replace(problem, grouped=""), config)


smem_bytes = specialised.smem_bytes


@dataclasses.dataclass(frozen=True)
class _Rows:
  """The rows of a group, as a CTA walks over them.

  Attributes:
    start, end: of the group.
  """

  start: jax.Array
  end: jax.Array

  @classmethod
  def of(cls, ends, group) -> _Rows:
    """Those of a group, of the table of all ends, in front of which is a zero."""
    return cls(ends[group], ends[group + 1])

  @property
  def base(self):
    """Where its first slot begins."""
    return lax.div(self.start, jnp.int32(_ALIGNED)) * _ALIGNED

  def num_steps(self, tile_k: int):
    steps = lax.div(self.end - self.base + (tile_k - 1), jnp.int32(tile_k))
    return lax.select(self.end > self.start, steps, jnp.int32(0))


def launch(
    operands, problem: Problem, config: PersistentConfig, *, num_sms: int, interpret=None
) -> jax.Array:
  """Returns [groups, m, n]; operands are lhs [1, k, m], rhs [1, k, n] and group sizes."""
  lhs, rhs, group_sizes = operands
  problem = dataclasses.replace(problem, grouped="")
  fitted = [
      padding.pad_for_tma(x, problem.dtype, "tiled")
      if padding.needs_padding(*x.shape[1:], problem.dtype, "tiled") else x
      for x in (lhs, rhs)
  ]
  rows = max(x.shape[1] for x in fitted)
  multiplied = dataclasses.replace(
      problem, k=rows, m=fitted[0].shape[2], n=fitted[1].shape[2]
  )
  call = calls.make_call(
      fitted, multiplied, config, stored_cols=specialised.stored_cols(problem, config),
      num_wgs=config.consumers, interpret=interpret, result=problem,
      room=specialised.epilogue_room(problem, config),
  )
  ends = sums_until(as_sizes(group_sizes, problem.k))
  ends = jnp.pad(jnp.minimum(ends, problem.k), (1, 0))
  call = dataclasses.replace(call, by_name=call.by_name | {_TABLE: ends})
  grid = ClusterGrid.of(problem, config, num_sms=num_sms)
  ring = persistent.make_ring(call, config, k_steps=1)
  teams, tile_k = specialised.num_teams(config), config.tile_k

  def _kernel(lhs_gmem, rhs_gmem, c_gmem, out_gmem, refs):
    wg, count = lax.axis_index("wg"), grid.local_count()

    def rows_of(local):
      return _Rows.of(refs[_TABLE], grid.locate(local).index)

    def _load():
      def tile(local, step):
        place, rows = grid.locate(local), rows_of(local)
        team = lax.rem(local, jnp.int32(teams)) * config.num_stages

        def load(i, step):
          slot = lax.rem(step, jnp.int32(config.num_stages))
          pl.when(step >= config.num_stages)(
              lambda: plgpu.barrier_wait(refs["empty"].at[slot])
          )
          ring.fill(
              lhs_gmem, rhs_gmem, refs, slot, refs["full"].at[slot + team], batch=0,
              m=place.m, n=place.n, k=rows.base + i * tile_k,
          )
          return step + 1

        return lax.fori_loop(jnp.int32(0), rows.num_steps(tile_k), load, step)

      total = lax.fori_loop(jnp.int32(0), count, tile, jnp.int32(0))
      pending = lax.min(total, jnp.int32(config.num_stages))

      # A CTA must not leave while a neighbour may still arrive on its barriers.
      def drain(i, _):
        slot = lax.rem(total - pending + i, jnp.int32(config.num_stages))
        plgpu.barrier_wait(refs["empty"].at[slot])

      lax.fori_loop(jnp.int32(0), pending, drain, None)

    def _multiply_and_store():
      share, team = persistent.wg_share(config, wg), wg if teams > 1 else jnp.int32(0)

      def tile(local, step):
        group, m, n, result, _ = grid.locate(local)
        rows = rows_of(local)
        steps = rows.num_steps(tile_k)

        @pl.when(lax.rem(local, jnp.int32(teams)) == team)
        def _mine():
          def multiply(acc, first, count):
            _sum(
                acc, refs, ring, config, wg=wg, share=share, team=team,
                first_step=step + first, first=first, num_steps=count, rows=rows,
            )

          acc = accumulate.sum_over_k(
              multiply, shape=specialised.wg_tile(config), k_steps=steps,
              promote=config.promote,
          )
          call.epilogue.store(
              acc, out_gmem, c_gmem, refs, wg=wg, batch=result, row=m + share.row,
              col=n + share.col,
          )

        return step + steps

      lax.fori_loop(jnp.int32(0), count, tile, jnp.int32(0))
      call.epilogue.finish()

    roles.specialise(
        wg, config.consumers, _load, _multiply_and_store, only_copies=True
    )

  masked = plgpu.Barrier(num_arrivals=specialised.num_readers(config))
  scratch = ring.scratch() | {_MASKED: masked}
  return call(
      _kernel, name=NAME, scratch=scratch, grid=grid.num_clusters,
      cluster=config.cluster_axes, num_wgs=config.consumers + 1,
  )


def _sum(
    acc, refs, ring: rings.Ring, config: PersistentConfig, *, wg, share, team,
    first_step, first, num_steps, rows: _Rows,
) -> None:
  """acc += the product of k tiles from the group's `first` on.

  One slot's wgmma stays in flight.
  """
  slots = refs["lhs_slots"], refs["rhs_slots"]
  num_wgs = specialised.num_readers(config)
  barriers = team * config.num_stages

  def multiply(i, places):
    slot, last = places
    plgpu.barrier_wait(refs["full"].at[slot + barriers])
    begin = rows.base + (first + i) * config.tile_k
    low, high = rows.start - begin, rows.end - begin

    @pl.when(jnp.logical_or(low > 0, high < config.tile_k))
    def _mask():
      for operand, of in zip((ring.lhs, ring.rhs), slots, strict=True):
        _mask_rows(
            operand, of, slot, low, high, wg=wg if num_wgs > 1 else 0, num_wgs=num_wgs
        )
      plgpu.commit_smem()
      if num_wgs > 1:
        plgpu.barrier_arrive(refs[_MASKED])
        plgpu.barrier_wait(refs[_MASKED])

    groups = slot_products.multiply(
        acc, ring.prepared, slots, slot, lhs_start=share.row, rhs_start=share.col
    )
    plgpu.wgmma_wait(groups)

    @pl.when(i > 0)
    def _free_the_last_slot():
      plgpu.barrier_arrive(refs["empty"].at[last])

    return tiles.wrapped(slot + 1, config.num_stages), slot

  at = lax.rem(first_step, jnp.int32(config.num_stages))
  _, last = lax.fori_loop(jnp.int32(0), num_steps, multiply, (at, at))
  plgpu.wgmma_wait(0)

  @pl.when(num_steps > 0)
  def _free_the_last_slot():
    plgpu.barrier_arrive(refs["empty"].at[last])


def _mask_rows(operand, slots, slot, low, high, *, wg, num_wgs: int) -> None:
  """This consumer's share of a slot: zeros in all rows but those from low to high."""
  width = tiles.swizzle_elems(operand.dtype)
  for turn in range(operand.tile_mn // width // num_wgs):
    block = (turn * num_wgs + wg) * width
    ref = slots.at[slot, :, pl.ds(block, width)]
    values = plgpu.load(ref, layout=plgpu.Layout.WGMMA)
    row = plgpu.broadcasted_iota(
        jnp.int32, values.shape, 0, layout=plgpu.Layout.WGMMA
    )
    inside = jnp.logical_and(row >= low, row < high)
    ref[...] = jnp.where(inside, values, jnp.zeros_like(values))
