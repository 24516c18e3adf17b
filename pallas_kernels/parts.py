"""float32 products as sums of products of bfloat16 parts.

Each operand is split into parts of 8 significant bits, each the nearest to what the
ones before it leave:

  x = high + 2**-8 * mid + 2**-16 * low      (exactly, for every finite float32)

mid and low are stored scaled, so that they are no larger than x and hardly smaller than
the bits that they hold: nothing underflows, down to the least subnormal. The product is
the sum of some of the products of parts, grouped by scale:

  algorithm  products of parts (lhs, rhs)                       error of one product
  bf16_x3    high high | high mid, mid high                                   2**-14
  bf16_x6    high high | high mid, mid high | high low, mid mid, low high     2**-23
  bf16_x9    as bf16_x6 | mid low, low mid | low low                          none

(The error is relative, and at most that; the sum over k is rounded as float32 sums are.)

The tensor cores truncate where they add. So each group is summed up on its own for one
k tile, and then added to ordinary float32 sums. Sums of bf16_x3 over a short k may stay
in the tensor cores: what they lose there is less than what the parts have lost.

  inf, nan   as in float32: what the smaller groups make of them is dropped, high high
             has them right
  overflow   sums beyond float32 are inf. Where the smaller groups alone overflow, they
             are dropped: sums of terms of more than 2**127 in all may be off by 2**-8
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

from pallas_kernels.configs import Config, PersistentConfig
from pallas_kernels.problem import Problem

HIGH, MID, LOW = 0, 1, 2


@dataclasses.dataclass(frozen=True)
class Group:
  """Products of parts of one scale: (part of lhs, part of rhs)."""

  scale: float
  pairs: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Parts:
  """What operands are split into, and which products of parts count.

  Attributes:
    dtype, algorithm: of the parts, and of their products.
    count: parts of each operand, or of rhs, where lhs has another number of them.
    groups: the products; the last group is that of high high.
    scaled: whether rows of lhs and columns of rhs are scaled first, so that all sums
      are finite (see `halves`).
    lhs_in_registers: whether lhs is split there, and comes whole.
    lost: the share of a sum over 64 products of high high that is given back for what
      the tensor cores' truncation takes away.
  """

  dtype: str
  algorithm: str
  count: int
  groups: tuple[Group, ...]
  scaled: bool = False
  lhs_in_registers: bool = False
  # Normal data lose 4.9e-8, uniform 6.6e-8, k of 64 to 8192, on an H200 (float16 parts,
  # whose products have more bits, 0.9e-7 and 1.8e-7). But a sum that lost nothing must
  # come through: less than half a unit in the last place, 2**-25.
  lost: float = 2.9e-8

  @property
  def num_products(self) -> int:
    """Products that the tensor cores form for one of the problem."""
    return sum(len(group.pairs) for group in self.groups)


_HIGH = Group(1.0, ((HIGH, HIGH),))
_MID = Group(2.0**-8, ((HIGH, MID), (MID, HIGH)))
_LOW = Group(2.0**-16, ((HIGH, LOW), (MID, MID), (LOW, HIGH)))
_REST = Group(2.0**-24, ((MID, LOW), (LOW, MID))), Group(2.0**-32, ((LOW, LOW),))
OF_ALGORITHM = {
    "bf16_x3": Parts("bfloat16", "bf16_f32", 2, (_MID, _HIGH)),
    "bf16_x6": Parts("bfloat16", "bf16_f32", 3, (_LOW, _MID, _HIGH)),
    "bf16_x9": Parts("bfloat16", "bf16_f32", 3, (*_REST[::-1], _LOW, _MID, _HIGH)),
}
SPLIT_LHS = dataclasses.replace(OF_ALGORITHM["bf16_x6"], lhs_in_registers=True)
HALVES = Parts(
    "float16", "f16_f32", 2, (Group(2.0**-11, _MID.pairs), _HIGH), scaled=True
)


def is_split(problem: Problem) -> bool:
  """Whether the operands are multiplied in parts."""
  return problem.algorithm in OF_ALGORITHM


def of(problem: Problem, config: Config | None = None) -> Parts | None:
  """The parts that the config has the operands split into, or None."""
  if getattr(config, "float16_parts", False):
    return HALVES
  if getattr(config, "split_lhs", False):
    return SPLIT_LHS
  return OF_ALGORITHM.get(problem.algorithm)


@functools.lru_cache(maxsize=1024)
def product(problem: Problem, float16_parts: bool = False) -> Problem:
  """What the tensor cores multiply: the problem, or that of its parts."""
  found = HALVES if float16_parts else of(problem)
  if found is None:
    return problem
  return dataclasses.replace(problem, dtype=found.dtype, algorithm=found.algorithm)


def check(problem: Problem, config: PersistentConfig) -> str | None:
  """Why the parts cannot be multiplied as the config says, or None."""
  if config.float16_parts and problem.algorithm != "bf16_x6":
    return f"float16_parts=True is a way of bf16_x6, not of {problem.algorithm}"
  if config.split_lhs:
    if problem.algorithm != "bf16_x6" or config.float16_parts:
      return "split_lhs=True is a way of bf16_x6, and not of float16 parts"
    if config.wg_dim != "m" or config.tile_m != 64 * config.consumers:
      return "split_lhs=True: each consumer splits 64 rows of the tile"
    if problem.epilogue.has_c and config.swap:
      return "split_lhs=True with swap=True excludes c"
  if config.float16_parts and config.swap:
    return "float16_parts=True excludes swap"
  if not is_split(problem):
    return None
  # Of 64 products of high high at most, as `lost` was measured.
  most = 2 if config.split_lhs else 1
  if config.promote > most or not config.promote and problem.algorithm != "bf16_x3":
    found = " or 2" if most > 1 else ""
    return f"promote={config.promote}: sums of {problem.algorithm} take 1{found}"
  if config.misaligned != "padded":
    return (
        f"misaligned={config.misaligned!r}: parts of {problem.algorithm} are padded as"
        " they are made"
    )
  return None


def split(x: jax.Array, count: int) -> tuple[jax.Array, ...]:
  """The `count` parts of x, float32, each of its shape and bfloat16.

  A part of what is not finite is 0, but for the highest.
  """
  found, rest = [], x
  for i in range(count):
    part = _nearest(rest)
    rest = (rest - part) * 256.0
    part = jnp.where(jnp.isfinite(x), part, 0.0 if i else x)
    found.append(part.astype(jnp.bfloat16))
  return tuple(found)


def split_registers(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Three parts of x in registers of a kernel: as `split`, but cut off, not rounded.

  They add up to x, too, in a third of the instructions. A smaller part is up to twice as
  large as `split`'s. What inf and nan leave of themselves makes nan of the smaller
  products, which are dropped then.
  """
  found, rest = [], x
  for _ in range(2):
    part = _cut_off(rest)
    rest = (rest - part) * 256.0
    found.append(part)
  return tuple(part.astype(jnp.bfloat16) for part in (*found, rest))


def _cut_off(x: jax.Array) -> jax.Array:
  """x with the upper 8 of its significant bits alone."""
  bits = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-65536)
  return lax.bitcast_convert_type(bits, jnp.float32)


def _nearest(x: jax.Array) -> jax.Array:
  """x rounded to 8 significant bits, or cut off where that would be inf.

  XLA may drop a conversion to bfloat16 and back: it calls that excess precision.
  """
  rounded = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
  return jnp.where(jnp.isfinite(rounded), rounded, _cut_off(x))
