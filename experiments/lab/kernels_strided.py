"""strided: split-k whose splits take every S-th k tile in place of a contiguous part.

  partial[s] = the sum over i of lhs[:, k_i] @ rhs[k_i, :],  k_i the k tile i * S + s
  out = partial[0] + ... + partial[S-1]

The schedule is the library's persistent one, which asks each operand for k tiles one
after the other; here an operand answers with tiles S apart. CTAs that run at the same
time then read neighbouring k tiles, one row of memory after the other, where contiguous
splits read places that lie k / S apart. XLA adds the partial sums, for both orders
alike: `strided` false is the contiguous order, in the same kernel.

Barriers: those of pallas_kernels/ring.py. Constraints: see `supports`.
Source: the grouped and strided k order of CUTLASS's split-k-in-parallel iterators.
"""

from __future__ import annotations

import dataclasses

import jax
from jax import lax
import jax.numpy as jnp

from pallas_kernels import calls, operand_tiles, persistent, specialised, split_k, tiles
from pallas_kernels.configs import SplitKConfig
from pallas_kernels.problem import Epilogue, Problem

NAME = "lab_strided"


@dataclasses.dataclass(frozen=True)
class StridedConfig:
  """Tile, ring and number of splits; one consumer.

  `strided`: whether a split takes every splits-th k tile.
  """

  tile_m: int = 128
  tile_n: int = 128
  tile_k: int = 64
  num_stages: int = 4
  splits: int = 4
  strided: bool = True

  @property
  def of_library(self) -> SplitKConfig:
    """The library's config of the same schedule."""
    return SplitKConfig(
        self.tile_m, self.tile_n, self.tile_k, self.num_stages, consumers=1,
        splits=self.splits,
    )


@dataclasses.dataclass(frozen=True)
class _Strided(operand_tiles.Operand):
  """An operand whose k tiles are asked for in contiguous splits, and come strided.

  Attributes:
    splits: S.
    k_steps: k tiles of a split.
  """

  splits: int = 1
  k_steps: int = 1

  def load(self, *args, k, **kwargs) -> None:
    step = lax.div(jnp.int32(k), jnp.int32(self.tile_k))
    split = lax.div(step, jnp.int32(self.k_steps))
    i = step - split * self.k_steps
    super().load(*args, k=(i * self.splits + split) * self.tile_k, **kwargs)


def supports(problem: Problem, config: StridedConfig) -> str | None:
  """The reason why this kernel cannot serve, or None."""
  if problem.batch > 1 or problem.itemsize != 2:
    return "strided splits are built for one product of 16-bit operands"
  return split_k.supports(problem, config.of_library)


def smem_bytes(problem: Problem, config: StridedConfig) -> int:
  """Shared memory of one CTA of the kernel that multiplies."""
  return specialised.smem_bytes(_partial_sums(problem, config), config.of_library)


def _partial_sums(problem: Problem, config: StridedConfig) -> Problem:
  return dataclasses.replace(
      problem, batch=config.splits, out_dtype="float32", epilogue=Epilogue()
  )


def launch(
    operands, problem: Problem, config: StridedConfig, *, num_sms: int, interpret=None
) -> jax.Array:
  """Returns the result [1, m, n]; operands as `problem` stores them."""
  library = config.of_library
  call = calls.make_call(
      operands, problem, library, stored_cols=config.tile_n, num_wgs=1,
      interpret=interpret, result=_partial_sums(problem, config),
  )
  k_steps = tiles.cdiv(tiles.cdiv(problem.k, config.tile_k), config.splits)
  if config.strided:
    prepared = dataclasses.replace(call.prepared, **{
        name: _Strided(**vars(operand), splits=config.splits, k_steps=k_steps)
        for name, operand in (
            ("lhs_operand", call.prepared.lhs_operand),
            ("rhs_operand", call.prepared.rhs_operand),
        )
    })
    call = dataclasses.replace(call, prepared=prepared)
  partials = persistent.run(
      call, problem, library, name=NAME, num_sms=num_sms, k_steps=k_steps,
      copies=config.splits,
      operand_origin=lambda split: (jnp.int32(0), split * k_steps * config.tile_k),
  )
  return jnp.sum(partials, axis=0, keepdims=True).astype(problem.out_dtype)
