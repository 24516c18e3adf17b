r"""Checks and times GEMMs: a table, JSONL and a chart.

Every result passes the gate (experiments/gate.py) before anything is timed. On a
GPU the kernels are timed (experiments/timing.py); on a CPU they run in emulation,
with the plan that an H200 would get, and nothing is timed. A summary by class
(experiments/summary.py) follows the table. The exit status is 1 if any result failed.

  python -m experiments.run
  python -m experiments.run --suite=full --implementations=auto --name=burst
  python -m experiments.run --suite=full --implementations=auto --name=sustained \
      --classes=large --sustained=60
  python -m experiments.run --suite=random --draw=200 --seed=1 --notiming
  python -m experiments.run --shapes=4096,4096,4096:NN+TN --shapes=8,300,20,40 \
      --dtypes=bfloat16,float32 --implementations=persistent,split_k
"""

from __future__ import annotations

from collections.abc import Sequence

from absl import app, flags
import jax

from experiments import cli, common_flags, products, report, runner, summary
from pallas_kernels.problem import Problem

flags.adopt_module_key_flags(cli)
_IMPLEMENTATIONS = flags.DEFINE_list(
    "implementations",
    [name for name in products.IMPLEMENTATIONS if name != "invariant"],
    "What to run; XLA always runs, as the baseline.",
)
_SUSTAINED = flags.DEFINE_float(
    "sustained",
    0.0,
    "Seconds of load before the first problem's timing, after which the load goes on;"
    " the largest problem comes first, and implementations take turns of"
    f" {runner.TURN_S} seconds. 0 measures bursts, in turns of one call.",
    lower_bound=0.0,
)
flags.register_validator(
    _IMPLEMENTATIONS.name,
    cli.member_check(products.IMPLEMENTATIONS),
    f"must be among {', '.join(products.IMPLEMENTATIONS)}",
)
_REPEATS, _TURNS = 20, 5


def main(argv: Sequence[str]) -> None:
  platform = cli.start(argv)
  suite, cases = cli.cases(platform)
  if _SUSTAINED.value:  # The heaviest load first: later ones only keep it up.
    cases.sort(key=lambda case: -case.problem.flops)
  implementations = ["xla", *(x for x in _IMPLEMENTATIONS.value if x != "xla")]

  def candidates(problem: Problem) -> list[products.Candidate]:
    return [
        products.make_candidate(
            problem, name, platform.device, emulated=not platform.on_gpu
        )
        for name in implementations
    ]

  rows_of = runner.Runner(
      candidates=candidates,
      device=platform.device,
      on_gpu=platform.on_gpu,
      seed=common_flags.SEED.value,
      repeats=cli.repeats(platform, _TURNS if _SUSTAINED.value else _REPEATS),
      burn_in_s=_SUSTAINED.value,
      provenance=cli.row_provenance(suite, platform, "experiments.run"),
  )
  path = cli.output_path(suite)
  jsonl, png = path.with_name(path.name + ".jsonl"), path.with_name(path.name + ".png")
  with platform.context():
    rows = cli.record(rows_of.rows(cases), len(cases), jsonl)

  timed = any(row.time_us is not None for row in rows)
  print(report.table(rows) if timed else report.check_table(rows))
  if timed and summary.chosen(rows):
    print(summary.text({suite: rows}))
  spent = ", ".join(f"{what} {s:.0f} s" for what, s in rows_of.seconds.items())
  print(f"spent: {spent}")
  print(f"rows: {jsonl}")
  if timed:
    report.chart(rows, png, f"{path.name}: {platform.name}, JAX {jax.__version__}")
    print(f"chart: {png}")
  cli.exit_if_failed(rows)


if __name__ == "__main__":
  app.run(main)
