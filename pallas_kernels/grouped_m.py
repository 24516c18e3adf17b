"""grouped_m: rows in groups, each of which has an rhs of its own.

  out[rows of g] = lhs[rows of g] @ rhs[g]

lhs is [m, k], its rows sorted by group; rhs is [groups, k, n] or [groups, n, k]. The
sizes of the groups are data: any sum of rows up to m, none of a group, too. Rows that no
group has become zeros.

The schedule, the roles and the barriers are those of `persistent`; the tiles are those of
`grouped_grid`. A tile has rows of one group alone: it begins where they begin, at any
row, and what it computes of the next group's rows is not stored (`partial_stores`). With
`swap` the product is multiplied transposed, so that a tile has any multiple of 8 rows:
for groups of few rows. So multiplied rhs may be of 8 bits for lhs of 16 (see
`conversions`).

Constraints: operands of 16 or 8 bits; rows of the result a multiple of 16 bytes.
Source: the "m-grouped contiguous" products of DeepGEMM, and MegaBlocks (2022), which
align groups to tiles; here nothing is aligned, as TMA may begin at any row.
"""

from __future__ import annotations

import dataclasses

import jax
from jax import lax
import jax.numpy as jnp

from pallas_kernels import calls, persistent, specialised, tiles
from pallas_kernels.configs import ALONG_M, ALONG_N, PersistentConfig
from pallas_kernels.grouped_grid import MOST_ROWS, TABLE, GroupedGrid, row_tiles
from pallas_kernels.problem import Problem

NAME = "grouped_m"
Config = PersistentConfig


def supports(problem: Problem, config: PersistentConfig) -> str | None:
  """The reason why this kernel cannot serve, or None.

  `problem` has the rows of all groups, m, and a batch of as many rhs, which share lhs.
  """
  if problem.grouped != "m":
    return f"grouped_m is for groups of m, not for {problem}"
  if problem.m > MOST_ROWS:
    return f"m={problem.m}: groups have at most {MOST_ROWS} rows in all"
  epilogue = problem.epilogue
  along_rows = config.cluster_n if config.swap else config.cluster_m
  if problem.itemsize > 2 or problem.lhs_source:
    stored = problem.stored_dtypes[0]
    return f"groups of rows: lhs is of 16 or 8 bits, not of {stored}"
  if problem.lhs_layout != "k-major":
    return "lhs_layout='m-major': rows of a group begin anywhere in k-major lhs alone"
  if epilogue.is_fused or epilogue.has_c:
    return "groups of rows exclude c, bias and activation"
  if problem.n % tiles.tma_stride_elems(problem.out_dtype):
    return f"n={problem.n}: rows of the result must be a multiple of 16 bytes"
  if along_rows > 1:
    return "a cluster along rows would share the rhs of several groups"
  if config.misaligned != "padded":
    return f"misaligned={config.misaligned!r}: groups of rows take 'padded'"
  return persistent.supports(dataclasses.replace(problem, grouped=""), config)


smem_bytes = specialised.smem_bytes


def tile_rows(config: PersistentConfig) -> int:
  """Rows of a tile of the result."""
  return config.tile_n if config.swap else config.tile_m


def launch(
    operands, problem: Problem, config: PersistentConfig, *, num_sms: int, interpret=None
) -> jax.Array:
  """Returns [1, m, n]; the operands are lhs [1, m, k], rhs and group sizes [groups].

  Behind lhs and rhs there may be their scales, as of a batch that shares lhs.
  """
  *operands, group_sizes = operands
  problem = dataclasses.replace(problem, grouped="")
  if problem.epilogue.scaling == "rows":  # A tile may begin at the last one.
    lhs, rhs, rows, cols = operands
    more = ((0, 0, 0), (0, config.tile_m, 0))
    operands = lhs, rhs, lax.pad(rows, jnp.ones((), rows.dtype), more), cols
  result = dataclasses.replace(problem, batch=1, lhs_batched=True, rhs_batched=True)
  multiplied = specialised.multiplied(problem, config)
  call = calls.make_call(
      persistent.swapped(operands, config), multiplied, config,
      stored_cols=specialised.stored_cols(problem, config), num_wgs=config.consumers,
      interpret=interpret, result=result,
      room=specialised.epilogue_room(problem, config),
  )
  rows, axis = tile_rows(config), ALONG_M if config.swap else ALONG_N
  call = dataclasses.replace(
      call, by_name=call.by_name | {TABLE: row_tiles(group_sizes, problem.m, rows)}
  )
  grid = GroupedGrid.of(
      problem.m, problem.n, group_sizes.shape[0], tile_rows=rows,
      tile_cols=config.tile_m if config.swap else config.tile_n,
      cluster=config.cluster, axis=axis, transposed=config.swap,
      width=config.grid_width, num_sms=num_sms,
  )
  return persistent.run(
      call, multiplied, config, name=NAME, num_sms=num_sms,
      k_steps=tiles.cdiv(problem.k, config.tile_k), grid=grid,
  )
