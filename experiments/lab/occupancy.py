"""Prefetch distance and occupancy: CTAs that share an SM, and what each one needs.

Question: What do prefetch distance, registers and shared memory leave of an SM's room for
further CTAs, and does speed follow occupancy, for each kernel and config? And how near do
all measured problems come to the roofs of memory and tensor cores?

Expectation: Speed does not follow occupancy: the fastest kernels hold one CTA an SM, and
hide latency by a deep ring in place of other CTAs. `blocked` is the exception, as three
CTAs of it stand in for a pipeline. More prefetch distance lets fewer CTAs in; in kernels
without a producer the two trade against each other, with an optimum at two or three CTAs.

Command: python -m experiments.lab --only=occupancy
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import dataclasses

from matplotlib.figure import Figure as Drawing

from experiments.lab import achieved, measuring, residency, roofline, variants
from experiments.lab.occupancy_variants import cases, kernels
from experiments.lab.rows import Row, by_problem, timed
from experiments.lab.tables import NO_TIMES, Figure, Table, make_table, paragraphs

NAME = "occupancy"
TITLE = "Prefetch distance, occupancy and the roofline"


def measure(lab: variants.Lab) -> Iterator[Row]:
  """Yields XLA and each kernel and config, with how the driver launches them."""
  listed = cases(lab)
  shares, reason = {}, "it was not asked for on a CPU or in a quick run"
  if lab.on_gpu and not lab.quick:
    found = kernels(lab, listed[-1].problem)
    serving = [v.name for v in found if v.candidate.product is not None]
    shares, reason = achieved.occupancies(serving)

  def jobs() -> Iterator[variants.Job]:
    for case in listed:
      found = [variants.xla(lab, case.problem)]
      for variant in kernels(lab, case.problem):
        known = {"achieved": shares.get(variant.name), "why not achieved": reason}
        found.append(dataclasses.replace(variant, details=variant.details | known))
      yield variants.Job("kernels", case, found, launches=True)

  return measuring.measure(lab, NAME, jobs())


def tables(rows: Sequence[Row]) -> list[Table]:
  found = []
  forms = {"us": ".1f", "+-": ".2f", "x XLA": ".2f", "smem (KB)": ".0f",
           "theoretical (%)": ".1f", "achieved (%)": ".1f"}
  for name, of_case in by_problem(rows).items():
    lines = []
    for row in of_case:
      launch, share = row.launch, row.details.get("achieved")
      held = residency.of_row(row)
      smem_bytes = launch.smem_bytes if launch else row.smem_bytes
      lines.append({
          "what": row.variant, "prefetch (k tiles)": row.details.get("prefetch"),
          "CTAs an SM": held and held.ctas, "limited by": held and held.limit,
          "registers": launch and launch.registers,
          "smem (KB)": None if smem_bytes is None else smem_bytes / 1024,
          "threads": launch.threads if launch else row.details.get("threads"),
          "theoretical (%)": held and 100 * held.occupancy,
          "achieved (%)": None if share is None else 100 * share,
          "us": row.time_us, "+-": row.spread_us, "x XLA": row.ratio_to_xla,
          "check": row.status,
      })
    found.append(make_table(f"{name}: kernels and configs", lines, forms))
  return found


def figures(rows: Sequence[Row]) -> list[Figure]:
  found = []
  for name, of_case in by_problem(timed(rows)).items():
    points = [
        (row, held.ctas) for row in of_case
        if not row.is_xla and (held := residency.of_row(row))
    ]
    if not points:
      continue
    drawing = Drawing(figsize=(8, 4.5), layout="constrained")
    axes = drawing.subplots()
    for i, kernel in enumerate(dict.fromkeys(row.kernel for row, _ in points)):
      own = [(row, ctas) for row, ctas in points if row.kernel == kernel]
      axes.scatter(
          [ctas for _, ctas in own], [row.tflops for row, _ in own], color=f"C{i}",
          label=kernel,
      )
      for row, ctas in own:
        axes.annotate(
            f"{row.details['prefetch']}", (ctas, row.tflops), fontsize=7,
            xytext=(4, 2), textcoords="offset points",
        )
    axes.set_xlabel("CTAs an SM")
    axes.set_ylabel("TFLOP/s")
    axes.legend(fontsize=8)
    title = f"{name}: speed by CTAs an SM; beside each point its prefetch distance"
    found.append(Figure(title, drawing))
  return found


def figures_of_all(rows: Sequence[Row]) -> list[Figure]:
  """The roofline, of the rows of all questions."""
  return roofline.figures(rows)


def finding(rows: Sequence[Row]) -> str:
  """Says how many CTAs an SM the fastest and the most crowded config have."""
  sentences = []
  for name, of_case in by_problem(timed(rows)).items():
    known = [
        (row, held) for row in of_case
        if not row.is_xla and (held := residency.of_row(row))
    ]
    if not known:
      continue
    best, its = min(known, key=lambda one: one[0].time_us)
    full, most = max(known, key=lambda one: one[1].ctas)
    sentences.append(
        f"{name}: of the fastest config ({best.variant}) an SM holds {its.ctas} CTA(s),"
        f" limited by {its.limit}, which load {best.details['prefetch']} k tiles ahead;"
        f" of the one of which it holds most ({full.variant}) {most.ctas}, at"
        f" {best.time_us / full.time_us:.0%} of that speed"
    )
  if not sentences:
    sentences.append(NO_TIMES)
  if not any(row.details.get("achieved") for row in rows):
    reasons = {row.details.get("why not achieved") for row in rows} - {None}
    words = f": {'; '.join(sorted(reasons))}" if reasons else ""
    sentences.append(f"Achieved occupancy is left out{words}")
  return paragraphs(sentences)
