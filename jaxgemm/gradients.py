"""gradients_p: the gradients of lhs and of each rhs of a layer's products, together.

  d lhs = alpha * sum over i of ct_i @ rhs_i^T      d rhs_i = alpha * lhs^T @ ct_i

As products of their own they would lack what they owe each other. Of two rhs (a gated
layer) one kernel goes on with the second product where the first ends (see `summed`), or
the second adds the first to itself before it stores the sum. Over several devices the sum
of lhs's gradient, which the layer before waits for, travels while the others are computed
(see `partitioning`).

They are differentiated, and batched, as the products that they are.
"""

from __future__ import annotations

import functools

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxgemm.dims import are_known
from jaxgemm.lowering_rules import can_partition, register
from jaxgemm.partitioning import partitioned_gradients
from jaxgemm.primitive import explicit, gradient, product_of_gradient
from jaxgemm.product import Gradients, Product
from jaxgemm.recording import record_partitioned
from jaxgemm.summed import summed
from pallas_kernels import compat


def serves(lhs, factors, cts, wanted, product: Product) -> bool:
  """Whether gradients_p gives these: of types `wanted`, or None where none is wanted."""
  types = [*map(jax.typeof, (lhs, *factors, *cts)), *wanted]
  return (
      None not in types and not product.dims.b and product.implementation != "xla"
      and len({x.dtype for x in types}) == 1
      and all(explicit(x.sharding) is None for x in types)
  )


def gradients(lhs, factors, cts, product: Product) -> list[jax.Array]:
  """The gradient of lhs, and of each rhs, from the cotangent of each product."""
  operands = compat.vary_alike(lhs, *factors, *cts)
  return gradients_p.bind(*operands, gradients=Gradients(product, len(factors)))


def _named(operands, gradients: Gradients):
  """lhs, each rhs, each cotangent."""
  lhs, *rest = operands
  return lhs, rest[: gradients.count], rest[gradients.count :]


def separate(*operands, gradients: Gradients) -> list[jax.Array]:
  """All by products that know nothing of each other."""
  lhs, factors, cts = _named(operands, gradients)
  parts = [
      gradient(ct, rhs, jax.typeof(lhs), 0, gradients.product)
      for ct, rhs in zip(cts, factors, strict=True)
  ]
  return [functools.reduce(ad.add_jaxvals, parts), *_of_factors(operands, gradients)]


def on_one_device(*operands, gradients: Gradients) -> list[jax.Array]:
  """All; that of lhs is summed up by the products themselves."""
  lhs, factors, cts = _named(operands, gradients)
  found = _of_lhs(lhs, factors, cts, gradients.product)
  return [found, *_of_factors(operands, gradients)]


def _of_lhs(lhs, factors, cts, product: Product) -> jax.Array:
  """That of lhs: of several rhs by one kernel, or each product adds those before it."""
  found = _in_one(lhs, factors, cts, product) if len(factors) > 1 else None
  if found is not None:
    return found
  for ct, rhs in zip(cts, factors, strict=True):
    found = gradient(ct, rhs, jax.typeof(lhs), 0, product, plus=found)
  return found


def _in_one(lhs, factors, cts, product: Product) -> jax.Array | None:
  """The sum by one kernel; None if none is planned for it."""
  dims, ct_is_rhs = product.dims.lhs_gradient()
  dtype, term = product_of_gradient(
      lhs.dtype, lhs.dtype, dims, lhs.dtype.name, None, product
  )
  if term is None:
    return None
  pairs = (factors, cts) if ct_is_rhs else (cts, factors)
  pairs = [[lax.convert_element_type(x, dtype) for x in each] for each in pairs]
  return summed(*pairs, term)


def _of_factors(operands, gradients: Gradients) -> list[jax.Array]:
  lhs, factors, cts = _named(operands, gradients)
  return [
      gradient(ct, lhs, jax.typeof(rhs), 1, gradients.product)
      for ct, rhs in zip(cts, factors, strict=True)
  ]


# Without it: "Abstract evaluation for 'jaxgemm_gradients' not implemented".
def _abstract_eval(*operands, gradients: Gradients):
  return list(operands[: 1 + gradients.count])


def _lower_xla(ctx, *operands, gradients: Gradients):
  return _lower_function(ctx, separate, operands, gradients)


def _lower_kernels(ctx, *operands, gradients: Gradients):
  known = are_known(size for aval in ctx.avals_in for size in aval.shape)
  num_devices, _, _ = compat.lowering_mesh(ctx)
  if known and num_devices == 1:
    return _lower_function(ctx, on_one_device, operands, gradients)
  if known and can_partition(ctx) and not compat.is_exported(ctx):
    record_partitioned()
    function = partitioned_gradients(gradients, on_one_device)
    return mlir.lower_fun(function, multiple_results=True)(ctx, *operands)
  return _lower_function(ctx, separate, operands, gradients)


def _lower_function(ctx, function, operands, gradients: Gradients):
  lowered = mlir.lower_fun(function, multiple_results=True)
  return lowered(ctx, *operands, gradients=gradients)


# Without it: "Differentiation rule for 'jaxgemm_gradients' not implemented".
def _jvp(primals, tangents, *, gradients: Gradients):
  tangents = tuple(map(ad.instantiate_zeros, tangents))
  function = functools.partial(separate, gradients=gradients)
  return jax.jvp(function, tuple(primals), tangents)


# Without it: "Batching rule for 'jaxgemm_gradients' not implemented".
def _batch(operands, axes, *, gradients: Gradients):
  function = functools.partial(separate, gradients=gradients)
  found = jax.vmap(function, tuple(axes))(*operands)
  return found, [0] * len(found)


gradients_p = Primitive("jaxgemm_gradients")
gradients_p.multiple_results = True
gradients_p.def_abstract_eval(_abstract_eval)
register(
    gradients_p, _lower_xla, _lower_kernels, lambda gradients: gradients.product.target
)
ad.primitive_jvps[gradients_p] = _jvp
batching.primitive_batchers[gradients_p] = _batch
