"""What the cost model counts of a config, and what it makes of that."""

from __future__ import annotations

import dataclasses

import pytest

from jaxgemm import cost_model, heuristics, tile_shapes, traffic
from jaxgemm.cost_constants import MODEL
from jaxgemm.device import known_device
from jaxgemm.work import Work
from pallas_kernels import specialised, split_k, tiles
from pallas_kernels.configs import (
  DirectConfig,
  PersistentConfig,
  PipelinedConfig,
  SplitKConfig,
)
from pallas_kernels.problem import Epilogue, Problem
from tests.kernel_cases import LAYOUTS

H200 = known_device("NVIDIA H200")


def work(problem: Problem, kernel: str = "persistent", **fields) -> Work:
  config = (SplitKConfig if kernel == "split_k" else PersistentConfig)(**fields)
  return Work(problem, kernel, config, H200)


@pytest.mark.parametrize(
    ("fields", "elements"),
    [
        (dict(tile_m=128, tile_n=256, consumers=2), 2 * (64 + 256)),
        (dict(tile_m=256, tile_n=88, consumers=2), 4 * (64 + 88)),
        (dict(tile_m=128, tile_n=256, consumers=2, wg_dim="n"), 4 * (64 + 128)),
        (dict(tile_m=64, tile_n=320, consumers=1), 2 * 64 + 320),
        (dict(tile_m=128, tile_n=128, consumers=2, wg_dim="tile"), 2 * (64 + 128)),
    ],
    ids=str,
)
def test_shared_memory_moves_what_each_wgmma_reads(fields, elements):
  """And what TMA writes; `elements` are rows of 128 bytes."""
  found = work(Problem(4096, 4096, 4096), **fields).shared_bytes
  assert found == 128 * (fields["tile_m"] + fields["tile_n"] + elements)


@pytest.mark.parametrize("wg_dim", ["m", "tile"])
def test_wgmma_of_more_columns_takes_less_energy(wg_dim):
  """Of tiles that fetch as much: each of its instructions reads 64 rows and its columns.
  """
  problem = Problem(8192, 28672, 4096)
  tall, wide = (
      cost_model.sustained_us(
          2300.0, problem, PersistentConfig(*sides, wg_dim=wg_dim), H200
      )
      for sides in ((256, 128), (128, 256))
  )
  assert wide < tall < 1.05 * wide


def test_all_sums_of_a_gated_product_enter_its_epilogue():
  """So it takes as long as a product that stores them all, unless the memory tells."""
  plain = Problem(8192, 4096, 512)
  gated = dataclasses.replace(
      plain, n=2048, epilogue=Epilogue(gated=True, activation="silu")
  )
  config = PersistentConfig(128, 256)
  times = [
      cost_model.estimate(problem, "persistent", config, H200).time_us
      for problem in (plain, gated)
  ]
  assert times[1] == pytest.approx(times[0], rel=0.03)


def test_shared_memory_bounds_tall_tiles():
  """Those that read rhs anew for every 64 rows; tall tiles took 72.5 us, the other 57.7.
  """
  problem = Problem(256, 10240, 8192)
  tall = PersistentConfig(256, 88, consumers=2, swap=True)
  wide = PersistentConfig(64, 320, consumers=1)
  free = dataclasses.replace(MODEL, shared_rate=1e12)

  def ratio(model):
    times = [
        cost_model.estimate(problem, "persistent", config, H200, model).time_us
        for config in (tall, wide)
    ]
    return times[0] / times[1]

  assert ratio(free) < ratio(MODEL)


@pytest.mark.parametrize(
    ("cols", "shares"), [(24, 1), (32, 2), (40, 1), (48, 3), (64, 4), (72, 3), (80, 2)]
)
def test_shares_of_sums(cols, shares):
  """As many CTAs of four as whole shares of 16 columns or more divide a tile into."""
  fields = dict(tile_m=64, tile_n=cols, consumers=1, splits=4, cluster_k=4)
  problem = Problem(64, 960, 8192, rhs_layout="k-major")
  assert split_k.supports(problem, SplitKConfig(**fields)) is None
  assert work(problem, "split_k", **fields).num_shares == shares


@pytest.mark.parametrize(
    ("fields", "within"),
    [
        (dict(tile_n=184), True),
        (dict(tile_n=176), False),
        (dict(tile_n=184, swap=True), False),
        (dict(tile_n=176, wg_dim="n"), True),  # Each consumer has 88 of them.
    ],
    ids=str,
)
def test_rows_of_tiles_that_begin_within_sectors(fields, within):
  problem = Problem(4304, 4080, 32, lhs_layout="m-major", rhs_layout="k-major")
  assert work(problem, consumers=2, **fields).stored_within == within
  odd = dataclasses.replace(problem, n=4081)  # By masked stores.
  assert not work(odd, consumers=2, **fields).stored_within


def test_such_rows_take_longer():
  """256x184 took 17.2 us there, tiles of 192 columns 12.4."""
  problem = Problem(4304, 4080, 32, lhs_layout="m-major", rhs_layout="k-major")
  listed = heuristics.candidates(problem, H200)
  best = next(c.config for c in listed if c.kernel == "persistent")
  assert best.swap or best.tile_n % 16 == 0


@pytest.mark.parametrize("layouts", LAYOUTS)
def test_few_rounds_where_tiles_are_not_full(layouts):
  """Of 8 rows: tiles of 328 columns, in six rounds, took 5% longer than narrow ones."""
  problem = Problem(8, 256000, 3072, **LAYOUTS[layouts])
  for rows, cols, _, _ in tile_shapes.filling(problem, H200):
    assert -(-problem.n // cols) <= 3 * H200.num_sms, (rows, cols)


@pytest.mark.parametrize("stages, runs", [(3, True), (4, False)])
def test_runs_want_room(stages, runs):
  """Slots of whole rows beside those of the ring; else a result leaves in pieces."""
  problem = Problem(197, 197, 64, batch=512, rhs_layout="k-major")
  config = PersistentConfig(128, 224, consumers=2, num_stages=stages)
  assert specialised.stores_runs(problem, config) == runs
  found = Work(problem, "persistent", config, H200)
  assert (found.runs, found.masked) == (runs, not runs)


# -- direct and pipelined: what they cost where inputs are in no cache ----------------


def _estimate(problem, kernel, config):
  return cost_model.estimate(problem, kernel, config, H200).time_us


@pytest.mark.parametrize(
    ("size", "layouts", "tile", "measured"),
    [
        ((16, 392, 8), "NT", (64, 16), 1.50),
        ((544, 32, 48), "NT", (64, 32), 1.70),
        ((848, 3440, 16), "TN", (64, 64), 3.81),
        ((6843, 233, 17), "NT", (64, 64), 3.86),
        ((955, 4003, 29), "TT", (64, 64), 6.98),
        ((6698, 517, 93), "TT", (64, 64), 10.1),
    ],
    ids=str,
)
def test_direct_as_measured(size, layouts, tile, measured):
  """One tile an SM, many, odd rows of the result, two k tiles: within a fifth."""
  found = _estimate(Problem(*size, **LAYOUTS[layouts]), "direct", DirectConfig(*tile))
  assert found == pytest.approx(measured, rel=0.2)


def test_ctas_of_pipelined_are_launched_one_after_the_other():
  """4464x136x24 NN: 3.26 us by 210 CTAs of 64x64, where 2.4 had been expected."""
  problem, config = Problem(4464, 136, 24), PipelinedConfig(64, 64, 64, 6)
  assert _estimate(problem, "pipelined", config) > 2.7
  # Where memory bounds, that is hidden.
  problem = Problem(1, 128, 4096, batch=256)
  config = PipelinedConfig(64, 128, 64, 4)
  free = dataclasses.replace(MODEL, launch=0.0)
  without = cost_model.estimate(problem, "pipelined", config, H200, free).time_us
  assert _estimate(problem, "pipelined", config) < 1.005 * without


def test_direct_is_for_few_k_tiles_an_sm():
  """512 x 197x64x197 TN took it 35 us, others 24."""

  def kernels(batch):
    problem = Problem(197, 64, 197, batch=batch, lhs_layout="m-major")
    return {c.kernel for c in heuristics.candidates(problem, H200)}

  assert "direct" not in kernels(512) and "persistent" in kernels(512)
  assert "direct" in kernels(16)


@pytest.mark.parametrize(
    ("n", "k", "layouts", "fields", "rows"),
    [
        (4096, 16, "NT", {}, 3 * (128 + 256)),  # Four rows a line.
        (4096, 16, "NN", {}, 3 * 128),
        (16, 16, "NN", {}, 3 * 128),  # However short they are, rows along n do not count.
        (4096, 16, "TN", {}, 0),
        (4096, 32, "NT", {}, 128 + 256),
        (4096, 64, "NT", {}, 0),
        # Those that share a tile ask once.
        (4096, 16, "NT", dict(cluster_m=2), 3 * (128 + 128)),
        (4096, 16, "NT", dict(cluster_n=4), 3 * (32 + 256)),
    ],
    ids=str,
)
def test_rows_that_share_lines_are_crowded(n, k, layouts, fields, rows):
  problem = Problem(4096, n, k, **LAYOUTS[layouts])
  found = work(problem, tile_m=128, tile_n=256, **fields)
  free = dataclasses.replace(MODEL, same_lines=0.0)
  more = traffic.supplies(found, MODEL)[0].us - traffic.supplies(found, free)[0].us
  assert more == pytest.approx(MODEL.same_lines * 128 * rows / MODEL.l2_rate, abs=1e-9)


@pytest.mark.parametrize(("n", "crooked"), [(65536, False), (65544, True)])
def test_rows_are_those_of_the_result_also_of_swapped_operands(n, crooked):
  config = PersistentConfig(tile_m=64, tile_n=48, num_stages=8, consumers=1, swap=True)
  straight = dataclasses.replace(MODEL, crooked_stores=0.0)
  with_it, without = (
      cost_model.estimate(Problem(40, n, 64), "persistent", config, H200, model).time_us
      for model in (MODEL, straight)
  )
  assert (with_it > without) == crooked


@pytest.mark.parametrize("way", ["padded", "loads"])
def test_operands_that_a_pass_pads_are_not_hot(way):
  """Their rows begin at whole lines."""
  config = PersistentConfig(
      tile_m=64, tile_n=64, num_stages=6, consumers=1, misaligned=way
  )
  cold = dataclasses.replace(MODEL, hot=0.0)
  times = lambda k: [
      cost_model.estimate(Problem(64, 8192, k), "persistent", config, H200, model).time_us
      for model in (MODEL, cold)
  ]
  assert times(4095)[0] == times(4095)[1]
  assert times(4104)[0] > times(4104)[1]  # TMA takes these rows as they are.


def test_shared_crooked_rows_wait_for_slots():
  """Those of an operand of which CTAs share tiles; not the other's, nor aligned ones."""
  free = dataclasses.replace(MODEL, shared_slot=0.0)

  def waits(m, n, k, **clusters):
    problem = Problem(m, n, k)
    config = dataclasses.replace(PersistentConfig(), **clusters)
    estimates = [
        cost_model.estimate(problem, "persistent", config, H200, model).time_us
        for model in (MODEL, free)
    ]
    return estimates[0] > estimates[1]

  # lhs has rows of k, rhs rows of n.
  assert waits(4096, 4104, 4096, cluster_m=2) and waits(4096, 4096, 4104, cluster_n=2)
  assert not waits(4096, 4096, 4104, cluster_m=2)
  assert not waits(4096, 4104, 4096, cluster_n=2)
  assert not waits(4096, 4096, 4096, cluster_m=2) and not waits(4104, 4104, 4104)


def test_rows_within_lines_and_within_sectors_cost_more_to_store():
  lines, sectors, within = (traffic.stored(size, MODEL) for size in (256, 288, 272))
  assert 1 < lines < sectors < within


@pytest.mark.parametrize(
    ("less", "more", "layouts"),
    [
        ((64, 64, 72), (64, 64, 120), "NN"),  # Of a short last k tile.
        ((20, 64, 128), (60, 64, 128), "TN"),  # Of few rows, stored along k.
        ((64, 20, 128), (64, 60, 128), "NN"),
        ((64, 64, 128), (64, 64, 129), "TN"),
        ((64, 64, 256), (64, 64, 264), "NT"),  # Copies of rows that share lines.
        ((64, 64, 256), (64, 60, 256), "NN"),  # Copied, and not.
        ((64, 64, 136), (64, 64, 135), "NT"),  # Shifted.
    ],
    ids=str,
)
def test_direct_is_over_sooner_where_threads_load_less(less, more, layouts):
  config = DirectConfig(64, 64)
  sooner, later = (
      _estimate(Problem(*size, **LAYOUTS[layouts]), "direct", config)
      for size in (less, more)
  )
  assert sooner < later


def test_direct_loads_each_group_of_k_tiles():
  """Of each operand four chunks a thread for each k tile; of 32 the slots hold 13."""
  for n, step in (
      (64, 2 * 4 * MODEL.direct_copied + MODEL.direct_step),
      (62, 4 * (MODEL.direct_aligned + MODEL.direct_shifted)),
  ):
    once, more = (
        _estimate(Problem(64, n, 64 * steps), "direct", DirectConfig(64, 64))
        for steps in (8, 32)
    )
    assert more - once == pytest.approx(24 * step, rel=0.15)


@pytest.mark.parametrize("tile", [(64, 64), (128, 128)], ids=str)
def test_ctas_of_direct_that_an_sm_has_at_once_hide_each_others_waits(tile):
  """Five of 64x64, or two of 128x128: the first of a round is not hidden."""
  config = DirectConfig(*tile)
  free = dataclasses.replace(
      MODEL, direct_spread=0.0, direct_memory=0.0, direct_copies_memory=0.0,
      direct_later=1.0, direct_later_memory=0.0,
  )

  def busy(per_sm: int) -> float:
    problem = Problem(*tile, 64, batch=per_sm * H200.num_sms)
    time_us = cost_model.estimate(problem, "direct", config, H200, free).time_us
    return time_us - free.direct

  at_once = {(64, 64): 5, (128, 128): 2}[tile]
  for per_sm, rounds in ((at_once, 1), (at_once + 1, 2), (3 * at_once, 3)):
    beside = rounds + MODEL.direct_beside * (per_sm - rounds)
    assert busy(per_sm) == pytest.approx(busy(1) * beside)


def test_ctas_of_direct_that_come_later_hide_each_other_but_not_the_memory():
  config = DirectConfig(64, 64)

  def time_us(per_sm: int, **facts) -> float:
    model = dataclasses.replace(MODEL, direct_spread=0.0, **facts)
    problem = Problem(64, 64, 64, batch=per_sm * H200.num_sms)
    return cost_model.estimate(problem, "direct", config, H200, model).time_us

  memory = dict(direct_memory=0.0, direct_copies_memory=0.0, direct_later_memory=0.0)
  for later in (1.0, 0.5):
    times = [time_us(per_sm, **memory, direct_later=later) for per_sm in (5, 45, 85)]
    assert times[2] - times[1] == pytest.approx(times[1] - times[0], rel=0.03)
    assert times[2] - times[0] == pytest.approx(
        later * (time_us(85, **memory, direct_later=1.0) - times[0])
    )
  none, all_of_it = (
      [time_us(per_sm, direct_later_memory=share) for per_sm in (5, 50)]
      for share in (0.0, 1.0)
  )
  assert none[0] == all_of_it[0]
  # An SM has room for two of 128x128; four wait together all the same.
  large, free = DirectConfig(128, 128), dataclasses.replace(MODEL, direct_later=1.0)
  for per_sm, same in ((4, True), (5, False)):
    problem = Problem(128, 128, 64, batch=per_sm * H200.num_sms)
    found = [
        cost_model.estimate(problem, "direct", large, H200, model).time_us
        for model in (MODEL, free)
    ]
    assert (found[0] == found[1]) == same
  problem = Problem(64, 64, 64, batch=50 * H200.num_sms)
  memory_us = traffic.memory(Work(problem, "direct", config, H200), H200, MODEL)
  assert all_of_it[1] - none[1] == pytest.approx(45 / 50 * memory_us)


def test_rows_of_a_short_k_share_lines_padded_or_not():
  config = PersistentConfig(tile_m=64, tile_n=128, consumers=1)

  def crooked_us(k: int) -> float:
    problem = Problem(4096, 4096, k, rhs_layout="k-major")
    work = Work(problem, "persistent", config, H200)
    return traffic.supplies(work, MODEL)[0].crooked_us

  # 19 of k are padded to 24, in rows of 48 bytes: 192 for each k tile.
  shared = 192 * (128 / 48 - 1) * tiles.SWIZZLE_BYTES / MODEL.l2_rate
  assert crooked_us(19) == pytest.approx(shared)
  assert crooked_us(24) > shared  # Those begin within lines, too.
  assert crooked_us(64) == 0.0


def test_copies_of_rows_that_share_lines_cost_more():
  """Of 256 rows of k four chunks a thread for each 64."""
  free = dataclasses.replace(MODEL, direct_copied_crooked=0.0)
  for m, more in ((512, 0.0), (504, 16 * MODEL.direct_copied_crooked)):
    problem = Problem(m, 64, 256, lhs_layout="m-major")
    time_us, without = (
        cost_model.estimate(problem, "direct", DirectConfig(), H200, model).time_us
        for model in (MODEL, free)
    )
    assert time_us - without == pytest.approx(more)


def test_what_is_loaded_beside_copies_counts_as_copies_do():
  """Of 48 columns of lhs, which all CTAs ask for, and of none that are copied."""
  for n, layouts, copies in ((512, "TN", True), (511, "TN", False)):
    problem = Problem(48, n, 192, **LAYOUTS[layouts])

    def time_us(problem=problem, **constants) -> float:
      model = dataclasses.replace(MODEL, **constants)
      return cost_model.estimate(problem, "direct", DirectConfig(), H200, model).time_us

    steps = time_us() - time_us(direct_step=0.0)
    assert steps == pytest.approx(3 * MODEL.direct_step * copies)
    assert (time_us(direct_copies_memory=0.0) < time_us()) == copies
    assert (time_us(direct_memory=0.0) < time_us()) == (not copies)


def test_direct_stores_each_result():
  epilogue = Epilogue(activation="gelu")
  one, two = (
      _estimate(Problem(64, 64, 64, epilogue=each), "direct", DirectConfig(64, 64))
      for each in (epilogue, dataclasses.replace(epilogue, saves=True))
  )
  assert two - one == pytest.approx(MODEL.direct_store, rel=0.1)


@pytest.mark.parametrize(
    ("size", "layouts"),
    [((16, 64, 200), "NT"), ((24, 704, 328), "TT")], ids=str,
)
def test_k_is_not_shared_out_where_that_took_longer(size, layouts):
  """One CTA a tile 1.66 and 2.24 us, a cluster 2.02 and 2.53."""
  found = heuristics.candidates(Problem(*size, **LAYOUTS[layouts]), H200)[0]
  assert (found.kernel, found.config.splits) == ("direct", 1)


@pytest.mark.parametrize(
    ("tile_n", "fields", "sent"),
    [(128, {}, 1.0), (144, {}, 4 / 3), (112, {}, 8 / 7), (256, dict(wg_dim="n"), 1.0),
     (144, dict(swap=True), 1.0), (144, dict(wg_dim="tile"), 4 / 3)],
    ids=str,
)
def test_pieces_of_results_have_whole_rows(tile_n, fields, sent):
  """7872x1624x88 NT took 16.4 us by 192x112 in turns, and 13.7 by 256 columns."""
  problem = Problem(7872, 1616, 88, rhs_layout="k-major")
  config = PersistentConfig(128, tile_n, consumers=2, **fields)
  assert Work(problem, "persistent", config, H200).sent == pytest.approx(sent)
  narrow = dataclasses.replace(problem, n=tile_n)  # All of a row: no line is shared.
  assert Work(narrow, "persistent", config, H200).sent == 1.0
  wide = dataclasses.replace(problem, n=1624)  # Threads store rows within sectors.
  assert Work(wide, "persistent", config, H200).sent == 1.0


def test_what_pieces_send_takes_the_memory_time(monkeypatch):
  problem = Problem(7872, 1616, 88, rhs_layout="k-major")
  work = Work(problem, "persistent", PersistentConfig(128, 144), H200)
  found = traffic.memory(work, H200, MODEL)
  monkeypatch.setattr(Work, "sent", 1.0)
  stored = 2 * problem.m * problem.n * traffic.stored(2 * problem.n, MODEL)
  more = stored / 3 / (H200.bandwidth_tbps * 1e6 * MODEL.memory)
  assert found - traffic.memory(work, H200, MODEL) == pytest.approx(more)
