"""Achieved occupancy, which only hardware counters know: through ncu.

Nsight Compute runs a process of its own, `python -m experiments.lab.achieved`, which
launches each kernel of the question once; ncu then says how many warps were active on an
SM, on average, of those that it can hold.
"""

from __future__ import annotations

from collections.abc import Sequence
import csv
import io
import os
import shutil
import subprocess
import sys

from absl import app
import jax.numpy as jnp

from experiments import cli
from experiments.lab import occupancy_variants, variants
from jaxgemm.autotune.operands import operand_types

METRIC = "sm__warps_active.avg.pct_of_peak_sustained_active"
_TIMEOUT_S = 240
_HELPERS = ("_mend",)  # Kernels that are not the product.


def occupancies(names: Sequence[str]) -> tuple[dict[str, float], str | None]:
  """Returns the achieved occupancy of each named variant, a share, or why there is none.

  The names are those of the variants that `main` launches, in its order.
  """
  ncu = shutil.which("ncu")
  if ncu is None:
    return {}, "ncu is not on the PATH"
  command = [
      ncu, "--csv", "--clock-control", "none", "--metrics", METRIC, "--kernel-name",
      "regex:jaxgemm", sys.executable, "-m", "experiments.lab.achieved",
  ]
  try:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True,
        # This process holds most of the memory.
        env=os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
    )
  except (OSError, subprocess.SubprocessError) as error:
    return {}, f"ncu failed: {type(error).__name__}"
  found = parse(done.stdout)
  if len(found) != len(names):
    return {}, f"ncu saw {len(found)} kernels, not {len(names)}"
  return dict(zip(names, found, strict=True)), None


def parse(text: str) -> list[float]:
  """Returns the metric of each product's kernel, a share, in the order of launches."""
  lines = [line for line in text.splitlines() if line.startswith('"')]
  return [
      float(row["Metric Value"].replace(",", "")) / 100
      for row in csv.DictReader(io.StringIO("\n".join(lines)))
      if row.get("Metric Name") == METRIC
      and not any(helper in row["Kernel Name"] for helper in _HELPERS)
  ]


def launch_once(found: Sequence[variants.Variant], problem) -> None:
  """Launches each variant once, on zeros: what a kernel does depends on no value."""
  inputs = [jnp.zeros(x.shape, x.dtype) for x in operand_types(problem)]
  for variant in found:
    if variant.candidate.product is not None:
      variant.candidate.product(*inputs).block_until_ready()


def main(argv: Sequence[str]) -> None:
  platform = cli.start(argv)
  lab = variants.Lab(
      platform, False, 0, 0,
      cli.row_provenance("lab", platform, "experiments.lab.achieved"),
  )
  case = occupancy_variants.cases(lab)[-1]
  with platform.context():
    launch_once(occupancy_variants.kernels(lab, case.problem), case.problem)


if __name__ == "__main__":
  app.run(main)
