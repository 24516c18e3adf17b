"""Flax nnx: `dot_general=` in Linear, LinearGeneral, attention; `einsum_op=` in Einsum.

What attention computes between its projections is its `attention_fn`'s: XLA's here, on a
GPU best jax.nn.dot_product_attention's.

  python -m experiments.adoption.flax_nnx
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from flax import nnx
import jax
from jax import lax
import jax.numpy as jnp

from experiments.adoption.compare import compare
import jaxgemm


class Block(nnx.Module):
  """Attention and a perceptron of two layers, and an einsum at last."""

  def __init__(
      self, width: int, rngs: nnx.Rngs, dot_general: Any = lax.dot_general,
      einsum: Any = jnp.einsum,
  ):
    self.norm = nnx.LayerNorm(width, rngs=rngs)
    self.attention = nnx.MultiHeadAttention(
        4, width, decode=False, qkv_dot_general=dot_general, out_dot_general=dot_general,
        rngs=rngs,
    )
    self.up = nnx.Linear(width, 4 * width, dot_general=dot_general, rngs=rngs)
    self.down = nnx.LinearGeneral(4 * width, width, dot_general=dot_general, rngs=rngs)
    self.last = nnx.Einsum(
        "btd,df->btf", (width, width), (width,), einsum_op=einsum, rngs=rngs
    )

  def __call__(self, x):
    x = x + self.attention(self.norm(x))
    x = x + self.down(nnx.gelu(self.up(x)))
    return self.last(x)


def main() -> Counter:
  x = jax.random.normal(jax.random.key(0), (2, 8, 32))
  theirs = Block(32, nnx.Rngs(1))
  ours = Block(32, nnx.Rngs(1), jaxgemm.dot_general, jaxgemm.einsum)
  # The parameters of one serve both: they are drawn from the same seed, and lie alike.
  graphs = [nnx.split(model, nnx.Param, ...) for model in (theirs, ours)]

  def model(graph):
    definition, _, rest = graph
    return lambda params, x: nnx.merge(definition, params, rest)(x)

  return compare("flax.nnx", *map(model, graphs), graphs[0][1], x)


if __name__ == "__main__":
  main()
