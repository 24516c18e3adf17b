"""Results of whole rows that leave in one bulk copy: each thread's part, on a CPU."""

from __future__ import annotations

import operator
import types

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from jaxgemm import heuristics
from jaxgemm.device import known_device
from pallas_kernels import epilogue_choice, run_stores, tiles
from tests.kernel_cases import lowered, make_problem, small_config

pytestmark = pytest.mark.slow  # The other JAX version need not run them too.

ITEMSIZE = 2


class Memory:
  """Shared memory and GMEM in elements, as the instructions of `run_stores` see them."""

  def __init__(self, elements: int):
    self.slot = np.zeros(run_stores.slot_elements(64, elements, "bfloat16"))
    self.gmem: dict[int, float] = {}

  def run(self, ptx: str, *args) -> None:
    if "st.shared" in ptx:
      address, value, wanted = args
      offset = int(ptx.split("[$0 + ")[1].split("]")[0])
      if wanted:
        self._at(address + offset)[...] = value
    elif "cp.async.bulk" in ptx:
      target, source, num_bytes, wanted = args
      if wanted:
        assert target % 16 == source % 16 == num_bytes % 16 == 0 < num_bytes
        for at in range(0, num_bytes, ITEMSIZE):
          self._store(target + at, source + at)
    else:
      target, source, wanted = args
      if wanted:
        self._store(target, source)

  def _at(self, address: int):
    assert address % ITEMSIZE == 0 <= address < ITEMSIZE * self.slot.size
    return self.slot[address // ITEMSIZE : address // ITEMSIZE + 1]

  def _store(self, target: int, source: int) -> None:
    assert target not in self.gmem  # Each element once.
    self.gmem[target] = float(self._at(source)[0])


@pytest.fixture
def in_integers(monkeypatch):
  """What `run_stores` computes in MLIR, computed."""
  names = dict(addi="add", subi="sub", muli="mul", andi="and_", shli="lshift")
  computed = {name: getattr(operator, does) for name, does in names.items()}
  computed |= dict(
      maxsi=max, minsi=min, select=lambda which, one, other: one if which else other,
      extui=lambda _, x: x, bitcast=lambda _, x: x,
  )
  monkeypatch.setattr(run_stores, "arith", types.SimpleNamespace(**computed))
  for name in ("i32", "i64_of_unsigned"):
    monkeypatch.setattr(run_stores, name, int)
  monkeypatch.setattr(run_stores, "i32_type", lambda: None)
  monkeypatch.setattr(run_stores, "less", operator.lt)
  monkeypatch.setattr(run_stores, "behind", operator.add)
  integers = types.SimpleNamespace(get_signless=lambda _: None)
  monkeypatch.setattr(run_stores, "ir", types.SimpleNamespace(IntegerType=integers))
  pick = lambda pair, static_position, **_: pair[static_position[0]]
  monkeypatch.setattr(run_stores, "vector", types.SimpleNamespace(extract=pick))


@given(
    num_cols=st.integers(1, 80), extra=st.integers(0, 3), valid=st.integers(0, 64),
    begin=st.integers(0, 40),
)
@example(num_cols=5, extra=0, valid=0, begin=3)
@example(num_cols=1, extra=1, valid=2, begin=1)
@settings(
    max_examples=25, deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_each_element_leaves_once(
    in_integers, monkeypatch, num_cols, extra, valid, begin
):
  """Of a tile that is wider than the array and reaches beyond its rows."""
  cols = tiles.round_up(num_cols, 16) + 16 * extra
  memory, begin = Memory(cols), ITEMSIZE * begin
  phase = begin % 16
  utils = types.SimpleNamespace(inline_ptx=lambda ptx, *x, **_: memory.run(ptx, *x))
  monkeypatch.setattr(run_stores, "mgpu", types.SimpleNamespace(utils=utils))
  piece = np.arange(1.0, 64 * cols + 1).reshape(64, cols)
  for thread in range(128):
    warp, group, lane = thread // 32, thread % 32 // 4, thread % 4
    monkeypatch.setattr(
        run_stores, "place_of_fragment", lambda at=(warp, group, lane): at
    )
    registers = [
        tuple(piece[16 * warp + 8 * half + group, 8 * block + 2 * lane :][:2])
        for block in range(cols // 8) for half in range(2)
    ]
    fragment = types.SimpleNamespace(
        registers=types.SimpleNamespace(flat=registers), mlir_dtype=None
    )
    run_stores._write_fragments(fragment, phase, num_cols, ITEMSIZE)
  end = phase + valid * num_cols * ITEMSIZE
  for thread in range(128):
    run_stores._leave(0, begin - phase, phase, end, thread, ITEMSIZE)
  wanted = {
      begin + ITEMSIZE * (row * num_cols + col): piece[row, col]
      for row in range(valid) for col in range(num_cols)
  }
  assert memory.gmem == wanted


@pytest.mark.parametrize("kernel", ["persistent", "pipelined", "split_k"])
def test_lowers_for_cuda(kernel):
  for n, dtype in ((97, "bfloat16"), (50, "float32")):
    problem = make_problem(205, n, 328, "NN", "bfloat16", out_dtype=dtype, batch=2)
    assert epilogue_choice.stores_runs(problem, 128)
    lowered(kernel, problem, small_config(kernel))


def test_plans():
  """ViT's scores: tiles of all columns."""
  problem = make_problem(197, 197, 64, "NT", batch=512)
  best = heuristics.candidates(problem, known_device("NVIDIA H200"))[0]
  assert epilogue_choice.stores_runs(problem, best.config.tile_n)
