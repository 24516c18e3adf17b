"""The tuner and other processes: what these lower to, and the command line."""

from __future__ import annotations

import hashlib
import subprocess
import sys

from autotune_cases import (
  H200,
  NN,
  ROOT,
  A,
  B,
  Stopwatch,
  blocked_wins,
  collected,
  environment,
  loss,
  lowered_text,
  tuned,
)
import jax
import pytest

from experiments import suites
import jaxgemm
from jaxgemm import user_table
from jaxgemm.autotune import problems as names
from pallas_kernels.problem import Problem

pytestmark = pytest.mark.usefixtures("folder")


_LATER = """
import hashlib, jax, jaxgemm
from tests.autotune_cases import A, B, lowered_text
text = lowered_text()
with jaxgemm.target("NVIDIA H200"):
  print(jaxgemm.explain(A, B).source)
print(hashlib.sha256(text.encode()).hexdigest(), "jaxgemm_blocked" in text)
"""


def later_process() -> str:
  return subprocess.run(
      [sys.executable, "-W", "error", "-c", _LATER], cwd=ROOT, text=True, check=True,
      stdout=subprocess.PIPE,
      env=environment(),
  ).stdout


def test_a_later_process_lowers_to_the_same_module(folder):
  """Though this one lowered other kernels, and candidates, before."""
  tuned(jax.grad(loss, (0, 1)), A, B, measure=Stopwatch(blocked_wins))
  here = hashlib.sha256(lowered_text().encode()).hexdigest()
  first, second = later_process(), later_process()
  assert first == second
  assert "user table" in first and f"{here} True" in first


def test_a_kernel_lowers_to_the_same_bytes_each_time():
  """Whatever was lowered before: see pallas_kernels/compat.py."""
  first, _, second = lowered_text(), collected(jaxgemm.matmul, A, B), lowered_text()
  assert first == second


def test_shapes_are_parsed():
  assert names.parse_shape("64,128,96", ["bfloat16"]) == [NN]
  assert names.parse_shape("2,64,128,96:NT+TN", ["float16"]) == [
      Problem(64, 128, 96, 2, lhs_layout=lhs, rhs_layout=rhs, dtype="float16",
              out_dtype="float16", algorithm="f16_f32")
      for lhs, rhs in (("k-major", "k-major"), ("m-major", "n-major"))
  ]
  for text in ("", "1,2", "1,2,0", "1,2,3:XX", "1,2,3:NN,TT", "1,2,3,4,5", "-1,2,3"):
    with pytest.raises(ValueError, match="not of the form"):
      names.parse_shape(text, ["bfloat16"])


def test_suites_are_those_of_the_experiments(monkeypatch):
  for name in suites.SUITES:
    assert all(isinstance(problem, Problem) for problem in names.suite(name))
  with pytest.raises(ValueError, match="'fast' is none of demo"):
    names.suite("fast")
  monkeypatch.setitem(sys.modules, "experiments", None)
  with pytest.raises(ValueError, match="root of a checkout.*--shapes"):
    names.suite("demo")


def command_line(*flags: str, code: str = "") -> subprocess.CompletedProcess:
  """`python -m jaxgemm.autotune`, after some code that replaces what needs a GPU."""
  code += "\nimport runpy\nrunpy.run_module('jaxgemm.autotune', run_name='__main__')"
  return subprocess.run(
      [sys.executable, "-W", "error", "-c", code, *flags], cwd=ROOT, text=True,
      capture_output=True, env=environment(),
  )


_MEASURED = """
from jaxgemm import autotune
from jaxgemm.autotune import measure, tuner
from tests.autotune_cases import H200, Stopwatch, blocked_wins
assert autotune is tuner.autotune  # The function, though the package has its name.
tuner.measuring_device = lambda: H200
measure.measure = Stopwatch(blocked_wins)
"""


def test_the_command_line():
  flags = ["--shapes=64,128,96", "--shapes=64,128,96:NN+TN", "--max_candidates=8"]
  run = command_line(*flags, code=_MEASURED)
  assert run.returncode == 0, run.stderr
  assert run.stdout.count("blocked BlockedConfig") == 2
  assert f"table: {user_table.path(H200.kind)}" in run.stdout
  evidence = dict(user_table.lookup(NN, H200).evidence)
  assert evidence["command"] == f"python -m jaxgemm.autotune {' '.join(flags)}"
  fails = "measure.measure = Stopwatch(lambda choice: 'out of memory')"
  run = command_line("--suite=issue2", code=_MEASURED + fails)
  assert run.returncode == 1 and "not every problem" in run.stderr
  assert "failed: xla: out of memory" in run.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "flag, message",
    [
        ("--force", "nothing to measure: give --shapes or --suite"),
        ("--shapes=1,2", "shape '1,2' is not of the form"),
        ("--suite=fast", "'fast' is none of demo"),
        ("--dtypes=int8", "must be among bfloat16"),
        ("--shapes=8,8,8", "there is nothing to measure"),  # No GPU.
    ],
)
def test_the_command_line_says_what_is_wrong(flag, message):
  run = command_line(flag)
  assert run.returncode == 1 and message in run.stdout + run.stderr
  assert not run.stderr.startswith("Traceback")
