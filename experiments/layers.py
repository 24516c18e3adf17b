r"""Layers: product, bias, activation and residual, XLA's and ours, forward and backward.

Both layers get the same operands in bfloat16. Each result, and of a backward pass each
gradient, is compared with the same layer in float64; the error of ours may be twice
XLA's. Then the two are timed in turns. NAME.jsonl has a line for each layer, size and
pass.

  python -m experiments.layers
  python -m experiments.layers --layers=gated --sizes=8192,4096,14336 --passes=forward
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools
import json
import statistics
import sys
from typing import Any
import zlib

from absl import app, flags
import jax
import jax.numpy as jnp
import tabulate

from experiments import cli, common_flags, report, timing
import jaxgemm

flags.adopt_module_key_flags(cli)
Values = dict[str, jax.Array]
_ERROR_FACTOR = 2.0


@dataclasses.dataclass(frozen=True)
class Layer:
  """A layer in two ways: functions of its operands by name."""

  operands: tuple[str, ...]
  theirs: Callable[[Values], jax.Array]
  ours: Callable[[Values], jax.Array]


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
PASSES = ("forward", "both")
# tokens, k, n
_SIZES = ("8192,4096,14336", "8192,14336,4096", "4096,4096,14336", "2048,4096,14336",
          "512,4096,14336", "64,4096,14336", "8192,768,3072", "8192,3072,768",
          "16384,768,3072", "6304,1024,4096")
_SMALL = ("64,32,48",)

_LAYERS = flags.DEFINE_list("layers", list(LAYERS), "Layers; see experiments/layers.py.")
_PASSES = flags.DEFINE_list(
    "passes", list(PASSES), "forward, or both: the result and all gradients."
)
_SIZE = flags.DEFINE_multi_string(
    "sizes", [], "TOKENS,K,N: x is [TOKENS, K] and w [K, N]; may be repeated."
)
for _flag, _allowed in ((_LAYERS, tuple(LAYERS)), (_PASSES, PASSES)):
  flags.register_validator(
      _flag.name, cli.member_check(_allowed), f"must be among {', '.join(_allowed)}"
  )


@dataclasses.dataclass(frozen=True)
class LayerRow:
  """One layer of one size, one pass.

  Attributes:
    layer, direction, tokens, k, n: what ran.
    error, xla_error: the largest error of a result or gradient, in Frobenius norms
      relative to float64; None if not finite.
    time_us, spread_us, xla_time_us, xla_spread_us: medians, and half the distances of
      the quartiles; None where nothing was timed.
    ratio_to_xla: XLA's time over ours.
    provenance: where, with what, when and how it ran.
  """

  layer: str
  direction: str
  tokens: int
  k: int
  n: int
  error: float | None
  xla_error: float | None
  time_us: float | None
  spread_us: float | None
  xla_time_us: float | None
  xla_spread_us: float | None
  provenance: report.Provenance

  @property
  def name(self) -> str:
    return f"{self.layer} {self.direction} {self.tokens}x{self.k}x{self.n}"

  @property
  def failed(self) -> bool:
    """Whether the gate rejected the result."""
    if self.error is None or self.xla_error is None:
      return True
    return self.error > _ERROR_FACTOR * self.xla_error

  @property
  def ratio_to_xla(self) -> float | None:
    if self.time_us is None or self.xla_time_us is None:
      return None
    return self.xla_time_us / self.time_us

  def to_json(self) -> str:
    """Returns the row as one line of JSON."""
    fields = dataclasses.asdict(self) | {"ratio_to_xla": self.ratio_to_xla}
    return json.dumps(fields | fields.pop("provenance"), allow_nan=False)


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


def computed(run: Callable[[Values], jax.Array], direction: str, values: Values) -> Any:
  """Returns the result of a layer, or in both directions it and the gradients."""
  operands = {name: x for name, x in values.items() if name != "ct"}
  if direction == "forward":
    return run(operands)
  out, backward = jax.vjp(run, operands)
  return out, backward(values["ct"])


def error(found: Any, truth: Any) -> float | None:
  """Returns the largest error of an array, or None if one is not finite."""
  with jax.enable_x64(True):
    errors = [
        float(jnp.linalg.norm(a.astype("float64") - b) / jnp.linalg.norm(b))
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(truth), strict=True)
    ]
  largest = max(errors)
  return largest if all(x < float("inf") for x in errors) else None


def measure(
    name: str, direction: str, sizes: tuple[int, int, int], repeats: int, l2_bytes: int,
    provenance: report.Provenance,
) -> LayerRow:
  """Returns the row of one layer: the gate first, then the times."""
  layer = LAYERS[name]
  seed = zlib.crc32(f"{common_flags.SEED.value} {name} {sizes}".encode())
  values = draw(layer, sizes, seed)
  programs = {
      which: jax.jit(functools.partial(computed, run, direction))
      for which, run in (("xla", layer.theirs), ("jaxgemm", layer.ours))
  }
  with jax.enable_x64(True):
    wide = {key: x.astype("float64") for key, x in values.items()}
    truth = jax.jit(functools.partial(computed, layer.theirs, direction))(wide)
  errors = {which: error(run(values), truth) for which, run in programs.items()}
  del truth, wide
  row = LayerRow(
      name, direction, *sizes, errors["jaxgemm"], errors["xla"], None, None, None, None,
      provenance,
  )
  if row.failed or not repeats:
    return row
  set_bytes = sum(x.nbytes for x in values.values())
  num_sets = min(timing.num_input_sets(set_bytes, l2_bytes), 2 * repeats)
  sets = [(values,)] + [(draw(layer, sizes, seed + i),) for i in range(1, num_sets)]
  times = timing.interleaved(programs, sets, repeats)
  ours, theirs = times["jaxgemm"], times["xla"]
  return dataclasses.replace(
      row, time_us=statistics.median(ours), spread_us=timing.spread(ours),
      xla_time_us=statistics.median(theirs), xla_spread_us=timing.spread(theirs),
  )


def table(rows: Sequence[LayerRow]) -> str:
  """Returns the rows as text."""
  lines = [
      (row.name, report.figure(row.xla_time_us, ".1f"), report.figure(row.time_us, ".1f"),
       report.figure(row.ratio_to_xla, ".3f"), report.figure(row.error, ".1e"),
       report.figure(row.xla_error, ".1e"), "FAILED" if row.failed else "")
      for row in rows
  ]
  headers = ["layer", "XLA (us)", "jaxgemm (us)", "x XLA", "error", "XLA's", ""]
  return tabulate.tabulate(lines, headers, disable_numparse=True)


def summary(rows: Sequence[LayerRow]) -> str:
  """Returns the geometric means of each layer and pass, as text."""
  ratios: dict[str, list[float]] = {}
  for row in rows:
    if row.ratio_to_xla is not None:
      ratios.setdefault(f"{row.layer} {row.direction}", []).append(row.ratio_to_xla)
  return "\n".join(
      f"{name}: {report.geometric_mean(found):.3f} of {len(found)} sizes,"
      f" {min(found):.3f} at worst" for name, found in ratios.items()
  )


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
      (name, direction, size)
      for name in _LAYERS.value for size in sizes for direction in _PASSES.value
  ]
  provenance = cli.row_provenance("layers", platform, "experiments.layers")
  l2_bytes = platform.device.l2_bytes if platform.device else 0
  repeats = cli.repeats(platform, 20)

  def rows() -> Iterator[list[LayerRow]]:
    for case in cases:
      yield [measure(*case, repeats, l2_bytes, provenance)]

  path = cli.output_path("layers").with_suffix(".jsonl")
  with platform.context():
    found = cli.record(rows(), len(cases), path)
  print(table(found))
  print(summary(found))
  print(f"rows: {path}")
  if any(row.failed for row in found):
    sys.exit(1)


if __name__ == "__main__":
  app.run(main)
