"""Flags: what the programs answer to nonsense."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
import subprocess
import sys

from absl import app, flags
from absl.testing import flagsaver
import pytest

pytestmark = pytest.mark.slow  # The other JAX version need not run them too.

ROOT = Path(__file__).parent.parent
FLAGS = [
    ("run", "--suite=fast", "flag --suite=fast: value should be one of <demo|"),
    ("run", "--shapes=8,8", r"--shapes: shape '8,8' is not of the form"),
    ("run", "--shapes=8,8,8:NX", r"--shapes: shape '8,8,8:NX' is not of the form"),
    ("run", "--shapes=9999999,9999,9", "too large to emulate .* smaller --shapes"),
    ("run", "--dtypes=int3", "flag --dtypes=.*must be among bfloat16"),
    ("run", "--dtypes=", "flag --dtypes=.*must be among bfloat16"),
    ("run", "--layouts=NX", "flag --layouts=.*must be among NN"),
    ("run", "--classes=huge", "flag --classes=.*must be among large"),
    ("run", "--classes=large", "no problem is left: none has these .* --classes"),
    ("run", "--precision=exact", "flag --precision=exact: value should be one of"),
    ("run", "--part=3/2", "--part=3/2 is not I/N"),
    ("run", "--part=half", "--part=half is not I/N"),
    ("run", "--part=99/100", "no problem is left: .* --part"),
    ("run", "--draw=0", "flag --draw=0"),
    ("run", "--repeats=some", "flag --repeats=some"),
    ("run", "--seed=-1", "flag --seed=-1"),
    ("run", "--sustained=-1", "flag --sustained=-1"),
    ("run", "--implementations=fast", "flag --implementations=.*must be among xla"),
    ("run", "--output=/dev/null/x", "--output=/dev/null/x cannot be made"),
    ("run", "--name=a/b", "--name=a/b is no name of a file"),
    ("run", "--tile=8", "Unknown command line flag 'tile'"),
    ("determinism", "--calls=1", "flag --calls=1"),
    ("accuracy", "--draws=", "flag --draws=.*must be among normal"),
    ("layers", "--kinds=bias", "flag --kinds=.*must be among bias_gelu"),
    ("layers", "--passes=both,x", "flag --passes=.*must be among forward"),
    ("models", "--blocks=gpt", "flag --blocks=.*must be among llama"),
    ("sharded", "--modes=x", "flag --modes=.*must be among tensor"),
    ("sharded", "--process=1", "--process=1 is not below --processes=1"),
    ("sharded", "--coordinator=host", "--coordinator=host is not HOST:PORT"),
    ("overhead", "--problems=0", "flag --problems=0"),
    ("mutants", "--patience=0", "flag --patience=0"),
    ("train_lm", "--steps=0", "flag --steps=0"),
    ("train_lm", "--model=bert", "flag --model=bert"),
    ("train_lm", "--vocabulary=10", "flag --vocabulary=10"),
    ("train_lm", "--learning_rate=fast", "flag --learning_rate=fast"),
    ("fit_heuristics", "--constants=speed", "flag --constants=.*must be among roles"),
    ("fit_heuristics", "--iterations=0", "flag --iterations=0"),
    ("sanitize", "--tools=leakcheck", "flag --tools=.*must be among memcheck"),
    ("sanitize", "--cases=nothing", "--cases=nothing is part of no case's name"),
]


@pytest.mark.parametrize(("module", "flag", "message"), FLAGS, ids=lambda x: x)
def test_flags_of_nonsense(module, flag, message, tmp_path, monkeypatch):
  """Each is refused at once, in words that name the flag."""
  monkeypatch.chdir(tmp_path)
  program = importlib.import_module(f"experiments.{module}")
  with flagsaver.flagsaver(), pytest.raises((app.UsageError, flags.Error), match=message):
    flags.FLAGS(["program", flag])
    program.main(["program"])
  assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flag", ["--suite=fast", "--part=3/2"])
def test_the_exit_status_of_nonsense(flag):
  run = subprocess.run(
      [sys.executable, "-m", "experiments.run", flag], cwd=ROOT,
      env=os.environ | {"JAX_PLATFORMS": "cpu"},
      text=True, capture_output=True,
  )
  assert run.returncode == 1 and flag in run.stdout + run.stderr
  assert "Traceback" not in run.stderr
