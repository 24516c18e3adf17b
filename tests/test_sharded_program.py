"""The program that shares a block out over several devices, on four of a CPU."""

from __future__ import annotations

from collections import Counter
import dataclasses
import json
import pathlib
import socket
import subprocess
import sys

from absl import app, flags
from absl.testing import flagsaver
import jax
import pytest

from experiments import sharded
from experiments.collectives import collectives

pytestmark = pytest.mark.slow  # The other JAX version need not run them too.

ROOT = pathlib.Path(__file__).parent.parent


def rows_of(path: pathlib.Path) -> list[dict]:
  return [json.loads(line) for line in path.read_text().splitlines()]


def run(tmp_path, *arguments) -> list[dict]:
  with flagsaver.flagsaver():
    flags.FLAGS(["program", f"--output={tmp_path}", *arguments])
    sharded.main(["program"])
  return rows_of(tmp_path / "sharded.jsonl")


def check(rows, num_devices, modes=("tensor", "data")):
  assert [row["name"] for row in rows] == [
      f"llama {mode} {num_devices}" for mode in modes
  ]
  for row in rows:
    needed = Counter(row["xla_collectives"])
    if "tensor" in row["name"]:  # The sums of two products: XLA on a CPU makes two.
      needed -= Counter({"all-reduce f32 4x8x64": 1})
    assert Counter(row["collectives"]) == needed
    assert not any("all-gather" in name for name in row["collectives"])
    assert row["step_us"] is None and 0 < row["difference"] < 0.02
    assert row["loss"] == pytest.approx(row["xla_loss"], rel=1e-3)


def test_what_starts_a_collective_counts_once():
  text = """
  %a = bf16[4,8]{1,0} all-reduce(%x), channel_id=1
  %b = ((bf16[4,8]{1,0}), bf16[4,8]{1,0}) all-reduce-start(%x), channel_id=2
  %c = bf16[4,8]{1,0} all-reduce-done(%b)
  %d = (f32[4]{0}, f32[9]{0}) all-reduce(%y, %z), channel_id=3
  %e = (f32[4]{0}, f32[9]{0}) all-reduce-start(%y, %z), channel_id=4
  %f = (f32[4]{0}, f32[8]{0}) all-gather-start(%y), channel_id=5
  %g = (f32[4]{0}, f32[4]{0}, u32[], u32[]) collective-permute-start(%y), channel_id=6
  """
  assert collectives(text, dtypes=True) == {
      ("all-reduce bf16", (4, 8)): 2, ("all-reduce f32", (4,)): 2,
      ("all-reduce f32", (9,)): 2, ("all-gather f32", (8,)): 1,
      ("collective-permute f32", (4,)): 1,
  }


@pytest.mark.slow
def test_both_modes(tmp_path, capsys):
  check(run(tmp_path), 4)
  assert "llama data 4" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.more
def test_a_process_for_each_device(tmp_path):
  with socket.socket() as found:
    found.bind(("localhost", 0))
    port = found.getsockname()[1]
  command = [sys.executable, "-m", "experiments.sharded", f"--output={tmp_path}",
             f"--coordinator=localhost:{port}", "--processes=2", "--modes=tensor"]
  environment = {"PATH": "", "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
  running = [
      subprocess.Popen([*command, f"--process={i}"], cwd=ROOT, env=environment)
      for i in range(2)
  ]
  assert [process.wait(timeout=240) for process in running] == [0, 0]
  check(rows_of(tmp_path / "sharded.jsonl"), 2, ["tensor"])


def test_one_device_cannot_share(monkeypatch, tmp_path):
  monkeypatch.setattr(jax, "devices", lambda: jax.local_devices()[:1])
  with pytest.raises(app.UsageError, match="one device"):
    run(tmp_path)


def test_what_fails():
  row = sharded.Row(
      "llama", 1.0, 1.0, 0.01, {"all-reduce 4": 1}, {"all-reduce 4": 1}, 1.0, 2.0, 0, 0,
      None,
  )
  assert row.failures == [] and row.ratio_to_xla == 2.0
  for fields, what in (
      (dict(loss=1.1), "losses"), (dict(loss=float("nan")), "losses"),
      (dict(difference=0.1), "10.0%"), (dict(difference=float("nan")), "gradient"),
      (dict(collectives={"all-gather 4": 1}), "all-gather"),
      (dict(collectives={"all-reduce 4": 2}), "more collectives"),
  ):
    (found,) = dataclasses.replace(row, **fields).failures
    assert what in found


def test_collectives_of_text():
  text = """
  %a = f32[8,4]{1,0} all-reduce(%x), replica_groups={{0,1}}
  %b = (bf16[4]{0}, /*index=1*/bf16[2,3]{1,0}) all-reduce-start(%x, %y)
  %c = f32[4,8]{1,0} all-reduce(%x)
  %d = f32[4]{0} add(%x, %y)
"""
  assert collectives(text) == {
      ("all-reduce", (4, 8)): 2, ("all-reduce", (4,)): 1, ("all-reduce", (2, 3)): 1
  }
  found = collectives(text, dtypes=True)
  assert found["all-reduce f32", (4, 8)] == 2 and found["all-reduce bf16", (2, 3)] == 1
