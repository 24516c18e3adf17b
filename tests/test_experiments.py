"""The experiments: suites, gate, timing, rows, counts, sweep, fit, and the model."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import math
import types

from absl import app, flags
from absl.testing import flagsaver
import jax
import jax.numpy as jnp
import numpy as np
from product_cases import count_primitives
from product_cases import products as bound_products
import pytest

from experiments import (
  cli,
  corpus,
  fit_heuristics,
  gate,
  kernel_count,
  products,
  progress,
  report,
  run,
  runner,
  suites,
  sweep,
  timing,
  train_lm,
  transformer,
)
import jaxgemm
from jaxgemm import heuristics
from jaxgemm.device import known_device
from pallas_kernels import KERNELS
from pallas_kernels.problem import Problem

H200 = known_device("NVIDIA H200")
PROVENANCE = report.Provenance(
    suite="a suite", device="NVIDIA H200", jax="1.2.3", commit="abc", date="today",
    command="python -m experiments.run",
)


# -- Suites ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cases",
    [
        suites.demo_suite(True),
        suites.demo_suite(False),
        suites.issue2_suite(),
        suites.random_suite(200, 1, 8192),
    ],
    ids=["demo on a GPU", "demo on a CPU", "issue2", "random"],
)
def test_a_suite_names_each_problem_once(cases):
  names = [case.name for case in cases]
  assert len(set(names)) == len(names)
  assert len({case.problem for case in cases}) == len(cases)
  for case in cases:
    assert case.klass == suites.classify(case.problem)


@pytest.mark.parametrize(
    "klass, sizes",
    [
        ("large", dict(m=4096, n=4096, k=4096)),
        ("medium", dict(m=2048, n=2048, k=2048)),
        ("small", dict(m=512, n=512, k=512)),
        ("deep", dict(m=512, n=256, k=4096)),
        ("small", dict(m=512, n=256, k=4088)),
        ("skinny", dict(m=128, n=512, k=1024)),
        ("small", dict(m=128, n=504, k=1000)),
        ("odd", dict(m=4096, n=4096, k=4097)),
        ("odd", dict(m=4, n=4096, k=4096)),
        ("batched", dict(m=33, n=33, k=33, batch=2)),
    ],
)
def test_classes(klass, sizes):
  assert suites.make_case(**sizes).klass == klass


def test_random_suite():
  cases = suites.random_suite(120, 3, 1024)
  assert cases == suites.random_suite(120, 3, 1024)
  assert cases != suites.random_suite(120, 4, 1024)
  assert cases[:50] == suites.random_suite(50, 3, 1024)
  sizes = [(case.problem.m, case.problem.n, case.problem.k) for case in cases]
  odd = [any(size % 2 for size in three) for three in sizes]
  assert odd == [i % 3 == 0 for i in range(120)]
  assert all(size % 2 or size % 8 == 0 for three in sizes for size in three)
  assert 1 <= min(map(min, sizes)) and max(map(max, sizes)) <= 1024
  for values, seen in (
      (suites.LAYOUTS, {case.problem.layouts for case in cases}),
      (suites.DTYPES, {case.problem.dtype for case in cases}),
  ):
    assert seen == set(values)
  assert 0 < sum(case.klass == "batched" for case in cases) < 40


def test_parse_shape():
  cases = suites.parse_shape("3,64,128,32:NT+TN", ["NN"], ["float16", "float32"])
  assert [case.name for case in cases] == [
      "3x64x128x32 NT float16", "3x64x128x32 NT float32",
      "3x64x128x32 TN float16", "3x64x128x32 TN float32",
  ]
  assert cases[0].problem == Problem(
      64, 128, 32, batch=3, rhs_layout="k-major", dtype="float16",
      out_dtype="float16", algorithm="f16_f32",
  )
  assert [case.name for case in suites.parse_shape("8,16,24", ["TT"])] == [
      "8x16x24 TT bfloat16"
  ]


@pytest.mark.parametrize(
    "text", ["", "1,2", "1,2,3,4,5", "8,8,0", "8,8,x", "8,8,8:", "8,8,8:NX"]
)
def test_parse_shape_says_what_is_wrong(text):
  with pytest.raises(ValueError, match="of the form"):
    suites.parse_shape(text)


def test_select():
  cases = suites.demo_suite(False)
  assert suites.select(cases, None, None) == cases
  kept = suites.select(cases, ["NT"], ["float32"])
  assert [case.name for case in kept] == ["8x256x256 NT float32"]


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
  assert names == ["gemm", "pad", "gemm", "reduce"] * 4
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


def test_interleaved_wants_the_same_kernels_in_every_call(cupti):
  names = iter("xyxxy")  # To warm up, to learn, to warm up, measured, measured.

  def fickle(array):
    name = next(names)
    if cupti.active:
      cupti.sessions[-1].append((name, 1.0))
    return array

  with pytest.raises(RuntimeError, match=r"launched \['x'\], its first call \['y'\]"):
    timing.interleaved({"fickle": fickle}, [(jnp.ones(1),)], 1)


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


# -- Rows --------------------------------------------------------------------------

FIELDS = [
    "suite", "class", "name", "batch", "m", "n", "k", "lhs_layout", "rhs_layout",
    "dtype", "out_dtype", "precision", "implementation", "plan", "time_us",
    "spread_us", "tflops", "gbps", "ratio_to_xla", "floor_share", "error",
    "xla_error", "device", "jax", "commit", "date", "command",
]
CASE = suites.make_case(1000, 500, 2000, "TN", "float16")


def _row(case=CASE, implementation="xla", *, verdict=None, **changes) -> report.Row:
  candidate = products.Candidate(implementation, "the plan", implementation, None)
  return report.make_row(
      case, candidate, PROVENANCE, verdict=verdict or gate.Verdict(1e-3, None),
      xla_error=2e-3, device=H200, **changes,
  )


def test_row_of_a_timed_result():
  row = _row(
      implementation="blocked", times_us=[20.0, 10.0, 40.0], xla_times_us=[5.0, 10.0]
  )
  fields = json.loads(row.to_json())
  assert list(fields) == FIELDS
  num_bytes = 2 * (1000 * 2000 + 2000 * 500 + 1000 * 500)
  assert fields == {
      "suite": "a suite", "class": "odd", "name": "1000x500x2000 TN float16",
      "batch": 1, "m": 1000, "n": 500, "k": 2000, "lhs_layout": "m-major",
      "rhs_layout": "n-major", "dtype": "float16", "out_dtype": "float16",
      "precision": "default", "implementation": "blocked", "plan": "the plan",
      "time_us": 20.0, "spread_us": 7.5, "tflops": 2e9 / 20 / 1e6,
      "gbps": num_bytes / 20 / 1e3, "ratio_to_xla": 7.5 / 20,
      "floor_share": pytest.approx(2e9 / 805e6 / 20, rel=1e-4), "error": 1e-3,
      "xla_error": 2e-3, "device": "NVIDIA H200", "jax": "1.2.3", "commit": "abc",
      "date": "today", "command": "python -m experiments.run",
  }
  assert not row.failed


def test_row_of_a_failure_has_no_time():
  row = _row(verdict=gate.Verdict(0.5, "too wrong"), times_us=[1.0], xla_times_us=[1.0])
  assert row.failed and row.plan == "failed: too wrong; the plan"
  assert row.error == 0.5
  figures = (row.time_us, row.spread_us, row.tflops, row.gbps, row.ratio_to_xla)
  assert figures == (None,) * 5 and row.floor_share is None
  assert "FAILED" in report.table([row]) and "FAILED" in report.check_table([row])


def test_rows_are_strict_json():
  fields = json.loads(_row(verdict=gate.Verdict(math.nan, None)).to_json())
  assert fields["error"] is None


def test_floor_is_the_larger_bound():
  assert report.floor_us(Problem(8192, 8192, 8192), H200) == pytest.approx(
      2 * 8192**3 / 805e6
  )
  thin = Problem(1, 8192, 8192)
  assert report.floor_us(thin, H200) == pytest.approx(thin.num_bytes / 4.3e6)
  assert report.floor_us(thin, None) is None


def test_chart_is_drawn(tmp_path):
  rows = [_row(times_us=[1.0], xla_times_us=[1.0])]
  rows += [_row(implementation=name, times_us=[2.0], xla_times_us=[1.0]) for name in "ab"]
  report.chart(rows, tmp_path / "a.png", "a title")
  assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_log_gets_few_lines_of_progress(capsys):
  shown = progress.bar(range(5000))
  for i in shown:
    shown.set_postfix_str(f"at {i}", refresh=False)
  drawn = capsys.readouterr().err.split("\r")
  assert len(drawn) <= 4 and "5000/5000" in drawn[-1]


def test_record_writes_each_row(tmp_path, capsys):
  rows = [[_row()], [_row(implementation="blocked"), _row(implementation="split_k")]]
  found = cli.record(iter(rows), 2, tmp_path / "a.jsonl")
  assert found == [rows[0][0], *rows[1]]
  lines = (tmp_path / "a.jsonl").read_text().splitlines()
  assert lines == [row.to_json() for row in found]
  assert "2/2" in capsys.readouterr().err


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
  %m3 = bf16[64,64]{1,0} custom-call(%x, %x), custom_call_target="mosaic_gpu_v2", backend_config={module = "\00jaxgemm_split_k_reduce_0\00jaxgemm_split_k_reduce_mosaic_gpu\00"}
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
  assert names == ["xla", "good", "better"] * 3


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


# -- The sweep and the fit ---------------------------------------------------------

SWEPT = [
    suites.make_case(16, 4096, 4096),
    suites.make_case(512, 1024, 2048, "NT"),
    suites.make_case(4096, 2048, 512, "TT", "float16"),
    suites.make_case(1001, 1003, 517),
    suites.make_case(768, 768, 8192, "TN"),
    suites.make_case(256, 512, 1024, dtype="float32"),
]


def _swept(case, time_us_of) -> list[sweep.SweepRow]:
  """Rows of a sweep; time_us_of(kernel, config) gives the times, None a failure."""
  candidates = sweep.sweep_candidates(case.problem, H200, emulated=False)
  listed = sweep.estimates(case.problem, H200)
  rows = []
  for candidate, config in zip(
      candidates, [None, *(one.config for one in listed)], strict=True
  ):
    time_us = time_us_of(candidate.kernel, config)
    verdict = gate.Verdict(1e-3, "wrong" if time_us is None else None)
    rows.append(
        report.make_row(
            case, candidate, PROVENANCE, verdict=verdict, xla_error=1e-3, device=H200,
            times_us=[time_us], xla_times_us=[1.0],
        )
    )
  return sweep.sweep_rows(case.problem, H200, rows)


def test_sweep_measures_every_candidate():
  for case in SWEPT:
    listed = heuristics.candidates(case.problem, H200)
    rows = _swept(case, lambda kernel, config: 1.0)
    assert rows[0].implementation == "xla" and rows[0].config is None
    found = [
        (row.implementation, KERNELS[row.implementation].Config(**row.config))
        for row in rows[1:]
    ]
    assert found == [(c.kernel, c.config) for c in listed if c.kernel != "xla"]
    by_estimate = sorted(
        (row for row in rows if row.estimate_us is not None),
        key=lambda row: row.estimate_us,
    )
    assert [row.estimate_us for row in by_estimate] == [c.time_us for c in listed]
    # XLA is a candidate of float32 alone.
    assert (rows[0].estimate_us is not None) == (case.problem.dtype == "float32")


def test_sweep_table():
  case = SWEPT[0]
  best, choice = 5, 0  # Places among the candidates.
  listed = sweep.estimates(case.problem, H200)
  times_us = {listed[best].config: 2.0, listed[choice].config: 3.0}
  rows = _swept(case, lambda kernel, config: times_us.get(config, 10.0))
  line, regret = sweep.table(rows).splitlines()[-2:]
  described = [
      products.describe_config(listed[i].kernel, listed[i].config, brief=True)
      for i in (best, choice)
  ]
  cells = [case.name, "10.0", described[0], "2.0", described[1], "3.0", "1.500"]
  assert line.split() == " ".join(cells).split()
  assert regret == "regret: 1.500 (geometric mean of 1), 1.500 at worst"
  times_us[listed[choice].config] = None
  rows = _swept(case, lambda kernel, config: times_us.get(config, 10.0))
  assert sweep.table(rows).splitlines()[-1].endswith("FAILED")


TRUE_MODEL = dataclasses.replace(
    heuristics.MODEL,
    latency=2 * heuristics.MODEL.latency,
    l2_rate=heuristics.MODEL.l2_rate / 2,
    epilogue=2 * heuristics.MODEL.epilogue,
)


@pytest.fixture(scope="module")
def sweep_file(tmp_path_factory):
  """A sweep whose times are those of TRUE_MODEL."""
  path = tmp_path_factory.mktemp("sweep") / "rows.jsonl"
  with path.open("w") as file:
    for case in SWEPT:

      def time_us_of(kernel, config, problem=case.problem):
        if kernel == "xla":
          return sweep.xla_estimate_us(problem, H200) or 50.0
        return heuristics.estimate(problem, kernel, config, H200, TRUE_MODEL)[0]

      file.writelines(row.to_json() + "\n" for row in _swept(case, time_us_of))
  return path


def test_fit_reads_a_sweep(sweep_file):
  groups = fit_heuristics.read([sweep_file])
  assert [(group.name, group.problem) for group in groups] == [
      (case.name, case.problem) for case in SWEPT
  ]
  for group in groups:
    listed = heuristics.candidates(group.problem, group.device)
    assert len(group.measured) == len(listed) and group.device == H200
    assert all(one.listed for one in group.measured)
    np.testing.assert_allclose(
        sorted(group.estimates_us(heuristics.MODEL)), [c.time_us for c in listed]
    )
    assert group.regret(TRUE_MODEL) == 1.0 and group.xla_us > 0


def test_fit_refuses_other_rows(tmp_path):
  (tmp_path / "run.jsonl").write_text(_row().to_json() + "\n")
  with pytest.raises(ValueError, match="line 1: not a row of experiments.sweep"):
    fit_heuristics.read([tmp_path / "run.jsonl"])


def test_fit_finds_a_better_model(sweep_file):
  groups = fit_heuristics.read([sweep_file])
  present = fit_heuristics.loss(groups, heuristics.MODEL)
  true = fit_heuristics.loss(groups, TRUE_MODEL)
  assert true < present / 2
  fitted = fit_heuristics.fit(groups, iterations=120, seed=0)
  assert true < fit_heuristics.loss(groups, fitted) < (true + present) / 2
  assert fitted == fit_heuristics.fit(groups, iterations=120, seed=0)
  assert fitted != fit_heuristics.fit(groups, iterations=120, seed=1)


def test_fit_prints_a_model_to_paste():
  model = dataclasses.replace(TRUE_MODEL, pass_rate=1.234567e6, step=0.0000451)
  namespace = {"dataclasses": dataclasses, "__name__": __name__}
  text = fit_heuristics.source(model)
  exec(text, namespace)
  pasted = dataclasses.asdict(namespace["Model"]())
  assert pasted == pytest.approx(dataclasses.asdict(model), rel=5e-3)
  assert "pass_rate: float = 1.23e6  # " in text


@pytest.mark.parametrize("check", [True, False])
def test_fit_program(check, sweep_file, capsys):
  with flagsaver.flagsaver():
    flags.FLAGS(["fit", f"--check={check}", "--iterations=3", "--seed=0"])
    fit_heuristics.main(["fit", str(sweep_file)])
    with pytest.raises(app.UsageError, match="name one or more files"):
      fit_heuristics.main(["fit"])
  printed = capsys.readouterr().out
  assert all(case.name in printed for case in SWEPT)
  assert "now: loss" in printed and "at worst (" in printed
  assert ("class Model:" in printed) == ("fitted: loss" in printed) == (not check)


# -- The model ---------------------------------------------------------------------

TINY = transformer.Config(layers=1, width=16, heads=2, vocabulary=256, sequence=16)
TRAINING = train_lm.Training(steps=3, batch=4, learning_rate=0.01, seed=0)


@pytest.fixture(scope="module")
def runs() -> list[train_lm.Run]:
  text = np.frombuffer(b"abc " * 100, np.uint8)
  return [train_lm.train(name, TINY, TRAINING, text) for name in train_lm.DOT_GENERALS]


def test_training_lowers_the_loss_alike(runs):
  for one in runs:
    assert len(one.losses) == 3
    assert one.losses[0] == pytest.approx(math.log(256), rel=0.02)
    assert one.losses[2] < one.losses[0] - 0.1
  xla, ours = runs
  np.testing.assert_allclose(ours.losses, xla.losses, rtol=1e-3)
  assert train_lm.failures(runs, on_hopper=False) == []


def test_training_fails_loudly(runs):
  xla, ours = runs
  lost = dataclasses.replace(ours, losses=[1.0, math.nan, 1.0])
  found = train_lm.failures([xla, lost], on_hopper=False)
  assert "jaxgemm: a loss is not finite" in found and "differ" in found[1]
  share = 1 + 2 * train_lm.MAX_DIFFERENCE
  worse = dataclasses.replace(ours, losses=[share * loss for loss in xla.losses])
  assert train_lm.failures([xla, worse], on_hopper=False) == [
      "the final losses differ by 2.00%"
  ]
  idle = dataclasses.replace(ours, gemms=kernel_count.GemmCount({}, {"dot": 1}))
  found = train_lm.failures([xla, idle], on_hopper=True)
  assert found == ["jaxgemm: none of its kernels is in the compiled step"]


def test_every_product_of_the_model_is_jaxgemms():
  """Six products in a block and the output layer, each with two in its gradient."""
  params = transformer.init(TINY, jax.random.key(0))
  tokens = np.zeros((2, 17), np.int32)
  counts = collections.Counter()
  for name, dot_general in train_lm.DOT_GENERALS.items():
    step = jax.grad(lambda p, f=dot_general: transformer.loss(p, tokens, TINY, f))
    found = count_primitives(step, params)
    counts[name] = (found["dot_general"], found["jaxgemm"])
  assert counts == {"xla": (21, 0), "jaxgemm": (0, 21)}


def test_corpus_is_real_text_and_batches_repeat():
  text = corpus.load(100_000)
  assert text.shape == (100_000,) and b"import" in text.tobytes()
  settings = dict(steps=2, batch=3, sequence=5)
  first, same, other = (
      list(corpus.batches(text, **settings, seed=seed)) for seed in (0, 0, 1)
  )
  assert [batch.shape for batch in first] == [(3, 6)] * 2
  np.testing.assert_array_equal(first, same)
  assert not np.array_equal(first, other)
