"""Tiles that overlap, so that each stores whole sectors of 32 bytes."""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
import types

import pytest

from jaxgemm import cost_model, heuristics, traffic
from jaxgemm.cost_constants import MODEL
from jaxgemm.device import known_device
from jaxgemm.work import Work
from pallas_kernels import KERNELS, epilogue_choice, sector_stores, staging, tiles
from pallas_kernels.configs import DirectConfig
from pallas_kernels.problem import Epilogue
from pallas_kernels.register_loads import RegisterLoads
from tests import gpu_cases, kernel_cases
from tests.kernel_cases import LAYOUTS, lowered, make_problem

H200 = known_device("NVIDIA H200")
ODD = 1001  # Columns.
OVERLAP = DirectConfig(64, 128, overlap=True)


def test_a_tile_has_as_much_of_the_next_as_a_sector_may_need():
  halos = {1000: 8, 1001: 16, 1002: 16, 1004: 16, 1008: 0, 1024: 0}
  assert {n: sector_stores.halo(n) for n in halos} == halos


@pytest.mark.parametrize("halo", [8, 16])
def test_pieces_cover_a_tile_and_have_the_halo_in_common(halo):
  for tile_n in range(48, 257, 16):
    cols = staging.sector_cols(tile_n, halo)
    assert halo < cols <= staging.WIDE_COLS and cols % 8 == 0
    problem = make_problem(64, {8: 1000, 16: ODD}[halo], 64)
    found = epilogue_choice.make_epilogue(
        problem, tile_n, 1, emulated=False, overlapping=True
    )
    assert (found.out.way, found.out.cols, found.halo) == ("sectors", cols, halo)
    starts = [start for _, start, _ in found.pieces((64, tile_n))]
    assert starts[0] == 0 and starts[-1] + cols == tile_n
    assert all(b - a <= cols - halo for a, b in itertools.pairwise(starts))


@pytest.mark.parametrize("size", [1, 100, 112, 113, 128, 129, 240, 1001])
def test_overlapping_tiles_cover_a_row(size):
  for tile, halo in ((128, 16), (64, 8), (128, 0)):
    last = tiles.last_start(size, tile, halo)
    assert last == (tiles.overlapping(size, tile, halo) - 1) * (tile - halo)
    assert last + tile >= size
    # The one before does not reach the end, but for what it shares with the last.
    assert last == 0 or last + halo < size


class _Slot:
  """What a piece's threads have read and stored, by hand."""

  def __init__(self, monkeypatch):
    kernel_cases.compute_in_integers(monkeypatch, sector_stores)
    monkeypatch.setattr(sector_stores, "behind", operator.add)
    self.stored, self.units, self.size = {}, [], 0
    slot = self

    class Words:

      def __init__(self, num_elements: int, itemsize: int):
        assert itemsize == 2
        self.count, self.num_bytes = num_elements, 2 * num_elements

      def load(self, address: int, offset: int) -> list[int]:
        first = (address + offset) // 2
        assert first % self.count == 0 <= first <= slot.size - self.count
        return list(range(first, first + self.count))

      def store(self, address: int, offset: int, values: list[int], inside) -> None:
        if not inside:
          return
        first = (address + offset) // 2
        assert first % self.count == 0, "not aligned"
        slot.units += [first] * (self.count > 1)
        for i, value in enumerate(values, first):
          assert slot.stored.setdefault(i, value) == value

    class Shift:

      def __init__(self, num_bytes: int):
        self.first = num_bytes % 16 // 2

      def of(self, values: list[int]) -> list[int]:
        return values[self.first : self.first + 8]

    monkeypatch.setattr(sector_stores, "Words", Words)
    loads = types.SimpleNamespace(Shift=Shift)
    monkeypatch.setattr(sector_stores, "register_loads", loads)


def test_tiles_store_each_element_and_whole_sectors(monkeypatch):
  """All threads of all tiles of the second of two products [70, n], by hand."""
  slot, rows = _Slot(monkeypatch), 70
  for n, tile_n in (
      (7, 64), (17, 64), (120, 64), (130, 64), (250, 128), (251, 240), (500, 128),
      (501, 128), (502, 240), (504, 192), (505, 192),
  ):
    every, owners = {}, {}
    for row in (0, 64):
      for tile in range(tiles.overlapping(n, tile_n, sector_stores.halo(n))):
        _store_tile(slot, (rows, n), tile_n, row, tile, every, owners)
    assert sorted(every) == list(range(rows * n, 2 * rows * n)), n
    # Sectors that two tiles store lie in two rows.
    for sector, its_tiles in owners.items():
      if len(its_tiles) > 1:
        assert 16 * sector // n != (16 * sector + 15) // n


def _store_tile(
    slot: _Slot, out_shape: tuple[int, int], tile_n: int, row: int, tile: int,
    every: dict[int, int], owners: dict[int, set[int]],
) -> None:
  """Adds what a tile stores to `every`, and to `owners` whose whole units are a sector's.
  """
  rows, n = out_shape
  halo, base = sector_stores.halo(n), rows * n
  cols = staging.sector_cols(tile_n, halo)
  out = staging.Staging("sectors", "bfloat16", cols, 1)
  pitch, slot.size = out.pitch, math.prod(out.slots().shape)
  assert out.num_bytes >= 2 * slot.size
  for start, _ in staging.starts(tile_n - halo, cols - halo):
    slot.stored.clear()
    slot.units.clear()
    col = tile * (tile_n - halo) + start
    piece = sector_stores._Piece(
        (64, cols), out_shape, pitch, halo, 0, 2 * base, row, col
    )
    for thread in range(128):
      piece.store_units(thread)
      if piece.has_begin:
        piece.store_first(thread)
      if piece.has_end:
        piece.store_last(thread)
    for to, value in slot.stored.items():
      within, element = divmod(value, pitch)
      assert to == base + (row + within) * n + col + element
      assert element < cols and within < 64
      every[to] = value
    for unit in slot.units:
      owners.setdefault(unit // 16, set()).add(tile)


def test_a_warp_writes_its_fragment_where_it_belongs(monkeypatch):
  """stmatrix: eight lanes have the addresses of the rows of each matrix of 8x8."""
  kernel_cases.compute_in_integers(monkeypatch, sector_stores)
  monkeypatch.setattr(sector_stores, "behind", operator.add)
  found = []
  utils = types.SimpleNamespace(
      inline_ptx=lambda text, address, *words, **_: found.append((text, address, words))
  )
  monkeypatch.setattr(sector_stores, "mgpu", types.SimpleNamespace(utils=utils))
  cols, pitch = 104, 104
  piece = sector_stores._Piece((64, cols), (64, ODD), pitch, 16, 0, 0, 0, 0)
  words, held = list(range(cols // 4)), {}  # Numbers of a thread's registers.
  for thread in range(128):
    piece.write(words, thread)
  per_thread = len(found) // 128
  for index in range(per_thread):
    for thread in range(128):
      text, address, some = found[thread * per_thread + index]
      offset = int(text.split("+ ")[1].split("]")[0])
      matrix, row = divmod(thread % 32, 8)
      assert f".x{len(some)}." in text
      if matrix < len(some):  # Others' addresses are not used.
        register = some[matrix]
        for col in range(8):
          lane = 4 * row + col // 2  # It has the elements.
          key = (thread // 32, lane, register, col % 2)
          held[key] = (address + offset) // 2 + col
  for warp in range(4):
    for lane in range(32):
      for register in words:
        block, half = divmod(register, 2)
        row = 16 * warp + 8 * half + lane // 4
        for odd in range(2):
          col = 8 * block + 2 * (lane % 4) + odd
          assert held[warp, lane, register, odd] == row * pitch + col


def test_loads_know_where_the_last_tile_begins():
  whole = dict(k_major=True, depth=64)
  assert not RegisterLoads.of(1152, 64, 128, 64, **whole).has_edge
  assert RegisterLoads.of(1152, 64, 128, 64, **whole, halo=16).has_edge
  assert not RegisterLoads.of(16 + 9 * 112, 64, 128, 64, **whole, halo=16).has_edge


def test_what_cannot_be_is_refused():
  def reason(problem, config=OVERLAP):
    return KERNELS["direct"].supports(problem, config)

  assert reason(make_problem(100, ODD, 40)) is None
  assert "begin with sectors" in reason(make_problem(100, 1008, 40))
  assert "16-bit results" in reason(make_problem(100, ODD, 40, out_dtype="float32"))
  with_c = Epilogue(1.0, 1.0, "bfloat16")
  assert "pieces of c" in reason(make_problem(100, ODD, 40, epilogue=with_c))
  narrow = dataclasses.replace(OVERLAP, tile_n=32)
  assert "tile_n=32 is too narrow" in reason(make_problem(100, ODD, 40), narrow)
  shared = dataclasses.replace(OVERLAP, tile_n=64, splits=2)
  assert "excludes splits" in reason(make_problem(100, ODD, 400), shared)


def test_an_emulator_stores_as_it_does():
  problem = make_problem(70, 201, 40, "NT")
  found = epilogue_choice.make_epilogue(problem, 128, 1, emulated=True, overlapping=True)
  assert (found.out.way, found.halo) == ("tiled", 0)
  kernel_cases.check("direct", problem, OVERLAP)


@pytest.mark.parametrize("layouts", LAYOUTS)
def test_it_lowers(layouts, monkeypatch):
  stored, store = [], sector_stores.store
  grids, grid_of = [], tiles.TileGrid.of
  loads, loads_of = set(), RegisterLoads.of

  def record(piece, *args, halo):
    stored.append((*piece.shape, halo))
    store(piece, *args, halo=halo)

  def record_grid(*args):
    grids.append(grid_of(*args))
    return grids[-1]

  def record_loads(mn, *args, halo=0, **kwargs):
    loads.add((mn, halo))
    return loads_of(mn, *args, halo=halo, **kwargs)

  monkeypatch.setattr(sector_stores, "store", record)
  monkeypatch.setattr(tiles.TileGrid, "of", record_grid)
  monkeypatch.setattr(RegisterLoads, "of", record_loads)
  for n, tile_n, facts, wanted in (
      (ODD, 128, {}, {(64, 128, 16)}),
      (1000, 240, dict(dtype="float16"), {(64, 128, 8)}),
      (ODD, 192, dict(epilogue=Epilogue(has_bias=True, activation="silu", saves=True)),
       {(64, 104, 16)}),
  ):
    problem = make_problem(100, n, 40, layouts, **facts)
    lowered("direct", problem, dataclasses.replace(OVERLAP, tile_n=tile_n))
    assert set(stored) == wanted
    halo = stored[0][-1]
    assert grids[-1].halo == halo
    assert grids[-1].tiles_n == tiles.overlapping(n, tile_n, halo)
    assert {(100, 0), (n, halo)} <= loads and (100, halo) not in loads
    stored.clear()
    loads.clear()


def test_large_results_of_one_k_tile_are_stored_so():
  for n, listed in ((7161, True), (7160, True), (7168, False)):
    problem = make_problem(28385, n, 64, "NT")
    found = heuristics.candidates(problem, H200)
    assert any(getattr(c.config, "overlap", False) for c in found) == listed
    assert getattr(found[0].config, "overlap", False) == listed
  for problem in (make_problem(200, 7161, 65), make_problem(2000, 121, 64)):
    # Of more than one k tile they have not been seen to win; one tile overlaps nothing.
    found = heuristics.candidates(problem, H200)
    assert not any(getattr(c.config, "overlap", False) for c in found)


def test_the_model_counts_overlapping_tiles():
  problem = make_problem(6400, ODD, 64, "NT")
  apart = dataclasses.replace(OVERLAP, overlap=False)
  counts = [
      Work(problem, "direct", config, H200).num_tiles for config in (OVERLAP, apart)
  ]
  assert counts == [100 * 9, 100 * 8]
  times = [
      cost_model.estimate(problem, "direct", config, H200).time_us
      for config in (OVERLAP, apart)
  ]
  assert times[0] < times[1]
  for name, more in (("direct_sectors", (True, False)), ("direct_small", (True, True))):
    model = dataclasses.replace(MODEL, **{name: 1.0})
    longer = [
        cost_model.estimate(problem, "direct", config, H200, model).time_us
        for config in (OVERLAP, apart)
    ]
    assert tuple(a > b for a, b in zip(longer, times, strict=True)) == more
  odd, half, whole = (
      traffic.stored(row_bytes, MODEL, together=True) for row_bytes in (2002, 2008, 2016)
  )
  assert whole < half < odd


@pytest.mark.gpu
@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize("tile", [(64, 64), (64, 128), (64, 192), (64, 240), (128, 128)])
def test_results_are_right_on_the_chip(tile, layouts):
  config = DirectConfig(*tile, overlap=True)
  fused = dict(epilogue=Epilogue(0.5, has_bias=True), dtype="float16")
  for m, n, k in ((100, ODD, 40), (64, 1000, 64), (200, 2052, 19), (70, 250, 100)):
    for facts in (fused, dict(batch=3)):
      problem = make_problem(m, n, k, layouts, **facts)
      if KERNELS["direct"].supports(problem, config) is None:
        gpu_cases.check("direct", problem, config)
