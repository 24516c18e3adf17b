"""Every kernel in GPU interpret mode, with race detection: a race fails the test."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from pallas_kernels import TILE_KERNELS as KERNELS
from pallas_kernels import tiles, ways
from pallas_kernels.problem import Epilogue
from tests import kernel_cases
from tests.kernel_cases import LAYOUTS, check, make_problem, mostly_slow, small_config

FULL = (128, 256, 192)
RAGGED = (133, 203, 141)  # Odd, and no multiple of any tile.


@pytest.mark.parametrize(
    "operands",
    mostly_slow([
        *((layouts, RAGGED) for layouts in list(LAYOUTS)[::-1]), ("NN", FULL),
        ("TT", FULL),
    ]),
    ids=str,
)
@pytest.mark.parametrize(
    ("kernel", "dtype"), [x for x in kernel_cases.KERNELS_AND_DTYPES if x[1] != "float16"]
)
def test_layouts_and_dtypes(kernel, dtype, operands):
  layouts, size = operands
  check(kernel, make_problem(*size, layouts, dtype), small_config(kernel, dtype))


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
def test_float16(kernel):
  check(kernel, make_problem(*RAGGED, "TN", "float16"), small_config(kernel, "float16"))


@pytest.mark.parametrize("out_dtype", mostly_slow(["float32", "bfloat16", "float16"]))
@pytest.mark.parametrize("kernel", KERNELS)
def test_out_dtypes(kernel, out_dtype):
  problem = make_problem(130, 96, 128, dtype="float16", out_dtype=out_dtype)
  check(kernel, problem, small_config(kernel))


@pytest.mark.parametrize("promote", mostly_slow([2, 1, 5]))
@pytest.mark.parametrize("kernel", KERNELS)
def test_promoted_sums(kernel, promote):
  """Also where the last part of k is shorter, or the first is all of it."""
  fields = dict(tile_m=64) if kernel in ("blocked", "pipelined") else {}
  config = small_config(kernel, tile_n=64, promote=promote, **fields)
  check(kernel, make_problem(130, 96, 64 * 5, out_dtype="float32"), config)


@pytest.mark.parametrize("c_dtype", mostly_slow(["float32", "bfloat16"]))
@pytest.mark.parametrize("kernel", KERNELS)
def test_alpha_beta_c(kernel, c_dtype):
  problem = make_problem(133, 203, 128, epilogue=Epilogue(-0.5, 2.0, c_dtype))
  check(kernel, problem, small_config(kernel))


@pytest.mark.parametrize(
    "shared", mostly_slow([{"rhs_batched": False}, {"lhs_batched": False}, {}]), ids=str
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_batch(kernel, shared):
  problem = make_problem(70, 130, 128, "TN", batch=3, **shared)
  check(kernel, problem, small_config(kernel))


@pytest.mark.parametrize(
    "size", [(1, 1, 1), (1, 200, 7), (200, 1, 65), (3, 5, 130), (64, 64, 1)], ids=str
)
@pytest.mark.parametrize(
    "kernel", mostly_slow(["persistent", "blocked", "pipelined"])
)
def test_sizes_below_one_tile(kernel, size):
  check(kernel, make_problem(*size), small_config(kernel))


@pytest.mark.parametrize("wg_dim", mostly_slow(["m", "n", "tile"]))
@pytest.mark.parametrize(
    "cluster", mostly_slow([(2, 1), (1, 4), (2, 2), (1, 1), (1, 2), (4, 1)], 3), ids=str
)
def test_clusters(cluster, wg_dim):
  """Odd numbers of tiles: a cluster's second CTA then works outside the result."""
  config = small_config(
      "persistent", cluster_m=cluster[0], cluster_n=cluster[1], wg_dim=wg_dim
  )
  check("persistent", make_problem(384, 384, 200, "NT"), config, num_sms=4)


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [(4, 1), (1, 4), (2, 2)], ids=str)
@pytest.mark.parametrize("layouts", mostly_slow(["NN", "TT"]))
def test_clusters_and_results_smaller_than_they(cluster, layouts):
  """Rows beyond the last are not loaded; the CTAs of a cluster still share the rest."""
  config = small_config("persistent", cluster_m=cluster[0], cluster_n=cluster[1])
  check("persistent", make_problem(40, 72, 200, layouts), config, num_sms=4)


@pytest.mark.slow
@pytest.mark.parametrize("fields", mostly_slow(kernel_cases.CHUNKED_TILES, 3), ids=str)
def test_operands_in_chunks(fields):
  """TMA takes their strides, but tiles them only where they are multiples of a tile."""
  problem = make_problem(200, 328, 140, "TN")
  assert ways.of(problem) == ("chunks", "chunks")
  check("persistent", problem, small_config("persistent", **fields), num_sms=2)


@pytest.mark.slow
@pytest.mark.parametrize("layouts", kernel_cases.mostly_more(["NN", "TT"]))
@pytest.mark.parametrize("fields, m, n", kernel_cases.SWAPPED_TILES, ids=str)
def test_swapped_operands(fields, m, n, layouts):
  """Tiles of any multiple of 8 rows of the result."""
  config = small_config("persistent", **fields, swap=True)
  check("persistent", make_problem(m, n, 200, layouts), config, num_sms=4)


@pytest.mark.slow
def test_swapped_operands_of_split_k_and_of_batches():
  fields = dict(tile_m=64, tile_n=48, consumers=1, cluster_k=2, swap=True)
  for sums in (1, 2):
    config = small_config("split_k", **fields, splits=2 * sums)
    check("split_k", make_problem(40, 136, 300), config)
  for shared in ({}, {"lhs_batched": False}, {"rhs_batched": False}):
    problem = make_problem(40, 136, 100, batch=2, dtype="float16", **shared)
    check("persistent", problem, small_config("persistent", tile_n=48, swap=True))


@pytest.mark.parametrize("k", [64 * 8, 64 * 17])
@pytest.mark.parametrize("promote", [0, 3])
def test_direct_of_more_k_than_it_holds(k, promote):
  problem = make_problem(70, 72, k, "TN", out_dtype="float32" if promote else "bfloat16")
  check("direct", problem, small_config("direct", promote=promote))


@pytest.mark.parametrize("splits", mostly_slow([3, 4, 2]))
@pytest.mark.parametrize("layouts", LAYOUTS)
def test_direct_of_ctas_that_share_k(splits, layouts):
  """The last of them has fewer k tiles, or none."""
  epilogue = Epilogue(0.5, -2.0, "float32")
  problem = make_problem(70, 136, 64 * 4 + 8, layouts, epilogue=epilogue)
  check("direct", problem, small_config("direct", splits=splits))


def test_direct_of_ctas_that_share_more_k_than_they_hold():
  problem = make_problem(24, 40, 64 * 19, "NT", batch=2, out_dtype="float32")
  check("direct", problem, small_config("direct", tile_n=16, splits=2, promote=3))


def test_direct_of_parts_of_blocks_of_rhs():
  """Sums of 48 columns, of which each of two CTAs adds up 48 or none."""
  problem = make_problem(72, 136, 200)
  check("direct", problem, small_config("direct", tile_n=48, splits=2))


@pytest.mark.parametrize("kernel", ["blocked", "pipelined", "split_k"])
def test_operands_in_chunks_of_every_kernel(kernel):
  check(kernel, make_problem(200, 328, 140, "TN"), small_config(kernel))


@pytest.mark.slow
@pytest.mark.parametrize("tile_n", mostly_slow([192, 64, 128]))
@pytest.mark.parametrize("wg_dim", ["m", "n", "tile"])
def test_many_short_tiles_a_cta(wg_dim, tile_n):
  """One k step a tile: the epilogue of a tile follows hard on the last one's.

  With an odd number of pieces a tile, two pieces in a row use one staging slot.
  """
  if wg_dim == "n" and tile_n % 128:
    tile_n += 64
  config = small_config("persistent", tile_n=tile_n, wg_dim=wg_dim)
  check("persistent", make_problem(256, 576, 64, "NT"), config, num_sms=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields, n", kernel_cases.mostly_more(kernel_cases.WIDE_TILES, 3), ids=str
)
def test_wide_tiles(fields, n):
  layouts = "TT" if n % 8 else "NN"
  config = small_config("persistent", **fields)
  check("persistent", make_problem(260, n, 136, layouts), config, num_sms=2)


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", mostly_slow([3, 2, 4]))
@pytest.mark.parametrize("k", [64, 128, 320])
def test_consumers_that_take_tiles_in_turn(num_stages, k):
  """Tiles longer and shorter than the ring; an odd and an even number of them a CTA."""
  config = small_config(
      "persistent", tile_m=64, tile_n=64, num_stages=num_stages, wg_dim="tile"
  )
  check("persistent", make_problem(100, 300, k, "TN"), config, num_sms=3)


@pytest.mark.parametrize("num_stages", [3, 6])
@pytest.mark.parametrize("k", mostly_slow([450, 64, 260]))
@pytest.mark.slow
def test_several_producers(num_stages, k):
  """They take k tiles in turn; here TMA loads for them, on the chip registers do."""
  fields = dict(
      tile_m=64, tile_n=64, consumers=1, num_stages=num_stages, misaligned="loads"
  )
  problem = make_problem(100, 201, k, "NT")
  check("persistent", problem, small_config("persistent", **fields), num_sms=3)
  if k > 128:
    config = small_config("split_k", splits=2, cluster_k=2, **fields)
    check("split_k", problem, config, num_sms=4)


@pytest.mark.parametrize("tile_n", [16, 32, 48])
def test_narrow_tiles(tile_n):
  config = small_config("persistent", tile_n=tile_n)
  check("persistent", make_problem(130, 50, 128, "NT"), config)


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("tile_n", mostly_slow([176, 80, 48, 112, 208, 240]))
def test_tiles_that_pieces_do_not_divide(tile_n, swap):
  """The last piece of a tile stores some of the columns of the one before, once more."""
  config = small_config("persistent", tile_n=tile_n, swap=swap)
  m, n = (2 * tile_n, 200) if swap else (200, 2 * tile_n)
  check("persistent", make_problem(m, n, 136, "NT"), config, num_sms=1)


@pytest.mark.slow
@pytest.mark.parametrize("n", kernel_cases.mostly_more([201, 328, 320]))
@pytest.mark.parametrize("layouts", kernel_cases.mostly_more(["TN", "NN"]))
@pytest.mark.parametrize("kernel, fields", kernel_cases.N_MAJOR_TILES, ids=str)
def test_columns_between_the_blocks_of_an_n_major_rhs(kernel, fields, layouts, n):
  """Slots have whole blocks of 64 columns; the tile has part of the last."""
  check(kernel, make_problem(200, n, 200, layouts), small_config(kernel, **fields))


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", mostly_slow([3, 2, 5]))
@pytest.mark.parametrize("k", [64, 128, 640])
def test_rings_longer_and_shorter_than_k(num_stages, k):
  for kernel in ("pipelined", "persistent"):
    config = small_config(kernel, num_stages=num_stages)
    check(kernel, make_problem(128, 128, k), config)


@pytest.mark.slow
@pytest.mark.parametrize("splits", kernel_cases.mostly_more([3, 18, 2]))
def test_split_k(splits):
  """Also where the last parts of k are short or empty."""
  problem = make_problem(100, 130, 64 * 18 + 3, "TT", batch=2)
  check("split_k", problem, small_config("split_k", splits=splits))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("splits", "cluster_k", "wg_dim"),
    kernel_cases.mostly_more([(6, 2, "m"), (3, 3, "n"), (8, 4, "m")], 2),
)
def test_split_k_within_clusters(splits, cluster_k, wg_dim):
  """Sums through distributed shared memory, then over clusters; several tiles a CTA."""
  problem = make_problem(
      300, 140, 64 * 11 - 5, "NT", epilogue=Epilogue(0.5, 2.0, "float32")
  )
  config = small_config("split_k", splits=splits, cluster_k=cluster_k, wg_dim=wg_dim,
                        tile_n=64)
  check("split_k", problem, config, num_sms=8)


@pytest.mark.slow
def test_split_k_is_bitwise_the_same_on_every_run():
  problem = make_problem(128, 128, 1024, out_dtype="float32")
  operands = kernel_cases.random_operands(problem)
  config = small_config("split_k", splits=5)
  runs = [
      np.asarray(
          kernel_cases.emulate("split_k", problem, config, operands, num_sms=num_sms)
      )
      for num_sms in (1, 3, 4)
  ]
  for run in runs[1:]:
    np.testing.assert_array_equal(runs[0], run)


@pytest.mark.parametrize("minor", ["m", "n"])
@pytest.mark.parametrize("width", [1, 3, 8])
@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (8, 3), (16, 16)], ids=str)
def test_tile_order_visits_every_tile_once(shape, width, minor):
  order = [tuple(map(int, tiles.tile_order(i, *shape, minor, width)))
           for i in range(shape[0] * shape[1])]
  assert sorted(order) == [(m, n) for m in range(shape[0]) for n in range(shape[1])]


# -- What the kernels refuse ---------------------------------------------------------

LOADS = dict(misaligned="loads")


@pytest.mark.parametrize(
    ("kernel", "fields", "named"),
    [
        ("blocked", dict(tile_m=100), "tile_m=100"),
        ("blocked", dict(tile_n=100), "tile_n=100"),
        ("blocked", dict(tile_k=32), "tile_k=32"),
        ("blocked", dict(tile_m=256, tile_n=256), "accumulator of 256x256"),
        ("blocked", dict(promote=-1), "promote=-1"),
        ("pipelined", dict(promote=4), "promoted sum of 128x128"),
        ("pipelined", dict(num_stages=1), "num_stages=1"),
        ("pipelined", dict(num_stages=8), "shared memory"),
        ("persistent", dict(tile_m=64), "tile_m=64"),
        ("persistent", dict(tile_n=96, wg_dim="n"), "48 columns a warpgroup"),
        ("persistent", dict(cluster_m=4, cluster_n=4), "have 1, 2 or 4 CTAs"),
        ("persistent", dict(cluster_m=3), "have 1, 2 or 4 CTAs"),
        ("persistent", dict(cluster_m=-2, cluster_n=-1), "have 1, 2 or 4 CTAs"),
        ("persistent", dict(cluster_m=4, tile_n=24), "4 CTAs load at least 8 each"),
        ("persistent", dict(grid_width=0), "grid_width=0"),
        ("split_k", dict(splits=1), "splits=1"),
        ("split_k", dict(splits=5), "k=256"),
        ("split_k", dict(splits=3, cluster_k=2), "cluster_k=2"),
        ("split_k", dict(splits=4, cluster_k=2, cluster_m=2), "excludes cluster_m"),
        ("split_k", dict(wg_dim="tile"), "wg_dim=tile"),
        ("persistent", dict(wg_dim="tile", tile_m=64, tile_n=16, num_stages=17), "16"),
        ("persistent", dict(tile_m=64, tile_n=16, consumers=1, num_stages=33), "32"),
        ("persistent", LOADS, "one consumer"),
        ("persistent", dict(LOADS, cluster_m=2), "only TMA multicasts"),
        ("persistent", dict(LOADS, consumers=1, num_stages=4), "multiple of 3"),
        ("persistent", dict(LOADS, consumers=1, num_stages=3), "too few registers"),
    ],
)
def test_supports_names_the_constraint(kernel, fields, named):
  problem = make_problem(512, 512, 256)
  reason = KERNELS[kernel].supports(problem, small_config(kernel, **fields))
  assert reason is not None and named in reason


@pytest.mark.parametrize("kernel", ["persistent", "split_k"])
def test_swap_names_its_constraints(kernel):
  config = small_config(kernel, swap=True)
  for fields, named in (
      (dict(out_dtype="float32"), "16-bit results"),
      (dict(n=132), "rows of n=132"),
  ):
    problem = make_problem(**dict(dict(m=128, n=128, k=256), **fields))
    assert named in KERNELS[kernel].supports(problem, config)


@pytest.mark.parametrize("kernel", KERNELS)
def test_supports_refuses_other_dtypes(kernel):
  problem = make_problem(256, 256, 256)
  config = small_config(kernel)
  module = KERNELS[kernel]
  assert module.supports(problem, config) is None
  for fields, named in [
      (dict(dtype="int8"), "int8"),
      (dict(out_dtype="float64"), "float64"),
      (dict(algorithm="tf32_f32"), "tf32_f32"),
      (dict(m=0), "m=0"),
  ]:
    assert named in module.supports(dataclasses.replace(problem, **fields), config)
