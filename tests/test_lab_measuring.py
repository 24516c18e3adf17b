"""The laboratory's measuring: the gate, the rows, what the driver and ncu say."""

from __future__ import annotations

import dataclasses
import stat

import jax
from jax.profiler import ProfileData
from lab_cases import GPU, lab, made_up_rows
import numpy as np
import pytest

from experiments import products, suites
from experiments.lab import (
  achieved,
  launches,
  measuring,
  operands,
  residency,
  rows,
  variants,
)
from jaxgemm.autotune import profile
from tests.kernel_cases import make_problem

pytestmark = pytest.mark.slow  # The other JAX version need not run them too.


def _plain(name: str, function, **fields) -> variants.Variant:
  """A variant that no kernel computes, so that a CPU compiles it."""
  return variants.Variant(
      name, products.Candidate(name, f"lab {name}", f"lab_{name}", jax.jit(function)),
      **fields,
  )


def _as_on_a_gpu(monkeypatch, found, how=("normal",)):
  """The rows of a job that a CPU compiles and a made-up clock times."""
  here = lab(GPU)
  case = suites.make_case(64, 48, 32)
  ticks, seen = {}, []

  def timer(calls, sets, repeats):
    for name, call in calls.items():
      assert call(*sets[-1]).shape == (64, 48)
      ticks[name] = [float(name + 1)] * repeats
    seen.append(len(sets))
    return dict(ticks)

  monkeypatch.setattr(measuring.timing, "interleaved", timer)
  monkeypatch.setattr(
      measuring.launches, "of_call", lambda *_: rows.Launch("x", 32, 0, 128, 1, 1)
  )
  xla = variants.xla(here, case.problem)
  all_of_them = [
      dataclasses.replace(v, inputs=one) for one in how for v in (xla, *found)
  ]
  job = variants.Job("a table", case, all_of_them, launches=True)
  return list(measuring.measure(here, "a question", [job])), seen


def test_measuring_checks_before_it_times(monkeypatch):
  def raising(lhs, rhs):
    raise TypeError("no such kernel\nat all")

  found, seen = _as_on_a_gpu(monkeypatch, [
      _plain("right", lambda lhs, rhs: lhs @ rhs, smem_bytes=7, details={"a": 1}),
      _plain("wrong", lambda lhs, rhs: lhs @ rhs + 1),
      _plain("raising", raising),
      variants.unavailable("missing", "there is none"),
  ])
  xla, right, wrong, raised, missing = found
  assert xla.is_xla and xla.ratio_to_xla == 1.0 and xla.details["xla"]
  assert right.status == "ok" and len(right.times_us) == 20 and right.xla_time_us == 1.0
  assert right.ratio_to_xla == 0.5 and right.smem_bytes == 7 and right.details == {"a": 1}
  assert right.launch.registers == 32
  assert wrong.failed and wrong.times_us is None and wrong.launch is None
  assert raised.status == "failed: TypeError: no such kernel"
  assert missing.status == "n/a: there is none" and missing.kernel is None
  assert seen == [40]  # No more sets of operands than calls.


def _jobs(monkeypatch, of_call, *sizes: int) -> tuple[list[variants.Job], list[str]]:
  """Jobs of those m, with launches where it is odd, and what measuring them does."""
  events = []

  def timer(calls, sets, repeats):
    events.append("timed")
    return {name: [1.0] * repeats for name in calls}

  def asked(product, inputs):
    events.append("asked")
    return of_call(product, inputs)

  monkeypatch.setattr(measuring.timing, "interleaved", timer)
  monkeypatch.setattr(measuring.launches, "of_call", asked)
  jobs = []
  for m in sizes:
    case = suites.make_case(m, 48, 32)
    pair = [
        variants.xla(lab(GPU), case.problem),
        _plain("product", lambda lhs, rhs: lhs @ rhs),
    ]
    jobs.append(variants.Job("a table", case, pair, launches=m % 2 == 1))
  return jobs, events


def test_launches_are_asked_for_where_they_are_wanted(monkeypatch):
  """Once times are there; and a row survives a profile that fails."""
  answers = iter([
      rows.Launch("first", 32, 0, 128, 1, 1), RuntimeError("no profile"), None,
      rows.Launch("fourth", 32, 0, 128, 1, 1),
  ])

  def of_call(product, inputs):
    assert product(*inputs).shape in ((17, 48), (19, 48))
    answer = next(answers)
    if isinstance(answer, Exception):
      raise answer
    return answer

  jobs, events = _jobs(monkeypatch, of_call, 17, 18, 19, 20)
  monkeypatch.setattr(measuring, "_CHUNK", 4)  # Two jobs in each.
  found = []
  for row in measuring.measure(lab(GPU), "a question", jobs):
    found.append(row)
    events.append("row")
  pair = ["timed", *["asked", "row"] * 2, "timed", "row", "row"]
  assert events == pair * 2
  assert [row.problem["m"] for row in found] == [17, 17, 18, 18, 19, 19, 20, 20]
  assert [row.variant for row in found] == ["XLA", "product"] * 4
  assert all(row.status == "ok" and row.times_us for row in found)
  assert [row.launch and row.launch.kernel for row in found] == [
      "first", None, None, None, None, "fourth", None, None
  ]


def test_rows_survive_what_ends_the_question(monkeypatch):
  jobs, _ = _jobs(monkeypatch, lambda *_: None, 17)

  def breaking():
    yield from jobs
    raise RuntimeError("out of memory")

  monkeypatch.setattr(measuring, "_CHUNK", 2)
  found = []
  with pytest.raises(RuntimeError, match="out of memory"):
    for row in measuring.measure(lab(GPU), "a question", breaking()):
      found.append(row)
  assert [row.problem["m"] for row in found] == [17, 17]


def test_each_way_to_draw_has_its_own_baseline(monkeypatch):
  product = _plain("product", lambda lhs, rhs: lhs @ rhs)
  found, _ = _as_on_a_gpu(monkeypatch, [product], how=("normal", "zeros"))
  assert [row.inputs for row in found] == ["normal", "normal", "zeros", "zeros"]
  assert [row.xla_time_us for row in found] == [1.0, 1.0, 3.0, 3.0]
  assert all(row.status == "ok" for row in found) and found[-1].error == 0.0


def test_a_product_of_zeros_is_zero(monkeypatch):
  product = _plain("biased", lambda lhs, rhs: lhs @ rhs + 1)
  found, _ = _as_on_a_gpu(monkeypatch, [product], how=("zeros",))
  assert found[1].status == "failed: a product of zeros is not zero"


def test_operands_that_do_not_fit(monkeypatch):
  def full(frame):
    raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

  monkeypatch.setattr(measuring._Frame, "inputs", full)
  product = _plain("product", lambda lhs, rhs: lhs @ rhs)
  found, _ = _as_on_a_gpu(monkeypatch, [product])
  assert all(row.status.endswith("RESOURCE_EXHAUSTED: out of memory") for row in found)
  assert all(row.failed and row.times_us is None for row in found)


def test_long_products_have_fewer_calls():
  here = lab()
  calls = []
  for size in (64, 16384):
    job = variants.Job("a table", suites.make_case(size, size, size), [])
    calls.append(measuring._Run(here, "a question", job, {}, {})._repeats())
  assert calls == [20, 5]


def test_a_row_survives_its_file(tmp_path):
  found = made_up_rows("occupancy", quick=True)
  path = tmp_path / "rows.jsonl"
  path.write_text("".join(row.to_json() + "\n" for row in found), encoding="utf-8")
  again = rows.read(path)
  assert [row.to_json() for row in again] == [row.to_json() for row in found]
  assert again[1].launch == found[1].launch and again[1].gemm == found[1].gemm
  path.write_text('{"question": "none"}\n', encoding="utf-8")
  with pytest.raises(ValueError, match="line 1: not a Row"):
    rows.read(path)


PROFILE = """
planes { name: "/host:CPU" }
planes {
  name: "/device:GPU:0"
  event_metadata { key: 1 value { id: 1 name: "a_pass" } }
  event_metadata { key: 2 value { id: 2 name: "a_product" } }
  stat_metadata { key: 1 value { id: 1 name: "kernel_details" } }
  stat_metadata { key: 2 value { id: 2 name:
    "regs:168 static_shared:16 dynamic_shared:1000 grid:66,2,1 block:384,1,1"
    " occ_pct:18.75"
  } }
  lines {
    events { metadata_id: 1 duration_ps: 1000000 stats { metadata_id: 1 str_value:
      "regs:32 static_shared:0 dynamic_shared:0 grid:8,1,1 block:128,1,1 occ_pct:100" } }
    events { metadata_id: 2 duration_ps: 9000000 stats { metadata_id: 1 ref_value: 2 } }
  }
}
"""


def test_launches_are_read_from_a_profile():
  serialised = ProfileData.text_proto_to_serialized_xspace(PROFILE)
  ran = list(profile.of_profile(ProfileData.from_serialized_xspace(serialised)))
  found = launches.longest(ran)
  assert found == rows.Launch("a_product", 168, 1016, 384, 132, 2)
  assert launches.longest([]) is None


NCU = f"""==PROF== Connected to process 1
"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","jaxgemm_blocked","{achieved.METRIC}","%","40.5"
"1","jaxgemm_split_k","{achieved.METRIC}","%","12.25"
"2","jaxgemm_halves_mend","{achieved.METRIC}","%","90.0"
"""


def test_achieved_occupancy(monkeypatch, tmp_path):
  monkeypatch.setenv("PATH", str(tmp_path))
  assert achieved.occupancies(["a"]) == ({}, "ncu is not on the PATH")
  ncu = tmp_path / "ncu"
  (tmp_path / "out.csv").write_text(NCU, encoding="utf-8")
  ncu.write_text(f"#!/bin/sh\n/bin/cat {tmp_path}/out.csv\n", encoding="utf-8")
  ncu.chmod(ncu.stat().st_mode | stat.S_IEXEC)
  assert achieved.occupancies(["a", "b"]) == ({"a": 0.405, "b": 0.1225}, None)
  assert achieved.occupancies(["a"]) == ({}, "ncu saw 2 kernels, not 1")
  ncu.write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
  assert achieved.occupancies(["a"]) == ({}, "ncu failed: CalledProcessError")


def test_ctas_of_an_sm():
  Residency = residency.Residency
  assert residency.of(128, 72 << 10) == Residency(3, 12 / 64, "shared memory")
  assert residency.of(384, 0, 168) == Residency(1, 12 / 64, "registers")
  assert residency.of(384, 0, 160) == Residency(1, 12 / 64, "registers")
  assert residency.of(128, 0, 128) == Residency(4, 16 / 64, "registers")
  assert residency.of(1024, 0, 32) == Residency(2, 1.0, "threads")
  assert residency.of(32, 0, 16).limit == "CTAs"
  (row,) = (
      row for row in made_up_rows("occupancy", quick=True)
      if row.variant == "blocked tile=64x64x64"
  )
  assert residency.of_row(row).ctas == 1  # As it was launched.
  reckoned = residency.of_row(dataclasses.replace(row, launch=None))
  assert reckoned.ctas == 233472 // (row.smem_bytes + 1024)
  assert residency.of_row(dataclasses.replace(row, launch=None, details={})) is None


def test_draws():
  problem = make_problem(64, 64, 64)
  for how in operands.DRAWS:
    lhs, rhs = operands.make_inputs(problem, how)(jax.random.key(0))
    assert lhs.dtype == "bfloat16" and lhs.shape == (64, 64)
    values = np.asarray(lhs, np.float32)
    if how == "zeros":
      assert not values.any()
      continue
    assert (values != np.asarray(rhs, np.float32)).any()
    if how == "integers":
      assert set(np.unique(values)) <= set(range(-8, 9)) and values.min() < 0
    if how == "uniform":
      assert 0 <= values.min() < 0.1 < 0.9 < values.max() <= 1
    if how == "normal":
      assert abs(values.std() - 1) < 0.1
