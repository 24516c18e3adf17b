"""The gate: what passes it, and what does not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import (
  gate,
  products,
  suites,
)
from pallas_kernels.problem import Problem

pytestmark = pytest.mark.slow  # The other JAX version need not run them too.


@pytest.fixture(scope="module")
def tf32():
  """A gate whose baseline rounds to TF32, its inputs, that result, and the truth."""
  problem = suites.make_case(128, 128, 64, dtype="float32").problem
  inputs = products.make_inputs(problem)(jax.random.key(1))
  xla = products.make_candidate(problem, "xla", None, emulated=True).product
  opened = gate.Gate(problem, seed=0)
  verdict = opened.set_baseline(xla, inputs)
  assert verdict.passed and 1e-5 < verdict.error < 1e-3
  lhs, rhs = (np.asarray(x, np.float64) for x in inputs)
  return opened, inputs, np.asarray(xla(*inputs), np.float64), lhs @ rhs


def _check(tf32, result) -> gate.Verdict:
  opened, inputs, *_ = tf32
  return opened.check(lambda lhs, rhs: jnp.asarray(result, jnp.float32), inputs)


def test_gate_passes_the_truth_and_the_baseline(tf32):
  _, _, baseline, truth = tf32
  assert _check(tf32, truth).passed and _check(tf32, truth).error < 1e-6
  verdict = _check(tf32, baseline)
  assert verdict.passed and verdict.error == pytest.approx(tf32[0].baseline_error)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_gate_wants_finite_results(tf32, value):
  result = tf32[2].copy()
  result[-1, -1] = value
  verdict = _check(tf32, result)
  assert verdict == gate.Verdict(None, "the result is not finite everywhere")


@pytest.mark.parametrize("share, passes", [(0.98, True), (1.02, False)])
def test_gate_limits_the_error(tf32, share, passes):
  opened, _, baseline, truth = tf32
  result = truth + share * gate.ERROR_FACTOR * (baseline - truth)
  verdict = _check(tf32, result)
  limit = gate.ERROR_FACTOR * opened.baseline_error
  assert verdict.error == pytest.approx(share * limit, rel=1e-3)
  assert verdict.passed == passes
  assert passes or verdict.reason.startswith("error")


@pytest.mark.parametrize("share, passes", [(0.95, True), (1.05, False)])
def test_gate_limits_each_element(tf32, share, passes):
  opened, _, baseline, _ = tf32
  result = baseline.copy()
  scale = max(abs(result[70, 9]), np.sqrt(np.mean(np.square(baseline))))
  result[70, 9] += share * gate.DEVIATION_FACTOR * opened.baseline_error * scale
  verdict = _check(tf32, result)
  assert verdict.error < gate.ERROR_FACTOR * opened.baseline_error
  assert verdict.passed == passes
  assert passes or verdict.reason.startswith("an element is")


def test_gate_sees_a_wrong_element_beside_the_sample():
  problem = suites.make_case(512, 1024, 300, "TT", "float32").problem
  inputs = products.make_inputs(problem)(jax.random.key(1))
  xla = products.make_candidate(problem, "xla", None, emulated=True).product
  opened = gate.Gate(problem, seed=0)
  assert opened.set_baseline(xla, inputs).passed
  assert opened.check(xla, inputs).passed
  wrong = opened.check(lambda *x: xla(*x).at[301, 700].add(10.0), inputs)
  # The oracle's error is that of the sample, and the sample is right.
  assert wrong.error == pytest.approx(opened.baseline_error)
  assert wrong.reason.startswith("an element is")
  first = opened.check(lambda *x: xla(*x).at[0, 0].add(1e3), inputs)
  assert first.reason.startswith("error")


def test_gate_where_the_baseline_is_exact():
  """A product of two bfloat16 numbers fits in float32."""
  problem = Problem(16, 16, 1, out_dtype="float32")
  inputs = products.make_inputs(problem)(jax.random.key(1))
  xla = products.make_candidate(problem, "xla", None, emulated=True).product
  opened = gate.Gate(problem, seed=0)
  assert opened.set_baseline(xla, inputs).error == 0.0
  assert opened.check(xla, inputs).passed
  assert not opened.check(lambda *x: xla(*x) * (1 + 1e-6), inputs).passed


def test_gate_without_a_baseline():
  problem = Problem(16, 16, 16)
  inputs = products.make_inputs(problem)(jax.random.key(1))
  opened = gate.Gate(problem, seed=0)
  nans = lambda lhs, rhs: jnp.full((16, 16), jnp.nan, jnp.bfloat16)
  assert "not finite" in opened.set_baseline(nans, inputs).reason
  assert "no result of XLA's" in opened.check(nans, inputs).reason
