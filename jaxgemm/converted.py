"""Operands that the caller has converted just before, as weights in 8 bits are.

A kernel may convert such weights itself, and read half of the bytes (see
pallas_kernels.conversions), or XLA's own product may: the plan decides. So a product
says what its operands were, and has the array of the larger one as a further operand.

Kernels that convert fuse nothing behind the product. Where few rows meet the weights its
result is small, and the weights are what takes the time: so layers are taken apart there.
Their products, factors included, are rounded to the dtype of the result before what
follows, as where one writes them so.
"""

from __future__ import annotations

from collections.abc import Sequence
import math
from typing import Any

import jax

from jaxgemm.dims import are_known
from jaxgemm.lowering import epilogue, halves
from jaxgemm.product import Product
from pallas_kernels import compat
from pallas_kernels.problem import ALGORITHM_OF_EIGHT_BITS, NONE

_FEW = 256  # Rows of which a result takes little time beside the weights,
_LEAST_DEPTH = 2  # if k has as many for each of them.
_ALIGNED = 16  # Elements of 8 bits in a row of the weights: what TMA can stride over.


def with_source(product: Product, lhs, rhs) -> tuple[Product, Any]:
  """The product, as it is of conversions, and the array of which the larger is one."""
  operands = lhs, rhs
  found = [compat.conversion_of(x) for x in operands]
  product = product.replace(
      converted=tuple("" if each is None else each.dtype.name for each in found),
      attached="",
  )
  known = are_known((*lhs.shape, *rhs.shape))
  at = int(known and math.prod(rhs.shape) > math.prod(lhs.shape))
  served = not (product.is_fused or product.beta or product.batch_invariant)
  if not served or not _is_narrow(found[at], operands[at]):
    return product, None
  return product.replace(attached=("lhs", "rhs")[at]), found[at].source()


def array_of(x) -> Any:
  """The array in 8 bits that x, of 16 bits, is a conversion of; None: there is none."""
  conversion = compat.conversion_of(x)
  return conversion.source() if _is_narrow(conversion, x) else None


def stays_apart(
    product: Product, lhs, factors: Sequence[Any], summed: Sequence[int]
) -> bool:
  """Whether each factor is better multiplied alone: weights in 8 bits, of few rows.

  Args:
    product: of which the factors are rhs. What recomputes for derivatives stays whole,
      and what no kernel that converts may serve: another is named, or it is to be batch
      invariant.
    lhs: an array, or a type alone.
    factors: each rhs.
    summed: the axes of lhs that are summed over.
  """
  if product.implementation is not None or product.batch_invariant or product.recomputes:
    return False
  known = all(are_known(x.shape) for x in (lhs, *factors))
  if not known or not math.prod(lhs.shape):
    return False
  k = math.prod(lhs.shape[axis] for axis in summed)
  rows = math.prod(lhs.shape) // k
  if rows > _FEW or _LEAST_DEPTH * rows > k:
    return False
  return all(
      not any(size % _ALIGNED for size in rhs.shape[-2:])
      and _is_narrow(compat.conversion_of(rhs), rhs)
      for rhs in factors
  )


def alone(product: Product) -> Product:
  """The product with nothing behind it, of each factor."""
  return product.replace(
      beta=0.0, has_bias=False, activation=NONE, gated=False, packed=False
  )


def followed(
    product: Product, products: Sequence[jax.Array], others: Sequence[jax.Array]
) -> jax.Array:
  """The result from `products`, and c and the biases among `others`."""
  if product.packed:
    products = halves(products[0], products[0].ndim - 1)
  product = product.replace(alpha=1.0)
  count = len(others) - product.has_bias * (1 + product.gated)
  c = others[0] if count else None
  out = epilogue(product, products, c, others[count:])
  return out[0] if product.is_fused else out


def _is_narrow(conversion: compat.Conversion | None, x) -> bool:
  """Whether x is of 16 bits, and all of it was an array in 8."""
  if conversion is None or conversion.source is None or x.dtype.itemsize != 2:
    return False
  return conversion.dtype.name in ALGORITHM_OF_EIGHT_BITS
