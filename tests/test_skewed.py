"""lhs that TMA copies skewed: what TMA reads, and the kernels that take it."""

from __future__ import annotations

import dataclasses
import itertools
import math

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from jaxgemm import heuristics
from jaxgemm.device import known_device
from pallas_kernels import KERNELS, fragments, skewed
from pallas_kernels.problem import Epilogue
from tests import kernel_cases
from tests.kernel_cases import check, lowered, make_problem, small_config

pytestmark = pytest.mark.slow  # The other JAX version need not run them too.

FIELDS = kernel_cases.SKEWED_FIELDS


@pytest.fixture
def in_integers(monkeypatch):
  kernel_cases.compute_in_integers(monkeypatch, fragments, skewed)


def copied(
    tile: skewed.Skewed, flat: np.ndarray, row: int, col: int, batch: int = 0
) -> np.ndarray:
  """What `Skewed.load` has TMA put into a slot, by TMA's rules; checks those."""
  slot = np.full(tile.slot_shape, np.nan)
  _, rows, width = tile.slot_shape
  assert width * 2 % 16 == 0 and max(rows, width) <= 256  # Of a box.
  first = batch * tile.product_rows + row
  places = set()
  for array in range(skewed.ARRAYS):
    view = tile.view(array)
    place, begin, start = tile._begin(array, first, col)
    places.add(place)
    # Its address, strides and the box's begin at multiples of 16 bytes, within memory.
    assert view.offset % 8 == view.pitch % 8 == start % 8 == 0 <= view.offset
    assert view.offset + (view.rows - 1) * view.pitch + view.cols <= flat.size
    for i in range(rows):
      for x in range(width):
        at = begin + i, start + x
        inside = at[0] < view.rows and 0 <= at[1] < view.cols
        value = flat[view.offset + at[0] * view.pitch + at[1]] if inside else 0.0
        slot[place, i, x] = value
  assert places == set(range(skewed.ARRAYS))
  return slot


@given(
    rows=st.integers(8, 90), cols=st.integers(1, 140), k_major=st.booleans(),
    place=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    of=st.integers(1, 4).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 1))),
)
@settings(
    max_examples=40, deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_elements_are_where_consumers_look_for_them(
    in_integers, rows, cols, k_major, place, of
):
  """All of a product's tile within the array; zeros beyond k."""
  products, batch = of
  if products > 1 and not k_major:
    rows = 64
  product_rows = rows if products > 1 else 0
  tile = skewed.Skewed(products * rows, cols, 64, k_major, "bfloat16", product_rows)
  row, col = (64 * at for at in place)
  flat = 1.0 + np.arange(products * rows * cols, dtype=np.float64)
  slot = copied(tile, flat, row, col, batch)
  wanted = np.zeros((row + 64, col + 64))
  shown = flat.reshape(products, rows, cols)[batch, : row + 64, : col + 64]
  wanted[: shown.shape[0], : shown.shape[1]] = shown
  for r in range(64):
    at, i = r % 8, r // 8
    first = tile.lead(at) + tile.skew((at + tile.rotation(batch)) % 8)
    found = slot[at, i, first : first + 64]
    # What lies beyond the columns of an m-major lhs is not stored: anything may. Nor are
    # rows of the next product.
    valid = 64 if k_major else max(0, min(64, cols - col))
    if product_rows and row + r >= rows:
      continue
    np.testing.assert_array_equal(found[:valid], wanted[row + r, col : col + valid])


def test_rows_of_a_fragment(in_integers):
  """Each row of 64 once; a warp's are those of two arrays."""
  named = np.array([fragments.row_of("eighths", row) for row in range(64)])
  assert sorted(named) == list(range(64))
  for warp in range(4):
    assert set(named[16 * warp : 16 * warp + 16] % 8) == {2 * warp, 2 * warp + 1}


@pytest.mark.parametrize("cols", [201, 202, 204, 207])
@pytest.mark.parametrize("batch", [0, 1, 6])
@pytest.mark.parametrize("k_major", [True, False])
def test_threads_load_their_elements(in_integers, monkeypatch, k_major, batch, cols):
  """Each thread's words are the elements that wgmma's fragment has there."""
  rows = 131 if k_major or not batch else 192
  product_rows = rows if batch else 0
  tile = skewed.Skewed((batch + 1) * rows, cols, 128, k_major, "bfloat16", product_rows)
  flat = 1.0 + np.arange((batch + 1) * rows * cols, dtype=np.float64)
  slot = copied(tile, flat, 0, 64 if k_major else 0, batch).ravel()
  matrix = flat.reshape(-1, rows, cols)[batch]
  matrix = matrix[:128, 64:128] if k_major else matrix[:64, :128].T  # Of (m, k).

  def load(kind, element, offset):
    at, rest = divmod(2 * element + offset, 2)
    assert rest == 0 and (kind != "b32" or at % 2 == 0)
    return slot[at : at + 2] if kind == "b32" else slot[at]

  monkeypatch.setattr(skewed.fragments, "address", lambda _, element: element)
  monkeypatch.setattr(skewed.fragments, "load", load)
  for thread, start in itertools.product(range(128), (0, 64)):
    warp, group, lane = thread // 32, thread % 32 // 4, thread % 4
    monkeypatch.setattr(skewed, "place_of_fragment", lambda at=(warp, group, lane): at)
    if k_major:
      words = tile._from_rows(None, start, tile.rotation(batch))
    else:
      words = tile._from_columns(None, start)
    for i, (first, second) in enumerate(words):
      block, half = divmod(i, 2)
      row = 16 * warp + 8 * half + group
      row = start + (fragments.row_of("eighths", row) if k_major else row)
      found = first if tile._is_whole(half) else (first, second)
      k = 8 * block + 2 * lane
      assert tuple(found) == tuple(matrix[row, k : k + 2])


@pytest.mark.parametrize(("layouts", "swap"), kernel_cases.SKEWED)
@pytest.mark.parametrize(
    ("kernel", "fields"),
    [("persistent", {}), ("split_k", dict(splits=2)),
     ("split_k", dict(splits=2, cluster_k=2))], ids=str,
)
def test_lowers_for_cuda(kernel, fields, layouts, swap):
  config = small_config(kernel, swap=swap, **FIELDS, **fields)
  k_major = layouts[1] == "T" if swap else layouts[0] == "N"
  for batch, k in ((1, 333), (3, 333 if k_major else 320)):
    problem = make_problem(205, 203, k, layouts, batch=batch)
    assert KERNELS[kernel].supports(problem, config) is None
    assert f"jaxgemm_{kernel}" in lowered(kernel, problem, config)


@pytest.mark.parametrize("fields", [dict(consumers=2, tile_m=128), dict(num_stages=3)])
def test_more_configs_lower(fields):
  config = small_config("persistent", **FIELDS | fields)
  for epilogue in (
      Epilogue(), Epilogue(alpha=0.5, has_bias=True, activation="gelu", saves=True)
  ):
    problem = make_problem(205, 203, 333, "NN", epilogue=epilogue)
    assert "jaxgemm_persistent" in lowered("persistent", problem, config)


@pytest.mark.parametrize(("layouts", "swap"), [("NN", False), ("TT", True)])
def test_emulated(layouts, swap):
  """The emulator pads such operands, and goes the usual way otherwise."""
  config = small_config("persistent", swap=swap, **FIELDS)
  check("persistent", make_problem(130, 72, 203, layouts), config)


@pytest.mark.parametrize(
    ("problem", "fields", "named"),
    [
        (dict(k=328), {}, "TMA strides over"),
        (dict(dtype="float32"), dict(tile_k=32), "16-bit operands, not float32"),
        (dict(m=7), {}, "has 7 rows"),
        (dict(batch=2, layouts="TN"), {}, "333 rows of k would reach into the next"),
        (dict(layouts="TN"), dict(tile_m=256, consumers=2), "TMA copies 256"),
        ({}, dict(tile_k=128), "tile_k=128"),
        ({}, dict(tile_m=128), "64 rows of a tile"),
        ({}, dict(consumers=2, wg_dim="n"), "all columns of a tile"),
        ({}, dict(cluster_n=2), "excludes cluster_n"),
        (dict(epilogue=Epilogue(beta=1.0, c_dtype="bfloat16")), {}, "excludes c"),
        (dict(epilogue=Epilogue(has_bias=True)), dict(swap=True), "excludes bias"),
    ],
    ids=str,
)
def test_supports_names_the_constraint(problem, fields, named):
  layouts = problem.pop("layouts", "NN")
  problem = make_problem(**dict(dict(m=205, n=203, k=333), **problem), layouts=layouts)
  config = small_config("persistent", **FIELDS | fields)
  assert named in KERNELS["persistent"].supports(problem, config)


@pytest.mark.parametrize(
    ("size", "layouts", "skews"),
    [
        ((8192, 768, 50257), "NN", True), ((50257, 768, 8192), "TN", True),
        ((72, 5139, 8367), "NT", True), ((419, 7020, 9414), "TN", True),
        ((333, 777, 22223), "TN", True),
        ((4096, 4096, 4096), "NN", False), ((200, 333, 333), "NN", False),
    ],
    ids=str,
)
def test_plans(size, layouts, skews):
  """Large operands, a pass over which would take long, come skewed."""
  device = known_device("NVIDIA H200")
  best = heuristics.candidates(make_problem(*size, layouts), device)[0]
  assert (getattr(best.config, "misaligned", None) == "skewed") == skews


def test_a_skewed_operand_takes_no_pass():
  device = known_device("NVIDIA H200")
  problem = make_problem(8192, 768, 50257, "NN")
  listed = heuristics.candidates(problem, device)
  best = next(c for c in listed if c.config.misaligned == "skewed")
  other = dataclasses.replace(best.config, misaligned="padded")
  assert "padding" not in best.reason and math.isfinite(best.time_us)
  assert KERNELS["persistent"].supports(problem, other) is None
