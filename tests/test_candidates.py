"""Which configs the heuristics list, and in which order."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from jaxgemm import device, heuristics, multicasts, ring_slots, tile_shapes
from pallas_kernels import KERNELS, specialised, tiles
from pallas_kernels.configs import PersistentConfig
from pallas_kernels.problem import Epilogue, Problem
from tests import kernel_cases

H200 = device.known_device("NVIDIA H200")
GATED = Epilogue(activation="silu", gated=True)


@pytest.mark.parametrize(("k", "listed"), [(256, True), (249, True), (320, True),
                                           (313, False)])
def test_direct_shifts_few_k_tiles(k, listed):
  """Rows of odd length, which it shifts in registers, of at most four."""
  found = heuristics.candidates(Problem(617, 519, k, rhs_layout="k-major"), H200)
  assert any(c.kernel == "direct" for c in found) == listed


def _tiles_of_direct(problem) -> set[tuple[int, int]]:
  return {
      (c.config.tile_m, c.config.tile_n) for c in heuristics.candidates(problem, H200)
      if c.kernel == "direct" and c.config.splits == 1
  }


@pytest.mark.parametrize(
    ("size", "of_some", "of_large"),
    [
        ((8192, 8192, 64), True, True), ((8192, 8192, 72), False, False),  # Too many.
        ((1024, 1024, 128), True, True), ((1024, 1024, 136), True, False),
    ],
    ids=str,
)
def test_direct_does_one_k_tile_of_any_product_and_a_few_of_small_ones(
    size, of_some, of_large
):
  found = _tiles_of_direct(Problem(*size, rhs_layout="k-major"))
  assert ({(64, 64), (128, 64)} <= found) == of_some
  assert (found >= set(tile_shapes.DIRECT_LARGE)) == of_large
  assert of_large or found.isdisjoint(tile_shapes.DIRECT_LARGE)


@pytest.mark.parametrize(("k", "listed"), [(192, True), (200, False)])
def test_large_tiles_of_direct_have_three_k_tiles(k, listed):
  """More of them leave an SM one CTA; small tiles may still have as many."""
  found = _tiles_of_direct(Problem(4072, 112, k, lhs_layout="m-major"))
  assert ((64, 128) in found) == ((128, 64) in found) == listed
  assert (64, 64) in found


def test_clusters_of_direct_have_few_k_tiles_each():
  found = heuristics.candidates(Problem(72, 168, 1400, lhs_layout="m-major"), H200)
  shared = [c.config for c in found if c.kernel == "direct"]
  assert {config.splits for config in shared} == {2, 3, 4, 6, 8}
  assert found[0].config in shared  # A ring of shared memory has no time to fill.
  long = heuristics.candidates(Problem(72, 168, 64 * 129), H200)
  assert not any(c.kernel == "direct" for c in long)


def test_partial_sums_are_not_transposed():
  found = heuristics.candidates(Problem(40, 432, 6856), H200)
  split = [c.config for c in found if c.kernel == "split_k"]
  assert any(c.splits > c.cluster_k for c in split)
  assert any(c.swap for c in split)
  assert not any(c.swap and c.splits > c.cluster_k for c in split)


@pytest.mark.parametrize(
    "m, n, k, batch, one_row",
    [(5984, 312, 2816, 1, False), (5144, 40, 3704, 4, True)], ids=str,
)
def test_little_is_shared_only_where_all_ask_for_it(m, n, k, batch, one_row):
  """By CTAs along n: the rows of a tile that is much wider than high."""
  problem = kernel_cases.make_problem(m, n, k, "TT", batch=batch)
  shared = [
      c.config for c in heuristics.candidates(problem, H200)
      if c.kernel == "persistent" and c.config.cluster_n > c.config.cluster_m == 1
  ]
  assert shared
  wide = [c for c in shared if c.tile_m < 0.3 * (c.tile_m + c.tile_n)]
  assert bool(wide) == one_row
  assert all(c.swap for c in wide)


def test_multicast_is_weighed_where_rows_are_slow_to_fetch():
  clusters = lambda m, n, k: {
      (c.config.cluster_m, c.config.cluster_n)
      for c in heuristics.candidates(Problem(m, n, k), H200)
      if c.kernel == "persistent" and not c.config.swap
  }
  assert {(1, 1), (4, 1), (1, 4), (2, 2)} <= clusters(2048, 2048, 4104)
  assert clusters(2048, 2048, 4096) <= {(1, 1), (2, 1)}
  # Not where three clusters in four would have CTAs without a tile.
  assert (4, 1) not in clusters(384, 4000, 3352)


@pytest.mark.parametrize("layouts", kernel_cases.LAYOUTS)
@pytest.mark.parametrize("size", [(784, 4120, 3616), (4000, 300, 64), (1808, 5520, 1656)])
def test_filling_tiles_are_as_narrow_as_may_be(size, layouts):
  """With 8 columns less, or a block of rhs, they would take one round more."""
  problem = Problem(*size, batch=2, **kernel_cases.LAYOUTS[layouts])
  steps = tiles.column_step(problem.dtype), 16, tiles.rhs_block(problem)
  count = lambda rows, cols: 2 * tiles.cdiv(problem.m, rows) * tiles.cdiv(problem.n, cols)
  found = tile_shapes.filling(problem, H200)
  assert found and found == sorted(found)
  for rows, cols, consumers, _ in found:
    assert cols % steps[0] == 0 and rows % (64 * consumers) == 0
    assert any(
        count(rows, cols) <= rounds * sms < count(rows, max(cols - step, 1))
        for rounds in range(1, 7) for sms in (132, H200.ctas_at_once(4))
        for step in steps if cols % step == 0
    )


def test_crooked_products_have_filling_and_fitted_tiles_in_turns():
  """336 columns are two of 168, or of 176; rows of whole lines have the usual ones."""
  size = dict(m=8088, n=336, batch=7, rhs_layout="k-major")
  crooked, aligned = Problem(k=624, **size), Problem(k=640, **size)
  assert {(128, 168, 2, "tile"), (128, 176, 2, "tile")} <= set(
      tile_shapes.in_turns(crooked, H200)
  )
  assert not tile_shapes.in_turns(aligned, H200)
  assert not tile_shapes.in_turns(dataclasses.replace(crooked, dtype="float32"), H200)
  best = heuristics.candidates(crooked, H200)[0].config
  assert best.wg_dim == "tile" and best.tile_n in (168, 176)
  for size in ((784, 4120, 3616), (4832, 1544, 1232), (4976, 4728, 672)):
    problem = Problem(*size)
    for rows, cols, consumers, wg_dim in tile_shapes.in_turns(problem, H200):
      assert (consumers, wg_dim) == (2, "tile") and 96 <= cols
      config = PersistentConfig(rows, cols, consumers=consumers, wg_dim=wg_dim)
      # A consumer's sums leave registers for what else it has to know.
      assert rows * cols // 128 <= 192
      assert KERNELS["persistent"].supports(problem, config) is None


def test_tiles_that_fill_the_sms_once():
  """784 rows are four of 200, and 4120 columns 33 of 128: a tile for each of 132 SMs."""
  best = heuristics.candidates(Problem(784, 4120, 3616), H200)[0].config
  assert (best.tile_m, best.tile_n, best.swap) == (128, 200, True)


def test_large_crooked_products_change_their_operands_about():
  """160 columns are no whole blocks of an n-major rhs, of which 256 rows are."""
  problem = Problem(4611, 6992, 2080, batch=5)
  shapes = [
      (c.config.tile_m, c.config.tile_n, c.config.swap)
      for c in heuristics.candidates(problem, H200) if c.kernel == "persistent"
  ]
  assert (256, 160, True) in shapes
  # By tiles that share out the result's rows evenly 982 us on an H200, by these 1,048.
  best = heuristics.candidates(problem, H200)[0].config
  assert (best.tile_m, best.tile_n, best.wg_dim, best.swap) == (128, 200, "tile", True)


@pytest.mark.parametrize(
    ("sizes", "layouts", "fields", "cols"),
    [
        ((8192, 14336, 4096), "NN", {}, 200), ((8192, 14336, 4096), "TT", {}, None),
        ((4096, 14336, 4096), "NT", {}, 200), ((1024, 1024, 1024), "NT", {}, 176),
        ((8192, 14336, 4096), "NN", dict(dtype="float32"), None),
        ((88, 14336, 4096), "NN", {}, None), ((90, 14336, 4096), "NN", {}, 96),
        ((8192, 14336, 4096), "NN", dict(epilogue=GATED), 200),
        ((8192, 14336, 4096), "TN", dict(epilogue=GATED), 192),
        ((2048, 14336, 4096), "NT", dict(epilogue=GATED), 192),
    ],
    ids=str,
)
def test_tiles_that_share_out_rows_evenly(sizes, layouts, fields, cols):
  """Of the transposed product; blocks of an n-major operand hold 64 of them."""
  problem = kernel_cases.make_problem(*sizes, layouts, **fields)
  shapes = tile_shapes.evenly(problem)
  assert shapes == ([(128, cols, 2, "tile")] if cols else [])


@pytest.mark.parametrize("layouts", kernel_cases.LAYOUTS)
@pytest.mark.parametrize("saves", [False, True])
def test_gated_products_of_many_rows_change_their_operands_about(layouts, saves):
  """And pairs of CTAs share their tiles."""
  epilogue = dataclasses.replace(GATED, saves=saves)
  problem = kernel_cases.make_problem(8192, 14336, 4096, layouts, epilogue=epilogue)
  best = heuristics.candidates(problem, H200)[0].config
  assert (best.tile_m, best.wg_dim, best.swap) == (128, "tile", True)
  assert (best.cluster_m, best.cluster_n) == (2, 1)


def test_no_crooked_rows_are_shared_unevenly():
  """Each CTA of a cluster has a part of a tile that is whole swizzled tiles."""
  for size in ((968, 224, 760), (1136, 1040, 216), (5704, 1200, 400), (1320, 824, 808)):
    for layouts in kernel_cases.LAYOUTS:
      problem = kernel_cases.make_problem(*size, layouts)
      clusters = [
          c.config for c in heuristics.candidates(problem, H200)
          if c.kernel == "persistent" and c.config.cluster > 1
      ]
      assert any(config.cluster_m > 1 for config in clusters)
      for config in clusters:
        assert config.tile_n % (8 * config.cluster_m) == 0, (problem, config)


def test_which_large_tiles_pairs_of_ctas_share():
  """Not those in turns of few k tiles, nor of columns that two cannot share out.

  But of very few k tiles, and of operands that the L2 does not hold.
  """
  plain = Epilogue()
  for tile_m, tile_n, wg_dim, swap, k, epilogue, shares in (
      (128, 200, "tile", True, 2048, plain, True),
      (128, 200, "tile", True, 1984, plain, False),
      (128, 192, "tile", False, 512, plain, True),
      (128, 192, "tile", False, 576, plain, False),
      (128, 192, "tile", False, 1152, plain, False),
      (128, 192, "tile", False, 1216, plain, True),
      (128, 192, "tile", False, 2048, GATED, True),
      (128, 192, "tile", False, 1984, GATED, False),
      (192, 128, "tile", False, 4096, GATED, False),
      (192, 128, "tile", False, 4096, plain, True),
      (128, 320, "m", False, 768, plain, True),
      (128, 320, "m", True, 768, plain, True),
      (256, 200, "m", True, 4096, plain, False),
      (256, 192, "m", True, 4096, plain, True),
  ):
    config = PersistentConfig(tile_m, tile_n, num_stages=3, wg_dim=wg_dim, swap=swap)
    problem = kernel_cases.make_problem(8192, 14336, k, epilogue=epilogue)
    found = [each for _, each in multicasts.shared(problem, [("persistent", config)])]
    pair = dataclasses.replace(config, cluster_m=2)
    assert found == ([pair] if shares else []), (config, k, epilogue)


@pytest.mark.parametrize(("k", "turned"), [(1984, False), (2048, True)])
@pytest.mark.parametrize("slopes", [1, 2])
def test_slopes_are_transposed_where_tiles_in_turns_hide_them(slopes, k, turned):
  epilogue = Epilogue(activation="gelu", slopes=slopes, c_dtype="bfloat16")
  problem = kernel_cases.make_problem(8192, 14336, k, "NT", epilogue=epilogue)
  found = heuristics.candidates(problem, H200)
  swapped = [c.config for c in found if getattr(c.config, "swap", False)]
  assert found[0].config.swap == turned == bool(swapped)
  few_rows = dataclasses.replace(problem, m=512, n=5632)  # Which other tiles fit.
  found = heuristics.candidates(few_rows, H200)
  swapped += [c.config for c in found if getattr(c.config, "swap", False)]
  assert all(config.wg_dim == "tile" for config in swapped)


@pytest.mark.parametrize("layouts", kernel_cases.LAYOUTS)
def test_wide_tiles_of_many_rows_of_an_m_major_lhs(layouts):
  """The gradient of weights [14336, 4096]; not of few rows."""
  problem = kernel_cases.make_problem(14336, 4096, 8192, layouts)
  m_major = layouts[0] == "T"
  assert tile_shapes.wide(problem) == ([(128, 320, 2, "m")] if m_major else [])
  assert not tile_shapes.wide(dataclasses.replace(problem, m=512))
  best = heuristics.candidates(problem, H200)[0].config
  assert ((best.tile_m, best.tile_n, best.swap) == (128, 320, True)) == m_major


@pytest.mark.parametrize(
    "sizes, dtype", [((4608, 6976, 2048), "bfloat16"), ((4611, 6992, 2084), "float32")]
)
def test_tiles_for_crooked_rows_are_for_no_others(sizes, dtype):
  assert not tile_shapes.crooked(kernel_cases.make_problem(*sizes, dtype=dtype))


def test_no_candidate_is_listed_twice():
  """Tiles of 256x160 are of equal parts of 320 columns, and for crooked rows, too."""
  listed = heuristics.candidates(kernel_cases.make_problem(8200, 320, 1000, "NT"), H200)
  configs = [(each.kernel, each.config) for each in listed]
  assert len(configs) == len(set(configs))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "epilogue",
    [
        Epilogue(),
        Epilogue(beta=1.0, c_dtype="float32"),
        Epilogue(has_bias=True, activation="gelu", saves=True),
        Epilogue(activation="silu", gated=True),
        Epilogue(activation="silu", gated=True, saves=True),
        Epilogue(activation="gelu", slopes=1, c_dtype="bfloat16"),
        Epilogue(activation="silu", slopes=2, c_dtype="bfloat16"),
    ],
    ids=str,
)
def test_every_epilogue_has_a_plan_at_every_size(epilogue, dtype):
  """Whatever rows, columns and strides tiles are fitted to."""
  if dtype == "float32" and epilogue.gated:
    return
  of_dtype = {} if dtype == "bfloat16" else dict(
      dtype=dtype, out_dtype=dtype, algorithm="tf32_f32"
  )
  sizes = (1, 8, 17, 50, 197, 784), (64, 1000, 14336), (72, 4096)
  for m, n, k in itertools.product(*sizes):
    for layouts in kernel_cases.LAYOUTS.values():
      problem = Problem(m, n, k, epilogue=epilogue, **layouts, **of_dtype)
      for candidate in heuristics.candidates(problem, H200):
        if candidate.kernel != "xla":
          smem = KERNELS[candidate.kernel].smem_bytes(problem, candidate.config)
          assert smem <= tiles.SMEM_LIMIT_BYTES


def test_one_more_stage_for_smaller_pieces_of_the_result():
  """Which of the two is faster depends on k."""
  stages, best = {}, {}
  for k in (1104, 16384 + 16):
    problem = Problem(6488, 848, k, rhs_layout="k-major")
    found = [
        c.config for c in heuristics.candidates(problem, H200)
        if c.kernel == "persistent" and (c.config.tile_m, c.config.tile_n) == (256, 176)
        and c.config.cluster == 1 and not c.config.swap
    ]
    stages[k] = {c.num_stages: specialised.pieces(problem, c) for c in found}
    best[k] = found[0].num_stages
  assert stages[1104] == {3: 6, 4: 22}
  assert best == {1104: 3, 16384 + 16: 4}


def _columns_of(problem: Problem, kernel: str) -> set[int]:
  """tile_n of the candidates that multiply the operands in their places."""
  found = heuristics.candidates(problem, H200)
  return {
      c.config.tile_n for c in found
      if c.kernel == kernel and not getattr(c.config, "swap", False)
  }


@pytest.mark.parametrize("kernel", ["persistent", "split_k", "pipelined"])
def test_tiles_break_the_blocks_of_an_n_major_rhs_only_where_that_was_faster(kernel):
  """Where rows begin within lines of 128 bytes, and at most a fifth is for others."""
  between = lambda n, k, layout="n-major": {
      cols for cols in _columns_of(Problem(656, n, k, rhs_layout=layout), kernel)
      if cols % 64
  }
  for k in (512, 6440):
    assert not between(2176, k) and not between(2177, k)  # Whole lines, or padded so.
  if kernel == "persistent":
    crooked = between(2168, 6440)
    assert crooked and all(tiles.round_up(n, 64) <= 1.25 * n for n in crooked)
    assert any(tiles.round_up(n, 64) > 1.25 * n for n in between(2168, 6440, "k-major"))
  assert (between(24, 6440) != set()) == (kernel in ("persistent", "split_k"))


@pytest.mark.parametrize(
    ("cols", "k", "batch"), [(16384, 7168, 1), (4096, 14336, 1), (2048, 1024, 64)]
)
def test_a_row_of_k_is_shared_out_in_few_rows_of_the_matrix(cols, k, batch):
  """Not by `pipelined`, which has zeros filled in, nor by tiles of many rows: 59 us of 55
  and 67 of 62 on an H200 (2026-11-25).
  """
  problem = Problem(1, cols, k, batch, rhs_layout="k-major")
  first = heuristics.candidates(problem, H200)[0]
  assert first.kernel in ("persistent", "split_k")
  rows = first.config.tile_m if first.config.swap else first.config.tile_n
  assert rows <= 128


def test_few_lines_that_all_ctas_ask_for_are_no_choice_for_pipelined():
  """On the chip 40 rows of lhs, in lines that 102 CTAs ask for, took it 6.5 us of 4.5."""
  problem = Problem(
      40, 6520, 408, lhs_layout="m-major", dtype="float16", out_dtype="float16",
      algorithm="f16_f32",
  )
  best, *others = heuristics.candidates(problem, H200)
  assert best.kernel != "pipelined"
  assert any(c.kernel == "pipelined" for c in others)


@pytest.mark.parametrize(
    ("problem", "tile", "slots"),
    [
        # Each CTA has rows of its own; all of them ask the memory at once.
        (Problem(1, 6144, 4096), (128, 16, True), 9),
        (Problem(1, 4096, 4096), (64, 16, True), 14),
        # Of larger tiles an SM alone needs more than the memory does of all.
        (Problem(32, 7520, 416, batch=7), (64, 208, False), 4),
        # CTAs share most of what they ask for: all that there are.
        (Problem(256, 4096, 4096), (64, 128, False), 8),
        (Problem(4096, 4096, 4096), (128, 256, False), 4),
    ],
    ids=str,
)
def test_no_more_slots_than_the_memory_has_use_for(problem, tile, slots):
  tile_m, tile_n, swap = tile
  found = {
      c.config.num_stages for c in heuristics.candidates(problem, H200)
      if c.kernel == "persistent" and c.config.cluster == 1
      and (c.config.tile_m, c.config.tile_n, c.config.swap) == (tile_m, tile_n, swap)
      and c.config.wg_dim == "m"
  }
  assert found == {slots}


def test_slots_by_the_memory_of_the_device():
  """Slower memory has use for fewer; other than 16 bits have not been measured."""
  config = PersistentConfig(64, 16, num_stages=16, consumers=1, swap=True)
  problem = Problem(1, 4096, 4096)
  h100 = device.known_device("NVIDIA H100 80GB HBM3")
  slots = [
      ring_slots.without_queue(problem, config, 64, each).num_stages
      for each in (H200, h100)
  ]
  assert slots == [14, 10]
  assert ring_slots.without_queue(
      dataclasses.replace(problem, dtype="float8_e4m3fn"), config, 64, H200
  ) is config
