"""The experiment that runs random problems: what it draws, catches and reports."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import random

from absl import flags
from absl.testing import flagsaver
from experiment_cases import H200, PROVENANCE
import jax
import numpy as np
import pytest

from experiments import fuzz, fuzz_draws, fuzz_guards, fuzz_judge
from jaxgemm import reference
from jaxgemm.plan import Plan
from pallas_kernels import KERNELS, TILE_KERNELS, gemv
from pallas_kernels.epilogue import Epilogue
from pallas_kernels.problem import ALGORITHMS, OUT_DTYPES
from tests import kernel_cases

pytestmark = pytest.mark.slow  # The other JAX version need not run them too.

SMALL = kernel_cases.make_problem(40, 72, 64, "NT", batch=2)
TASK = fuzz.Task(seed=1, index=1, configs=1, emulated=True, provenance=PROVENANCE)


@functools.cache
def problems(bounds: fuzz_draws.Bounds):
  return [fuzz_draws.draw_problem(random.Random(i), bounds) for i in range(600)]


@pytest.mark.parametrize(
    "bounds", [fuzz_draws.ON_GPU, fuzz_draws.EMULATED], ids=["large", "small"]
)
def test_problems_are_of_every_kind_and_within_bounds(bounds):
  drawn = problems(bounds)
  assert drawn == [fuzz_draws.draw_problem(random.Random(i), bounds) for i in range(600)]
  assert {problem.algorithm for problem in drawn} == {*ALGORITHMS}
  assert {problem.layouts for problem in drawn} == {"NN", "NT", "TN", "TT"}
  assert {problem.out_dtype for problem in drawn} == {*OUT_DTYPES, "int32"}
  assert {(problem.lhs_batched, problem.rhs_batched) for problem in drawn} == {
      (True, True), (True, False), (False, True)
  }
  for name in ("m", "n", "k"):
    assert {0, 1, 8} <= {getattr(problem, name) for problem in drawn}
  for problem in drawn:
    sizes = problem.batch, problem.m, problem.n
    assert max(problem.m, problem.n, problem.k) <= bounds.size
    assert np.prod(sizes) <= bounds.elements
    assert np.prod(sizes) * problem.k <= bounds.products


@pytest.mark.parametrize("kernel", KERNELS)
def test_configs_are_legal_and_various(kernel):
  rng, found = random.Random(0), set()
  for problem in problems(fuzz_draws.ON_GPU)[:150]:
    config = fuzz_draws.draw_config(rng, problem, kernel, H200)
    if config is not None:
      assert KERNELS[kernel].supports(problem, config) is None
      # A float32 result of 16-bit operands would show what tensor cores truncate.
      exact = problem.out_dtype == "float32" and problem.itemsize == 2
      assert kernel == gemv.NAME or config.promote or not exact
      found.add(config)
  assert len(found) > (1 if kernel == gemv.NAME else 25)  # It has few, for few.


def test_every_kernel_that_serves_has_a_plan():
  found = fuzz_draws.draw_plans(random.Random(0), SMALL, H200, configs=3)
  planned = [plan.kernel for plan, _ in found[:-3]]
  assert {*planned} >= {*TILE_KERNELS} - {"split_k"}  # k is a single tile.
  assert all(device is H200 for _, device in found[:-3])
  assert [plan.source for plan, _ in found[-3:]] == ["drawn"] * 3
  empty = dataclasses.replace(SMALL, k=0)
  ((plan, _),) = fuzz_draws.draw_plans(random.Random(0), empty, H200, configs=3)
  assert plan.kernel == "xla"
  truth = fuzz_judge.draw_truth(empty, [0])
  assert fuzz_judge.check(plan, H200, [truth], emulated=True).reason is None


# -- Poison and guards -------------------------------------------------------------


def check(kernel: str = "blocked", problem=SMALL) -> fuzz_judge.Verdict:
  plan = Plan(kernel, kernel_cases.small_config(kernel), "", "", problem)
  truths = [fuzz_judge.draw_truth(problem, [0])]
  with fuzz_guards.guarded():
    return fuzz_judge.check(plan, H200, truths, emulated=True)


def test_what_is_right_passes():
  verdict = check()
  assert verdict.reason is None and 0 < verdict.error <= verdict.limit


@pytest.mark.parametrize("kernel", ["blocked", "split_k"])
def test_what_nobody_writes_is_seen(kernel, monkeypatch):
  """The last tile of the result, or of its partial sums."""
  problem = dataclasses.replace(SMALL, n=200, k=200)
  store = Epilogue.store

  def all_but_one(self, acc, *args, col, **kwargs):
    # Columns beyond the last are clipped.
    store(self, acc, *args, col=col + 10_000 * (col > 0), **kwargs)

  monkeypatch.setattr(Epilogue, "store", all_but_one)
  assert "elements are not finite" in check(kernel, problem).reason


@pytest.mark.parametrize("by", [-1, 1])
def test_what_is_written_beside_the_result_is_seen(by, monkeypatch):
  """Although the result itself is right."""
  store = Epilogue.store

  def twice(self, *args, batch, **kwargs):
    store(self, *args, batch=batch, **kwargs)
    store(self, *args, batch=batch + 2 * by, **kwargs)

  monkeypatch.setattr(Epilogue, "store", twice)
  assert check().reason == "the kernel wrote beyond its result"


@pytest.mark.parametrize("kernel", TILE_KERNELS)
def test_guarded_kernels_lower(kernel):
  """Their results are arrays that exist, aligned as TMA wants them."""
  problem = kernel_cases.make_problem(133, 203, 512, batch=3)
  with fuzz_guards.guarded():
    text = kernel_cases.lowered(kernel, problem, kernel_cases.small_config(kernel))
  assert "output_operand_alias" in text and f"jaxgemm_{kernel}" in text


# -- What is right -----------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"])
def test_verdicts(dtype):
  out_dtype = "int32" if dtype == "int8" else dtype
  problem = kernel_cases.make_problem(30, 40, 50, "TN", dtype, out_dtype=out_dtype)
  truth = fuzz_judge.draw_truth(problem, [3])
  judge = lambda result: fuzz_judge.judge(problem, [truth], [result]).reason
  right = truth.baseline.astype(out_dtype)
  assert judge(right) is None
  assert "not of the problem" in judge(right[:, 1:])
  assert "not of the problem" in judge(right.astype("int64"))
  off = np.array(right)
  off[0, 3, 4] += 50
  assert judge(off).startswith("error")
  if dtype != "int8":
    off[0, 3, 4] = np.nan
    assert judge(off) == "1 of 1200 elements are not finite"
    assert judge(right * -np.inf) is not None
    assert judge(np.full_like(right, -np.inf)) == "the kernel wrote beyond its result"
    # Of so many elements, one that is far off moves the error of all too little.
    large = dataclasses.replace(problem, m=3000)
    truth = fuzz_judge.draw_truth(large, [3])
    off = np.array(truth.baseline)
    error = reference.relative_error(truth.baseline, truth.exact)
    off[0, 3, 4] += 90 * error * np.sqrt(np.mean(np.square(truth.exact)))
    assert "an element is off" in fuzz_judge.judge(large, [truth], [off]).reason


def test_float32_operands_are_those_of_the_algorithm():
  """TF32 reads ten bits, three products of parts are between it and float32."""
  errors = []
  for algorithm in ("tf32_f32", "bf16_x3", "bf16_x6"):
    problem = kernel_cases.make_problem(64, 64, 64, dtype="float32", algorithm=algorithm)
    truth = fuzz_judge.draw_truth(problem, [0])
    errors.append(np.abs(truth.baseline - truth.exact).max())
  assert errors[0] > 20 * errors[1] > 20 * 5 * errors[2]


# -- The program -------------------------------------------------------------------


def run_program(tmp_path, monkeypatch, *arguments: str) -> None:
  monkeypatch.setattr(fuzz, "_set_environment", lambda: None)
  monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
  with flagsaver.flagsaver():
    flags.FLAGS(["program", *arguments, f"--output={tmp_path}"])
    fuzz.main(["program"])


def rows_of(tmp_path) -> list[dict]:
  (path,) = tmp_path.glob("fuzz_*.jsonl")
  return [json.loads(line) for line in path.read_text().splitlines()]


def test_program(tmp_path, monkeypatch, capsys):
  run_program(tmp_path, monkeypatch, "--seed=1", "--first=2", "--count=1")
  rows = rows_of(tmp_path)
  assert len(rows) > 2 and all(row["reason"] is None for row in rows)
  assert all(row["index"] == 2 and row["error"] <= row["limit"] for row in rows)
  printed = capsys.readouterr().out
  assert f"1 problems, {len(rows)} plans, 0 failed" in printed
  assert rows[0]["implementation"] in printed


def test_program_goes_on_after_failures(tmp_path, monkeypatch, capsys):
  def broken(plan, operands, device, interpret):
    if plan.kernel == "blocked":
      raise RuntimeError("out of luck\nand more")
    return np.zeros(plan.problem.out_shape, plan.problem.out_dtype)

  monkeypatch.setattr(fuzz_judge, "run", broken)
  with pytest.raises(SystemExit) as exit_info:
    run_program(tmp_path, monkeypatch, "--seed=1", "--first=1", "--count=2")
  assert exit_info.value.code == 1
  rows = rows_of(tmp_path)
  assert {row["index"] for row in rows} == {1, 2}
  assert all(row["reason"] for row in rows)
  blocked = [row for row in rows if row["implementation"] == "blocked"]
  assert blocked[0]["reason"] == "RuntimeError: out of luck"
  output = capsys.readouterr()
  assert "python -m experiments.fuzz --seed=1 --first=2 --count=1" in output.err
  assert f"{len(rows)} failed" in output.out and "FAILED" in output.out


class Deadly(fuzz.Task):
  """A task that ends the process that receives it."""

  def __reduce__(self):
    return os._exit, (3,)


@pytest.mark.slow
def test_processes_that_die_or_hang_are_failures():
  tasks = [TASK, Deadly(**vars(TASK)), dataclasses.replace(TASK, index=2)]
  rows = [row for rows in fuzz.run_in_processes(tasks, 1, 200.0) for row in rows]
  (dead,) = (row for row in rows if row.failed)
  assert dead.reason == "the process died" and dead.index == 1
  # What came after it found a fresh process.
  assert {row.index for row in rows if not row.failed} == {1, 2}
  ((row,),) = fuzz.run_in_processes([TASK], 1, 0.01)
  assert row.failed and row.reason == "nothing was heard for 0.01 s"
