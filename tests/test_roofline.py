"""The experiment that moves and multiplies with nothing in between, on a CPU."""

from __future__ import annotations

import functools
import json
import math

from absl import app, flags
from absl.testing import flagsaver
from experiment_cases import H200, PROVENANCE, make_row
import jax
import numpy as np
import pytest

from experiments import cli, report, roofline, suites, summary
from experiments import roofline_kernel as kernel
import jaxgemm
from jaxgemm import reference
from pallas_kernels import compat

pytestmark = pytest.mark.slow  # The other JAX version need not run them too.

GPU = cli.Platform(True, H200, "NVIDIA H200")
FLOPS = kernel.RESIDENT.flops  # Of a k tile.
SIZES = [
    (900, 5000, 0),  # Less than a row each, and more written than read.
    (100_000, 3_000, 3 * FLOPS),  # Stored in the last steps.
    (300_000, 300_000, 0),
    (50_000, 200_000, 17 * FLOPS),  # Several chunks a step.
    (1_000_000, 150_000, 7 * FLOPS),  # More steps than slots.
]


@pytest.mark.slow
@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_kernel_in_emulation(sizes, spread):
  shares = kernel.Shares.of(*sizes, 3)
  operands = roofline.draw(shares, jax.random.key(0))
  found = compat.run_interpreted(
      lambda params: kernel.launch(*operands, shares, spread=spread, interpret=params)
  )
  values, lhs, rhs = map(np.asarray, operands)
  sources = kernel.sources(shares, spread=spread)
  assert (np.asarray(found[0]) == values[sources]).all()
  assert len(found) == 2 if sizes[2] else 1
  if sizes[2]:
    product = lhs[0].astype(np.float64) @ rhs[0].astype(np.float64)
    wanted = sizes[2] // (3 * FLOPS) * product.sum(axis=1)
    for of_cta in found[1]:
      assert reference.relative_error(of_cta, wanted) < 1e-6
  assert roofline.is_correct(found, operands, shares, spread=spread)
  for index in range(len(found)):
    for value in (1, float("nan"))[: 1 + index]:
      wrong = list(found)
      wrong[index] = wrong[index].at[-1, -1].add(value)
      assert not roofline.is_correct(tuple(wrong), operands, shares, spread=spread)


@pytest.mark.parametrize("flops", [0, 131 * FLOPS, 132 * FLOPS, 1000 * FLOPS + 1])
def test_no_more_is_multiplied_than_asked(flops):
  shares = kernel.Shares.of(1_000_000, 1_000_000, flops, 132)
  assert flops - 132 * FLOPS < shares.flops <= flops


def test_slots_are_used_again():
  """So that the cases above show what happens then."""
  shares = kernel.Shares.of(*SIZES[-1], 3)
  assert shares.slots < shares.steps - shares.store_steps < shares.steps


@pytest.mark.parametrize("read_bytes", [1, 70_000, 34_000_000, 1_000_000_007])
@pytest.mark.parametrize("written_bytes", [1, 8192, 33_554_432, 268_435_456])
def test_shares_cover_the_bytes_and_little_more(read_bytes, written_bytes):
  shares = kernel.Shares.of(read_bytes, written_bytes, 0, 132)
  row = kernel.ROW_BYTES
  for shape, num_bytes in (
      (shares.read_shape, read_bytes), (shares.written_shape, written_bytes)
  ):
    assert num_bytes <= shape[0] * row
    if num_bytes > 1e6:  # Of less, a row for each CTA is much more.
      assert shape[0] * row < 1.02 * num_bytes
  assert shares.rows <= kernel.MOST_ROWS and shares.store_rows <= shares.rows
  resident = 2 * sum(math.prod(shape) for shape in kernel.RESIDENT.operand_shapes)
  assert shares.slots * shares.rows * row + resident < 232448
  assert shares.slots <= 32  # Mosaic's barriers of one name.


@pytest.mark.parametrize("flops", [0, 10**10])
@pytest.mark.parametrize("read_bytes", [34_000_000, 50_000_000, 132 * 512 * 12 * 40])
def test_what_is_timed_lowers(read_bytes, flops):
  """To one kernel, without a copy; also where many slots would fit."""
  shares = kernel.Shares.of(read_bytes, 1_000_000, flops, 132)
  with jaxgemm.target("NVIDIA H200"):
    exported = jax.export.export(
        jax.jit(functools.partial(kernel.launch, shares=shares)), platforms=["cuda"]
    )
    text = exported(*roofline.operand_types(shares)).mlir_module()
  assert text.count("stablehlo.") == 1 and "jaxgemm_roofline" in text


def test_bytes_of_a_problem():
  problem = suites.make_case(100, 30, 20, dtype="float16").problem
  assert roofline.bytes_of(problem) == (2 * (100 * 20 + 20 * 30), 2 * 100 * 30)


def run(tmp_path, *arguments):
  with flagsaver.flagsaver():
    flags.FLAGS(["program", f"--output={tmp_path}", *arguments])
    roofline.main(["program"])
  (path,) = tmp_path.glob("*.jsonl")
  return summary.read(path, roofline.Row)


def test_program_without_a_gpu(tmp_path, capsys):
  rows = run(tmp_path, "--shapes=64,72,80", "--shapes=2,33,35,37")
  assert [row.name for row in rows] == ["64x72x80 NN bfloat16", "2x33x35x37 NN bfloat16"]
  assert all(row.correct and row.roofline_us is None for row in rows)
  assert "64x72x80" in capsys.readouterr().out


def test_program_says_what_is_wrong(tmp_path, monkeypatch):
  monkeypatch.setattr(roofline, "is_correct", lambda *_, spread: not spread)
  with pytest.raises(SystemExit):
    run(tmp_path, "--shapes=64,72,80")
  monkeypatch.setattr(roofline.device_lib, "supported", lambda device: False)
  with pytest.raises(app.UsageError, match="TMA"):
    run(tmp_path, "--shapes=64,72,80")


def test_rows_of_a_gpu(monkeypatch):
  """The faster order counts, of times that are made up."""
  calls = []

  def interleaved(runs, sets, repeats):
    calls.append((list(runs), len(sets), repeats))
    return {"apart": [5.0, 4.0, 6.0], "side by side": [2.0, 3.0, 7.0]}

  def prepare(case, num_ctas):
    assert num_ctas == H200.num_sms
    shares = roofline.shares_of(case.problem, 2)
    runs = {
        order: lambda values, *_, spread=spread: (
            values[kernel.sources(shares, spread=spread)],
        )
        for order, spread in roofline.ORDERS.items()
    }
    return roofline._Prepared(case, shares, runs)

  monkeypatch.setattr(roofline, "_prepare", prepare)
  monkeypatch.setattr(roofline.timing, "interleaved", interleaved)
  case = suites.make_case(64, 72, 80)
  with flagsaver.flagsaver():
    flags.FLAGS(["program"])
    ((row,),) = roofline.rows_of([case], GPU, PROVENANCE, 3)
  assert calls == [(list(roofline.ORDERS), 6, 3)]
  assert row.correct and (row.order, row.roofline_us) == ("side by side", 3.0)
  assert row.tbps == pytest.approx(case.problem.num_bytes / 3.0 / 1e6)
  again = roofline.Row.from_json(row.to_json())
  assert again == row and json.loads(row.to_json())["device"] == "NVIDIA H200"
  for line in ("[]", "{}", '{"class": "odd"}', row.to_json()[:-1] + ', "more": 1}'):
    with pytest.raises(ValueError, match="not a row of a roofline"):
      roofline.Row.from_json(line)


def test_limits_by_rooflines(tmp_path, capsys):
  """A product that takes less than its roofline has shown what is possible."""
  cases = [suites.make_case(16, 8192, 8192), suites.make_case(32, 8192, 8192)]
  rows = [
      make_row(case, name, times_us=[us], xla_times_us=[60.0])
      for case in cases for name, us in (("xla", 60.0), ("auto", 40.0))
  ]
  chosen = summary.chosen(rows)
  names = [case.name for case in cases]
  rooflines = {names[0]: 30.0, names[1]: 50.0}
  limit = summary.speeds(chosen, rooflines)["skinny"].limit
  assert limit == pytest.approx(report.geometric_mean([60 / 30, 60 / 40]))
  # The program takes both files.
  alone = roofline.Row(
      "skinny", names[0], 1, 1, 1, True, "apart", 30.0, 0.1, 1.0, 1.0, PROVENANCE
  )
  files = {"run": rows, "roofline": [alone]}
  for name, its_rows in files.items():
    text = "".join(row.to_json() + "\n" for row in its_rows)
    (tmp_path / f"{name}.jsonl").write_text(text)
  paths = [str(tmp_path / f"{name}.jsonl") for name in files]
  summary.main(["summary", *paths])
  assert capsys.readouterr().out == summary.text({"run": rows}, {names[0]: 30.0}) + "\n"
