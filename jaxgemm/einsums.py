"""einsum: sums of products by their subscripts, every product of two a GEMM of ours.

Of two operands and no more, the subscripts say how all dimensions lie, those of the
result, too: few of them have to be transposed. Through jnp.einsum a product would give
its result as lax.dot_general orders it, and a pass would transpose that.
"""

from __future__ import annotations

from collections.abc import Sequence
import functools
from typing import Any

import jax
import jax.numpy as jnp
from opt_einsum.parser import parse_einsum_input  # Which JAX's own einsum needs.

from jaxgemm.api import dot_general
from jaxgemm.contraction import contract, named_kernel, product_of
from jaxgemm.dims import Axes
from pallas_kernels.configs import Config


def einsum(
    subscripts, *operands, precision=None, preferred_element_type=None,
    optimize="auto", out_sharding=None, implementation: str | None = None,
    config: Config | None = None,
) -> jax.Array:
  """Returns jnp.einsum(subscripts, *operands), its products computed by ours.

  What sums or permutes one operand alone stays jnp.einsum's, and so does the order of
  the products where there are more than two operands. Of two, dimensions are transposed
  only if a kernel cannot take them as they lie; see `jaxgemm.dims.fold`. Flax's
  nnx.Einsum takes it as its `einsum_op`.

  Args:
    subscripts, operands, optimize: as for jnp.einsum, in all its forms.
    precision, preferred_element_type, out_sharding, implementation, config: as for
      jaxgemm.matmul.
  Returns: what jnp.einsum returns.
  Raises:
    ValueError, TypeError: as jnp.einsum; or the named kernel cannot serve.
  Example: jaxgemm.einsum("bqhd,bkhd->bhqk", q, k)
  """
  implementation = named_kernel(implementation, config)
  axes = _axes_of_two((subscripts, *operands))
  if axes is not None:
    lhs, rhs = _arrays(subscripts, operands)
    product, reason = product_of(
        lhs.dtype, rhs.dtype, precision, preferred_element_type, implementation, config
    )
    if not reason:
      return contract("einsum", lhs, rhs, axes, product, out_sharding)
  return jnp.einsum(
      subscripts, *operands, precision=precision, optimize=optimize,
      preferred_element_type=preferred_element_type, out_sharding=out_sharding,
      _dot_general=_product(implementation, config),
  )


def _arrays(subscripts, operands: Sequence[Any]) -> tuple[Any, Any]:
  """The operands, where subscripts may be lists between them."""
  return operands[:2] if isinstance(subscripts, str) else (subscripts, operands[1])


def _axes_of_two(call: Sequence[Any]) -> tuple[Axes, Axes, Axes] | None:
  """The labels of two arrays of one dtype, and of the result; None if it is no product.

  Which nothing precedes and nothing follows: no label stands twice in an operand, and
  none that is summed in one alone.
  """
  if len(call) not in ((3,) if isinstance(call[0], str) else (4, 5)):
    return None
  arrays = _arrays(call[0], call[1:])
  if not all(isinstance(x, jax.Array) for x in arrays):
    return None
  lhs, rhs = arrays
  weak = getattr(lhs, "weak_type", False) or getattr(rhs, "weak_type", False)
  if lhs.dtype != rhs.dtype or weak:
    return None
  try:
    inputs, result, _ = parse_einsum_input(call)
  except Exception:  # Whatever is wrong, jnp.einsum says it.
    return None
  return _checked_axes(inputs, result, lhs.shape, rhs.shape)


@functools.lru_cache(maxsize=1024)
def _checked_axes(
    inputs: str, result: str, lhs_shape: tuple[Any, ...], rhs_shape: tuple[Any, ...]
) -> tuple[Axes, Axes, Axes] | None:
  lhs, rhs, out = map(tuple, (*inputs.split(","), result))
  for labels in (lhs, rhs, out):
    if len(set(labels)) < len(labels):
      return None
  if set(lhs) - {*rhs, *out} or set(rhs) - {*lhs, *out} or set(out) - {*lhs, *rhs}:
    return None
  if (len(lhs), len(rhs)) != (len(lhs_shape), len(rhs_shape)):
    return None
  size_of = dict(zip(lhs, lhs_shape, strict=True))
  for axis, size in zip(rhs, rhs_shape, strict=True):
    if size_of.get(axis, size) != size:  # An error, or broadcast.
      return None
  return lhs, rhs, out


@functools.lru_cache(maxsize=256)
def _product(implementation: str | None, config: Config | None):
  """The same object each time: it is static to a jit of jnp.einsum's."""
  return functools.partial(dot_general, implementation=implementation, config=config)
