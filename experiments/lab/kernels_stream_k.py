"""stream_k: the k tiles of all output tiles in one row, cut into equal parts.

  unit u = tile * k_steps + k_step;  CTA c multiplies units c * per .. (c + 1) * per - 1

Every CTA has as much to multiply as any other, however many output tiles there are. A
tile whose units all lie with one CTA is stored at once. Of a tile that is cut, each CTA
stores its sum in float32, and a second kernel adds the sums in the order of the CTAs and
writes the tile into the result, in place: every run gives the same bits.

  producer   load unit by unit, over the borders of tiles
  consumers  wgmma of the units of one tile | store the tile, or its partial sum | ...

Barriers: those of pallas_kernels/ring.py, a step being a unit. The second kernel has
none: it reads through registers.
Constraints: see `supports`.
Source: M. Osama et al., "Stream-K: Work-centric Parallel Decomposition for Dense
Matrix-Matrix Multiplication on the GPU" (2023); here with a second kernel in place of
the wait of one CTA for another.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import (
  accumulate,
  calls,
  compat,
  epilogue_choice,
  ring_reads,
  roles,
  specialised,
  specialised_checks,
  staging,
  tiles,
)
from pallas_kernels import ring as rings
from pallas_kernels.configs import PersistentConfig
from pallas_kernels.problem import Problem

NAME = "lab_stream_k"


@dataclasses.dataclass(frozen=True)
class StreamKConfig:
  """Tile and ring, and the warpgroups that share out the tile's rows.

  `ctas`: parts of the row of units; 0 is one an SM.
  """

  tile_m: int = 128
  tile_n: int = 128
  tile_k: int = 64
  num_stages: int = 4
  consumers: int = 2
  ctas: int = 0

  @property
  def of_library(self) -> PersistentConfig:
    """The library's config of the same tile and ring."""
    return PersistentConfig(
        self.tile_m, self.tile_n, self.tile_k, self.num_stages, self.consumers
    )


@dataclasses.dataclass(frozen=True)
class Units:
  """How the units are cut.

  Attributes:
    k_steps: units of a tile.
    per: units of a CTA; the last may have fewer.
    ctas: how many there are.
    total: units.
  """

  k_steps: int
  per: int
  ctas: int
  total: int

  @classmethod
  def of(cls, problem: Problem, config: StreamKConfig, num_sms: int) -> Units:
    grid = tiles.TileGrid.of(problem, config.tile_m, config.tile_n)
    k_steps = tiles.cdiv(problem.k, config.tile_k)
    total = grid.num_tiles * k_steps
    per = tiles.cdiv(total, min(config.ctas or num_sms, total))
    return cls(k_steps, per, tiles.cdiv(total, per), total)

  @property
  def cuts(self) -> bool:
    """Whether any tile is shared by several CTAs."""
    return any(cta * self.per % self.k_steps for cta in range(1, self.ctas))


def supports(problem: Problem, config: StreamKConfig) -> str | None:
  """The reason why this kernel cannot serve, or None."""
  if problem.batch > 1 or problem.epilogue.has_c or problem.epilogue.is_fused:
    return "stream_k is built for one plain product"
  if problem.acc_dtype != "float32":
    return f"stream_k adds float32 sums, not those of {problem.dtype} operands"
  return (
      tiles.check_problem(problem)
      or specialised_checks.check_config(problem, config.of_library)
      or tiles.check_smem(smem_bytes(problem, config))
  )


def smem_bytes(problem: Problem, config: StreamKConfig) -> int:
  """Shared memory of one CTA: the ring, the staging slots of both kinds of results."""
  partial = calls.epilogue_bytes(
      _partial_sums(problem, config, 1), config.tile_n, config.consumers
  )
  return specialised.smem_bytes(problem, config.of_library) + partial


def _partial_sums(problem: Problem, config: StreamKConfig, ctas: int) -> Problem:
  """The sums of cut tiles: two for each CTA, of its first and of its last tile."""
  return dataclasses.replace(
      problem, batch=2 * ctas, m=config.tile_m, n=config.tile_n, out_dtype="float32"
  )


def launch(
    operands, problem: Problem, config: StreamKConfig, *, num_sms: int, interpret=None
) -> jax.Array:
  """Returns the result [1, m, n]; operands as `problem` stores them."""
  units = Units.of(problem, config, num_sms)
  out, partials = _multiply(operands, problem, config, units, interpret)
  return _mend(out, partials, problem, config, units, interpret) if units.cuts else out


def _multiply(operands, problem, config, units, interpret) -> tuple[jax.Array, jax.Array]:
  """Kernel 1: the result but for the tiles that are cut, and the sums of those."""
  library = config.of_library
  wg_tile = specialised.wg_tile(library)
  call = calls.make_call(
      operands, problem, library, stored_cols=wg_tile[1], num_wgs=config.consumers,
      interpret=interpret,
  )
  ring = rings.Ring(call.prepared, config.num_stages, config.consumers, 1, k_steps=1)
  grid = tiles.TileGrid.of(problem, config.tile_m, config.tile_n)
  sums = _partial_sums(problem, config, units.ctas)
  of_sums = epilogue_choice.make_epilogue(
      sums, wg_tile[1], config.consumers, emulated=interpret is not None
  )

  def _kernel(lhs_gmem, rhs_gmem, out_gmem, sums_gmem, refs):
    k_steps = jnp.int32(units.k_steps)
    wg, cta = lax.axis_index("wg"), lax.axis_index("cta")
    first = cta * units.per
    count = lax.min(jnp.int32(units.per), units.total - first)

    def _load():
      def unit(step, _):
        tile = lax.div(first + step, k_steps)
        _, m, n = grid.locate(tile)
        k_step = first + step - tile * k_steps
        ring.produce(
            lhs_gmem, rhs_gmem, refs, producer=jnp.int32(0), local=step, batch=0, m=m,
            n=n, k=k_step * config.tile_k,
        )

      lax.fori_loop(jnp.int32(0), count, unit, None)
      ring.drain(refs, producer=jnp.int32(0), total_steps=count)

    def _multiply_and_store():
      row = wg * wg_tile[0]

      def segment(tile, _):
        begin = lax.max(first, tile * k_steps)
        end = lax.min(first + count, (tile + 1) * k_steps)
        _, m, n = grid.locate(tile)

        def multiply(acc, *_):
          ring_reads.consume(
              ring, acc, refs, first_step=begin - first, num_steps=end - begin,
              lhs_start=row, rhs_start=0,
          )

        acc = accumulate.sum_over_k(multiply, shape=wg_tile, k_steps=1, promote=0)
        whole = end - begin == k_steps

        @pl.when(whole)
        def _store():
          call.epilogue.store(
              acc, out_gmem, (), refs, wg=wg, batch=0, row=m + row, col=n
          )

        @pl.when(jnp.logical_not(whole))
        def _store_sum():
          slot = 2 * cta + (begin == tile * k_steps).astype(jnp.int32)
          of_sums.store(
              acc, sums_gmem, (), refs | {"out_slots": refs["sum_slots"]}, wg=wg,
              batch=slot, row=row, col=0,
          )

      last = lax.div(first + count - 1, k_steps)
      lax.fori_loop(lax.div(first, k_steps), last + 1, segment, None)
      call.epilogue.finish()

    roles.specialise(
        wg, config.consumers, _load, _multiply_and_store, only_copies=True
    )

  flat, tree = jax.tree.flatten(call.inputs)

  def body(*gmem, **refs):
    *sources, _ = jax.tree.unflatten(tree, gmem[: len(flat)])  # No c.
    _kernel(*sources, *gmem[len(flat) :], refs)

  return plgpu.kernel(
      body,
      out_type=[
          jax.ShapeDtypeStruct(x.out_shape, jnp.dtype(x.out_dtype))
          for x in (problem, sums)
      ],
      scratch_types=(
          ring.scratch() | call.epilogue.scratch()
          | {"sum_slots": of_sums.scratch()["out_slots"]}
      ),
      grid=(units.ctas,),
      grid_names=("cta",),
      num_threads=config.consumers + 1,
      thread_name="wg",
      interpret=interpret,
      kernel_name=f"jaxgemm_{NAME}",
  )(*flat)


def _mend(out, partials, problem, config, units, interpret) -> jax.Array:
  """Kernel 2: the result, whose cut tiles are the sums of their parts, added in order.

  A CTA of it stands for a border between two CTAs of the first, and a piece of a tile.
  The first border within a tile answers for it; the others have nothing to do.
  """
  piece_cols = 32
  pieces_n = config.tile_n // piece_cols
  pieces = config.tile_m // staging.PIECE_ROWS * pieces_n
  grid = tiles.TileGrid.of(problem, config.tile_m, config.tile_n)
  emulated = interpret is not None
  epilogue = epilogue_choice.make_epilogue(problem, piece_cols, 1, emulated=emulated)

  def _kernel(out_gmem, sums_gmem, **refs):
    k_steps, per = jnp.int32(units.k_steps), jnp.int32(units.per)
    index = lax.axis_index("cta")
    border = lax.div(index, jnp.int32(pieces)) + 1
    piece = lax.rem(index, jnp.int32(pieces))
    tile = lax.div(border * per, k_steps)
    start = tile * k_steps
    within, first = border * per > start, (border - 1) * per <= start

    @pl.when(jnp.logical_and(within, first))
    def _add():
      row = lax.div(piece, jnp.int32(pieces_n)) * staging.PIECE_ROWS
      col = lax.rem(piece, jnp.int32(pieces_n)) * piece_cols
      last = lax.div(lax.min(start + k_steps, jnp.int32(units.total)) - 1, per)

      def _load(slot):
        part = sums_gmem.at[
            slot, pl.ds(row, staging.PIECE_ROWS), pl.ds(col, piece_cols)
        ]
        return plgpu.load(part, layout=plgpu.Layout.WGMMA, optimized=False)

      total = lax.fori_loop(
          border, last + 1, lambda cta, sums: sums + _load(2 * cta),
          _load(2 * (border - 1) + 1),
      )
      _, m, n = grid.locate(tile)
      epilogue.store(
          total, out_gmem, (), refs, wg=0, batch=0, row=m + row, col=n + col
      )
      epilogue.finish()

  mesh = plgpu.Mesh(
      grid=((units.ctas - 1) * pieces,), grid_names=("cta",), num_threads=1,
      thread_name="wg", kernel_name=f"jaxgemm_{NAME}_mend",
  )

  def change(ref: Any) -> None:
    with compat.without_manual_axes():
      # plgpu.kernel takes no references of arrays that it may change.
      pl.kernel(
          lambda *gmem: pl.run_scoped(
              functools.partial(_kernel, *gmem), collective_axes="wg",
              **epilogue.scratch(),
          ),
          out_type=[],
          mesh=mesh,
          compiler_params=plgpu.CompilerParams(),
          interpret=False if interpret is None else interpret,
          name=f"jaxgemm_{NAME}_mend",
      )(ref, partials)

  return pl.run_state(change)(out)
