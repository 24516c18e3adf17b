"""Layers: products with bias, activation and residual in one kernel.

The kernel adds the bias to its float32 sums, applies the activation and adds the
residual before it rounds and stores: none of these is a pass of its own. A gated layer's
two products are of one kernel that reads x once. Derivatives save what enters the
activation, which the same kernel stores beside the result, or compute it again: see
`jaxgemm.fused`.
"""

from __future__ import annotations

from collections.abc import Hashable
import functools
import re
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend import core
import jax.numpy as jnp

from jaxgemm import normed
from jaxgemm.arguments import (
  as_array,
  as_factor,
  at_least_float32,
  check_broadcasts,
  check_real,
  times,
)
from jaxgemm.contraction import contract, named_kernel, product_of
from jaxgemm.dims import Axes
from jaxgemm.lowering import along_columns
from jaxgemm.passed_by import norm_and_rows
from jaxgemm.product import Product
from jaxgemm.rms_norm import RMSNorm
from pallas_kernels import activations
from pallas_kernels.configs import Config
from pallas_kernels.problem import NONE, OUT_DTYPES, Activation

SAVES = ("preactivation", "nothing")
# Primitives of which an element depends on others, or on its place, and whose result has
# the shape of an operand all the same.
_BY_PLACE = re.compile(
    "rev$|sort|iota|cum|dot_general|conv_|fft|scatter|gather|dynamic_|random|threefry"
)
PACKED = ("concatenated", "interleaved")  # Two weights in one array.


def linear(
    x, w, bias=None, *, norm: RMSNorm | None = None, activation: Activation | None = None,
    residual=None, scale=1, precision=None, preferred_element_type=None,
    transposed: bool = False, save: str = "preactivation", returns_x: bool = False,
    implementation: str | None = None, config: Config | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
  """Returns activation(scale * norm(x) @ w + bias) + residual, rounded once.

  But of few rows of x and weights in 8 bits, which the caller converts just before, as by
  `w.astype(x.dtype)`, scale * x @ w is rounded to the dtype of the result first: the
  kernels that convert such weights compute nothing behind the product.

  Args:
    x: [*batch, k].
    w: [k, n], or [n, k] if `transposed`.
    bias: None, or [n].
    norm: None, or what normalises the rows of x first: of up to 64 rows of bfloat16 the
      kernel itself, where that is faster than a pass. Its weights then multiply x, which
      is rounded, and the rest of it the sums.
    activation: None, "relu", "squared_relu", "sigmoid", "silu", "tanh", "gelu" (the
      tanh form), "gelu_exact", or a function of float32 arrays, element by element, of
      operations that a kernel has (jnp.where, jnp.exp, ...): the same object each time,
      as another one is compiled anew.
    residual: None, or an array that broadcasts to [*batch, n].
    scale: factor of the product. A Python number is part of the kernel; an array, which
      may be traced and differentiated, multiplies x before the product.
    precision: as for jnp.matmul; `jaxgemm.precision` says what each one computes.
    preferred_element_type: dtype of the result; that of x @ w, if not given.
    transposed: whether w is stored [n, k], as in Equinox and PyTorch.
    save: what the forward pass keeps for derivatives: "preactivation", or "nothing", for
      which the product is computed again.
    returns_x: of a layer with a norm, whether to return x, too: for the residual of a
      later layer, in x's own place. What both have to do with x's gradient is one pass
      then, not two.
    implementation, config: as for jaxgemm.matmul.
  Returns: [*batch, n]; if `returns_x` that and x.
  Raises:
    TypeError: k differs between x and w, or bias is not [n]; the message names the
      shapes.
    ValueError: x is a scalar, w no matrix, the activation or `save` unknown, the residual
      does not broadcast, `returns_x` without a norm, or the named kernel cannot serve.
  Examples:
    h = jaxgemm.linear(x, w1, b1, activation="gelu")
    y = jaxgemm.linear(h, w2, b2, residual=x)

    qkv, x = jaxgemm.linear(x, w_qkv, norm=norm, returns_x=True)
    x = jaxgemm.linear(attention(qkv), w_out, residual=x)
  """
  w = as_array("linear", "w", w)
  return _layer(
      "linear", x, norm, {"w": w}, {"bias": bias}, activation, residual, scale, precision,
      preferred_element_type, transposed, save, returns_x, implementation, config,
  )


def gated_linear(
    x, w_gate, w_up=None, *, norm: RMSNorm | None = None, bias_gate=None, bias_up=None,
    activation: Activation | None = "silu", residual=None, scale=1, precision=None,
    preferred_element_type=None, transposed: bool = False, packed: str = "concatenated",
    save: str = "preactivation", returns_x: bool = False,
    implementation: str | None = None, config: Config | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
  """Returns activation(scale * x @ w_gate + bias_gate) * (scale * x @ w_up + bias_up).

  SwiGLU with "silu", GEGLU with "gelu", GLU with "sigmoid". Both products are formed at
  once, from each tile of x.

  Args:
    x: [*batch, k].
    w_gate, w_up: [k, n] each, or [n, k] if `transposed`. Or w_gate alone, both in one
      array [k, 2 * n] (or [2 * n, k]), as `packed` says. Concatenated ones are read where
      they are, interleaved ones and those of derivatives are cut out first.
    bias_gate, bias_up: None, or [n]; both or none.
    residual: None, or an array that broadcasts to [*batch, n]; added at last.
    packed: "concatenated", the gate's columns first, or "interleaved", columns of the
      two alternating.
    norm, activation, scale, precision, preferred_element_type, transposed, save,
      returns_x, implementation, config: as for jaxgemm.linear.
  Returns: [*batch, n]; if `returns_x` that and x.
  Raises:
    TypeError: the shapes of x, the weights or the biases do not fit; the message names
      them.
    ValueError: as jaxgemm.linear; or `packed` is unknown, or one bias is missing.
  Example: h = jaxgemm.gated_linear(x, params["gate"], params["up"])
  Source: Shazeer, "GLU variants improve transformer" (2020).
  """
  w_gate = as_array("gated_linear", "w_gate", w_gate)
  if packed not in PACKED:
    raise ValueError(
        f"gated_linear: packed={packed!r} must be one of {', '.join(PACKED)}"
    )
  if w_up is None:
    weights = _packed(w_gate, packed, 0 if transposed else 1)
  else:
    w_up = as_array("gated_linear", "w_up", w_up)
    if w_gate.shape != w_up.shape:
      raise TypeError(
          f"gated_linear: w_gate has shape {w_gate.shape} and w_up {w_up.shape}; they"
          " must be the same"
      )
    weights = {"w_gate": w_gate, "w_up": w_up}
  if (bias_gate is None) != (bias_up is None):
    raise ValueError("gated_linear: bias_gate and bias_up are given both or not at all")
  return _layer(
      "gated_linear", x, norm, weights, {"bias_gate": bias_gate, "bias_up": bias_up},
      activation, residual, scale, precision, preferred_element_type, transposed, save,
      returns_x, implementation, config,
  )


def _packed(w, packed: str, axis: int) -> dict[str, jax.Array]:
  """The weights of a gated layer from one array: it, or two of interleaved ones."""
  _check_packed("gated_linear", w, axis)
  if packed == "concatenated":
    return {"w_gate": w}
  return {
      name: lax.slice_in_dim(w, i, None, 2, axis)
      for i, name in enumerate(("w_gate", "w_up"))
  }


def _check_packed(name: str, w, axis: int) -> None:
  if w.ndim != 2 or w.shape[axis] % 2:
    raise TypeError(
        f"{name}: w_gate has shape {w.shape}; without w_up it must be a matrix"
        f" whose dimension {axis} holds two"
    )


def _layer(
    name: str, x, norm: RMSNorm | None, weights: dict[str, jax.Array],
    biases: dict[str, jax.Array | None], activation, residual, scale, precision,
    preferred_element_type, transposed: bool, save: str, returns_x: bool, implementation,
    config,
) -> jax.Array | tuple[jax.Array, jax.Array]:
  """The result of a layer, maybe with x; see `make_layer`."""
  x = passing = as_array(name, "x", x)
  if norm is None and returns_x:
    raise ValueError(f"{name}: returns_x is for layers with a norm")
  # A kernel has the derivatives of both, unless the layer is to be XLA's.
  together = returns_x and implementation != "xla"
  normalise = norm_and_rows if together else lambda norm, x: (norm(x), x)
  if norm is not None:
    check_norm(name, norm, x)
    if not isinstance(as_factor(name, "scale", scale), float):  # Of normalised rows.
      x, passing = normalise(norm, x)
      norm = None
  x, scale = scaled(name, x, scale)
  layer = make_layer(
      name, x, weights, biases, activation, residual, scale, precision,
      preferred_element_type, transposed, save, implementation, config,
  )
  axes, others = layer_axes(x.ndim, transposed), [*layer.elements, *layer.biases]
  within = norm is not None and kernel_normalises(norm, x, layer)
  if norm is not None and not within:
    rows, passing = normalise(norm, x)
    layer = layer._replace(x=rows.astype(layer.x.dtype))
  if within:
    out = normed.normed(norm, x, layer.factors, others, axes[1], layer.product)
  elif layer.by_xla:
    out = _by_xla(layer, transposed, precision)
  else:
    out = contract(
        name, layer.x, layer.factors[0], axes, layer.product,
        others=[*layer.factors[1:], *others],
    )
  return (out, passing) if returns_x else out


def kernel_normalises(norm: RMSNorm, x: jax.Array, layer: Layer) -> bool:
  """Whether a kernel may normalise x for the layer, which takes it in its own dtype."""
  same = layer.x.dtype == x.dtype and not layer.by_xla
  return same and normed.serves(norm, x, layer.product)


def check_norm(name: str, norm: RMSNorm, x: jax.Array) -> None:
  """Raises where it is none, or does not fit x."""
  if not isinstance(norm, RMSNorm):
    raise TypeError(f"{name}: norm is a {type(norm).__name__}, and no jaxgemm.RMSNorm")
  norm.checked(name, x)


class Layer(NamedTuple):
  """A layer's operands, checked and in their dtypes, and what is computed of them.

  Attributes:
    x, factors, elements, biases: x, each weight, the residual if there is one, each bias.
    product: of linear_p or gemm_p, its dims yet unknown.
    shape: of the result.
    by_xla: whether no kernel serves these dtypes.
  """

  x: Any
  factors: list[jax.Array]
  elements: list[jax.Array]
  biases: list[jax.Array]
  product: Product
  shape: tuple[int, ...]
  by_xla: bool


def make_layer(
    name: str, x, weights: dict[str, jax.Array], biases: dict[str, jax.Array | None],
    activation, residual, scale: float, precision, preferred_element_type,
    transposed: bool, save: str, implementation, config,
) -> Layer:
  """One bias: linear; two: gated, whose weights are two or one array.

  `x` is an array, or the type of one that is still to be computed.

  Raises: as jaxgemm.linear.
  """
  gated = len(biases) == 2
  packed = gated and len(weights) == 1
  for key, w in weights.items():
    n = columns(name, x, key, w, transposed)
    if packed:
      _check_packed(name, w, 0 if transposed else 1)
      n //= 2
  activation = NONE if activation is None else activation
  if not isinstance(activation, Hashable):
    raise ValueError(f"{name}: activation {activation!r} does not hash")
  try:
    _check_activation(activation)
  except ValueError as error:
    raise ValueError(f"{name}: {error}") from None
  if save not in SAVES:
    raise ValueError(f"{name}: save={save!r} must be one of {', '.join(SAVES)}")
  given = [as_bias(name, key, b, n) for key, b in biases.items() if b is not None]
  dtype = jnp.result_type(x, *weights.values())
  factors = [lax.convert_element_type(w, dtype) for w in weights.values()]
  if isinstance(x, jax.ShapeDtypeStruct):
    x = x.update(dtype=dtype)
  else:
    x = lax.convert_element_type(x, dtype)
  shape = (*x.shape[:-1], n)
  if residual is not None:
    residual = as_array(name, "residual", residual)
    check_broadcasts(name, "residual", residual, "the result", shape)
    residual = jnp.broadcast_to(residual, shape)
  implementation = named_kernel(implementation, config)
  product, reason = product_of(
      dtype, dtype, precision, preferred_element_type, implementation, config
  )
  for key, v in {"residual": residual, **biases}.items():
    if v is not None:
      check_real(name, key, v, "the result", product.out_dtype)
  by_xla = bool(reason) or dtype.itemsize == 1
  if by_xla and product.batch_invariant:
    raise ValueError(f"batch_invariant: {name} of {dtype.name} is XLA's, which is not")
  if by_xla and implementation not in (None, "xla"):
    reason = reason or f"layers of {dtype.name} operands are XLA's"
    raise ValueError(f"implementation {implementation!r} cannot serve: {reason}")
  product = product.replace(
      alpha=scale, beta=0.0 if residual is None else 1.0, has_bias=bool(given),
      activation=activation, gated=gated, packed=packed, recomputes=save == "nothing",
  )
  elements = [] if residual is None else [residual]
  if not by_xla:
    elements, given = ([_real(v) for v in group] for group in (elements, given))
  return Layer(x, factors, elements, given, product, shape, by_xla)


def _real(x) -> jax.Array:
  """x in a dtype that epilogues read."""
  return x if x.dtype.name in OUT_DTYPES else lax.convert_element_type(x, jnp.float32)


def columns(name: str, x: jax.Array, key: str, w: jax.Array, transposed: bool) -> int:
  """Columns of the weight `key`; raises where it does not fit x."""
  shapes = f"x has shape {x.shape} and {key} {w.shape}"
  if not x.ndim or w.ndim != 2:
    raise ValueError(f"{name}: {shapes}; {key} must be a matrix, and x no scalar")
  k, n = w.shape[::-1] if transposed else w.shape
  if x.shape[-1] != k:
    raise TypeError(f"{name}: {shapes}; the last dimension of x must be k={k}")
  return n


def as_bias(name: str, key: str, bias, n: int) -> jax.Array:
  """The bias `key` as an array [n]; raises where it is none."""
  bias = as_array(name, key, bias)
  if bias.shape != (n,):
    raise TypeError(f"{name}: {key} has shape {bias.shape}, and w has n={n} columns")
  return bias


def scaled(name: str, x: jax.Array, scale) -> tuple[jax.Array, float]:
  """x and the factor of the product: an array multiplies x."""
  scale = as_factor(name, "scale", scale)
  if isinstance(scale, float):
    return x, scale
  check_real(name, "scale", scale, "x", x.dtype)
  check_broadcasts(name, "scale", scale, "x with one column", (*x.shape[:-1], 1))
  dtype = x.dtype
  if not jnp.issubdtype(dtype, jnp.inexact):  # As jnp has it of a product of both.
    dtype = jnp.result_type(x, scale)
  return (x * scale).astype(dtype), 1.0


@functools.lru_cache(maxsize=256)  # Of what is right: errors are not kept.
def _check_activation(activation: Activation) -> None:
  """Raises ValueError if it is none, for a trace of the product would not say why."""
  if (reason := activations.check(activation)) is not None:
    raise ValueError(reason)
  if isinstance(activation, str):
    return
  called = f"activation {activation!r} of a float32 array"
  x = jax.ShapeDtypeStruct((2, 3), jnp.float32)
  try:
    traced, out = jax.make_jaxpr(activation, return_shape=True)(x)
  except Exception as error:  # Whatever a function of the caller's raises.
    reason = f"{called} raises {type(error).__name__}: {error}"
    raise ValueError(reason) from error
  is_array = isinstance(out, jax.ShapeDtypeStruct) and out.shape == x.shape
  if not is_array or not jnp.issubdtype(out.dtype, jnp.floating):
    raise ValueError(
        f"{called} [2, 3] gives {out}: it must be floating point, element by element"
    )
  if (where := _beyond_elements(traced, x.shape)) is not None:
    raise ValueError(
        f"{called} [2, 3] is not computed element by element: it has {where}"
    )
  if any(isinstance(value, jax.core.Tracer) for value in traced.consts):
    raise ValueError(
        f"activation {activation!r} closes over a traced value, by which it would have"
        " no derivative: multiply x by it, or apply the activation to the result"
    )


def _beyond_elements(traced: core.ClosedJaxpr, shape: tuple[int, ...]) -> str | None:
  """What makes an element depend on others, or on its place; None if nothing does."""
  known = (), shape
  if shapes := list(filter(None, map(jnp.shape, traced.consts))):
    return f"an array of shape {shapes[0]}"
  pending = [traced.jaxpr]
  while pending:
    for eqn in pending.pop().eqns:
      inner = list(core.jaxprs_in_params(eqn.params))
      pending += inner
      inside, outside = (
          [getattr(x.aval, "shape", ()) for x in each]
          for each in (eqn.invars, eqn.outvars)
      )
      sums = shape in inside and () in outside and not inner
      if sums or {*inside, *outside} - {*known} or _BY_PLACE.match(eqn.primitive.name):
        return eqn.primitive.name
  return None


def layer_axes(rank: int, transposed: bool) -> tuple[Axes, Axes, Axes]:
  rows = tuple(f"m{i}" for i in range(rank - 1))
  return (*rows, "k"), ("n", "k") if transposed else ("k", "n"), (*rows, "n")


def _by_xla(layer: Layer, transposed: bool, precision) -> jax.Array:
  """What no kernel serves: in the dtype of the result, or float32 if that is wider.

  Integers stay integers, where neither scale nor activation make something else of them.
  """
  product, factors = layer.product, layer.factors
  if transposed:
    factors = [w.T for w in factors]
  if product.packed:
    factors = jnp.split(factors[0], 2, 1)
  out_dtype = jnp.dtype(product.out_dtype)
  wide = out_dtype
  exact = product.activation == NONE and float(product.alpha).is_integer()
  if not (exact and jnp.issubdtype(out_dtype, jnp.integer)):
    wide = at_least_float32(out_dtype)
  entering = []
  for i, w in enumerate(factors):
    z = jnp.matmul(layer.x, w, precision=precision, preferred_element_type=wide)
    z = times(product.alpha, z)
    if layer.biases:
      z += along_columns(layer.biases[i].astype(wide), z.shape)
    entering.append(z)
  out = activations.apply(product.activation, entering[0])
  if product.gated:
    out = out * entering[1]
  for residual in layer.elements:
    out = out + residual.astype(wide)
  return out.astype(out_dtype)
