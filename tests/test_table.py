"""Measured plans: which problems their rows serve, and what a table may hold."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from jaxgemm import device, plan, table
from pallas_kernels.configs import PersistentConfig
from pallas_kernels.problem import Epilogue, Problem

H200 = device.known_device("NVIDIA H200")
SQUARE = Problem(4096, 4096, 4096)
EVIDENCE = {
    "time_us": 170.0, "xla_time_us": 172.0, "jax": "0.11.2", "date": "2026-11-20",
    "command": "python -m experiments.run",
}


def _row(**changes):
  row = {
      "problem": {"m": 4096, "n": 4096, "k": 4096},
      "kernel": "persistent",
      "config": {"tile_m": 128, "tile_n": 128},
      "evidence": EVIDENCE,
  }
  return row | changes


def test_the_table_beats_the_heuristic(monkeypatch):
  rows = table.parse({"device": H200.kind, "rows": [_row()]}, H200.kind)
  monkeypatch.setattr(table, "_load", lambda kind: {r.problem: r for r in rows})
  plan.make_plan.cache_clear()
  try:
    chosen = plan.make_plan(SQUARE, H200)
    assert chosen.source == "table"
    assert chosen.config == PersistentConfig(tile_m=128, tile_n=128)
    assert "170.0 us" in chosen.reason and "2026-11-20" in chosen.reason
    other = dataclasses.replace(SQUARE, rhs_layout="k-major")
    assert plan.make_plan(other, H200).source == "heuristic"
    assert plan.make_plan(SQUARE, H200, implementation="blocked").kernel == "blocked"
  finally:
    plan.make_plan.cache_clear()


WITH_C = dataclasses.replace(SQUARE, epilogue=Epilogue(beta=2.0, c_dtype="bfloat16"))
WITH_BIAS = dataclasses.replace(
    SQUARE, epilogue=Epilogue(alpha=2.0, c_dtype="bfloat16", has_bias=True)
)


@pytest.mark.parametrize("problem", [WITH_C, WITH_BIAS], ids=["c", "c and bias"])
def test_rows_of_the_product_alone_serve_what_is_added(problem, monkeypatch):
  """Rows with c come first; XLA's are of nothing but what was measured."""
  small = dataclasses.asdict(PersistentConfig(tile_m=64, tile_n=64, consumers=1))
  epilogue = dataclasses.asdict(problem.unfused.epilogue)
  with_c = dict(m=4096, n=4096, k=4096, epilogue=epilogue)
  for rows, source, tile_m in (
      ([_row()], "table", 128),
      ([_row(), _row(problem=with_c, config=small)], "table", 64),
      ([_row(kernel="xla", config=None)], "heuristic", None),
      ([_row(), _row(problem=with_c, kernel="xla", config=None)],
       "table", None if problem is WITH_C else 128),
  ):
    chosen = _planned(problem, rows, monkeypatch)
    assert chosen.source == source
    if source == "table":
      assert getattr(chosen.config, "tile_m", None) == tile_m


@pytest.mark.parametrize("tile_n, num_stages, kept", [(64, 13, 12), (256, 5, None)])
def test_slots_of_a_row_make_room_for_what_is_added(
    tile_n, num_stages, kept, monkeypatch
):
  """One in eight of them; of five that would be more."""
  config = PersistentConfig(tile_m=64, tile_n=tile_n, consumers=1, num_stages=num_stages)
  row = _row(config=dataclasses.asdict(config))
  assert _planned(SQUARE, [row], monkeypatch).config == config
  chosen = _planned(WITH_C, [row], monkeypatch)
  assert (chosen.source == "table") == (kept is not None)
  if kept is not None:
    assert chosen.config == dataclasses.replace(config, num_stages=kept)


@pytest.mark.parametrize(
    "m, rows, with_m",
    [(5, (16, 32), 16), (5, (8, 16), 8), (1, (16,), 16), (16, (32,), None),
     (17, (32, 64), 32), (17, (64,), None), (48, (64,), 64), (32, (64,), None),
     (65, (128,), None)],
    ids=str,
)
def test_rows_of_more_tokens_serve_fewer(m, rows, with_m, monkeypatch):
  config = dataclasses.asdict(PersistentConfig(tile_m=64, tile_n=64, consumers=1))
  raw = [_row(problem=dict(m=n, n=4096, k=4096), config=config) for n in rows]
  chosen = _planned(Problem(m, 4096, 4096), raw, monkeypatch)
  assert (chosen.source == "table") == (with_m is not None)
  assert ", with m=" not in chosen.reason or chosen.reason.endswith(f"with m={with_m}")
  assert (chosen.source == "table") == (", with m=" in chosen.reason)


def _planned(problem, rows, monkeypatch):
  rows = table.parse({"device": H200.kind, "rows": rows}, H200.kind)
  monkeypatch.setattr(table, "_load", lambda kind: {r.problem: r for r in rows})
  plan.make_plan.cache_clear()
  try:
    return plan.make_plan(problem, H200)
  finally:
    plan.make_plan.cache_clear()


def test_a_row_may_choose_xla():
  (row,) = table.parse(
      {"device": "x", "rows": [_row(kernel="xla", config=None)]}, "x"
  )
  assert row.kernel == "xla" and row.config is None


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"kernel": "fast"}, "unknown kernel 'fast'"),
        ({"config": {"tile_q": 1}}, "tile_q"),
        ({"config": {"tile_m": 100}}, "tile_m"),
        ({"problem": {"m": 1, "n": 1}}, "'k'"),
        ({"evidence": {"time_us": 1.0}}, "xla_time_us"),
        ({"note": "fast"}, "fields"),
        ({"kernel": "xla"}, "XLA takes no config"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_malformed_rows_are_named(changes, message):
  rows = [_row(), _row(problem={"m": 8, "n": 8, "k": 8}) | changes]
  with pytest.raises(ValueError, match=message) as error:
    table.parse({"device": "x", "rows": rows}, "x")
  assert "row 1" in str(error.value)


def test_repeated_rows_and_other_devices():
  with pytest.raises(ValueError, match="row 1 .* repeats 4096x4096x4096"):
    table.parse({"device": "x", "rows": [_row(), _row()]}, "x")
  with pytest.raises(ValueError, match="'y' where 'x'"):
    table.parse({"device": "y", "rows": []}, "x")


def test_the_tables_that_we_ship_are_valid():
  folder = Path(table.__file__).parent / "tables"
  kinds = {table.file_name(kind): kind for kind in device.KNOWN_DEVICES}
  paths = sorted(folder.glob("*.json"))
  assert folder / table.file_name("NVIDIA H200") in paths
  for path in paths:
    table.parse(json.loads(path.read_text(encoding="utf-8")), kinds[path.name])
