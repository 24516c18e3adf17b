"""The model of experiments/transformer.py as one writes it in Flax nnx.

Whose products they are is one argument of its layers, `dot_general`. Attention is
jax.nn.dot_product_attention's, cuDNN's on a GPU; the layers have biases, as GPT-2's do.
"""

from __future__ import annotations

import functools
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import optax

from experiments.transformer import Config, DotGeneral

_NT = (((1,), (1,)), ((), ()))


class Block(nnx.Module):
  """Causal attention and a perceptron four times as wide, each after a norm."""

  def __init__(self, config: Config, dot_general: DotGeneral, rngs: nnx.Rngs):
    width, dtype = config.width, jnp.bfloat16
    small = nnx.initializers.normal(0.02)
    self.attention_norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
    self.attention = nnx.MultiHeadAttention(
        config.heads, width, decode=False, dtype=dtype, kernel_init=small,
        attention_fn=_attention, qkv_dot_general=dot_general,
        out_dot_general=dot_general, rngs=rngs,
    )
    self.mlp_norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
    linear = functools.partial(
        nnx.Linear, dtype=dtype, kernel_init=small, dot_general=dot_general, rngs=rngs
    )
    self.up, self.down = linear(width, 4 * width), linear(4 * width, width)

  def __call__(self, x):
    x = x + self.attention(self.attention_norm(x))
    return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


class Model(nnx.Module):
  """Tokens [batch, sequence] to logits [batch * sequence, vocabulary]."""

  def __init__(self, config: Config, dot_general: DotGeneral, rngs: nnx.Rngs):
    small = nnx.initializers.normal(0.02)
    self.dot_general = dot_general
    self.embedding = nnx.Embed(
        config.vocabulary, config.width, embedding_init=small, rngs=rngs
    )
    self.positions = nnx.Embed(
        config.sequence, config.width, embedding_init=small, rngs=rngs
    )
    self.blocks = nnx.List(
        [Block(config, dot_general, rngs) for _ in range(config.layers)]
    )
    self.final_norm = nnx.LayerNorm(config.width, dtype=jnp.bfloat16, rngs=rngs)

  def __call__(self, tokens):
    x = self.embedding(tokens) + self.positions(jnp.arange(tokens.shape[1]))
    x = x.astype(jnp.bfloat16)
    for block in self.blocks:
      x = block(x)
    x = self.final_norm(x).reshape(-1, x.shape[-1])
    output_layer = self.embedding.embedding[...].astype(jnp.bfloat16)
    return self.dot_general(x, output_layer, _NT)


def init(config: Config, key: jax.Array) -> Any:
  """Returns float32 parameters."""
  model = Model(config, jax.lax.dot_general, nnx.Rngs(key))
  return nnx.state(model, nnx.Param)


def loss(
    params: Any, tokens: jax.Array, config: Config, dot_general: DotGeneral
) -> jax.Array:
  """Returns the mean cross-entropy of the next token; see experiments/transformer.py."""
  model = nnx.merge(_definition(config, dot_general), params)
  labels = tokens[:, 1:].reshape(-1)
  logits = model(tokens[:, :-1]).astype(jnp.float32)
  return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@functools.cache
def _definition(config: Config, dot_general: DotGeneral) -> Any:
  model = nnx.eval_shape(lambda: Model(config, dot_general, nnx.Rngs(0)))
  definition, _ = nnx.split(model, nnx.Param)
  return definition


def _attention(query, key, value, **_) -> jax.Array:
  on_gpu = jax.default_backend() == "gpu"
  return jax.nn.dot_product_attention(
      query, key, value, is_causal=True, implementation="cudnn" if on_gpu else "xla"
  )
