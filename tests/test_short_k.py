"""The last k tile: no more of it is loaded and multiplied than there is of k."""

from __future__ import annotations

import dataclasses

import jax
import pytest

from jaxgemm import cost_model, heuristics, traffic
from jaxgemm.cost_constants import MODEL
from jaxgemm.device import known_device
from jaxgemm.work import Work
from pallas_kernels import KERNELS, slot_products, specialised
from pallas_kernels.configs import PersistentConfig
from pallas_kernels.operand_tiles import Operand
from pallas_kernels.problem import Epilogue
from tests import gpu_cases
from tests.kernel_cases import (
  LAYOUTS,
  abstract_operands,
  check,
  copies,
  make_problem,
  mostly_slow,
  small_config,
)

H200 = known_device("NVIDIA H200")
# (fields, sizes, layouts): the last k tile has 16, 32 or 48 of 64, or is the only one.
CASES = (
    ({}, (136, 136, 88), "TN"),
    (dict(wg_dim="n", tile_n=128), (136, 264, 16), "TN"),
    (dict(wg_dim="tile"), (264, 200, 72), "TT"),
    (dict(cluster_m=2), (264, 136, 70), "NN"),
    (dict(cluster_n=4), (136, 520, 150), "TN"),
    (dict(swap=True, tile_n=48), (136, 104, 97), "NT"),
    (dict(promote=1), (136, 136, 40), "TT"),
    (dict(promote=1), (136, 136, 200), "NN"),
    (dict(num_stages=2, consumers=1, tile_m=64), (200, 72, 24), "NN"),
)


@pytest.mark.parametrize("case", mostly_slow(CASES, 4), ids=str)
def test_results_are_right(case):
  fields, sizes, layouts = case
  problem = make_problem(*sizes, layouts)
  check("persistent", problem, small_config("persistent", **fields), num_sms=4)


@pytest.mark.gpu
@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize(
    "fields",
    [{}, dict(wg_dim="n", tile_n=256), dict(cluster_m=2, cluster_n=2), dict(tile_n=104),
     dict(wg_dim="tile", cluster_m=4), dict(swap=True)],
    ids=str,
)
def test_results_are_right_on_the_chip(fields, layouts):
  for k in (8, 16, 40, 72, 136, 328):
    problem = make_problem(1000, 520, k, layouts)
    gpu_cases.check("persistent", problem, small_config("persistent", **fields))


def test_how_much_is_wanted():
  for k, fields, depth in (
      (16, {}, 16), (8, {}, 16), (17, {}, 32), (49, {}, 0), (64, {}, 0), (65, {}, 16),
      (1000, {}, 48),
      (72, dict(promote=1), 0),  # Summed up with others, or
      (40, dict(promote=1), 48),  # alone.
      (72, dict(promote=2), 16),
      (72, dict(swap=True), 16),
  ):
    problem, config = make_problem(128, 128, k), small_config("persistent", **fields)
    assert specialised.last_depth(problem, config) == depth, (k, fields)


def test_ctas_that_share_out_k_load_all_of_each_tile():
  """None knows that its last one is the last."""
  problem = make_problem(136, 136, 200, "TN")
  check("split_k", problem, small_config("split_k"), num_sms=4)
  assert {rows for _, rows, _ in copies("split_k", {}, problem)} == {64}


def test_operands_that_come_through_registers_are_loaded_as_a_whole():
  problem = make_problem(128, 128, 71, "NN")
  for way, depth in (("padded", 16), ("skewed", 0), ("loads", 0)):
    config = small_config("persistent", tile_m=64, consumers=1, misaligned=way)
    assert specialised.last_depth(problem, config) == depth
  assert specialised.last_depth(make_problem(128, 128, 40, dtype="float32"), config) == 0


def _rows(fields: dict, *sizes, **facts) -> list[tuple[bool, int]]:
  found = copies("persistent", fields, make_problem(*sizes, **facts))
  return sorted({(predicated, rows) for predicated, rows, _ in found})


def test_rows_of_k_beyond_the_last_are_not_loaded():
  assert _rows({}, 256, 256, 88, layouts="TN") == [(False, 32), (False, 64)]
  assert _rows({}, 256, 256, 16, layouts="TN") == [(False, 16), (False, 64)]
  assert _rows({}, 256, 256, 128, layouts="TN") == [(False, 64)]
  assert _rows({}, 256, 256, 88, layouts="NT") == [(False, 128)]  # Rows are no k's.
  in_chunks = _rows({}, 256, 264, 88, layouts="TN")
  assert in_chunks == [(False, 32), (False, 64), (True, 32), (True, 64)]


def test_clusters_share_rows_of_tiles_of_k():
  """Each of four CTAs copies 8 rows of lhs."""
  found = _rows(dict(cluster_n=4), 256, 512, 72, layouts="TT")
  assert found == [(False, 32), (False, 64), (False, 128)]


@pytest.mark.parametrize("swap", [False, True])
def test_each_matrix_of_a_gated_product_comes_in_chunks(swap):
  """Of both, in both loads: 64 rows of k, and of the last k tile those wanted."""
  fields = dict(swap=True, wg_dim="tile") if swap else {}
  found = copies(
      "persistent", dict(tile_n=128, **fields),
      make_problem(128, 64, 72, "NN", epilogue=Epilogue(activation="silu", gated=True)),
  )
  chunks = sorted((predicated, rows) for predicated, rows, _ in found if rows < 128)
  assert chunks == [(False, 16), (False, 16), (False, 64), (False, 64)]


@pytest.mark.parametrize(
    "layouts, n, k, depths",
    [
        ("TN", 256, 200, [16]),  # Whole k tiles are Pallas's to multiply.
        ("NT", 256, 40, [48]),
        ("NN", 256, 128, []),
        ("NN", 264, 128, [64]),  # All columns by one wgmma, though they come in chunks.
        ("TT", 256, 128, []),
    ],
)
def test_what_is_multiplied(layouts, n, k, depths, monkeypatch):
  found, multiply = [], slot_products.partial_wgmma.multiply

  def record(acc, *args, depth, **kwargs):
    found.append((acc.shape[1], depth))
    multiply(acc, *args, depth=depth, **kwargs)

  monkeypatch.setattr(slot_products.partial_wgmma, "multiply", record)
  config = small_config("persistent", tile_n=128)
  problem = make_problem(256, n, k, layouts)
  jax.make_jaxpr(
      lambda *x: KERNELS["persistent"].launch(x, problem, config, num_sms=132)
  )(*abstract_operands(problem))
  assert sorted(set(found)) == [(128, depth) for depth in depths]


def test_each_consumer_multiplies_its_own_columns(monkeypatch):
  """Of chunks, and of a short k tile: those of its half of a tile, no more."""
  found, stored = [], Operand.stored

  def record(self, slots, slot, start, size, part=0):
    if not self.is_lhs:
      found.append((start if isinstance(start, int) else "its own", size))
    return stored(self, slots, slot, start, size, part)

  monkeypatch.setattr(Operand, "stored", record)
  config = small_config("persistent", tile_m=64, tile_n=256, wg_dim="n")
  for n, k in ((520, 128), (512, 16)):
    problem = make_problem(256, n, k, "NN")
    jax.make_jaxpr(
        lambda *x, problem=problem: KERNELS["persistent"].launch(
            x, problem, config, num_sms=132
        )
    )(*abstract_operands(problem))
    assert set(found) == {("its own", 128)}


def test_the_model_knows():
  config = PersistentConfig(tile_m=128, tile_n=128)

  def estimate_us(k: int) -> float:
    problem = make_problem(1024, 1024, k, "TN")
    return cost_model.estimate(problem, "persistent", config, H200).time_us

  a_tile = estimate_us(1088) - estimate_us(1024)
  for k in (1040, 1056, 1072):  # With the wait for the tile, more than its share of k.
    share = (k - 1024) / 64
    assert share * a_tile < estimate_us(k) - estimate_us(1024) < a_tile
  problem = make_problem(64, 64, 80)
  assert Work(problem, "persistent", config, H200).last_share == 0.25
  assert Work(problem, "split_k", small_config("split_k"), H200).last_share == 1.0


def test_rows_of_k_alone_are_brought_sooner():
  config = PersistentConfig(tile_m=128, tile_n=128)
  shares = {}
  for layouts in LAYOUTS:
    work = Work(make_problem(4096, 4096, 1040, layouts), "persistent", config, H200)
    whole, last = traffic.supplies(work, MODEL)
    shares[layouts] = last.us / whole.us
  assert shares["TN"] < 0.3 and shares["NT"] == 1.0
  assert 0.5 < shares["TT"] < 0.8 and 0.5 < shares["NN"] < 0.8


def test_crooked_rows_that_come_while_a_result_leaves():
  """7x1248x1904x88 TT by single CTAs of 128x128 took 18.4 us, by others 14.6 to 15.1."""
  h100 = known_device("NVIDIA H100 80GB HBM3")
  problem = make_problem(1248, 1904, 88, "TT", batch=7)
  found = heuristics.candidates(problem, h100)[0].config
  assert found.cluster > 1 or max(found.tile_m, found.tile_n) >= 256
  alone = PersistentConfig(128, 128, num_stages=6, consumers=2, wg_dim="tile")
  times = [
      cost_model.estimate(problem, "persistent", config, h100).time_us
      for config in (alone, dataclasses.replace(alone, cluster_m=2))
  ]
  assert times[0] > 1.02 * times[1]
