"""The rules of linear_p, a product with bias and activation, and of its tangent.

  linear_p    activation(alpha * lhs @ rhs + bias) + beta * c, and, if it saves, what
              enters the activation
  tangent_p   slope * (alpha * lhs_dot @ rhs + alpha * lhs @ rhs_dot + bias_dot)

tangent_p is linear in the tangents, all of them at once. So its transposition is the
backward pass of a layer, and can compute together what the gradients have in common:
the cotangent times the slope. The slope is that of what entered the activation, which
the forward pass has saved, or which is computed again (`Product.recomputes`).

Derivatives of all orders and both modes follow: tangent_p is differentiated by the
products and element-wise operations that it stands for.
"""

from __future__ import annotations

import functools

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
import jax.numpy as jnp

from jaxgemm.checkpoint_policies import name_product
from jaxgemm.lowering import epilogue
from jaxgemm.primitive import bind as bind  # Which is whole with the rules below.
from jaxgemm.primitive import gemm_p, gradient, linear_p, result_type, scaled
from jaxgemm.product import Product
from pallas_kernels import activations
from pallas_kernels.problem import NONE

tangent_p = Primitive("jaxgemm_linear_tangent")
# Operands of tangent_p: lhs, rhs, what the slope is known by, and the tangents of those
# of (lhs, rhs, bias) that have one, which `moving` says.
Moving = tuple[bool, bool, bool]


# -- linear_p ----------------------------------------------------------------------


# Without it: "Abstract evaluation for 'jaxgemm_linear' not implemented".
def _abstract_eval(lhs, rhs, *others, product: Product):
  aval = result_type(lhs, rhs, product)
  c, bias = product.named(others)
  if c is not None and c.shape != aval.shape:
    raise TypeError(f"the residual has shape {c.shape}, the product {aval.shape}")
  cols = aval.shape[len(aval.shape) - product.dims.n :]
  if bias is not None and bias.shape != cols:
    raise TypeError(f"bias has shape {bias.shape}, and the product columns {cols}")
  return [aval] * (1 + product.saves)


def unfused(lhs, rhs, *others, product: Product) -> list[jax.Array]:
  """The results of linear_p by operations that have rules of their own."""
  linear = product.linear.replace(alpha=1.0, out_dtype="float32")
  return epilogue(product, gemm_p.bind(lhs, rhs, product=linear), *others)


# Without it: "Differentiation rule for 'jaxgemm_linear' not implemented".
def _jvp(primals, tangents, *, product: Product):
  lhs, rhs, *others = primals
  _, bias = product.named(others)
  c_dot, bias_dot = product.named(tangents[2:])
  known = product.activation == NONE or product.recomputes
  saving = product.replace(saves=not known or product.saves)
  found = linear_p.bind(*primals, product=saving)
  has_batch = bool(product.dims.b)
  found = [name_product(x, has_batch=has_batch) for x in found]
  moving = tuple(_moves(x) for x in (tangents[0], tangents[1], bias_dot))
  dots = [x for x in (tangents[0], tangents[1], bias_dot) if _moves(x)]

  def tangent(product: Product):
    if not dots:
      return ad.Zero.from_primal_value(found[0])
    slope_of = _slope_of(product, found, bias)
    return tangent_p.bind(lhs, rhs, *slope_of, *dots, product=product, moving=moving)

  out_dot = tangent(product)
  if _moves(c_dot):
    c_dot = scaled(c_dot, product.beta, product.out_dtype)
    out_dot = ad.add_tangents(out_dot, c_dot)
  if not product.saves:
    return found[:1], [out_dot]
  return found, [out_dot, tangent(product.replace(activation=NONE))]


def _slope_of(product: Product, found, bias) -> tuple[jax.Array, ...]:
  """What the slope is known by, beside lhs and rhs."""
  if product.activation == NONE:
    return ()
  if not product.recomputes:
    return (found[1],)
  return () if bias is None else (bias,)


def _moves(x) -> bool:
  return x is not None and type(x) is not ad.Zero


# Without it: "Batching rule for 'jaxgemm_linear' not implemented".
def _batch(operands, axes, *, product: Product):
  """A batch of lhs (and c) joins the rows; with any other the product is not fused."""
  lhs, rhs, *others = operands
  lhs_axis, rhs_axis, *other_axes = axes
  c, bias = product.named(others)
  c_axis, bias_axis = product.named(other_axes)
  dims = product.dims
  foldable = not dims.b and dims.lhs.endswith("mk")
  if lhs_axis is None or rhs_axis is not None or bias_axis is not None or not foldable:
    function = functools.partial(unfused, product=product)
    return jax.vmap(function, axes)(*operands), [0] * (1 + product.saves)
  size = lhs.shape[lhs_axis]
  operands = [jnp.moveaxis(lhs, lhs_axis, 0), rhs]
  if c is not None:
    operands.append(
        lax.broadcast(c, (size,)) if c_axis is None else jnp.moveaxis(c, c_axis, 0)
    )
  if bias is not None:
    operands.append(bias)
  sharding = product.out_sharding
  if sharding is not None:
    first = jax.typeof(operands[0]).sharding.spec[0]
    spec = jax.sharding.PartitionSpec(first, *sharding.spec)
    sharding = sharding.update(spec=spec)
  product = product.replace(
      dims=type(dims)(dims.lhs, dims.rhs, dims.b, dims.m + 1, dims.n, dims.k),
      out_sharding=sharding,
  )
  return bind(*operands, product=product), [0] * (1 + product.saves)


# -- tangent_p ---------------------------------------------------------------------


def _num_known(product: Product) -> int:
  """Operands of tangent_p before the tangents."""
  if product.activation == NONE or (product.recomputes and not product.has_bias):
    return 2
  return 3


def _entering(lhs, rhs, slope_of, product: Product):
  """What enters the activation, in float32."""
  if product.recomputes:
    again = product.linear.replace(has_bias=product.has_bias, out_dtype="float32")
    found = bind(lhs, rhs, *slope_of, product=again)
    return found[0] if again.is_fused else found
  return lax.convert_element_type(slope_of[0], jnp.float32)


def _tangent(lhs, rhs, *rest, product: Product, moving: Moving):
  """What tangent_p computes, by operations that have rules of their own."""
  num_known = _num_known(product) - 2
  slope_of, dots = rest[:num_known], iter(rest[num_known:])
  linear = product.linear.replace(out_dtype="float32")
  terms = []
  if moving[0]:
    terms.append(gemm_p.bind(next(dots), rhs, product=linear))
  if moving[1]:
    terms.append(gemm_p.bind(lhs, next(dots), product=linear))
  if moving[2]:
    bias_dot = lax.convert_element_type(next(dots), jnp.float32)
    shape = result_type(jax.typeof(lhs), jax.typeof(rhs), linear).shape
    terms.append(jnp.broadcast_to(bias_dot, shape))
  out = functools.reduce(ad.add_jaxvals, terms)
  if product.activation != NONE:
    entering = _entering(lhs, rhs, slope_of, product)
    out = out * activations.slope(product.activation, entering)
  return lax.convert_element_type(out, jnp.dtype(product.out_dtype))


def _tangent_impl(*operands, product: Product, moving: Moving):
  with jax.disable_jit(False):
    return _jitted_tangent(product, moving)(*operands)


@functools.lru_cache(maxsize=4096)
def _jitted_tangent(product: Product, moving: Moving):
  return jax.jit(functools.partial(_tangent, product=product, moving=moving))


def _tangent_abstract_eval(lhs, rhs, *rest, product: Product, moving: Moving):
  return result_type(lhs, rhs, product)


def _tangent_jvp(primals, tangents, *, product: Product, moving: Moving):
  tangents = tuple(ad.instantiate_zeros(x) for x in tangents)
  function = functools.partial(_tangent, product=product, moving=moving)
  return jax.jvp(function, tuple(primals), tangents)


# Without it: "Transpose rule (for reverse-mode differentiation) for
# 'jaxgemm_linear_tangent' not implemented".
def _tangent_transpose(ct, lhs, rhs, *rest, product: Product, moving: Moving):
  """The backward pass: the gradients of lhs, rhs and bias, of one slope."""
  num_known = _num_known(product)
  undefined = rest[num_known - 2 :]
  if type(ct) is ad.Zero:
    return [None] * num_known + [ad.Zero(x.aval.to_ct_aval()) for x in undefined]
  if product.activation != NONE:
    entering = _entering(lhs, rhs, rest[: num_known - 2], product)
    slope = activations.slope(product.activation, entering)
    ct = (lax.convert_element_type(ct, jnp.float32) * slope).astype(ct.dtype)
  avals, grads = iter(x.aval for x in undefined), []
  for index, other in enumerate((rhs, lhs)):
    if moving[index]:
      grads.append(gradient(ct, other, next(avals), index, product.linear))
  if moving[2]:
    aval = next(avals)
    rows = tuple(range(ct.ndim - aval.ndim))
    total = jnp.sum(ct, rows, dtype=jnp.float32)
    grads.append(lax.convert_element_type(total, aval.dtype))
  return [None] * num_known + grads


def _tangent_batch(operands, axes, *, product: Product, moving: Moving):
  function = functools.partial(_tangent, product=product, moving=moving)
  return jax.vmap(function, axes)(*operands), 0


# -- Registrations -----------------------------------------------------------------

linear_p.def_abstract_eval(_abstract_eval)
ad.primitive_jvps[linear_p] = _jvp
batching.primitive_batchers[linear_p] = _batch

tangent_p.def_impl(_tangent_impl)
tangent_p.def_abstract_eval(_tangent_abstract_eval)
mlir.register_lowering(tangent_p, mlir.lower_fun(_tangent, multiple_results=False))
ad.primitive_jvps[tangent_p] = _tangent_jvp
ad.primitive_transposes[tangent_p] = _tangent_transpose
batching.primitive_batchers[tangent_p] = _tangent_batch
