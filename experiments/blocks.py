"""Blocks of models, whose layers are XLA's or jaxgemm's: one function each.

A block takes its parameters by name, activations x [sequences, tokens, width], and the
`Layers` that compute its products. Norms and rotations are float32, whatever the rest.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import optax

from experiments import experts
import jaxgemm

Params = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Layers:
  """What computes the products of a block.

  Attributes:
    linear: linear(x, w, bias=None, *, norm=None, activation=None, residual=None,
      transposed=False, returns_x=False); the norm is a jaxgemm.RMSNorm of x.
    mlp: mlp(x, w_up, w_down, bias_up, bias_down, *, activation, residual).
    gated_mlp: gated_mlp(x, w_gate, w_up, w_down, *, norm, residual), with silu.
    cross_entropy: cross_entropy(x, w, labels, transposed=False): float32, of each row.
    ragged_dot: as jax.lax.ragged_dot.
    normalise: normalise(norm, x) are the rows of x, by themselves.
  """

  linear: Callable[..., jax.Array]
  mlp: Callable[..., jax.Array]
  gated_mlp: Callable[..., jax.Array]
  cross_entropy: Callable[..., jax.Array]
  ragged_dot: experts.RaggedDot
  normalise: Callable[[jaxgemm.RMSNorm, jax.Array], jax.Array]


def _linear(
    x, w, bias=None, *, norm=None, activation=None, residual=None, transposed=False,
    returns_x=False,
):
  rows = x if norm is None else _normalise(norm, x)
  out = rows @ (w.T if transposed else w)
  if bias is not None:
    out = out + bias
  if activation is not None:
    out = {"gelu": jax.nn.gelu}[activation](out)
  out = out if residual is None else out + residual
  return (out, x) if returns_x else out


def _normalise(norm: jaxgemm.RMSNorm, x):
  """As models have it that do not know of us."""
  wide = _wide(x)
  mean = jnp.mean(jnp.square(wide), -1, keepdims=True)
  return (wide * lax.rsqrt(mean + norm.eps) * _wide(norm.weights)).astype(x.dtype)


def _mlp(x, w_up, w_down, bias_up, bias_down, *, activation, residual):
  hidden = _linear(x, w_up, bias_up, activation=activation)
  return _linear(hidden, w_down, bias_down, residual=residual)


def _gated_mlp(x, w_gate, w_up, w_down, *, norm, residual):
  x = _normalise(norm, x)
  return _linear(jax.nn.silu(x @ w_gate) * (x @ w_up), w_down, residual=residual)


def _cross_entropy(x, w, labels, *, transposed=False):
  logits = _linear(x, w, transposed=transposed)
  return optax.softmax_cross_entropy_with_integer_labels(_wide(logits), labels)


LAYERS = {
    "xla": Layers(
        _linear, _mlp, _gated_mlp, _cross_entropy, lax.ragged_dot, _normalise
    ),
    "jaxgemm": Layers(
        jaxgemm.linear, jaxgemm.mlp, jaxgemm.gated_mlp, jaxgemm.linear_cross_entropy,
        jaxgemm.ragged_dot, jaxgemm.RMSNorm.__call__,
    ),
}


@dataclasses.dataclass(frozen=True)
class Block:
  """A block and its sizes.

  Attributes:
    shapes: of the parameters and of x, and of further inputs, by name.
    run: run(values, layers) gives the block's result, of x's shape.
    trains: whether there is a backward pass.
    routed: tokens, experts, and how many each token goes to: a further input,
      "chosen". Were they chosen by x, a rounded x could choose others.
  """

  shapes: dict[str, tuple[int, ...]]
  run: Callable[[Params, Layers], jax.Array]
  trains: bool = True
  routed: tuple[int, int, int] | None = None


def llama(
    sequences: int, tokens: int, width: int = 4096, hidden: int = 14336, heads: int = 32,
    kv_heads: int = 8, cached: int = 0,
) -> Block:
  """A block of Llama 3, of the 8B model's sizes.

  The columns of qkv are grouped: for each head of keys the heads that query it, then its
  keys and its values, so that a share of the groups is a share of the block. With
  `cached` tokens already seen it decodes: their keys and values are inputs.
  """
  shapes = _attention_shapes(sequences, tokens, width, heads, kv_heads, cached)
  shapes |= dict(gate=(width, hidden), up=(width, hidden), down=(hidden, width))

  def run(v: Params, layers: Layers) -> jax.Array:
    x = _attended(v, layers, heads, kv_heads, cached)
    return layers.gated_mlp(
        x, v["gate"], v["up"], v["down"], norm=_norm(v["mlp_norm"]), residual=x
    )

  return Block(shapes, run, trains=not cached)


def mixtral(
    sequences: int, tokens: int, width: int = 4096, hidden: int = 14336, heads: int = 32,
    kv_heads: int = 8, num_experts: int = 8, cached: int = 0,
) -> Block:
  """A block of Mixtral 8x7B's sizes: as Llama's, with two of eight experts a token."""
  shapes = _attention_shapes(sequences, tokens, width, heads, kv_heads, cached)
  shapes |= experts.shapes(width, hidden, num_experts)

  def run(v: Params, layers: Layers) -> jax.Array:
    x = _attended(v, layers, heads, kv_heads, cached)
    rows = layers.normalise(_norm(v["mlp_norm"]), x).reshape(-1, width)
    out = experts.layer(rows, v, layers.ragged_dot, chosen=v["chosen"])
    return x + out.reshape(x.shape)

  routed = sequences * tokens, num_experts, 2
  return Block(shapes, run, trains=not cached, routed=routed)


def _attention_shapes(
    sequences: int, tokens: int, width: int, heads: int, kv_heads: int, cached: int
) -> dict[str, tuple[int, ...]]:
  """Shapes of what `_attended` takes, and of the norm behind it."""
  head = width // heads
  qkv = (heads + 2 * kv_heads) * head
  shapes = dict(
      x=(sequences, tokens, width), attention_norm=(width,), qkv=(width, qkv),
      out=(heads * head, width), mlp_norm=(width,),
  )
  seen = sequences, cached, kv_heads, head
  return shapes | (dict(keys=seen, values=seen) if cached else {})


def _attended(
    v: Params, layers: Layers, heads: int, kv_heads: int, cached: int
) -> jax.Array:
  """x and what it attends to."""
  x = v["x"]
  sequences, tokens, width = x.shape
  head = width // heads
  norm = _norm(v["attention_norm"])
  mixed, x = layers.linear(x, v["qkv"], norm=norm, returns_x=True)
  mixed = mixed.reshape(sequences, tokens, kv_heads, heads // kv_heads + 2, head)
  q = mixed[:, :, :, :-2].reshape(sequences, tokens, heads, head)
  k, values = mixed[:, :, :, -2], mixed[:, :, :, -1]
  q, k = _rotated(q, cached), _rotated(k, cached)
  if cached:
    seen = _decoded(q, k, values, v["keys"], v["values"])
  else:
    seen = _attention(q, k, values, is_causal=True)
  seen = seen.reshape(sequences, tokens, heads * head)
  return layers.linear(seen, v["out"], residual=x)


def block_shapes(width: int) -> dict[str, tuple[int, ...]]:
  """Shapes of the parameters of `pre_norm_block`."""
  return dict(
      qkv=(width, 3 * width), qkv_bias=(3 * width,), out=(width, width),
      out_bias=(width,), up=(width, 4 * width), up_bias=(4 * width,),
      down=(4 * width, width), down_bias=(width,),
      **{f"{norm}_{part}": (width,) for norm in ("attention", "mlp")
         for part in ("scale", "shift")},
  )


def pre_norm_block(
    x: jax.Array, v: Params, layers: Layers, heads: int, *, is_causal: bool
) -> jax.Array:
  """Attention, then a perceptron four times as wide, of x [sequences, tokens, width]."""
  normal = layer_norm(x, v["attention_scale"], v["attention_shift"])
  mixed = layers.linear(normal, v["qkv"], v["qkv_bias"])
  mixed = mixed.reshape(*x.shape[:2], 3, heads, x.shape[-1] // heads)
  seen = _attention(*(mixed[:, :, i] for i in range(3)), is_causal=is_causal)
  x = layers.linear(seen.reshape(x.shape), v["out"], v["out_bias"], residual=x)
  normal = layer_norm(x, v["mlp_scale"], v["mlp_shift"])
  return layers.mlp(
      normal, v["up"], v["down"], v["up_bias"], v["down_bias"], activation="gelu",
      residual=x,
  )


def vit(images: int, patches: int = 196, width: int = 1024, heads: int = 16) -> Block:
  """A block of ViT-L, of patches of 16 x 16 of 224 x 224 pixels.

  Without the class token: cuDNN's attention refuses the odd 197.
  """
  def run(v: Params, layers: Layers) -> jax.Array:
    return pre_norm_block(v["x"], v, layers, heads, is_causal=False)

  return Block(block_shapes(width) | {"x": (images, patches, width)}, run)


def draw(block: Block, seed: int, dtype="bfloat16") -> Params:
  """Returns inputs and parameters, and the cotangent of the result as "ct".

  Matrices are divided by the root of their rows, so that activations stay near 1.
  """
  shapes = block.shapes | {"ct": block.shapes["x"]}
  *keys, last = jax.random.split(jax.random.key(seed), len(shapes) + 1)
  values = {
      name: (jax.random.normal(key, shape) / _scale(name, shape)).astype(dtype)
      for key, (name, shape) in zip(keys, shapes.items(), strict=True)
  }
  if block.routed:
    tokens, num_experts, count = block.routed
    scores = jax.random.uniform(last, (tokens, num_experts))
    values["chosen"] = experts.choose(scores, count)
  return values


def _scale(name: str, shape: tuple[int, ...]) -> float:
  is_matrix = len(shape) > 1 and name not in ("x", "ct", "keys", "values")
  return shape[-2] ** 0.5 if is_matrix else 1.0


def _attention(q, k, values, **options: Any):
  """jax.nn.dot_product_attention of [sequences, tokens, heads, head] each."""
  fused = jax.default_backend() == "gpu" and q.dtype == jnp.bfloat16
  return jax.nn.dot_product_attention(
      q, k, values, implementation="cudnn" if fused else "xla", **options
  )


def _decoded(q, k, values, keys_seen, values_seen) -> jax.Array:
  """Attention of one token to itself and to those already seen.

  The two are weighted by their shares of the sum of exponentials. So nothing is appended
  to the cache, which a server extends in place, and which we only read.
  """
  out, log_sum = _attention(q, keys_seen, values_seen, return_residual=True)
  group = q.shape[2] // k.shape[2]
  k, values = (_wide(jnp.repeat(x, group, 2)) for x in (k, values))
  own = jnp.sum(_wide(q) * k, -1) / math.sqrt(q.shape[-1])
  share = jax.nn.sigmoid(own - log_sum.reshape(own.shape))[..., None]
  return ((1 - share) * _wide(out) + share * values).astype(q.dtype)


def _wide(x: jax.Array) -> jax.Array:
  return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _norm(weights) -> jaxgemm.RMSNorm:
  return jaxgemm.RMSNorm(weights, 1e-5)


def layer_norm(x, scale, shift):
  wide = _wide(x)
  wide = wide - jnp.mean(wide, -1, keepdims=True)
  variance = jnp.mean(jnp.square(wide), -1, keepdims=True)
  wide = wide * jax.lax.rsqrt(variance + 1e-5)
  return (wide * _wide(scale) + _wide(shift)).astype(x.dtype)


def _rotated(x, first: int):
  """x [sequences, tokens, heads, head] turned by the positions from `first` on."""
  half = x.shape[-1] // 2
  wide = _wide(x)
  frequencies = jnp.exp(jnp.arange(half, dtype=wide.dtype) * (-math.log(5e5) / half))
  angles = jnp.arange(first, first + x.shape[1], dtype=wide.dtype)[:, None] * frequencies
  cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
  one, other = wide[..., :half], wide[..., half:]
  turned = jnp.concatenate([one * cos - other * sin, other * cos + one * sin], -1)
  return turned.astype(x.dtype)
