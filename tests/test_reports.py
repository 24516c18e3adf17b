"""What runs leave behind: rows, tables, charts and progress."""

from __future__ import annotations

import dataclasses
import json
import math

from absl import app
from experiment_cases import FIELDS, H200, make_row
import pytest

from experiments import cli, gate, progress, report, suites, summary
from pallas_kernels.problem import Problem

pytestmark = pytest.mark.slow  # The other JAX version need not run them too.


def test_row_of_a_timed_result():
  row = make_row(
      implementation="blocked", times_us=[20.0, 10.0, 40.0], xla_times_us=[5.0, 10.0]
  )
  fields = json.loads(row.to_json())
  assert list(fields) == FIELDS
  num_bytes = 2 * (1000 * 2000 + 2000 * 500 + 1000 * 500)
  assert fields == {
      "suite": "a suite", "class": "odd", "name": "1000x500x2000 TN float16",
      "batch": 1, "m": 1000, "n": 500, "k": 2000, "lhs_layout": "m-major",
      "rhs_layout": "n-major", "dtype": "float16", "out_dtype": "float16",
      "precision": "default", "implementation": "blocked", "plan": "the plan",
      "time_us": 20.0, "spread_us": 7.5, "tflops": 2e9 / 20 / 1e6,
      "gbps": num_bytes / 20 / 1e3, "ratio_to_xla": 7.5 / 20,
      "floor_share": pytest.approx(2e9 / 805e6 / 20, rel=1e-4), "error": 1e-3,
      "xla_error": 2e-3, "device": "NVIDIA H200", "jax": "1.2.3", "commit": "abc",
      "date": "today", "command": "python -m experiments.run",
  }
  assert not row.failed


def test_a_row_survives_its_file():
  row = make_row(times_us=[20.0, 10.0, 40.0], xla_times_us=[5.0, 10.0])
  assert report.Row.from_json(row.to_json()).to_json() == row.to_json()
  for line in ("[]", "{}", '{"class": "odd"}', row.to_json()[:-1] + ', "config": null}'):
    with pytest.raises(ValueError, match="not a Row"):
      report.Row.from_json(line)


@pytest.mark.parametrize(
    "plan, kernel",
    [
        ("xla [heuristic: faster]", "xla"),
        ("xla", "xla"),
        ("split_k tile=64x64x64 splits=4 [table: measured]", "split_k"),
        ("n/a: no such device", None),
        ("failed: not finite; split_k tile=64x64x64", None),
    ],
)
def test_the_kernel_of_a_plan(plan, kernel):
  assert make_row(plan=plan).kernel == kernel


def test_row_of_a_failure_has_no_time():
  verdict = gate.Verdict(0.5, "too wrong")
  row = make_row(verdict=verdict, times_us=[1.0], xla_times_us=[1.0])
  assert row.failed and row.plan == "failed: too wrong; the plan"
  assert row.error == 0.5
  figures = (row.time_us, row.spread_us, row.tflops, row.gbps, row.ratio_to_xla)
  assert figures == (None,) * 5 and row.floor_share is None
  assert "FAILED" in report.table([row]) and "FAILED" in report.check_table([row])


def test_rows_are_strict_json():
  fields = json.loads(make_row(verdict=gate.Verdict(math.nan, None)).to_json())
  assert fields["error"] is None


def test_floor_is_the_larger_bound():
  assert report.floor_us(Problem(8192, 8192, 8192), H200) == pytest.approx(
      2 * 8192**3 / 805e6
  )
  thin = Problem(1, 8192, 8192)
  assert report.floor_us(thin, H200) == pytest.approx(thin.num_bytes / 4.3e6)
  assert report.floor_us(thin, None) is None


# -- The summary -------------------------------------------------------------------


def _pair(name, klass, xla_us, auto_us, plan="persistent tile=128x256x64", **sizes):
  """Returns the rows of one problem: XLA's and that of what jaxgemm chose."""
  sizes = dict(m=16, n=8192, k=8192) | sizes
  case = dataclasses.replace(suites.make_case(**sizes), name=name, klass=klass)
  verdict = gate.Verdict(0.5, "wrong") if auto_us is None else None
  return [
      make_row(case, "xla", plan="xla", times_us=[xla_us], xla_times_us=[xla_us]),
      make_row(
          case, "auto", plan=plan, verdict=verdict, times_us=[auto_us],
          xla_times_us=[xla_us],
      ),
  ]


@pytest.fixture
def rows() -> list[report.Row]:
  return [
      *_pair("a", "skinny", 100.0, 50.0),
      *_pair("b", "skinny", 100.0, 200.0, m=32),
      *_pair("c", "medium", 40.0, 40.0, plan="xla [table: faster]", m=128),
      # Too small for the memory to count, of another class, and without a result.
      *_pair("d", "medium", 30.0, 10.0, m=128, n=1024, k=1024),
      *_pair("e", "large", 90.0, 100.0, m=4096),
      *_pair("f", "odd", 10.0, None),
  ]


def test_speeds_by_class(rows):
  found = summary.speeds(summary.chosen(rows))
  assert list(found) == ["large", "medium", "skinny", "odd", "all"]
  assert found["skinny"].ratio == pytest.approx(1.0)
  assert found["medium"].ratio == pytest.approx(3**0.5)
  assert (found["large"].ratio, found["large"].worst.name) == (0.9, "e")
  assert found["odd"] == summary.Speed(1, 0, None, None)
  whole = found["all"]
  assert (whole.problems, whole.timed, whole.worst.name) == (6, 5, "b")
  assert whole.ratio == pytest.approx((2 * 0.5 * 1 * 3 * 0.9) ** (1 / 5))


def test_the_limit_is_the_floor_and_a_start(rows):
  """The shortest kernel there is is a start; nothing need be slower than XLA."""
  found = summary.speeds(summary.chosen(rows))
  floor = report.floor_us(Problem(16, 8192, 8192), H200) / summary.CEILING
  other = report.floor_us(Problem(32, 8192, 8192), H200) / summary.CEILING
  start = summary.SHORTEST_US
  assert found["skinny"].limit == pytest.approx(
      (100 / (floor + start) * 100 / (other + start)) ** 0.5
  )
  assert found["large"].limit == 1.0  # Its floor is above what XLA took.
  assert found["odd"].limit is None
  unknown = [dataclasses.replace(row, floor_share=None) for row in rows]
  assert summary.speeds(summary.chosen(unknown))["skinny"].limit is None


def test_the_floor_counts_large_operands_of_two_classes(rows):
  judged = summary.floor_rows(summary.chosen(rows))
  assert [row.name for row in judged] == ["a", "b", "c"]
  assert summary.operand_bytes(judged[0]) == 2 * 8192 * (16 + 8192)
  floor = report.floor_us(Problem(16, 8192, 8192), H200)
  assert judged[0].floor_share == pytest.approx(floor / 50)
  batch = make_row(suites.make_case(8, 8, 16, batch=3, dtype="float32"))
  assert summary.operand_bytes(batch) == 4 * 3 * (8 * 16 + 16 * 8)


def test_summary_says_what_xla_kept(rows):
  lines = summary.remarks(rows).splitlines()
  assert lines[:3] == [
      "own kernels: 4 of 5 problems (80%)",
      "  XLA's for c (x1.000): xla [table: faster]",
      "1 of 6 problems failed",
  ]
  ours = [row.floor_share for row in rows if row.name in "abc"][1::2]
  share = report.geometric_mean(ours)
  assert lines[3].startswith(f"share of the floor: {share:.3f}, XLA's ")
  assert "of 3 medium and skinny problems with at least 30 MB" in lines[3]
  untimed = [dataclasses.replace(row, floor_share=None) for row in rows]
  assert len(summary.remarks(untimed).splitlines()) == 3


def test_summary_of_runs_side_by_side(rows):
  single = summary.table({"burst": summary.chosen(rows)}).splitlines()
  assert single[0].split() == [
      "class", "problems", "timed", "x", "XLA", "limit", "worst", "which"
  ]
  assert single[2].split() == ["large", "1", "1", "0.900", "1.000", "0.900", "e"]
  assert single[-1].split()[:3] == ["all", "6", "5"]
  runs = {"burst": rows, "sustained": [row for row in rows if row.klass == "large"]}
  both = summary.text(runs).splitlines()
  assert "sustained: x XLA" in both[0]
  large = next(line for line in both if line.startswith("large"))
  assert large.split()[1:7] == ["1", "1", "0.900", "1.000", "0.900", "e"]
  skinny = next(line for line in both if line.startswith("skinny"))
  assert skinny.split()[-2:] == ["0", "0"]
  assert "burst:" in both and "sustained:" in both


def test_summary_program(rows, tmp_path, capsys):
  path = tmp_path / "burst.jsonl"
  path.write_text("".join(row.to_json() + "\n" for row in rows))
  summary.main(["summary", str(path)])
  assert capsys.readouterr().out.endswith(
      summary.text({"burst": summary.read(path)}) + "\n"
  )
  path.write_text(rows[0].to_json() + "\n{}\n")
  with pytest.raises(app.UsageError, match="line 2: not a Row"):
    summary.main(["summary", str(path)])
  with pytest.raises(app.UsageError, match="name one or more files"):
    summary.main(["summary"])


# -- Charts and progress -----------------------------------------------------------


def test_chart_is_drawn(tmp_path):
  rows = [make_row(times_us=[1.0], xla_times_us=[1.0])]
  rows += [
      make_row(implementation=name, times_us=[2.0], xla_times_us=[1.0]) for name in "ab"
  ]
  report.chart(rows, tmp_path / "a.png", "a title")
  assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_log_gets_few_lines_of_progress(capsys):
  shown = progress.bar(range(5000))
  for i in shown:
    shown.set_postfix_str(f"at {i}", refresh=False)
  drawn = capsys.readouterr().err.split("\r")
  assert len(drawn) <= 4 and "5000/5000" in drawn[-1]


def test_record_writes_each_row(tmp_path, capsys):
  rows = [[make_row()], [make_row(implementation=name) for name in ("auto", "split_k")]]
  found = cli.record(iter(rows), 2, tmp_path / "a.jsonl")
  assert found == [rows[0][0], *rows[1]]
  lines = (tmp_path / "a.jsonl").read_text().splitlines()
  assert lines == [row.to_json() for row in found]
  assert "2/2" in capsys.readouterr().err
