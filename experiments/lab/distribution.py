"""What is in the operands: the same kernels on zeros, integers, uniform and normal data.

Question: How much does the speed of a product depend on the values that it multiplies?

Expectation: Zeros run fastest, by up to a seventh where the tensor cores bound: wires
that do not toggle take no power, and the clocks stay up. Integers come next, as most of
their mantissa bits are zero; normal data are slowest. Small products never reach the
power limit, and do not care. XLA and jaxgemm gain alike, so that a ratio between them
holds for any data, and a time only for those that it names.

Command: python -m experiments.lab --only=distribution
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import dataclasses

from matplotlib.figure import Figure as Drawing

from experiments import suites
from experiments.lab import measuring, operands, variants
from experiments.lab.rows import XLA, Row, by_problem, timed
from experiments.lab.tables import NO_TIMES, Figure, Table, make_table

NAME = "distribution"
TITLE = "Input distribution"
_REFERENCE = "normal"


def measure(lab: variants.Lab) -> Iterator[Row]:
  """Yields XLA and jaxgemm on each kind of operands, all in turn."""
  cases = lab.pick(
      full=[
          suites.make_case(512, 512, 512),
          suites.make_case(4096, 4096, 4096),
          suites.make_case(8192, 8192, 8192),
          suites.make_case(16, 4096, 14336),
          suites.make_case(4096, 4096, 4096, dtype="float32"),
      ],
      quick=[suites.make_case(512, 512, 512), suites.make_case(4096, 4096, 4096)],
      emulated=[suites.make_case(64, 64, 128)],
  )
  return measuring.measure(lab, NAME, (_job(lab, case) for case in cases))


def _job(lab: variants.Lab, case: suites.Case) -> variants.Job:
  base = variants.xla(lab, case.problem), variants.planned(lab, case.problem)
  return variants.Job(
      "distributions", case,
      [dataclasses.replace(v, inputs=how) for how in operands.DRAWS for v in base],
  )


def tables(rows: Sequence[Row]) -> list[Table]:
  lines = []
  for name, of_case in by_problem(rows).items():
    for how in operands.DRAWS:
      line = {"problem": name, "inputs": how}
      for row in of_case:
        if row.inputs == how:
          line |= {
              f"{row.variant} (us)": row.time_us,
              f"{row.variant} +-": row.spread_us,
              f"{row.variant} gains": gain(of_case, row),
              f"{row.variant} check": row.status,
          }
      lines.append(line)
  forms = {f"{name} {what}": form for name in (XLA, "jaxgemm")
           for what, form in (("(us)", ".1f"), ("+-", ".2f"), ("gains", ".3f"))}
  return [make_table("Times by distribution; gains are over normal data", lines, forms)]


def gain(of_case: Sequence[Row], row: Row) -> float | None:
  """Returns the time of the same variant on normal data over this time."""
  for other in of_case:
    if (other.variant, other.inputs) == (row.variant, _REFERENCE):
      if other.time_us and row.time_us:
        return other.time_us / row.time_us
  return None


def figures(rows: Sequence[Row]) -> list[Figure]:
  cases = by_problem(timed(rows))
  if not cases:
    return []
  drawing = Drawing(figsize=(8, 4), layout="constrained")
  axes = drawing.subplots()
  width = 0.8 / (2 * len(operands.DRAWS))
  for i, how in enumerate(operands.DRAWS):
    for j, variant in enumerate((XLA, "jaxgemm")):
      gains = [
          next((gain(of_case, row) for row in of_case
                if (row.inputs, row.variant) == (how, variant)), None) or 0.0
          for of_case in cases.values()
      ]
      place = [x - 0.4 + (2 * i + j + 0.5) * width for x in range(len(cases))]
      axes.bar(
          place, gains, width, color=f"C{i}", alpha=1.0 if j else 0.5,
          label=f"{how}, {variant}",
      )
  axes.axhline(1.0, color="gray", linewidth=1)
  axes.set_xticks(range(len(cases)), cases, fontsize=8, rotation=10)
  axes.set_ylabel("speed, of that on normal data")
  axes.set_ylim(bottom=0.8)
  drawing.legend(loc="outside lower center", ncols=4, fontsize=8)
  return [Figure("Speed by distribution, of that on normal data", drawing)]


def finding(rows: Sequence[Row]) -> str:
  """Says which inputs gain most, and whether both implementations gain alike."""
  gains = [
      (gained, row)
      for of_case in by_problem(timed(rows)).values()
      for row in of_case
      if row.inputs != _REFERENCE and (gained := gain(of_case, row))
  ]
  if not gains:
    return f"{NO_TIMES}."
  best, row = max(gains, key=lambda one: one[0])
  least, slowest = min(gains, key=lambda one: one[0])
  apart = [
      abs(gained - other)
      for gained, x in gains for other, y in gains
      if (x.name, x.inputs, x.variant, y.variant) == (y.name, y.inputs, XLA, "jaxgemm")
  ]
  alike = f"; XLA and jaxgemm gain within {max(apart):.1%} of each other" if apart else ""
  return (
      f"Of the speed on normal data, {row.inputs} have {best:.3f} at best ({row.variant},"
      f" {row.name}), and {slowest.inputs} {least:.3f} at worst ({slowest.variant},"
      f" {slowest.name}){alike}."
  )
