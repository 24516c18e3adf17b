"""Stages, tiles and warpgroups: what an autotuner sees of one product.

Question: How do the tile, the stages of the ring and the consumer warpgroups decide the
speed of a large square product and of a deep one, and how flat is the top?

Expectation: At 4096^3 the tile of 128x256 with two consumers wins, with as many stages
as fit: two stages leave the tensor cores waiting for memory, the third and fourth bring
most of what there is to gain, more bring nothing. One consumer cannot fill the tensor
cores. At 1024x1024x14336 the k is split, and the tile matters less than that tiles times
splits fill the SMs once.

Command: python -m experiments.lab --only=stages
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import itertools

from matplotlib.figure import Figure as Drawing
import numpy as np

from experiments import suites
from experiments.lab import measuring, variants
from experiments.lab.rows import XLA, Row, by_problem, fastest, timed
from experiments.lab.tables import Figure, Table, make_table, paragraphs
from pallas_kernels import tiles
from pallas_kernels.configs import PersistentConfig, SplitKConfig
from pallas_kernels.problem import Problem

NAME = "stages"
TITLE = "Stages, tiles and warpgroups"
# tile_m, tile_n, consumers, wg_dim
_SHAPES = (
    (64, 128, 1, "m"), (64, 256, 1, "m"), (128, 128, 1, "m"), (128, 128, 2, "m"),
    (128, 192, 2, "m"), (128, 256, 2, "m"), (256, 128, 2, "m"), (192, 192, 3, "m"),
    (128, 192, 2, "tile"), (64, 256, 2, "tile"),
)
_FEW_SHAPES = ((64, 128, 1, "m"), (128, 128, 2, "m"), (128, 256, 2, "m"))


def measure(lab: variants.Lab) -> Iterator[Row]:
  """Yields XLA and every tile with every number of stages, all in turn."""
  cases = lab.pick(
      full=[(4096, 4096, 4096), (1024, 1024, 14336)],
      quick=[(4096, 4096, 4096), (1024, 1024, 14336)],
      emulated=[(128, 128, 256)],
  )
  shapes = lab.pick(full=_SHAPES, quick=_FEW_SHAPES, emulated=_FEW_SHAPES[:1])
  stages = lab.pick(full=range(2, 7), quick=(2, 4, 6), emulated=(2, 3))
  return measuring.measure(lab, NAME, (
      _job(lab, suites.make_case(*case), shapes, stages) for case in cases
  ))


def _job(lab: variants.Lab, case: suites.Case, shapes, stages) -> variants.Job:
  found = [variants.xla(lab, case.problem)]
  for shape, num_stages in itertools.product(shapes, stages):
    config = _config(lab, case.problem, shape, num_stages)
    details = {"shape": shape_name(*shape), "stages": num_stages}
    name = f"{details['shape']}, {num_stages} stages"
    found.append(
        variants.of_kernel(lab, case.problem, name, config, details=details)
    )
  return variants.Job("tuning", case, found)


def shape_name(tile_m: int, tile_n: int, consumers: int, wg_dim: str) -> str:
  how = " in turns" if wg_dim == "tile" else ""
  return f"{tile_m}x{tile_n}, {consumers} consumer{'s' * (consumers > 1)}{how}"


def _config(
    lab: variants.Lab, problem: Problem, shape, num_stages: int
) -> PersistentConfig:
  """Returns a config of persistent, or where its tiles leave SMs idle, of split_k."""
  tile_m, tile_n, consumers, wg_dim = shape
  fields = dict(
      tile_m=tile_m, tile_n=tile_n, tile_k=tiles.swizzle_elems(problem.dtype),
      num_stages=num_stages, consumers=consumers, wg_dim=wg_dim,
  )
  num_tiles = tiles.TileGrid.of(problem, tile_m, tile_n).num_tiles
  splits = lab.device.num_sms // num_tiles
  if lab.on_gpu and splits > 1:
    return SplitKConfig(**fields, splits=splits)
  return PersistentConfig(**fields)


def tables(rows: Sequence[Row]) -> list[Table]:
  found = []
  forms = {"us": ".1f", "+-": ".2f", "GFLOP/s": ".0f", "x XLA": ".3f"}
  for name, of_case in by_problem(rows).items():
    lines = []
    for row in of_case:
      config = row.config or {}
      lines.append({
          "what": XLA if row.is_xla else row.details["shape"],
          "stages": row.details.get("stages"),
          "kernel": row.kernel, "splits": config.get("splits"),
          "smem (KB)": row.smem_bytes and row.smem_bytes / 1024,
          "us": row.time_us, "+-": row.spread_us,
          "GFLOP/s": row.tflops and 1e3 * row.tflops, "x XLA": row.ratio_to_xla,
          "check": row.status,
      })
    lines.sort(key=lambda line: line["us"] or float("inf"))
    found.append(make_table(f"{name}: configs, the fastest first", lines, forms))
  return found


def figures(rows: Sequence[Row]) -> list[Figure]:
  return [
      _heat_map(name, [row for row in timed(of_case) if not row.is_xla])
      for name, of_case in by_problem(rows).items() if fastest(of_case)
  ]


def _heat_map(name: str, rows: Sequence[Row]) -> Figure:
  shapes = list(dict.fromkeys(row.details["shape"] for row in rows))
  stages = sorted({row.details["stages"] for row in rows})
  ratios = np.full((len(shapes), len(stages)), np.nan)
  for row in rows:
    at = shapes.index(row.details["shape"]), stages.index(row.details["stages"])
    ratios[at] = row.ratio_to_xla
  drawing = Drawing(figsize=(7, 1.2 + 0.42 * len(shapes)), layout="constrained")
  axes = drawing.subplots()
  image = axes.imshow(ratios, aspect="auto", cmap="viridis")
  middle = (np.nanmin(ratios) + np.nanmax(ratios)) / 2
  for (i, j), ratio in np.ndenumerate(ratios):
    if np.isfinite(ratio):
      colour = "#111111" if ratio > middle else "#ffffff"
      axes.text(
          j, i, f"{ratio:.2f}", ha="center", va="center", fontsize=8, color=colour
      )
  axes.set_xticks(range(len(stages)), stages)
  axes.set_yticks(range(len(shapes)), shapes, fontsize=8)
  axes.set_xlabel("stages")
  drawing.colorbar(image, label="speed, of XLA's")
  return Figure(f"{name}: speed by tile, consumers and stages, of XLA's", drawing)


def finding(rows: Sequence[Row]) -> str:
  """Names the best config of each problem, and how many come within 3% of it."""
  sentences = []
  for name, of_case in by_problem(rows).items():
    ours = timed(row for row in of_case if not row.is_xla)
    best = fastest(ours)
    if best is None:
      continue
    near = sum(row.time_us <= 1.03 * best.time_us for row in ours)
    worst = max(row.time_us for row in ours) / best.time_us
    gains = []
    for other in ours:
      if other.details["shape"] == best.details["shape"]:
        if other.details["stages"] != best.details["stages"]:
          gains.append(f"{other.details['stages']} stages {other.time_us:.1f} us")
    others = f" (the same with {', '.join(gains)})" if gains else ""
    sentences.append(
        f"{name}: {best.variant} is the fastest with {best.time_us:.1f} us,"
        f" {best.ratio_to_xla:.2f} of XLA's speed{others}; {near} of {len(ours)} configs"
        f" come within 3% of it, the slowest takes {worst:.1f} times as long"
    )
  return paragraphs(sentences)
