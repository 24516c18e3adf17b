"""RMSNorm: what rows are divided by before a layer."""

from __future__ import annotations

import dataclasses
import math
import numbers
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from jaxgemm.arguments import as_array, check_real


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RMSNorm:
  """x / sqrt(mean over k of x ** 2 + eps) * weights, in float32, rounded once.

  A pytree, whose leaf is `weights`. To be called, or given to a layer as its `norm`,
  whose kernel then normalises few rows itself.

  Attributes:
    weights: [k].
    eps: added to the mean square, a Python number.
  Example: y = jaxgemm.linear(x, w, norm=jaxgemm.RMSNorm(params["norm"], 1e-5))
  Source: Zhang and Sennrich, "Root mean square layer normalization" (2019).
  """

  weights: Any
  eps: float = dataclasses.field(default=1e-6, metadata=dict(static=True))

  def __call__(self, x) -> jax.Array:
    """Returns x [..., k] so, in its dtype.

    Raises:
      TypeError: the weights are not [k].
      ValueError: x is a scalar, or eps no number above 0.
    """
    x = as_array("RMSNorm", "x", x)
    weights = self.checked("RMSNorm", x)
    return _saving_nothing(x, weights, float(self.eps))

  def checked(self, name: str, x) -> jax.Array:
    """The weights as an array; raises where they do not fit x, for the function `name`.
    """
    weights = as_array(name, "norm.weights", self.weights)
    if not x.ndim:
      raise ValueError(f"{name}: x is a scalar, which has no rows to normalise")
    if weights.shape != x.shape[-1:]:
      raise TypeError(
          f"{name}: norm.weights has shape {weights.shape}, and x {x.shape}: they must be"
          f" [k], [{x.shape[-1]}]"
      )
    check_real(name, "norm.weights", weights, "x", x.dtype)
    if not isinstance(self.eps, numbers.Real) or not 0 < self.eps < math.inf:
      raise ValueError(f"{name}: norm.eps={self.eps!r} must be a number above 0")
    return weights


def normalised(x, weights, eps: float) -> jax.Array:
  """x [..., k] as RMSNorm has it, of operands that are right."""
  wide = jnp.promote_types(x.dtype, jnp.float32)
  rows = x.astype(wide)
  mean = jnp.mean(jnp.square(rows), -1, keepdims=True)
  return (rows * lax.rsqrt(mean + eps) * weights.astype(wide)).astype(x.dtype)


# Derivatives want the factors of rows. If the pass saves them, XLA makes two passes of
# it: of 8192x4096 on an H200 16 and 42 us, where the one takes 32. They begin with a
# pass over x anyway, which finds the factors again.
_saving_nothing = jax.checkpoint(normalised, static_argnums=(2,))
