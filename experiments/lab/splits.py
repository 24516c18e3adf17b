"""Split-k: into how many parts, of which k tiles, added up how; and where it loses.

Question: From which k on does it pay to split k among CTAs, how many splits are best,
do contiguous or strided splits read faster, does a kernel of its own add the partial sums
faster than the clusters themselves, and does stream-k do better than any number of
splits?

Expectation: At 512x512, whose tiles fill an eighth of the SMs, the best number of splits
is the one that fills them once, and the gain nears that factor as k grows; beyond it each
split costs a partial sum, written and read, and gains nothing. Sums added within clusters
save the second kernel's 2 us, which counts at a short k alone. Strided splits read
neighbouring lines at the same time, and gain a little where memory bounds. Stream-k nears
the best number of splits without being told it. Where the tiles fill the SMs already
(4096^3) splitting loses: the partial sums are extra traffic, and no SM was idle.

Command: python -m experiments.lab --only=splits
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from matplotlib.figure import Figure as Drawing

from experiments import suites
from experiments.lab import kernels_stream_k, kernels_strided, measuring, variants
from experiments.lab.rows import Row, by_problem, fastest, timed
from experiments.lab.tables import (
  Figure,
  Table,
  in_powers_of_two,
  make_table,
  paragraphs,
)
from pallas_kernels import tiles
from pallas_kernels.configs import PersistentConfig, SplitKConfig

NAME = "splits"
TITLE = "Split-k and stream-k"
_TILE = dict(tile_m=128, tile_n=128, tile_k=64, num_stages=4)
_SMALL_TILE = dict(tile_m=64, tile_n=64, tile_k=64, num_stages=2)
_ORDERED = (2, 8, 32)  # Splits whose orders are compared.
# Ways to share out k and to add up.
WHOLE, SEPARATE, FUSED = "whole k", "separate reduction", "fused reduction"
CONTIGUOUS, STRIDED, STREAM = "contiguous, XLA adds", "strided, XLA adds", "stream-k"


def measure(lab: variants.Lab) -> Iterator[Row]:
  """Yields XLA and all ways to share out k, for each k, then for a large product."""
  ks = lab.pick(full=(4096, 16384, 131072), quick=(16384,), emulated=(128,))
  splits = lab.pick(full=(2, 4, 8, 16, 32, 64), quick=(2, 8), emulated=(2,))
  size = lab.pick(full=512, quick=512, emulated=64)
  large = lab.pick(full=[(4096, 4096, 4096)], quick=[(4096, 4096, 4096)], emulated=[])

  def jobs() -> Iterator[variants.Job]:
    for k in ks:
      case = suites.make_case(size, size, k)
      yield variants.Job("fixed m and n", case, list(_ways(lab, case, splits)))
    for shape in large:
      case = suites.make_case(*shape)
      yield variants.Job("where it loses", case, list(_ways(lab, case, (2, 4))))

  return measuring.measure(lab, NAME, jobs())


def _ways(lab: variants.Lab, case: suites.Case, splits) -> Iterator[variants.Variant]:
  problem, tile = case.problem, _TILE if lab.on_gpu else _SMALL_TILE
  consumers = dict(consumers=2 if lab.on_gpu else 1)

  def details(way: str, count: int) -> dict:
    sums = count if way in (SEPARATE, CONTIGUOUS, STRIDED) else count // tiles.MAX_CTAS
    if way == FUSED and count <= tiles.MAX_CTAS:
      sums = 0
    return {
        "way": way, "splits": count, "sums": 0 if way == WHOLE else sums,
        "tiles": tiles.TileGrid.of(problem, tile["tile_m"], tile["tile_n"]).num_tiles,
        "sms": lab.device.num_sms,
    }

  yield variants.xla(lab, problem)
  yield variants.of_kernel(
      lab, problem, WHOLE, PersistentConfig(**tile, **consumers),
      details=details(WHOLE, 1),
  )
  for count in splits:
    for way, cluster_k in ((SEPARATE, 1), (FUSED, min(count, tiles.MAX_CTAS))):
      config = SplitKConfig(**tile, **consumers, splits=count, cluster_k=cluster_k)
      name = f"{count} splits, {way}"
      yield variants.of_kernel(lab, problem, name, config, details=details(way, count))
    for way, strided in ((CONTIGUOUS, False), (STRIDED, True)):
      if count not in _ORDERED:
        continue
      config = kernels_strided.StridedConfig(**tile, splits=count, strided=strided)
      yield variants.of_experiment(
          lab, problem, f"{count} splits, {way}", kernels_strided, config,
          details=details(way, count),
      )
  config = kernels_stream_k.StreamKConfig(**tile, **consumers)
  yield variants.of_experiment(
      lab, problem, STREAM, kernels_stream_k, config, details={"way": STREAM}
  )


def sums_bytes(row: Row) -> int:
  """Returns the bytes of partial sums that go through memory, there and back."""
  return 2 * 4 * row.gemm.m * row.gemm.n * row.details.get("sums", 0)


def tables(rows: Sequence[Row]) -> list[Table]:
  found = []
  forms = {"us": ".1f", "+-": ".2f", "TFLOP/s": ".0f", "x whole k": ".2f",
           "x XLA": ".2f", "partial sums (MB)": ".1f"}
  for name, of_case in by_problem(rows).items():
    whole = _of(of_case, WHOLE)
    lines = []
    for row in of_case:
      gain = None
      if row.times_us and whole and whole.times_us:
        gain = whole.time_us / row.time_us
      lines.append({
          "how": row.details.get("way", row.variant), "splits": row.details.get("splits"),
          "us": row.time_us, "+-": row.spread_us, "TFLOP/s": row.tflops,
          "x whole k": gain, "x XLA": row.ratio_to_xla,
          "partial sums (MB)": None if row.is_xla or row.details["way"] == STREAM
          else sums_bytes(row) / 1e6,
          "check": row.status,
      })
    found.append(make_table(f"{name}: ways to share out k", lines, forms))
  return found


def _of(rows: Sequence[Row], way: str) -> Row | None:
  """Returns the fastest row of a way."""
  return fastest([row for row in rows if row.details.get("way") == way])


def _why(whole: Row, split: Row) -> str:
  """Returns what is known of why splits lose: whether SMs were idle, and the traffic."""
  found = whole.details
  idle = "leave some of" if found["tiles"] < found["sms"] else "fill"
  return (
      f"{found['tiles']} tiles {idle} {found['sms']} SMs without it, and"
      f" {sums_bytes(split) / 1e6:.0f} MB of partial sums come and go"
  )


def figures(rows: Sequence[Row]) -> list[Figure]:
  cases = {
      name: of_case for name, of_case in by_problem(timed(rows)).items()
      if _of(of_case, WHOLE)
  }
  if not cases:
    return []
  columns = 2
  lines = -(-len(cases) // columns)
  drawing = Drawing(figsize=(9, 0.6 + 3 * lines), layout="constrained")
  panels = drawing.subplots(lines, columns, squeeze=False).flat
  for axes in list(panels)[len(cases):]:
    axes.set_axis_off()
  for axes, (name, of_case) in zip(drawing.axes, cases.items(), strict=False):
    start = _of(of_case, WHOLE).time_us
    for i, way in enumerate((SEPARATE, FUSED, CONTIGUOUS, STRIDED)):
      points = [(1, start)] + [
          (row.details["splits"], row.time_us) for row in of_case
          if row.details.get("way") == way
      ]
      axes.plot(*zip(*points, strict=True), marker="o", ms=3, color=f"C{i}", label=way)
    for colour, row, label in (
        ("C4", _of(of_case, STREAM), STREAM),
        ("gray", next((row for row in of_case if row.is_xla), None), "XLA"),
    ):
      if row:
        axes.axhline(row.time_us, color=colour, linewidth=1, linestyle="--", label=label)
    in_powers_of_two(axes.xaxis)
    axes.set_ylim(bottom=0)
    axes.set_title(name, fontsize=9)
    axes.set_xlabel("splits", fontsize=8)
    axes.set_ylabel("us", fontsize=8)
  handles, labels = drawing.axes[0].get_legend_handles_labels()
  drawing.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8)
  return [Figure("Time by splits", drawing)]


def finding(rows: Sequence[Row]) -> str:
  """Says of each problem which way is the fastest, and what splitting gains or costs."""
  sentences = []
  for name, of_case in by_problem(timed(rows)).items():
    whole, stream = _of(of_case, WHOLE), _of(of_case, STREAM)
    ways = {way: _of(of_case, way) for way in (SEPARATE, FUSED, CONTIGUOUS, STRIDED)}
    split = fastest([row for row in ways.values() if row])
    if whole is None or split is None:
      continue
    gain = whole.time_us / split.time_us
    if gain > 1:
      words = f"{name}: {split.variant} is {gain:.1f} times as fast as the whole k"
    else:
      words = (
          f"{name}: splitting loses, {split.variant} takes {1 / gain:.2f} times as long"
          f" as the whole k ({_why(whole, split)})"
      )
    for one, other in ((FUSED, SEPARATE), (STRIDED, CONTIGUOUS)):
      if ways[one] and ways[other]:
        ratio = ways[other].time_us / ways[one].time_us
        words += f", {one} {ratio:.2f} times the speed of {other}"
    if stream:
      words += f", stream-k {split.time_us / stream.time_us:.2f} times that of the best"
    sentences.append(words)
  return paragraphs(sentences)
