"""GPT-2 with its biases, gelu, residuals and loss where the layers can fuse them.

The blocks are those of experiments/blocks.py, attention is cuDNN's on a GPU. Parameters
are float32, the layers bfloat16, the norms and the loss float32. The token embedding is
the output layer, too.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from experiments import blocks
from experiments.transformer import Config

Params = dict[str, Any]


def init(config: Config, key: jax.Array) -> Params:
  """Returns float32 parameters: matrices normal of scale 0.02, as GPT-2's."""
  width, layers = config.width, config.layers
  shapes = blocks.block_shapes(width)
  keys = iter(jax.random.split(key, 2 + layers * len(shapes)))
  # What writes to the residual stream shrinks with the number of writers.
  scales = dict.fromkeys(("out", "down"), 0.02 / math.sqrt(2 * layers))

  def parameter(name: str, shape: tuple[int, ...]) -> jax.Array:
    values = jax.random.normal(next(keys), shape)
    if len(shape) > 1:
      return scales.get(name, 0.02) * values
    return jnp.ones(shape) if name.endswith("scale") else jnp.zeros(shape)

  return {
      "embedding": parameter("embedding", (config.vocabulary, width)),
      "positions": parameter("positions", (config.sequence, width)),
      "blocks": [
          {name: parameter(name, shape) for name, shape in shapes.items()}
          for _ in range(layers)
      ],
      "final_scale": jnp.ones(width),
      "final_shift": jnp.zeros(width),
  }


def loss(
    params: Params, tokens: jax.Array, config: Config, layers: blocks.Layers
) -> jax.Array:
  """Returns the mean cross-entropy of the next token; see experiments/transformer.py."""
  inputs, labels = tokens[:, :-1], tokens[:, 1:]
  x = params["embedding"][inputs] + params["positions"][: inputs.shape[1]]
  x = x.astype(jnp.bfloat16)
  for block in params["blocks"]:
    # Scales and shifts of norms stay float32; what is added to a product need not.
    block = {
        name: value if name.endswith(("_scale", "_shift")) else value.astype(x.dtype)
        for name, value in block.items()
    }
    x = blocks.pre_norm_block(x, block, layers, config.heads, is_causal=True)
  x = blocks.layer_norm(x, params["final_scale"], params["final_shift"])
  output_layer = params["embedding"].astype(x.dtype)
  return layers.cross_entropy(x, output_layer, labels, transposed=True).mean()
