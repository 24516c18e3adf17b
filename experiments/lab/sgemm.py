"""SGEMM against cuBLAS: float32 and bfloat16 products from 256^3 to 16384^3.

Question: What share of cuBLAS's speed do products of float32 operands reach, in TF32
and as exact as float32, and those of bfloat16, over all sizes, and over thin and wide
matrices?

Expectation: TF32 stays below cuBLAS, as a pass must round the operands first, and nears
it as the product grows; float32-accurate products from three float16 parts are two to
four times as fast as cuBLAS's SGEMM from 2048^3 on; bfloat16 is level with cuBLAS where
the tensor cores bound and ahead of it where a small product leaves SMs idle. Thin
matrices are bound by memory in every precision, so that all shares lie close to one.

Command: python -m experiments.lab --only=sgemm
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from matplotlib.figure import Figure as Drawing

from experiments import report, suites
from experiments.lab import measuring, variants
from experiments.lab.rows import XLA, Row, by_problem, of_table, timed
from experiments.lab.tables import (
  Figure,
  Table,
  in_powers_of_two,
  make_table,
  paragraphs,
)

NAME = "sgemm"
TITLE = "SGEMM against cuBLAS"
# (what it is called, dtype, precision)
PRECISIONS = (
    ("TF32", "float32", "default"),
    ("float32-accurate", "float32", "highest"),
    ("bfloat16", "bfloat16", "default"),
)
_SIZES = (256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
# Thin: few rows or few columns; wide: many columns and a short k.
_SHAPES = (
    (16, 8192, 8192), (128, 8192, 8192), (8192, 16, 8192), (128, 16384, 1024),
    (512, 32768, 256), (32768, 512, 256),
)
_SQUARE, _APART = "square", "thin and wide"


def measure(lab: variants.Lab) -> Iterator[Row]:
  """Yields XLA and jaxgemm for each size, in each precision."""
  sizes = lab.pick(full=_SIZES, quick=(1024, 4096), emulated=(64,))
  shapes = lab.pick(
      full=_SHAPES, quick=((16, 8192, 8192),), emulated=()
  )
  cases = [(_SQUARE, (size,) * 3) for size in sizes]
  cases += [(_APART, shape) for shape in shapes]

  def jobs() -> Iterator[variants.Job]:
    for table, shape in cases:
      for what, dtype, precision in PRECISIONS:
        case = suites.at_precision(suites.make_case(*shape, dtype=dtype), precision)
        pair = [
            make(lab, case.problem, details={"precision": what})
            for make in (variants.xla, variants.planned)
        ]
        yield variants.Job(table, case, pair)

  return measuring.measure(lab, NAME, jobs())


def shares(rows: Sequence[Row], table: str) -> dict[str, dict[str, float | None]]:
  """Returns cuBLAS's time over ours: by size in words, then by precision."""
  found: dict[str, dict[str, float | None]] = {}
  for row in of_table(rows, table):
    if row.variant != XLA:
      size = f"{row.gemm.m}x{row.gemm.n}x{row.gemm.k}"
      found.setdefault(size, {})[row.details["precision"]] = row.ratio_to_xla
  return found


def tables(rows: Sequence[Row]) -> list[Table]:
  found = []
  for name in (_SQUARE, _APART):
    lines = []
    for of_case in by_problem(of_table(rows, name)).values():
      theirs, ours = of_case
      lines.append({
          "m": ours.gemm.m, "n": ours.gemm.n, "k": ours.gemm.k,
          "precision": ours.details["precision"],
          "kernel": ours.kernel, "XLA runs": ", ".join(theirs.details.get("xla", ())),
          "cuBLAS (us)": theirs.time_us, "cuBLAS +-": theirs.spread_us,
          "jaxgemm (us)": ours.time_us, "jaxgemm +-": ours.spread_us,
          "TFLOP/s": ours.tflops,
          "% of cuBLAS": None if ours.ratio_to_xla is None else 100 * ours.ratio_to_xla,
          "error": ours.error, "cuBLAS's": ours.xla_error, "check": ours.status,
      })
    forms = {"cuBLAS (us)": ".1f", "jaxgemm (us)": ".1f", "cuBLAS +-": ".2f",
             "jaxgemm +-": ".2f", "TFLOP/s": ".0f", "% of cuBLAS": ".0f",
             "error": ".1e", "cuBLAS's": ".1e"}
    found.append(make_table(f"Products, {name}", lines, forms))
  return found


def figures(rows: Sequence[Row]) -> list[Figure]:
  if not timed(rows):
    return []
  drawing = Drawing(figsize=(8, 4.5), layout="constrained")
  axes = drawing.subplots()
  found = shares(rows, _SQUARE)
  for i, (what, _, _) in enumerate(PRECISIONS):
    points = [
        (int(size.split("x")[0]), 100 * share)
        for size, by_precision in found.items()
        if (share := by_precision.get(what)) is not None
    ]
    if points:
      axes.plot(*zip(*points, strict=True), marker="o", color=f"C{i}", label=what)
  axes.axhline(100, color="gray", linewidth=1)
  in_powers_of_two(axes.xaxis)
  axes.set_xlabel("m = n = k")
  axes.set_ylabel("% of cuBLAS's speed")
  axes.set_ylim(bottom=0)
  axes.legend(fontsize=8)
  square = Figure("Share of cuBLAS over m = n = k", drawing)

  drawing = Drawing(figsize=(8, 4.5), layout="constrained")
  axes = drawing.subplots()
  found = shares(rows, _APART)
  for i, (what, _, _) in enumerate(PRECISIONS):
    heights = [100 * (by_precision.get(what) or 0) for by_precision in found.values()]
    place = [x - 0.27 + 0.27 * i for x in range(len(found))]
    axes.barh(place, heights, 0.25, color=f"C{i}", label=what)
  axes.axvline(100, color="gray", linewidth=1)
  axes.set_yticks(range(len(found)), found, fontsize=8)
  axes.invert_yaxis()
  axes.set_xlabel("% of cuBLAS's speed")
  axes.legend(fontsize=8)
  return [square, Figure("Thin and wide matrices", drawing)]


def finding(rows: Sequence[Row]) -> str:
  """Says, of each precision, the mean share, the worst, and where it is ahead."""
  sentences = []
  for what, _, _ in PRECISIONS:
    square = [
        (share, size) for size, found in shares(rows, _SQUARE).items()
        if (share := found.get(what)) is not None
    ]
    apart = [
        share for found in shares(rows, _APART).values()
        if (share := found.get(what)) is not None
    ]
    if not square:
      continue
    mean = report.geometric_mean([share for share, _ in square])
    worst, where = min(square)
    ahead = sum(share > 1 for share, _ in square)
    words = (
        f"{what} has {mean:.0%} of cuBLAS's speed over m = n = k (geometric mean),"
        f" {worst:.0%} at worst ({where}), and is ahead at {ahead} of {len(square)} sizes"
    )
    if apart:
      words += f"; thin and wide, {report.geometric_mean(apart):.0%}"
    sentences.append(words)
  return paragraphs(sentences)
