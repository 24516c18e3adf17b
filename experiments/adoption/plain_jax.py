"""Plain JAX: a layer's norm, product, bias, activation and residual in one call.

  python -m experiments.adoption.plain_jax
"""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp

from experiments.adoption.compare import compare
import jaxgemm


def theirs(params, x):
  """A gated perceptron and one with biases, as one writes them without us."""
  mean = jnp.mean(jnp.square(x), -1, keepdims=True)
  rows = x * jax.lax.rsqrt(mean + 1e-5) * params["norm"]
  gated = jax.nn.silu(rows @ params["gate"]) * (rows @ params["up"])
  x = gated @ params["down"] + x
  hidden = jax.nn.gelu(x @ params["w1"] + params["b1"])
  scores = jnp.einsum("btd,bsd->bts", hidden, hidden)
  return jax.nn.softmax(scores) @ (hidden @ params["w2"] + x)


def ours(params, x):
  """The same in five kernels; of few rows of bfloat16 the norm is part of the first."""
  norm = jaxgemm.RMSNorm(params["norm"], 1e-5)
  x = jaxgemm.gated_mlp(
      x, params["gate"], params["up"], params["down"], norm=norm, residual=x
  )
  hidden = jaxgemm.linear(x, params["w1"], params["b1"], activation="gelu")
  scores = jaxgemm.einsum("btd,bsd->bts", hidden, hidden)
  out = jaxgemm.linear(hidden, params["w2"], residual=x)
  return jaxgemm.matmul(jax.nn.softmax(scores), out)


def draw() -> tuple[dict[str, jax.Array], jax.Array]:
  """Parameters, and an input."""
  shapes = dict(norm=(32,), gate=(32, 64), up=(32, 64), down=(64, 32), w1=(32, 48),
                b1=(48,), w2=(48, 32))
  keys = jax.random.split(jax.random.key(0), len(shapes) + 1)
  params = {
      name: jax.random.normal(key, shape) / 6
      for key, (name, shape) in zip(keys, shapes.items(), strict=False)
  }
  return params, jax.random.normal(keys[-1], (2, 8, 32))


def main() -> Counter:
  return compare("plain JAX", theirs, ours, *draw())


if __name__ == "__main__":
  main()
