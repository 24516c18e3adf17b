"""Flax linen: `dot_general=jaxgemm.dot_general` in Dense, DenseGeneral and attention.

  python -m experiments.adoption.flax_linen
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import flax.linen as nn
import jax

from experiments.adoption.compare import compare
import jaxgemm


class Block(nn.Module):
  """Attention and a perceptron of two layers.

  Attributes:
    dot_general: computes products; None: XLA.
    einsum: those of queries, keys and values.
  """

  dot_general: Any = None
  einsum: Any = None

  @nn.compact
  def __call__(self, x):
    einsum = self.einsum and (lambda: self.einsum)
    attention = nn.MultiHeadDotProductAttention(
        num_heads=4, qkv_dot_general=self.dot_general, out_dot_general=self.dot_general,
        qk_attn_weights_einsum_cls=einsum, attn_weights_value_einsum_cls=einsum,
    )
    x = x + attention(nn.LayerNorm()(x))
    hidden = nn.Dense(4 * x.shape[-1], dot_general=self.dot_general)(nn.LayerNorm()(x))
    out = nn.DenseGeneral(x.shape[-1], dot_general=self.dot_general)
    return x + out(nn.gelu(hidden))


def main() -> Counter:
  x = jax.random.normal(jax.random.key(0), (2, 8, 32))
  theirs, ours = Block(), Block(jaxgemm.dot_general, jaxgemm.einsum)
  params = theirs.init(jax.random.key(1), x)
  return compare("flax.linen", theirs.apply, ours.apply, params, x)


if __name__ == "__main__":
  main()
