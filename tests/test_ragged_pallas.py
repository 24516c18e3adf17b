"""The experiment that compares groups of rows with JAX's own Pallas kernel, on a CPU."""

from __future__ import annotations

import json

from absl import app, flags
from experiment_cases import PROVENANCE
import jax
from jax import lax
import jax.numpy as jnp
import pytest

from experiments import ragged, ragged_pallas
from experiments.ragged_pallas import Row

pytestmark = pytest.mark.slow  # The other JAX version need not run them too.


def test_what_compiles_and_agrees_is_timed():
  values = ragged.draw(ragged.SMALL[0], 0)
  operands = values["x"], values["w"], values["sizes"]

  def fails(*operands):
    raise ValueError("exceeds available shared memory\nand more")

  others = {
      "right": lax.ragged_dot,
      "wrong": lambda x, w, sizes: lax.ragged_dot(x, w, sizes[::-1]),
      "not finite": lambda *x: lax.ragged_dot(*x) * jnp.bfloat16(jnp.nan),
      "fails": fails,
  }
  programs, left_out = ragged_pallas.compiled(others, operands)
  assert list(programs) == [ragged_pallas.OURS, "right"]
  assert left_out.keys() == {"wrong", "not finite", "fails"}
  assert left_out["fails"] == "exceeds available shared memory"
  assert left_out["wrong"].startswith("differs by ")


def test_the_fastest_config_counts():
  row = Row("experts", 10.0, 0.1, {"a": 14.0, "b": 12.0}, {"c": "no"}, PROVENANCE)
  line = json.loads(row.to_json())
  assert (line["best"], line["ratio"], line["left_out"]) == ("b", 1.2, {"c": "no"})
  none = Row("others", 10.0, 0.1, {}, {"a": "no"}, PROVENANCE)
  assert none.best is None and none.ratio is None
  assert "1.200" in ragged_pallas.table([row, none])


def test_configs_are_those_of_the_kernel():
  """Each traces: their names are its arguments."""
  x, w = (jax.ShapeDtypeStruct(s, "bfloat16") for s in ((256, 128), (4, 128, 384)))
  sizes = jax.ShapeDtypeStruct((4,), "int32")
  for config in ragged_pallas.CONFIGS:
    out = jax.eval_shape(ragged_pallas.by_pallas(config), x, w, sizes)
    assert out.shape == (256, 384)


def test_it_needs_a_gpu(tmp_path):
  flags.FLAGS(["program", f"--output={tmp_path}"])
  with pytest.raises(app.UsageError, match="Hopper"):
    ragged_pallas.main(["program"])
