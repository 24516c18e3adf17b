"""Results whose rows begin within sectors of 32 bytes: threads store them."""

from __future__ import annotations

import operator
import types

import pytest

from jaxgemm import ring_slots, traffic
from jaxgemm.cost_constants import MODEL
from jaxgemm.device import known_device
from jaxgemm.work import Work
from pallas_kernels import (
  KERNELS,
  epilogue_choice,
  fragments,
  register_stores,
  specialised,
  staging,
  tiles,
)
from pallas_kernels.problem import Epilogue
from tests import gpu_cases, kernel_cases
from tests.kernel_cases import LAYOUTS, lowered, make_problem, small_config

WITHIN = 1000  # Columns of 2000 bytes: 62.5 sectors.


def test_pieces_are_as_wide_as_few_can_be():
  widths = {64: 64, 72: 72, 128: 128, 136: 72, 192: 96, 200: 104, 256: 128, 320: 112}
  assert {tile_n: staging.wide_cols(tile_n) for tile_n in widths} == widths


@pytest.mark.parametrize("cols", [16, 32, 64, 72, 96, 104, 112, 128])
def test_eight_rows_of_a_slot_begin_in_different_banks(cols):
  pitch = staging.Staging("masked", "bfloat16", cols, 1).pitch
  assert cols <= pitch <= cols + 8 and pitch % 8 == 0
  banks = {row * pitch * 2 // 16 % 8 for row in range(8)}  # Of 16 bytes.
  assert len(banks) == 8


@pytest.mark.parametrize(
    "n, facts, fields, way, cols",
    [
        (WITHIN, {}, {}, "masked", 128),
        (WITHIN, {}, dict(tile_n=192), "masked", 96),
        (WITHIN, {}, dict(wg_dim="n", tile_n=256), "masked", 128),
        (WITHIN, {}, dict(tile_n=64), "flat", 64),  # No piece could be wider.
        (1008, {}, {}, "flat", 64),
        (1024, {}, {}, "flat", 64),
        (1001, {}, {}, "masked", 64),  # As TMA cannot.
        (WITHIN, dict(out_dtype="float32"), {}, "flat", 32),
        (WITHIN, dict(epilogue=Epilogue(1.0, 1.0, "bfloat16")), {}, "flat", 64),
        (WITHIN, {}, dict(swap=True), "flat", 64),
        (WITHIN, {}, dict(num_stages=7), "flat", 64),  # There is no room.
    ],
)
def test_where_threads_store(n, facts, fields, way, cols):
  problem = make_problem(512, n, 256, **facts)
  config = small_config("persistent", **(dict(tile_n=128) | fields))
  found = specialised._epilogue(
      problem, config, specialised.epilogue_room(problem, config)
  ).out
  assert (found.way, found.cols) == (way, cols)
  wide = specialised.stores_wide(problem, config)
  assert wide == (way == "masked" and n == WITHIN)
  work = Work(problem, "persistent", config, known_device("NVIDIA H200"))
  assert (work.stored_wide, work.masked) == (wide, way == "masked")


def test_an_emulator_stores_as_it_does():
  problem = make_problem(512, WITHIN, 256)
  found = epilogue_choice.make_epilogue(problem, 128, 2, emulated=True)
  assert found.out.way == "tiled"


def _record(monkeypatch) -> list[tuple[int, int]]:
  """The shapes of the pieces that threads store from here on."""
  pieces, store = [], register_stores.store

  def record(piece, *args, **kwargs):
    pieces.append(piece.shape)
    store(piece, *args, **kwargs)

  monkeypatch.setattr(register_stores, "store", record)
  return pieces


@pytest.mark.parametrize("kernel", ["persistent", "pipelined", "blocked"])
@pytest.mark.parametrize("tile_n", [72, 128, 192])
def test_what_threads_store_lowers(kernel, tile_n, monkeypatch):
  pieces = _record(monkeypatch)
  problem, config = make_problem(512, WITHIN, 136), small_config(kernel, tile_n=tile_n)
  assert KERNELS[kernel].supports(problem, config) is None
  lowered(kernel, problem, config)
  assert set(pieces) == {(64, staging.wide_cols(tile_n))}


@pytest.mark.parametrize(
    "epilogue, tile_n, cols",
    [
        (Epilogue(0.5, has_bias=True, activation="silu"), 192, 96),
        (Epilogue(has_bias=True, activation="gelu", saves=True), 104, 104),
        (Epilogue(has_bias=True, activation="silu", gated=True, saves=True), 256, 128),
    ],
    ids=str,
)
def test_what_is_fused_lowers(epilogue, tile_n, cols, monkeypatch):
  pieces = _record(monkeypatch)
  problem = make_problem(512, WITHIN, 136, epilogue=epilogue)
  config = small_config("persistent", tile_n=tile_n, num_stages=2)
  assert KERNELS["persistent"].supports(problem, config) is None
  lowered("persistent", problem, config)
  assert set(pieces) == {(64, cols)}


@pytest.mark.parametrize(
    "rows, cols, num_cols, width",
    [
        (64, 64, 1000, 8), (64, 128, 1000, 8), (64, 64, 1001, 1), (64, 128, 1004, 4),
        (64, 96, 1000, 8), (64, 72, 1000, 8),  # Units, whose rows divide nothing.
        (40, 64, 1000, 4),  # Of 40 transposed rows, 16 at once are no whole number.
    ],
)
def test_how_much_a_thread_stores_at_once(rows, cols, num_cols, width):
  assert register_stores._width(rows, cols, num_cols, 2) == width
  step = register_stores._step(rows, cols // width)
  assert step == (128 // (cols // width) if 128 % (cols // width) == 0 else 0)


@pytest.mark.parametrize(
    "cols, num_cols, row, col, order",
    [
        (128, 1000, 64, 896, "as they are"), (104, 1000, 8, 936, "eighths"),
        (72, 1000, 960, 936, "as they are"), (96, 1000, 64, 96, "pairs"),
        (64, 1001, 64, 960, "as they are"), (64, 1000, 0, 1024, "as they are"),
    ],
)
def test_each_element_is_stored_once(cols, num_cols, row, col, order, monkeypatch):
  """All threads' units of a piece at (row, col) of [1000, num_cols], by hand."""
  kernel_cases.compute_in_integers(monkeypatch, register_stores, fragments)
  monkeypatch.setattr(register_stores, "behind", operator.add)
  utils = types.SimpleNamespace(inline_ptx=lambda _, thread, **__: thread)
  monkeypatch.setattr(register_stores, "mgpu", types.SimpleNamespace(utils=utils))
  width = register_stores._width(64, cols, num_cols, 2)
  pitch = staging.Staging("masked", "bfloat16", cols, 1).pitch
  stored = {}

  class Words:
    num_elements, num_bytes = width, 2 * width

    def load(self, address, offset):
      return address + offset

    def store(self, address, offset, source, inside):
      for i in range(width if inside else 0):
        target = (address + offset) // 2 + i
        assert target not in stored
        stored[target] = source // 2 + i

  out = types.SimpleNamespace(
      row=row, col=col, end=1000, num_cols=num_cols, row_bytes=2 * num_cols,
      address=lambda row, col: 2 * (row * num_cols + col),
  )
  per_row = cols // width
  by_rows = register_stores._step(64, per_row)
  store = register_stores._store_rows if by_rows else register_stores._store_units
  for thread in range(128):
    store(Words(), thread, (0, 2 * pitch), out, 64, per_row, order)
  wanted = {}
  for i in range(64):
    to = row + fragments.row_of(order, i)
    for j in range(cols):
      if to < 1000 and col + j < num_cols:
        wanted[to * num_cols + col + j] = i * pitch + j
  assert stored == wanted


def test_wide_pieces_fill_fewer_sectors_in_part():
  lines, sectors = traffic.stored(2048, MODEL), traffic.stored(2016, MODEL)
  wide, narrow = (traffic.stored(2000, MODEL, wide=wide) for wide in (True, False))
  assert lines < sectors < wide < narrow


@pytest.mark.gpu
@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize(
    "fields",
    [{}, dict(tile_n=72), dict(tile_n=104), dict(tile_n=136), dict(tile_n=192),
     dict(tile_n=256, wg_dim="n"), dict(wg_dim="tile", tile_m=64, tile_n=96)],
    ids=str,
)
def test_results_are_right_on_the_chip(fields, layouts):
  config = small_config("persistent", **(dict(tile_n=128) | fields))
  for m, n in ((200, WITHIN), (72, 136), (520, 2088)):
    facts = dict(epilogue=Epilogue(0.5, has_bias=True), out_dtype="float16")
    for problem in (
        make_problem(m, n, 200, layouts, "float16", **facts),
        make_problem(m, n, 200, layouts, batch=3),
    ):
      gpu_cases.check("persistent", problem, config)


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("n", [WITHIN, 1008, 1024, 1001])
def test_rings_have_the_slots_that_fit_beside_the_result(n, out_dtype):
  """One more would not fit beside what is stored so; the shapes are those of plans."""
  problem = make_problem(512, n, 4096, out_dtype=out_dtype)
  like = ring_slots.alike(problem)
  for shape in ((128, 192, 2, "tile"), (128, 256, 2, "m"), (128, 128, 2, "m")):
    config = ring_slots.staged(like, (*shape, False), promote=0)[0]
    sizes = [specialised.smem_bytes(each, config) for each in (problem, like)]
    assert sizes[0] == sizes[1] <= tiles.SMEM_LIMIT_BYTES
