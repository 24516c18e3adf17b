"""What `halves` makes of elements, in XLA's passes and in kernels alike.

Everything is elementwise: `largest` is the magnitude of the largest element of the row
or column that x lies in, a number or an array that broadcasts against x.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

TOP = 14  # The largest element of a row becomes 2**TOP, or up to twice that.
RANGE = 2.0**-28  # Of the largest: what float16 holds with nearly all its bits.
# Marks, the larger including the smaller: an element is small or zero, loses bits, is
# inf or nan.
SMALL, LOSES, ENDLESS = np.int32(1), np.int32(2), np.int32(3)
_INF = np.int32(0x7F800000)


class Parts(NamedTuple):
  """Parts of elements, float16, and marks, int32."""

  high: Any
  low: Any
  marks: Any


def magnitude(x):
  """The bits of |x|: they have the order of what they stand for, nan the largest."""
  return _bits(jnp.abs(x))


def largest_of(x: jax.Array, axis: int) -> jax.Array:
  """The magnitude of the largest element along an axis.

  As a maximum of numbers: XLA takes three times as long for one of integers.
  """
  return _bits(jnp.max(jnp.abs(x), axis=axis))


def parts(x, largest, *, rounded: Callable[[Any], tuple[Any, Any]]) -> Parts:
  """The parts of x; `rounded(x)` is x in float16, and the same in float32."""
  scaled = x * _power_of_two(-_shift(largest))
  high, as_float32 = rounded(scaled)
  low = ((scaled - as_float32) * 2.0**11).astype(jnp.float16)
  bits = magnitude(x)
  small = bits < _bits(_float(largest) * RANGE)
  marks = jnp.where(small, jnp.where(bits > 0, LOSES, SMALL), 0)
  return Parts(high, low, jnp.where(largest < _INF, marks, ENDLESS))


def factors(largest) -> tuple[Any, Any]:
  """Two powers of two whose product is what `parts` divides by; one may be too large."""
  shift = _shift(largest)
  half = shift >> 1
  return _power_of_two(half), _power_of_two(shift - half)


def _shift(largest):
  """The exponent of what elements are divided by.

  Less than 2**-111 is not brought to 2**TOP, but then it has no more bits than its parts.
  """
  # Of normal numbers: the exponent.
  return jnp.clip((largest >> 23) - (127 + TOP), -125, 113)


def _bits(x) -> jax.Array:
  return lax.bitcast_convert_type(x, jnp.int32)


def _float(bits) -> jax.Array:
  return lax.bitcast_convert_type(bits, jnp.float32)


def _power_of_two(exponent) -> jax.Array:
  """2.0**exponent, of exponents in [-126, 127]."""
  return _float((exponent + 127) << 23)
