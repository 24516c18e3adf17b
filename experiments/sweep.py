r"""Measures every candidate of the heuristics, and how good their choice is.

Each problem runs under every kernel and config that
jaxgemm.heuristics.candidates lists for it, and under XLA. All of them pass the
gate (experiments/gate.py) and are timed in turn on the same inputs
(experiments/timing.py). The table sets the candidate that the heuristics choose,
the one of the shortest estimate whatever a measured table says, against the fastest
and against XLA. The exit status is 1 if any result failed. A CPU only checks, in
emulation.

  python -m experiments.sweep --suite=random --draw=80 --seed=1 \
      --dtypes=bfloat16,float16 --part=1/4 --name=random-1
  python -m experiments.sweep --shapes=1,4096,4096:NN+NT --repeats=3
  python -m experiments.sweep --suite=full --best=8

NAME.jsonl has the rows of experiments/run.py with `config`, the fields of the
candidate's config, and `estimate_us`, the heuristics' estimate. Both are null for
XLA, but for the estimate where the heuristics list XLA as a candidate.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
import dataclasses
import itertools
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
_BEST = flags.DEFINE_integer(
    "best", None, "Only so many candidates, of the shortest estimates.", lower_bound=1
)
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


def estimates(
    problem: Problem, device: Device, best: int | None = None
) -> list[heuristics.Candidate]:
  """Returns what the heuristics list of a problem, but for XLA; the best first.

  With `best` only so many.
  """
  listed = heuristics.candidates(problem, device)
  return [candidate for candidate in listed if candidate.kernel in KERNELS][:best]


def xla_estimate_us(problem: Problem, device: Device) -> float | None:
  """Returns the estimate of XLA's time where the heuristics list XLA, else None."""
  for candidate in heuristics.candidates(problem, device):
    if candidate.kernel == "xla":
      return candidate.time_us
  return None


def sweep_candidates(
    problem: Problem, device: Device, *, emulated: bool, best: int | None = None
) -> list[products.Candidate]:
  """Returns XLA, then what `estimates` lists, in its order."""
  xla = products.make_candidate(problem, "xla", device, emulated=emulated)
  return [xla] + [
      products.make_candidate(
          problem, listed.kernel, device, emulated=emulated, config=listed.config
      )
      for listed in estimates(problem, device, best)
  ]


def sweep_rows(
    problem: Problem, device: Device, rows: Sequence[report.Row]
) -> list[SweepRow]:
  """Returns the rows of `sweep_candidates` with their configs and estimates."""
  best = len(rows) - 1
  extras = [(None, xla_estimate_us(problem, device))] + [
      (dataclasses.asdict(listed.config), listed.time_us)
      for listed in estimates(problem, device, best)
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


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What a sweep says of one problem.

  Attributes:
    xla: XLA's row.
    choice: the candidate that the heuristics choose, by estimate alone.
    best: the fastest candidate of all; None if none has a time.
  """

  xla: SweepRow
  choice: SweepRow
  best: SweepRow | None

  @property
  def regret(self) -> float | None:
    """The choice's time over the best one's; None if the choice failed."""
    return _ratio(self.choice, self.best)

  @property
  def ratio_to_xla(self) -> float | None:
    """XLA's time over the choice's."""
    return _ratio(self.xla, self.choice)


def outcomes(rows: Iterable[SweepRow]) -> list[Outcome]:
  """Returns the outcomes of the problems that leave the heuristics a choice."""
  found = []
  for _, group in itertools.groupby(rows, key=lambda row: row.name):
    xla, *_ = group = list(group)
    listed = [row for row in group if row.estimate_us is not None]
    choice = min(listed, key=lambda row: row.estimate_us, default=None)
    if choice is not None:
      timed = [row for row in listed if row.time_us is not None]
      best = min(timed, key=lambda row: row.time_us, default=None)
      found.append(Outcome(xla, choice, best))
  return found


def table(rows: Iterable[SweepRow]) -> str:
  """Returns a line for each problem: the best candidate and the heuristics' choice."""
  lines = []
  for one in outcomes(rows):
    lines.append({
        "problem": one.xla.name,
        "XLA (us)": report.figure(one.xla.time_us, ".1f"),
        "best": "" if one.best is None else _described(one.best),
        "(us)": "" if one.best is None else report.figure(one.best.time_us, ".1f"),
        "choice": _described(one.choice),
        "its us": report.figure(
            one.choice.time_us, ".1f", "FAILED" if one.choice.failed else ""
        ),
        "regret": report.figure(one.regret, ".3f"),
        "x XLA": report.figure(one.ratio_to_xla, ".3f"),
    })
  return tabulate.tabulate(
      lines,
      headers="keys",
      colalign=("left", "right", "left", "right", "left", "right", "right", "right"),
      disable_numparse=True,
  )


def summary(rows: Iterable[SweepRow]) -> str:
  """Returns how good the choices are: against the best candidates, against XLA."""
  found = outcomes(rows)
  lines = []
  for what, speeds in (
      ("the best candidate", [(_ratio(x.best, x.choice), x.xla.name) for x in found]),
      ("XLA", [(x.ratio_to_xla, x.xla.name) for x in found]),
  ):
    known = [(speed, name) for speed, name in speeds if speed is not None]
    if known:
      mean = report.geometric_mean([speed for speed, _ in known])
      worst, name = min(known)
      lines.append(
          f"the heuristics' choice has {mean:.3f} times the speed of {what} (geometric"
          f" mean of {len(known)}), {worst:.3f} at worst ({name})"
      )
  return "\n".join(lines)


def _ratio(one: SweepRow | None, other: SweepRow | None) -> float | None:
  if one is None or other is None or one.time_us is None or other.time_us is None:
    return None
  return one.time_us / other.time_us


def _described(row: SweepRow) -> str:
  if row.config is None:
    return row.implementation
  config = KERNELS[row.implementation].Config(**row.config)
  return products.describe_config(row.implementation, config, brief=True)


def main(argv: Sequence[str]) -> None:
  platform = cli.start(argv)
  device = platform.device
  if device is None:
    raise app.UsageError(f"the heuristics know no {platform.name}")
  suite, cases = cli.cases(platform)
  cases = [  # As what is listed for them is planned.
      dataclasses.replace(case, problem=case.problem.canonical) for case in cases
  ]
  rows_of = runner.Runner(
      candidates=lambda problem: sweep_candidates(
          problem, device, emulated=not platform.on_gpu, best=_BEST.value
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
  print(f"{table(rows)}\n{summary(rows)}" if timed else report.check_table(rows))
  print(f"rows: {jsonl}")
  cli.exit_if_failed(rows)


if __name__ == "__main__":
  app.run(main)
