"""float32 operands as two float16 parts each: half the products of bfloat16 parts.

Every row of lhs and every column of rhs is divided by a power of two that brings its
largest element to [2**14, 2**15); then

  x = high + 2**-11 * low       (both rounded to nearest; off by 2**-23 of x at most, or
                                 by 2**-36 where that is more)

and the product is that of high high, high low and low high, times the powers of two.
low low, which is left out, is 2**-22 of the product at most, 2**-24 on average: a sum
of a hundred terms in float32 is rounded as much. Half the products of `parts` give it.

float16 spans 2**29 with all its bits, float32 2**277. An element of less than 2**-28 of
the largest of its row has fewer bits. That does no harm where the other operand has no
small elements or zeros in that column: then the largest of the row outweighs it. Where
both operands may do harm, or an element is not finite, `guarded` computes the product
from bfloat16 parts after all. It decides on the device, from the smallest and largest
elements of rows and columns.

  error      of a sum: 2**-20 of the sum of its terms' magnitudes at most, before that is
             rounded as a float32 sum is
  overflow, subnormal, inf, nan   as in float32

Source: Ootomo, Yokota, "Recovering single precision accuracy from Tensor Cores" (2022);
the scaling and the guard are ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import operand_tiles
from pallas_kernels.problem import Problem

TOP = 14  # The largest element of a row becomes 2**TOP, or up to twice that.
RANGE = 2.0**-28  # Of the largest: what float16 holds with nearly all its bits.
_SMALL, _LOSES = np.int32(1), np.int32(2)  # What some elements of a row are or do.
_INF = np.int32(0x7F800000)


class Halves(NamedTuple):
  """Operands as float16 parts, and the factors of their product.

  Attributes:
    lhs, rhs: two parts each, as the problem stores the operands.
    row_scales, col_scales: [batch, 2, m] and [batch, 2, n]; see `scales`.
    exact: a scalar, whether no bits are lost that count.
  """

  lhs: tuple[jax.Array, jax.Array]
  rhs: tuple[jax.Array, jax.Array]
  row_scales: jax.Array
  col_scales: jax.Array
  exact: jax.Array


def split(lhs: jax.Array, rhs: jax.Array, problem: Problem) -> Halves:
  """The parts of two operands [batch, ., .] float32, stored as the problem says."""
  lhs_k = 2 if problem.lhs_layout == "k-major" else 1
  rhs_k = 1 if problem.rhs_layout == "n-major" else 2
  parts, factors, loses, ranges, finite = zip(
      *(_split(x, axis) for x, axis in ((lhs, lhs_k), (rhs, rhs_k))),
      strict=True,
  )
  harmful = (loses[0] & ranges[1]) | (ranges[0] & loses[1])
  return Halves(*parts, *factors, finite[0] & finite[1] & ~harmful)


def guarded(
    lhs: jax.Array, rhs: jax.Array, problem: Problem, *,
    multiply: Callable[[Halves], jax.Array], otherwise: Callable[[], jax.Array],
) -> jax.Array:
  """The product of float16 parts where no bits are lost that count, else `otherwise`.
  """
  found = split(lhs, rhs, problem)
  return lax.cond(found.exact, lambda: multiply(found), otherwise)


def _split(x: jax.Array, axis: int):
  """Of one operand: parts, factors, whether some elements lose bits, whether some are
  small or zero, and whether all are finite.

  The parts, and they alone, are padded to a stride that TMA takes.
  """
  mn = x.shape[3 - axis]
  x = operand_tiles.mend_stride(x, jnp.float16)
  # Bits have the order of what they stand for, nan the largest.
  bits, largest = _bits(jnp.abs(x)), _bits(jnp.max(jnp.abs(x), axis=axis))
  # Of normal numbers: the exponent. Less than 2**-111 is not brought to 2**TOP, but
  # then it has no more bits than its parts.
  shift = jnp.clip((largest >> 23) - (127 + TOP), -125, 113)
  scaled = x * jnp.expand_dims(_power_of_two(-shift), axis)
  high = _to_float16_and_back(scaled)
  low = (scaled - high) * 2.0**11
  half = shift >> 1
  factors = jnp.stack([_power_of_two(half), _power_of_two(shift - half)], axis=1)
  # Summed up along the rows as they are stored, which can be done beside the parts.
  small = bits < jnp.expand_dims(_bits(_float(largest) * RANGE), axis)
  found = jnp.where(small, jnp.where(bits > 0, _LOSES | _SMALL, _SMALL), 0)
  found = lax.reduce(found, np.int32(0), lax.bitwise_or, (2,))
  return (
      (high.astype(jnp.float16), low.astype(jnp.float16)), factors[..., :mn],
      jnp.any(found & _LOSES > 0), jnp.any(found > 0), jnp.all(largest < _INF),
  )


def _bits(x: jax.Array) -> jax.Array:
  return lax.bitcast_convert_type(x, jnp.int32)


def _float(bits: jax.Array) -> jax.Array:
  return lax.bitcast_convert_type(bits, jnp.float32)


def _power_of_two(exponent: jax.Array) -> jax.Array:
  """2.0**exponent, of exponents in [-126, 127]."""
  return _float((exponent + 127) << 23)


def _to_float16_and_back(x: jax.Array) -> jax.Array:
  """x rounded to float16, subnormal numbers among them.

  XLA may drop a conversion to float16 and back, and reduce_precision knows no
  subnormal numbers. Those are multiples of 2**-24.
  """
  normal = lax.reduce_precision(x, exponent_bits=5, mantissa_bits=10)
  whole = lax.round(x * 2.0**24, lax.RoundingMethod.TO_NEAREST_EVEN)
  return jnp.where(jnp.abs(x) < 2.0**-14, whole * 2.0**-24, normal)
