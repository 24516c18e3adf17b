"""float32 products as sums of products of bfloat16 parts.

Each operand is split into parts of 8 significant bits, most significant first:

  x = high + 2**-8 * mid + 2**-16 * low      (exactly, for every finite float32)

The parts are truncated, so they have the sign of x. mid and low are stored scaled, so
that their exponents are those of x: nothing underflows, down to the least subnormal.
The product is the sum of some of the products of parts, grouped by scale:

  algorithm  products of parts (lhs, rhs)                              relative error
  bf16_x3    high high | high mid, mid near                            2**-16
  bf16_x6    high high | high mid, mid high | high low, mid mid, low high    2**-21
  bf16_x9    as bf16_x6 | mid low, low mid | low low                   none

(of one product of two elements; the sum over k is rounded as float32 sums are.) "near"
is x rounded to the nearest bfloat16: with it one product stands for mid high + mid mid.

The tensor cores truncate where they add. So each group is summed up on its own, the
smallest first, for `promote` k tiles, and then added to ordinary float32 sums.

  inf, nan   as in float32: a part that would be zero, of an x that is not, is a tiny
             number instead, and all parts of inf are inf. Only where 0 < |x| < 2**-93
             may inf * x come out as nan.
  overflow   products of more than the largest float32 are inf, as in float32
  subnormal  operands count; results are rounded to them

Source: Henry, Tang, Heinecke, "Leveraging the bfloat16 artificial intelligence datatype
for higher-precision computations" (2019); Ootomo, Yokota, "Recovering single precision
accuracy from Tensor Cores" (2022), for the sums outside the tensor cores.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
from jax import lax
import jax.numpy as jnp

from pallas_kernels.problem import PersistentConfig, Problem

HIGH, MID, LOW = 0, 1, 2
NEAR = 2  # The third part of the rhs of bf16_x3.
MAX_STEPS = 16  # Of a round: the producer looks them up in 32 bits.
_TINY = 2.0**-32  # Of the part before: stands for a zero part of what is not zero.


@dataclasses.dataclass(frozen=True)
class Scheme:
  """Which products of parts are added up.

  Attributes:
    lhs_parts, rhs_parts: parts of each operand.
    groups: (scale, pairs of parts), the smallest scale first.
    near: whether the last part of rhs is NEAR, and MID is rounded to nearest.
  """

  lhs_parts: int
  rhs_parts: int
  groups: tuple[tuple[float, tuple[tuple[int, int], ...]], ...]
  near: bool = False

  @property
  def num_products(self) -> int:
    return sum(len(pairs) for _, pairs in self.groups)


_X6 = (
    (2.0**-16, ((HIGH, LOW), (MID, MID), (LOW, HIGH))),
    (2.0**-8, ((HIGH, MID), (MID, HIGH))),
    (1.0, ((HIGH, HIGH),)),
)
SCHEMES = {
    "bf16_x3": Scheme(
        2, 3, ((2.0**-8, ((HIGH, MID), (MID, NEAR))), (1.0, ((HIGH, HIGH),))), near=True
    ),
    "bf16_x6": Scheme(3, 3, _X6),
    "bf16_x9": Scheme(
        3, 3, ((2.0**-32, ((LOW, LOW),)), (2.0**-24, ((MID, LOW), (LOW, MID))), *_X6)
    ),
}


@dataclasses.dataclass(frozen=True)
class Round:
  """The steps after which the sums leave the tensor cores, and how they do.

  Attributes:
    k_tiles: that a round covers.
    steps: (k tile of the round, part of lhs, part of rhs), in their order.
    groups: (steps, scale): what to multiply their sum by.
  """

  k_tiles: int
  steps: tuple[tuple[int, int, int], ...]
  groups: tuple[tuple[int, float], ...]

  def num_steps(self, k_tiles: int) -> int:
    """Steps of that many k tiles; the last round may go beyond them."""
    return -(-k_tiles // self.k_tiles) * len(self.steps)


def is_split(problem: Problem) -> bool:
  """Whether the operands are multiplied in parts."""
  return problem.algorithm in SCHEMES


@functools.lru_cache(maxsize=1024)
def product(problem: Problem) -> Problem:
  """What the tensor cores multiply: the problem, or that of its parts."""
  if not is_split(problem):
    return problem
  return dataclasses.replace(problem, dtype="bfloat16", algorithm="bf16_f32")


def round_of(problem: Problem, config: PersistentConfig) -> Round | None:
  """The round of a problem in parts, or None."""
  return _round(problem.algorithm, config.promote) if is_split(problem) else None


@functools.lru_cache(maxsize=64)
def _round(algorithm: str, k_tiles: int) -> Round:
  steps, groups = [], []
  for scale, pairs in SCHEMES[algorithm].groups:
    found = [(k_tile, *pair) for k_tile in range(k_tiles) for pair in pairs]
    steps += found
    groups.append((len(found), scale))
  return Round(k_tiles, tuple(steps), tuple(groups))


def check(problem: Problem, config: PersistentConfig) -> str | None:
  """Why the sums of parts cannot leave the tensor cores as the config says, or None."""
  if not is_split(problem):
    return None
  num_products = SCHEMES[problem.algorithm].num_products
  most = MAX_STEPS // num_products
  if not 1 <= config.promote <= most:
    return (
        f"promote={config.promote}: {problem.algorithm} takes 1 to {most} k tiles of"
        f" {num_products} products"
    )
  if not config.pad:
    return f"pad=False: parts of {problem.algorithm} are padded as they are made"
  return None


def split(
    lhs: jax.Array, rhs: jax.Array, problem: Problem
) -> tuple[jax.Array, jax.Array]:
  """The parts of float32 operands [batch, ., .], each [batch * parts, ., .] bfloat16."""
  scheme = SCHEMES[problem.algorithm]
  return (
      _split(lhs, scheme.lhs_parts, scheme.near),
      _split(rhs, scheme.rhs_parts, scheme.near),
  )


def _split(x: jax.Array, num_parts: int, near: bool) -> jax.Array:
  high = _truncated(x)
  rest = (x - high) * 256.0
  mid = _nearest(rest) if near else _truncated(rest)
  found = [high, _never_zero(mid, high)]
  if num_parts == 3:
    if near:
      nearest = _nearest(x)
      found.append(jnp.where(jnp.isfinite(nearest), nearest, high))
    else:
      found.append(_never_zero((rest - mid) * 256.0, found[1]))
  finite = jnp.isfinite(x)
  parts = [jnp.where(finite, part, x).astype(jnp.bfloat16) for part in found]
  return jnp.stack(parts, axis=1).reshape(-1, *x.shape[1:])


def _truncated(x: jax.Array) -> jax.Array:
  """x cut off after 8 significant bits: never rounded up, least of all to inf."""
  bits = lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFF0000)
  return lax.bitcast_convert_type(bits, jnp.float32)


def _nearest(x: jax.Array) -> jax.Array:
  """x rounded to 8 bits; XLA may drop a conversion to bfloat16 and back."""
  return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def _never_zero(part: jax.Array, before: jax.Array) -> jax.Array:
  return jnp.where(part == 0.0, before * _TINY, part)
