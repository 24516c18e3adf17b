"""The rules of linear_p, a product with bias and activation, and of its tangent.

  linear_p    activation(z) + beta * c         with z = alpha * lhs @ rhs + bias
              activation(z0) * z1 + beta * c   gated: z0 and z1 of two rhs and biases
              alpha * lhs @ rhs * slope(z)     the cotangent of a layer, if lhs is that
                                               of the one behind it
  tangent_p   sum over i of slope_i * (alpha * lhs_dot @ rhs_i + alpha * lhs @ rhs_dot_i
              + bias_dot_i), maybe times the weight of the layer behind

linear_p may have what enters the activation, z, as further results. tangent_p is linear
in the tangents, all of them at once. So its transposition is the backward pass of a
layer, and can compute together what the gradients have in common: the cotangent times
the slopes. Those are known by z, which the forward pass has saved, or which is computed
again (`Product.recomputes`). With the layer behind it in the same tangent_p, the product
that gives the cotangent multiplies it by the slopes itself, before it stores it.

Derivatives of all orders and both modes follow: tangent_p is differentiated by the
products and element-wise operations that it stands for.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxgemm.checkpoint_policies import name_product
from jaxgemm.cotangents import Pass, cotangents
from jaxgemm.gradients import gradients, serves
from jaxgemm.lowering import epilogue, halves
from jaxgemm.primitive import (
  as_sharded,
  explicit,
  gemm_p,
  gradient,
  linear_p,
  result_type,
  scaled,
)
from jaxgemm.primitive import bind as bind  # Which is whole with the rules below.
from jaxgemm.product import Product
from pallas_kernels import activations, compat
from pallas_kernels.problem import NONE

tangent_p = Primitive("jaxgemm_linear_tangent")


# -- linear_p ----------------------------------------------------------------------


# Without it: "Abstract evaluation for 'jaxgemm_linear' not implemented".
def _abstract_eval(*operands, product: Product):
  lhs, factors, c, biases, entering = product.named(operands)
  rhs = factors[0].update(shape=product.factor_shape(factors[0].shape))
  aval = result_type(lhs, rhs, product)
  if len(factors) > 1 and factors[1].shape != factors[0].shape:
    raise TypeError(f"the two rhs have shapes {factors[0].shape}, {factors[1].shape}")
  if c is not None and c.shape != aval.shape:
    raise TypeError(f"the residual has shape {c.shape}, the product {aval.shape}")
  cols = aval.shape[len(aval.shape) - product.dims.n :]
  for bias in biases:
    if bias.shape != cols:
      raise TypeError(f"bias has shape {bias.shape}, and the product columns {cols}")
  for x in entering:
    if x.shape != aval.shape:
      raise TypeError(f"slopes by what has shape {x.shape}, the product {aval.shape}")
  return [aval] * product.num_results


def unfused(*operands, product: Product) -> list[jax.Array]:
  """The results of linear_p by operations that have rules of their own."""
  product, operands = product.unpacked(operands, halves)
  lhs, factors, c, biases, entering = product.named(operands)
  linear = product.linear.replace(alpha=1.0, out_dtype="float32")
  products = [gemm_p.bind(lhs, rhs, product=linear) for rhs in factors]
  return epilogue(product, products, c, biases, entering)


# Without it: "Differentiation rule for 'jaxgemm_linear' not implemented".
def _jvp(primals, tangents, *, product: Product):
  if product.slopes:
    tangents = tuple(map(ad.instantiate_zeros, tangents))
    function = functools.partial(unfused, product=product)
    return jax.jvp(function, tuple(primals), tangents)
  product, primals, tangents = apart(product, primals, tangents)
  found, out_dot = differentiated(product, primals, tangents)
  if not product.saves:
    return found[:1], [out_dot]
  operands, dots = product.named(primals), product.named(tangents)
  others = [
      _entering_dot(product, operands, dots, i) for i in range(product.num_results - 1)
  ]
  return found, [out_dot, *others]


def apart(product: Product, primals, tangents):
  """The product of two rhs apart, which derivatives want, its operands and tangents."""
  _, tangents = product.unpacked(tangents, _halves_of_tangent)
  return *product.unpacked(primals, halves), tangents


def differentiated(
    product: Product, primals, tangents, *,
    behind: tuple[Product, jax.Array] | None = None,
):
  """The results of linear_p, with what its slopes depend on, and a tangent.

  That of the result; or of a product without c, with the one `behind` it and its rhs,
  the tangent of that one's result by its lhs.
  """
  operands, dots = product.named(primals), product.named(tangents)
  known = not _needs_entering(product) or product.recomputes
  saving = product.replace(saves=product.saves or not known)
  found = bind(*primals, product=saving)
  found = [
      name_product(x, has_batch=product.dims.has_batch)
      for x in (found if saving.is_fused else [found])
  ]
  moving = [dots.lhs, *dots.rhs, *dots.biases]
  if any(map(_moves, moving)):
    known_by = ()
    if _needs_entering(product):
      known_by = operands.biases if product.recomputes else found[1:]
    out_dot = Tangent.bind(product, operands, known_by, moving, behind=behind)
  else:
    aval = jax.typeof(found[0])
    if behind is not None:
      aval = result_type(aval, jax.typeof(behind[1]), behind[0])
    out_dot = ad.Zero(aval.to_tangent_aval())
  if dots.c is not None and _moves(dots.c):
    c_dot = as_sharded(dots.c, jax.typeof(found[0]))
    out_dot = ad.add_tangents(out_dot, scaled(c_dot, product.beta, product.out_dtype))
  return found, out_dot


def _halves_of_tangent(x, axis: int) -> list:
  if _moves(x):
    return halves(x, axis)
  half = jax.eval_shape(lambda x: halves(x, axis)[0], jax.typeof(x.instantiate()))
  return [ad.Zero(half)] * 2


def _entering_dot(product: Product, operands, dots, index: int):
  """The tangent of what enters the activation, of one rhs."""
  alone = product.replace(gated=False, activation=NONE)
  moving = [dots.lhs, dots.rhs[index], *dots.biases[index : index + 1]]
  if not any(map(_moves, moving)):
    aval = result_type(
        *map(jax.typeof, (operands.lhs, operands.rhs[index])), product
    )
    return ad.Zero(aval.to_tangent_aval())
  operands = operands._replace(rhs=operands.rhs[index : index + 1])
  return Tangent.bind(alone, operands, (), moving)


def _needs_entering(product: Product) -> bool:
  """Whether slopes depend on what enters the activation."""
  return product.gated or product.activation != NONE


def _moves(x) -> bool:
  return type(x) is not ad.Zero


# Without it: "Batching rule for 'jaxgemm_linear' not implemented".
def _batch(arrays, axes, *, product: Product):
  """A batch of lhs (and c) joins the rows; with any other the product is not fused."""
  operands, axis_of = product.named(arrays), product.named(axes)
  dims = product.dims
  foldable = not dims.b and dims.lhs.endswith("mk")
  others = {*axis_of.rhs, *axis_of.biases}
  if axis_of.lhs is None or others != {None} or not foldable:
    function = functools.partial(unfused, product=product)
    return jax.vmap(function, tuple(axes))(*arrays), [0] * product.num_results
  lhs = jnp.moveaxis(operands.lhs, axis_of.lhs, 0)
  c = [
      lax.broadcast(x, lhs.shape[:1]) if axis is None else jnp.moveaxis(x, axis, 0)
      for x, axis in zip(
          (operands.c, *operands.entering), (axis_of.c, *axis_of.entering), strict=True
      )
      if x is not None
  ]
  sharding = product.out_sharding
  if sharding is not None:
    spec = PartitionSpec(jax.typeof(lhs).sharding.spec[0], *sharding.spec)
    sharding = sharding.update(spec=spec)
  product = product.replace(
      dims=dataclasses.replace(dims, m=dims.m + 1), out_sharding=sharding
  )
  found = bind(lhs, *operands.rhs, *c, *operands.biases, product=product)
  return found, [0] * product.num_results


# -- tangent_p ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Tangent:
  """The parameters of tangent_p, and what its operands are.

  They are lhs, each rhs, what the slopes are known by, the rhs behind, if there is one,
  and the tangents of those of lhs, each rhs and each bias that have one.

  Attributes:
    product: of linear_p; without c and further results.
    moving: which of lhs, each rhs and each bias have a tangent.
    behind: the product whose lhs is the layer's result, or None.
  """

  product: Product
  moving: tuple[bool, ...]
  behind: Product | None = None

  @classmethod
  def bind(
      cls, product: Product, operands, known_by, dots, *,
      behind: tuple[Product, jax.Array] | None = None,
  ) -> jax.Array:
    """tangent_p of operands and of tangents (those of lhs, each rhs and each bias).

    `behind` is the product behind it and its rhs.
    """
    product = product.replace(beta=0.0, saves=False)
    known_by = list(known_by)
    if behind is not None:
      known_by.append(behind[1])
    tangent = cls(
        product, tuple(map(_moves, dots)), None if behind is None else behind[0].linear
    )
    moving = [x for x in dots if _moves(x)]
    return tangent_p.bind(
        operands.lhs, *operands.rhs, *known_by, *moving, tangent=tangent
    )

  @property
  def num_known(self) -> int:
    """Operands before the tangents."""
    count = 1 + self.product.gated
    known_by = 0
    if _needs_entering(self.product):
      known_by = count * self.product.has_bias if self.product.recomputes else count
    return 1 + count + known_by + (self.behind is not None)

  def split(self, operands: Sequence[Any]):
    """(lhs, each rhs, what the slopes are known by, the rhs behind or None, tangents or
    None for each).
    """
    count = 1 + self.product.gated
    known_by = list(operands[1 + count : self.num_known])
    dots = iter(operands[self.num_known :])
    return (
        operands[0], tuple(operands[1 : 1 + count]), known_by,
        None if self.behind is None else known_by.pop(),
        [next(dots) if moves else None for moves in self.moving],
    )

  def entering(self, lhs, factors, known_by) -> list[jax.Array]:
    """What enters the activation; nothing, if slopes do not depend on it."""
    product = self.product
    if not _needs_entering(product):
      return []
    if not product.recomputes:
      return list(known_by)
    again = product.linear.replace(has_bias=product.has_bias)
    found = []
    for i, rhs in enumerate(factors):
      out = bind(lhs, rhs, *known_by[i : i + 1], product=again)
      found.append(out[0] if again.is_fused else out)
    return found

  def slopes(self, lhs, factors, known_by) -> list[jax.Array] | None:
    """What the tangent of each product is multiplied by, float32; None: by nothing."""
    entering = self.entering(lhs, factors, known_by)
    if not entering:
      return None
    entering = [lax.convert_element_type(x, jnp.float32) for x in entering]
    return activations.slopes(self.product.activation, entering)


def _tangent(*operands, tangent: Tangent):
  """What tangent_p computes, by operations that have rules of their own."""
  lhs, factors, known_by, rhs_behind, (lhs_dot, *dots) = tangent.split(operands)
  slopes = tangent.slopes(lhs, factors, known_by)
  linear = tangent.product.linear.replace(out_dtype="float32")
  shape = result_type(*map(jax.typeof, (lhs, factors[0])), linear).shape
  sums = []
  for i, rhs in enumerate(factors):
    terms = []
    if lhs_dot is not None:
      terms.append(gemm_p.bind(lhs_dot, rhs, product=linear))
    if dots[i] is not None:
      terms.append(gemm_p.bind(lhs, dots[i], product=linear))
    if tangent.product.has_bias and dots[len(factors) + i] is not None:
      bias_dot = lax.convert_element_type(dots[len(factors) + i], jnp.float32)
      terms.append(jnp.broadcast_to(bias_dot, shape))
    if terms:
      total = functools.reduce(ad.add_jaxvals, terms)
      sums.append(total if slopes is None else total * slopes[i])
  out = functools.reduce(ad.add_jaxvals, sums)
  out = lax.convert_element_type(out, jnp.dtype(tangent.product.out_dtype))
  if tangent.behind is None:
    return out
  return gemm_p.bind(out, rhs_behind, product=tangent.behind)


def _tangent_abstract_eval(*operands, tangent: Tangent):
  lhs, (rhs, *_), _, rhs_behind, _ = tangent.split(operands)
  aval = result_type(lhs, rhs, tangent.product)
  return aval if rhs_behind is None else result_type(aval, rhs_behind, tangent.behind)


def _tangent_jvp(primals, tangents, *, tangent: Tangent):
  tangents = tuple(ad.instantiate_zeros(x) for x in tangents)
  function = functools.partial(_tangent, tangent=tangent)
  return jax.jvp(function, tuple(primals), tangents)


# Without it: "Transpose rule (for reverse-mode differentiation) for
# 'jaxgemm_linear_tangent' not implemented".
def _tangent_transpose(ct, *operands, tangent: Tangent):
  """The backward pass: the gradients of lhs, each rhs and each bias, of one slope."""
  lhs, factors, known_by, rhs_behind, (lhs_dot, *dots) = tangent.split(operands)
  nothing = [None] * tangent.num_known
  if type(ct) is ad.Zero:
    undefined = operands[tangent.num_known :]
    return nothing + [ad.Zero(x.aval.to_ct_aval()) for x in undefined]
  entering = tangent.entering(lhs, factors, known_by)
  if rhs_behind is not None:
    aval = result_type(*map(jax.typeof, (lhs, factors[0])), tangent.product)
    if entering and ct.dtype == rhs_behind.dtype == aval.dtype:
      entering, ct = [], _through(ct, rhs_behind, aval, entering, tangent)
    else:
      ct = gradient(ct, rhs_behind, aval, 0, tangent.behind)
  cts, totals = _cotangents(ct, tangent, entering)
  product, of_factors = tangent.product.linear, dots[: len(factors)]
  moving = [lhs_dot, *of_factors]
  if serves(lhs, factors, cts, [dot and dot.aval for dot in moving], product):
    grads = gradients(lhs, factors, cts, product)
  else:
    grads = []
    if lhs_dot is not None:
      parts = [
          gradient(dz, rhs, lhs_dot.aval, 0, product)
          for dz, rhs in zip(cts, factors, strict=True)
      ]
      grads.append(functools.reduce(ad.add_jaxvals, parts))
    for dz, dot in zip(cts, of_factors, strict=True):
      if dot is not None:
        grads.append(gradient(dz, lhs, dot.aval, 1, product))
  for total, dot in zip(totals, dots[len(factors) :], strict=False):
    if dot is not None:
      total = lax.convert_element_type(total, dot.aval.dtype)
      grads.append(as_sharded(total, dot.aval))  # A bias may lie in another way.
  return nothing + grads


def _through(ct, rhs, aval, entering, tangent: Tangent) -> list[jax.Array]:
  """The cotangent of each product of a layer, from that of the product behind it."""
  product = tangent.behind
  dims, ct_is_rhs = product.dims.lhs_gradient()
  product = product.replace(
      dims=dims, out_dtype=aval.dtype.name, config=None, must_serve=False,
      activation=tangent.product.activation, slopes=len(entering),
      out_sharding=explicit(aval.sharding),
  )
  operands = (rhs, ct) if ct_is_rhs else (ct, rhs)
  return bind(*operands, *entering, product=product)


def _cotangents(ct, tangent: Tangent, entering):
  """The cotangent of each product, and if any bias moves their sums over rows.

  A list `ct` has those of the products already.
  """
  product, count = tangent.product, 1 + tangent.product.gated
  sums, bias_rank = any(tangent.moving[1 + count :]), product.dims.n
  facts = Pass(
      product.activation, product.gated, sums, bias_rank,
      by_xla=product.implementation == "xla", target=product.target,
  )
  if not isinstance(ct, list):
    return cotangents(entering, ct, facts)
  alone = dataclasses.replace(facts, activation=NONE, gated=False)
  found = [cotangents([], x, alone) for x in ct]
  return ct, [total for _, totals in found for total in totals]


def _tangent_batch(operands, axes, *, tangent: Tangent):
  function = functools.partial(_tangent, tangent=tangent)
  return jax.vmap(function, tuple(axes))(*operands), 0


# -- Registrations -----------------------------------------------------------------

linear_p.def_abstract_eval(_abstract_eval)
ad.primitive_jvps[linear_p] = _jvp
batching.primitive_batchers[linear_p] = _batch

compat.computes_by_lowering(tangent_p)
tangent_p.def_abstract_eval(_tangent_abstract_eval)
mlir.register_lowering(tangent_p, mlir.lower_fun(_tangent, multiple_results=False))
ad.primitive_jvps[tangent_p] = _tangent_jvp
ad.primitive_transposes[tangent_p] = _tangent_transpose
batching.primitive_batchers[tangent_p] = _tangent_batch
