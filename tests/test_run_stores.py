"""Results of whole rows that leave in one bulk copy: each thread's part, on a CPU."""

from __future__ import annotations

import types

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from jaxgemm import heuristics
from jaxgemm.device import known_device
from pallas_kernels import epilogue as epilogues
from pallas_kernels import run_stores, tiles
from tests import followed_threads
from tests.kernel_cases import lowered, make_problem, small_config

ITEMSIZE = 2


@pytest.fixture
def in_integers(monkeypatch):
  followed_threads.in_integers(monkeypatch, run_stores)


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
  memory = followed_threads.Memory(run_stores.slot_elements(64, cols, "bfloat16"))
  begin *= ITEMSIZE
  phase = begin % 16
  utils = types.SimpleNamespace(inline_ptx=memory.run)
  monkeypatch.setattr(run_stores, "mgpu", types.SimpleNamespace(utils=utils))
  piece = np.arange(1.0, 64 * cols + 1).reshape(64, cols)
  for place in followed_threads.threads():
    monkeypatch.setattr(run_stores, "place_of_fragment", lambda at=place: at)
    registers = followed_threads.fragment(piece, *place)
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
    assert epilogues.stores_runs(problem, 128)
    lowered(kernel, problem, small_config(kernel))


def test_plans():
  """ViT's scores: tiles of all columns."""
  problem = make_problem(197, 197, 64, "NT", batch=512)
  best = heuristics.candidates(problem, known_device("NVIDIA H200"))[0]
  assert epilogues.stores_runs(problem, best.config.tile_n)
