"""The same computation with XLA's products and with jaxgemm's: errors, times, memory.

The time as a whole, calls in turns, and of each kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
import dataclasses
import functools
import json
import statistics
from typing import Any
import zlib

from absl import flags
import jax
import jax.numpy as jnp
import tabulate

from experiments import cli, common_flags, report, timing
import jaxgemm

Values = dict[str, jax.Array]
Run = Callable[[Values], jax.Array]
DIRECTIONS = ("forward", "both")
PASSES = flags.DEFINE_list(
    "passes", list(DIRECTIONS), "forward, or both: the result and all gradients."
)
flags.register_validator(
    PASSES.name, cli.member_check(DIRECTIONS), "must be among forward, both"
)
ACCELERATE = flags.DEFINE_boolean(
    "accelerate", False, "Whether ours is theirs as jaxgemm.accelerate rewrites it,"
    " gradients included, and not as it is written with our functions.",
)
ERROR_FACTOR = 2.0  # Of ours over XLA's.
_UNKNOWN_L2_BYTES = 64 << 20
_PROFILED_CALLS = 5  # Of each way, kernel by kernel.
_NAME_CHARS = 80  # Of a kernel.


@dataclasses.dataclass(frozen=True)
class Case:
  """A computation in two ways.

  Attributes:
    name: of the computation and its sizes.
    direction: "forward", or "both": the result and all gradients.
    draw: draw(seed) gives fresh operands by name, the cotangent of the result as "ct";
      those of integers have no gradient.
    theirs, ours: functions of the operands; `theirs` computes the truth in float64, too.
  """

  name: str
  direction: str
  draw: Callable[[int], Values]
  theirs: Run
  ours: Run


@dataclasses.dataclass(frozen=True)
class Row:
  """What was found of a case.

  Attributes:
    name, direction: of the case.
    error, xla_error: the largest error of a result or gradient, in Frobenius norms
      relative to float64; None if not finite.
    time_us, spread_us, xla_time_us, xla_spread_us: medians, and half the distances of
      the quartiles, of all kernels of a call; None where nothing was timed.
    memory_bytes, xla_memory_bytes: that a call needs beside its operands and results.
    kernels, xla_kernels: those of a call in their order, each with the median of the
      time that it adds; empty where nothing was timed.
    provenance: where, with what, when and how it ran.
  """

  name: str
  direction: str
  error: float | None
  xla_error: float | None
  time_us: float | None
  spread_us: float | None
  xla_time_us: float | None
  xla_spread_us: float | None
  memory_bytes: int
  xla_memory_bytes: int
  provenance: report.Provenance
  kernels: tuple[tuple[str, float], ...] = ()
  xla_kernels: tuple[tuple[str, float], ...] = ()

  @property
  def failed(self) -> bool:
    """Whether the gate rejected our result."""
    if self.error is None or self.xla_error is None:
      return True
    return self.error > ERROR_FACTOR * self.xla_error

  @property
  def ratio_to_xla(self) -> float | None:
    """XLA's time over ours."""
    if self.time_us is None or self.xla_time_us is None:
      return None
    return self.xla_time_us / self.time_us

  def to_json(self) -> str:
    """Returns the row as one line of JSON."""
    fields = dataclasses.asdict(self) | {"ratio_to_xla": self.ratio_to_xla}
    return json.dumps(fields | fields.pop("provenance"), allow_nan=False)


def computed(run: Run, direction: str, values: Values) -> Any:
  """Returns the result, or in both directions it and the gradients."""
  operands = {name: x for name, x in values.items() if name != "ct"}
  if direction == "forward":
    return run(operands)
  varied = {name: x for name, x in operands.items() if _is_inexact(x)}
  out, backward = jax.vjp(lambda varied: run(operands | varied), varied)
  # In a model the cotangent comes after the result: no pass may serve both directions.
  out, ct = jax.lax.optimization_barrier((out, values["ct"]))
  return out, backward(ct)


def _is_inexact(x: jax.Array) -> bool:
  return jnp.issubdtype(x.dtype, jnp.inexact)


def error(found: Any, truth: Any) -> float | None:
  """Returns the largest error of an array, or None if one is not finite."""
  with jax.enable_x64(True):
    errors = [
        float(jnp.linalg.norm(a.astype("float64") - b) / jnp.linalg.norm(b))
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(truth), strict=True)
    ]
  return max(errors) if all(x < float("inf") for x in errors) else None


def measure(
    case: Case, repeats: int, l2_bytes: int, provenance: report.Provenance
) -> Row:
  """Returns the row of one case: the gate first, then the times."""
  seed = zlib.crc32(f"{common_flags.SEED.value} {case.name}".encode())
  values = case.draw(seed)
  theirs, ours = (
      functools.partial(computed, run, case.direction)
      for run in (case.theirs, case.ours)
  )
  if ACCELERATE.value:
    ours = jaxgemm.accelerate(theirs)
  programs = {
      which: jax.jit(run).lower(values).compile()
      for which, run in (("xla", theirs), ("jaxgemm", ours))
  }
  with jax.enable_x64(True):
    wide = {
        key: x.astype("float64") if _is_inexact(x) else x for key, x in values.items()
    }
    truth = jax.jit(functools.partial(computed, case.theirs, case.direction))(wide)
  errors = {which: error(run(values), truth) for which, run in programs.items()}
  del truth, wide
  memory = {
      which: run.memory_analysis().temp_size_in_bytes for which, run in programs.items()
  }
  row = Row(
      case.name, case.direction, errors["jaxgemm"], errors["xla"], None, None, None, None,
      memory["jaxgemm"], memory["xla"], provenance,
  )
  if row.failed or not repeats:
    return row
  set_bytes = sum(x.nbytes for x in values.values())
  num_sets = min(timing.num_input_sets(set_bytes, l2_bytes), 2 * repeats)
  sets = [(values,)] + [(case.draw(seed + i),) for i in range(1, num_sets)]
  times = timing.interleaved(programs, sets, repeats)
  ours, theirs = times["jaxgemm"], times["xla"]
  kernels = {
      which: tuple(
          (name[:_NAME_CHARS], round(time_us, 3))
          for name, time_us in timing.by_kernel(run, sets, _PROFILED_CALLS)
      )
      for which, run in programs.items()
  }
  return dataclasses.replace(
      row, time_us=statistics.median(ours), spread_us=timing.spread(ours),
      xla_time_us=statistics.median(theirs), xla_spread_us=timing.spread(theirs),
      kernels=kernels["jaxgemm"], xla_kernels=kernels["xla"],
  )


def table(rows: Sequence[Row]) -> str:
  """Returns the rows as text."""
  lines = [
      (f"{row.name} {row.direction}", report.figure(row.xla_time_us, ".1f"),
       report.figure(row.time_us, ".1f"), report.figure(row.ratio_to_xla, ".3f"),
       report.figure(row.error, ".1e"), report.figure(row.xla_error, ".1e"),
       f"{row.memory_bytes / 1e6:.0f}", f"{row.xla_memory_bytes / 1e6:.0f}",
       "FAILED" if row.failed else "")
      for row in rows
  ]
  headers = ["", "XLA (us)", "jaxgemm (us)", "x XLA", "error", "XLA's", "MB", "XLA's", ""]
  return tabulate.tabulate(lines, headers, disable_numparse=True)


def run(cases: Sequence[Case], platform: cli.Platform, name: str) -> list[Row]:
  """Measures the cases, writes NAME.jsonl, prints a table; exits with 1 if one fails."""
  provenance = cli.row_provenance(name, platform, f"experiments.{name}")
  l2_bytes = platform.device.l2_bytes if platform.device else _UNKNOWN_L2_BYTES
  repeats = cli.repeats(platform, 20)

  def rows() -> Iterator[list[Row]]:
    for case in cases:
      yield [measure(case, repeats, l2_bytes, provenance)]

  path = cli.output_path(name).with_suffix(".jsonl")
  with platform.context():
    found = cli.record(rows(), len(cases), path)
  cli.conclude(found, table(found), path)
  return found


def mean_ratios(rows: Iterable[Row], group: Callable[[Row], str]) -> str:
  """Returns the geometric mean of each group's ratios, and the worst, as text."""
  ratios: dict[str, list[float]] = {}
  for row in rows:
    if row.ratio_to_xla is not None:
      ratios.setdefault(group(row), []).append(row.ratio_to_xla)
  return "\n".join(
      f"{name}: {report.geometric_mean(found):.3f} of {len(found)}, {min(found):.3f} at"
      " worst"
      for name, found in ratios.items()
  )
