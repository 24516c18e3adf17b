"""A layer of experts in plain JAX: a router, and a gated perceptron for each expert.

What multiplies each expert's rows by its matrix is an argument, as jax.lax.ragged_dot is.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

# ragged_dot(lhs [rows, k], rhs [experts, k, n], sizes [experts]) -> [rows, n].
RaggedDot = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def shapes(width: int, hidden: int, experts: int) -> dict[str, tuple[int, ...]]:
  """Shapes of the parameters."""
  up, down = (experts, width, hidden), (experts, hidden, width)
  return dict(router=(width, experts), gate=up, up=up, down=down)


def choose(scores: jax.Array, count: int) -> jax.Array:
  """The experts that each token goes to, [tokens, count], by scores [tokens, experts]."""
  return jax.lax.top_k(scores, count)[1]


def layer(
    x: jax.Array, params: dict[str, jax.Array], ragged_dot: RaggedDot, *,
    count: int = 2, chosen: jax.Array | None = None,
) -> jax.Array:
  """Returns what the experts make of each token, weighted by the router.

  Args:
    x: [tokens, width].
    params: of `shapes`.
    ragged_dot: multiplies rows in groups, one group an expert.
    count: how many experts a token has, where `chosen` does not say which.
    chosen: [tokens, count], integers, no two of a token alike; None: the router chooses.
  Returns: [tokens, width].
  """
  scores = x @ params["router"]
  scores = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
  if chosen is None:
    chosen = choose(scores, count)
  weights = jax.nn.softmax(jnp.take_along_axis(scores, chosen, 1))

  # Each token as often as it has experts, those of the first expert first.
  expert = chosen.reshape(-1)
  order = jnp.argsort(expert)
  sizes = jnp.bincount(expert, length=scores.shape[1])
  rows = _permuted(jnp.repeat(x, chosen.shape[1], 0), order)
  gate, up = (ragged_dot(rows, params[name], sizes) for name in ("gate", "up"))
  out = ragged_dot(jax.nn.silu(gate) * up, params["down"], sizes)

  out = _permuted(out, jnp.argsort(order)).reshape(*chosen.shape, -1)
  return jnp.sum(out * weights[..., None].astype(out.dtype), 1)


def _permuted(rows: jax.Array, order: jax.Array) -> jax.Array:
  """rows[order]; that each is there once makes the gradient a permutation, too."""
  return rows.at[order].get(unique_indices=True, mode="promise_in_bounds")
