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
elements of rows and columns. Kernels of `halves_pass` make the parts where they can.

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

from pallas_kernels import halves_of, halves_pass, padding
from pallas_kernels.halves_of import ENDLESS, LOSES, SMALL
from pallas_kernels.problem import Problem


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


def split(
    lhs: jax.Array, rhs: jax.Array, problem: Problem, *, by_kernels: bool = False
) -> Halves:
  """The parts of two operands [batch, ., .] float32, stored as the problem says.

  `by_kernels`: where kernels for a Hopper GPU serve them.
  """
  lhs_k = 2 if problem.lhs_layout == "k-major" else 1
  rhs_k = 1 if problem.rhs_layout == "n-major" else 2
  parts, factors, (of_lhs, of_rhs) = zip(
      *(_split(x, axis, by_kernels) for x, axis in ((lhs, lhs_k), (rhs, rhs_k))),
      strict=True,
  )
  harmful = (of_lhs >= LOSES) & (of_rhs >= SMALL) | (of_lhs >= SMALL) & (of_rhs >= LOSES)
  endless = (of_lhs == ENDLESS) | (of_rhs == ENDLESS)
  return Halves(*parts, *factors, ~(harmful | endless))


def guarded(
    lhs: jax.Array, rhs: jax.Array, problem: Problem, *, by_kernels: bool,
    multiply: Callable[[Halves], jax.Array], otherwise: Callable[[], jax.Array],
) -> jax.Array:
  """The product of float16 parts where no bits are lost that count, else `otherwise`.
  """
  found = split(lhs, rhs, problem, by_kernels=by_kernels)
  return lax.cond(found.exact, lambda: multiply(found), otherwise)


def _split(x: jax.Array, axis: int, by_kernels: bool):
  """Of one operand: parts, factors, and its largest mark.

  The parts, and they alone, are padded to a stride that TMA takes.
  """
  mn = x.shape[3 - axis]
  padded = padding.mend_stride(x, jnp.float16)
  along_cols = axis == 2
  if by_kernels and padded is x and halves_pass.serves(x.shape, along_cols):
    if along_cols:
      parts, factors, marks = halves_pass.by_rows(x)
    else:
      parts, factors, marks = halves_pass.by_cols(x, halves_of.largest_of(x, axis))
    return parts, factors, jnp.max(marks)
  largest = halves_of.largest_of(padded, axis)
  high, low, marks = halves_of.parts(
      padded, jnp.expand_dims(largest, axis), rounded=_rounded
  )
  factors = jnp.stack(halves_of.factors(largest[:, :mn]), axis=1)
  # Along the rows as they are stored, which can be done beside the parts.
  return (high, low), factors, jnp.max(jnp.max(marks, axis=2))


def _rounded(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """x rounded to float16, subnormal numbers among them, and the same in float32.

  XLA may drop a conversion to float16 and back, and reduce_precision knows no
  subnormal numbers. Those are multiples of 2**-24.
  """
  normal = lax.reduce_precision(x, exponent_bits=5, mantissa_bits=10)
  whole = lax.round(x * 2.0**24, lax.RoundingMethod.TO_NEAREST_EVEN)
  found = jnp.where(jnp.abs(x) < 2.0**-14, whole * 2.0**-24, normal)
  return found.astype(jnp.float16), found
