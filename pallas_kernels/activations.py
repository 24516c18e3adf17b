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
from one). Functions that it calls, with derivatives of their own or not, are looked into,
and some operations that Mosaic lacks are formed of others: see `_in_kernel`.

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
from jax.extend.core import ClosedJaxpr, Literal
import jax.numpy as jnp

from pallas_kernels import compat, tiles
from pallas_kernels.problem import NONE, Activation

_Function = Callable[[jax.Array], jax.Array]
_CALLS = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call")

# erfc(z) = exp(-z**2) * t * P(t) with t = 1 / (1 + z / 2), for z >= 0: P by its
# coefficients, least squares weighted anew until no relative error exceeds 4.3e-8.
_ERFC = (
    0.2820876775, 0.282353465, 0.2432611481, 0.2020692748, -0.02517636082, 0.2759762374,
    -0.4853820321, 0.2837011574, -0.05889060942,
)


def _approximate_reciprocal(x):
  """1 / x of wgmma's registers, or of a row: one instruction, where a division takes ten.
  """
  layout = plgpu.Layout.WGMMA if x.ndim == 2 else tiles.row_layout(x.size)
  shape = plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=layout)

  @plgpu.inline_mgpu(arg_types=(layout,), return_type=shape)
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
  """How the sigmoid and the normal distribution are formed.

  Attributes:
    sigmoid: of x, given `unit` * x.
    cdf: the normal distribution's.
    unit: which the constants of a polynomial hold, so that it costs no instruction.
  """

  sigmoid: _Function
  cdf: _Function
  unit: float = 1.0


ARRAYS = Arithmetic(lax.logistic, lambda x: 0.5 * lax.erfc(-x * math.sqrt(0.5)))
REGISTERS = Arithmetic(lax.logistic, lambda x: _cdf(x, lambda t: 1.0 / t))
APPROXIMATE = Arithmetic(
    lambda x: _approximate_reciprocal(1.0 + lax.exp2(x)),
    lambda x: _cdf(x, _approximate_reciprocal),
    unit=-math.log2(math.e),
)


def _relu(x):
  return jnp.where(x <= 0.0, 0.0, x)  # The slope at 0 is 0; nan stays nan.


_GELU = 2.0 * math.sqrt(2.0 / math.pi), 0.044715


def _sigmoid(x, by: Arithmetic):
  return by.sigmoid(by.unit * x)


def _gelu_sigmoid(x, by: Arithmetic):
  scale, cubic = _GELU
  scale *= by.unit
  return by.sigmoid(x * (scale + scale * cubic * (x * x)))


def _gelu(x, by: Arithmetic):
  return x * _gelu_sigmoid(x, by)


def _gelu_slope(x, by: Arithmetic):
  scale, cubic = _GELU
  y = _gelu_sigmoid(x, by)
  return y + x * _rise(y) * (scale + 3.0 * scale * cubic * (x * x))


def _rise(y):
  """The slope of a sigmoid that is y, in one instruction: 0 where it has ended."""
  return y - y * y


def _sigmoid_slope(x, by: Arithmetic):
  return _rise(_sigmoid(x, by))


def _silu_slope(x, by: Arithmetic):
  y = _sigmoid(x, by)
  return y + x * _rise(y)


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
    "sigmoid": _sigmoid,
    "silu": lambda x, by: x * _sigmoid(x, by),
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
  if callable(activation):
    return activation(x) if by is ARRAYS else _in_kernel(activation, x)
  return _FUNCTIONS[activation](x, by)


def slope(activation: Activation, x: jax.Array, by: Arithmetic = ARRAYS) -> jax.Array:
  """The derivative of the activation at x, float32."""
  if callable(activation):
    derivative = lambda x: jax.jvp(activation, (x,), (jnp.ones_like(x),))[1]
    return derivative(x) if by is ARRAYS else _in_kernel(derivative, x)
  return _SLOPES[activation](x, by)


def _in_kernel(function: _Function, x: jax.Array) -> jax.Array:
  """function(x), by its operations one by one.

  Mosaic lowers neither calls of functions that have derivatives of their own (relu of
  jax.nn) nor the sum with which JAX adds up tangents, nor the others of `_REPLACED`.
  """
  traced = jax.make_jaxpr(function)(jax.ShapeDtypeStruct(x.shape, x.dtype))
  (out,) = _evaluated(traced, x)
  return out


def _log1p(x, **_):
  """Twice the series of atanh(x / (2 + x)), where log(1 + x) would lose bits."""
  z = x / (2.0 + x)
  total = jnp.full_like(z, 1.0 / 11.0)
  for odd in (9, 7, 5, 3, 1):
    total = total * (z * z) + 1.0 / odd
  return jnp.where(jnp.abs(x) < 0.5, 2.0 * z * total, jnp.log(1.0 + x))


def _erfc(x, **_):
  return 2.0 * REGISTERS.cdf(-x * math.sqrt(2.0))


def _integer_pow(x, *, y: int):
  if y > 1:
    return lax.integer_pow(x, y)
  return 1.0 / _integer_pow(x, y=-y) if y < 0 else x if y else jnp.ones_like(x)


def _polynomial(x, *coefficients, **_):
  """Of JAX 0.12; the constant comes first."""
  total = coefficients[-1]
  for coefficient in coefficients[-2::-1]:
    total = total * x + coefficient
  return total


# What Mosaic does not lower, by what it does.
_REPLACED: dict[str, Callable[..., jax.Array]] = {
    "add_any": lax.add,
    "copy": lambda x: x,
    "log1p": _log1p,
    "expm1": lambda x, **_: jnp.tanh(0.5 * x) * (jnp.exp(x) + 1.0),
    "erfc": _erfc,
    "erf": lambda x, **_: 1.0 - _erfc(x),
    "exp": lambda x, **_: lax.exp(x),  # However exact it should be.
    "integer_pow": _integer_pow,
    "polynomial": _polynomial,
    "sign": lambda x: jnp.where(x > 0.0, 1.0, jnp.where(x < 0.0, -1.0, x)),
}


def _evaluated(traced: ClosedJaxpr, *args) -> list[jax.Array]:
  jaxpr, values = traced.jaxpr, {}
  values |= zip(jaxpr.constvars, traced.consts, strict=True)
  values |= zip(jaxpr.invars, args, strict=True)

  def value(variable):
    return variable.val if isinstance(variable, Literal) else values[variable]

  for equation in jaxpr.eqns:
    inputs = map(value, equation.invars)
    name = equation.primitive.name
    inner = [p for p in equation.params.values() if isinstance(p, ClosedJaxpr)]
    if len(inner) == 1 and name in _CALLS:
      found = _evaluated(inner[0], *inputs)
    elif name in _REPLACED:
      found = [_REPLACED[name](*inputs, **equation.params)]
    else:
      found = equation.primitive.bind(*inputs, **equation.params)
      found = found if equation.primitive.multiple_results else [found]
    values |= zip(equation.outvars, found, strict=True)
  return list(map(value, jaxpr.outvars))


def slopes(
    activation: Activation, entering: Sequence[jax.Array], by: Arithmetic = ARRAYS
) -> list[jax.Array]:
  """The derivatives of activation(z), or gated of activation(z0) * z1, by each z."""
  found = slope(activation, entering[0], by)
  if len(entering) == 1:
    return [found]
  return [found * entering[1], apply(activation, entering[0], by)]
