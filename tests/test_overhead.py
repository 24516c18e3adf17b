"""The experiment that times what precedes a product."""

from __future__ import annotations

import json

from absl import flags
from absl.testing import flagsaver
from experiment_cases import H200
import jax

from experiments import overhead
import jaxgemm

AGES = ("fresh", "known")


def test_costs_of_fresh_and_of_known_problems():
  with jaxgemm.target("NVIDIA H200"):
    found = {cost.stage: cost for cost in overhead.costs(H200, 5)}
  stages = [f"{what}, {age}" for what in ("trace", "plan", "lower") for age in AGES]
  assert list(found) == stages
  assert all(cost.ms > 0 for cost in found.values())
  assert found["plan, known"].ms < found["plan, fresh"].ms
  assert found["plan, fresh"].ratio is None and found["trace, fresh"].ratio > 0
  text = overhead.table(list(found.values()))
  assert len(text.splitlines()) == 2 + len(stages)


def test_overhead_program(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
  with flagsaver.flagsaver():
    flags.FLAGS(["program", "--problems=2", f"--output={tmp_path}"])
    overhead.main(["program"])
  result = json.loads((tmp_path / "overhead.json").read_text())
  assert result["compile_s"] == {} and len(result["costs"]) == 6
  assert "trace, fresh" in capsys.readouterr().out
