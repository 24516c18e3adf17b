"""The examples of experiments/adoption, each where its library is installed."""

from __future__ import annotations

import importlib

import pytest

from experiments.adoption import compare, plain_jax


@pytest.mark.parametrize(
    ("name", "library", "fused", "by_xla"),
    [("plain_jax", "jax", 3, 0), ("any_library", "jax", 2, 0),
     ("flax_linen", "flax", 0, 0), ("flax_nnx", "flax", 0, 6),
     ("equinox_layers", "equinox", 3, 0)],
)
def test_examples(name, library, fused, by_xla, capsys):
  """No product of a layer is left to XLA, forward or backward."""
  pytest.importorskip(library)
  example = importlib.import_module(f"experiments.adoption.{name}")
  found = example.main()
  assert found["jaxgemm_linear"] == fused
  assert found["jaxgemm"] > fused and found["dot_general"] == by_xla
  assert "the same results and gradients" in capsys.readouterr().out


def test_experts():
  """Three products of experts, and six of their gradients."""
  found = importlib.import_module("experiments.adoption.experts_layer").main()
  assert found["jaxgemm_ragged"] == 9 and not found["ragged_dot_general"]


def test_a_difference_does_not_pass(rng):
  x = rng.standard_normal((2, 3, 4)).astype("float32")
  with pytest.raises(AssertionError):
    compare.compare("", lambda p, x: p * x, lambda p, x: p * x + 1e-3, 1.0, x)


def test_products_are_counted_wherever_they_are():
  assert compare.count_products(lambda x: x @ x.T, plain_jax.jnp.ones((2, 2))) == {
      "dot_general": 1
  }
