"""The experiment that repeats split products."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing

from absl import flags
from absl.testing import flagsaver
from experiment_cases import H200, PROVENANCE
import jax
import jax.numpy as jnp
import pytest

from experiments import determinism, products, suites

CASE = suites.make_case(64, 64, 1024)


def _repeat(product) -> determinism.Repeats:
  return determinism.repeat(
      CASE, product, plan="a plan", splits=2, calls=4, seed=0, provenance=PROVENANCE
  )


def test_repeats_are_compared_bit_by_bit():
  xla = products.make_candidate(CASE.problem, "xla", None, emulated=True).product
  same = _repeat(xla)
  assert not same.failed and (same.calls, same.different) == (4, 0)
  assert "4 calls, the same bits" in str(same)
  fields = json.loads(same.to_json())
  assert fields["name"] == CASE.name and fields["commit"] == PROVENANCE.commit

  calls = []

  def fickle(lhs, rhs):
    """Differs in the sign of a zero at the third call, which == does not see."""
    calls.append(None)
    return xla(lhs, rhs).at[5, 7].set(-0.0 if len(calls) == 3 else 0.0)

  other = _repeat(fickle)
  assert other.failed and other.different == 1
  assert "FAILED: 1 of 4 calls differ" in str(other)
  nans = _repeat(lambda lhs, rhs: jnp.full((64, 64), jnp.nan, jnp.bfloat16))
  assert nans.failed and nans.different == 0 and "not finite" in str(nans)


def test_processes_are_compared(tmp_path):
  """Each row's bits with those of the same problem and plan in an earlier process."""
  row = _repeat(lambda lhs, rhs: lhs @ rhs)
  path = tmp_path / "rows.jsonl"
  path.write_text(row.to_json() + "\n")
  (key, digest), = determinism.digests(path).items()
  assert key == (CASE.name, "a plan") and digest == row.digest
  same = dataclasses.replace(row, earlier=digest)
  assert not same.failed and "as in the earlier process" in str(same)
  other = dataclasses.replace(row, earlier="0")
  assert other.failed and "other bits" in str(other)


def test_load_runs_beside():
  with determinism.load(True):
    (process,) = multiprocessing.active_children()
    assert process.is_alive()
  assert not process.is_alive()
  with determinism.load(False):
    assert not multiprocessing.active_children()


def test_split_plans_are_found():
  assert determinism.num_splits(suites.make_case(256, 256, 65536), H200) > 1
  assert determinism.num_splits(suites.make_case(4096, 4096, 4096), H200) == 1


@pytest.mark.slow
@pytest.mark.more
def test_named_kernels_run_every_problem(tmp_path, capsys):
  """Also what does not split k; a kernel that does not take a problem has no row."""
  options = ["--shapes=64,64,512", "--calls=2", "--kernels=blocked,split_k"]
  first = ["program", *options, f"--output={tmp_path}"]
  with flagsaver.flagsaver():
    flags.FLAGS(first)
    determinism.main(["program"])
  assert "2 products; 0 of them failed" in capsys.readouterr().out
  path = tmp_path / "determinism_shapes.jsonl"
  with flagsaver.flagsaver():
    flags.FLAGS([*first, f"--against={path}"])
    determinism.main(["program"])
  assert capsys.readouterr().out.count("as in the earlier process") == 2


@pytest.mark.parametrize("broken", [False, True])
def test_determinism_program(broken, tmp_path, monkeypatch, capsys):
  """From flags to files, with XLA's product in the kernel's place."""
  xla = products.make_candidate(CASE.problem, "xla", None, emulated=True)
  value = jnp.nan if broken else 1.0
  product = lambda lhs, rhs: xla.product(lhs, rhs) * value
  stand_in = products.Candidate("auto", "a plan", "split_k", product)
  monkeypatch.setattr(products, "make_candidate", lambda *_, **__: stand_in)
  monkeypatch.setattr(determinism, "num_splits", lambda case, _: case.problem.k // 512)
  monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
  shapes = ["--shapes=64,64,512", "--shapes=64,64,1024"]
  with flagsaver.flagsaver():
    flags.FLAGS(["program", *shapes, "--calls=3", f"--output={tmp_path}"])
    if broken:
      with pytest.raises(SystemExit) as exit_info:
        determinism.main(["program"])
      assert exit_info.value.code == 1
    else:
      determinism.main(["program"])
  (line,) = (tmp_path / "determinism_shapes.jsonl").read_text().splitlines()
  assert json.loads(line)["name"] == CASE.name
  printed = capsys.readouterr().out
  assert f"1 of 2 problems split k; {int(broken)} of them failed" in printed
