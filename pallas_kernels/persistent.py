"""persistent: one CTA an SM, a producer and one to three consumer warpgroups.

  out[b] = alpha * lhs[b] @ rhs[b] + beta * c[b]

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

With `pad` false, three producers load what TMA cannot take through registers, k tiles
in turn. With clusters, two or four neighbours along m share the rhs tile, or neighbours
along n the lhs tile: each loads its part of it and multicasts it to all.

Barriers: see `ring`. Constraints: see `supports`.
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
  calls,
  halves,
  operand_tiles,
  parts,
  scales,
  tiles,
)
from pallas_kernels import ring as rings
from pallas_kernels.exchange import Exchange
from pallas_kernels.problem import PersistentConfig, Problem

NAME = "persistent"
Config = PersistentConfig
MAX_TILE_N = 384  # Columns of a tile: those of two wgmma that need 192 registers.
LOADING_PRODUCERS = 3  # Where registers load operands: see `num_producers`.
MAX_BARRIERS = 32  # In one array of barriers.
MAX_UNTRADED_SUMS = 64  # Registers of an accumulator beside producers that need some.
Supports = Callable[[Problem, PersistentConfig], str | None]


def wg_tile(config: PersistentConfig) -> tuple[int, int]:
  """The share of one consumer of the CTA's tile."""
  if config.wg_dim == "tile":
    return config.tile_m, config.tile_n
  if config.wg_dim == "m":
    return config.tile_m // config.consumers, config.tile_n
  return config.tile_m, config.tile_n // config.consumers


def multiplied(problem: Problem, config: PersistentConfig) -> Problem:
  """What the kernel multiplies: the problem, or the transposed one, or its parts'."""
  return parts.product(
      problem.transposed if config.swap else problem, config.float16_parts
  )


def check_config(problem: Problem, config: PersistentConfig) -> str | None:
  """Why the tiles, the ring or the cluster cannot be, or None."""
  if config.consumers not in rings.CONSUMER_REGISTERS:
    return f"consumers={config.consumers} must be 1, 2 or 3"
  if config.consumers == 3 and config.wg_dim != "m":
    return f"wg_dim={config.wg_dim}: three consumers share out m"
  wg_m, wg_n = wg_tile(config)
  if wg_m % 64:
    return (
        f"tile_m={config.tile_m} over {config.consumers} warpgroups: each needs a"
        " multiple of 64"
    )
  if config.num_stages < 2:
    return f"num_stages={config.num_stages}: a ring has at least 2 slots"
  if config.wg_dim == "tile" and config.num_stages > MAX_BARRIERS // 2:
    return f"num_stages={config.num_stages}: two teams have at most {MAX_BARRIERS // 2}"
  if sorted((config.cluster_m, config.cluster_n)) not in ([1, 1], [1, 2], [1, 4]):
    return (
        f"cluster_m={config.cluster_m}, cluster_n={config.cluster_n}: one of them must"
        " be 1, and the other 1, 2 or 4"
    )
  if config.grid_width < 1:
    return f"grid_width={config.grid_width} must be at least 1"
  for shared, tile_mn in (
      (config.cluster_n, config.tile_m), (config.cluster_m, config.tile_n)
  ):
    if shared > 1 and tile_mn % (8 * shared):
      return f"tiles of {tile_mn} rows: {shared} CTAs load a multiple of 8 each"
  product, split = multiplied(problem, config), parts.of(problem, config)
  return (
      _check_loads(problem, config)
      or check_swap(problem, config)
      or tiles.check_tile(
          product, config.tile_m, config.tile_n, config.tile_k, most_n=MAX_TILE_N
      )
      or accumulate.check(
          wg_m, wg_n, config.promote, registers(config),
          num_accs=len(split.groups) if split else 1,
      )
      or _check_wg_n(product, wg_n)
      or tiles.check_smem(smem_bytes(problem, config))
  )


def _check_loads(problem: Problem, config: PersistentConfig) -> str | None:
  """Why registers cannot load operands, or None."""
  if config.pad:
    return None
  if problem.itemsize != 2:
    return f"pad=False: registers load 16-bit operands, not {problem.dtype}"
  if config.cluster_m * config.cluster_n > 1:
    return "pad=False excludes cluster_m and cluster_n: only TMA multicasts"
  if config.consumers > 1:
    return "pad=False leaves registers for one consumer"
  if config.num_stages % LOADING_PRODUCERS:
    return (
        f"pad=False: num_stages={config.num_stages} must be a multiple of"
        f" {LOADING_PRODUCERS}, the number of producers"
    )
  sums = config.tile_m * config.tile_n // accumulate.WG_THREADS
  if sums * (2 if config.promote else 1) > MAX_UNTRADED_SUMS:
    return (
        f"pad=False: sums of {config.tile_m}x{config.tile_n} leave too few registers"
        " to load with"
    )
  return None


def check_swap(problem: Problem, config: PersistentConfig) -> str | None:
  """Why the result cannot be stored transposed, or None."""
  if not config.swap:
    return None
  if problem.out_itemsize != 2:
    return f"swap=True stores 16-bit results, not {problem.out_dtype}"
  if problem.epilogue.has_c:
    return "swap=True excludes c"
  if problem.n % tiles.tma_stride_elems(problem.out_dtype):
    return f"swap=True: TMA cannot store rows of n={problem.n} elements"
  return None


def _check_scales(problem: Problem, config: PersistentConfig) -> str | None:
  scaling = problem.epilogue.scaling
  if scaling != "none" and config.swap:
    return f"swap=True excludes scaling={scaling!r}"
  if scaling == "blocks":
    return scales.check_blocks(wg_tile(config), config.promote, config.tile_k)
  return None


def _check_wg_n(problem: Problem, wg_n: int) -> str | None:
  step = tiles.rhs_step(problem)
  if wg_n % step:
    return f"{wg_n} columns a warpgroup must be a multiple of {step}"
  return None


def supports(problem: Problem, config: PersistentConfig) -> str | None:
  """The reason why this kernel cannot serve, or None."""
  return (
      tiles.check_problem(problem, scales=True)
      or _check_scales(problem, config)
      or check_parts(problem, config, supports)
      or check_config(problem, config)
  )


def smem_bytes(problem: Problem, config: PersistentConfig) -> int:
  """Shared memory of one CTA: the ring, the staging slots, the barriers."""
  ring = config.num_stages * slot_bytes(problem, config)
  epilogue = calls.epilogue_bytes(
      problem, wg_tile(config)[1], config.consumers, config.swap
  )
  return ring + epilogue + tiles.BARRIER_BYTES


def slot_bytes(problem: Problem, config: PersistentConfig) -> int:
  """Shared memory of one slot of the ring."""
  split = parts.of(problem, config)
  return tiles.slot_bytes(
      multiplied(problem, config), config.tile_m, config.tile_n, config.tile_k,
      split.count if split else 1,
  )


def registers(config: PersistentConfig) -> int:
  """Registers that a thread of a consumer has for its sums.

  With three consumers ptxas compiles for the 128 that a thread has at launch,
  whatever the producer gives away later.
  """
  kept = 128 if config.consumers == 3 else rings.CONSUMER_REGISTERS[config.consumers]
  return kept - accumulate.OTHER_REGISTERS


def overlaps(problem: Problem, config: PersistentConfig) -> bool:
  """Whether the tensor cores go on with smaller products while others are promoted."""
  split = parts.of(problem, config)
  if split is None:
    return False
  return not config.promote or (split.scaled and accumulate.fits(3, wg_tile(config)))


def num_teams(config: PersistentConfig) -> int:
  """1, or 2 if the consumers take tiles in turn."""
  return config.consumers if config.wg_dim == "tile" else 1


def num_producers(config: PersistentConfig) -> int:
  """Warpgroups that load; several wait for memory at once, where TMA does not."""
  return 1 if config.pad else LOADING_PRODUCERS


def make_ring(
    prepared: operand_tiles.Prepared, config: PersistentConfig, k_steps: int
) -> rings.Ring:
  axis, teams = ("cluster",), num_teams(config)
  return rings.Ring(
      prepared, config.num_stages, config.consumers // teams, teams, k_steps,
      num_producers(config),
      lhs_axes=axis if config.cluster_n > 1 else (),
      rhs_axes=axis if config.cluster_m > 1 else (),
      cluster=config.cluster_m * config.cluster_n,
  )


def launch(
    operands, problem: Problem, config: PersistentConfig, *, num_sms: int, interpret=None
) -> jax.Array:
  """Returns the result [batch, m, n]; operands as `problem` stores them."""
  return guarded(
      functools.partial(_launch, problem=problem, num_sms=num_sms, interpret=interpret),
      operands, problem, config, supports,
  )


def guarded(
    launch: Callable[..., jax.Array], operands, problem: Problem,
    config: PersistentConfig, supports: Supports,
) -> jax.Array:
  """`launch(operands, config, split)` with the parts that the operands allow."""
  if not config.float16_parts:
    return launch(operands, config=config, split=None)
  otherwise = of_bfloat16_parts(problem, config, supports)
  return halves.guarded(
      *operands[:2], problem,
      multiply=lambda split: launch(operands, config=config, split=split),
      otherwise=lambda: launch(operands, config=otherwise, split=None),
  )


def of_bfloat16_parts(
    problem: Problem, config: PersistentConfig, supports: Supports
) -> PersistentConfig | None:
  """The config of the same kernel where float16 parts lose bits; None: there is none."""
  for tile_n in (128, 64):
    found = dataclasses.replace(
        config, float16_parts=False, tile_m=128, tile_n=tile_n, num_stages=2,
        consumers=2, wg_dim="m",
    )
    if supports(problem, found) is None:
      return found
  return None


def check_parts(
    problem: Problem, config: PersistentConfig, supports: Supports
) -> str | None:
  """Why a kernel cannot take the parts that the config says, or None."""
  if (reason := parts.check(problem, config)) is not None:
    return reason
  if config.float16_parts and of_bfloat16_parts(problem, config, supports) is None:
    return "float16_parts=True: bfloat16 parts do not fit in their place"
  return None


def _launch(
    operands, *, problem: Problem, config: PersistentConfig, num_sms: int, interpret,
    split: halves.Halves | None,
) -> jax.Array:
  call = calls.make_call(
      swapped(operands, config), multiplied(problem, config), config,
      wg_tile=wg_tile(config), num_wgs=config.consumers, interpret=interpret,
      result=problem, halves=split,
  )
  return run(
      call, multiplied(problem, config), config, name=NAME, num_sms=num_sms,
      k_steps=tiles.cdiv(problem.k, config.tile_k),
  )


def swapped(operands, config: PersistentConfig):
  """The operands (lhs, rhs[, c]) in their places of what the kernel multiplies."""
  return operands[1::-1] if config.swap else operands


def run(
    call: calls.Call, problem: Problem, config: PersistentConfig, *, name: str,
    num_sms: int, k_steps: int, copies: int = 1,
    operand_origin: Callable[..., Any] = lambda batch: (batch, 0),
    exchange: Exchange | None = None,
) -> jax.Array:
  """Runs the schedule: `k_steps` k tiles for each tile of each result.

  Split-k asks for `copies` results a product, maps the index of a result to the
  (batch, k) at which its operands begin, and may have the CTAs of a cluster
  `exchange` their sums.
  """
  wg_tile_shape = wg_tile(config)
  ring, epilogue = make_ring(call.prepared, config, k_steps), call.epilogue
  split = parts.of(call.result, config)
  in_blocks = call.result.epilogue.scaling == "blocks"
  teams = num_teams(config)
  grid = ClusterGrid.of(problem, config, num_sms=num_sms, copies=copies)

  def _kernel(lhs_gmem, rhs_gmem, c_gmem, out_gmem, refs):
    wg = lax.axis_index("wg")
    count = grid.local_count()

    def _load():
      producer = wg - config.consumers

      def tile(local, _):
        index, m, n = grid.locate(local)
        batch, k = operand_origin(index)
        ring.produce(
            lhs_gmem, rhs_gmem, refs, producer=producer, local=local, batch=batch,
            m=m, n=n, k=k,
        )

      lax.fori_loop(jnp.int32(0), count, tile, None)
      ring.drain(refs, producer=producer, total_steps=count * k_steps)

    def _multiply_and_store():
      share = wg_share(config, wg)

      first = wg if teams > 1 else jnp.int32(0)  # Of this consumer's tiles.

      def tile(turn, _):
        local = first + turn * teams
        index, m, n = grid.locate(local)
        of_batch, _ = operand_origin(index)
        starts = dict(lhs_start=share.row, rhs_start=share.col)

        def multiply(acc, first, count):
          ring.consume(
              acc, refs, first_step=local * k_steps + first, num_steps=count, **starts
          )

        def multiply_group(acc, k_step, index):
          ring.consume_parts(
              acc, refs, step=local * k_steps + k_step,
              pairs=split.groups[index].pairs, is_first=index == 0,
              is_last=index == len(split.groups) - 1, **starts,
          )

        def multiply_groups(accs, groups, k_step, in_flight):
          ring.consume_step(
              accs, refs, step=local * k_steps + k_step, is_first=k_step == 0,
              groups=groups, in_flight=in_flight, **starts,
          )

        def finish():
          ring.finish(refs, step=local * k_steps + k_steps - 1)

        def block_factors(k_step):
          return scales.block_factors(
              refs, shape=wg_tile_shape, batch=of_batch, block=k_step,
              row=m + share.row, col=n + share.col,
          )

        if split is None:
          acc = accumulate.sum_over_k(
              multiply, shape=wg_tile_shape, k_steps=k_steps, promote=config.promote,
              dtype=problem.acc_dtype, factors=block_factors if in_blocks else None,
          )
        elif overlaps(call.result, config):
          acc = accumulate.sum_of_groups(
              multiply_groups, finish, shape=wg_tile_shape, k_steps=k_steps, of=split,
              promote=config.promote > 0,
          )
        else:
          acc = accumulate.sum_of_parts(
              multiply_group, shape=wg_tile_shape, k_steps=k_steps, of=split
          )

        def store(sums, col):
          epilogue.store(
              sums, out_gmem, c_gmem, refs, wg=wg, batch=index, of_batch=of_batch,
              row=m + share.row, col=n + share.col + col,
          )

        if exchange is None:
          store(acc, 0)
        else:
          exchange.add_up(acc, refs, wg=wg, index=local, count=count, store=store)

      if exchange is not None:
        exchange.start(refs, wg=wg)
      turns = lax.div(count - first + teams - 1, jnp.int32(teams))
      lax.fori_loop(jnp.int32(0), turns, tile, None)
      epilogue.finish()

    rings.specialise(
        wg, config.consumers, _load, _multiply_and_store, only_copies=config.pad
    )

  scratch, workspace = ring.scratch(), {}
  if exchange is not None:
    scratch |= exchange.scratch()
    workspace = exchange.workspace(grid.num_clusters)
  return call(
      _kernel, name=name, scratch=scratch, workspace=workspace, grid=grid.num_clusters,
      cluster=config.cluster, num_wgs=config.consumers + num_producers(config),
  )


class Share(NamedTuple):
  """Where a consumer's share of the CTA's tile begins."""

  row: Any
  col: Any


def wg_share(config: PersistentConfig, wg) -> Share:
  wg_m, wg_n = wg_tile(config)
  if config.wg_dim == "tile":
    return Share(0, 0)
  return Share(wg * wg_m, 0) if config.wg_dim == "m" else Share(0, wg * wg_n)


@dataclasses.dataclass(frozen=True)
class ClusterGrid:
  """Clusters of CTAs that walk over copies x batch x (output tiles)."""

  config: PersistentConfig
  tiles_m: int  # Tiles of a cluster along m.
  tiles_n: int
  num_tiles: int  # Over the batch.
  num_clusters: int

  @classmethod
  def of(cls, problem: Problem, config, *, num_sms: int, copies: int = 1) -> ClusterGrid:
    """The grid of `problem`, every tile of which is done `copies` times."""
    tiles_m = tiles.cdiv(problem.m, config.tile_m * config.cluster_m)
    tiles_n = tiles.cdiv(problem.n, config.tile_n * config.cluster_n)
    num_tiles = copies * problem.batch * tiles_m * tiles_n
    num_clusters = min(num_tiles, max(1, num_sms // config.cluster))
    return cls(config, tiles_m, tiles_n, num_tiles, num_clusters)

  def local_count(self):
    """Tiles of this CTA."""
    left = self.num_tiles - lax.axis_index("cta") + self.num_clusters - 1
    return lax.div(left, jnp.int32(self.num_clusters))

  def locate(self, local):
    """(batch, m, n) of this CTA's `local`-th tile; m and n in elements."""
    config = self.config
    index = lax.axis_index("cta") + local * self.num_clusters
    per_batch = self.tiles_m * self.tiles_n
    batch = lax.div(index, jnp.int32(per_batch))
    mi, ni = tiles.tile_order(
        index - batch * per_batch, self.tiles_m, self.tiles_n,
        config.grid_minor, config.grid_width,
    )
    rank = lax.axis_index("cluster")
    if config.cluster_m > 1:
      mi = mi * config.cluster_m + rank
    if config.cluster_n > 1:
      ni = ni * config.cluster_n + rank
    return batch, mi * config.tile_m, ni * config.tile_n
