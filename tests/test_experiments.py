"""The experiments: the gate, the timing, the count of kernels, and the runner."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import re
import types

from absl import app, flags
from absl.testing import flagsaver
from experiment_cases import FIELDS, H200, PROVENANCE, SWEPT
import jax
import jax.numpy as jnp
import numpy as np
from product_cases import products as bound_products
import pytest

from experiments import (
  cli,
  gate,
  kernel_count,
  products,
  run,
  runner,
  suites,
  sweep,
  timing,
)
import jaxgemm
from jaxgemm.autotune.timing import _take as take
from pallas_kernels import KERNELS, triton
from pallas_kernels.problem import Problem

# -- The gate ----------------------------------------------------------------------


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


# -- Timing ------------------------------------------------------------------------


class _Cupti:
  """Stands in for Mosaic GPU's CUPTI bindings: a session records what is launched."""

  def __init__(self):
    self.active = False
    self.sessions = []

  def _cupti_init(self):
    self.active = True
    self.sessions.append([])

  def _cupti_get_timings(self, finalize):
    self.active = False
    self.finalized = finalize
    return list(self.sessions[-1])

  def variant(self, *kernels, calls=None):
    """Returns a function of an array that launches (name, ms) kernels."""

    def function(array):
      if calls is not None:
        calls.append(array)
      if self.active:
        self.sessions[-1].extend(kernels)
      return array

    return function


@pytest.fixture
def cupti(monkeypatch) -> _Cupti:
  cupti = _Cupti()
  library = types.SimpleNamespace(_mosaic_gpu_ext=cupti)
  monkeypatch.setattr(timing.profiler, "mosaic_gpu_lib", library)
  return cupti


def test_interleaved_sums_the_kernels_of_each_call(cupti):
  sets = [(jnp.full(2, i),) for i in range(3)]
  times_us = timing.interleaved(
      {
          "one": cupti.variant(("gemm", 0.5)),
          2: cupti.variant(("pad", 0.125), ("gemm", 0.25), ("reduce", 0.5)),
      },
      sets,
      4,
  )
  assert times_us == {"one": [500.0] * 4, 2: [875.0] * 4}
  # One call of each to learn its kernels, then all the rounds in one session.
  assert [len(session) for session in cupti.sessions] == [1, 3, 16]
  names = [name for name, _ in cupti.sessions[-1]]
  one, other = ["gemm"], ["pad", "gemm", "reduce"]
  rounds = [names[i : i + 4] for i in range(0, 16, 4)]
  assert all(found in (one + other, other + one) for found in rounds)
  assert one + other in rounds and other + one in rounds  # Neither always leads.
  assert cupti.finalized


def test_interleaved_rotates_the_inputs(cupti):
  calls = []
  sets = [(jnp.full(2, i),) for i in range(3)]
  variants = {name: cupti.variant((name, 1.0), calls=calls) for name in "ab"}
  timing.interleaved(variants, sets, 5)
  measured = [int(array[0]) for array in calls[-10:]]
  assert measured == list(itertools.islice(itertools.cycle(range(3)), 10))


def test_interleaved_burns_in(cupti):
  calls = []
  variants = {"a": cupti.variant(("a", 1.0), calls=calls)}
  timing.interleaved(variants, [(jnp.ones(1),)], 1)
  cold = len(calls)
  timing.interleaved(variants, [(jnp.ones(1),)], 1, burn_in_s=0.05)
  assert len(calls) > 2 * cold + 5
  assert len(cupti.sessions[-1]) == 1


def test_turns_last_until_clocks_settle(cupti):
  """A variant's calls follow each other, and the last quarter of them counts."""
  times_ms = []  # Of the calls of a turn, as clocks fall.

  def hot(array):
    if cupti.active:
      learnt = len(cupti.sessions) == 1
      if not learnt and not times_ms:
        times_ms.extend([10.0] * 30 + [15.0] * 10)
      cupti.sessions[-1].append(("hot", 10.0 if learnt else times_ms.pop(0)))
    return array

  calls = []
  variants = {"hot": hot, "slow": cupti.variant(("slow", 100.0), calls=calls)}
  times_us = timing.interleaved(variants, [(jnp.ones(1),)], 3, turn_s=0.4)
  assert times_us == {"hot": [15e3] * 3, "slow": [100e3] * 3}
  names = [name for name, _ in cupti.sessions[-1]]
  assert names.count("hot") == 3 * 40 and names.count("slow") == 3 * 4
  for name, same in itertools.groupby(names):  # Two turns at once where a round ends.
    assert len(list(same)) in {"hot": (40, 80), "slow": (4, 8)}[name]
  assert len(calls) == 2 + 4 + 3 * 4  # Learnt; one round to warm up; three.


def test_interleaved_wants_the_same_kernels_in_every_call(cupti):
  names = iter("xyxxy")  # To warm up, to learn, to warm up, measured, measured.

  def fickle(array):
    name = next(names)
    if cupti.active:
      cupti.sessions[-1].append((name, 1.0))
    return array

  with pytest.raises(RuntimeError, match=r"launched \['x'\], its first call \['y'\]"):
    timing.interleaved({"fickle": fickle}, [(jnp.ones(1),)], 1)


def test_a_kernel_told_late_counts_where_it_was_launched():
  """As CUPTI tells of a conditional's branch: after the kernels of the next call."""
  kernels = collections.deque(
      [("split", 1.0), ("pad", 2.0), ("gemm", 4.0), ("gemm", 8.0), ("split", 16.0)]
  )
  assert take(kernels, "one", ["split", "gemm"]) == 5000.0
  assert take(kernels, 2, ["pad", "gemm"]) == 10000.0
  assert list(kernels) == [("split", 16.0)]
  with pytest.raises(RuntimeError, match=r"launched \[\], its first call"):
    take(kernels, "one", ["split", "gemm"])


def test_interleaved_wants_kernels(cupti):
  with pytest.raises(RuntimeError, match="no kernel"):
    timing.interleaved({"idle": cupti.variant()}, [(jnp.ones(1),)], 1)


@pytest.mark.parametrize(
    "set_bytes, sets",
    [(1 << 10, 256), (4 << 20, 60), (100 << 20, 3), (8 << 30, 2), (40 << 30, 1)],
)
def test_num_input_sets(set_bytes, sets):
  assert timing.num_input_sets(set_bytes, 60 << 20) == sets


def test_spread():
  assert timing.spread([1.0, 2.0, 3.0, 4.0, 100.0]) == 1.0


# -- The count of kernels ----------------------------------------------------------

HLO = r"""HloModule jit_f, is_scheduled=true, entry_computation_layout={()->f32[8]{0}}

%inner (p: bf16[64,64]) -> bf16[64,64] {
  %p = bf16[64,64]{1,0} parameter(0)
  ROOT %dot.9 = bf16[64,64]{1,0} dot(%p, %p), lhs_contracting_dims={1}
}

%gemm_computation (a: bf16[64,64]) -> bf16[64,64] {
  %a = bf16[64,64]{1,0} parameter(0)
  ROOT %dot.1 = bf16[64,64]{1,0} dot(%a, %a), lhs_contracting_dims={1}
}

%outer (b: bf16[64,64]) -> bf16[64,64] {
  %b = bf16[64,64]{1,0} parameter(0)
  ROOT %f.1 = bf16[64,64]{1,0} fusion(%b), kind=kCustom, calls=%inner
}

%fused_add (c: f32[8]) -> f32[8] {
  %c = f32[8]{0} parameter(0)
  ROOT %add.1 = f32[8]{0} add(%c, %c)
}

%command_buffer (q: bf16[64,64]) -> bf16[64,64] {
  %q = bf16[64,64]{1,0} parameter(0)
  %cc.1 = (bf16[64,64]{1,0}, s8[4]{0}) custom-call(%q, %q), custom_call_target="__cublas$lt$matmul", metadata={op_name="jaxgemm_persistent"}
  ROOT %cc.2 = (bf16[64,64]{1,0}, s8[4]{0}) custom-call(%q, %q), custom_call_target="__cublas$gemm"
}

ENTRY %main.5 (x: bf16[64,64]) -> (bf16[64,64]) {
  %x = bf16[64,64]{1,0} parameter(0)
  %c1 = bf16[64,64]{1,0} call(%x), to_apply=%command_buffer
  %g = bf16[64,64]{1,0} fusion(%x), kind=kCustom, calls=%gemm_computation, backend_config={"fusion_backend_config":{"kind":"__triton_gemm"}}
  %o = bf16[64,64]{1,0} fusion(%x), kind=kCustom, calls=%outer, backend_config={"fusion_backend_config":{"kind":"__triton_nested_gemm_fusion"}}
  %l = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused_add
  %s = bf16[64,64]{1,0} dot(%x, %x), lhs_contracting_dims={1}
  %m1 = bf16[64,64]{1,0} custom-call(%x, %x), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(f)/jaxgemm_persistent/mpmd_map"}, backend_config={module = "\00jaxgemm_persistent\00"}
  %m2 = bf16[64,64]{1,0} custom-call(%x, %x), custom_call_target="mosaic_gpu_v2", backend_config={module = "\00jaxgemm_split_k_mosaic_gpu\00"}
  %m3 = bf16[64,64]{1,0} custom-call(%x, %x), custom_call_target="mosaic_gpu_v2", backend_config={module = "\00jaxgemm_cotangents_0\00jaxgemm_cotangents_mosaic_gpu\00"}
  %m4 = bf16[64,64]{1,0} custom-call(%x, %x), custom_call_target="mosaic_gpu_v2", backend_config={module = "other"}
  %m5 = bf16[64,64]{1,0} custom-call(%x), custom_call_target="annotation", metadata={op_name="jaxgemm_blocked"}
  ROOT %t = (bf16[64,64]{1,0}) tuple(%s)
}
"""  # noqa: E501


def test_count_of_kernels():
  count = kernel_count.count_gemms(HLO)
  assert count.jaxgemm == {"persistent": 1, "split_k": 1} and count.num_jaxgemm == 2
  assert count.xla == {
      "__cublas$lt$matmul": 1, "__cublas$gemm": 1, "__triton_gemm": 1,
      "__triton_nested_gemm_fusion": 1, "dot": 1,
  }
  assert str(count).startswith("2 of jaxgemm (1 persistent, 1 split_k), 5 of XLA (")


def test_branches_of_a_conditional_count_once():
  a = jnp.ones((32, 32))
  choose = lambda p, a: jax.lax.cond(p, lambda: a @ a, lambda: jnp.tanh(a) @ a)
  text = jax.jit(choose).lower(True, a).compile().as_text()
  assert "conditional(" in text and kernel_count.count_gemms(text).num_xla == 1
  old = text.replace("branch_computations={", "true_computation=")
  old = re.sub(r"(true_computation=[^,]*), ([^}]*)}", r"\1, false_computation=\2", old)
  assert old != text and kernel_count.count_gemms(old).num_xla == 1


def test_count_of_a_compiled_program():
  a = jnp.ones((32, 32))
  text = jax.jit(lambda a: jnp.tanh(a @ a) @ a + 1).lower(a).compile().as_text()
  count = kernel_count.count_gemms(text)
  assert (count.num_jaxgemm, count.num_xla) == (0, 2)


# -- The runner --------------------------------------------------------------------


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


def test_runner_times_what_passed(cupti):
  def kernel(name, product, time_ms):
    launch = cupti.variant((name, time_ms))
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
  names = [name for name, _ in cupti.sessions[-1]]
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


def test_runner_compiles_a_chunk_then_runs_it(cupti, monkeypatch):
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
