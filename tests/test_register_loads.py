"""Which thread loads which 16 bytes of a tile that comes through registers.

The loads themselves run on the chip alone (tests/test_gpu.py).
"""

from __future__ import annotations

import collections

import pytest

from pallas_kernels import direct, register_loads, tiles
from pallas_kernels.configs import DirectConfig
from pallas_kernels.problem import Problem
from pallas_kernels.register_loads import CHUNK, RegisterLoads
from tests.kernel_cases import lowered, make_problem, small_config

WIDTH = 64  # Elements of a block's row.


def chunks(loads: RegisterLoads) -> collections.Counter[tuple[int, int]]:
  """How often (row, first column) of each chunk of the tile is loaded."""
  found = collections.Counter()
  for row, col in loads.blocks():
    for thread in range(tiles.WG_THREADS):
      down, across = divmod(thread, loads.chunks_across)
      found[row + down, col + across * CHUNK] += 1
  assert loads.num_chunks * tiles.WG_THREADS == found.total()
  return found


@pytest.mark.parametrize("depth", [16, 32, 48, 64])
@pytest.mark.parametrize("rows", [16, 48, 64, 96, 128, 192, 256])
def test_k_major_tiles_are_loaded_once_as_far_as_they_are_wanted(rows, depth):
  found = chunks(RegisterLoads.of(1000, depth, rows, WIDTH, k_major=True, depth=depth))
  assert set(found.values()) == {1}
  wanted = {(row, col) for row in range(rows) for col in range(0, depth, CHUNK)}
  assert wanted <= found.keys()
  assert max(row for row, _ in found) < rows
  if rows % 64 == 0:  # And little more: as much as a power of two has.
    assert len(found) <= max(2 * len(wanted) - 2 * rows, len(wanted))


@pytest.mark.parametrize(("mn", "rows"), [(1, 16), (19, 32), (64, 64), (100, 64)])
def test_no_rows_are_loaded_beyond_those_that_there_are(mn, rows):
  """But those of a round."""
  found = chunks(RegisterLoads.of(mn, 1000, 64, WIDTH, k_major=True, depth=64))
  assert {row for row, _ in found} == set(range(rows))


@pytest.mark.parametrize("depth", [16, 32, 48, 64])
@pytest.mark.parametrize("cols", [64, 128, 256])
def test_other_tiles_are_loaded_in_as_many_rows_as_are_wanted(cols, depth):
  loads = RegisterLoads.of(1000, depth, cols, WIDTH, k_major=False, depth=depth)
  assert chunks(loads) == collections.Counter(
      (row, col) for row in range(depth) for col in range(0, cols, CHUNK)
  )


@pytest.mark.parametrize("depth", [16, 32, 48, 64])
@pytest.mark.parametrize("mn", [1, 8, 23, 32, 33, 64, 1000])
@pytest.mark.parametrize("tile_mn", [16, 32, 48, 64, 96])
def test_of_few_columns_no_more_are_loaded_than_a_power_of_two(tile_mn, mn, depth):
  loads = RegisterLoads.of(mn, 1000, tile_mn, WIDTH, k_major=False, depth=depth)
  found = chunks(loads)
  assert set(found.values()) == {1}
  cols = min(tile_mn, mn)
  wanted = {(row, col) for row in range(depth) for col in range(0, cols, CHUNK)}
  assert wanted <= found.keys()
  # Within the slot, and within the rows that the guard of k knows of.
  assert max(row for row, _ in found) < loads.taken <= WIDTH
  assert max(col for _, col in found) < loads.tile_cols
  # No thread has more chunks than with a block's columns, nor than half of it needs.
  most = tiles.cdiv(depth, 16) * tiles.cdiv(cols, WIDTH)
  assert loads.num_chunks <= most
  if cols <= 32 and depth == 64:
    assert loads.num_chunks <= most / 2
  if loads.num_chunks == most:  # Nothing gained: none beyond the depth either.
    assert loads.taken == depth


@pytest.mark.parametrize("mn", [8, 23, 32, 40, 64, 72, 96, 128, 200])
@pytest.mark.parametrize("tile_mn", [16, 32, 48, 64, 96, 128])
@pytest.mark.parametrize("depth", [16, 64])
def test_an_edge_is_where_a_tile_loads_what_lies_beyond_the_columns(depth, tile_mn, mn):
  loads = RegisterLoads.of(mn, 1000, tile_mn, WIDTH, k_major=False, depth=depth)
  last = max(col for _, col in chunks(loads)) + CHUNK
  assert loads.has_edge == any(
      start + last > mn for start in range(0, mn, tile_mn)
  )


@pytest.mark.parametrize(
    ("k", "some"), [(32, False), (48, True), (64, False), (112, True)]
)
def test_threads_beyond_the_depth_of_a_row_take_what_others_take(k, some):
  """The array may end there. Six of eight threads have something of 48."""
  module = lowered("direct", make_problem(64, 64, k, "NT"), small_config("direct"))
  assert ("arith.minui" in module) == some


@pytest.mark.parametrize(
    ("k", "fields", "depths"),
    [
        (3, {}, (16,)),
        (16, {}, (16,)),
        (33, {}, (48,)),
        (64, {}, (64,)),
        (65, {}, (64, 16)),
        (240, {}, (64, 64, 64, 48)),
        (240, dict(promote=4), (64, 64, 64, 48)),
        (240, dict(promote=2), (64,) * 4),  # The last is added with the one before.
        (240, dict(splits=2), (64,) * 2),  # Of CTAs with other shares.
        (16 * 64 + 8, {}, (64,) * 13),  # The groups of k tiles are alike.
    ],
)
def test_direct_loads_no_more_of_the_last_k_tile_than_there_is(k, fields, depths):
  assert direct.depths(Problem(100, 100, k), DirectConfig(**fields)) == depths


def _copied(problem, config) -> dict[str, bool]:
  """Whether threads copy each operand, of all k tiles alike."""
  names, loads = zip(*direct.loads(problem, config), strict=True)
  found = set(zip(names, register_loads.copied(loads), strict=True))
  assert len(found) == 2
  return dict(found)


@pytest.mark.parametrize(
    ("size", "layouts", "copied"),
    [
        ((256, 256, 64), "NN", True), ((256, 256, 384), "TT", True),
        ((256, 256, 24), "NT", False),  # Few.
        ((256, 250, 384), "NN", False), ((250, 256, 384), "TN", False),  # Shifted.
    ],
    ids=str,
)
def test_many_aligned_chunks_are_copied(size, layouts, copied):
  problem, config = make_problem(*size, layouts), DirectConfig(64, 64)
  assert _copied(problem, config) == dict(lhs=copied, rhs=copied)
  module = lowered("direct", problem, config)
  assert ("cp.async.cg" in module) == ("cp.async.wait_all" in module) == copied
  assert ("ld.global" in module) == (not copied)


def test_what_all_ctas_ask_for_in_parts_of_lines_is_loaded():
  for size, layouts, fields, copied in (
      ((48, 512, 192), "TN", {}, (False, True)),
      ((512, 48, 192), "NN", {}, (True, False)),
      ((512, 16, 192), "NN", dict(tile_n=16), (True, False)),
      ((16, 512, 168), "NT", {}, (False, True)),
      ((64, 512, 168), "NT", {}, (False, True)),
      ((512, 16, 168), "NT", {}, (True, False)),
      ((48, 48, 192), "TN", {}, (False, False)),
      ((64, 512, 192), "TN", {}, (True, True)),  # Whole lines.
      ((48, 512, 192), "NT", {}, (True, True)),
      ((72, 512, 168), "TN", {}, (True, True)),  # Of two tiles each CTA asks for one.
      ((48, 512, 8 * 64), "TN", {}, (False, True)),
      ((48, 512, 9 * 64), "TN", {}, (True, True)),  # 36 loads, one after the other.
  ):
    problem = make_problem(*size, layouts)
    config = DirectConfig(**dict(tile_m=64, tile_n=64) | fields)
    expected = dict(zip(("lhs", "rhs"), copied, strict=True))
    assert _copied(problem, config) == expected, (size, layouts, fields)


@pytest.mark.parametrize(
    ("size", "layouts"), [((48, 512, 192), "TN"), ((512, 16, 168), "NT")], ids=str
)
def test_copies_are_on_their_way_before_loads_are_waited_for(size, layouts):
  module = lowered("direct", make_problem(*size, layouts), DirectConfig(64, 64))
  assert "cp.async.wait_all" in module
  assert module.index("cp.async.cg") < module.index("ld.global")


@pytest.mark.parametrize(
    ("size", "layouts", "asks_for_all"),
    [((256, 256, 192), "NT", True), ((200, 256, 192), "NT", True),
     ((200, 200, 192), "NT", False), ((256, 200, 192), "NN", True),
     ((200, 200, 192), "TN", False)],
    ids=str,
)
def test_what_lies_beyond_an_edge_is_not_copied(size, layouts, asks_for_all):
  """Copies of other rows in its place had CTAs ask for the same lines again."""
  module = lowered("direct", make_problem(*size, layouts), DirectConfig(64, 64))
  assert ("cp.async.cg.shared.global [$0], [$1], 16;" in module) == asks_for_all
  assert "cp.async.cg.shared.global [$0], [$1], 16, $2;" in module  # Beyond k.


@pytest.mark.parametrize(
    ("fields", "k", "slots"),
    [(dict(), 320, 5), (dict(), 2560, 13), (dict(tile_n=16), 2560, 16),
     (dict(tile_m=128), 2560, 9), (dict(splits=8), 25600, 11)],
    ids=str,
)
def test_direct_has_as_many_slots_as_there_is_room_for(fields, k, slots):
  problem = make_problem(512, 512, k, "NT")
  config = DirectConfig(**dict(tile_m=64, tile_n=64) | fields)
  assert direct.num_slots(problem, config) == slots
  assert direct.supports(problem, config) is None
