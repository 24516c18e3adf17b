r"""Products of 8-bit operands with scales: XLA's ways and jaxgemm.scaled_matmul.

Of the layers of DeepSeek-V3, tokens with a scale for each row and 128 of k, weights with
one for each 128 x 128: XLA multiplies the values times their scales, rounded to bfloat16.
With one scale for each row and column XLA multiplies in 8 bits, too, and scales what
comes of it. Errors come first (experiments/two_ways.py), then times in turns;
scaled.jsonl has a line for each product. What is done to scales is in the time: those of
tokens, which a layer has just made, are transposed.

  python -m experiments.scaled
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import functools

from absl import app, flags
import jax
import jax.numpy as jnp

from experiments import cli, two_ways
from experiments.two_ways import Case, Values
import jaxgemm

flags.adopt_module_key_flags(cli)

BLOCKS = {"x": (1, 128), "w": (128, 128)}
ROWS = {"x": (1, -1), "w": (1, -1)}
_LAYERS = (  # (n, k) of DeepSeek-V3, as DeepGEMM's table has them.
    (2112, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048),
)


@dataclasses.dataclass(frozen=True)
class Layer:
  """x [rows, k] times w [n, k], as inference stores it; `by_rows`: the second way."""

  rows: int
  n: int
  k: int
  by_rows: bool = False

  def __str__(self) -> str:
    how = "rows" if self.by_rows else "blocks"
    return f"{self.rows}x{self.n}x{self.k} scales of {how}"


LAYERS = (
    *(Layer(rows, *sizes) for rows in (64, 128, 4096) for sizes in _LAYERS),
    *(Layer(rows, 4096, 7168, by_rows=True) for rows in (64, 4096)),
)
SMALL = Layer(24, 136, 256), Layer(24, 136, 256, by_rows=True)


def draw(layer: Layer, seed: int) -> Values:
  """Returns fresh operands "x" and "w", and their scales "sx" and "sw"."""
  keys, values = jax.random.split(jax.random.key(seed)), {}
  shapes = {"x": (layer.rows, layer.k), "w": (layer.n, layer.k)}
  blocks = ROWS if layer.by_rows else BLOCKS
  for key, (name, shape) in zip(keys, shapes.items(), strict=True):
    wide = jax.random.normal(key, shape, jnp.bfloat16)
    values[name], values[f"s{name}"] = jaxgemm.quantise(wide, block=blocks[name])
  return values


def by_xla(values: Values, by_rows: bool) -> jax.Array:
  """The product as one writes it for XLA: see the module's docstring."""
  x, w, sx, sw = (values[name] for name in ("x", "w", "sx", "sw"))
  exact = x.dtype == "float64"
  if by_rows:
    wide = "float64" if exact else "float32"
    out = jnp.matmul(x, w.T, preferred_element_type=wide) * sx * sw.T
  else:
    dtype = "float64" if exact else "bfloat16"
    out = jaxgemm.dequantise(x, sx, dtype) @ jaxgemm.dequantise(w, sw, dtype).T
  return out if exact else out.astype("bfloat16")


def by_us(values: Values) -> jax.Array:
  x, w, sx, sw = (values[name] for name in ("x", "w", "sx", "sw"))
  return jaxgemm.scaled_matmul(x, w.T, sx, sw.T)


def main(argv: Sequence[str]) -> None:
  platform = cli.start(argv)
  cases = [
      Case(
          str(layer), "forward", functools.partial(draw, layer),
          functools.partial(by_xla, by_rows=layer.by_rows), by_us,
      )
      for layer in (LAYERS if platform.on_gpu else SMALL)
  ]
  rows = two_ways.run(cases, platform, "scaled")
  print(two_ways.mean_ratios(rows, lambda row: row.name.rpartition(" ")[2]))


if __name__ == "__main__":
  app.run(main)
