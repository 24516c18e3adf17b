"""The last tile of an operand: what lies beyond it is not loaded."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from pallas_kernels import operand_tiles
from tests.kernel_cases import (
  check,
  copies,
  make_problem,
  mostly_slow,
  small_config,
)

# (kernel, fields, sizes, layouts): last tiles of fewer rows, or chunks, than others.
CASES = (
    ("persistent", dict(tile_m=64, tile_n=320, consumers=1), (72, 328, 200), "NT"),
    ("persistent", dict(cluster_m=2), (328, 72, 140), "NT"),  # A CTA works outside.
    ("persistent", dict(cluster_n=2), (72, 328, 140), "TN"),
    ("persistent", dict(tile_m=192, wg_dim="tile"), (200, 136, 140), "TT"),
    ("persistent", dict(cluster_m=2, cluster_n=2), (152, 136, 140), "NT"),
    ("persistent", dict(tile_n=48, swap=True, cluster_m=2), (72, 328, 140), "NN"),
    ("split_k", dict(tile_n=192, cluster_k=2), (136, 264, 200), "NT"),
    ("pipelined", dict(tile_m=64, tile_n=192), (72, 200, 140), "NN"),
    ("pipelined", dict(tile_m=64), (72, 136, 140), "TT"),
    ("blocked", {}, (136, 200, 140), "TN"),
)


@pytest.mark.parametrize("case", mostly_slow(CASES, 4), ids=str)
def test_results_are_right(case):
  kernel, fields, sizes, layouts = case
  problem = make_problem(*sizes, layouts)
  check(kernel, problem, small_config(kernel, **fields), num_sms=4)


@pytest.mark.parametrize("kernel", ["persistent", "pipelined"])
def test_rows_beyond_the_last_are_not_loaded(kernel):
  """328 rows are two tiles of 128, and 72; 200 one, and 72."""
  found = copies(kernel, {}, make_problem(328, 200, 128, "NT"))
  whole = [rows for predicated, rows, _ in found if not predicated]
  assert sorted(set(whole)) == [72, 128]
  # Behind the last: nowhere but in a cluster, or a group of rows.
  assert {rows for predicated, rows, _ in found if predicated} == {128}


def test_clusters_share_the_rows_of_the_last_tile():
  """Each CTA copies whole rows of tiles of 8 rows: 72 rows are 80 for two."""
  found = copies("persistent", dict(cluster_n=2), make_problem(200, 512, 128, "NT"))
  assert {rows for predicated, rows, _ in found if not predicated} == {128, 80}


def test_no_copy_asks_where_tiles_divide_the_operand():
  for layouts in ("NT", "TN"):
    found = copies("persistent", {}, make_problem(256, 384, 128, layouts))
    assert found and not any(predicated for predicated, *_ in found)


def test_chunks_beyond_the_last_are_not_loaded():
  """Whole tiles do not ask; in the last, each chunk of 64 columns does."""
  found = copies("persistent", {}, make_problem(200, 328, 128, "TN"))
  assert set(found) == {(False, 64, 64), (True, 64, 64)}
  assert sum(predicated for predicated, *_ in found) * 2 == len(found)


@dataclasses.dataclass(frozen=True)
class _Place:
  """A reference that only tells what part of it was asked for."""

  index: Any = None

  @property
  def at(self):
    return self

  def __getitem__(self, index):
    return _Place(index)


@pytest.mark.parametrize(
    "way, tile, mn, sizes",
    [
        ("flat", 128, 328, {0: [128], 128: [128], 256: [72], 384: []}),
        # No tile of `persistent` begins there, but one of a group of rows may.
        ("flat", 128, 328, {200: [128], 264: [128]}),
        ("flat", 128, 256, {0: [128], 128: [128]}),
        ("flat", 320, 392, {0: [192, 128], 320: [72]}),  # In two boxes.
        ("chunks", 128, 296, {0: [64, 64], 128: [64, 64], 256: [64], 384: []}),
    ],
)
def test_what_each_tile_loads(way, tile, mn, sizes, monkeypatch):
  operand = operand_tiles.Operand(
      is_lhs=True, k_major=way == "flat", tile_mn=tile, tile_k=64, dtype="bfloat16",
      batched=False, mn=mn, k=64, way=way, emulated=False,
  )
  for start, expected in sizes.items():
    copied = []

    def copy(source, dst, barrier, *, collective_axes, predicate=True, copied=copied):
      if predicate:
        _, rows, cols = source.index
        copied.append((rows if operand.k_major else cols).size)
        assert collective_axes is None

    monkeypatch.setattr(operand_tiles.plgpu, "copy_gmem_to_smem", copy)
    operand.load([_Place()], _Place(), 0, _Place(), batch=0, mn=start, k=0)
    assert copied == expected, start


@pytest.mark.parametrize(
    "tile, shared, mn, copies, sizes",
    [
        (128, 2, 328, 1, {0: ([128], []), 256: ([80], [])}),
        (88, 4, 176, 2, {0: ([64], [24]), 88: ([64], [24])}),
        # Eight rows of each of 25 are one tile too many for two.
        (200, 2, 600, 2, {0: ([192], [8]), 400: ([192], [8])}),
        (200, 2, 496, 2, {0: ([192], [8]), 400: ([96], [])}),
        (376, 2, 376, 3, {0: ([192, 176], [8])}),
    ],
    ids=str,
)
def test_what_ctas_of_a_cluster_share(tile, shared, mn, copies, sizes, monkeypatch):
  """(Rows that they copy together, rows that each copies for itself) of each tile."""
  operand = operand_tiles.Operand(
      is_lhs=False, k_major=True, tile_mn=tile, tile_k=64, dtype="bfloat16",
      batched=False, mn=mn, k=64, way="flat", emulated=False, shared=shared,
  )
  assert operand.num_copies == copies
  for start, (together, apart) in sizes.items():
    found, arrivals = {None: [], (operand.shared_along,): []}, []

    def copy(source, dst, barrier, *, collective_axes, predicate=True, found=found,
             arrivals=arrivals):
      arrivals.append(barrier)
      if predicate:
        found[collective_axes].append(source.index[1].size)

    monkeypatch.setattr(operand_tiles.plgpu, "copy_gmem_to_smem", copy)
    operand.load([_Place()], _Place(), 0, _Place(), batch=0, mn=start, k=0)
    assert (found[("cluster_m",)], found[None]) == (together, apart), start
    assert len(arrivals) == copies
    assert all(rows % (8 * shared) == 0 for rows in together)
