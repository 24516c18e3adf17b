"""The laboratory: its questions, its findings, its program."""

from __future__ import annotations

import dataclasses
import functools
import re
import types

from absl import flags
from absl.testing import flagsaver
from lab_cases import CPU, lab, made_up_rows, made_up_time
import pytest

from experiments.lab import __main__ as program
from experiments.lab import caching, questions, rows
from experiments.lab.questions import QUESTIONS

pytestmark = pytest.mark.slow  # The other JAX version need not run them too.

SLOW = pytest.mark.slow


@pytest.mark.parametrize("name", QUESTIONS)
def test_texts(name):
  module = QUESTIONS[name]
  found = questions.texts(module)
  assert found["Question"].endswith("?")
  assert found["Command"] == f"python -m experiments.lab --only={name}"
  assert module.NAME == name


def test_a_docstring_without_a_question():
  module = types.ModuleType("silent", "Expectation: all is well.")
  with pytest.raises(ValueError, match="silent has no Command, Question"):
    questions.texts(module)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=SLOW if name in ("ladder", "splits") else ())
        for name in QUESTIONS
    ],
)
def test_questions_in_emulation(name):
  here = lab(CPU)
  with CPU.context():
    found = list(QUESTIONS[name].measure(here))
  assert found and all(row.question == name for row in found)
  assert not [row for row in found if row.failed]
  checked = [row for row in found if row.error is not None]
  assert any(not row.is_xla for row in checked)
  for row in checked:
    assert row.error <= 2 * row.xla_error or row.inputs == "zeros"
  assert not rows.timed(found)
  text = QUESTIONS[name].finding(found)
  assert "No times" in text or "none timed" in text
  shown = QUESTIONS[name].tables(found)
  assert any(table.rows for table in shown)


@pytest.mark.parametrize("name", QUESTIONS)
def test_findings_are_computed(name):
  """Two runs with other times have other findings, tables and figures."""
  one, other = (
      made_up_rows(name, functools.partial(made_up_time, run=run), quick=True)
      for run in range(2)
  )
  module = QUESTIONS[name]
  assert module.finding(one) != module.finding(other)
  assert module.tables(one) != module.tables(other)
  assert module.figures(one)
  for table in module.tables(one):
    assert {len(row) for row in table.rows} <= {len(table.headers)}


def test_what_the_full_run_cannot_serve():
  """On a GPU only those variants are left out whose table says so on purpose."""
  for name in QUESTIONS:
    for row in made_up_rows(name):
      if row.status != "ok":
        assert name in ("ladder", "stages"), row
        assert re.search("swizzle=0|exceed|rarely has a second tile", row.status), row


def test_the_ladders_finding_names_the_largest_step():
  def time_of(job, variant):
    slow = variant.name in ("no shared memory", "shared memory, one slot")
    return 10.0 if slow else 1.0

  text = QUESTIONS["ladder"].finding(made_up_rows("ladder", time_of, quick=True))
  assert "the largest step is to 'double buffering' (10.0 times as fast)" in text

  slow_swizzle = lambda job, v: 5.0 if "32 bytes" in v.name else time_of(job, v)
  text = QUESTIONS["ladder"].finding(made_up_rows("ladder", slow_swizzle, quick=True))
  assert "most is lost with 'swizzle of 32 bytes', which takes 5.0 times as long" in text


def test_the_splits_finding_says_where_it_loses():
  def time_of(job, variant):
    deep = job.case.problem.k > 4096
    whole = variant.details.get("way") == "whole k"
    return 10.0 if whole == deep else 5.0

  text = QUESTIONS["splits"].finding(made_up_rows("splits", time_of))
  assert "512x512x16384 NN bfloat16: 2 splits, separate reduction is 2.0 times" in text
  assert "4096x4096x4096 NN bfloat16: splitting loses" in text
  assert "1024 tiles fill 132 SMs without it, and 268 MB" in text


def test_the_distributions_finding():
  def time_of(job, variant):
    return {"zeros": 8.0, "integers": 9.0}.get(variant.inputs, 10.0)

  text = QUESTIONS["distribution"].finding(made_up_rows("distribution", time_of))
  assert text.startswith("Of the speed on normal data, zeros have 1.250 at best")
  assert "and uniform 1.000 at worst" in text
  assert "gain within 0.0% of each other" in text


def test_the_dispatch_map_has_the_plans():
  plans = rows.of_table(made_up_rows("dispatch", quick=True), "plans")
  sizes, kernels = plans[0].details["sizes"], plans[0].details["kernels"]
  assert sizes[0] == 16 and sizes[-1] == 16384
  assert len(kernels) == len(sizes) == len(kernels[0])
  assert kernels[-1][-1] == "persistent"


def test_averages():
  times = [1.0] * 90 + [101.0] * 10  # The last tenth strays.
  found = {name: average(times) for name, average in caching.AVERAGES.items()}
  assert found == {
      "mean": 11.0, "median of means": 1.0, "mean of small means": 1.0,
      "robust mean": 1.0, "minimum": 1.0,
  }
  assert caching.mean_of_small_means([1.0, 2.0, 3.0, 9.0]) == 1.5
  assert caching.robust_mean([0.0, 4.0, 5.0, 6.0, 100.0]) == 5.0


# -- The program -------------------------------------------------------------------



def _run(tmp_path, *arguments):
  with flagsaver.flagsaver():
    flags.FLAGS(["lab", f"--output={tmp_path}", *arguments])
    program.main(["lab"])


def test_runs_join_on_one_page(tmp_path, monkeypatch, capsys):
  for name in ("caching", "stages"):
    found = made_up_rows(name, quick=True)
    monkeypatch.setattr(QUESTIONS[name], "measure", lambda lab, found=found: iter(found))
    _run(tmp_path, f"--only={name}")
    assert QUESTIONS[name].finding(found) in capsys.readouterr().out
  assert sorted(path.name for path in tmp_path.iterdir()) == [
      "lab.html", "lab.md", "lab_caching.jsonl", "lab_stages.jsonl"
  ]
  text = (tmp_path / "lab.html").read_text(encoding="utf-8")
  assert '<section id="caching">' in text and '<section id="stages">' in text
  (tmp_path / "lab.html").unlink()
  _run(tmp_path, "--only=")  # The page alone.
  assert (tmp_path / "lab.html").read_text(encoding="utf-8") == text


def test_a_run_that_is_stopped_keeps_what_it_has(tmp_path, monkeypatch, capsys):
  found = made_up_rows("caching", quick=True)

  def breaking(lab):
    yield from found[:3]
    raise RuntimeError("out of memory")

  other = made_up_rows("stages", quick=True)[1]
  failing = dataclasses.replace(other, status="failed: not finite", times_us=None)
  monkeypatch.setattr(QUESTIONS["caching"], "measure", breaking)
  monkeypatch.setattr(QUESTIONS["stages"], "measure", lambda lab: iter([failing]))
  with pytest.raises(SystemExit) as exit:
    _run(tmp_path, "--only=caching,stages")
  assert exit.value.code == 1
  assert len(rows.read(tmp_path / "lab_caching.jsonl")) == 3
  error = capsys.readouterr().err
  assert "caching: RuntimeError: out of memory" in error
  assert "stages: 4096x4096x4096 NN bfloat16 as 64x128, 1 consumer, 2 st" in error
  text = (tmp_path / "lab.html").read_text(encoding="utf-8")
  assert '<section id="caching">' in text and "failed: not finite" in text


@pytest.mark.slow
def test_the_program_in_emulation(tmp_path, capsys):
  _run(tmp_path, "--only=occupancy", "--quick")
  said = capsys.readouterr().out
  assert "No GPU" in said and "occupancy" in said
  text = (tmp_path / "lab.html").read_text(encoding="utf-8")
  assert "these rows have none" in text and "the roofline" in text
