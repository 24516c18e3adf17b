"""What a run leaves behind: rows as JSONL, a printed table, and a chart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
import dataclasses
import json
import math
import pathlib
import statistics
from typing import Self

from matplotlib.figure import Figure
import tabulate

from experiments import suites, timing
from experiments.gate import Verdict
from experiments.products import Candidate
from experiments.suites import Case
from jaxgemm.device import Device
from pallas_kernels.problem import Problem


@dataclasses.dataclass(frozen=True)
class Provenance:
  """What every row of one run shares; see `Row`."""

  suite: str
  device: str
  jax: str
  commit: str
  date: str
  command: str


@dataclasses.dataclass(frozen=True)
class Row:
  """One problem under one implementation; None where there is no figure.

  Attributes:
    suite, klass ("class" in JSON), name: where the problem comes from.
    batch, m, n, k, lhs_layout, rhs_layout, dtype, out_dtype: the problem.
    precision: that of both products, in the words of --precision.
    implementation: a member of products.IMPLEMENTATIONS.
    plan: what ran; "n/a: " and why it could not serve; or "failed: " and why the
      gate rejected it, then the plan.
    time_us, spread_us: median, and half the distance between the quartiles.
    tflops, gbps: operations, and bytes read or written once, over the time.
    ratio_to_xla: XLA's time over this one's in the same run.
    floor_share: the floor over the time; see `floor_us`.
    error, xla_error: Frobenius errors relative to float64, on the same inputs.
    device, jax, commit, date, command: where, with what, when and how it ran.
  """

  suite: str
  klass: str
  name: str
  batch: int
  m: int
  n: int
  k: int
  lhs_layout: str
  rhs_layout: str
  dtype: str
  out_dtype: str
  precision: str
  implementation: str
  plan: str
  time_us: float | None
  spread_us: float | None
  tflops: float | None
  gbps: float | None
  ratio_to_xla: float | None
  floor_share: float | None
  error: float | None
  xla_error: float | None
  device: str
  jax: str
  commit: str
  date: str
  command: str

  @property
  def failed(self) -> bool:
    """Whether the gate rejected the result."""
    return self.plan.startswith("failed: ")

  @property
  def kernel(self) -> str | None:
    """The kernel that ran, "xla" for XLA's own; None where no result passed."""
    if self.failed or self.plan.startswith("n/a: "):
      return None
    return self.plan.partition(" ")[0]

  @classmethod
  def from_json(cls, line: str) -> Self:
    """Returns the row that `to_json` wrote.

    Raises:
      ValueError: it is no JSON, or of another kind of row.
    """
    fields = json.loads(line)
    if isinstance(fields, dict) and "class" in fields:
      fields["klass"] = fields.pop("class")
      if fields.keys() == {field.name for field in dataclasses.fields(cls)}:
        return cls(**fields)
    raise ValueError(f"not a {cls.__name__}: {line[:80]!r}")

  def to_json(self) -> str:
    """Returns the row as one line of JSON."""
    fields = {
        "class" if name == "klass" else name: _rounded(value)
        for name, value in dataclasses.asdict(self).items()
    }
    return json.dumps(fields, allow_nan=False)


def make_row(
    case: Case,
    candidate: Candidate,
    provenance: Provenance,
    *,
    verdict: Verdict | None,
    xla_error: float | None,
    device: Device | None,
    times_us: Sequence[float] | None = None,
    xla_times_us: Sequence[float] | None = None,
) -> Row:
  """Returns the row of one candidate.

  Args:
    case, candidate, provenance: what ran.
    verdict: the gate's; None where the candidate cannot serve the problem.
    xla_error: the baseline's error on the same inputs.
    device: whose rates give the floor; None where they are unknown.
    times_us: one for each call; None where nothing was timed.
    xla_times_us: the baseline's, likewise.
  """
  problem = case.problem
  plan = candidate.plan
  if verdict is not None and not verdict.passed:
    plan, times_us = f"failed: {verdict.reason}; {plan}", None
  time_us = statistics.median(times_us) if times_us else None
  xla_time_us = statistics.median(xla_times_us) if xla_times_us else None
  floor = floor_us(problem, device)
  return Row(
      suite=provenance.suite,
      klass=case.klass,
      name=case.name,
      batch=problem.batch,
      m=problem.m,
      n=problem.n,
      k=problem.k,
      lhs_layout=problem.lhs_layout,
      rhs_layout=problem.rhs_layout,
      dtype=problem.dtype,
      out_dtype=problem.out_dtype,
      precision=suites.precision_of(problem),
      implementation=candidate.implementation,
      plan=plan,
      time_us=time_us,
      spread_us=timing.spread(times_us) if times_us else None,
      tflops=problem.flops / time_us / 1e6 if time_us else None,
      gbps=problem.num_bytes / time_us / 1e3 if time_us else None,
      ratio_to_xla=xla_time_us / time_us if time_us and xla_time_us else None,
      floor_share=floor / time_us if time_us and floor else None,
      error=verdict.error if verdict is not None else None,
      xla_error=xla_error,
      device=provenance.device,
      jax=provenance.jax,
      commit=provenance.commit,
      date=provenance.date,
      command=provenance.command,
  )


def floor_us(problem: Problem, device: Device | None) -> float | None:
  """Returns the time below which no version runs on `device`, in microseconds.

  It is the larger of the operations over the measured matrix rate and the bytes
  over the measured bandwidth; None where the rates are unknown.
  """
  if device is None or problem.dtype not in device.matrix_tflops:
    return None
  compute_us = problem.flops / device.matrix_tflops[problem.dtype] / 1e6
  memory_us = problem.num_bytes / device.bandwidth_tbps / 1e6
  return max(compute_us, memory_us)


def geometric_mean(values: Sequence[float]) -> float:
  return math.exp(sum(map(math.log, values)) / len(values))


def table(rows: Iterable[Row]) -> str:
  """Returns the timed table: one line for each problem and implementation."""
  lines = [
      {
          "m": row.m,
          "n": row.n,
          "k": row.k,
          "name": row.name,
          "implementation": row.implementation,
          "latency (us)": figure(row.time_us, ".1f", _status(row)),
          "+-": figure(row.spread_us, ".1f"),
          "TFLOP/s": figure(row.tflops, ".1f"),
          "GB/s": figure(row.gbps, ".0f"),
          "x XLA": figure(row.ratio_to_xla, ".3f"),
          "of floor": figure(row.floor_share, ".2f"),
      }
      for row in rows
  ]
  return tabulate.tabulate(
      lines,
      headers="keys",
      colalign=("right",) * 3 + ("left",) * 2 + ("right",) * 6,
      disable_numparse=True,
  )


def check_table(rows: Iterable[Row]) -> str:
  """Returns the table of a run without timings: errors, verdicts and plans."""
  lines = [
      {
          "name": row.name,
          "implementation": row.implementation,
          "check": _status(row),
          "error": figure(row.error, ".1e"),
          "XLA's": figure(row.xla_error, ".1e"),
          "plan": row.plan,
      }
      for row in rows
  ]
  return tabulate.tabulate(
      lines,
      headers="keys",
      colalign=("left",) * 3 + ("right",) * 2 + ("left",),
      disable_numparse=True,
  )


def chart(rows: Sequence[Row], path: pathlib.Path, title: str) -> None:
  """Draws each problem's ratio to XLA, a bar for each implementation.

  The bars are horizontal where there are many; XLA itself is the line at 1. An
  implementation that has no time for a problem has no bar there.
  """
  names = list(dict.fromkeys(row.name for row in rows))
  implementations = list(
      dict.fromkeys(row.implementation for row in rows if row.implementation != "xla")
  )
  ratios = {(row.name, row.implementation): row.ratio_to_xla for row in rows}
  thickness = 0.8 / max(len(implementations), 1)
  num_bars = len(names) * len(implementations)
  horizontal = num_bars > 16
  length = min(2 + 0.16 * num_bars + 0.1 * len(names), 200)
  size = (9, length) if horizontal else (max(6, 2 + 1.4 * len(names)), 5)
  figure = Figure(figsize=size, layout="constrained")
  axes = figure.subplots()
  for i, implementation in enumerate(implementations):
    points = [
        (position, ratio)
        for position, name in enumerate(names)
        if (ratio := ratios.get((name, implementation))) is not None
    ]
    if not points:
      continue
    positions = [position - 0.4 + (i + 0.5) * thickness for position, _ in points]
    values = [ratio for _, ratio in points]
    draw = axes.barh if horizontal else axes.bar
    bars = draw(
        positions, values, thickness, label=implementation, color=f"C{i}"
    )
    axes.bar_label(bars, fmt="%.2f", fontsize=6, padding=2)
  if horizontal:
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(len(names) - 0.5, -0.5)  # The first problem on top.
    axes.set_xlabel("speed relative to XLA (XLA's time over this one's)")
  else:
    axes.axhline(1.0, color="black", linewidth=1)
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize=8)
    axes.set_ylabel("speed relative to XLA")
  axes.margins(0.12 if horizontal else 0.02, 0.02 if horizontal else 0.12)
  axes.set_title(title, fontsize=9)
  if axes.containers:
    figure.legend(loc="outside lower center", ncols=5, fontsize=8)
  figure.savefig(path, dpi=100)


def _status(row: Row) -> str:
  if row.plan.startswith("n/a: "):
    return "n/a"
  return "FAILED" if row.failed else "ok"


def figure(value: float | None, form: str, otherwise: str = "") -> str:
  """Returns `value` as `form` says, or `otherwise` where there is none."""
  return otherwise if value is None else format(value, form)


def _rounded(value: object) -> object:
  """Returns floats to five significant digits: more than they are worth."""
  if isinstance(value, float):
    return float(f"{value:.5g}") if math.isfinite(value) else None
  return value
