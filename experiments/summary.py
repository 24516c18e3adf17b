r"""What a suite says as a whole: speed by class, whose kernels ran, share of the floor.

experiments/run.py prints it after its table. As a program it reads stored rows, those
of several runs side by side; of a sweep's rows it prints experiments/sweep.py's lines.

  python -m experiments.summary results/full.jsonl
  python -m experiments.summary results/burst.jsonl results/sustained.jsonl
  python -m experiments.summary results/full.jsonl results/roofline.jsonl

The figures are those of "auto", what jaxgemm chooses: XLA's time over its time as
geometric means. A problem that failed has no time and counts only as a problem.

The limit is what nobody can have: kernels as fast as what only reads, or only
multiplies, and to start as the shortest kernel there is; or XLA's own time if that is
less. With rows of experiments/roofline.py, which moved as many bytes and multiplied as
often as the problem does, those count in place of the best rates; what a product was seen
to take is possible, though.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import pathlib

from absl import app
import jax.numpy as jnp
import tabulate

from experiments import roofline, suites, sweep
from experiments.report import Row, figure, geometric_mean

IMPLEMENTATION = "auto"
# Of the problems that the memory bounds, those large enough for it to.
FLOOR_CLASSES = ("medium", "skinny")
FLOOR_OPERAND_BYTES = 30e6
# The shortest product that an H200 was seen to form, XLA's 16x16x16.
SHORTEST_US = 0.93
# The floor's rates are those of copies and of large products. Alone, reading reaches 1.07
# times as much there, and the tensor cores 1.06 (experiments/ceilings.py).
CEILING = 1.07


@dataclasses.dataclass(frozen=True)
class Speed:
  """Ratios to XLA of a group of problems.

  Attributes:
    problems, timed: how many there are, and how many have a time.
    ratio: geometric mean of XLA's time over jaxgemm's; None if none has a time.
    worst: the row of the smallest ratio, or None.
    limit: the largest ratio that there can be; None if a floor is not known.
  """

  problems: int
  timed: int
  ratio: float | None
  worst: Row | None
  limit: float | None = None


def chosen(rows: Sequence[Row]) -> list[Row]:
  """Returns the rows of what jaxgemm chose, one for each problem."""
  return [row for row in rows if row.implementation == IMPLEMENTATION]


Rooflines = Mapping[str, float]  # Microseconds, by the name of the problem.


def speed(rows: Sequence[Row], rooflines: Rooflines | None = None) -> Speed:
  """Returns what the rows of one implementation, one a problem, say of its speed.

  `rooflines`: how long the problems' bytes and operations alone take, where known.
  """
  timed = [row for row in rows if row.ratio_to_xla is not None]
  if not timed:
    return Speed(len(rows), 0, None, None)
  ratio = geometric_mean([row.ratio_to_xla for row in timed])
  worst, limit = min(timed, key=lambda row: row.ratio_to_xla), None
  if all(row.floor_share is not None for row in timed):
    limit = geometric_mean([
        max(_xla_us(row) / _least_us(row, (rooflines or {}).get(row.name)), 1.0)
        for row in timed
    ])
  return Speed(len(rows), len(timed), ratio, worst, limit)


def speeds(rows: Sequence[Row], rooflines: Rooflines | None = None) -> dict[str, Speed]:
  """Returns the speed of each class that occurs, then under "all" that of all."""
  classes = [klass for klass in suites.CLASSES if any(r.klass == klass for r in rows)]
  found = {
      klass: speed([row for row in rows if row.klass == klass], rooflines)
      for klass in classes
  }
  return found | {"all": speed(rows, rooflines)}


def _xla_us(row: Row) -> float:
  """XLA's time of a row that has a time."""
  return row.ratio_to_xla * row.time_us


def _least_us(row: Row, roofline_us: float | None) -> float:
  """The time below which no kernel comes, of a row that has a time and a floor."""
  if roofline_us is None:
    return row.floor_share * row.time_us / CEILING + SHORTEST_US
  return min(roofline_us, row.time_us)


def left_to_xla(rows: Sequence[Row]) -> list[Row]:
  """Returns the rows whose plan is XLA's own product."""
  return [row for row in rows if row.kernel == "xla"]


def operand_bytes(row: Row) -> int:
  """Returns the bytes of both operands."""
  elements = row.batch * row.k * (row.m + row.n)
  return elements * jnp.dtype(row.dtype).itemsize


def floor_rows(rows: Sequence[Row]) -> list[Row]:
  """Returns the timed rows by which the share of the floor is judged."""
  return [
      row
      for row in rows
      if row.klass in FLOOR_CLASSES
      and row.floor_share is not None
      and operand_bytes(row) >= FLOOR_OPERAND_BYTES
  ]


def table(runs: Mapping[str, Sequence[Row]], rooflines: Rooflines | None = None) -> str:
  """Returns the speed by class, a line each, the runs side by side.

  Args:
    runs: rows of "auto" by what to call their run; no name is shown of a single one.
    rooflines: see `speed`.
  """
  found = {name: speeds(rows, rooflines) for name, rows in runs.items()}
  lines = []
  for klass in (*suites.CLASSES, "all"):
    line = {"class": klass}
    for name, by_class in found.items():
      prefix = f"{name}: " if len(runs) > 1 else ""
      one = by_class.get(klass, Speed(0, 0, None, None))
      line |= {
          f"{prefix}problems": str(one.problems),
          f"{prefix}timed": str(one.timed),
          f"{prefix}x XLA": figure(one.ratio, ".3f"),
          f"{prefix}limit": figure(one.limit, ".3f"),
          f"{prefix}worst": figure(one.worst and one.worst.ratio_to_xla, ".3f"),
          f"{prefix}which": one.worst.name if one.worst else "",
      }
    if any(klass in by_class for by_class in found.values()):
      lines.append(line)
  return tabulate.tabulate(
      lines,
      headers="keys",
      colalign=("left", *(("right",) * 5 + ("left",)) * len(runs)),
      disable_numparse=True,
  )


def remarks(rows: Sequence[Row]) -> str:
  """Returns whose kernels ran, what XLA kept, and the share of the floor.

  Args:
    rows: all rows of one run, XLA's among them.
  """
  ours = chosen(rows)
  planned = [row for row in ours if row.kernel is not None]
  kept = left_to_xla(planned)
  own = len(planned) - len(kept)
  share = f" ({own / len(planned):.0%})" if planned else ""
  lines = [f"own kernels: {own} of {len(planned)} problems{share}"]
  lines += [
      f"  XLA's for {row.name} (x{figure(row.ratio_to_xla, '.3f', '?')}): {row.plan}"
      for row in kept
  ]
  if failed := len(ours) - len(planned):
    lines.append(f"{failed} of {len(ours)} problems failed")
  if judged := floor_rows(ours):
    names = {row.name for row in judged}
    xla = [r for r in floor_rows(rows) if r.implementation == "xla" and r.name in names]
    of_xla = f", XLA's {_mean_share(xla):.3f}" if xla else ""
    lines.append(
        f"share of the floor: {_mean_share(judged):.3f}{of_xla} (geometric mean of"
        f" {len(judged)} {' and '.join(FLOOR_CLASSES)} problems with at least"
        f" {FLOOR_OPERAND_BYTES / 1e6:.0f} MB of operands)"
    )
  return "\n".join(lines)


def text(runs: Mapping[str, Sequence[Row]], rooflines: Rooflines | None = None) -> str:
  """Returns the table of all runs, then the remarks on each of them."""
  parts = [table({name: chosen(rows) for name, rows in runs.items()}, rooflines)]
  for name, rows in runs.items():
    parts += [f"{name}:"] if len(runs) > 1 else []
    parts.append(remarks(rows))
  return "\n".join(parts)


def read[RowT: (Row, sweep.SweepRow, roofline.Row)](
    path: pathlib.Path, kind: type[RowT] = Row
) -> list[RowT]:
  """Returns the rows of a file.

  Raises:
    ValueError: a line is not a row of that kind; the message names it.
  """
  rows = []
  lines = path.read_text(encoding="utf-8").splitlines()
  for number, line in enumerate(lines, start=1):
    try:
      rows.append(kind.from_json(line))
    except ValueError as error:
      raise ValueError(f"{path}, line {number}: {error}") from error
  return rows


def _mean_share(rows: Sequence[Row]) -> float:
  return geometric_mean([row.floor_share for row in rows])


def _has(field: str, path: pathlib.Path) -> bool:
  """Whether the file's first row has that field."""
  with path.open(encoding="utf-8") as file:
    return f'"{field}"' in file.readline()


def main(argv: Sequence[str]) -> None:
  paths = [pathlib.Path(argument) for argument in argv[1:]]
  if not paths:
    raise app.UsageError("name one or more files of rows")
  try:
    swept = [path for path in paths if _has("estimate_us", path)]
    alone = [path for path in paths if _has("roofline_us", path)]
    is_short = len({path.stem for path in paths}) == len(paths)
    names = {path: path.stem if is_short else str(path) for path in paths}
    others = swept + alone
    runs = {names[path]: read(path) for path in paths if path not in others}
    sweeps = {names[path]: read(path, sweep.SweepRow) for path in swept}
    rows = [row for path in alone for row in read(path, roofline.Row)]
  except (OSError, ValueError) as error:
    raise app.UsageError(str(error)) from error
  times_us = {
      row.name: row.roofline_us for row in rows if row.roofline_us is not None
  }
  if runs:
    print(text(runs, times_us))
  for name, rows in sweeps.items():
    print(f"{name}:\n{sweep.summary(rows)}")


if __name__ == "__main__":
  app.run(main)
