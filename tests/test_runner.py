"""The runner: rows of every implementation, failures, and the program."""

from __future__ import annotations

import dataclasses
import json

from absl import app, flags
from absl.testing import flagsaver
from experiment_cases import FIELDS, H200, MARK, PROVENANCE, SWEPT
import jax
import jax.numpy as jnp
from product_cases import products as bound_products
import pytest

from experiments import (
  cli,
  products,
  run,
  runner,
  suites,
  sweep,
  timing,
)
import jaxgemm
from pallas_kernels import KERNELS, triton
from pallas_kernels.problem import Problem

pytestmark = pytest.mark.slow  # The other JAX version need not run them too.


def _runner(candidates) -> runner.Runner:
  return runner.Runner(
      candidates=candidates, device=H200, on_gpu=False, seed=0, repeats=0,
      burn_in_s=0.0, provenance=PROVENANCE,
  )


@pytest.mark.slow
def test_runner_emulates_every_kernel():
  case = suites.make_case(64, 64, 128, "NT")

  def candidates(problem):
    return [
        products.make_candidate(problem, name, H200, emulated=True)
        for name in products.IMPLEMENTATIONS
    ]

  with jaxgemm.emulate():
    (rows,) = _runner(candidates).rows([case])
  assert [row.implementation for row in rows] == list(products.IMPLEMENTATIONS)
  for row in rows:
    assert not row.failed and row.time_us is None
    if row.implementation == "triton" and triton.missing_package() is not None:
      assert row.plan.startswith("n/a: ") and "jaxgemm[triton]" in row.plan
      continue
    if row.implementation == "gemv":
      assert row.plan.startswith("n/a: ") and "m up to 4" in row.plan
      continue
    assert row.error <= 2 * row.xla_error < 0.01
    if row.implementation in KERNELS:
      assert row.plan.startswith(f"{row.implementation} tile=")
  assert "[heuristic: " in rows[1].plan


def _stand_in(product, implementation="blocked") -> products.Candidate:
  return products.Candidate(implementation, "stand-in", implementation, product)


def test_runner_goes_on_after_a_failure():
  def broken(lhs, rhs):
    raise RuntimeError("no such barrier")

  def candidates(problem):
    xla = products.make_candidate(problem, "xla", H200, emulated=True)
    return [
        xla,
        _stand_in(broken),
        _stand_in(lambda lhs, rhs: xla.product(lhs, rhs).at[3, 4].add(jnp.nan)),
        _stand_in(None),
        _stand_in(xla.product),
    ]

  (rows,) = _runner(candidates).rows([suites.make_case(16, 32, 8)])
  assert [row.failed for row in rows] == [False, True, True, False, False]
  assert "RuntimeError: no such barrier" in rows[1].plan
  assert "not finite" in rows[2].plan
  assert rows[3].error is None and rows[4].error == rows[0].error
  with pytest.raises(SystemExit) as exit_info:
    cli.exit_if_failed(rows)
  assert exit_info.value.code == 1
  cli.exit_if_failed(rows[3:])


def test_runner_times_what_passed(gpu):
  def kernel(name, product, time_ms):
    launch = gpu.variant((name, time_ms))
    return lambda lhs, rhs: launch(product(lhs, rhs))

  def candidates(problem):
    xla = products.make_candidate(problem, "xla", H200, emulated=True)
    wrong = lambda lhs, rhs: xla.product(lhs, rhs) * 2
    return [
        _stand_in(kernel("xla", xla.product, 0.25), "xla"),
        _stand_in(kernel("wrong", wrong, 0.125)),
        _stand_in(kernel("good", xla.product, 0.125)),
        _stand_in(kernel("better", xla.product, 0.0625)),  # The same implementation.
    ]

  one = dataclasses.replace(_runner(candidates), repeats=3)
  (rows,) = one.rows([suites.make_case(16, 32, 8)])
  assert [row.time_us for row in rows] == [250.0, None, 125.0, 62.5]
  assert [row.ratio_to_xla for row in rows] == [1.0, None, 2.0, 4.0]
  names = [name for name, _ in gpu.sessions[-1] if name not in MARK]
  rounds = [names[i : i + 3] for i in range(0, 9, 3)]
  assert all(sorted(one) == ["better", "good", "xla"] for one in rounds)


def test_runner_keeps_the_chip_loaded(monkeypatch):
  clock = [100.0]
  monkeypatch.setattr(runner.time, "monotonic", lambda: clock[0])
  sustained = dataclasses.replace(_runner(None), burn_in_s=60.0)
  assert sustained._load_s(None) == 60.0
  clock[0] += 1.0
  assert sustained._load_s(100.0) == runner.TOP_UP_S  # One second of rest.
  clock[0] += 24.0
  assert sustained._load_s(100.0) == 25.0
  clock[0] += 200.0
  assert sustained._load_s(100.0) == 60.0
  assert _runner(None)._load_s(None) == _runner(None)._load_s(0.0) == 0.0


def test_runner_compiles_a_chunk_then_runs_it(gpu, monkeypatch):
  """As on a GPU: every program compiles before the first is timed; loads follow."""
  monkeypatch.setattr(runner, "_CHUNK", 3)
  loads = []

  def interleaved(variants, input_sets, repeats, *, burn_in_s, turn_s):
    loads.append(burn_in_s)
    assert turn_s == runner.TURN_S
    return {name: [1.0] * repeats for name in variants}

  monkeypatch.setattr(timing, "interleaved", interleaved)

  def candidates(problem):
    xla = products.make_candidate(problem, "xla", H200, emulated=True)
    return [xla, dataclasses.replace(xla, implementation="auto")]

  one = dataclasses.replace(
      _runner(candidates), on_gpu=True, repeats=2, burn_in_s=20.0
  )
  cases = [suites.make_case(16, 32, 8 * (i + 1)) for i in range(3)]
  rows = list(one.rows(cases))
  assert [pair[0].name for pair in rows] == [case.name for case in cases]
  assert all(row.ratio_to_xla == 1.0 for pair in rows for row in pair)
  assert loads[0] == 20.0 and all(runner.TOP_UP_S <= load <= 20.0 for load in loads[1:])
  assert set(one.seconds) == {"compile", "check", "time"}


def test_inputs_depend_on_the_problem_and_the_seed():
  problem = suites.make_case(16, 24, 8, "TN", batch=2).problem
  inputs = products.make_inputs(problem)
  lhs, rhs = inputs(jax.random.key(0))
  assert (lhs.shape, rhs.shape) == ((2, 8, 16), (2, 8, 24))
  again, other = (inputs(jax.random.key(i))[0] for i in (0, 1))
  assert jnp.array_equal(lhs, again) and not jnp.array_equal(lhs, other)


def test_a_candidate_runs_its_config():
  case = SWEPT[1]
  inputs = [
      jax.ShapeDtypeStruct(shape, case.problem.dtype)
      for shape in products.stored_shapes(case.problem)
  ]
  for listed in sweep.estimates(case.problem, H200)[:5]:
    candidate = products.make_candidate(
        case.problem, listed.kernel, H200, emulated=False, config=listed.config
    )
    assert products.describe_config(listed.kernel, listed.config) in candidate.plan
    with jaxgemm.target("NVIDIA H200"):
      (product,) = bound_products(candidate.product, *inputs)
    assert (product.implementation, product.config) == (listed.kernel, listed.config)


def test_unservable_implementation_is_no_other():
  problem = Problem(64, 64, 64)
  candidate = products.make_candidate(problem, "blocked", None, emulated=False)
  assert candidate.product is None and candidate.plan.startswith("n/a: ")


@pytest.mark.parametrize("program", [run, sweep], ids=["run", "sweep"])
def test_program(program, tmp_path, monkeypatch, capsys):
  """From flags to files, with XLA's product in the kernels' place."""
  made = products.make_candidate

  def make_candidate(problem, implementation, device, *, emulated, config=None):
    candidate = made(problem, implementation, device, emulated=emulated, config=config)
    xla = made(problem, "xla", device, emulated=emulated)
    wrong = implementation == "persistent"
    product = (lambda lhs, rhs: -xla.product(lhs, rhs)) if wrong else xla.product
    return dataclasses.replace(candidate, product=product)

  monkeypatch.setattr(products, "make_candidate", make_candidate)
  monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
  with flagsaver.flagsaver():
    flags.FLAGS(["program", "--shapes=64,128,64", f"--output={tmp_path}", "--name=a"])
    with pytest.raises(SystemExit) as exit_info:
      program.main(["program"])
    with pytest.raises(app.UsageError, match="unexpected"):
      program.main(["program", "argument"])
  assert exit_info.value.code == 1
  rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
  extra = ["config", "estimate_us"] if program is sweep else []
  assert all(list(row) == FIELDS + extra for row in rows)
  assert rows[0]["implementation"] == "xla"
  failed = {row["implementation"] for row in rows if row["plan"].startswith("failed: ")}
  assert failed == {"persistent"}
  captured = capsys.readouterr()
  assert "in emulation" in captured.out and "FAILED" in captured.out
  assert "64x128x64 NN bfloat16 under persistent: failed: error" in captured.err
