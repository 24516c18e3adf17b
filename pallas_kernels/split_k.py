"""split_k: k shared out among CTAs, for few output tiles and a long k.

  partial[b, s] = lhs[b][:, k_s] @ rhs[b][k_s, :]
  out[b] = alpha * (partial[b, 0] + ... + partial[b, S-1]) + beta * c[b]

The kernel is the persistent one over `splits` (S) times as many tiles, each over
its own contiguous part k_s of k. The parts are added up in one or two stages,
each in a fixed order, whoever finished first: every run gives the same bits.

  1. The CTAs of a cluster of `cluster_k` add theirs through distributed shared
     memory (see `exchange`).
  2. Where that leaves several sums, they are stored in float32, and a second
     kernel adds them (and transposes them, if they are of the transposed product).

Barriers: see `ring` and `exchange`. The second kernel has none: the sums go from
GMEM (they are in the L2) straight to registers.
Constraints: see `supports`.
Source: split-k as in CUTLASS's parallel split-k.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import accumulate, calls, persistent, specialised, tiles
from pallas_kernels import epilogue as epilogues
from pallas_kernels.exchange import MAX_CTAS, Exchange
from pallas_kernels.problem import Epilogue, Problem, SplitKConfig

NAME = "split_k"
Config = SplitKConfig
LOADS_IN_FLIGHT = 16  # Parts that the reduction loads before it adds them.


def supports(problem: Problem, config: SplitKConfig) -> str | None:
  """The reason why this kernel cannot serve, or None."""
  k_steps = tiles.cdiv(problem.k, config.tile_k)
  if k_steps < 2:
    return f"k={problem.k} is one k tile of {config.tile_k}: nothing can be split"
  if not 2 <= config.splits <= k_steps:
    return (
        f"splits={config.splits} must be in [2, {k_steps}], the number of k tiles of"
        f" k={problem.k}"
    )
  if not 1 <= config.cluster_k <= MAX_CTAS or config.splits % config.cluster_k:
    return (
        f"cluster_k={config.cluster_k} must be in [1, {MAX_CTAS}] and divide"
        f" splits={config.splits}"
    )
  if config.cluster_k > 1 and config.cluster != config.cluster_k:
    return f"cluster_k={config.cluster_k} excludes cluster_m and cluster_n"
  if problem.acc_dtype != "float32":
    return f"split_k adds float32 sums, not those of {problem.dtype} operands"
  if config.wg_dim == "tile":
    return "wg_dim=tile: a CTA of split_k rarely has a second tile to multiply"
  return (
      tiles.check_problem(problem)
      or specialised.check_parts(problem, config, supports)
      or specialised.check_swap(problem, config)
      or specialised.check_config(*_first_kernel(problem, config))
      or tiles.check_smem(smem_bytes(problem, config))
  )


def smem_bytes(problem: Problem, config: SplitKConfig) -> int:
  """Shared memory of one CTA of the first kernel, the larger one."""
  exchange = make_exchange(config, emulated=False)
  return (
      specialised.smem_bytes(*_first_kernel(problem, config))
      + (exchange.smem_bytes if exchange else 0)
  )


def make_exchange(config: SplitKConfig, *, emulated: bool) -> Exchange | None:
  """How the CTAs of a cluster add up their parts; None where they do not."""
  if config.cluster_k == 1:
    return None
  return Exchange(
      config.cluster_k, *specialised.wg_tile(config), config.consumers, emulated
  )


def _first_kernel(
    problem: Problem, config: SplitKConfig
) -> tuple[Problem, SplitKConfig]:
  """The problem whose results the first kernel stores, and its config.

  Partial sums are padded to whole pieces of the second kernel. Those of a transposed
  product stay so: the second kernel transposes them.
  """
  sums = config.splits // config.cluster_k
  if sums == 1:
    return problem, config
  if config.swap:
    config = dataclasses.replace(config, swap=False)
    problem = problem.transposed
  return _partial_sums(problem, sums), config


@functools.lru_cache(maxsize=1024)  # A plan asks for the same few again and again.
def _partial_sums(product: Problem, sums: int) -> Problem:
  return dataclasses.replace(
      product,
      m=tiles.round_up(product.m, epilogues.PIECE_ROWS),
      n=tiles.round_up(product.n, tiles.swizzle_elems(jnp.float32)),
      batch=product.batch * sums,
      out_dtype="float32",
      epilogue=Epilogue(),
  )


def launch(
    operands, problem: Problem, config: SplitKConfig, *, num_sms: int, interpret=None
) -> jax.Array:
  """Returns the result [batch, m, n]; operands as `problem` stores them."""
  return persistent.guarded(
      functools.partial(_launch, num_sms=num_sms, interpret=interpret),
      operands, problem, config, supports,
  )


def _launch(operands, *, problem, config, num_sms, interpret, split) -> jax.Array:
  if config.splits == config.cluster_k:
    return _multiply(operands, problem, config, num_sms, interpret, split)
  sums = _multiply(operands[:2], problem, config, num_sms, interpret, split)
  return _reduce(sums, operands[2:], problem, config, num_sms, interpret)


def _multiply(operands, problem, config, num_sms, interpret, split) -> jax.Array:
  """Kernel 1: the result, or the sums of the clusters [batch * sums, m, n]."""
  exchange = make_exchange(config, emulated=interpret is not None)
  product = specialised.multiplied(problem, config)
  stored, storing = _first_kernel(problem, config)
  call = calls.make_call(
      persistent.swapped(operands, config), product, storing,
      wg_tile=specialised.wg_tile(config), num_wgs=config.consumers, interpret=interpret,
      result=stored,
      stored_cols=exchange.share_cols if exchange else None, halves=split,
  )
  k_steps = tiles.cdiv(tiles.cdiv(problem.k, config.tile_k), config.splits)
  sums = config.splits // config.cluster_k

  def operand_origin(index):
    """(batch, k) at which the operands of one part begin."""
    batch = lax.div(index, jnp.int32(sums))
    split = (index - batch * sums) * config.cluster_k
    if config.cluster_k > 1:
      split = split + lax.axis_index("cluster")
    return batch, split * k_steps * config.tile_k

  return persistent.run(
      call, product, config, name=NAME, num_sms=num_sms, k_steps=k_steps,
      copies=sums, operand_origin=operand_origin, exchange=exchange,
  )


def _reduce(partials, others, problem, config, num_sms, interpret) -> jax.Array:
  """Kernel 2: adds the sums in order, then the epilogue, of which `others` are operands.

  Rows and columns are those of what was multiplied.
  """
  _, rows, cols = partials.shape
  product = specialised.multiplied(problem, config)
  piece_cols = _piece_cols(problem.batch * (rows // epilogues.PIECE_ROWS), cols, num_sms)
  pieces_n = tiles.cdiv(product.n, piece_cols)
  pieces = (rows // epilogues.PIECE_ROWS) * pieces_n
  splits = config.splits // config.cluster_k
  emulated = interpret is not None
  epilogue = epilogues.make_epilogue(
      problem, piece_cols, 1, emulated=emulated, transposed=config.swap
  )

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

    def _add(sums, first, count):
      parts = [_load(first + i) for i in range(count)]
      for part in parts:
        sums = accumulate.two_sum(*sums, part)
      return sums

    rounds, rest = divmod(splits, LOADS_IN_FLIGHT)
    zeros = accumulate.zeros((epilogues.PIECE_ROWS, piece_cols))
    sums = lax.fori_loop(
        jnp.int32(0), jnp.int32(rounds),
        lambda i, sums: _add(sums, i * LOADS_IN_FLIGHT, LOADS_IN_FLIGHT), (zeros, zeros),
    )
    total, rest = _add(sums, rounds * LOADS_IN_FLIGHT, rest)
    total = total + accumulate.finite(rest)
    epilogue.store(total, out_gmem, c_gmem, refs, wg=0, batch=batch, row=row, col=col)
    epilogue.finish()

  inputs = partials, epilogues.prepare_c(others, problem)
  by_name = epilogues.prepare_biases(epilogue, others)
  return calls.run(
      _kernel, inputs, problem, epilogue, name=f"{NAME}_reduce", scratch={},
      grid=problem.batch * pieces, num_wgs=1, by_name=by_name, interpret=interpret,
  )


def _piece_cols(row_pieces: int, cols: int, num_sms: int) -> int:
  """The wider piece if it still gives every SM one, else the narrower."""
  return 32 if row_pieces * tiles.cdiv(cols, 32) >= num_sms else 16
