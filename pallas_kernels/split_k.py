"""split_k: k shared out among CTAs, for few output tiles and a long k.

  partial[b, s] = lhs[b][:, k_s] @ rhs[b][k_s, :]              (kernel 1)
  out[b] = alpha * (partial[b, 0] + ... + partial[b, S-1]) + beta * c[b]   (2)

The first kernel is the persistent one over `splits` (S) times as many tiles,
each over its own contiguous part k_s of k, stored in float32. The second adds
the parts of each piece of the result in the order 0 .. S-1, whoever finished
first: every run gives the same bits.

Barriers of the first kernel: see `ring`. The second has none: the parts go from
GMEM (they are in the L2) straight to registers.
Constraints: see `supports`.
Source: split-k as in CUTLASS's parallel split-k.
"""

from __future__ import annotations

import dataclasses

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import calls, persistent, tiles
from pallas_kernels import epilogue as epilogues
from pallas_kernels import ring as rings
from pallas_kernels.problem import Epilogue, Problem, SplitKConfig

NAME = "split_k"
Config = SplitKConfig
LOADS_IN_FLIGHT = 16  # Parts that the reduction loads before it adds them.


def supports(problem: Problem, config: SplitKConfig) -> str | None:
  """The reason why this kernel cannot serve, or None."""
  k_steps = tiles.cdiv(problem.k, config.tile_k)
  if not 2 <= config.splits <= k_steps:
    return (
        f"splits={config.splits} must be in [2, {k_steps}], the number of k tiles of"
        f" k={problem.k}"
    )
  return tiles.check_problem(problem) or persistent.check_config(
      partial_problem(problem, config), config
  )


def smem_bytes(problem: Problem, config: SplitKConfig) -> int:
  """Shared memory of one CTA of the first kernel, the larger one."""
  return persistent.smem_bytes(partial_problem(problem, config), config)


def partial_problem(problem: Problem, config: SplitKConfig) -> Problem:
  """The problem whose results are the partial sums, padded to whole pieces."""
  return dataclasses.replace(
      problem,
      m=tiles.round_up(problem.m, epilogues.PIECE_ROWS),
      n=tiles.round_up(problem.n, tiles.swizzle_elems(jnp.float32)),
      batch=problem.batch * config.splits,
      out_dtype="float32",
      epilogue=Epilogue(),
  )


def launch(
    operands, problem: Problem, config: SplitKConfig, *, num_sms: int, interpret=None
) -> jax.Array:
  """Returns the result [batch, m, n]; operands as `problem` stores them."""
  partials = _multiply(operands[:2], problem, config, num_sms, interpret)
  return _reduce(partials, operands[2:], problem, config, num_sms, interpret)


def _multiply(operands, problem, config, num_sms, interpret) -> jax.Array:
  """Kernel 1: the partial sums [batch * splits, m, n], m and n padded."""
  call = calls.make_call(
      operands, problem, config, wg_tile_n=persistent.wg_tile(config)[1],
      num_wgs=rings.NUM_CONSUMERS, interpret=interpret,
      result=partial_problem(problem, config),
  )
  k_steps = tiles.cdiv(tiles.cdiv(problem.k, config.tile_k), config.splits)

  def operand_origin(batch_split):
    """(batch, k) at which the operands of one part begin."""
    batch = lax.div(batch_split, jnp.int32(config.splits))
    return batch, (batch_split - batch * config.splits) * k_steps * config.tile_k

  return persistent.run(
      call, problem, config, name=NAME, num_sms=num_sms, k_steps=k_steps,
      copies=config.splits, operand_origin=operand_origin,
  )


def _reduce(partials, c, problem, config, num_sms, interpret) -> jax.Array:
  """Kernel 2: adds the parts in order, then the epilogue."""
  batch_splits, rows, cols = partials.shape
  piece_cols = _piece_cols(problem.batch * (rows // epilogues.PIECE_ROWS), cols, num_sms)
  pieces_n = tiles.cdiv(problem.n, piece_cols)
  pieces = (rows // epilogues.PIECE_ROWS) * pieces_n
  splits = config.splits
  emulated = interpret is not None
  epilogue = epilogues.make_epilogue(problem, piece_cols, 1, emulated=emulated)

  def _kernel(partial_gmem, c_gmem, out_gmem, refs):
    index = lax.axis_index("cta")
    batch = lax.div(index, jnp.int32(pieces))
    piece = index - batch * pieces
    row = lax.div(piece, jnp.int32(pieces_n)) * epilogues.PIECE_ROWS
    col = lax.rem(piece, jnp.int32(pieces_n)) * piece_cols

    def _load(split):
      part = partial_gmem.at[
          batch * splits + split, pl.ds(row, epilogues.PIECE_ROWS), pl.ds(col, piece_cols)
      ]
      return plgpu.load(part, layout=plgpu.Layout.WGMMA, optimized=False)

    def _add(acc, first, count):
      parts = [_load(first + i) for i in range(count)]
      for part in parts:
        acc = acc + part
      return acc

    rounds, rest = divmod(splits, LOADS_IN_FLIGHT)
    acc = plgpu.layout_cast(
        jnp.zeros((epilogues.PIECE_ROWS, piece_cols), jnp.float32), plgpu.Layout.WGMMA
    )
    acc = lax.fori_loop(
        jnp.int32(0), jnp.int32(rounds),
        lambda i, acc: _add(acc, i * LOADS_IN_FLIGHT, LOADS_IN_FLIGHT), acc,
    )
    acc = _add(acc, rounds * LOADS_IN_FLIGHT, rest)
    epilogue.store(acc, out_gmem, c_gmem, refs, wg=0, batch=batch, row=row, col=col)
    epilogue.finish()

  inputs = (partials, *(epilogues.prepare_c(x, problem) for x in c))
  return calls.run(
      _kernel, inputs, problem, epilogue, name=f"{NAME}_reduce", scratch={},
      grid=problem.batch * pieces, num_wgs=1, interpret=interpret,
  )


def _piece_cols(row_pieces: int, cols: int, num_sms: int) -> int:
  """The wider piece if it still gives every SM one, else the narrower."""
  return 32 if row_pieces * tiles.cdiv(cols, 32) >= num_sms else 16
