"""Two layers, one behind the other, whose derivatives share a kernel.

What each computes forward is what `jaxgemm.linear` and `gated_linear` do. Backward, the
product that gives the cotangent of what is between them multiplies it by the slopes of
the activation before it stores it (see `fused.Tangent`): that cotangent itself is never
in memory, nor is there a pass between the products. Of two layers that do not know of
each other a pass reads it, and what entered the activation, and writes the one in the
other's place.
"""

from __future__ import annotations

import functools

import jax
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad

from jaxgemm import converted
from jaxgemm.arguments import as_array
from jaxgemm.dims import fold
from jaxgemm.fused import apart, bind, differentiated
from jaxgemm.layers import (
  Layer,
  check_norm,
  gated_linear,
  kernel_normalises,
  layer_axes,
  linear,
  make_layer,
)
from jaxgemm.passed_by import norm_and_rows
from jaxgemm.product import Product
from jaxgemm.rms_norm import RMSNorm
from jaxgemm.stored import as_stored
from pallas_kernels import compat
from pallas_kernels.problem import Activation

_Products = tuple[Product, Product]  # Of the two layers.


def mlp(
    x, w_up, w_down, bias_up=None, bias_down=None, *, norm: RMSNorm | None = None,
    activation: Activation | None = "gelu", residual=None, precision=None,
    preferred_element_type=None, transposed: bool = False,
) -> jax.Array:
  """Returns linear(linear(x, w_up, bias_up, activation), w_down, bias_down) + residual.

  Args:
    x: [*batch, k].
    w_up: [k, hidden], or [hidden, k] if `transposed`.
    w_down: [hidden, n], or [n, hidden].
    bias_up, bias_down: None, or [hidden] and [n].
    norm, activation, residual, precision, preferred_element_type: as for jaxgemm.linear;
      the last is the dtype of both layers' results.
    transposed: whether both weights are stored so.
  Returns: [*batch, n].
  Raises: as jaxgemm.linear.
  Example: y = jaxgemm.mlp(x, p["up"], p["down"], residual=x)
  """
  def one_by_one():
    hidden = linear(x, w_up, bias_up, norm=norm, activation=activation, **options)
    return linear(hidden, w_down, bias_down, residual=residual, **options)

  options = dict(
      precision=precision, preferred_element_type=preferred_element_type,
      transposed=transposed,
  )
  return _together(
      "mlp", x, norm, {"w_up": w_up}, {"bias_up": bias_up}, w_down, bias_down, activation,
      residual, one_by_one, **options,
  )


def gated_mlp(
    x, w_gate, w_up, w_down, *, norm: RMSNorm | None = None, bias_gate=None, bias_up=None,
    bias_down=None, activation: Activation | None = "silu", residual=None, precision=None,
    preferred_element_type=None, transposed: bool = False,
) -> jax.Array:
  """Returns linear(gated_linear(x, w_gate, w_up), w_down, bias_down) + residual.

  Args:
    x: [*batch, k].
    w_gate, w_up: [k, hidden] each, or [hidden, k] if `transposed`; or w_gate alone, both
      in one array, the gate's first, and w_up None.
    w_down: [hidden, n], or [n, hidden].
    bias_gate, bias_up, bias_down: None, or [hidden] and [n]; the first two both or none.
    norm, activation, residual, precision, preferred_element_type, transposed: as for
      jaxgemm.mlp.
  Returns: [*batch, n].
  Raises: as jaxgemm.gated_linear.
  Example: y = jaxgemm.gated_mlp(x, p["gate"], p["up"], p["down"], residual=x)
  """
  def one_by_one():
    hidden = gated_linear(
        x, w_gate, w_up, norm=norm, bias_gate=bias_gate, bias_up=bias_up,
        activation=activation, **options,
    )
    return linear(hidden, w_down, bias_down, residual=residual, **options)

  options = dict(
      precision=precision, preferred_element_type=preferred_element_type,
      transposed=transposed,
  )
  if (bias_gate is None) != (bias_up is None):
    raise ValueError("gated_mlp: bias_gate and bias_up are given both or not at all")
  weights = {"w_gate": w_gate} | ({} if w_up is None else {"w_up": w_up})
  return _together(
      "gated_mlp", x, norm, weights, {"bias_gate": bias_gate, "bias_up": bias_up}, w_down,
      bias_down, activation, residual, one_by_one, **options,
  )


def _together(
    name: str, x, norm, weights, biases, w_down, bias_down, activation, residual,
    otherwise, *, precision, preferred_element_type, transposed: bool,
) -> jax.Array:
  """The result of both layers; of `otherwise()`, where a kernel serves only one."""
  passes_by = residual is x
  x, w_down = as_array(name, "x", x), as_array(name, "w_down", w_down)
  if norm is not None:
    check_norm(name, norm, x)
  weights = {key: as_array(name, key, w) for key, w in weights.items()}
  if len({w.shape for w in weights.values()}) > 1:
    shapes = " and ".join(f"{key} {w.shape}" for key, w in weights.items())
    raise TypeError(f"{name}: the shapes of {shapes} must be the same")

  def layer(x, weights, biases, activation, residual) -> Layer:
    return make_layer(
        name, x, weights, biases, activation, residual, 1.0, precision,
        preferred_element_type, transposed, "preactivation", None, None,
    )

  up = layer(x, weights, biases, activation, None)
  hidden = jax.ShapeDtypeStruct(up.shape, up.product.out_dtype)
  if w_down.ndim == 2 and w_down.shape[int(transposed)] != hidden.shape[-1]:
    key, w = next(iter(weights.items()))
    raise TypeError(
        f"{name}: {key} has shape {w.shape}, for {hidden.shape[-1]} hidden, and w_down"
        f" {w_down.shape}: its {'last' if transposed else 'first'} dimension must be as"
        " many"
    )
  down = layer(hidden, {"w_down": w_down}, {"bias_down": bias_down}, None, residual)
  narrow = any(
      converted.stays_apart(each.product, each.x, each.factors, [each.x.ndim - 1])
      for each in (up, down)
  )
  few = norm is not None and kernel_normalises(norm, x, up)
  if narrow or few or up.by_xla or down.by_xla or down.x.dtype != hidden.dtype:
    return otherwise()
  if norm is not None:
    if passes_by and down.shape == x.shape:
      rows, passing = norm_and_rows(norm, x)
      down = down._replace(elements=[passing.astype(down.elements[0].dtype)])
    else:
      rows = norm(x)
    up = up._replace(x=rows.astype(up.x.dtype))
  up, up_product = _with_dims(up, transposed)
  down, down_product = _with_dims(down, transposed)
  operands = tuple(compat.vary_alike(
      up.x, *up.factors, *up.biases, *down.factors, *down.elements, *down.biases
  ))
  count = 1 + len(up.factors) + len(up.biases)
  return _both((up_product, down_product), operands[:count], operands[count:])


def _with_dims(layer: Layer, transposed: bool) -> tuple[Layer, Product]:
  """The layer, its weights as they are stored, and its product."""
  lhs, rhs, out = layer_axes(len(layer.shape), transposed)
  factors, rhs = as_stored(layer.factors, rhs)
  dims = fold(lhs, rhs, out, layer.x.shape, factors[0].shape).dims
  return layer._replace(factors=factors), layer.product.replace(dims=dims)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _both(products: _Products, up, down) -> jax.Array:
  """Of the operands of the one, and of the other behind its lhs."""
  return _result(products[1], _result(products[0], *up), *down)


def _result(product: Product, *operands) -> jax.Array:
  out = bind(*operands, product=product)
  return out[0] if product.is_fused else out


@functools.partial(_both.defjvp, symbolic_zeros=True)
def _jvp(products: _Products, primals, tangents):
  (up, down), (up_dots, down_dots) = primals, jax.tree.map(
      _zero, tangents, is_leaf=lambda x: isinstance(x, SymbolicZero)
  )
  product, up, up_dots = apart(products[0], up, up_dots)
  (hidden, *_), out_dot = differentiated(
      product, up, up_dots, behind=(products[1], down[0])
  )
  zero = ad.Zero(jax.typeof(hidden).to_tangent_aval())
  (out, *_), other_dot = differentiated(
      products[1], (hidden, *down), (zero, *down_dots)
  )
  return out, ad.instantiate_zeros(ad.add_tangents(out_dot, other_dot))


def _zero(tangent):
  return ad.Zero(tangent.aval) if isinstance(tangent, SymbolicZero) else tangent
