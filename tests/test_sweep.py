"""The sweep over the heuristics' candidates, and the fit of the cost model to it."""

from __future__ import annotations

import dataclasses
import json

from absl import app, flags
from absl.testing import flagsaver
from experiment_cases import H200, PROVENANCE, SWEPT, make_row
import numpy as np
import pytest

from experiments import fit_heuristics, gate, products, report, suites, summary, sweep
from jaxgemm import cost_model, heuristics, xla_times
from jaxgemm.cost_constants import MODEL
from pallas_kernels import KERNELS

pytestmark = pytest.mark.slow  # The other JAX version need not run them too.


def _swept(case, time_us_of) -> list[sweep.SweepRow]:
  """Rows of a sweep; time_us_of(kernel, config) gives the times, None a failure."""
  candidates = sweep.sweep_candidates(case.problem, H200, emulated=False)
  listed = sweep.estimates(case.problem, H200)
  rows = []
  for candidate, config in zip(
      candidates, [None, *(one.config for one in listed)], strict=True
  ):
    time_us = time_us_of(candidate.kernel, config)
    verdict = gate.Verdict(1e-3, "wrong" if time_us is None else None)
    rows.append(
        report.make_row(
            case, candidate, PROVENANCE, verdict=verdict, xla_error=1e-3, device=H200,
            times_us=[time_us], xla_times_us=[1.0],
        )
    )
  return sweep.sweep_rows(case.problem, H200, rows)


def test_sweep_measures_every_candidate():
  for case in SWEPT:
    listed = heuristics.candidates(case.problem, H200)
    rows = _swept(case, lambda kernel, config: 1.0)
    assert rows[0].implementation == "xla" and rows[0].config is None
    found = [
        (row.implementation, KERNELS[row.implementation].Config(**row.config))
        for row in rows[1:]
    ]
    assert found == [(c.kernel, c.config) for c in listed if c.kernel != "xla"]
    by_estimate = sorted(
        (row for row in rows if row.estimate_us is not None),
        key=lambda row: row.estimate_us,
    )
    assert [row.estimate_us for row in by_estimate] == [c.time_us for c in listed]
    weighed = xla_times.estimate(case.problem, H200) is not None
    assert (rows[0].estimate_us is not None) == weighed


def test_sweep_table():
  case = SWEPT[0]
  best, choice = 5, 0  # Places among the candidates.
  listed = sweep.estimates(case.problem, H200)
  times_us = {listed[best].config: 2.0, listed[choice].config: 3.0}
  rows = _swept(case, lambda kernel, config: times_us.get(config, 10.0))
  line = sweep.table(rows).splitlines()[-1]
  described = [
      products.describe_config(listed[i].kernel, listed[i].config, brief=True)
      for i in (best, choice)
  ]
  cells = [case.name, "10.0", described[0], "2.0", described[1], "3.0", "1.500", "3.333"]
  assert line.split() == " ".join(cells).split()
  times_us[listed[choice].config] = None
  rows = _swept(case, lambda kernel, config: times_us.get(config, 10.0))
  assert sweep.table(rows).splitlines()[-1].endswith("FAILED")
  assert sweep.summary(rows) == ""


def test_sweep_summary(tmp_path, capsys):
  """Two problems: of one the choice is the best, of the other it is half as fast."""
  rows = []
  for case, choice_us in ((SWEPT[0], 2.0), (SWEPT[1], 4.0)):
    choice, other = sweep.estimates(case.problem, H200)[:2]
    times_us = {choice.config: choice_us, other.config: 2.0}
    rows += _swept(case, lambda kernel, config, us=times_us: us.get(config, 8.0))
  expected = [
      "the heuristics' choice has 0.707 times the speed of the best candidate"
      f" (geometric mean of 2), 0.500 at worst ({SWEPT[1].name})",
      "the heuristics' choice has 2.828 times the speed of XLA (geometric mean of 2),"
      f" 2.000 at worst ({SWEPT[1].name})",
  ]
  assert sweep.summary(rows).splitlines() == expected
  path = tmp_path / "sweep.jsonl"
  path.write_text("".join(row.to_json() + "\n" for row in rows))
  summary.main(["summary", str(path)])
  assert capsys.readouterr().out.splitlines()[1:] == expected


TRUE_MODEL = dataclasses.replace(
    MODEL,
    latency=2 * MODEL.latency,
    l2_rate=MODEL.l2_rate / 2,
    step=3 * MODEL.step,
)


@pytest.fixture(scope="module")
def sweep_file(tmp_path_factory):
  """A sweep whose times are those of TRUE_MODEL."""
  path = tmp_path_factory.mktemp("sweep") / "rows.jsonl"
  with path.open("w") as file:
    for case in SWEPT:

      def time_us_of(kernel, config, problem=case.problem):
        if kernel == "xla":
          return sweep.xla_estimate_us(problem, H200) or 50.0
        return cost_model.estimate(problem, kernel, config, H200, TRUE_MODEL)[0]

      file.writelines(row.to_json() + "\n" for row in _swept(case, time_us_of))
  return path


def test_fit_reads_a_sweep(sweep_file):
  groups = fit_heuristics.read([sweep_file])
  assert [(group.name, group.problem) for group in groups] == [
      (case.name, case.problem) for case in SWEPT
  ]
  for group in groups:
    listed = heuristics.candidates(group.problem, group.device)
    assert len(group.measured) == len(listed) and group.device == H200
    assert all(one.listed for one in group.measured)
    np.testing.assert_allclose(
        sorted(group.estimates_us(MODEL)), [c.time_us for c in listed]
    )
    assert group.regret(TRUE_MODEL) == 1.0 and group.xla_us > 0


def test_rows_of_another_order_of_tiles_count_as_candidates(sweep_file, tmp_path):
  """It follows from the problem, and is not what was measured for."""
  rows = [json.loads(line) for line in sweep_file.read_text().splitlines()]
  changed = [row["config"] for row in rows if "grid_minor" in (row["config"] or {})]
  for config in changed:
    config |= dict(grid_minor="n", grid_width=3)
  path = tmp_path / "older.jsonl"
  path.write_text("\n".join(json.dumps(row) for row in rows))
  groups = fit_heuristics.read([path])
  assert changed and all(one.listed for group in groups for one in group.measured)


def test_fit_refuses_other_rows(tmp_path):
  (tmp_path / "run.jsonl").write_text(make_row().to_json() + "\n")
  with pytest.raises(ValueError, match="line 1: not a row of experiments.sweep"):
    fit_heuristics.read([tmp_path / "run.jsonl"])


@pytest.mark.slow
@pytest.mark.more
def test_fit_finds_a_better_model(sweep_file):
  groups = fit_heuristics.read([sweep_file])
  present = fit_heuristics.loss(groups, MODEL)
  true = fit_heuristics.loss(groups, TRUE_MODEL)
  assert true < present / 2
  fitted = fit_heuristics.fit(groups, iterations=120, seed=0)
  assert fit_heuristics.loss(groups, fitted) < (true + present) / 2
  assert fitted == fit_heuristics.fit(groups, iterations=120, seed=0)
  assert fitted != fit_heuristics.fit(groups, iterations=120, seed=1)


def test_fit_moves_only_what_it_shall(sweep_file):
  groups = fit_heuristics.read([sweep_file])
  fitted = fit_heuristics.fit(groups, iterations=20, seed=0, names=["step", "wait"])
  found, start = dataclasses.asdict(fitted), dataclasses.asdict(MODEL)
  assert {name for name in found if found[name] != start[name]} == {"step", "wait"}


def test_what_ran_in_turns_did_not_pay_for_its_energy(tmp_path):
  """All of it may be slower, by what the energy of all takes; what ran alone may not."""
  case = suites.make_case(8192, 8192, 8192)
  free = dataclasses.replace(MODEL, energy=0.0)

  def loss(slowness: float, *, sustained: bool) -> float:
    time_us = lambda kernel, config: slowness * (
        1e4 if kernel == "xla"
        else cost_model.estimate(case.problem, kernel, config, H200, free)[0]
    )
    rows = [json.loads(row.to_json()) for row in _swept(case, time_us)]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(r | {"sustained": sustained}) for r in rows))
    (group,) = fit_heuristics.read([path])
    assert group.sustained == sustained
    return fit_heuristics.loss([group], MODEL)

  assert loss(1.0, sustained=False) == pytest.approx(loss(1.05, sustained=False), 0.01)
  assert loss(1.0, sustained=False) < loss(1.5, sustained=False) - 0.2
  assert loss(1.0, sustained=False) < loss(0.8, sustained=False) - 0.1
  assert loss(1.0, sustained=False) < loss(1.0, sustained=True) - 0.02


def test_fit_prints_a_model_to_paste():
  model = dataclasses.replace(TRUE_MODEL, pass_rate=1.234567e6, step=0.0000451)
  namespace = {"dataclasses": dataclasses, "__name__": __name__}
  text = fit_heuristics.source(model)
  exec(text, namespace)
  pasted = dataclasses.asdict(namespace["Model"]())
  assert pasted == pytest.approx(dataclasses.asdict(model), rel=5e-3)
  assert "pass_rate: float = 1.23e6  # " in text


@pytest.mark.parametrize("check", [True, False])
def test_fit_program(check, sweep_file, capsys):
  with flagsaver.flagsaver():
    flags.FLAGS(["fit", f"--check={check}", "--iterations=3", "--seed=0"])
    fit_heuristics.main(["fit", str(sweep_file)])
    with pytest.raises(app.UsageError, match="name one or more files"):
      fit_heuristics.main(["fit"])
  printed = capsys.readouterr().out
  assert all(case.name in printed for case in SWEPT)
  assert "now: loss" in printed and "at worst (" in printed
  assert ("class Model:" in printed) == ("fitted: loss" in printed) == (not check)


def test_sweep_of_the_best_alone():
  case = SWEPT[0]
  found = sweep.sweep_candidates(case.problem, H200, emulated=False, best=3)
  everything = sweep.sweep_candidates(case.problem, H200, emulated=False)
  assert [one.plan for one in found] == [one.plan for one in everything[:4]]
  rows = _swept(case, lambda kernel, config: 1.0)[:4]
  assert sweep.sweep_rows(case.problem, H200, [
      report.Row(**{f.name: getattr(row, f.name) for f in dataclasses.fields(report.Row)})
      for row in rows
  ]) == rows
