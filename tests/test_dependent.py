"""Kernels that may begin early wait before they touch anything, on a CPU."""

from __future__ import annotations

import pathlib

import jax
import pytest

import pallas_kernels
from pallas_kernels import TILE_KERNELS, compat, dependent, halves_pass, pads
from tests.kernel_cases import lowered, make_problem, small_config

WAITS = "griddepcontrol.wait"
LAUNCHED_SO = "mosaic_gpu.uses_pdl"


@pytest.mark.parametrize("interpret", [None, compat.interpret_params()], ids=["", "emu"])
def test_the_wait_comes_first(interpret, monkeypatch):
  done = []

  class Mosaic:
    def griddepcontrol_wait(self):
      done.append("wait")

    def kernel(self, body, **options):
      assert options == dict(interpret=interpret, grid=(4,))
      return body

  monkeypatch.setattr(dependent, "plgpu", Mosaic())
  run = dependent.kernel(
      lambda *gmem, **refs: done.append((gmem, refs)), interpret=interpret, grid=(4,)
  )
  run(1, 2, slots=3)
  assert done == [*(["wait"] if interpret is None else []), ((1, 2), dict(slots=3))]


def test_all_kernels_are_launched_there():
  folder = pathlib.Path(pallas_kernels.__file__).parent
  sources = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.py")}
  launching = [name for name, text in sources.items() if "plgpu.kernel(" in text]
  assert launching == ["dependent.py"]
  assert sum("dependent.kernel(" in text for text in sources.values()) == 5


@pytest.mark.parametrize("kernel", TILE_KERNELS)
def test_lowered_kernels_wait(kernel):
  module = lowered(kernel, make_problem(256, 256, 256), small_config(kernel))
  assert WAITS in module and LAUNCHED_SO in module


@pytest.mark.parametrize(
    ("kernel", "k", "fields"),
    [
        ("direct", 64, {}), ("direct", 63, {}), ("direct", 7, {}),
        ("persistent", 63, dict(misaligned="loads", consumers=1, num_stages=6)),
        ("persistent", 63, dict(misaligned="runs", tile_m=256)),
    ],
)
def test_loads_through_registers_stay_behind_the_wait(kernel, k, fields):
  """ptxas moves those of what it is told that nobody writes: `ld.global.nc`."""
  problem = make_problem(255, 256, k, "TN")
  module = lowered(kernel, problem, small_config(kernel, **fields))
  assert "ld.global." in module and ".nc." not in module


def test_lowered_passes_wait():
  x = jax.ShapeDtypeStruct((2, 128, 512), "float32")
  largest = jax.ShapeDtypeStruct((2, 512), "int32")
  narrow = jax.ShapeDtypeStruct((2, 24, 33), "bfloat16")
  for run, operands in (
      (halves_pass.by_rows, [x]),
      (halves_pass.by_cols, [x, largest]),
      (lambda x: pads.pad([x], [(2, 24, 64)]), [narrow]),
  ):
    exported = jax.export.export(jax.jit(run), platforms=["cuda"])(*operands)
    module = exported.mlir_module()
    assert WAITS in module and LAUNCHED_SO in module and ".nc." not in module
