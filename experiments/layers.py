r"""Layers: product, bias, activation and residual, XLA's and ours, forward and backward.

Both get the same operands in bfloat16. Each result, and of a backward pass each
gradient, is compared with the same layer in float64; the error of ours may be twice
XLA's. Then the two are timed in turns. layers.jsonl has a line for each layer, size and
pass.

  python -m experiments.layers
  python -m experiments.layers --kinds=gated --sizes=8192,4096,14336 --passes=forward
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import functools

from absl import app, flags
import jax

from experiments import cli, two_ways
from experiments.two_ways import Case, Run, Values
import jaxgemm

flags.adopt_module_key_flags(cli)
flags.declare_key_flag(two_ways.PASSES.name)
flags.declare_key_flag(two_ways.ACCELERATE.name)


@dataclasses.dataclass(frozen=True)
class Layer:
  """A layer in two ways: functions of its operands by name."""

  operands: tuple[str, ...]
  theirs: Run
  ours: Run


def _with_bias(activation: str) -> Layer:
  function = {"gelu": jax.nn.gelu, "silu": jax.nn.silu, "relu": jax.nn.relu}[activation]
  return Layer(
      ("x", "w", "bias"),
      lambda v: function(v["x"] @ v["w"] + v["bias"]),
      lambda v: jaxgemm.linear(v["x"], v["w"], v["bias"], activation=activation),
  )


LAYERS = {
    "bias_gelu": _with_bias("gelu"),
    "bias_silu": _with_bias("silu"),
    "bias_relu": _with_bias("relu"),
    "residual": Layer(
        ("x", "w", "residual"),
        lambda v: v["x"] @ v["w"] + v["residual"],
        lambda v: jaxgemm.linear(v["x"], v["w"], residual=v["residual"]),
    ),
    "gated": Layer(
        ("x", "w", "up"),
        lambda v: jax.nn.silu(v["x"] @ v["w"]) * (v["x"] @ v["up"]),
        lambda v: jaxgemm.gated_linear(v["x"], v["w"], v["up"]),
    ),
}
# tokens, k, n
_SIZES = ("8192,4096,14336", "8192,14336,4096", "4096,4096,14336", "2048,4096,14336",
          "512,4096,14336", "64,4096,14336", "8192,768,3072", "8192,3072,768",
          "16384,768,3072", "6304,1024,4096")
_SMALL = ("64,32,48",)

_KINDS = flags.DEFINE_list("kinds", list(LAYERS), "Layers; see experiments/layers.py.")
_SIZE = flags.DEFINE_multi_string(
    "sizes", [], "TOKENS,K,N: x is [TOKENS, K] and w [K, N]; may be repeated."
)
flags.register_validator(
    _KINDS.name, cli.member_check(tuple(LAYERS)), f"must be among {', '.join(LAYERS)}"
)


def draw(
    layer: Layer, sizes: tuple[int, int, int], seed: int, dtype="bfloat16"
) -> Values:
  """Returns fresh operands, and the cotangent of the result as "ct".

  Products of normal x and w would saturate every activation: w is divided by the root
  of k.
  """
  tokens, k, n = sizes
  shapes = dict(x=(tokens, k), w=(k, n), up=(k, n), bias=(n,), residual=(tokens, n),
                ct=(tokens, n))
  names = (*layer.operands, "ct")
  keys = jax.random.split(jax.random.key(seed), len(names))
  return {
      name: (
          jax.random.normal(key, shapes[name]) / (k**0.5 if name in ("w", "up") else 1)
      ).astype(dtype)
      for name, key in zip(names, keys, strict=True)
  }


def parse_size(text: str) -> tuple[int, int, int]:
  """Returns the numbers of TOKENS,K,N; UsageError if they are none."""
  parts = text.split(",")
  if len(parts) == 3 and all(part.isdecimal() and int(part) for part in parts):
    tokens, k, n = map(int, parts)
    return tokens, k, n
  raise app.UsageError(f"--sizes={text} is not TOKENS,K,N, three positive numbers")


def main(argv: Sequence[str]) -> None:
  platform = cli.start(argv)
  sizes = [parse_size(x) for x in _SIZE.value or (_SIZES if platform.on_gpu else _SMALL)]
  cases = [
      Case(
          f"{name} {'x'.join(map(str, size))}", direction,
          functools.partial(draw, LAYERS[name], size), LAYERS[name].theirs,
          LAYERS[name].ours,
      )
      for name in _KINDS.value for size in sizes for direction in two_ways.PASSES.value
  ]
  rows = two_ways.run(cases, platform, "layers")
  print(two_ways.mean_ratios(rows, lambda row: f"{row.name.split()[0]} {row.direction}"))


if __name__ == "__main__":
  app.run(main)
