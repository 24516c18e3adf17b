"""The tuner: what it measures and stores, what follows, what it refuses."""

from __future__ import annotations

import dataclasses
import importlib

import autotune_cases
from autotune_cases import (
  H200,
  NN,
  NT,
  XLA,
  A,
  B,
  Stopwatch,
  blocked_wins,
  loss,
  shape,
  tuned,
)
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np
import pytest

import jaxgemm
from jaxgemm import device, plan, reference, user_table
from jaxgemm.autotune import tuner
from jaxgemm.autotune.programs import Choice
from pallas_kernels.problem import Epilogue, Problem

pytestmark = pytest.mark.usefixtures("folder")


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


def test_groups_and_scales_are_planned_as_measured():
  """Gradients, too; and not what the kernel converts, or of which XLA is named."""
  def products(x, w, x8, w8, sizes, scale):
    named = jaxgemm.ragged_dot(x, w, sizes, implementation="xla")
    converted = jaxgemm.ragged_dot(x, w8.swapaxes(1, 2).astype(x.dtype), sizes)
    plain = jaxgemm.ragged_dot(x, w, sizes)
    scaled = jaxgemm.scaled_ragged_dot(x8, w8, sizes, scale, transposed=True)
    one = jaxgemm.scaled_matmul(x8, w8[0].T, scale)
    return sum(
        jnp.sum(y.astype("float32") ** 2)
        for y in (named, converted, plain, scaled, one)
    )

  operands = (
      shape(256, 512), shape(8, 512, 128), shape(256, 512, dtype="float8_e4m3fn"),
      shape(8, 128, 512, dtype="float8_e4m3fn"), shape(8, dtype="int32"),
      shape(256, 4, dtype="float32"),
  )

  for fn, kinds in (
      (products, {("m", "none"), ("m", "blocks"), ("", "blocks")}),
      (jax.grad(products, (0, 1)), {("m", "none"), ("k", "none")}),
  ):
    watch = Stopwatch(lambda choice: 9.0 if choice == XLA else 5.0)
    results = tuned(fn, *operands, measure=watch, force=True)
    assert {(r.problem.grouped, r.problem.epilogue.scaling) for r in results} == kinds
    for result in results:
      assert result.plan.source == "user table" and result.plan.kernel != "xla"
      assert result.plan == plan.make_plan(result.problem, H200)
    user_table.forget()  # Read from the file, they are the same.
    plan.make_plan.cache_clear()
    assert [plan.make_plan(r.problem, H200) for r in results] == [r.plan for r in results]


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


def test_where_every_kernel_fails_the_next_run_tries_again():
  broken = lambda choice: 9.0 if choice.kernel == "xla" else "ptxas not found"
  (result,) = tuned(jaxgemm.matmul, A, B, measure=Stopwatch(broken))
  assert result.plan.kernel == "xla"
  assert "kernels failed, the first: ptxas not found" in result.plan.reason
  watch = Stopwatch(blocked_wins)
  (result,) = tuned(jaxgemm.matmul, A, B, measure=watch)
  assert watch.jobs and result.plan.kernel == "blocked"
  again = Stopwatch(blocked_wins)
  tuned(jaxgemm.matmul, A, B, measure=again)
  assert not again.jobs


@pytest.mark.parametrize("sizes", [(1, 4097, 4097), (2, 301, 300)])
def test_every_kernel_can_win(sizes):
  """Those of few rows among them, which know no tiles."""
  m, n, k = sizes
  problem = Problem(m, n, k)
  kernels = {candidate.kernel for candidate in plan.candidates(problem, H200)}
  assert "gemv" in kernels
  for kernel in kernels - {"xla"}:
    watch = Stopwatch(lambda choice, kernel=kernel: 1.0 + (choice.kernel != kernel))
    (result,) = tuner.tune([problem], H200, command="", measure=watch, force=True)
    assert result.plan.kernel == kernel


def test_a_layer_gets_what_was_measured_of_its_product():
  """Of a gated one that has the columns of both weights; the same choice by a table, too.
  """
  @jax.jit
  def fn(x, gate, up):
    traces.append(1)
    return jaxgemm.gated_linear(x, gate, up)

  def trace() -> None:
    with jaxgemm.target("NVIDIA H200"):
      fn.trace(x, weight, weight).lower(lowering_platforms=("cuda",))

  traces = []
  x, weight = shape(2048, 512), shape(512, 2048)
  both = Problem(2048, 4096, 512)
  assert autotune_cases.collected(fn, x, weight, weight) == [both]
  trace()
  traces.clear()
  trace()
  assert not traces
  chosen = plan.make_plan(both, H200)
  assert chosen.source == "heuristic"
  choice = Choice(chosen.kernel, chosen.config)
  watch = Stopwatch(lambda found: 1.0 if found == choice else 2.0)
  tuned(fn, x, weight, weight, measure=watch)
  traces.clear()
  trace()  # The product's plan is the same, the layer's may not be.
  assert traces
  epilogue = Epilogue(gated=True, activation="silu")
  layer = dataclasses.replace(both, n=2048, epilogue=epilogue)
  assert plan.make_plan(layer, H200).source == "user table"
  assert plan.make_plan(dataclasses.replace(both, n=2048), H200).source != "user table"


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
def test_groups_and_scales_are_tuned_on_a_gpu(folder, rng):
  x = jnp.asarray(rng.standard_normal((512, 512)), "bfloat16")
  w = jnp.asarray(rng.standard_normal((4, 256, 512)), "bfloat16")
  sizes = jnp.array([100, 0, 300, 90], jnp.int32)
  (x8, sx), (w8, sw) = jaxgemm.quantise(x, block=(1, 128)), jaxgemm.quantise(
      w, block=(128, 128)
  )

  def fn(x, w):
    y = jaxgemm.ragged_dot(x, w, sizes, transposed=True)
    y += jaxgemm.scaled_ragged_dot(x8, w8, sizes, sx, sw, transposed=True)
    y += jaxgemm.scaled_matmul(x8, w8[0].T, sx, sw[0].T)
    return jnp.sum(y.astype("float32") ** 2)

  gradient = jax.jit(jax.value_and_grad(fn, (0, 1)))
  before = gradient(x, w)
  results = jaxgemm.autotune(gradient, x, w, max_candidates=5)
  print(results)
  assert {(r.problem.grouped, r.problem.epilogue.scaling) for r in results} == {
      ("m", "none"), ("k", "none"), ("m", "blocks"), ("", "blocks")
  }
  for result in results:
    assert result.failures == () and result.plan.source == "user table"
  for found, wanted in zip(
      jax.tree.leaves(gradient(x, w)), jax.tree.leaves(before), strict=True
  ):
    assert reference.relative_error(found, wanted) < 1e-2


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
