"""Dispatch map: which kernel a product gets, over m and n at several k.

Question: Which kernel does jaxgemm choose over the plane of m and n, how does that
change with k, and is the chosen one anywhere slower than XLA's own?

Expectation: persistent has the large products, split_k the corner of few output tiles,
which grows with k, direct and pipelined the small ones at a short k; borders run where
the number of tiles passes the number of SMs. Ratios to XLA lie near one in the corner of
large m and n, where the tensor cores bound both, and above it along the axes.

Command: python -m experiments.lab --only=dispatch
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
import itertools
import math

import matplotlib
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure as Drawing
from matplotlib.patches import Patch

from experiments import report, suites
from experiments.lab import measuring, variants
from experiments.lab.rows import Row, by_problem, of_table, problem_fields, timed
from experiments.lab.tables import Figure, Table, in_powers_of_two, make_table
from jaxgemm.plan import make_plan
from pallas_kernels import KERNELS

NAME = "dispatch"
TITLE = "Dispatch map"
_MEASURED, _PLANS = "measured", "plans"
_KERNELS = (*KERNELS, "xla")


def measure(lab: variants.Lab) -> Iterator[Row]:
  """Yields the plans over a fine grid of m and n, then XLA and jaxgemm over a coarse one.
  """
  ks = lab.pick(full=(256, 4096, 16384), quick=(4096,), emulated=(64,))
  fine = lab.pick(
      full=_halving(16, 16384), quick=_halving(16, 16384), emulated=(16, 64, 256)
  )
  sizes = lab.pick(
      full=(16, 128, 1024, 8192), quick=(16, 512, 8192), emulated=(16, 64)
  )
  for k in ks:
    yield _plans(lab, k, fine)
  yield from measuring.measure(lab, NAME, (
      _job(lab, suites.make_case(m, n, k))
      for k, m, n in itertools.product(ks, sizes, sizes)
  ))


def _halving(least: int, most: int) -> tuple[int, ...]:
  """Returns sizes from `least` to `most`, each about 1.4 times the one before."""
  steps = 2 * (most // least).bit_length() - 1
  return tuple(int(least * 2 ** (i / 2)) // 8 * 8 for i in range(steps))


def _plans(lab: variants.Lab, k: int, sizes: Sequence[int]) -> Row:
  """Returns a row without times whose details have the kernel chosen at each (m, n)."""
  problem = suites.make_case(sizes[-1], sizes[-1], k).problem
  kernels = [
      [make_plan(suites.make_case(m, n, k).problem, lab.device).kernel for n in sizes]
      for m in sizes
  ]
  return Row(
      question=NAME, table=_PLANS, name=f"k={k}", problem=problem_fields(problem),
      variant="plans", kernel=None, config=None, inputs="normal", status="ok",
      times_us=None, xla_time_us=None, error=None, xla_error=None, smem_bytes=None,
      launch=None, details={"sizes": list(sizes), "kernels": kernels},
      provenance=lab.provenance,
  )


def _job(lab: variants.Lab, case: suites.Case) -> variants.Job:
  pair = [variants.xla(lab, case.problem), variants.planned(lab, case.problem)]
  return variants.Job(_MEASURED, case, pair)


def _chosen(rows: Sequence[Row]) -> list[Row]:
  return [row for row in of_table(rows, _MEASURED) if not row.is_xla]


def tables(rows: Sequence[Row]) -> list[Table]:
  lines = [
      {
          "m": row.gemm.m, "n": row.gemm.n, "k": row.gemm.k, "kernel": row.kernel,
          "XLA (us)": row.xla_time_us, "jaxgemm (us)": row.time_us,
          "+-": row.spread_us, "x XLA": row.ratio_to_xla, "check": row.status,
      }
      for row in _chosen(rows)
  ]
  counts = []
  for row in of_table(rows, _PLANS):
    count = Counter(itertools.chain.from_iterable(row.details["kernels"]))
    total = sum(count.values())
    counts.append(
        {"k": row.gemm.k, "plans": total}
        | {f"{kernel} (%)": 100 * count[kernel] / total for kernel in _KERNELS}
    )
  forms = {"XLA (us)": ".1f", "jaxgemm (us)": ".1f", "+-": ".2f", "x XLA": ".2f"}
  shares = {f"{kernel} (%)": ".0f" for kernel in _KERNELS}
  return [
      make_table("Kernels chosen over the grid of m and n", counts, shares),
      make_table("Measured products of the grid", lines, forms),
  ]


def figures(rows: Sequence[Row]) -> list[Figure]:
  return [_map(row, timed(_chosen(rows))) for row in of_table(rows, _PLANS)]


def _map(plans: Row, measured: Sequence[Row]) -> Figure:
  """Returns the plane of m and n at one k, with the measured ratios to XLA on it."""
  sizes, kernels = plans.details["sizes"], plans.details["kernels"]
  colours = [matplotlib.colormaps["Pastel1"](i) for i in range(len(_KERNELS))]
  drawing = Drawing(figsize=(7, 6), layout="constrained")
  axes = drawing.subplots()
  middles = [math.sqrt(a * b) for a, b in itertools.pairwise(sizes)]
  edges = [sizes[0] ** 2 / middles[0], *middles, sizes[-1] ** 2 / middles[-1]]
  axes.pcolormesh(
      edges, edges, [[_KERNELS.index(kernel) for kernel in line] for line in kernels],
      cmap=ListedColormap(colours), vmin=0, vmax=len(_KERNELS) - 1,
  )
  for row in measured:
    if row.gemm.k == plans.gemm.k and row.ratio_to_xla:
      axes.text(
          row.gemm.n, row.gemm.m, f"{row.ratio_to_xla:.2f}", fontsize=9, ha="center",
          va="center", color="#111111", clip_on=True,
      )
  for axis, name in ((axes.xaxis, "n"), (axes.yaxis, "m")):
    in_powers_of_two(axis)
    axis.set_label_text(name)
    axis.set_view_interval(edges[0], edges[-1], ignore=True)
  drawn = {kernel for line in kernels for kernel in line}
  drawing.legend(
      handles=[
          Patch(color=colour, label=kernel)
          for kernel, colour in zip(_KERNELS, colours, strict=True) if kernel in drawn
      ],
      loc="outside lower center", ncols=len(drawn),
  )
  title = f"{plans.name}: the kernel chosen over m and n, and its speed, of XLA's"
  return Figure(title, drawing)


def finding(rows: Sequence[Row]) -> str:
  """Says how many kernels share the plane, and where the chosen one is slowest."""
  plans = of_table(rows, _PLANS)
  parts = []
  for row in plans:
    count = Counter(itertools.chain.from_iterable(row.details["kernels"]))
    kernel, times = count.most_common(1)[0]
    parts.append(f"{row.name} {kernel} ({times / sum(count.values()):.0%})")
  words = [f"most of the plane has, at {', at '.join(parts)}"] if parts else []
  ratios = [(row.ratio_to_xla, row) for row in timed(_chosen(rows)) if row.ratio_to_xla]
  if ratios:
    worst, row = min(ratios, key=lambda one: one[0])
    slower = sum(ratio < 0.97 for ratio, _ in ratios)
    words.append(
        f"of {len(ratios)} measured products the geometric mean is"
        f" {report.geometric_mean([ratio for ratio, _ in ratios]):.2f} of XLA's speed,"
        f" {slower} are slower than 0.97, the worst {row.name} with {worst:.2f}"
        f" ({row.kernel})"
    )
  else:
    words.append(f"{len(by_problem(_chosen(rows)))} products were checked, none timed")
  text = "; ".join(words)
  return f"{text[0].upper()}{text[1:]}."
