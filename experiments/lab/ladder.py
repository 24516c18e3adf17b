"""The ladder: from no shared memory to ping-pong, one habit at a time.

Question: What does each habit of a fast kernel bring, at 4096^3 and at 2048x2048x256, in
bfloat16 and in float32 (TF32), and what does it cost in shared memory and registers?

Expectation: Shared memory and the tensor cores together bring more than a factor of ten;
double buffering and a third stage most of what a pipeline can; sums that are written back
or slots with less swizzle throw much of that away again. Of the last rungs the producer
warpgroup and the larger tile bring most at 4096^3; clusters and ping-pong, a few percent.
At k = 256 a tile is four k tiles long: there the epilogue decides, and a deep ring brings
nothing.

Command: python -m experiments.lab --only=ladder
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from matplotlib.figure import Figure as Drawing

from experiments import suites
from experiments.lab import (
  kernels_one_tile,
  kernels_rungs,
  kernels_unshared,
  measuring,
  residency,
  variants,
)
from experiments.lab.rows import XLA, Row, by_problem, timed
from experiments.lab.tables import Figure, Table, make_table, paragraphs
from pallas_kernels import tiles
from pallas_kernels.configs import BlockedConfig, PersistentConfig, PipelinedConfig

NAME = "ladder"
TITLE = "The ladder"
_STAGES = (3, 4, 5, 6)
# What it is called, the module of its kernel (None: one of the library's), its config.
_Rung = tuple[str, variants.KernelModule | None, Any]


def measure(lab: variants.Lab) -> Iterator[Row]:
  """Yields XLA and all rungs, in turn, for each problem."""
  shapes = lab.pick(
      full=[(4096, 4096, 4096), (2048, 2048, 256)],
      quick=[(2048, 2048, 2048)],
      emulated=[(64, 128, 128)],
  )
  dtypes = lab.pick(
      full=("bfloat16", "float32"), quick=("bfloat16",), emulated=("bfloat16",)
  )
  return measuring.measure(lab, NAME, (
      _job(lab, suites.make_case(*shape, dtype=dtype))
      for shape in reversed(shapes) for dtype in dtypes
  ))


def _job(lab: variants.Lab, case: suites.Case) -> variants.Job:
  problem = case.problem
  found = [variants.xla(lab, problem)]
  tile = (128, 128) if lab.on_gpu else (64, 64)
  stages = lab.pick(full=_STAGES, quick=_STAGES, emulated=_STAGES[:1])
  for name, module, config in rungs(tile, tiles.swizzle_elems(problem.dtype), stages):
    if module is None:
      found.append(variants.of_kernel(lab, problem, name, config))
    else:
      found.append(variants.of_experiment(lab, problem, name, module, config))
  found.append(variants.planned(lab, problem, "as jaxgemm plans it"))
  return variants.Job("rungs", case, found, launches=True)


def rungs(
    tile: tuple[int, int], tile_k: int, stages: Sequence[int] = _STAGES
) -> Iterator[_Rung]:
  """Yields the rungs from below; all have the same tile where they do not say so."""
  sizes = *tile, tile_k
  specialised = dict(num_stages=4, consumers=tile[0] // 64)
  yield "no shared memory", kernels_unshared, kernels_unshared.UnsharedConfig()
  yield "shared memory, one slot", None, BlockedConfig(*sizes)
  yield "double buffering", None, PipelinedConfig(*sizes, num_stages=2)
  for num_stages in stages:
    yield f"{num_stages} stages", None, PipelinedConfig(*sizes, num_stages=num_stages)
  for name, fields in (
      ("4 stages, the laboratory's kernel", {}),
      ("the same, sums written back to shared memory", dict(sums="shared")),
      ("the same, sums written back to memory", dict(sums="memory")),
      ("the same, swizzle of 64 bytes", dict(swizzle=64)),
      ("the same, swizzle of 32 bytes", dict(swizzle=32)),
      ("the same, no swizzle", dict(swizzle=0)),
  ):
    yield name, kernels_rungs, kernels_rungs.RungsConfig(*sizes, num_stages=4, **fields)
  plain = PersistentConfig(*sizes, **specialised, grid_width=1)
  yield "warp-specialised, one tile a CTA", kernels_one_tile, plain
  yield "persistent", None, plain
  tiled = specialised | dict(grid_width=8)
  yield "persistent, grid tiling", None, PersistentConfig(*sizes, **tiled)
  yield "clusters of 2, multicast", None, PersistentConfig(*sizes, **tiled, cluster_m=2)
  larger = tile[0], 2 * tile[1], tile_k
  yield "clusters of 2, tiles twice as wide", None, PersistentConfig(
      *larger, **tiled, cluster_m=2
  )
  yield "ping-pong", None, PersistentConfig(
      *sizes, num_stages=4, consumers=2, wg_dim="tile"
  )


def tables(rows: Sequence[Row]) -> list[Table]:
  found = []
  forms = {"us": ".1f", "+-": ".2f", "TFLOP/s": ".1f", "% of cuBLAS": ".1f",
           "x one slot": ".2f", "smem (KB)": ".0f", "occupancy (%)": ".1f"}
  for name, of_case in by_problem(rows).items():
    lines = []
    start = next(
        (row.time_us for row in of_case if row.kernel == "blocked"), None
    )
    for number, row in enumerate(of_case):
      launch, ratio, held = row.launch, row.ratio_to_xla, residency.of_row(row)
      smem_bytes = launch.smem_bytes if launch else row.smem_bytes
      lines.append({
          "rung": number, "what": "cuBLAS" if row.is_xla else row.variant,
          "us": row.time_us, "+-": row.spread_us, "TFLOP/s": row.tflops,
          "% of cuBLAS": None if ratio is None else 100 * ratio,
          "x one slot": start / row.time_us if start and row.time_us else None,
          "smem (KB)": None if smem_bytes is None else smem_bytes / 1024,
          "registers": launch and launch.registers,
          "CTAs an SM": held and held.ctas,
          "occupancy (%)": held and 100 * held.occupancy,
          "check": row.status,
      })
    found.append(make_table(name, lines, forms))
  return found


def figures(rows: Sequence[Row]) -> list[Figure]:
  found = []
  for name, of_case in by_problem(timed(rows)).items():
    drawing = Drawing(figsize=(8, 1 + 0.28 * len(of_case)), layout="constrained")
    axes = drawing.subplots()
    bars = axes.barh(
        range(len(of_case)), [row.tflops for row in of_case],
        color=["gray" if row.is_xla else "C0" for row in of_case],
    )
    axes.bar_label(bars, fmt="%.0f", fontsize=7, padding=2)
    names = ["cuBLAS" if row.is_xla else row.variant for row in of_case]
    axes.set_yticks(range(len(of_case)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("TFLOP/s")
    found.append(Figure(f"{name}: the rungs", drawing))
  return found


def finding(rows: Sequence[Row]) -> str:
  """Names, of each problem, the largest step up, and where the last rung stands."""
  sentences = []
  for name, of_case in by_problem(timed(rows)).items():
    # Rungs that leave a habit off again are no steps of the way up.
    steps = [
        row for row in of_case
        if not row.is_xla and row.kernel != kernels_rungs.NAME
    ]
    if len(steps) < 2:
      continue
    gains = [
        (before.time_us / after.time_us, after)
        for before, after in zip(steps, steps[1:], strict=False)
    ]
    (first, largest), *others = sorted(gains, key=lambda one: -one[0])
    best = min(steps, key=lambda row: row.time_us)
    words = (
        f"{name}: the largest step is to '{largest.variant}' ({first:.1f} times as fast)"
    )
    if others:
      words += f", the next to '{others[0][1].variant}' ({others[0][0]:.2f})"
    words += (
        f"; the highest rung is '{best.variant}' with {best.tflops:.0f} TFLOP/s,"
        f" {best.ratio_to_xla:.0%} of cuBLAS"
    )
    left_off = [row for row in of_case if row.kernel == kernels_rungs.NAME]
    if left_off:  # The first is the control. A run that was stopped may have none.
      slowest = max(left_off, key=lambda row: row.time_us)
      longer = slowest.time_us / left_off[0].time_us
      if longer > 1:
        words += (
            f"; most is lost with '{slowest.variant.removeprefix('the same, ')}', which"
            f" takes {longer:.1f} times as long"
        )
    sentences.append(words)
  if not sentences:
    checked = sum(row.status == "ok" and row.variant != XLA for row in rows)
    return f"No times, so no answer: {checked} rungs passed the gate on a CPU."
  return paragraphs(sentences)
