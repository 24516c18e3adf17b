"""Activations of fused products: functions of float32, of arrays and of registers.

  name           formula
  relu           max(x, 0)
  squared_relu   max(x, 0)**2
  sigmoid        1 / (1 + exp(-x))
  silu           x * sigmoid(x)
  tanh           tanh(x)
  gelu           x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))
  gelu_exact     x / 2 * (1 + erf(x / sqrt(2)))

A callable takes its place in the table's: of float32 to float32, element by element,
and of operations that a kernel has (those of jax.numpy and lax that compute one element
from one).

gelu is formed as x * sigmoid(2 * ...), which is the same and needs no tanh.

Source: Hendrycks, Gimpel, "Gaussian error linear units" (2016); So et al., "Primer"
(2021), for squared_relu.
"""

from __future__ import annotations

from collections.abc import Callable
import math

import jax
from jax import lax
import jax.numpy as jnp

from pallas_kernels.problem import NONE, Activation


def _relu(x):
  return jnp.where(x <= 0.0, 0.0, x)  # The slope at 0 is 0; nan stays nan.


def _squared_relu(x):
  positive = _relu(x)
  return positive * positive


def _silu(x):
  return x * lax.logistic(x)


def _gelu(x):
  inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * (x * x * x))
  return x * lax.logistic(2.0 * inner)


def _gelu_exact(x):
  return 0.5 * x * (1.0 + lax.erf(x * math.sqrt(0.5)))


_FUNCTIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    NONE: lambda x: x,
    "relu": _relu,
    "squared_relu": _squared_relu,
    "sigmoid": lax.logistic,
    "silu": _silu,
    "tanh": jnp.tanh,
    "gelu": _gelu,
    "gelu_exact": _gelu_exact,
}
NAMES = tuple(name for name in _FUNCTIONS if name != NONE)


def check(activation: Activation) -> str | None:
  """Why this is no activation, or None."""
  if callable(activation) or activation in _FUNCTIONS:
    return None
  return f"activation {activation!r} is neither a callable nor one of {', '.join(NAMES)}"


def apply(activation: Activation, x: jax.Array) -> jax.Array:
  """The activation of x, float32."""
  return (activation if callable(activation) else _FUNCTIONS[activation])(x)


def slope(activation: Activation, x: jax.Array) -> jax.Array:
  """The derivative of the activation at x, float32."""
  function = lambda x: apply(activation, x)
  return jax.jvp(function, (x,), (jnp.ones_like(x),))[1]
