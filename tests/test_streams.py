"""The experiment that moves a product's bytes and multiplies nothing, on a CPU."""

from __future__ import annotations

import functools
import json

from absl import app, flags
from absl.testing import flagsaver
from experiment_cases import H200, PROVENANCE, make_row
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import cli, report, streams, suites, summary
from experiments import streams_kernel as kernel
import jaxgemm
from jaxgemm.device import known_device
from pallas_kernels import compat

GPU = cli.Platform(True, H200, "NVIDIA H200")
SIZES = [
    (900, 5000),  # Less than a row each, and more written than read.
    (100_000, 3_000),  # Stored in the last steps.
    (300_000, 300_000),
    (50_000, 200_000),  # Several chunks a step.
    (1_000_000, 150_000),  # More steps than slots.
]


@pytest.mark.slow
@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_kernel_in_emulation(sizes, spread):
  shares = kernel.Shares.of(*sizes, 3)
  values = jax.random.bits(jax.random.key(0), shares.read_shape, jnp.uint32)
  found = compat.run_interpreted(
      lambda params: kernel.launch(values, shares, spread=spread, interpret=params)
  )
  sources = kernel.sources(shares, spread=spread)
  assert (np.asarray(found) == np.asarray(values)[sources]).all()
  assert streams.is_correct(found, values, shares, spread=spread)
  wrong = found.at[-1, -1].add(1)
  assert not streams.is_correct(wrong, values, shares, spread=spread)


def test_slots_are_used_again():
  """So that the cases above show what happens then."""
  shares = kernel.Shares.of(*SIZES[-1], 3)
  assert shares.slots < shares.steps - shares.store_steps < shares.steps


@pytest.mark.parametrize("read_bytes", [1, 70_000, 34_000_000, 1_000_000_007])
@pytest.mark.parametrize("written_bytes", [1, 8192, 33_554_432, 268_435_456])
def test_shares_cover_the_bytes_and_little_more(read_bytes, written_bytes):
  shares = kernel.Shares.of(read_bytes, written_bytes, 132)
  row = kernel.ROW_BYTES
  for shape, num_bytes in (
      (shares.read_shape, read_bytes), (shares.written_shape, written_bytes)
  ):
    assert num_bytes <= shape[0] * row
    if num_bytes > 1e6:  # Of less, a row for each CTA is much more.
      assert shape[0] * row < 1.02 * num_bytes
  assert shares.rows <= kernel.MOST_ROWS and shares.store_rows <= shares.rows
  assert shares.slots * shares.rows * row < 232448
  assert shares.slots <= 32  # Mosaic's barriers of one name.


@pytest.mark.parametrize("read_bytes", [34_000_000, 50_000_000, 132 * 512 * 12 * 40])
def test_what_is_timed_lowers(read_bytes):
  """To one kernel, without a copy; also where many slots would fit."""
  shares = kernel.Shares.of(read_bytes, 1_000_000, 132)
  values = jax.ShapeDtypeStruct(shares.read_shape, jnp.uint32)
  with jaxgemm.target("NVIDIA H200"):
    exported = jax.export.export(
        jax.jit(functools.partial(kernel.launch, shares=shares)), platforms=["cuda"]
    )
    text = exported(values).mlir_module()
  assert text.count("stablehlo.") == 1 and "jaxgemm_stream" in text


def test_bytes_of_a_problem():
  problem = suites.make_case(100, 30, 20, dtype="float16").problem
  assert streams.bytes_of(problem) == (2 * (100 * 20 + 20 * 30), 2 * 100 * 30)


def run(tmp_path, *arguments):
  with flagsaver.flagsaver():
    flags.FLAGS(["program", f"--output={tmp_path}", *arguments])
    streams.main(["program"])
  (path,) = tmp_path.glob("*.jsonl")
  return summary.read(path, streams.Row)


def test_program_without_a_gpu(tmp_path, capsys):
  rows = run(tmp_path, "--shapes=64,72,80", "--shapes=2,33,35,37")
  assert [row.name for row in rows] == ["64x72x80 NN bfloat16", "2x33x35x37 NN bfloat16"]
  assert all(row.correct and row.stream_us is None for row in rows)
  assert "64x72x80" in capsys.readouterr().out


def test_program_says_what_is_wrong(tmp_path, monkeypatch):
  monkeypatch.setattr(streams, "is_correct", lambda *_, spread: not spread)
  with pytest.raises(SystemExit):
    run(tmp_path, "--shapes=64,72,80")
  monkeypatch.setattr(streams.device_lib, "supported", lambda device: False)
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
    shares = kernel.Shares.of(*streams.bytes_of(case.problem), 2)
    runs = {
        order: lambda values, spread=spread: values[
            kernel.sources(shares, spread=spread)
        ]
        for order, spread in streams.ORDERS.items()
    }
    return streams._Prepared(case, shares, runs)

  monkeypatch.setattr(streams, "_prepare", prepare)
  monkeypatch.setattr(streams.timing, "interleaved", interleaved)
  case = suites.make_case(64, 72, 80)
  with flagsaver.flagsaver():
    flags.FLAGS(["program"])
    ((row,),) = streams.rows_of([case], GPU, PROVENANCE, 3)
  assert calls == [(list(streams.ORDERS), 6, 3)]
  assert row.correct and (row.order, row.stream_us) == ("side by side", 3.0)
  assert row.tbps == pytest.approx(case.problem.num_bytes / 3.0 / 1e6)
  again = streams.Row.from_json(row.to_json())
  assert again == row and json.loads(row.to_json())["device"] == "NVIDIA H200"
  for line in ("[]", "{}", '{"class": "odd"}', row.to_json()[:-1] + ', "more": 1}'):
    with pytest.raises(ValueError, match="not a row of streams"):
      streams.Row.from_json(line)


def test_limits_by_what_was_moved(tmp_path, capsys):
  """A product that takes less than its bytes did has shown what is possible."""
  cases = [suites.make_case(16, 8192, 8192), suites.make_case(32, 8192, 8192)]
  rows = [
      make_row(case, name, times_us=[us], xla_times_us=[60.0])
      for case in cases for name, us in (("xla", 60.0), ("auto", 40.0))
  ]
  chosen = summary.chosen(rows)
  names = [case.name for case in cases]
  moved = {names[0]: 30.0, names[1]: 50.0}
  limit = summary.speeds(chosen, moved)["skinny"].limit
  assert limit == pytest.approx(report.geometric_mean([60 / 30, 60 / 40]))
  # Where little is moved the tensor cores are the bound.
  device = known_device("NVIDIA H200")
  floor = cases[0].problem.flops / device.matrix_tflops["bfloat16"] / 1e6
  least = floor / summary.CEILING + summary.SHORTEST_US
  found = summary.speed(chosen[:1], {names[0]: 0.1})
  assert found.limit == pytest.approx(60 / least)
  # The program takes both files.
  stream = streams.Row(
      "skinny", names[0], 1, 1, True, "apart", 30.0, 0.1, 1.0, PROVENANCE
  )
  files = {"run": rows, "streams": [stream]}
  for name, its_rows in files.items():
    text = "".join(row.to_json() + "\n" for row in its_rows)
    (tmp_path / f"{name}.jsonl").write_text(text)
  paths = [str(tmp_path / f"{name}.jsonl") for name in files]
  summary.main(["summary", *paths])
  assert capsys.readouterr().out == summary.text({"run": rows}, {names[0]: 30.0}) + "\n"
