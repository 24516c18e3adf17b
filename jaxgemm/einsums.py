"""einsum: sums of products by their subscripts, every product of two a GEMM of ours."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxgemm.api import dot_general, named_kernel
from pallas_kernels.problem import Config


def einsum(
    subscripts, *operands, precision=None, preferred_element_type=None,
    optimize="auto", out_sharding=None, implementation: str | None = None,
    config: Config | None = None,
) -> jax.Array:
  """Returns jnp.einsum(subscripts, *operands), its products computed by ours.

  What sums or permutes one operand alone stays jnp.einsum's, and so does the order of
  the products where there are more than two operands. Flax's nnx.Einsum takes it as its
  `einsum_op`.

  Args:
    subscripts, operands, optimize: as for jnp.einsum, in all its forms.
    precision, preferred_element_type, out_sharding, implementation, config: as for
      jaxgemm.matmul.
  Returns: what jnp.einsum returns.
  Raises:
    ValueError, TypeError: as jnp.einsum; or the named kernel cannot serve.
  Example: jaxgemm.einsum("bqhd,bkhd->bhqk", q, k)
  """
  named_kernel(implementation, config)  # Raises also where nothing is multiplied.
  return jnp.einsum(
      subscripts, *operands, precision=precision, optimize=optimize,
      preferred_element_type=preferred_element_type, out_sharding=out_sharding,
      _dot_general=_product(implementation, config),
  )


@functools.lru_cache(maxsize=256)
def _product(implementation: str | None, config: Config | None):
  """The same object each time: it is static to a jit of jnp.einsum's."""
  return functools.partial(dot_general, implementation=implementation, config=config)
