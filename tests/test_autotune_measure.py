"""How the tuner compiles, checks and times candidates; kernels are emulated."""

from __future__ import annotations

import dataclasses
import functools

from autotune_cases import (
  H200,
  NN,
  NT,
  TN,
  XLA,
)
import jax
import jax.numpy as jnp
from product_cases import equations
import pytest

import jaxgemm
from jaxgemm import primitive
from jaxgemm.autotune import measure as measuring
from jaxgemm.autotune.gate import Gate
from jaxgemm.autotune.measure import Choice, Job, Measurement
from jaxgemm.autotune.operands import make_inputs, operand_types, stored_shapes
from pallas_kernels.problem import BlockedConfig, Epilogue, PipelinedConfig, Problem

pytestmark = pytest.mark.usefixtures("folder")


PROBLEMS = [
    NN,
    TN,
    dataclasses.replace(NT, dtype="float16", out_dtype="float32", algorithm="f16_f32"),
    Problem(24, 40, 33, batch=3),
    Problem(24, 40, 33, batch=3, rhs_batched=False, lhs_layout="m-major"),
    Problem(24, 40, 33, batch=3, lhs_batched=False, rhs_layout="k-major"),
    Problem(24, 40, 64, epilogue=Epilogue(0.5, 2.0, "float32")),
    Problem(24, 40, 64, batch=2, epilogue=Epilogue(0.5, 1.0, "bfloat16")),
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_what_is_measured_is_the_problem(problem):
  product = measuring.bound_product(problem, XLA)
  types = operand_types(problem)
  assert [x.shape for x in types] == list(stored_shapes(problem))
  c_dtype = types[2].dtype.name if len(types) == 3 else None
  assert product.problem(*stored_shapes(problem)[:2], problem.dtype, c_dtype) == problem
  lowered = measuring._lower(problem, XLA)
  (eqn,) = equations(
      jax.make_jaxpr(functools.partial(primitive.bind, product=product))(*types).jaxpr
  )
  assert eqn.params["product"] == product and lowered.out_info.dtype == problem.out_dtype


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_the_gate_knows_epilogues_and_shared_operands(problem):
  inputs = make_inputs(problem)(jax.random.key(0))
  xla = measuring._lower(problem, XLA).compile()
  gate = Gate(problem, seed=0)
  assert gate.set_baseline(xla, inputs).passed
  assert gate.baseline_error < 1e-2
  assert gate.check(xla, inputs).passed
  assert not gate.check(lambda *x: xla(*x) * 1.1, inputs).passed


def emulated(choices, problem=NN, timer=None) -> list[Measurement]:
  def fake_timer(variants, input_sets, repeats):
    for variant in variants.values():
      variant(*input_sets[-1])
    return {name: [float(name + 1)] * repeats for name in variants}

  with jaxgemm.emulate():
    (found,) = measuring.measure(
        [Job(problem, tuple(choices))], H200, timer=timer or fake_timer
    )
  return found


@pytest.mark.slow
def test_candidates_are_compiled_checked_and_timed(monkeypatch):
  monkeypatch.setattr(measuring, "_REPEATS", 2)
  choices = [
      XLA,
      Choice("blocked", BlockedConfig(64, 64)),
      Choice("blocked", BlockedConfig(tile_m=100)),
      Choice("pipelined", PipelinedConfig(64, 64)),
  ]
  xla, good, bad, other = emulated(choices)
  assert (xla.times_us, xla.failure) == ((1.0, 1.0), None)
  assert (good.times_us, good.failure) == ((2.0, 2.0), None)
  assert bad.times_us == () and "ValueError" in bad.failure and "tile_m" in bad.failure
  assert (other.times_us, other.failure) == ((4.0, 4.0), None)


def test_wrong_and_raising_kernels_fail(monkeypatch):
  compiled = {
      XLA: lambda a, b: jnp.matmul(a, b),
      Choice("blocked", BlockedConfig()): lambda a, b: 1.01 * jnp.matmul(a, b),
      Choice("blocked", BlockedConfig(64)): lambda a, b: a @ jnp.full_like(b, jnp.nan),
      Choice("pipelined", PipelinedConfig()): lambda a, b: [][0],
  }

  class Lowered:
    def __init__(self, problem, choice):
      self.compile = lambda: compiled[choice]

  monkeypatch.setattr(measuring, "_lower", Lowered)
  xla, wrong, nan, raising = emulated(compiled)
  assert xla.failure is None and xla.times_us
  assert wrong.failure.startswith("error ") and "XLA's is" in wrong.failure
  assert "not finite" in nan.failure and raising.failure.startswith("IndexError")


def test_a_problem_that_cannot_be_timed_fails_alone():
  def no_cupti(variants, input_sets, repeats):
    raise RuntimeError("CUPTI is taken\nby another")

  found = emulated([XLA, Choice("blocked", BlockedConfig(64, 64))], timer=no_cupti)
  assert {one.failure for one in found} == {"RuntimeError: CUPTI is taken"}
  assert not any(one.times_us for one in found)
