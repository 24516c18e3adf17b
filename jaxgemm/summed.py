"""summed_p: products that one kernel adds up.

  out = alpha * (lhs_0 @ rhs_0 + lhs_1 @ rhs_1 + ...)

The sums of one go on with the other's k tiles: nothing is rounded, stored or read in
between. Lowering rules bind it, where they know that a kernel serves; so it has neither
derivatives nor a way of XLA's.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import functools

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jaxgemm import plan as plans
from jaxgemm.contexts import device_of
from jaxgemm.lowering import launched
from jaxgemm.lowering_rules import lower_local
from jaxgemm.primitive import result_type
from jaxgemm.product import Product
from jaxgemm.recording import record, record_plan
from pallas_kernels import compat
from pallas_kernels.problem import Problem


def summed(
    lhs: Sequence[jax.Array], rhs: Sequence[jax.Array], product: Product
) -> jax.Array | None:
  """The sum of the products of the pairs; None if no kernel is planned for it.

  Args:
    lhs, rhs: arrays of one shape and dtype each, as many of the one as of the other.
    product: what each is; it adds no c and fuses nothing.
  """
  operands = *lhs, *rhs
  if product.implementation is not None or product.batch_invariant:
    return None
  if plans.summed(_problem(operands, product), device_of(product.target)) is None:
    return None
  return summed_p.bind(*operands, product=product)


def _apart(operands):
  """Each lhs, and each rhs."""
  count = len(operands) // 2
  return operands[:count], operands[count:]


def _problem(operands, product: Product) -> Problem:
  lhs, rhs = _apart(operands)
  term = product.problem(lhs[0].shape, rhs[0].shape, lhs[0].dtype.name)
  return dataclasses.replace(term, k=len(lhs) * term.k, terms=len(lhs))


def _on_one_device(*operands, product: Product) -> jax.Array:
  (lhs, rhs), dims = _apart(operands), product.dims
  problem, device = _problem(operands, product), device_of(product.target)
  plan = plans.summed(problem, device)
  # What a tuner measures is one product of as long a k, whose row answers the sum.
  record(dataclasses.replace(problem, terms=1), device)
  record_plan(plan)
  folded = [
      tuple(lax.reshape(x, product.folded_shape(group, x.shape)) for x in its)
      for group, its in ((dims.lhs, lhs), (dims.rhs, rhs))
  ]
  found = launched(plan, folded, product)
  return lax.reshape(found, dims.out_shape(lhs[0].shape, rhs[0].shape))


def _abstract_eval(*operands, product: Product):
  lhs, rhs = _apart(operands)
  return result_type(lhs[0], rhs[0], product)


def _lower(ctx, *operands, product: Product):
  _, _, is_manual = compat.lowering_mesh(ctx)
  if is_manual:
    product = product.replace(beside_collectives=True)
  return lower_local(ctx, functools.partial(_on_one_device, product=product), operands)


summed_p = Primitive("jaxgemm_summed")
summed_p.def_abstract_eval(_abstract_eval)
mlir.register_lowering(summed_p, _lower)
# Else jit hides its devices from lowering rules.
compat.requires_devices(summed_p)
