"""Which order of its tiles a config gets, against counts of what CTAs share."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from jaxgemm import grouped_heuristics, heuristics, tile_orders
from jaxgemm.device import known_device
from pallas_kernels import tiles
from pallas_kernels.configs import PersistentConfig, SplitKConfig
from pallas_kernels.problem import Problem

H200 = known_device("NVIDIA H200")
SINGLE = PersistentConfig(256, 128)
ORDERS = [("m", 8), ("m", 4), ("m", 2), ("n", 8), ("n", 4)]


def _order(problem: Problem, config: PersistentConfig) -> tuple[str, int]:
  found = tile_orders.ordered(problem, config, H200)
  kept = dataclasses.replace(
      found, grid_minor=config.grid_minor, grid_width=config.grid_width
  )
  assert kept == config  # Nothing else has changed.
  return found.grid_minor, found.grid_width


def _counted(counts, sizes, order, ctas: int) -> float:
  """Rows and columns that CTAs in a row bring, as `tiles.tile_order` lays them out."""
  index = np.arange(counts[0] * counts[1], dtype=np.int32)
  places = np.stack(jax.vmap(lambda i: tiles.tile_order(i, *counts, *order))(index), 1)
  brought = [
      len(np.unique(places[start : start + ctas, 0])) * sizes[0]
      + len(np.unique(places[start : start + ctas, 1])) * sizes[1]
      for start in range(0, len(places), ctas)
  ]
  return float(np.sum(brought)) / len(places)


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("counts", [(8, 8), (16, 4), (4, 16), (2, 32)], ids=str)
def test_what_is_brought_is_what_the_order_of_tiles_asks_for(counts, order):
  """Exactly so of runs of whole bands' columns."""
  for ctas in (8, 32):
    assert tile_orders._brought(ctas, counts, (256, 96), order) == pytest.approx(
        _counted(counts, (256, 96), order, ctas)
    )


@pytest.mark.parametrize("sizes", [(256, 128), (128, 256), (192, 96), (64, 256)], ids=str)
@pytest.mark.parametrize("counts", [(24, 11), (5, 24), (12, 32), (37, 3)], ids=str)
def test_the_order_is_about_the_best_by_count(counts, sizes):
  problem = Problem(counts[0] * sizes[0], counts[1] * sizes[1], 1024)
  config = PersistentConfig(*sizes, consumers=1 + (sizes[0] > 64))
  by_count = {
      order: sum(
          _counted(counts, sizes, order, ctas) for ctas in (8, H200.num_sms)
      )
      for order in ORDERS
  }
  assert by_count[_order(problem, config)] <= 1.1 * min(by_count.values())


def test_tall_tiles_are_not_stacked_along_m():
  """What 256x128 tiles lost: 5904x1288x1400 TT took 41.2 us so, and 38.1 since."""
  problem = Problem(5904, 1288, 1400, lhs_layout="m-major", rhs_layout="k-major")
  assert _order(problem, SINGLE) == ("m", 2)
  assert _order(problem.transposed, dataclasses.replace(SINGLE, swap=True)) == ("m", 2)
  # Wide ones are: eight rows of 64 have as many elements as two columns of 256.
  assert _order(problem, PersistentConfig(64, 256, consumers=1)) == ("m", 8)


def test_one_row_or_column_of_tiles_has_one_order():
  assert _order(Problem(256, 8192, 1024), SINGLE) == ("m", 8)
  assert _order(Problem(8192, 128, 1024), SINGLE) == ("m", 8)


@pytest.mark.parametrize(
    ("fields", "minor"),
    [(dict(cluster_n=2), "n"), (dict(cluster_n=4), "n"), (dict(cluster_m=2), "m"),
     (dict(cluster_m=2, cluster_n=2), "m")],
    ids=str,
)
def test_bands_lie_along_the_cluster(fields, minor):
  problem = Problem(4096, 4096, 4096)
  config = dataclasses.replace(SINGLE, **fields)
  assert _order(problem, config) == (minor, 8)
  other = dataclasses.replace(config, grid_minor="mn"[minor == "m"], grid_width=2)
  found = tile_orders.ordered(problem, other, H200)
  assert (found.grid_minor, found.grid_width) == (minor, 8)


def test_ctas_that_share_k_have_the_bands_of_clusters():
  config = SplitKConfig(256, 128, splits=4, cluster_k=4)
  assert _order(Problem(5904, 1288, 8192), config) == ("m", 8)


@pytest.mark.parametrize("size", [(2848, 1760, 2984), (4096, 4096, 4096)], ids=str)
def test_every_candidate_has_its_order(size):
  problem = Problem(*size)
  found = [
      each.config for each in heuristics.candidates(problem, H200)
      if isinstance(each.config, PersistentConfig)
  ]
  assert found == [tile_orders.ordered(problem, config, H200) for config in found]
  assert len({(config.grid_minor, config.grid_width) for config in found}) > 2


def test_groups_of_rows_keep_the_order_of_their_kernel():
  problem = Problem(4096, 4096, 2048, batch=8, rhs_batched=True, grouped="m")
  for each in grouped_heuristics.candidates(problem, H200):
    assert (each.config.grid_minor, each.config.grid_width) == ("m", 8)


@pytest.mark.parametrize("cluster", [1, 4])
def test_results_of_one_k_tile_leave_row_by_row(cluster):
  def order(k: int, **fields) -> tuple[str, int]:
    config = PersistentConfig(tile_m=128, tile_n=128, cluster_m=cluster, **fields)
    found = tile_orders.ordered(Problem(8192, 8192, k), config, H200)
    return found.grid_minor, found.grid_width

  assert order(16) == order(64) == ("m", 1)
  assert order(64, swap=True) == ("n", 1)  # Its rows are the result's columns.
  assert order(65)[1] > 1
