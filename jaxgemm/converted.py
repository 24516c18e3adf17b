"""Operands that the caller has converted just before, as weights in 8 bits are.

A kernel may convert such weights itself, and read half of the bytes (see
pallas_kernels.conversions), or XLA's own product may: the plan decides. So a product
says what its operands were, and has the array of the larger one as a further operand.

Kernels that convert fuse nothing behind the product. Where few rows meet the weights its
result is small, and the weights are what takes the time: so layers are taken apart there.
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

_FEW = 8  # Times as many elements as the other operand has: then its rows are few.


def with_source(product: Product, lhs, rhs) -> tuple[Product, Any]:
  """The product, as it is of conversions, and the array of which the larger is one."""
  operands = lhs, rhs
  found = [compat.conversion_of(x) for x in operands]
  product = product.replace(
      converted=tuple("" if each is None else each.dtype.name for each in found)
  )
  known = are_known((*lhs.shape, *rhs.shape))
  at = int(known and math.prod(rhs.shape) > math.prod(lhs.shape))
  alone = not product.is_fused and not product.beta and not product.batch_invariant
  if not alone or not _is_narrow(found[at], operands[at]):
    return product, None
  return product.replace(attached=("lhs", "rhs")[at]), found[at].source


def stays_apart(lhs, factors: Sequence[Any]) -> bool:
  """Whether each factor is better multiplied alone: weights in 8 bits, of few rows.

  `lhs` may be a type alone.
  """
  for rhs in factors:
    if not are_known((*lhs.shape, *rhs.shape)):
      return False
    few = _FEW * math.prod(lhs.shape) <= math.prod(rhs.shape)
    if not few or not _is_narrow(compat.conversion_of(rhs), rhs):
      return False
  return True


def alone(product: Product) -> Product:
  """The product with nothing behind it, of each factor."""
  return product.replace(
      alpha=1.0, beta=0.0, has_bias=False, activation=NONE, gated=False, packed=False
  )


def followed(
    product: Product, products: Sequence[jax.Array], others: Sequence[jax.Array]
) -> jax.Array:
  """The result from `products`, and c and the biases among `others`."""
  if product.packed:
    products = halves(products[0], products[0].ndim - 1)
  count = len(others) - product.has_bias * (1 + product.gated)
  c = others[0] if count else None
  out = epilogue(product, products, c, others[count:])
  return out[0] if product.is_fused else out


def _is_narrow(conversion: compat.Conversion | None, x) -> bool:
  """Whether x is of 16 bits, and all of it was an array in 8."""
  if conversion is None or conversion.source is None or x.dtype.itemsize != 2:
    return False
  return conversion.dtype.name in ALGORITHM_OF_EIGHT_BITS
