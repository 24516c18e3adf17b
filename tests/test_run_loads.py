"""lhs that comes in runs of whole rows: each thread followed, and the kernels."""

from __future__ import annotations

import dataclasses
import itertools

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from jaxgemm import cost_model, heuristics
from jaxgemm.device import known_device
from pallas_kernels import KERNELS, run_loads
from pallas_kernels.problem import Epilogue
from tests import kernel_cases
from tests.gpu_cases import check as check_on_gpu
from tests.gpu_cases import launch
from tests.kernel_cases import check, lowered, make_problem, small_config

FIELDS = kernel_cases.RUN_FIELDS
H200 = known_device("NVIDIA H200")


@pytest.fixture
def in_integers(monkeypatch):
  kernel_cases.compute_in_integers(monkeypatch, run_loads)


def copied(run: run_loads.Run, flat: np.ndarray, batch: int, row: int) -> np.ndarray:
  """What `Run.load` has copied into a slot, by the rules of bulk copies; checks those.
  """
  slot = np.full(run.slot_elements, np.nan)
  begin, num_bytes, end = run._places(flat.size, batch, row, 1)
  assert begin % 16 == num_bytes % 16 == 0 <= begin
  assert 0 <= num_bytes <= 2 * run.slot_elements
  assert begin + num_bytes <= 2 * flat.size
  first = begin // 2
  slot[: num_bytes // 2] = flat[first : first + num_bytes // 2]
  at = num_bytes // 2 + np.arange(8)  # By threads, those that are wanted.
  at = at[(2 * at < end) & (flat.size % 8 > 0)]
  slot[at] = flat[first + at]
  return slot


def shown(
    run: run_loads.Run, flat: np.ndarray, place: tuple[int, int, int], monkeypatch
) -> np.ndarray:
  """The fragments of all rows of a tile at (batch, row, first of k), as (m, k)."""
  batch, row, first = place
  slot = copied(run, flat, batch, row)
  k = run.cols if run.k_major else run.rows
  valid = k - (first if run.k_major else row)
  found = np.full((run.tile_m, 64), np.nan)

  def load(kind, element, offset, valid, at):
    element, rest = divmod(2 * element + offset, 2)
    count = 2 if kind == "b32" else 1
    values = np.zeros(count)
    if at < valid:
      assert rest == 0 and element % count == 0 <= element
      assert element + count <= run.slot_elements
      values = slot[element : element + count]
    return values if kind == "b32" else values[0]

  with monkeypatch.context() as patch:
    patch.setattr(run_loads.fragments, "address", lambda _, element: element)
    patch.setattr(run_loads.fragments, "load_within", load)
    for thread, start in itertools.product(range(128), range(0, run.tile_m, 64)):
      warp, group, lane = thread // 32, thread % 32 // 4, thread % 4
      patch.setattr(run_loads, "place_of_fragment", lambda at=(warp, group, lane): at)
      words = run._from_rows if run.k_major else run._from_columns
      at = None, start, run.phase(batch, row), first if run.k_major else 0, valid
      for i, (low, high) in enumerate(words(*at)):
        block, half = divmod(i, 2)
        pair = low if run._is_whole else (low, high)
        col = 8 * block + 2 * lane
        found[start + 16 * warp + 8 * half + group, col : col + 2] = pair
  return found


@given(
    rows=st.integers(1, 150), cols=st.integers(1, 150), k_major=st.booleans(),
    batched=st.booleans(), at=st.integers(0, 2), batch=st.integers(0, 7),
    tile_m=st.sampled_from([64, 128]),
)
@settings(
    max_examples=40, deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_threads_find_their_elements(
    in_integers, monkeypatch, rows, cols, k_major, batched, at, batch, tile_m
):
  """All of a tile that the product has; zeros beyond k, whatever lies there."""
  tile_m = tile_m if k_major else -(-cols // 64) * 64
  run = run_loads.Run(rows, cols, tile_m, k_major, "bfloat16", batched)
  products = 8 if batched else 1  # So that the array ends with a unit, not each of them.
  flat = 1.0 + np.arange(products * rows * cols, dtype=np.float64)
  row = at * run.tile_rows % (-(-rows // run.tile_rows) * run.tile_rows)
  first = 64 * at if k_major and 64 * at < cols else 0
  found = shown(run, flat, (batch, row, first), monkeypatch)
  stored = flat.reshape(products, rows, cols)[batch if batched else 0]
  matrix = stored[row:, first:] if k_major else stored[row:].T
  wanted = np.zeros((tile_m, 64))
  part = matrix[:tile_m, :64]
  wanted[: part.shape[0], : part.shape[1]] = part
  # What comes of rows of m that there are not is not stored: anything may.
  np.testing.assert_array_equal(found[: part.shape[0]], wanted[: part.shape[0]])
  assert (found[:, part.shape[1] :] == 0).all()


@pytest.mark.parametrize("size", [15 * 7, 16 * 8])
def test_nothing_is_copied_of_no_rows(in_integers, size):
  """Where split-k has more steps than k, or a tile that stays has come already."""
  run = run_loads.Run(15, size // 15, 64, False, "bfloat16", False)
  for row in (15, 16, 64, 640):
    _, num_bytes, end = run._places(run.rows * run.cols, 0, row, 1)
    assert num_bytes == end == 0
  _, num_bytes, end = run._places(run.rows * run.cols, 0, 0, 0)
  assert num_bytes == end == 0


@given(
    stages=st.integers(2, 16), k_steps=st.integers(1, 9), late=st.randoms()
)
def test_slots_of_tiles_that_stay(stages, k_steps, late):
  """None is filled while a step that has not been read needs it, however late that is."""
  slots = run_loads.num_slots(stages, k_steps, k_major=True)
  read = 0  # Steps.
  for step in range(6 * slots * k_steps):
    read = max(read, step - stages + 1)  # The ring waits for those.
    read = late.randint(read, step)
    if step % k_steps == 0:
      before = (step // k_steps - slots) * k_steps  # The tile that the slot had.
      assert before < 0 or before + k_steps <= max(step - stages + 1, 0)


@pytest.mark.parametrize(
    ("cols", "k_major", "wanted"),
    [(197, True, 2), (257, True, 7.5), (33, True, 4), (197, False, 1), (129, False, 4)],
)
def test_conflicts(cols, k_major, wanted):
  assert run_loads.conflicts(cols, k_major=k_major) == wanted


def test_rows_that_begin_in_the_same_bank_cost_more():
  config = small_config("persistent", **FIELDS | dict(tile_m=128, consumers=2))
  crowded, spread = (
      cost_model.estimate(
          make_problem(200, 64, k, "NN", batch=256), "persistent", config, H200
      ).time_us
      for k in (257, 259)
  )
  assert crowded > 1.5 * spread


CASES = [  # Sizes, layouts, kernel, fields.
    ((205, 203, 141), "NN", "persistent", {}),
    ((205, 203, 141), "NT", "persistent", dict(tile_m=128, consumers=2)),
    ((205, 200, 140), "NN", "persistent", dict(consumers=2, wg_dim="tile")),
    ((205, 203, 141), "NT", "persistent", dict(tile_m=256, consumers=2)),
    ((205, 203, 142), "NN", "persistent", dict(cluster_m=2, num_stages=3)),
    ((200, 208, 141), "TT", "persistent", dict(swap=True)),
    ((200, 21, 333), "NN", "persistent", dict(swap=True)),
    ((99, 203, 333), "TN", "persistent", dict(tile_m=128, consumers=2)),
    ((197, 72, 333), "TT", "persistent", dict(tile_m=256, consumers=2, tile_n=72)),
    ((150, 203, 320), "TN", "persistent", dict(tile_m=192, consumers=3)),
    ((99, 203, 333), "TN", "split_k", dict(tile_m=128, splits=2)),
    ((99, 203, 960), "TN", "split_k", dict(tile_m=128, splits=4, cluster_k=2)),
    ((99, 203, 960), "TN", "split_k", dict(tile_m=128, splits=4, cluster_k=4)),
    ((200, 21, 999), "NN", "split_k", dict(splits=3, swap=True)),
]


@pytest.mark.parametrize(("size", "layouts", "kernel", "fields"), CASES, ids=str)
def test_lowers_for_cuda(size, layouts, kernel, fields):
  config = small_config(kernel, **FIELDS | fields)
  for batch in (1, 3):
    problem = make_problem(*size, layouts, batch=batch)
    assert KERNELS[kernel].supports(problem, config) is None
    assert f"jaxgemm_{kernel}" in lowered(kernel, problem, config)


def test_fused_results_lower():
  epilogue = Epilogue(alpha=0.5, has_bias=True, activation="gelu", saves=True)
  problem = make_problem(205, 203, 141, "NN", epilogue=epilogue)
  config = small_config("persistent", **FIELDS)
  assert "jaxgemm_persistent" in lowered("persistent", problem, config)


@pytest.mark.parametrize(("layouts", "swap"), [("NN", False), ("TT", True)])
def test_emulated(layouts, swap):
  """The emulator pads such operands, and goes the usual way otherwise."""
  config = small_config("persistent", swap=swap, **FIELDS)
  check("persistent", make_problem(130, 72, 141, layouts), config)


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "layouts", "kernel", "fields"), CASES, ids=str)
def test_on_a_gpu(size, layouts, kernel, fields):
  """Of every phase; inf and nan stay in their rows, and out of what is beyond k."""
  config = small_config(kernel, **FIELDS | fields)
  for batch in (1, 3):
    for more in (0, 1, 2):
      problem = make_problem(size[0] + more, *size[1:], layouts, batch=batch)
      if KERNELS[kernel].supports(problem, config) is None:
        check_on_gpu(kernel, problem, config)
  problem = make_problem(*size, layouts)
  lhs, rhs = (np.array(x) for x in kernel_cases.random_operands(problem))
  lhs[(0, 5) if problem.lhs_layout == "k-major" else (0, slice(None), 5)] = np.inf
  rhs[(0, 5) if problem.rhs_layout == "k-major" else (0, slice(None), 5)] = np.nan
  result = np.asarray(launch(kernel, problem, config, (lhs, rhs)))
  rest = np.delete(np.delete(result, 5, axis=1), 5, axis=2)
  assert np.isfinite(rest.astype(np.float32)).all()
  assert not np.isfinite(result[0, 5].astype(np.float32)).any()
  assert np.isnan(result[0, :, 5].astype(np.float32)).all()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("layouts", "size", "tile_m"),
    [("NN", (1024, 512, 141), 128), ("NT", (1024, 520, 205), 128),
     ("TN", (197, 512, 4096), 256), ("TT", (99, 520, 2047), 128)],
)
def test_sums_as_padded_lhs_does(layouts, size, tile_m):
  """Bit by bit: what `jaxgemm.invariance` relies on."""
  problem = make_problem(*size, layouts, out_dtype="float32")
  config = small_config(
      "persistent", promote=4, tile_m=tile_m, tile_n=64, consumers=2, num_stages=4
  )
  operands = kernel_cases.random_operands(problem)
  found = [
      np.asarray(launch("persistent", problem, each, operands))
      for each in (config, dataclasses.replace(config, misaligned="runs"))
  ]
  np.testing.assert_array_equal(*found)


@pytest.mark.parametrize(
    ("problem", "fields", "named"),
    [
        (dict(k=144), {}, "TMA strides over"),
        (dict(dtype="float32"), dict(tile_k=32), "16-bit operands, not float32"),
        (dict(layouts="TN"), {}, "all of m=205 rows"),
        ({}, dict(tile_k=128), "tile_k=128"),
        ({}, dict(tile_n=128, consumers=2, wg_dim="n"), "all columns of a tile"),
        ({}, dict(tile_n=384), "too few registers"),
        ({}, dict(tile_m=128, tile_n=192), "too few registers"),
        ({}, dict(cluster_n=2), "excludes cluster_n"),
        (dict(k=2001), {}, "shared memory"),
        (dict(epilogue=Epilogue(beta=1.0, c_dtype="bfloat16")), {}, "excludes c"),
    ],
    ids=str,
)
def test_supports_names_the_constraint(problem, fields, named):
  layouts = problem.get("layouts", "NN")
  problem = {name: each for name, each in problem.items() if name != "layouts"}
  problem = make_problem(**dict(dict(m=205, n=203, k=141), **problem), layouts=layouts)
  config = small_config("persistent", **FIELDS | fields)
  assert named in KERNELS["persistent"].supports(problem, config)


def test_split_k_takes_no_tiles_of_all_of_k():
  config = small_config("split_k", **FIELDS, splits=2)
  reason = KERNELS["split_k"].supports(make_problem(205, 203, 141, "NN"), config)
  assert "all of k" in reason


@pytest.mark.parametrize(
    ("size", "batch", "layouts", "runs"),
    [
        ((197, 64, 197), 512, "NN", True), ((197, 64, 197), 512, "TN", True),
        ((768, 50176, 147), 1, "TT", True), ((197, 64, 200), 512, "NN", False),
        ((257, 64, 257), 256, "NN", False),  # Rows that begin in the same bank.
        ((64, 72, 141), 1, "NN", False),
    ],
    ids=str,
)
def test_plans(size, batch, layouts, runs):
  problem = make_problem(*size, layouts, batch=batch)
  best = heuristics.candidates(problem, H200)[0]
  assert (getattr(best.config, "misaligned", None) == "runs") == runs
  assert "padding lhs" not in best.reason
