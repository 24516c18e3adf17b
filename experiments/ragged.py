r"""Products in groups of rows, as experts multiply tokens: jax.lax.ragged_dot and ours.

The sizes of the groups are drawn, as a router gives them that is even on average: of a
problem the same for each set of operands, as some have more groups without rows, whose
matrices nobody reads. Errors come first (experiments/two_ways.py), then times in turns;
ragged.jsonl has a line for each problem and pass. Matrices in 8 bits are converted where
they are used: w.astype(x.dtype); scaled products, of operands in 8 bits, have operands
times their scales, in bfloat16, under XLA.

  python -m experiments.ragged
  python -m experiments.ragged --passes=forward
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
from jaxgemm.autotune.operands import uneven_sizes

flags.adopt_module_key_flags(cli)
flags.declare_key_flag(two_ways.PASSES.name)
flags.declare_key_flag(two_ways.ACCELERATE.name)



@dataclasses.dataclass(frozen=True)
class Experts:
  """One product.

  Attributes:
    name: of the model.
    rows: tokens, each as often as it has experts.
    groups: experts.
    k, n: of their matrices.
    dtype: of these, by name.
    scaled: whether tokens and matrices are of that dtype, with scales of blocks of 128.
    passes: which of two_ways.DIRECTIONS are of use.
  """

  name: str
  rows: int
  groups: int
  k: int
  n: int
  passes: tuple[str, ...] = two_ways.DIRECTIONS
  dtype: str = "bfloat16"
  scaled: bool = False

  def __str__(self) -> str:
    of = "" if self.dtype == "bfloat16" else f" of {self.dtype}"
    of += ", scaled" if self.scaled else ""
    return f"{self.name} {self.rows}x{self.n}x{self.k} in {self.groups} groups{of}"


PROBLEMS = (
    Experts("PLATFORM", 8192, 8, 2048, 4096),
    Experts("PLATFORM", 8192, 64, 2048, 4096),
    Experts("Mixtral 8x7B", 16384, 8, 4096, 14336),
    Experts("Mixtral 8x7B", 2048, 8, 4096, 14336),
    Experts("Mixtral 8x7B", 128, 8, 4096, 14336, ("forward",)),
    Experts("Mixtral 8x7B", 16, 8, 4096, 14336, ("forward",)),
    Experts("Mixtral 8x7B", 16, 8, 14336, 4096, ("forward",)),
    Experts("DeepSeek-V3, 64 of 256", 4096, 64, 7168, 2048),
    Experts("DeepSeek-V3, 64 of 256", 128, 64, 7168, 2048, ("forward",)),
    Experts("Qwen3-30B-A3B", 8192, 128, 2048, 768),
    Experts("Qwen3-30B-A3B", 256, 128, 2048, 768, ("forward",)),
    Experts("gpt-oss-20b", 4096, 32, 2880, 5760),
    *(
        Experts(name, rows, groups, k, n, ("forward",), dtype)
        for dtype in ("int8", "float8_e4m3fn")
        for name, rows, groups, k, n in (
            ("Mixtral 8x7B", 1024, 8, 4096, 14336),
            ("Mixtral 8x7B", 128, 8, 4096, 14336),
            ("Mixtral 8x7B", 16, 8, 4096, 14336),
            ("Mixtral 8x7B", 16, 8, 14336, 4096),
            ("Qwen3-30B-A3B", 256, 128, 2048, 768),
        )
    ),
    *(
        Experts(name, rows, groups, k, n, ("forward",), "float8_e4m3fn", True)
        for name, rows, groups, k, n in (
            ("DeepSeek-V3, 64 of 256", 4096, 64, 7168, 2048),
            ("DeepSeek-V3, 64 of 256", 4096, 64, 2048, 7168),
            ("DeepSeek-V3, 64 of 256", 128, 64, 7168, 2048),
            ("Mixtral 8x7B", 16384, 8, 4096, 14336),
        )
    ),
)
SMALL = (
    Experts("small", 96, 5, 64, 128),
    Experts("small", 24, 5, 64, 128, ("forward",), "int8"),
    Experts("small", 24, 5, 256, 128, ("forward",), "float8_e4m3fn", True),
)


def draw(experts: Experts, seed: int) -> Values:
  """Returns fresh operands "x", "w" and "sizes", and the cotangent as "ct"."""
  sizes = uneven_sizes(str(experts), experts.rows, experts.groups)
  shapes = {
      "x": (experts.rows, experts.k), "w": (experts.groups, experts.k, experts.n),
      "ct": (experts.rows, experts.n),
  }
  keys = jax.random.split(jax.random.key(seed), len(shapes))
  values = {
      name: jax.random.normal(key, shape, jnp.bfloat16)
      for key, (name, shape) in zip(keys, shapes.items(), strict=True)
  }
  if experts.scaled:
    w = values["w"].swapaxes(1, 2)  # As the tensor cores read it.
    values["x"], values["sx"] = jaxgemm.quantise(values["x"], block=(1, 128))
    values["w"], values["sw"] = jaxgemm.quantise(w, block=(128, 128))
    return values | {"sizes": jnp.asarray(sizes, jnp.int32)}
  if experts.dtype == "int8":
    values["w"] = jax.random.randint(keys[1], shapes["w"], -128, 128, jnp.int8)
  values["w"] = values["w"].astype(experts.dtype)
  return values | {"sizes": jnp.asarray(sizes, jnp.int32)}


def make_case(experts: Experts, direction: str) -> Case:
  """Returns the case of one product."""

  def run(ragged_dot, values: Values):
    x, w = values["x"], values["w"]
    return ragged_dot(x, w.astype(x.dtype), values["sizes"])

  theirs = functools.partial(run, jax.lax.ragged_dot)
  ours = functools.partial(run, jaxgemm.ragged_dot)
  if experts.scaled:
    theirs, ours = _dequantised, _scaled
  return Case(str(experts), direction, functools.partial(draw, experts), theirs, ours)


def _dequantised(values: Values) -> jax.Array:
  """By XLA: values times their scales, rounded to bfloat16."""
  dtype = values["x"].dtype if values["x"].dtype == "float64" else "bfloat16"
  x, w = (
      jaxgemm.dequantise(values[name], values[scale], dtype)
      for name, scale in (("x", "sx"), ("w", "sw"))
  )
  return jax.lax.ragged_dot(x, w.swapaxes(1, 2), values["sizes"])


def _scaled(values: Values) -> jax.Array:
  operands = (values[name] for name in ("x", "w", "sizes", "sx", "sw"))
  return jaxgemm.scaled_ragged_dot(*operands, transposed=True)


def main(argv: Sequence[str]) -> None:
  platform = cli.start(argv)
  cases = [
      make_case(experts, direction)
      for experts in (PROBLEMS if platform.on_gpu else SMALL)
      for direction in two_ways.PASSES.value if direction in experts.passes
  ]
  rows = two_ways.run(cases, platform, "ragged")
  print(two_ways.mean_ratios(rows, lambda row: row.direction))


if __name__ == "__main__":
  app.run(main)
