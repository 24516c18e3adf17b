r"""Products in groups of rows: ours, and the Pallas kernel that JAX has as an example.

jax.experimental.pallas.ops.gpu.ragged_dot_mgpu leaves tiles, slots and the raster to its
caller. So it has each of CONFIGS, and the fastest counts; ours has its plan. Calls take
turns, forward, of bfloat16. What does not compile, or is far from our result (which
experiments/ragged.py holds against float64), is left out and named. ragged_pallas.jsonl
has a line for each problem.

  python -m experiments.ragged_pallas
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools
import json
import statistics
from typing import Any

from absl import app, flags
import jax
from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu
import numpy as np
import tabulate

from experiments import cli, ragged, report, timing
from experiments.ragged import Experts
import jaxgemm
from jaxgemm import device as device_lib
from jaxgemm import reference

flags.adopt_module_key_flags(cli)

OURS = "jaxgemm"
MAX_DIFFERENCE = 5e-3  # Of two results, each rounded to bfloat16: 2.3e-3.
_NUM_SETS = 3  # Of operands, the smallest of 400 MB.


@dataclasses.dataclass(frozen=True)
class Config:
  """What JAX's kernel leaves to its caller, by its names."""

  block_m: int
  block_n: int
  max_concurrent_steps: int
  grid_block_n: int
  block_k: int = 64

  def __str__(self) -> str:
    return (
        f"{self.block_m}x{self.block_n}, {self.max_concurrent_steps} steps,"
        f" {self.grid_block_n} wide"
    )


CONFIGS = (
    Config(128, 128, 6, 1), Config(128, 128, 6, 8), Config(64, 128, 6, 4),
    Config(64, 192, 6, 4), Config(64, 256, 5, 4), Config(128, 192, 4, 4),
    Config(192, 128, 4, 4), Config(64, 64, 8, 4),
)


@dataclasses.dataclass(frozen=True)
class Row:
  """What was found of a problem.

  Attributes:
    name: of the problem.
    time_us, spread_us: ours: median, and half the distance of the quartiles.
    others_us: median of each config of JAX's kernel.
    left_out: why each other config has none.
    provenance: where, with what, when and how it ran.
  """

  name: str
  time_us: float
  spread_us: float
  others_us: dict[str, float]
  left_out: dict[str, str]
  provenance: report.Provenance

  @property
  def best(self) -> str | None:
    """The fastest config of JAX's kernel."""
    return min(self.others_us, key=self.others_us.__getitem__, default=None)

  @property
  def ratio(self) -> float | None:
    """The time of JAX's kernel over ours."""
    return None if self.best is None else self.others_us[self.best] / self.time_us

  def to_json(self) -> str:
    """Returns the row as one line of JSON."""
    fields = dataclasses.asdict(self) | {"best": self.best, "ratio": self.ratio}
    return json.dumps(fields | fields.pop("provenance"), allow_nan=False)


def by_pallas(config: Config) -> Callable[..., jax.Array]:
  """ragged_dot of JAX's kernel."""
  options = dataclasses.asdict(config)
  return lambda x, w, sizes: ragged_dot_mgpu.ragged_dot(
      x, w, group_sizes=sizes, **options
  )


def compiled(
    others: dict[str, Callable[..., jax.Array]], operands: Sequence[jax.Array]
) -> tuple[dict[str, Any], dict[str, str]]:
  """Our program and those of the others that agree with it, and why each of the rest not.
  """
  ours = jax.jit(jaxgemm.ragged_dot).lower(*operands).compile()
  wanted = np.asarray(ours(*operands)).astype(np.float32)
  programs, left_out = {OURS: ours}, {}
  for name, run in others.items():
    try:
      program = jax.jit(run).lower(*operands).compile()
      found = np.asarray(program(*operands)).astype(np.float32)
    except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
      left_out[name] = str(error).splitlines()[0]
      continue
    difference = reference.relative_error(found, wanted)
    if difference <= MAX_DIFFERENCE:
      programs[name] = program
    else:
      left_out[name] = f"differs by {difference:.1e}"
  return programs, left_out


def measure(experts: Experts, repeats: int, provenance: report.Provenance) -> Row:
  """Returns the row of one problem."""
  sets = []
  for seed in range(_NUM_SETS):
    values = ragged.draw(experts, seed)
    sets.append((values["x"], values["w"], values["sizes"]))
  others = {str(config): by_pallas(config) for config in CONFIGS}
  programs, left_out = compiled(others, sets[0])
  times = timing.interleaved(programs, sets, repeats)
  ours = times.pop(OURS)
  medians = {name: statistics.median(found) for name, found in times.items()}
  return Row(
      str(experts), statistics.median(ours), timing.spread(ours), medians, left_out,
      provenance,
  )


def table(rows: Sequence[Row]) -> str:
  """Returns the rows as text."""
  lines = [
      (row.name, report.figure(row.others_us.get(row.best), ".1f"), row.best or "none",
       f"{row.time_us:.1f}", report.figure(row.ratio, ".3f"))
      for row in rows
  ]
  headers = ["", "JAX's (us)", "its config", "jaxgemm (us)", "ratio"]
  return tabulate.tabulate(lines, headers, disable_numparse=True)


def main(argv: Sequence[str]) -> None:
  platform = cli.start(argv)
  if not (platform.on_gpu and device_lib.supported(platform.device)):
    raise app.UsageError(f"{platform.name}: JAX's kernel is for Hopper GPUs")
  problems = [each for each in ragged.PROBLEMS if each.dtype == "bfloat16"]
  provenance = cli.row_provenance(
      "ragged_pallas", platform, "experiments.ragged_pallas"
  )
  run = functools.partial(
      measure, repeats=cli.repeats(platform, 15), provenance=provenance
  )

  def rows() -> Iterator[list[Row]]:
    for experts in problems:
      yield [run(experts)]

  path = cli.output_path("ragged_pallas").with_suffix(".jsonl")
  found = cli.record(rows(), len(problems), path)
  print(table(found))
  print(f"rows: {path}")
  ratios = [row.ratio for row in found if row.ratio is not None]
  mean = report.geometric_mean(ratios)
  print(f"{mean:.3f} of {len(ratios)}, {min(ratios):.3f} at worst")


if __name__ == "__main__":
  app.run(main)
