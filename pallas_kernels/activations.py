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

gelu is formed as x * sigmoid(2 * ...), which is the same and needs no tanh; gelu_exact
of a polynomial, as registers have no erf.

A kernel spends its time on exp and the division, which the special function units only
approximate. Where the result has 16 bits, a few units in the last place of float32 do not
show: there the units do alone.

Source: Hendrycks, Gimpel, "Gaussian error linear units" (2016); So et al., "Primer"
(2021), for squared_relu.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import math

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import compat
from pallas_kernels.problem import NONE, Activation

_Function = Callable[[jax.Array], jax.Array]

# erfc(z) = exp(-z**2) * t * P(t) with t = 1 / (1 + z / 2), for z >= 0: P by its
# coefficients, least squares weighted anew until no relative error exceeds 4.3e-8.
_ERFC = (
    0.2820876775, 0.282353465, 0.2432611481, 0.2020692748, -0.02517636082, 0.2759762374,
    -0.4853820321, 0.2837011574, -0.05889060942,
)


def _approximate_reciprocal(x):
  """1 / x of wgmma's registers: one instruction, where a division takes ten."""
  shape = plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=plgpu.Layout.WGMMA)

  @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=shape)
  def reciprocal(_, x):
    return compat.by_instruction(x, "rcp.approx.ftz.f32")

  return reciprocal(x)


def _cdf(x, reciprocal: _Function):
  """The normal distribution's, of a polynomial."""
  z = jnp.abs(x) * math.sqrt(0.5)
  t = reciprocal(1.0 + 0.5 * z)
  total = jnp.full_like(t, _ERFC[-1])
  for coefficient in _ERFC[-2::-1]:
    total = total * t + coefficient
  tail = 0.5 * jnp.exp(-z * z) * t * total
  return jnp.where(x < 0.0, tail, 1.0 - tail)


@dataclasses.dataclass(frozen=True)
class Arithmetic:
  """How the sigmoid and the normal distribution are formed."""

  sigmoid: _Function
  cdf: _Function


ARRAYS = Arithmetic(lax.logistic, lambda x: 0.5 * lax.erfc(-x * math.sqrt(0.5)))
REGISTERS = Arithmetic(lax.logistic, lambda x: _cdf(x, lambda t: 1.0 / t))
APPROXIMATE = Arithmetic(
    lambda x: _approximate_reciprocal(1.0 + jnp.exp(-x)),
    lambda x: _cdf(x, _approximate_reciprocal),
)


def _relu(x):
  return jnp.where(x <= 0.0, 0.0, x)  # The slope at 0 is 0; nan stays nan.


_GELU = 2.0 * math.sqrt(2.0 / math.pi), 0.044715


def _gelu(x, by: Arithmetic):
  scale, cubic = _GELU
  return x * by.sigmoid(x * (scale + scale * cubic * (x * x)))


def _gelu_slope(x, by: Arithmetic):
  scale, cubic = _GELU
  y = by.sigmoid(x * (scale + scale * cubic * (x * x)))
  return y + x * (y * (1.0 - y)) * (scale + 3.0 * scale * cubic * (x * x))


def _sigmoid_slope(x, by: Arithmetic):
  y = by.sigmoid(x)
  return y * (1.0 - y)


def _silu_slope(x, by: Arithmetic):
  y = by.sigmoid(x)
  return y + x * (y * (1.0 - y))


def _tanh_slope(x, _):
  y = jnp.tanh(x)
  return 1.0 - y * y


def _gelu_exact_slope(x, by: Arithmetic):
  return by.cdf(x) + x * (jnp.exp(-0.5 * (x * x)) * math.sqrt(0.5 / math.pi))


_Table = dict[str, Callable[[jax.Array, Arithmetic], jax.Array]]
_FUNCTIONS: _Table = {
    NONE: lambda x, _: x,
    "relu": lambda x, _: _relu(x),
    "squared_relu": lambda x, _: _relu(x) * _relu(x),
    "sigmoid": lambda x, by: by.sigmoid(x),
    "silu": lambda x, by: x * by.sigmoid(x),
    "tanh": lambda x, _: jnp.tanh(x),
    "gelu": _gelu,
    "gelu_exact": lambda x, by: x * by.cdf(x),
}
_SLOPES: _Table = {
    NONE: lambda x, _: jnp.ones_like(x),
    "relu": lambda x, _: jnp.where(x <= 0.0, 0.0, 1.0),
    "squared_relu": lambda x, _: 2.0 * _relu(x),
    "sigmoid": _sigmoid_slope,
    "silu": _silu_slope,
    "tanh": _tanh_slope,
    "gelu": _gelu_slope,
    "gelu_exact": _gelu_exact_slope,
}
NAMES = tuple(name for name in _FUNCTIONS if name != NONE)


def check(activation: Activation) -> str | None:
  """Why this is no activation, or None."""
  if callable(activation) or activation in _FUNCTIONS:
    return None
  return f"activation {activation!r} is neither a callable nor one of {', '.join(NAMES)}"


def in_registers(
    activation: Activation, out_itemsize: int, *, emulated: bool
) -> Arithmetic:
  """The arithmetic of a kernel; APPROXIMATE wants its approximate instructions."""
  known = activation in ("sigmoid", "silu", "gelu", "gelu_exact")
  return APPROXIMATE if known and out_itemsize == 2 and not emulated else REGISTERS


def apply(activation: Activation, x: jax.Array, by: Arithmetic = ARRAYS) -> jax.Array:
  """The activation of x, float32."""
  return activation(x) if callable(activation) else _FUNCTIONS[activation](x, by)


def slope(activation: Activation, x: jax.Array, by: Arithmetic = ARRAYS) -> jax.Array:
  """The derivative of the activation at x, float32."""
  if callable(activation):
    return jax.jvp(activation, (x,), (jnp.ones_like(x),))[1]
  return _SLOPES[activation](x, by)


def slopes(
    activation: Activation, entering: Sequence[jax.Array], by: Arithmetic = ARRAYS
) -> list[jax.Array]:
  """The derivatives of activation(z), or gated of activation(z0) * z1, by each z."""
  found = slope(activation, entering[0], by)
  if len(entering) == 1:
    return [found]
  return [found * entering[1], apply(activation, entering[0], by)]
