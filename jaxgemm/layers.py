"""linear: a layer's product with bias, activation and residual in one kernel.

The kernel adds the bias to its float32 sums, applies the activation and adds the
residual before it rounds and stores: none of these is a pass of its own. Derivatives
save what enters the activation, which the same kernel stores beside the result, or
compute it again: see `jaxgemm.fused`.
"""

from __future__ import annotations

import jax
from jax import lax
import jax.numpy as jnp

from jaxgemm import plan as plans
from jaxgemm.api import as_array, contract, product_of, static_factor
from jaxgemm.dims import Axes
from pallas_kernels import activations
from pallas_kernels.problem import NONE, OUT_DTYPES, Activation, Config

SAVES = ("preactivation", "nothing")


def linear(
    x, w, bias=None, *, activation: Activation | None = None, residual=None, scale=1,
    precision=None, preferred_element_type=None, transposed: bool = False,
    save: str = "preactivation", implementation: str | None = None,
    config: Config | None = None,
) -> jax.Array:
  """Returns activation(scale * x @ w + bias) + residual, rounded once.

  Args:
    x: [*batch, k].
    w: [k, n], or [n, k] if `transposed`.
    bias: None, or [n].
    activation: None, "relu", "squared_relu", "sigmoid", "silu", "tanh", "gelu" (the
      tanh form), "gelu_exact", or a function of float32 arrays, element by element, of
      operations that a kernel has (jnp.where, jnp.exp, ...).
    residual: None, or an array that broadcasts to [*batch, n].
    scale: factor of the product. A Python number is part of the kernel; an array, which
      may be traced and differentiated, multiplies x before the product.
    precision: as for jnp.matmul; `jaxgemm.precision` says what each one computes.
    preferred_element_type: dtype of the result; that of x @ w, if not given.
    transposed: whether w is stored [n, k], as in Equinox and PyTorch.
    save: what the forward pass keeps for derivatives: "preactivation", or "nothing", for
      which the product is computed again.
    implementation, config: as for jaxgemm.matmul.
  Returns: [*batch, n].
  Raises:
    TypeError: k differs between x and w, or bias is not [n]; the message names the
      shapes.
    ValueError: x is a scalar, w no matrix, the activation or `save` unknown, the residual
      does not broadcast, or the named kernel cannot serve.
  Example:
    h = jaxgemm.linear(x, w1, b1, activation="gelu")
    y = jaxgemm.linear(h, w2, b2, residual=x)
  """
  x, w = as_array("linear", x), as_array("linear", w)
  shapes = f"x has shape {x.shape} and w {w.shape}"
  if not x.ndim or w.ndim != 2:
    raise ValueError(f"linear: {shapes}; w must be a matrix, and x no scalar")
  k, n = w.shape[::-1] if transposed else w.shape
  if x.shape[-1] != k:
    raise TypeError(f"linear: {shapes}; the last dimension of x must be k={k}")
  activation = NONE if activation is None else activation
  if (reason := activations.check(activation)) is not None:
    raise ValueError(f"linear: {reason}")
  if save not in SAVES:
    raise ValueError(f"linear: save={save!r} must be one of {', '.join(SAVES)}")
  if bias is not None:
    bias = as_array("linear", bias)
    if bias.shape != (n,):
      raise TypeError(f"linear: bias has shape {bias.shape}, and w has n={n} columns")
  scale = static_factor(scale)
  if not isinstance(scale, float):
    x, scale = (x * scale).astype(x.dtype), 1.0
  dtype = jnp.result_type(x, w)
  x, w = lax.convert_element_type(x, dtype), lax.convert_element_type(w, dtype)
  shape = (*x.shape[:-1], n)
  if residual is not None:
    residual = as_array("linear", residual)
    try:
      residual = jnp.broadcast_to(residual, shape)
    except ValueError:
      raise ValueError(
          f"linear: residual has shape {residual.shape}, which does not broadcast to the"
          f" result's {shape}"
      ) from None
  product, reason = product_of(
      dtype, dtype, precision, preferred_element_type,
      plans.check_implementation(implementation, config), config,
  )
  if reason or dtype.itemsize == 1:
    if implementation not in (None, "xla"):
      raise ValueError(f"implementation {implementation!r} cannot serve: {reason}")
    return _by_xla(x, w.T if transposed else w, bias, residual, activation, scale,
                   precision, jnp.dtype(product.out_dtype))
  product = product.replace(
      alpha=scale, beta=0.0 if residual is None else 1.0, has_bias=bias is not None,
      activation=activation, recomputes=save == "nothing",
  )
  others = [
      v if v.dtype.name in OUT_DTYPES else lax.convert_element_type(v, jnp.float32)
      for v in (residual, bias) if v is not None
  ]
  return contract("linear", x, w, _axes(x.ndim, transposed), product, others=others)


def _axes(rank: int, transposed: bool) -> tuple[Axes, Axes, Axes]:
  rows = tuple(f"m{i}" for i in range(rank - 1))
  return (*rows, "k"), ("n", "k") if transposed else ("k", "n"), (*rows, "n")


def _by_xla(x, w, bias, residual, activation, scale, precision, out_dtype):
  """What no kernel serves: in the dtype of the result, or float32 if that is wider."""
  wide = jnp.promote_types(out_dtype, jnp.float32)
  out = jnp.matmul(x, w, precision=precision, preferred_element_type=wide) * scale
  if bias is not None:
    out = out + bias.astype(wide)
  out = activations.apply(activation, out)
  if residual is not None:
    out = out + residual.astype(wide)
  return out.astype(out_dtype)
