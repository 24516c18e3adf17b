"""The tuner: which problems it finds, what it measures and stores, what follows."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import os
from pathlib import Path
import subprocess
import sys

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np
from product_cases import equations
import pytest

from experiments import suites
import jaxgemm
from jaxgemm import device, lowering, plan, primitive, user_table
from jaxgemm.autotune import measure as measuring
from jaxgemm.autotune import problems as names
from jaxgemm.autotune import tuner
from jaxgemm.autotune.gate import Gate
from jaxgemm.autotune.measure import Choice, Job, Measurement
from jaxgemm.autotune.operands import make_inputs, operand_types, stored_shapes
from pallas_kernels.problem import BlockedConfig, Epilogue, PipelinedConfig, Problem

ROOT = Path(__file__).parent.parent
H200 = device.known_device("NVIDIA H200")
XLA = Choice("xla", None)


def shape(*sizes, dtype="bfloat16") -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(sizes, dtype)


def loss(a, b):
  # Squared, that the gradient needs the product itself, too.
  return jnp.sum(jaxgemm.matmul(a, b).astype(jnp.float32) ** 2)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
  """An empty folder for the tables of one test."""
  monkeypatch.setenv(user_table.ENVIRONMENT, str(tmp_path))
  plan.forget_tables()
  yield tmp_path
  plan.forget_tables()


class Stopwatch:
  """Stands in for the GPU: `time_us` says how long each choice takes.

  It returns a time, several, or a string: why the choice fails.
  """

  def __init__(self, time_us):
    self.time_us = time_us
    self.jobs: list[Job] = []

  def __call__(self, jobs, where):
    for job in jobs:
      self.jobs.append(job)
      found = [self.time_us(choice) for choice in job.choices]
      yield [
          Measurement(failure=one) if isinstance(one, str)
          else Measurement(tuple(np.atleast_1d(one)))
          for one in found
      ]


def blocked_wins(choice: Choice) -> float:
  return {"blocked": 5.0, "xla": 8.0}.get(choice.kernel, 7.0)


# -- Which problems there are ------------------------------------------------------


def collected(fn, *args) -> list[Problem]:
  with jaxgemm.target("NVIDIA H200"):
    return tuner.collect(fn, *args, device=H200)


A, B = shape(64, 96), shape(96, 128)
NN = Problem(64, 128, 96)
NT = Problem(64, 96, 128, rhs_layout="k-major")  # d a = ct @ b^T
TN = Problem(96, 128, 64, lhs_layout="m-major")  # d b = a^T @ ct


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_a_product_is_found_once(wrap):
  fn = wrap(lambda a, b: jaxgemm.matmul(a, b) + jaxgemm.matmul(a * 2, b))
  assert collected(fn, A, B) == [NN]
  assert collected(fn, A, B) == [NN]  # Though JAX has traced and lowered it before.


def test_gradients_are_found():
  found = collected(jax.jit(jax.grad(loss, (0, 1))), A, B)
  assert sorted(found, key=str) == sorted([NN, NT, TN], key=str)


def test_arguments_may_be_arrays_and_nothing_runs():
  def fn(a, b):
    jax.debug.callback(ran.append, a)
    return jaxgemm.matmul(a, b)

  ran = []
  a, b = jnp.ones((64, 96), "bfloat16"), jnp.ones((96, 128), "bfloat16")
  with jaxgemm.emulate():  # Lowered for this CPU, as the callback needs.
    assert tuner.collect(fn, a, b, device=H200) == [NN]
    assert tuner.collect(functools.partial(fn, b=b), a, device=H200) == [NN]
  assert not ran


def test_control_flow_is_looked_into():
  weights = shape(3, 96, 96)

  def scanned(x, w):
    step = lambda carry, layer: (jaxgemm.matmul(carry, layer), None)
    return lax.scan(step, x, w)[0]

  def branches(x, w):
    square = lambda x: jaxgemm.matmul(x, w[0])
    tall = lambda x: jaxgemm.matmul(x[:32], w[0]).repeat(2, 0)
    x = lax.cond(x[0, 0] > 0, square, tall, x)
    return lax.while_loop(lambda x: x[0, 0] < 0, lambda x: scanned(x, w), x)

  square = Problem(64, 96, 96)
  assert collected(scanned, A, weights) == [square]
  assert sorted(collected(branches, A, weights), key=str) == sorted(
      [square, dataclasses.replace(square, m=32)], key=str
  )
  gradient = jax.grad(lambda x, w: jnp.sum(scanned(x, w).astype(jnp.float32)), (0, 1))
  layouts = {problem.layouts for problem in collected(gradient, A, weights)}
  assert layouts == {"NN", "NT", "TN"}


def test_remat_and_custom_derivatives_are_looked_into():
  @jax.checkpoint
  def block(a, b):
    return jnp.sin(jaxgemm.matmul(a, b).astype(jnp.float32))

  gradient = jax.grad(lambda a, b: jnp.sum(block(a, b)), (0, 1))
  assert set(collected(gradient, A, B)) == {NN, NT, TN}

  @jax.custom_vjp
  def doubled(a, b):
    return jaxgemm.matmul(a, b)

  doubled.defvjp(
      lambda a, b: (doubled(a, b), (a, b)),
      lambda saved, ct: (jaxgemm.matmul(ct, saved[1].T), jnp.zeros_like(saved[1])),
  )
  gradient = jax.grad(lambda a, b: jnp.sum(doubled(a, b).astype(jnp.float32) ** 2))
  assert set(collected(gradient, A, B)) == {NN, Problem(64, 96, 128)}


def test_batches_are_found_as_they_are_folded():
  assert collected(jax.vmap(jaxgemm.matmul, (0, None)), shape(8, 64, 96), B) == [
      dataclasses.replace(NN, m=512)
  ]
  (problem,) = collected(jax.vmap(jaxgemm.matmul), shape(8, 64, 96), shape(8, 96, 128))
  assert problem == dataclasses.replace(NN, batch=8)


def test_a_shard_map_has_the_problems_of_its_shards():
  mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
  spec = PartitionSpec("x", None)
  fn = jax.shard_map(
      jaxgemm.matmul, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec
  )
  assert collected(fn, A, B) == [dataclasses.replace(NN, m=16)]


def test_what_jit_shards_is_found_by_compiling(monkeypatch):
  """The partitioner asks for the shards' plans; a CPU then computes them by XLA."""

  def planned_but_by_xla(product, *operands):
    lowering.local_plan(product, *operands)
    return lowering.xla_product(product, *operands, cuda=False)

  monkeypatch.setattr(primitive, "local_product", planned_but_by_xla)
  monkeypatch.setattr(tuner.jax, "default_backend", lambda: "gpu")
  registry = importlib.import_module("jax._src.interpreters.mlir")
  monkeypatch.setitem(  # As on a GPU.
      registry._platform_specific_lowerings["cpu"], primitive.gemm_p,
      registry.LoweringRuleEntry(primitive._lower_kernels, True)
      if hasattr(registry, "LoweringRuleEntry") else primitive._lower_kernels,
  )
  mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
  rows = NamedSharding(mesh, PartitionSpec("x", None))
  a = jax.ShapeDtypeStruct(A.shape, A.dtype, sharding=rows)
  whole = NamedSharding(mesh, PartitionSpec())
  b = jax.ShapeDtypeStruct(B.shape, B.dtype, sharding=whole)
  assert collected(jaxgemm.matmul, a, b) == [dataclasses.replace(NN, m=16)]


def test_what_the_caller_has_chosen_is_left_alone():
  named = functools.partial(jaxgemm.matmul, implementation="blocked")
  assert collected(named, A, B) == []
  assert collected(functools.partial(jaxgemm.matmul, config=BlockedConfig()), A, B) == []
  assert collected(functools.partial(jaxgemm.matmul, implementation="xla"), A, B) == []
  assert collected(jaxgemm.matmul, shape(8, 8, dtype="int8"), shape(8, 8, dtype="int8")
                   ) == []


# -- What is measured, and what follows --------------------------------------------


def tuned(fn, *args, **options) -> tuner.Results:
  with jaxgemm.target("NVIDIA H200"):
    return jaxgemm.autotune(fn, *args, **options)


def test_the_winner_is_planned_from_then_on(capsys):
  watch = Stopwatch(blocked_wins)
  results = tuned(jax.grad(loss), A, B, measure=watch)
  assert [result.problem for result in results] == [job.problem for job in watch.jobs]
  for result in results:
    assert result.plan.kernel == "blocked" and result.plan.source == "user table"
    assert result.plan == plan.make_plan(result.problem, H200)
    assert (result.time_us, result.xla_time_us, result.speedup) == (5.0, 8.0, 1.6)
    evidence = dict(user_table.lookup(result.problem, H200).evidence)
    assert evidence["jax"] == jax.__version__
    assert evidence["command"] == "jaxgemm.autotune(loss)"
  text = str(results)
  assert "1.60  blocked BlockedConfig" in text and str(NN) in text
  assert len(text.splitlines()) == 1 + len(results)
  assert "autotune" in capsys.readouterr().err  # The bar.


def test_xla_and_the_best_of_each_kernel_are_measured():
  watch = Stopwatch(blocked_wins)
  with jaxgemm.target("NVIDIA H200"):
    problem = Problem(512, 512, 4096)
    for most in (1, 6):
      tuner.tune([problem], H200, command="", max_candidates=most, force=True,
                 measure=watch)
  few, more = (job.choices for job in watch.jobs)
  listed = plan.candidates(problem, H200)
  assert few[0] == more[0] == XLA
  best = Choice(listed[0].kernel, listed[0].config)
  assert few[1] == best and len(few) == 2
  # Beside six candidates, what the table had by then: that is never lost.
  assert len(more) <= 8 and Choice("blocked", few[-1].config) != few[-1]
  assert {choice.kernel for choice in more} >= {
      "xla", "blocked", "pipelined", "persistent", "split_k"
  }


def test_a_second_run_measures_nothing_unless_forced():
  first = Stopwatch(blocked_wins)
  results = tuned(jaxgemm.matmul, A, B, measure=first)
  again = Stopwatch(blocked_wins)
  assert tuned(jaxgemm.matmul, A, B, measure=again) == results
  assert not again.jobs
  tuned(jaxgemm.matmul, A, B, measure=again, force=True)
  assert len(again.jobs) == 1
  planned = Choice(results[0].plan.kernel, results[0].plan.config)
  assert planned in again.jobs[0].choices


@pytest.mark.parametrize(
    "xla, other, winner",
    [
        ([8.0, 9.0, 10.0, 11.0, 12.0], [10.5] * 5, "kernel"),  # Within the noise of 1.
        ([8.0, 9.0, 10.0, 11.0, 12.0], [11.5] * 5, "xla"),
        ([10.0] * 5, [10.1] * 5, "xla"),
        ([10.0] * 5, [10.0] * 5, "kernel"),
    ],
)
def test_xla_wins_by_more_than_the_noise(xla, other, winner):
  watch = Stopwatch(lambda choice: xla if choice == XLA else other)
  (result,) = tuned(jaxgemm.matmul, A, B, measure=watch)
  assert (result.plan.kernel == "xla") == (winner == "xla")
  assert result.plan.source == "user table"
  assert result.xla_time_us == 10.0
  if winner == "xla":
    assert result.time_us == 10.0 and result.speedup == 1.0


def test_candidates_that_fail_are_named_and_not_chosen():
  times = lambda choice: "wrong" if choice.kernel != "xla" else 9.0
  (result,) = tuned(jaxgemm.matmul, A, B, measure=Stopwatch(times))
  assert result.plan.kernel == "xla" and result.time_us == 9.0
  assert result.failures and all(text.endswith(": wrong") for text in result.failures)
  assert "failed: blocked" in str(tuner.Results([result]))


def test_without_a_baseline_nothing_is_stored():
  before = plan.make_plan(NN, H200)
  watch = Stopwatch(lambda choice: "out of memory")
  (result,) = tuned(jaxgemm.matmul, A, B, measure=watch)
  assert result.plan == before and result.time_us is None and result.speedup is None
  assert user_table.lookup(NN, H200) is None
  assert " -  " in str(tuner.Results([result]))


def test_a_run_that_is_cut_short_keeps_what_it_has():
  def stops(jobs, where):
    yield from Stopwatch(blocked_wins)(jobs[:1], where)
    raise KeyboardInterrupt

  problems = [NN, NT]
  with pytest.raises(KeyboardInterrupt):
    tuner.tune(problems, H200, command="", measure=stops)
  assert plan.make_plan(NN, H200).source == "user table"
  assert plan.make_plan(NT, H200).source == "heuristic"


def test_empty_products_are_no_problems():
  empty = dataclasses.replace(NN, k=0)
  results = tuner.tune([empty], H200, command="", measure=Stopwatch(blocked_wins))
  assert results == [] and "no problem" in str(results)


def test_what_is_jitted_already_gets_the_new_plan():
  @jax.jit
  def fn(a, b):
    traces.append(1)
    return jaxgemm.matmul(a, b)

  def kernels() -> str:
    with jaxgemm.target("NVIDIA H200"):
      return fn.trace(A, B).lower(lowering_platforms=("cuda",)).as_text()

  traces = []
  heuristic = plan.make_plan(NN, H200).kernel
  assert f"jaxgemm_{heuristic}" in kernels() and kernels() and len(traces) == 1
  loser = {"blocked": "pipelined"}.get(heuristic, "blocked")
  watch = Stopwatch(lambda choice: 1.0 if choice.kernel == loser else 2.0)
  tuned(fn, A, B, measure=watch)
  assert f"jaxgemm_{loser}" in kernels()
  # Where no plan changes, nothing is traced again but by the tuner itself.
  traces.clear()
  tuned(fn, A, B, measure=watch, force=True)
  assert len(traces) == 1 and kernels() and len(traces) == 1


# -- What it refuses ---------------------------------------------------------------


def test_without_a_gpu_there_is_nothing_to_measure():
  with pytest.raises(RuntimeError, match="needs a GPU .* is cpu: there is nothing"):
    jaxgemm.autotune(jaxgemm.matmul, A, B)
  with jaxgemm.target("NVIDIA H200"), pytest.raises(RuntimeError, match="leave that"):
    jaxgemm.autotune(jaxgemm.matmul, A, B)


def test_nothing_is_measured_inside_a_trace():
  watch = Stopwatch(blocked_wins)

  @jax.jit
  def fn(x):
    jaxgemm.autotune(jaxgemm.matmul, A, B, measure=watch)
    return x

  def of_traced(a):
    return jaxgemm.autotune(jaxgemm.matmul, a, B, measure=watch)

  with jaxgemm.target("NVIDIA H200"):
    with pytest.raises(RuntimeError, match="inside a trace"):
      fn(1.0)
    with pytest.raises(RuntimeError, match="inside a trace"):
      jax.grad(of_traced)(jnp.ones(A.shape, A.dtype))
  assert not watch.jobs


@pytest.mark.parametrize("package", ["filelock", "platformdirs", "tqdm"])
def test_a_missing_extra_is_named(monkeypatch, package):
  find = importlib.util.find_spec
  monkeypatch.setattr(
      importlib.util, "find_spec", lambda name: None if name == package else find(name)
  )
  watch = Stopwatch(blocked_wins)
  if package == "platformdirs":  # JAXGEMM_CACHE_DIR does without it.
    tuned(jaxgemm.matmul, A, B, measure=watch)
    monkeypatch.delenv(user_table.ENVIRONMENT)
  with pytest.raises(ImportError, match=rf"{package}, .*'jaxgemm\[autotune\]'"):
    tuned(jaxgemm.matmul, A, B, measure=watch)


# -- Measuring itself, with the kernels emulated -----------------------------------

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


# -- Other processes ---------------------------------------------------------------

_LATER = """
import hashlib, jax, jaxgemm
from tests.test_autotune import A, B, lowered_text, loss
text = lowered_text()
with jaxgemm.target("NVIDIA H200"):
  print(jaxgemm.explain(A, B).source)
print(hashlib.sha256(text.encode()).hexdigest(), "jaxgemm_blocked" in text)
"""


def environment() -> dict[str, str]:
  path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
  return os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path}


def lowered_text() -> str:
  gradient = jax.jit(jax.grad(loss, (0, 1)))
  with jaxgemm.target("NVIDIA H200"):
    return gradient.trace(A, B).lower(lowering_platforms=("cuda",)).as_text()


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


# -- The command line --------------------------------------------------------------


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
from tests.test_autotune import H200, Stopwatch, blocked_wins
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


# -- On the chip -------------------------------------------------------------------


@pytest.mark.gpu
def test_a_gpu_is_tuned(folder):
  keys = jax.random.split(jax.random.key(0))
  a = jax.random.normal(keys[0], (512, 1024), jnp.bfloat16)
  b = jax.random.normal(keys[1], (1024, 768), jnp.bfloat16)
  gradient = jax.jit(jax.grad(loss, (0, 1)))
  before = gradient(a, b)
  results = jaxgemm.autotune(gradient, a, b, max_candidates=6)
  print(results)
  assert {result.problem.layouts for result in results} == {"NN", "NT", "TN"}
  for result in results:
    assert result.failures == () and result.plan.source == "user table"
    assert 1.0 < result.time_us < 1e3 and 1.0 < result.xla_time_us < 1e3
    assert result.speedup > 0.9
  for x, y in zip(before, gradient(a, b), strict=True):
    x, y = (np.asarray(z, np.float32) for z in (x, y))
    assert np.linalg.norm(x - y) < 1e-2 * np.linalg.norm(x)
  again = Stopwatch(blocked_wins)
  assert jaxgemm.autotune(gradient, a, b, measure=again) == results and not again.jobs


@pytest.mark.gpu
def test_shards_of_several_gpus_are_found():
  if jax.device_count() < 2:
    pytest.skip("needs several GPUs")
  mesh = jax.make_mesh(
      (jax.device_count(),), ("x",), axis_types=(jax.sharding.AxisType.Auto,)
  )
  rows = NamedSharding(mesh, PartitionSpec("x", None))
  whole = NamedSharding(mesh, PartitionSpec())
  a = jax.ShapeDtypeStruct((1024, 512), jnp.bfloat16, sharding=rows)
  b = jax.ShapeDtypeStruct((512, 256), jnp.bfloat16, sharding=whole)
  found = tuner.collect(jaxgemm.matmul, a, b, device=device.current_device())
  assert found == [Problem(1024 // jax.device_count(), 256, 512)]
