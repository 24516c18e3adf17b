"""A row: one variant of one problem, as it was measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
import dataclasses
import json
import pathlib
import statistics
from typing import Any, Self

from experiments import report, timing
from pallas_kernels.problem import Problem

XLA = "XLA"  # Name of the variant that is the baseline.
_PROBLEM_FIELDS = (
    "m", "n", "k", "batch", "lhs_layout", "rhs_layout", "dtype", "out_dtype", "algorithm",
)


@dataclasses.dataclass(frozen=True)
class Launch:
  """How a variant's largest kernel was launched.

  Attributes:
    kernel: its name.
    registers: of a thread, at launch.
    smem_bytes: shared memory of one CTA.
    threads: of one CTA.
    ctas: of the grid.
    kernels: how many kernels a call launches.
  """

  kernel: str
  registers: int
  smem_bytes: int
  threads: int
  ctas: int
  kernels: int


@dataclasses.dataclass(frozen=True)
class Row:
  """One variant of one problem; None where there is no figure.

  Attributes:
    question, table: whose row it is, and of which of its tables.
    name: of the problem.
    problem: fields of the problem; its epilogue is the plain one.
    variant: what ran, in words.
    kernel, config: the kernel, "xla" for XLA's own, and the fields of its config.
    inputs: how the operands were drawn; see operands.py.
    status: "ok", "n/a: " and why it cannot serve, or "failed: " and why.
    times_us: one for each call.
    xla_time_us: median of the baseline's, in the same rounds.
    error, xla_error: Frobenius errors relative to float64, on the same inputs.
    smem_bytes: shared memory of one CTA, as the kernel reckons it.
    launch: as the driver launched it.
    details: what only this question wants to know.
    provenance: where, with what, when and how it ran.
  """

  question: str
  table: str
  name: str
  problem: dict[str, Any]
  variant: str
  kernel: str | None
  config: dict[str, Any] | None
  inputs: str
  status: str
  times_us: tuple[float, ...] | None
  xla_time_us: float | None
  error: float | None
  xla_error: float | None
  smem_bytes: int | None
  launch: Launch | None
  details: dict[str, Any]
  provenance: report.Provenance

  @property
  def is_xla(self) -> bool:
    return self.kernel == "xla" and self.variant == XLA

  @property
  def failed(self) -> bool:
    """Whether the gate rejected the result."""
    return self.status.startswith("failed: ")

  @property
  def gemm(self) -> Problem:
    return Problem(**self.problem)

  @property
  def time_us(self) -> float | None:
    """Median."""
    return statistics.median(self.times_us) if self.times_us else None

  @property
  def spread_us(self) -> float | None:
    """Half the distance of the quartiles."""
    return timing.spread(self.times_us) if self.times_us else None

  @property
  def tflops(self) -> float | None:
    return self.gemm.flops / self.time_us / 1e6 if self.times_us else None

  @property
  def ratio_to_xla(self) -> float | None:
    """XLA's time over this one's: its share of XLA's speed."""
    if not self.times_us or self.xla_time_us is None:
      return None
    return self.xla_time_us / self.time_us

  def to_json(self) -> str:
    """Returns the row as one line of JSON."""
    fields = dataclasses.asdict(self)
    if self.times_us:
      fields["times_us"] = [float(f"{x:.5g}") for x in self.times_us]
    return json.dumps(fields, allow_nan=False)

  @classmethod
  def from_json(cls, line: str) -> Self:
    """Returns the row that `to_json` wrote.

    Raises:
      ValueError: it is no JSON, or of another kind of row.
    """
    fields = json.loads(line)
    names = {field.name for field in dataclasses.fields(cls)}
    if not isinstance(fields, dict) or fields.keys() != names:
      raise ValueError(f"not a {cls.__name__}: {line[:80]!r}")
    if fields["times_us"] is not None:
      fields["times_us"] = tuple(fields["times_us"])
    if fields["launch"] is not None:
      fields["launch"] = Launch(**fields["launch"])
    fields["provenance"] = report.Provenance(**fields["provenance"])
    return cls(**fields)


def problem_fields(problem: Problem) -> dict[str, Any]:
  """Returns what a row keeps of a problem."""
  return {name: getattr(problem, name) for name in _PROBLEM_FIELDS}


def read(path: pathlib.Path) -> list[Row]:
  """Returns the rows of a file.

  Raises:
    ValueError: a line is no row; the message names it.
  """
  rows = []
  lines = path.read_text(encoding="utf-8").splitlines()
  for number, line in enumerate(lines, start=1):
    try:
      rows.append(Row.from_json(line))
    except (TypeError, ValueError) as error:
      raise ValueError(f"{path}, line {number}: {error}") from error
  return rows


def of_table(rows: Iterable[Row], table: str) -> list[Row]:
  return [row for row in rows if row.table == table]


def by_problem(rows: Iterable[Row]) -> dict[str, list[Row]]:
  """Returns the rows of each problem, by its name, in their order."""
  found: dict[str, list[Row]] = {}
  for row in rows:
    found.setdefault(row.name, []).append(row)
  return found


def timed(rows: Iterable[Row]) -> list[Row]:
  return [row for row in rows if row.times_us]


def fastest(rows: Sequence[Row]) -> Row | None:
  """Returns the row of the shortest time; None if none has one."""
  return min(timed(rows), key=lambda row: row.time_us, default=None)
