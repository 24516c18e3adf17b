"""What each file of this folder shows: the same numbers, and whose products they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core
import jax.numpy as jnp
import numpy as np

_PRODUCTS = (
    "dot_general", "ragged_dot_general", "jaxgemm", "jaxgemm_linear",
    "jaxgemm_linear_tangent", "jaxgemm_ragged",
)
Model = Callable[[Any, jax.Array], jax.Array]


def count_products(function: Callable[..., Any], *args) -> Counter:
  """The products in a function's jaxpr, by the primitive that computes them."""

  def walk(jaxpr):
    for eqn in jaxpr.eqns:
      yield eqn.primitive.name
      for inner in core.jaxprs_in_params(eqn.params):
        yield from walk(inner)

  names = walk(jax.make_jaxpr(function)(*args).jaxpr)
  return Counter(name for name in names if name in _PRODUCTS)


def compare(library: str, theirs: Model, ours: Model, params, x: jax.Array) -> Counter:
  """Checks that two models of the same parameters compute the same, and says so.

  Args:
    library: its name.
    theirs, ours: model(params, x), with XLA's products and with jaxgemm's.
    params, x: parameters and an input.
  Returns: the products of our forward and backward pass, by primitive.
  Raises:
    AssertionError: a result or a gradient differs.
  """
  found = []
  with jax.default_matmul_precision("highest"):  # Else TF32 hides what differs.
    for model in (theirs, ours):
      loss = lambda params, x, model=model: jnp.mean(jnp.square(model(params, x)))
      grads = jax.jit(jax.grad(loss, (0, 1)))(params, x)
      found.append(jax.tree.leaves((jax.jit(model)(params, x), grads)))
  for a, b in zip(*found, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)
  products = count_products(jax.grad(loss, (0, 1)), params, x)
  print(f"{library}: the same results and gradients; products: {dict(products)}")
  return products
