"""The programs that check and time layers and blocks of models, on a CPU."""

from __future__ import annotations

import dataclasses
import json

from absl import app, flags
from absl.testing import flagsaver
import jax
import jax.numpy as jnp
import pytest

from experiments import blocks, layers, models, scaled, spellings, two_ways
import jaxgemm
from tests.kernel_cases import more

pytestmark = pytest.mark.slow  # The other JAX version need not run them too.


def run(tmp_path, *arguments, program=layers):
  with flagsaver.flagsaver():
    flags.FLAGS(["program", f"--output={tmp_path}", *arguments])
    program.main(["program"])
  (path,) = tmp_path.glob("*.jsonl")
  return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_from_flags_to_rows(tmp_path, capsys):
  rows = run(tmp_path, "--kinds=bias_gelu,gated", "--sizes=24,32,40")
  assert [(row["name"], row["direction"]) for row in rows] == [
      ("bias_gelu 24x32x40", "forward"), ("bias_gelu 24x32x40", "both"),
      ("gated 24x32x40", "forward"), ("gated 24x32x40", "both"),
  ]
  for row in rows:
    assert 0 < row["error"] <= 2 * row["xla_error"] and row["ratio_to_xla"] is None
  assert "gated 24x32x40 both" in capsys.readouterr().out


def test_products_with_scales(tmp_path, capsys):
  rows = run(tmp_path, program=scaled)
  assert [row["name"] for row in rows] == [str(layer) for layer in scaled.SMALL]
  for row in rows:
    assert 0 < row["error"] <= 2 * row["xla_error"] and row["ratio_to_xla"] is None
  assert "scales of rows" in capsys.readouterr().out


@pytest.mark.parametrize("name", layers.LAYERS)
def test_both_ways_agree(name):
  layer = layers.LAYERS[name]
  values = layers.draw(layer, (24, 32, 40), 0, "float32")
  with jax.default_matmul_precision("highest"):
    found = [two_ways.computed(f, "both", values) for f in (layer.theirs, layer.ours)]
  for a, b in zip(*map(jax.tree.leaves, found), strict=True):
    assert jnp.allclose(a, b, 1e-4, 1e-4)


def test_a_wrong_layer_fails(tmp_path, monkeypatch):
  wrong = dataclasses.replace(
      layers.LAYERS["residual"], ours=lambda v: 1.1 * (v["x"] @ v["w"]) + v["residual"]
  )
  monkeypatch.setitem(layers.LAYERS, "residual", wrong)
  with pytest.raises(SystemExit):
    run(tmp_path, "--kinds=residual", "--passes=forward")


def test_an_error_that_is_not_finite():
  assert two_ways.error(jnp.array([jnp.nan]), jnp.array([1.0])) is None


@pytest.mark.parametrize("size", ["1,2", "0,1,2", "a,b,c"])
def test_sizes_that_are_none(size, tmp_path):
  with pytest.raises(app.UsageError, match="TOKENS"):
    run(tmp_path, f"--sizes={size}")


@pytest.mark.slow
def test_spellings_of_products(tmp_path):
  # XLA's products of 16 bits, of which gradients this small are, sum in these on a CPU.
  rows = run(
      tmp_path, "--spelling=column", "--spelling=einsum td,edf->etf", "--passes=forward",
      program=spellings,
  )
  assert [(row["name"], row["direction"]) for row in rows] == [
      ("column 40x24 24", "forward"),
      ("einsum td,edf->etf 24x16 3x16x40", "forward"),
  ]
  for row in rows:
    assert 0 < row["error"] <= 2 * row["xla_error"]


@pytest.mark.parametrize("name", spellings.SPELLINGS)
def test_both_ways_of_a_spelling_agree(name):
  case = spellings.make_case(name, spellings.SPELLINGS[name].small, "both")
  values = {key: x.astype("float32") for key, x in case.draw(0).items()}
  with jax.default_matmul_precision("highest"):
    found = [two_ways.computed(f, "both", values) for f in (case.theirs, case.ours)]
  for a, b in zip(*map(jax.tree.leaves, found), strict=True):
    assert two_ways.error(a, b) < 1e-5


def test_accelerated_ones_are_theirs(tmp_path, monkeypatch):
  """Ours, as it is written, is not run."""
  seen = []
  accelerate = lambda function: seen.append(function) or accelerated(function)
  accelerated = jaxgemm.accelerate
  monkeypatch.setattr(jaxgemm, "accelerate", accelerate)
  wrong = dataclasses.replace(layers.LAYERS["residual"], ours=lambda v: 1 / 0)
  monkeypatch.setitem(layers.LAYERS, "residual", wrong)
  rows = run(tmp_path, "--kinds=residual", "--accelerate", "--sizes=24,32,40")
  assert len(seen) == len(rows) == 2
  for row in rows:
    assert 0 < row["error"] <= 2 * row["xla_error"]


@pytest.mark.slow
def test_blocks_of_models(tmp_path):
  rows = run(tmp_path, "--blocks=llama_t1,vit", program=models)
  assert [row["direction"] for row in rows] == ["forward", "both"]
  for row in rows:
    assert 0 < row["error"] <= 2 * row["xla_error"] and row["memory_bytes"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral_t8", *map(more, ("llama", "vit", "mixtral"))])
def test_both_ways_of_a_block_agree(name):
  block = models.SMALL[name]()
  values = blocks.draw(block, 0, "float32")
  case = models.make_case(name, block)
  with jax.default_matmul_precision("highest"):
    found = [
        two_ways.computed(f, case.direction, values) for f in (case.theirs, case.ours)
    ]
  for a, b in zip(*map(jax.tree.leaves, found), strict=True):
    assert two_ways.error(a, b) < 1e-5


@pytest.mark.slow
def test_decoding_continues_where_the_cache_ends():
  """One token after the others gives what all of them together give."""
  whole = blocks.llama(1, 9, 64, 96, 4, 2)
  values = blocks.draw(whole, 0, "float32")
  wanted = whole.run(values, blocks.LAYERS["xla"])[:, -1:]
  x = values["x"]
  mixed = blocks._norm(values["attention_norm"])(x) @ values["qkv"]
  mixed = mixed.reshape(1, 9, 2, 4, 16)
  keys, cached = blocks._rotated(mixed[:, :, :, 2], 0), mixed[:, :, :, 3]
  last = blocks.llama(1, 1, 64, 96, 4, 2, cached=8)
  out = last.run(
      values | dict(x=x[:, -1:], keys=keys[:, :8], values=cached[:, :8]),
      blocks.LAYERS["jaxgemm"],
  )
  assert two_ways.error(out, wanted) < 1e-4
