"""The program that checks and times layers, on a CPU."""

from __future__ import annotations

import dataclasses
import json

from absl import app, flags
from absl.testing import flagsaver
import jax
import jax.numpy as jnp
import pytest

from experiments import layers


def run(tmp_path, *arguments):
  with flagsaver.flagsaver():
    flags.FLAGS(["program", f"--output={tmp_path}", *arguments])
    layers.main(["program"])
  return [json.loads(x) for x in (tmp_path / "layers.jsonl").read_text().splitlines()]


def test_from_flags_to_rows(tmp_path, capsys):
  rows = run(tmp_path, "--layers=bias_gelu,gated", "--sizes=24,32,40")
  assert [(row["layer"], row["direction"]) for row in rows] == [
      ("bias_gelu", "forward"), ("bias_gelu", "both"), ("gated", "forward"),
      ("gated", "both"),
  ]
  for row in rows:
    assert 0 < row["error"] <= 2 * row["xla_error"] and row["ratio_to_xla"] is None
  assert "gated both 24x32x40" in capsys.readouterr().out


@pytest.mark.parametrize("name", layers.LAYERS)
def test_both_ways_agree(name):
  layer = layers.LAYERS[name]
  values = layers.draw(layer, (24, 32, 40), 0, "float32")
  with jax.default_matmul_precision("highest"):
    found = [layers.computed(f, "both", values) for f in (layer.theirs, layer.ours)]
  for a, b in zip(*map(jax.tree.leaves, found), strict=True):
    assert jnp.allclose(a, b, 1e-4, 1e-4)


def test_a_wrong_layer_fails(tmp_path, monkeypatch):
  wrong = dataclasses.replace(
      layers.LAYERS["residual"], ours=lambda v: 1.1 * (v["x"] @ v["w"]) + v["residual"]
  )
  monkeypatch.setitem(layers.LAYERS, "residual", wrong)
  with pytest.raises(SystemExit):
    run(tmp_path, "--layers=residual", "--passes=forward")


def test_an_error_that_is_not_finite():
  assert layers.error(jnp.array([jnp.nan]), jnp.array([1.0])) is None


@pytest.mark.parametrize("size", ["1,2", "0,1,2", "a,b,c"])
def test_sizes_that_are_none(size, tmp_path):
  with pytest.raises(app.UsageError, match="TOKENS"):
    run(tmp_path, f"--sizes={size}")
