"""A decoder-only transformer in plain JAX whose every product is one function.

Pre-layer-norm blocks, causal attention, an MLP four times as wide with GELU,
learned positions, the token embedding used again as the output layer, no biases
in the products. Parameters are float32, products bfloat16, the norms, the softmax
and the loss float32.

The products are arranged so that none needs a transposed copy, forward or
backward: activations are [batch * sequence, width] and weights [in, out] (NN; the
gradients NT and TN), the output layer is [vocabulary, width] (NT), and attention
runs on [batch * heads, sequence, head width] (NT for the scores, NN for the
values). Splitting the heads off moves the data once, as it does in any library.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

# lax.dot_general, or a function with its signature and meaning.
DotGeneral = Callable[..., jax.Array]
Params = dict[str, Any]

_NN = (((1,), (0,)), ((), ()))
_NT = (((1,), (1,)), ((), ()))
_BATCHED_NN = (((2,), (1,)), ((0,), (0,)))
_BATCHED_NT = (((2,), (2,)), ((0,), (0,)))


@dataclasses.dataclass(frozen=True)
class Config:
  """Sizes of the model.

  Attributes:
    layers: number of blocks.
    width: width of the residual stream.
    heads: attention heads; they divide `width`.
    vocabulary: columns of the output layer, at least the number of tokens.
    sequence: longest sequence, in tokens.
  """

  layers: int
  width: int
  heads: int
  vocabulary: int
  sequence: int

  def __post_init__(self):
    if self.width % self.heads:
      raise ValueError(f"width {self.width} is no multiple of heads {self.heads}")


def init(config: Config, key: jax.Array) -> Params:
  """Returns float32 parameters: normal of scale 0.02, as GPT-2's."""
  width = config.width
  # What writes to the residual stream shrinks with the number of writers.
  residual = 0.02 / math.sqrt(2 * config.layers)
  keys = iter(jax.random.split(key, 2 + 4 * config.layers))

  def normal(*shape: int, scale: float = 0.02) -> jax.Array:
    return scale * jax.random.normal(next(keys), shape)

  def norm() -> Params:
    return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}

  return {
      "embedding": normal(config.vocabulary, width),
      "positions": normal(config.sequence, width),
      "blocks": [
          {
              "attention_norm": norm(),
              "qkv": normal(width, 3 * width),
              "projection": normal(width, width, scale=residual),
              "mlp_norm": norm(),
              "up": normal(width, 4 * width),
              "down": normal(4 * width, width, scale=residual),
          }
          for _ in range(config.layers)
      ],
      "final_norm": norm(),
  }


def loss(
    params: Params, tokens: jax.Array, config: Config, dot_general: DotGeneral
) -> jax.Array:
  """Returns the mean cross-entropy of the next token, float32, in nats.

  Args:
    params: as `init` returns them.
    tokens: [batch, sequence + 1] int32; each token is the label of those before.
    config: the sizes.
    dot_general: computes every product, in the forward pass and, through its own
      derivative, in the backward pass.
  """
  inputs, labels = tokens[:, :-1], tokens[:, 1:]
  batch, sequence = inputs.shape
  # Looked up in float32, so that the gradient's many additions are float32 too.
  x = params["embedding"][inputs] + params["positions"][:sequence]
  x = x.astype(jnp.bfloat16).reshape(batch * sequence, config.width)

  def dense(x: jax.Array, weight: jax.Array) -> jax.Array:
    return dot_general(x, weight.astype(jnp.bfloat16), _NN)

  for block in params["blocks"]:
    qkv = dense(_layer_norm(x, block["attention_norm"]), block["qkv"])
    heads = _attention(qkv, batch, config, dot_general)
    x = x + dense(heads, block["projection"])
    hidden = dense(_layer_norm(x, block["mlp_norm"]), block["up"])
    x = x + dense(jax.nn.gelu(hidden), block["down"])

  # bfloat16 logits: were they float32, so would be their cotangent, and the two
  # products of the backward pass would mix it with bfloat16 operands.
  output_layer = params["embedding"].astype(jnp.bfloat16)
  logits = dot_general(_layer_norm(x, params["final_norm"]), output_layer, _NT)
  return optax.softmax_cross_entropy_with_integer_labels(
      logits.astype(jnp.float32), labels.reshape(-1)
  ).mean()


def _attention(
    qkv: jax.Array, batch: int, config: Config, dot_general: DotGeneral
) -> jax.Array:
  """Returns causal self-attention: [batch * sequence, 3 * width] -> [..., width]."""
  sequence = qkv.shape[0] // batch
  head_width = config.width // config.heads
  qkv = qkv.reshape(batch, sequence, 3, config.heads, head_width)
  q, k, v = qkv.transpose(2, 0, 3, 1, 4).reshape(3, -1, sequence, head_width)
  scores = dot_general(q, k, _BATCHED_NT).astype(jnp.float32)
  causal = jnp.tri(sequence, dtype=bool)
  scores = jnp.where(causal, scores / math.sqrt(head_width), -jnp.inf)
  weights = jax.nn.softmax(scores).astype(qkv.dtype)
  out = dot_general(weights, v, _BATCHED_NN)
  out = out.reshape(batch, config.heads, sequence, head_width).swapaxes(1, 2)
  return out.reshape(batch * sequence, config.width)


def _layer_norm(x: jax.Array, norm: Params) -> jax.Array:
  """Returns x, [tokens, width], normalised in float32 along its width."""
  values = x.astype(jnp.float32)
  values = values - values.mean(-1, keepdims=True)
  variance = jnp.square(values).mean(-1, keepdims=True)
  values = values * jax.lax.rsqrt(variance + 1e-5)
  return (values * norm["scale"] + norm["bias"]).astype(x.dtype)
