"""Rows that leave in whole units: each thread's part, on a CPU."""

from __future__ import annotations

import types

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from pallas_kernels import epilogue, register_stores, skewed
from tests import followed_threads
from tests.kernel_cases import lowered, make_problem, small_config

@pytest.fixture
def in_integers(monkeypatch):
  followed_threads.in_integers(monkeypatch, register_stores, skewed)


def stored(monkeypatch, piece, out, row, col, array, itemsize, interleaved, transposed):
  """GMEM behind the stores of all threads, and the memory."""
  rows, cols = piece.shape[::-1] if transposed else piece.shape
  dtype = "bfloat16" if itemsize == 2 else "float32"
  pitch = epilogue.Staging("masked", dtype, cols, 1).pitch
  memory = followed_threads.Memory(64 * pitch, itemsize)
  utils = types.SimpleNamespace(inline_ptx=memory.run, bitcast=lambda x, _: x)
  monkeypatch.setattr(register_stores, "mgpu", types.SimpleNamespace(utils=utils))
  part = register_stores.Part(
      0, out, row, col, rows, cols, *array, pitch, itemsize,
      interleaved and not transposed,
  )
  for place in followed_threads.threads():
    registers = followed_threads.fragment(piece, *place)
    if transposed:
      part.write_transposed(registers, place, interleaved=interleaved)
    else:
      part.write(registers, place)
  for thread in range(128):
    part.store(thread)
  return memory


def wanted(piece, out, row, col, array, itemsize, interleaved, transposed):
  """GMEM as it should be."""
  order = [8 * (i % 8) + i // 8 if interleaved else i for i in range(64)]
  whole = np.empty_like(piece)
  whole[order] = piece
  whole = whole.T if transposed else whole
  return {
      out + itemsize * ((row + i) * array[1] + col + j): whole[i, j]
      for i in range(min(whole.shape[0], array[0] - row))
      for j in range(min(whole.shape[1], array[1] - col))
  }


@given(
    num_cols=st.integers(1, 300), units=st.integers(1, 32), num_rows=st.integers(1, 150),
    row=st.integers(0, 1), col=st.integers(0, 6), batch=st.integers(0, 1),
    itemsize=st.sampled_from([2, 4]), interleaved=st.booleans(),
    transposed=st.booleans(),
)
@example(5, 16, 7, 0, 0, 1, 2, False, False)
@example(299, 16, 64, 0, 2, 0, 2, False, False)
@example(301, 13, 64, 0, 2, 1, 2, True, False)
@example(257, 16, 70, 1, 0, 0, 2, False, False)
@settings(
    max_examples=40, deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_each_element_leaves_once(
    in_integers, monkeypatch, num_cols, units, num_rows, row, col, batch, itemsize,
    interleaved, transposed,
):
  """Of pieces that begin anywhere in the array, and reach beyond it."""
  array = num_rows, num_cols
  out = 1 << 20 | batch * num_rows * num_cols * itemsize
  cols = 8 * (units if itemsize == 2 else (units + 1) // 2)
  if transposed:
    cols = min(cols, 64)
  piece = np.arange(1.0, 64 * cols + 1).reshape(64, cols)
  place = out, row * 64, col * 8
  memory = stored(
      monkeypatch, piece, *place, array, itemsize, interleaved, transposed
  )
  assert memory.gmem == wanted(piece, *place, array, itemsize, interleaved, transposed)


@pytest.mark.parametrize("num_cols, edges", [(299, 8), (298, 4), (300, 2), (304, 0)])
def test_units_leave_whole(in_integers, monkeypatch, num_cols, edges):
  """At most one unit of a row leaves in parts."""
  piece = np.ones((64, 256))
  memory = stored(monkeypatch, piece, 0, 0, 0, (64, num_cols), 2, False, False)
  requests = [len(found) for found in memory.requests if found]
  units = requests.count(8)
  assert units == 64 * 31 + sum(num_cols * i % 8 == 0 for i in range(64))
  assert len(requests) - units == (64 * 32 - units) * edges


@pytest.mark.parametrize("kernel", ["persistent", "pipelined", "direct"])
def test_lowers_for_cuda(kernel):
  for n, dtype in ((571, "bfloat16"), (1062, "bfloat16"), (571, "float32")):
    problem = make_problem(205, n, 328, "NN", "bfloat16", out_dtype=dtype, batch=2)
    fields = dict(tile_m=64) if kernel == "pipelined" else {}
    lowered(kernel, problem, small_config(kernel, **fields))
