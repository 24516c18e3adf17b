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
from jaxgemm.autotune.measure import Job, Measurement
from jaxgemm.autotune.operands import (
  make_inputs,
  operand_types,
  out_shape,
  stored_shapes,
)
from jaxgemm.autotune.programs import Choice, bound_product, program
from jaxgemm.recording import recording
from pallas_kernels.configs import BlockedConfig, PersistentConfig, PipelinedConfig
from pallas_kernels.problem import Epilogue, Problem
from tests.kernel_cases import more

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
  product = bound_product(problem, XLA)
  types = operand_types(problem)
  assert [x.shape for x in types] == list(stored_shapes(problem))
  c_dtype = types[2].dtype.name if len(types) == 3 else None
  assert product.problem(*stored_shapes(problem)[:2], problem.dtype, c_dtype) == problem
  lowered = measuring._lower(problem, XLA)
  (eqn,) = equations(
      jax.make_jaxpr(functools.partial(primitive.bind, product=product))(*types).jaxpr
  )
  assert eqn.params["product"] == product and lowered.out_info.dtype == problem.out_dtype


def of_groups(m, n, k, groups=3, grouped="m", **fields):
  if grouped == "m":
    fields = dict(rhs_batched=True) | fields
  else:
    fields = dict(rhs_batched=False, lhs_layout="m-major") | fields
  return Problem(m, n, k, groups, lhs_batched=False, grouped=grouped, **fields)


FLOAT8 = dict(dtype="float8_e4m3fn", algorithm="e4m3_f32")
GROUPED = [
    of_groups(70, 40, 64),
    of_groups(70, 40, 64, groups=1, rhs_layout="k-major"),
    of_groups(40, 48, 200, grouped="k"),
    of_groups(70, 40, 64, dtype="int8", out_dtype="int32", algorithm="i8_i32"),
    *(
        of_groups(
            90, 208, 300, rhs_layout="k-major", epilogue=Epilogue(scaling=scaling),
            **FLOAT8,
        )
        for scaling in ("rows", "blocks")
    ),
    *(Problem(90, 208, 300, epilogue=Epilogue(scaling=x), **FLOAT8)
      for x in ("rows", "blocks")),
    Problem(24, 40, 200, batch=2, epilogue=Epilogue(scaling="blocks"), **FLOAT8),
]


@pytest.mark.parametrize("problem", GROUPED, ids=str)
def test_groups_and_scales_are_measured_as_they_are_asked_for(problem):
  with jaxgemm.target("NVIDIA H200"), recording() as found:
    traced = jax.jit(program(problem, XLA)).trace(*operand_types(problem))
    lowered = traced.lower(lowering_platforms=("cuda",))
  assert lowered.out_info.shape == out_shape(problem)
  assert [plan.problem for plan in found.plans] == [problem]
  inputs = make_inputs(problem)(jax.random.key(0))
  assert [(x.shape, x.dtype) for x in inputs] == [
      (x.shape, x.dtype) for x in operand_types(problem)
  ]


@pytest.mark.parametrize("problem", [*PROBLEMS, *GROUPED], ids=str)
def test_the_gate_knows_epilogues_and_shared_operands(problem):
  inputs = make_inputs(problem)(jax.random.key(0))
  xla = measuring._lower(problem, XLA).compile()
  gate = Gate(problem, seed=0)
  assert gate.set_baseline(xla, inputs).passed
  assert gate.baseline_error < 1e-2
  assert gate.check(xla, inputs).passed
  off = lambda *x: (xla(*x) * 1.1).astype(problem.out_dtype)
  assert not gate.check(off, inputs).passed


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("problem", "config"),
    [
        (GROUPED[0], dict(tile_m=64, tile_n=16, consumers=1, num_stages=3, swap=True)),
        more(GROUPED[2], dict(tile_m=64, tile_n=64, consumers=1, num_stages=3)),
        more(
            GROUPED[5], dict(tile_m=64, tile_n=128, tile_k=128, consumers=1, promote=1)
        ),
        more(GROUPED[7], dict(tile_m=64, tile_n=128, tile_k=128, consumers=1, promote=1)),
    ],
    ids=str,
)
def test_kernels_of_groups_and_of_scales_are_checked_and_timed(
    problem, config, monkeypatch
):
  monkeypatch.setattr(measuring, "_REPEATS", 2)
  kernel = f"grouped_{problem.grouped}" if problem.grouped else "persistent"
  config = PersistentConfig(**config)
  wrong = dataclasses.replace(config, tile_m=96)
  xla, good, bad = emulated(
      [XLA, Choice(kernel, config), Choice(kernel, wrong)], problem
  )
  assert (xla.times_us, xla.failure) == ((1.0, 1.0), None)
  assert (good.times_us, good.failure) == ((2.0, 2.0), None)
  assert bad.times_us == () and "tile_m=96" in bad.failure


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
