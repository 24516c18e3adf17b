"""The roofline of all measured problems: operations a byte, and speed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from matplotlib.figure import Figure as Drawing

from experiments.lab.rows import Row, timed
from experiments.lab.tables import Figure
from jaxgemm.device import KNOWN_DEVICES


def intensity(row: Row) -> float:
  """Returns operations a byte, if each operand is read once and the result written."""
  return row.gemm.flops / row.gemm.num_bytes


def best(rows: Iterable[Row]) -> list[Row]:
  """Returns the fastest row of each problem, XLA's and ours apart."""
  found: dict[tuple[str, bool], Row] = {}
  for row in timed(rows):
    key = row.name, row.is_xla
    if row.inputs == "normal":
      if key not in found or row.time_us < found[key].time_us:
        found[key] = row
  return list(found.values())


def figures(rows: Sequence[Row]) -> list[Figure]:
  """Returns the roofline of rows of one device; none of rows without times."""
  points = best(rows)
  if not points:
    return []
  drawing = Drawing(figsize=(8, 5.5), layout="constrained")
  axes = drawing.subplots()
  device = KNOWN_DEVICES.get(points[0].provenance.device)
  dtypes = sorted({row.gemm.dtype for row in points})
  if device is not None:
    low, high = min(map(intensity, points)) / 2, max(map(intensity, points)) * 2
    for i, dtype in enumerate(dtypes):
      roof = device.tflops(dtype)
      edge = roof / device.bandwidth_tbps
      axes.plot(
          [low, edge, max(high, edge)], [low * device.bandwidth_tbps, roof, roof],
          color=f"C{i}", linewidth=1,
      )
  for i, dtype in enumerate(dtypes):
    for is_xla, marker in ((True, "x"), (False, "o")):
      mine = [x for x in points if (x.gemm.dtype, x.is_xla) == (dtype, is_xla)]
      axes.scatter(
          [intensity(row) for row in mine], [row.tflops for row in mine], s=14,
          color=f"C{i}", marker=marker, linewidths=0.8,
          label=f"{dtype}, {'XLA' if is_xla else 'jaxgemm'}",
      )
  axes.set_xscale("log")
  axes.set_yscale("log")
  axes.set_xlabel("operations a byte")
  axes.set_ylabel("TFLOP/s")
  axes.legend(fontsize=8)
  return [Figure("Roofline: every measured problem, its fastest variant", drawing)]
