r"""Measures every candidate of the heuristics, and how good their choice is.

Each problem runs under every kernel and config that
jaxgemm.heuristics.candidates lists for it, and under XLA. All of them pass the
gate (experiments/gate.py) and are timed in turn on the same inputs
(experiments/timing.py). The table sets the candidate that the heuristics choose,
the one of the shortest estimate, against the fastest. The exit status is 1 if any
result failed. A CPU only checks, in emulation.

  python -m experiments.sweep --suite=random --draw=50 --seed=1 --name=random
  python -m experiments.sweep --shapes=1,4096,4096:NN+NT --repeats=3

NAME.jsonl has the rows of experiments/run.py with `config`, the fields of the
candidate's config, and `estimate_us`, the heuristics' estimate. Both are null for
XLA, but for the estimate where the heuristics list XLA as a candidate.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
import dataclasses
import itertools
import math
from typing import Any

from absl import app, flags
import tabulate

from experiments import cli, common_flags, products, report, runner
from experiments.suites import Case
from jaxgemm import heuristics
from jaxgemm.device import Device
from pallas_kernels import KERNELS
from pallas_kernels.problem import Problem

flags.adopt_module_key_flags(cli)
_REPEATS = 5


@dataclasses.dataclass(frozen=True)
class SweepRow(report.Row):
  """One problem under one candidate, or under XLA.

  Attributes:
    config: fields of the candidate's config; None for XLA.
    estimate_us: what the heuristics expect; None where they do not list XLA.
  """

  config: dict[str, Any] | None
  estimate_us: float | None


def estimates(problem: Problem, device: Device) -> list[heuristics.Candidate]:
  """Returns what the heuristics list of a problem, but for XLA; the best first."""
  listed = heuristics.candidates(problem, device)
  return [candidate for candidate in listed if candidate.kernel in KERNELS]


def xla_estimate_us(problem: Problem, device: Device) -> float | None:
  """Returns the estimate of XLA's time where the heuristics list XLA, else None."""
  for candidate in heuristics.candidates(problem, device):
    if candidate.kernel == "xla":
      return candidate.time_us
  return None


def sweep_candidates(
    problem: Problem, device: Device, *, emulated: bool
) -> list[products.Candidate]:
  """Returns XLA, then what `estimates` lists, in its order."""
  xla = products.make_candidate(problem, "xla", device, emulated=emulated)
  return [xla] + [
      products.make_candidate(
          problem, listed.kernel, device, emulated=emulated, config=listed.config
      )
      for listed in estimates(problem, device)
  ]


def sweep_rows(
    problem: Problem, device: Device, rows: Sequence[report.Row]
) -> list[SweepRow]:
  """Returns the rows of `sweep_candidates` with their configs and estimates."""
  extras = [(None, xla_estimate_us(problem, device))] + [
      (dataclasses.asdict(listed.config), listed.time_us)
      for listed in estimates(problem, device)
  ]
  return [
      SweepRow(**vars(row), config=config, estimate_us=estimate_us)
      for row, (config, estimate_us) in zip(rows, extras, strict=True)
  ]


def _all_rows(
    rows_of: runner.Runner, cases: Sequence[Case], device: Device
) -> Iterator[list[SweepRow]]:
  for case, rows in zip(cases, rows_of.rows(cases), strict=True):
    yield sweep_rows(case.problem, device, rows)


def geometric_mean(values: Sequence[float]) -> float:
  return math.exp(sum(map(math.log, values)) / len(values))


def table(rows: Iterable[SweepRow]) -> str:
  """Returns a line for each problem: the best candidate and the heuristics' choice.

  The regret is the choice's time over the best one's. Where the choice has no
  time, as it failed, neither has it a regret.
  """
  lines, regrets = [], []
  for name, group in itertools.groupby(rows, key=lambda row: row.name):
    xla, *_ = group = list(group)
    listed = [row for row in group if row.estimate_us is not None]
    choice = min(listed, key=lambda row: row.estimate_us, default=None)
    if choice is None:
      continue  # No kernel serves this problem.
    timed = [row for row in listed if row.time_us is not None]
    best = min(timed, key=lambda row: row.time_us, default=None)
    regret = None
    if best is not None and choice.time_us is not None:
      regret = choice.time_us / best.time_us
      regrets.append(regret)
    lines.append({
        "problem": name,
        "XLA (us)": _figure(xla.time_us, ".1f"),
        "best": "" if best is None else _described(best),
        "(us)": "" if best is None else _figure(best.time_us, ".1f"),
        "choice": _described(choice),
        "its us": "FAILED" if choice.failed else _figure(choice.time_us, ".1f"),
        "regret": _figure(regret, ".3f"),
    })
  text = tabulate.tabulate(
      lines,
      headers="keys",
      colalign=("left", "right", "left", "right", "left", "right", "right"),
      disable_numparse=True,
  )
  if regrets:
    text += (
        f"\nregret: {geometric_mean(regrets):.3f} (geometric mean of {len(regrets)}),"
        f" {max(regrets):.3f} at worst"
    )
  return text


def _described(row: SweepRow) -> str:
  if row.config is None:
    return row.implementation
  config = KERNELS[row.implementation].Config(**row.config)
  return products.describe_config(row.implementation, config, brief=True)


def _figure(value: float | None, form: str) -> str:
  return "" if value is None else format(value, form)


def main(argv: Sequence[str]) -> None:
  platform = cli.start(argv)
  device = platform.device
  if device is None:
    raise app.UsageError(f"the heuristics know no {platform.name}")
  suite, cases = cli.cases(platform)
  rows_of = runner.Runner(
      candidates=lambda problem: sweep_candidates(
          problem, device, emulated=not platform.on_gpu
      ),
      device=device,
      on_gpu=platform.on_gpu,
      seed=common_flags.SEED.value,
      repeats=cli.repeats(platform, _REPEATS),
      burn_in_s=0.0,
      provenance=cli.row_provenance(suite, platform, "experiments.sweep"),
  )
  path = cli.output_path(f"sweep_{suite}")
  jsonl = path.with_name(path.name + ".jsonl")
  with platform.context():
    rows = cli.record(_all_rows(rows_of, cases, device), len(cases), jsonl)
  timed = any(row.time_us is not None for row in rows)
  print(table(rows) if timed else report.check_table(rows))
  print(f"rows: {jsonl}")
  cli.exit_if_failed(rows)


if __name__ == "__main__":
  app.run(main)
