"""The experiment that compares results with the float64 product."""

from __future__ import annotations

import json

from absl import flags
from absl.testing import flagsaver
from experiment_cases import PROVENANCE
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import accuracy, products, suites

CASE = suites.at_precision(suites.make_case(200, 96, 300, "TN", "float32"), "highest")


def candidate(factor: float = 1.0) -> products.Candidate:
  xla = products.make_candidate(CASE.problem, "xla", None, emulated=True)
  return products.Candidate("auto", "a plan", "persistent",
                            lambda lhs, rhs: xla.product(lhs, rhs) * factor)


def test_errors():
  truth = np.array([[1.0, -2.0], [2.0, 4.0]])
  assert accuracy.errors(truth, truth) == (0.0, 0.0)
  whole, largest = accuracy.errors(truth + [[0.0, 0.0], [0.0, 1.0]], truth)
  assert whole == pytest.approx(1 / 5) and largest == 1 / 4
  assert accuracy.errors(truth * np.nan, truth) is None


@pytest.mark.parametrize("draw", accuracy.DRAWS)
def test_rows_tell_both_errors(draw):
  xla = products.make_candidate(CASE.problem, "xla", None, emulated=True)
  row = accuracy.measure(CASE, (xla, candidate(1 + 1e-5)), draw, 0, PROVENANCE)
  assert 0 < row.xla_error < 1e-6 and 0 < row.xla_max_error < 2e-6
  assert row.error == pytest.approx(1e-5, rel=0.05) and not row.failed
  fields = json.loads(row.to_json())
  assert fields["draw"] == draw and fields["commit"] == PROVENANCE.commit
  assert f"{draw}: {row.error:.2e}" in str(row)
  row = accuracy.measure(CASE, (xla, candidate(np.nan)), draw, 0, PROVENANCE)
  assert row.failed and row.max_error is None and "not finite" in str(row)


@pytest.mark.parametrize("broken", [False, True])
def test_accuracy_program(broken, tmp_path, monkeypatch, capsys):
  """From flags to files, with XLA's product in the kernel's place."""
  stand_in = candidate(np.nan if broken else 1.0)
  monkeypatch.setattr(products, "make_candidate", lambda *_, **__: stand_in)
  monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
  with flagsaver.flagsaver():
    flags.FLAGS([
        "program", "--shapes=200,96,300:TN", "--dtypes=float32", "--precision=highest",
        "--draws=normal,wide", f"--output={tmp_path}",
    ])
    if broken:
      with pytest.raises(SystemExit) as exit_info:
        accuracy.main(["program"])
      assert exit_info.value.code == 1
    else:
      accuracy.main(["program"])
  lines = (tmp_path / "accuracy_shapes.jsonl").read_text().splitlines()
  assert [json.loads(line)["draw"] for line in lines] == ["normal", "wide"]
  assert ("FAILED" in capsys.readouterr().out) == broken


def test_operands_are_as_the_problem_stores_them():
  lhs, rhs = accuracy.draw_operands(CASE.problem, "uniform", 0)
  assert lhs.shape == (300, 200) and rhs.shape == (300, 96)
  assert lhs.dtype == jnp.float32 and 0 <= float(lhs.min()) and float(lhs.max()) < 1
