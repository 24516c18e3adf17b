"""normed_p: a layer of few rows, which its kernel normalises.

  out = layer(x / sqrt(mean of x ** 2 + eps) * weights)

Planned where it is lowered: on one device by a kernel that normalises, if that is faster
than a pass in front of the layer; such a pass has all else: several devices, derivatives.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
import jax.numpy as jnp

from jaxgemm import fused
from jaxgemm import plan as plans
from jaxgemm.contexts import device_of
from jaxgemm.dims import Axes, are_known, fold
from jaxgemm.lowering import folded, launched, local_problem
from jaxgemm.lowering_rules import lower_local, register
from jaxgemm.primitive import result_type
from jaxgemm.product import Product
from jaxgemm.recording import record_plan
from jaxgemm.rms_norm import RMSNorm
from jaxgemm.stored import as_stored
from pallas_kernels import compat

MOST_ROWS = 64  # Of x: those of a tile. A pass normalises more once for all tiles.


@dataclasses.dataclass(frozen=True)
class Normed:
  """The parameters of normed_p, whose operands are x, weights, and the layer's others.

  Attributes:
    product: of x, once it is normalised.
    eps: see RMSNorm.
    rhs_axes: of the layer's weights.
  """

  product: Product
  eps: float
  rhs_axes: Axes


def serves(norm: RMSNorm, x, product: Product) -> bool:
  """Whether a kernel may normalise x for this product."""
  rows = x.shape[:-1]
  return (
      are_known(x.shape) and 0 < math.prod(rows) <= MOST_ROWS
      and x.dtype == jnp.result_type(norm.weights) == jnp.bfloat16
      and product.implementation is None and not product.batch_invariant
  )


def normed(norm: RMSNorm, x, factors, others, rhs_axes: Axes, product: Product):
  """The layer of normalised rows.

  Args:
    norm: of x; `serves` it.
    x: [*batch, k].
    factors: the layer's weights.
    others: its residual and biases, as far as it has some.
    rhs_axes: of each of `factors`.
    product: of the layer; its dims are still to be set.
  """
  factors, rhs_axes = as_stored(factors, rhs_axes)
  facts = Normed(product, float(norm.eps), tuple(rhs_axes))
  operands = compat.vary_alike(x, jnp.asarray(norm.weights), *factors, *others)
  return _bind(facts, *operands)


def _bind(facts: Normed, x, weights, rhs, *others):
  """normed_p of an x of any rank."""
  return normed_p.bind(x, weights, rhs, *others, facts=_of(facts, x, rhs))


def _of(facts: Normed, x, rhs) -> Normed:
  """The facts of an x of any rank."""
  rows = tuple(f"m{i}" for i in range(x.ndim - 1))
  axes = (*rows, "k"), facts.rhs_axes, (*rows, "n")
  dims = fold(*axes, x.shape, rhs.shape).dims
  return dataclasses.replace(facts, product=facts.product.replace(dims=dims))


def _in_passes(x, weights, *others, facts: Normed):
  """The same, normalised in front of the layer."""
  x = RMSNorm(weights, facts.eps)(x)
  out = fused.bind(x, *others, product=facts.product)
  return out[0] if facts.product.is_fused else out


def _on_one_device(x, weights, *others, facts: Normed):
  """By a kernel that normalises, if one is planned."""
  product = facts.product
  problem = dataclasses.replace(
      local_problem(product, x, *others), norm_eps=facts.eps
  )
  plan = plans.normed(problem, device_of(product.target))
  if plan is None:
    return _in_passes(x, weights, *others, facts=facts)
  record_plan(plan)
  lhs, factors, c, biases, _ = product.named((x, *others))
  elements = [] if c is None else [c]
  arrays = folded(product, problem, problem, lhs, factors, elements, biases)
  found = launched(plan, [*arrays, weights], product)
  return found.reshape(*x.shape[:-1], problem.n)


def _lower_in_passes(ctx, *operands, facts: Normed):
  function = functools.partial(_in_passes, facts=facts)
  return mlir.lower_fun(function, multiple_results=False)(ctx, *operands)


def _lower_kernels(ctx, *operands, facts: Normed):
  """For CUDA (or emulated)."""
  num_devices, _, is_manual = compat.lowering_mesh(ctx)
  if num_devices > 1:
    return _lower_in_passes(ctx, *operands, facts=facts)
  if is_manual:
    product = facts.product.replace(beside_collectives=True)
    facts = dataclasses.replace(facts, product=product)
  function = functools.partial(_on_one_device, facts=facts)
  return lower_local(ctx, function, operands)


def _abstract_eval(x, weights, rhs, *others, facts: Normed):
  del weights, others
  product = facts.product
  return result_type(x, rhs.update(shape=product.factor_shape(rhs.shape)), product)


def _jvp(primals, tangents, *, facts: Normed):
  moving = [i for i, dot in enumerate(tangents) if type(dot) is not ad.Zero]

  def function(*moved):
    operands = dict(enumerate(primals)) | dict(zip(moving, moved, strict=True))
    return _in_passes(*operands.values(), facts=facts)

  return jax.jvp(
      function, *([each[i] for i in moving] for each in (primals, tangents))
  )


def _batch(operands, axes, *, facts: Normed):
  """What x has more are further rows, if neither the norm nor the layer has more."""
  x, *others = operands
  num_c = int(facts.product.beta != 0)
  at_c = 1 + facts.product.num_rhs  # Of `others`.
  shared = [axis for i, axis in enumerate(axes[1:]) if not (num_c and i == at_c)]
  size = next(
      a.shape[axis] for a, axis in zip(operands, axes, strict=True) if axis is not None
  )
  if any(axis is not None for axis in shared):
    function = functools.partial(_in_passes, facts=facts)
    return jax.vmap(function, in_axes=axes)(*operands), 0

  def in_front(a, axis):
    if axis is None:
      return jnp.broadcast_to(a, (size, *a.shape))
    return jnp.moveaxis(a, axis, 0)

  x = in_front(x, axes[0])
  if num_c:
    others[at_c] = in_front(others[at_c], axes[1 + at_c])
  if math.prod(x.shape[:-1]) > MOST_ROWS:
    return _in_passes(x, *others, facts=_of(facts, x, others[1])), 0
  return _bind(facts, x, *others), 0


normed_p = Primitive("jaxgemm_normed")
# Without it: "Abstract evaluation for 'jaxgemm_normed' not implemented".
normed_p.def_abstract_eval(_abstract_eval)
register(normed_p, _lower_in_passes, _lower_kernels, lambda facts: facts.product.target)
# Without it: "Differentiation rule for 'jaxgemm_normed' not implemented".
ad.primitive_jvps[normed_p] = _jvp
# Without it: "Batching rule for 'jaxgemm_normed' not implemented".
batching.primitive_batchers[normed_p] = _batch
