"""The laboratory: its questions, its findings, its program."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import re
import subprocess
import sys
import threading
import types

from absl import app, flags
from absl.testing import flagsaver
from lab_cases import CPU, lab, made_up_rows, made_up_time
import pytest

from experiments.lab import __main__ as program
from experiments.lab import caching, questions, rows
from experiments.lab.questions import QUESTIONS
from tests import kernel_cases

pytestmark = pytest.mark.slow  # The other JAX version need not run them too.

ROOT = pathlib.Path(__file__).parent.parent
MORE = ("ladder", "splits", "distribution", "sgemm")  # Each takes 5 seconds and more.


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
        kernel_cases.more(name) if name in MORE else name for name in QUESTIONS
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


@pytest.mark.slow
@pytest.mark.more
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
  found = made_up_rows("ladder", slow_swizzle, quick=True)
  text = QUESTIONS["ladder"].finding(found)
  assert "most is lost with 'swizzle of 32 bytes', which takes 5.0 times as long" in text
  assert "is lost" not in QUESTIONS["ladder"].finding(found[:5])  # Of a stopped run.


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

  monkeypatch.setattr(QUESTIONS["caching"], "measure", breaking)
  with pytest.raises(SystemExit) as exit:
    _run(tmp_path, "--only=caching")
  assert exit.value.code == 1
  assert len(rows.read(tmp_path / "lab_caching.jsonl")) == 3
  assert "caching: RuntimeError: out of memory" in capsys.readouterr().err
  text = (tmp_path / "lab.html").read_text(encoding="utf-8")
  assert '<section id="caching">' in text


def test_what_fails_the_gate_is_named(tmp_path, monkeypatch, capsys):
  row = made_up_rows("stages", quick=True)[1]
  failing = dataclasses.replace(row, status="failed: not finite", times_us=None)
  monkeypatch.setattr(QUESTIONS["stages"], "measure", lambda lab: iter([failing]))
  with pytest.raises(SystemExit) as exit:
    _run(tmp_path, "--only=stages")
  assert exit.value.code == 1
  error = capsys.readouterr().err
  assert "stages: 4096x4096x4096 NN bfloat16 as 64x128, 1 consumer, 2 st" in error
  assert "failed: not finite" in (tmp_path / "lab.html").read_text(encoding="utf-8")


def test_each_of_several_questions_has_a_process(tmp_path, monkeypatch, capfd):
  """One that dies is named, the others are asked, and the page has what there is."""
  commands = []
  monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

  def run(command, *, check, env):
    assert not check and "CUDA_VISIBLE_DEVICES" not in env
    name = command[-1].removeprefix("--only=")
    commands.append(command)
    lines = [row.to_json() + "\n" for row in made_up_rows(name, quick=True)]
    if name == "ladder":  # It ends in the middle of a line.
      lines[-1] = lines[-1][:100]
    (tmp_path / f"lab_{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    status = {"caching": -6, "ladder": 1}.get(name, 0)
    return subprocess.CompletedProcess(command, status)

  def start(argv):
    raise AssertionError("it takes the GPU from the processes that it starts")

  monkeypatch.setattr(program.subprocess, "run", run)
  monkeypatch.setattr(program.cli, "start", start)
  with pytest.raises(SystemExit) as exit:
    _run(tmp_path, "--only=caching,stages", "--quick", "--seed", "3", "-v=1")
  assert exit.value.code == 1
  assert [command[:3] for command in commands] == [
      [sys.executable, "-m", "experiments.lab"]
  ] * 2
  assert [command[-1] for command in commands] == ["--only=caching", "--only=stages"]
  for command in commands:
    assert set(command[3:-1]) == {
        f"--output={tmp_path}", "--quick", "--seed=3", "--verbosity=1"
    }
  error = capfd.readouterr().err
  assert "failed:\ncaching: exit status -6 (Aborted)\n" in error
  text = (tmp_path / "lab.html").read_text(encoding="utf-8")
  assert '<section id="caching">' in text and '<section id="stages">' in text

  with pytest.raises(SystemExit):
    _run(tmp_path, "--only=ladder,stages", "--noquick")
  assert [command[-1] for command in commands[2:]] == ["--only=ladder", "--only=stages"]
  assert "--noquick" in commands[-1]
  error = capfd.readouterr().err
  assert "failed:\nladder: exit status 1\npage: ValueError: " in error
  assert "lab_ladder.jsonl, line 21: " in error


def test_questions_are_shared_out_over_gpus(tmp_path, monkeypatch, capfd):
  """Two at once, never on one GPU; rows that may not be whole are not on the page."""
  both, busy, most = threading.Barrier(2, timeout=20), set(), []
  names = ("ladder", "caching", "stages", "splits")
  texts = {  # Here, as made_up_rows is not for several threads.
      name: "".join(row.to_json() + "\n" for row in made_up_rows(name, quick=True))
      for name in names
  }

  def run(command, *, check, env):
    del check
    name, gpu = command[-1].removeprefix("--only="), env["CUDA_VISIBLE_DEVICES"]
    assert gpu in ("5", "7") and gpu not in busy
    busy.add(gpu)
    path, text = tmp_path / f"lab_{name}.jsonl", texts[name]
    if name == "ladder":
      path.write_text(text[:-9], encoding="utf-8")  # What it is writing.
    if name in ("ladder", "caching"):
      both.wait()
    path.write_text(text, encoding="utf-8")
    most.append(len(busy))
    busy.remove(gpu)
    return subprocess.CompletedProcess(command, int(name == "stages"))

  monkeypatch.setattr(program.subprocess, "run", run)
  monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
  with pytest.raises(SystemExit):
    _run(tmp_path, f"--only={','.join(names)}", "--quick", "--gpus=2")
  assert capfd.readouterr().err.endswith("failed:\nstages: exit status 1\n")
  assert max(most) == 2 and not busy
  text = (tmp_path / "lab.html").read_text(encoding="utf-8")
  for name in names:
    assert f'<section id="{name}">' in text

  with pytest.raises(app.UsageError, match="--gpus=3, and CUDA_VISIBLE_DEVICES=5,7"):
    _run(tmp_path, "--only=ladder,caching", "--quick", "--gpus=3")


# Two questions, of which the first is asked by a process that is killed; then whether
# this one has touched a device.
_KILLED = """
import sys
from absl import app
from experiments.lab import __main__ as program
from jax._src import xla_bridge
asked = program._command
killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
program._command = lambda name: (
    asked(name) if name == "occupancy" else [sys.executable, "-c", killed]
)
try:
  app.run(program.main)
finally:
  assert not xla_bridge.backends_are_initialized()
"""


def test_a_process_that_is_killed(tmp_path):
  done = subprocess.run(
      [sys.executable, "-c", _KILLED, "--only=stages,occupancy", "--quick",
       f"--output={tmp_path}"],
      cwd=ROOT, capture_output=True, text=True,
  )
  assert done.returncode == 1
  assert done.stderr.endswith("failed:\nstages: exit status -9 (Killed)\n")
  assert "No GPU" in done.stdout and "occupancy (" in done.stdout
  found = rows.read(tmp_path / "lab_occupancy.jsonl")
  assert {row.provenance.command for row in found} == {
      "python -m experiments.lab --quick --only=occupancy"
  }
  text = (tmp_path / "lab.html").read_text(encoding="utf-8")
  assert '<section id="occupancy">' in text and '<section id="stages">' not in text


@pytest.mark.slow
def test_the_program_in_emulation(tmp_path, capsys):
  _run(tmp_path, "--only=occupancy", "--quick")
  said = capsys.readouterr().out
  assert "No GPU" in said and "occupancy" in said
  text = (tmp_path / "lab.html").read_text(encoding="utf-8")
  assert "these rows have none" in text and "the roofline" in text
