"""The experiment that measures the most that a GPU can do, on a CPU."""

from __future__ import annotations

import json

from absl import app, flags
from absl.testing import flagsaver
from experiment_cases import H200, PROVENANCE
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import ceilings, ceilings_kernels, cli, runner, suites
import jaxgemm
from jaxgemm import reference
from jaxgemm.device import known_device
from pallas_kernels import compat

pytestmark = pytest.mark.slow  # The other JAX version need not run them too.

CASES = suites.parse_shape("512,384,256:NN+TN")
GPU = cli.Platform(True, H200, "NVIDIA H200")


def run(tmp_path, *arguments):
  with flagsaver.flagsaver():
    flags.FLAGS(["program", f"--output={tmp_path}", *arguments])
    ceilings.main(["program"])
  (path,) = tmp_path.glob("*.jsonl")
  return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(("tile_n", "steps"), [(128, 11), (192, 8), (256, 4)])
def test_kernel_in_emulation(rng, tile_n, steps):
  operands = [
      jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
      for shape in ceilings_kernels.operand_shapes(tile_n)
  ]
  found = compat.run_interpreted(
      lambda params: ceilings_kernels.launch(
          *operands, steps=steps, num_ctas=3, interpret=params
      )
  )
  lhs, rhs = (np.asarray(x[0]).astype(np.float64) for x in operands)
  wanted = np.zeros((128, tile_n))
  for step in range(steps):
    k = slice(64 * (step % 4), 64 * (step % 4) + 64)
    wanted += lhs[:, k] @ rhs[k]
  wanted = sum(wanted[:, col : col + 64] for col in range(0, tile_n, 64))
  assert found.shape == (3, 128, 64) and found.dtype == jnp.float32
  for sums in found:
    assert reference.relative_error(sums, wanted) < 1e-6
  truth = ceilings_kernels.truth(*operands, steps)
  assert reference.relative_error(truth, wanted) < 1e-12


def test_every_slot_is_multiplied():
  operands = (jnp.ones(s, "bfloat16") for s in ceilings_kernels.operand_shapes(64))
  with pytest.raises(ValueError, match="steps=3 must be at least 4"):
    ceilings_kernels.launch(*operands, steps=3, num_ctas=1)


def test_what_is_timed_lowers():
  """Each tile by a kernel of its own, and nothing beside it."""
  key = jax.random.key(0)
  variants = ceilings.matrix_variants(H200, 432, CASES)
  variants |= ceilings.memory_variants(1 << 20)
  types = jax.eval_shape(
      lambda: ceilings.draw_matrices(CASES, key) | ceilings.draw_memory(1 << 20, key)
  )
  texts = {}
  with jaxgemm.target("NVIDIA H200"):
    for name, variant in variants.items():
      exported = jax.export.export(
          jax.jit(ceilings._of_set(variant)), platforms=["cuda"]
      )
      texts[name] = exported(types).mlir_module()
  ours = {name for name, text in texts.items() if "custom_call @mosaic_gpu" in text}
  alone = {name for name in variants if name.startswith("tensor cores")}
  assert len(alone) == 4
  assert ours == alone | {f"jaxgemm {case.name}" for case in CASES}
  for name in alone:
    assert texts[name].count("stablehlo.") == 1  # The kernel: no copy of an operand.
    assert "jaxgemm_tensor_cores" in texts[name]


def test_tiles_have_as_many_operations():
  found = ceilings.matrix_variants(H200, 432, CASES)
  flops = {found[name].flops for name in found if name.startswith("tensor cores")}
  assert flops == {2 * 128 * 256 * 64 * 432 * 132}
  for case in CASES:
    assert found[f"XLA {case.name}"].flops == case.problem.flops
    assert found[f"jaxgemm {case.name}"].flops == case.problem.flops


def test_memory():
  values = ceilings.draw_memory(4096, jax.random.key(0))
  found = {
      name: (ceilings._of_set(variant)(values), variant.num_bytes)
      for name, variant in ceilings.memory_variants(4096).items()
  }
  (array,) = values["array"]
  largest, num_bytes = found["memory, read"]
  assert largest == array.max() and num_bytes == array.nbytes == 4096
  written, num_bytes = found["memory, write"]
  assert (written == array[0]).all() and num_bytes == written.nbytes == 4096
  copied, num_bytes = found["memory, copy"]
  assert (copied == array + 1).all() and num_bytes == 2 * 4096


class Chip:
  """Stands in for a GPU, whose times it makes up."""

  error: float | None = 1e-7  # Of each check.

  def __init__(self, monkeypatch):
    self.calls = []
    self.set_bytes = []
    monkeypatch.setattr(ceilings.timing, "interleaved", self.interleaved)
    monkeypatch.setattr(ceilings.timing, "num_input_sets", self.num_input_sets)
    monkeypatch.setattr(ceilings, "SHAPES", ("64,64,64",))
    monkeypatch.setattr(ceilings, "MEMORY_BYTES", 4096)
    monkeypatch.setattr(
        ceilings, "check",
        lambda tile_n, num_ctas, provenance: ceilings.Row(
            ceilings.tile_name(tile_n), "check", provenance, self.error
        ),
    )

  def num_input_sets(self, set_bytes, l2_bytes):
    assert l2_bytes == H200.l2_bytes
    self.set_bytes.append(set_bytes)
    return 2

  def interleaved(self, runs, sets, repeats, *, burn_in_s, turn_s):
    assert len(sets) == 2
    self.calls.append((repeats, burn_in_s, turn_s))
    times_us = {"tensor cores 128x192": 240.0, "tensor cores 128x256, zeros": 200.0}
    return {name: [times_us.get(name, 300.0) + i for i in (-4, 0, 4)] for name in runs}

  def rows(self, *arguments):
    with flagsaver.flagsaver():
      flags.FLAGS(["program", *arguments])
      return [
          row for rows in ceilings.stages(GPU, ceilings.modes(GPU), PROVENANCE)
          for row in rows
      ]


def test_rows_of_a_gpu(monkeypatch):
  chip = Chip(monkeypatch)
  rows = chip.rows("--burn_in=7")
  assert chip.calls == [
      (20, 0.0, 0.0), (20, 0.0, 0.0), (5, 7.0, runner.TURN_S), (5, 7.0, runner.TURN_S)
  ]
  assert chip.set_bytes == [2 * 64 * 64 * 2, 4096] * 2
  assert [row.mode for row in rows] == (
      ["check"] * 3 + ["burst"] * 9 + ["sustained"] * 9
  )
  assert not any(row.failed for row in rows)
  found = {row.name: row for row in rows if row.mode == "sustained"}
  flops = 2 * 128 * 256 * 64 * 432 * 132
  fastest, product = found["tensor cores 128x192"], found["jaxgemm 64x64x64 NN bfloat16"]
  assert (fastest.time_us, fastest.spread_us) == (240.0, 2.0)
  assert fastest.tflops == pytest.approx(flops / 240e-6 / 1e12)
  assert fastest.of_tensor_cores is None and fastest.tbps is None
  assert product.tflops == pytest.approx(2 * 64**3 / 300e-6 / 1e12)
  # Of the fastest on normal data; zeros do not count.
  assert product.of_tensor_cores == pytest.approx(product.tflops / fastest.tflops)
  copy = found["memory, copy"]
  assert copy.tbps == pytest.approx(2 * 4096 / 300e-6 / 1e12)
  assert copy.tflops is None and copy.of_tensor_cores is None
  line = json.loads(product.to_json())
  assert line["mode"] == "sustained" and line["device"] == "NVIDIA H200"
  assert len(ceilings.table(rows).splitlines()) == 2 + len(rows)


def test_products_of_shapes(monkeypatch):
  chip = Chip(monkeypatch)
  rows = chip.rows("--burn_in=0", "--shapes=64,48,32:TN", "--shapes=32,32,32")
  names = {row.name for row in rows if "x32" in row.name}
  assert names == {
      f"{who} {what} bfloat16" for who in ("XLA", "jaxgemm")
      for what in ("64x48x32 TN", "32x32x32 NN")
  }
  assert chip.set_bytes == [2 * 2 * 32 * 32, 4096]
  with pytest.raises(app.UsageError, match="of bfloat16, not of float16"):
    chip.rows("--shapes=64,48,32", "--dtypes=float16")


def test_flags_of_modes(monkeypatch):
  chip = Chip(monkeypatch)
  assert {row.mode for row in chip.rows("--burn_in=0", "--repeats=3")} == {
      "check", "burst"
  }
  assert [repeats for repeats, _, _ in chip.calls] == [3, 3]
  assert {row.mode for row in chip.rows("--notiming")} == {"check"}


@pytest.mark.parametrize("error", [1e-3, None])
def test_nothing_is_timed_where_a_check_fails(monkeypatch, error):
  chip = Chip(monkeypatch)
  chip.error = error
  rows = chip.rows()
  assert len(rows) == 3 and all(row.failed for row in rows) and not chip.calls
  assert "FAILED" in ceilings.table(rows)


def test_from_flags_to_rows(tmp_path, capsys):
  (row,) = run(tmp_path)
  assert (row["name"], row["mode"]) == ("tensor cores 128x128", "check")
  assert 0 < row["error"] < 1e-6 and row["time_us"] is None
  assert row["device"].startswith("cpu") and "ceilings" in row["command"]
  assert "tensor cores 128x128" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [1.001, float("nan"), float("inf")])
def test_a_wrong_kernel_fails(tmp_path, monkeypatch, wrong):
  """In one CTA's sums, of which one alone is wrong."""
  launch = ceilings_kernels.launch
  monkeypatch.setattr(
      ceilings_kernels, "launch",
      lambda *x, **options: launch(*x, **options).at[1, :8, :].multiply(wrong),
  )
  with pytest.raises(SystemExit):
    run(tmp_path)


def test_a_gpu_without_wgmma(tmp_path, monkeypatch):
  a100 = cli.Platform(True, known_device("NVIDIA A100-SXM4-80GB"), "NVIDIA A100")
  monkeypatch.setattr(cli, "start", lambda *_: a100)
  with pytest.raises(app.UsageError, match="NVIDIA A100 has no wgmma"):
    run(tmp_path)
