"""From a call to the primitive: what is asked for, and the operands as it takes them."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax import lax

from jaxgemm import converted, table
from jaxgemm import plan as plans
from jaxgemm import precision as precisions
from jaxgemm.arguments import as_dtype
from jaxgemm.contexts import current_target, is_batch_invariant
from jaxgemm.dims import Axes, Dims, fold
from jaxgemm.fused import bind
from jaxgemm.lowering import local_plan, permuted
from jaxgemm.primitive import transposed
from jaxgemm.product import Product
from jaxgemm.stored import as_stored
from pallas_kernels import compat
from pallas_kernels.configs import Config


def named_kernel(implementation: str | None, config: Config | None) -> str | None:
  """The implementation that the two arguments name; raises where they name none."""
  implementation = plans.check_implementation(implementation, config)
  if config is not None:
    try:
      table.check_types(config)
    except TypeError as error:
      raise TypeError(f"config {config!r}: {error}") from None
  return implementation


def out_dtype_of(dtype, preferred_element_type):
  """The dtype of the result of operands of `dtype`."""
  if preferred_element_type is None:
    return dtype
  return as_dtype("preferred_element_type", preferred_element_type)


def product_of(
    lhs_dtype, rhs_dtype, precision, preferred_element_type, implementation, config,
    *, batch_invariant: bool = False,
) -> tuple[Product, str]:
  """The product that is asked for, its dims yet unknown.

  Returns: the product, and the reason why XLA must compute it, or "".
  Raises:
    ValueError: a kernel is named and cannot take these dtypes or this precision, or it
      is to be batch invariant and none can.
  """
  precision = compat.canonicalize_precision(precision)
  out_dtype = out_dtype_of(lhs_dtype, preferred_element_type).name
  algorithm, reason = precisions.choose_algorithm(
      lhs_dtype.name, rhs_dtype.name, out_dtype, precision
  )
  if implementation == "xla":
    reason = "implementation='xla'"
  elif reason and implementation is not None:
    raise ValueError(f"implementation {implementation!r} cannot serve: {reason}")
  batch_invariant = batch_invariant or is_batch_invariant()
  if reason and batch_invariant:
    raise ValueError(f"batch_invariant: XLA's product is not: {reason}")
  product = Product(
      Dims(), out_dtype, algorithm or "xla", precision,
      implementation=implementation, config=config, batch_invariant=batch_invariant,
      target=current_target(),
  )
  return product, reason


def contract(
    name: str, lhs, rhs, axes: tuple[Axes, Axes, Axes], product: Product,
    out_sharding=None, others: Sequence[jax.Array] = (), *, rounds_once: bool = False,
) -> jax.Array:
  """Makes the operands foldable, binds the primitive to them, and takes its result.

  Args:
    others: the operands behind lhs and rhs. Those of a fused product need be foldable.
    rounds_once: whether the product must not be rounded before what follows it.
  """
  source, num_more = None, product.num_rhs - 1
  out_axes, factors = axes[2], [rhs, *others[:num_more]]
  if product.implementation is None and not num_more:
    product, source = converted.with_source(product, lhs, rhs)
  behind = product.is_fused or product.beta and not rounds_once
  summed = [i for i, axis in enumerate(axes[0]) if axis not in out_axes]
  if behind and converted.stays_apart(product, lhs, factors, summed):
    alone = converted.alone(product)
    products = [contract(name, lhs, x, axes, alone, out_sharding) for x in factors]
    return converted.followed(product, products, others[num_more:])
  (stored_lhs,), lhs_axes = as_stored([lhs], axes[0])
  stored_factors, rhs_axes = as_stored(factors, axes[1])
  folding = fold(
      lhs_axes, rhs_axes, out_axes, stored_lhs.shape, stored_factors[0].shape,
      may_exchange=product.may_exchange,
  )
  # What lies along columns does not move with them, nor does another rhs.
  if product.is_fused and (folding.rhs_perm or folding.out_perm):
    folding = fold(*axes, lhs.shape, rhs.shape)
  else:
    lhs, factors = stored_lhs, stored_factors
  rhs, *more = factors
  others = [*more, *others[num_more:]]
  if source is not None:
    at = int(product.attached == "rhs")
    labels, stored = axes[at], (lhs_axes, rhs_axes)[at]
    source = lax.transpose(source, tuple(map(labels.index, stored)))
    perms = folding.lhs_perm, folding.rhs_perm
    source = transposed(source, perms[at ^ folding.exchanged])
  if folding.exchanged:
    lhs, rhs, product = rhs, lhs, product.exchanged
  out_sharding = compat.canonicalize_out_sharding(out_sharding, name)
  if out_sharding is not None and folding.c_perm is not None:
    out_sharding = permuted(
        out_sharding, out_axes, [out_axes[i] for i in folding.c_perm]
    )
  product = product.replace(dims=folding.dims, out_sharding=out_sharding)
  lhs = transposed(lhs, folding.lhs_perm)
  rhs = transposed(rhs, folding.rhs_perm)
  _, factors, c, biases, _ = product.detached.named((lhs, rhs, *others))
  c = () if c is None else (transposed(c, folding.c_perm),)
  attached = () if source is None else (source,)
  operands = (lhs, *factors, *c, *biases, *attached)
  if product.implementation is not None:
    local_plan(product, *operands)  # Raises here, where the user's call is.
  out = bind(*operands, product=product)
  return transposed(out[0] if product.is_fused else out, folding.out_perm)
