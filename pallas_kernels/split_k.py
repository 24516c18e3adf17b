"""split_k: k shared out among CTAs, for few output tiles and a long k.

  partial[b, s] = lhs[b][:, k_s] @ rhs[b][k_s, :]
  out[b] = alpha * (partial[b, 0] + ... + partial[b, S-1]) + beta * c[b]

The kernel is the persistent one over `splits` (S) times as many tiles, each over
its own contiguous part k_s of k. The parts are added up in one or two stages,
each in a fixed order, whoever finished first: every run gives the same bits.

  1. The CTAs of a cluster of `cluster_k` add theirs through distributed shared
     memory (see `exchange`).
  2. Where that leaves several sums, they are stored in float32, and a kernel of XLA's
     adds them (and transposes them, if they are of the transposed product): see
     `partial_sums`. They are in the L2 still.

Barriers: see `ring` and `exchange`.
Constraints: see `supports`.
Source: split-k as in CUTLASS's parallel split-k.
"""

from __future__ import annotations

import dataclasses
import functools

from jax import lax
import jax.numpy as jnp

from pallas_kernels import (
  calls,
  partial_sums,
  persistent,
  specialised,
  specialised_checks,
  tiles,
)
from pallas_kernels.configs import ALONG_K, SplitKConfig
from pallas_kernels.exchange import Exchange
from pallas_kernels.problem import Epilogue, Problem

NAME = "split_k"
Config = SplitKConfig


def supports(problem: Problem, config: SplitKConfig) -> str | None:
  """The reason why this kernel cannot serve, or None."""
  k_steps = tiles.cdiv(problem.k, max(config.tile_k, 1))
  if k_steps < 2:
    return f"k={problem.k} is one k tile of {config.tile_k}: nothing can be split"
  if not 2 <= config.splits <= k_steps:
    return (
        f"splits={config.splits} must be in [2, {k_steps}], the number of k tiles of"
        f" k={problem.k}"
    )
  if not 1 <= config.cluster_k <= tiles.MAX_CTAS or config.splits % config.cluster_k:
    return (
        f"cluster_k={config.cluster_k} must be in [1, {tiles.MAX_CTAS}] and divide"
        f" splits={config.splits}"
    )
  if config.cluster_k > 1 and config.cluster != config.cluster_k:
    return f"cluster_k={config.cluster_k} excludes cluster_m and cluster_n"
  if problem.acc_dtype != "float32":
    return f"split_k adds float32 sums, not those of {problem.dtype} operands"
  if config.wg_dim == "tile":
    return "wg_dim=tile: a CTA of split_k rarely has a second tile to multiply"
  return (
      tiles.check_problem(problem, converts=True)
      or specialised_checks.check_parts(problem, config, supports)
      or specialised_checks.check_swap(problem, config)
      or specialised_checks.check_in_registers(problem, config)
      or specialised_checks.check_config(*_first_kernel(problem, config))
      or tiles.check_smem(smem_bytes(problem, config))
  )


def smem_bytes(problem: Problem, config: SplitKConfig) -> int:
  """Shared memory of one CTA of the first kernel, the larger one."""
  stored, storing = _first_kernel(problem, config)
  exchange = make_exchange(config, emulated=False)
  return specialised.smem_bytes(
      stored, storing, _exchange_bytes(config),
      cols=exchange.share_cols if exchange else None,
  )


def _exchange_bytes(config: SplitKConfig) -> int:
  exchange = make_exchange(config, emulated=False)
  return exchange.smem_bytes if exchange else 0


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

  Partial sums are padded to rows that TMA can store. Those of a transposed product stay
  so until they are added up.
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
      n=tiles.round_up(product.n, tiles.tma_stride_elems(jnp.float32)),
      batch=product.batch * sums,
      out_dtype="float32",
      epilogue=Epilogue(),
  )


def launch(
    operands, problem: Problem, config: SplitKConfig, *, num_sms: int, interpret=None
) -> calls.Results:
  """Returns the results; operands as `problem` stores them."""
  return persistent.guarded(
      functools.partial(_launch, num_sms=num_sms, interpret=interpret),
      operands, problem, config, supports, emulated=interpret is not None,
  )


def _launch(operands, *, problem, config, num_sms, interpret, split) -> calls.Results:
  if config.splits == config.cluster_k:
    return _multiply(operands, problem, config, num_sms, interpret, split)
  sums = _multiply(operands[:2], problem, config, num_sms, interpret, split)
  return partial_sums.add_up(
      sums, operands[2:], problem, config.splits // config.cluster_k,
      transposed=config.swap,
  )


def _multiply(operands, problem, config, num_sms, interpret, split) -> calls.Results:
  """Kernel 1: the result, or the sums of the clusters [batch * sums, m, n]."""
  exchange = make_exchange(config, emulated=interpret is not None)
  product = specialised.multiplied(problem, config)
  stored, storing = _first_kernel(problem, config)
  call = calls.make_call(
      persistent.swapped(operands, config), product, storing,
      stored_cols=exchange.share_cols if exchange else specialised.wg_tile(config)[1],
      num_wgs=config.consumers, interpret=interpret, result=stored, halves=split,
      room=specialised.epilogue_room(stored, storing, _exchange_bytes(config)),
  )
  k_steps = tiles.cdiv(tiles.cdiv(problem.k, config.tile_k), config.splits)
  sums = config.splits // config.cluster_k

  def operand_origin(index):
    """(batch, k) at which the operands of one part begin."""
    batch = lax.div(index, jnp.int32(sums))
    split = (index - batch * sums) * config.cluster_k
    if config.cluster_k > 1:
      split = split + lax.axis_index(ALONG_K)
    return batch, split * k_steps * config.tile_k

  return persistent.run(
      call, product, config, name=NAME, num_sms=num_sms, k_steps=k_steps,
      copies=sums, operand_origin=operand_origin, exchange=exchange,
  )
