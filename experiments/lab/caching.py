"""Caching, sequential against overlapped: and does the average decide the answer?

Question: How much faster is a kernel whose loads overlap its products (double buffering)
than one that loads, waits and multiplies (input caching), each with and without output
caching, and do five ways to average the times agree?

Expectation: Overlap brings a quarter to a third at 4096^3: CTAs that share an SM hide
part of each other's waits even without it. Output caching matters where k is short, as
the result is then a large part of what moves. All five averages agree on every order,
as the times of one kernel scatter by 1% or less; the mean alone is pulled up by stray
calls.

Command: python -m experiments.lab --only=caching
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import statistics

from matplotlib.figure import Figure as Drawing
import numpy as np

from experiments import suites
from experiments.lab import kernels_rungs, measuring, variants
from experiments.lab.rows import XLA, Row, by_problem, timed
from experiments.lab.tables import Figure, Table, make_table, paragraphs

NAME = "caching"
TITLE = "Sequential and overlapped caching"
_GROUPS = 10
# (what it is called, slots, whether the output is cached)
WAYS = (
    ("input caching", 1, False),
    ("double buffering", 2, False),
    ("input and output caching", 1, True),
    ("double buffering and output caching", 2, True),
)


def _group_means(times: Sequence[float]) -> list[float]:
  """Returns the means of ten groups of calls that came one after the other."""
  groups = np.array_split(np.asarray(times), min(_GROUPS, len(times)))
  return sorted(float(group.mean()) for group in groups)


def median_of_means(times: Sequence[float]) -> float:
  return statistics.median(_group_means(times))


def mean_of_small_means(times: Sequence[float]) -> float:
  """Returns the mean of the smaller half of the group means."""
  means = _group_means(times)
  return statistics.mean(means[: -(-len(means) // 2)])


def robust_mean(times: Sequence[float]) -> float:
  """Returns the mean of what lies between the first and the third quartile."""
  first, third = np.percentile(times, [25, 75])
  return statistics.mean(x for x in times if first <= x <= third)


AVERAGES: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": statistics.mean,
    "median of means": median_of_means,
    "mean of small means": mean_of_small_means,
    "robust mean": robust_mean,
    "minimum": min,
}


def measure(lab: variants.Lab) -> Iterator[Row]:
  """Yields XLA and the four ways, of many calls each."""
  shapes = lab.pick(
      full=[(4096, 4096, 4096), (1024, 1024, 1024), (2048, 2048, 256)],
      quick=[(2048, 2048, 2048)],
      emulated=[(64, 128, 128)],
  )
  return measuring.measure(lab, NAME, (
      _job(lab, suites.make_case(*shape)) for shape in shapes
  ))


def _job(lab: variants.Lab, case: suites.Case) -> variants.Job:
  tile = (128, 128, 64) if lab.on_gpu else (64, 64, 64)
  found = [variants.xla(lab, case.problem)]
  for name, num_stages, cached_output in WAYS:
    config = kernels_rungs.RungsConfig(
        *tile, num_stages=num_stages, cached_output=cached_output
    )
    found.append(
        variants.of_experiment(lab, case.problem, name, kernels_rungs, config)
    )
  return variants.Job("ways", case, found, repeats=10 * lab.repeats)


def tables(rows: Sequence[Row]) -> list[Table]:
  found = []
  forms = {f"{name} (us)": ".2f" for name in AVERAGES} | {"x XLA": ".2f", "+-": ".2f"}
  for name, of_case in by_problem(rows).items():
    lines = []
    for row in of_case:
      lines.append(
          {"how": row.variant, "calls": len(row.times_us or ())}
          | {
              f"{what} (us)": average(row.times_us) if row.times_us else None
              for what, average in AVERAGES.items()
          }
          | {"+-": row.spread_us, "x XLA": row.ratio_to_xla, "check": row.status}
      )
    found.append(make_table(f"{name}: averages of the same calls", lines, forms))
    found.append(make_table(
        f"{name}: sequential time over overlapped time", gains(of_case),
        dict.fromkeys(AVERAGES, ".3f"),
    ))
  return found


def gains(of_case: Sequence[Row]) -> list[dict[str, float | str]]:
  """Returns what overlap gains, and what output caching does, by each average."""
  times = {row.variant: row.times_us for row in timed(of_case)}
  (inputs, *_), (double, *_), (inputs_out, *_), (double_out, *_) = WAYS
  pairs = (
      ("overlap", inputs, double),
      ("overlap with output caching", inputs_out, double_out),
      ("output caching where sequential", inputs, inputs_out),
      ("output caching where overlapped", double, double_out),
  )
  return [
      {"what": what}
      | {name: of(times[before]) / of(times[after]) for name, of in AVERAGES.items()}
      for what, before, after in pairs if before in times and after in times
  ]


def figures(rows: Sequence[Row]) -> list[Figure]:
  found = []
  for name, of_case in by_problem(timed(rows)).items():
    drawing = Drawing(figsize=(8, 3.5), layout="constrained")
    axes = drawing.subplots()
    for i, row in enumerate(of_case):
      ordered = np.sort(row.times_us)
      share = np.arange(1, len(ordered) + 1) / len(ordered)
      axes.step(ordered, 100 * share, color=f"C{i}", label=row.variant)
    axes.set_xlabel("us")
    axes.set_ylabel("calls no longer (%)")
    drawing.legend(loc="outside lower center", ncols=3, fontsize=8)
    found.append(Figure(f"{name}: distribution of the times", drawing))
  return found


def finding(rows: Sequence[Row]) -> str:
  """Says what overlap gains by the median of means, and how far the averages differ."""
  sentences = []
  for name, of_case in by_problem(timed(rows)).items():
    words, apart = [], 0.0
    for gain in gains(of_case):
      values = [gain[average] for average in AVERAGES]
      apart = max(apart, max(values) / min(values) - 1)
      words.append(f"{gain['what']} {gain['median of means']:.2f}")
    if not words:
      continue
    orders = {
        tuple(sorted(
            (row.variant for row in of_case if row.variant != XLA),
            key={row.variant: of(row.times_us) for row in of_case}.__getitem__,
        ))
        for of in AVERAGES.values()
    }
    agree = "agree" if len(orders) == 1 else "do not agree"
    sentences.append(
        f"{name}: {', '.join(words)} times as fast by the median of means; the averages"
        f" differ by up to {apart:.1%} and {agree} on the order"
    )
  return paragraphs(sentences)
