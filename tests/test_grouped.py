"""Kernels of products in groups of rows: what they take, and emulated with races."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest

from pallas_kernels import GROUPED_KERNELS
from pallas_kernels.problem import Epilogue
from tests import kernel_cases
from tests.grouped_cases import (
  INFINITE,
  ISOLATED_ROWS,
  ISOLATED_SIZES,
  ISOLATED_SUM_SIZES,
  ISOLATED_SUMS,
  SIZES,
  SWAP,
  check,
  check_rows_alone,
  check_sums_alone,
  config_of,
  emulate,
  of_k,
  of_m,
)
from tests.kernel_cases import more

# -- grouped_m, emulated -----------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    kernel_cases.mostly_more(
        ["some empty", "fewer", "more", "one row each", "all in one", "none"]
    ),
)
def test_rows_of_few_row_tiles(name):
  sizes = SIZES[name]
  check(of_m(150, 72, 100, len(sizes), "NT"), config_of(**SWAP), sizes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", kernel_cases.mostly_more(["fewer", "some empty", "more", "none"])
)
def test_rows_of_whole_tiles(name):
  sizes = SIZES[name]
  check(of_m(150, 72, 100, len(sizes)), config_of(), sizes)


# (fields of the config, those of the problem)
ROWS = (
    more(dict(tile_m=128, consumers=2), {}),
    more(dict(tile_n=128, consumers=2, wg_dim="n"), {}),
    (dict(consumers=2, wg_dim="tile"), {}),
    more(dict(tile_m=256, consumers=2), {}),  # Two strips of 64 rows a warpgroup.
    more(dict(cluster_n=2), {}),
    more(dict(promote=1), dict(out_dtype="float32")),
    more(dict(SWAP, tile_n=32), dict(dtype="float16")),
    (dict(tile_k=128, promote=1), dict(dtype="float8_e4m3fn", out_dtype="float32")),
    more(dict(tile_k=128), dict(dtype="float8_e5m2", out_dtype="bfloat16")),
    more(dict(SWAP, tile_k=128), dict(dtype="float8_e4m3fn", out_dtype="float16")),
    more(dict(tile_k=128), dict(dtype="int8", out_dtype="int32")),
    (dict(SWAP, cluster_m=2), {}),
    more(dict(SWAP, consumers=2, wg_dim="tile"), {}),
    more(dict(SWAP, tile_n=24, tile_m=128, consumers=2, promote=1), {}),
    more(dict(SWAP, tile_n=72), {}),  # Pieces that have rows in common.
    more(dict(SWAP, tile_n=144, tile_m=128, consumers=2), {}),
    more(dict(tile_n=80), dict(dtype="float16")),
    more(dict(tile_m=192, consumers=3, cluster_n=4), {}),
    more(dict(tile_m=128, tile_n=128, consumers=2, wg_dim="tile", cluster_n=2), {}),
    more(dict(tile_n=128, promote=2), dict(out_dtype="float32", dtype="float16")),
    more(dict(promote=1, wg_dim="tile", consumers=2), dict(out_dtype="float32")),
    more(dict(SWAP, tile_m=128, consumers=2, wg_dim="m", grid_width=1), {}),
    more(dict(SWAP, tile_n=64, cluster_m=4, grid_width=3), {}),
    more(dict(SWAP, tile_m=128, tile_n=256, consumers=2), {}),
)


@pytest.mark.slow
@pytest.mark.parametrize("fields, of_problem", ROWS, ids=str)
def test_rows(fields, of_problem):
  """Sums of k that is padded, or in part; columns of two tiles, the last in part."""
  layouts = "NT" if fields.get("cluster_n", 1) == 1 and "promote" in fields else "NN"
  sizes = (0, 70, 1, 129, 0, 20)
  problem = of_m(261, 136, 130, len(sizes), layouts, **of_problem)
  check(problem, config_of(**fields), sizes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "m, n, k",
    kernel_cases.mostly_more(
        [(7, 200, 129), (33, 8, 8), (1, 64, 64), (64, 72, 1), (65, 8, 257)]
    ),
    ids=str,
)
def test_rows_of_small_and_odd_sizes(m, n, k):
  """Smaller than a tile."""
  fields = SWAP if k > m else {}
  check(of_m(m, n, k, 2, "NT" if k > m else "NN"), config_of(**fields), (m // 2, 1))


@pytest.mark.parametrize(
    "layouts, source",
    [("NN", "int8"), more("NT", "float8_e4m3fn"), more("NN", "float8_e5m2")],
)
def test_rows_times_rhs_in_8_bits(layouts, source):
  problem = of_m(61, 144, 80, 4, layouts, rhs_source=source)
  check(problem, config_of(**SWAP), (20, 0, 33, 1))


@pytest.mark.parametrize(
    "groups", [more(40), more(1)], ids=str
)
def test_many_groups_and_one(groups):
  """More groups than rows, most of them empty; one that has some."""
  sizes = np.zeros(groups, int)
  sizes[:: max(groups // 7, 1)] = 9
  check(of_m(40, 64, 64, groups), config_of(**SWAP), sizes, num_sms=2)


@pytest.mark.slow
@INFINITE
@pytest.mark.parametrize("fields", [SWAP, more(dict(tile_m=128, consumers=2))], ids=str)
def test_what_is_not_finite_stays_in_its_rows(fields):
  problem = of_m(*ISOLATED_ROWS)
  run = functools.partial(emulate, problem, config_of(**fields), sizes=ISOLATED_SIZES)
  check_rows_alone(problem, run)


# -- grouped_k, emulated -----------------------------------------------------------


@pytest.mark.parametrize("name", SIZES)
def test_sums(name):
  sizes = SIZES[name]
  check(of_k(72, 136, 150, len(sizes)), config_of(), sizes)


SUMS = (
    (dict(consumers=2, wg_dim="tile"), {}),
    (dict(tile_m=128, tile_n=128, consumers=2), {}),
    more(dict(tile_m=128, tile_n=128, consumers=2, num_stages=2), dict(dtype="float16")),
    more(dict(consumers=2, wg_dim="tile", num_stages=2, cluster_n=2), {}),
    more(dict(tile_m=128, tile_n=128, consumers=2, promote=2), dict(out_dtype="float32")),
    more(dict(tile_n=128, consumers=2, wg_dim="n", tile_m=128), {}),
    more(dict(cluster_m=2), {}),
    (dict(cluster_n=2, tile_m=128, tile_n=128, consumers=2), {}),
    more(dict(promote=1), dict(out_dtype="float32")),
    (dict(promote=2, consumers=2, wg_dim="tile"), dict(out_dtype="float32")),
    more(dict(tile_m=192, tile_n=192, consumers=3), {}),
    more(dict(cluster_m=2, cluster_n=2, num_stages=2), {}),
    more(dict(cluster_m=4, grid_minor="n", grid_width=1), {}),
    more(dict(promote=3, tile_n=128), dict(out_dtype="float32", dtype="float16")),
    more(dict(tile_m=256, tile_n=128, consumers=2), {}),
)


@pytest.mark.slow
@pytest.mark.parametrize("fields, of_problem", SUMS, ids=str)
def test_sums_of_groups_that_begin_anywhere(fields, of_problem):
  sizes = (3, 0, 129, 1, 64, 0, 61)  # Of 261 rows.
  check(of_k(140, 136, 261, len(sizes), **of_problem), config_of(**fields), sizes)


@pytest.mark.parametrize(
    "m, n, k",
    [(8, 8, 7), (65, 200, 63), more(1, 64, 1), more(3, 8, 130), more(64, 72, 64)],
    ids=str,
)
def test_sums_of_small_and_odd_sizes(m, n, k):
  check(of_k(m, n, k, 2), config_of(tile_n=128), (k // 2, 1))


@pytest.mark.slow
@INFINITE
@pytest.mark.parametrize(
    "fields",
    kernel_cases.mostly_more(
        [dict(tile_m=128, tile_n=128, consumers=2), dict(consumers=2, wg_dim="tile"),
         dict(cluster_n=2)]
    ),
    ids=str,
)
def test_what_is_not_finite_stays_in_its_group(fields):
  problem = of_k(*ISOLATED_SUMS)
  run = functools.partial(
      emulate, problem, config_of(**fields), sizes=ISOLATED_SUM_SIZES
  )
  check_sums_alone(problem, run)


# -- What is supported -------------------------------------------------------------

OF_M, OF_K = of_m(512, 512, 512, 4), of_k(512, 512, 512, 4)


@pytest.mark.parametrize(
    "problem, fields, reason",
    [
        (OF_K, {}, "grouped_m is for groups of m"),
        (dataclasses.replace(OF_M, grouped=""), {}, "grouped_m is for groups of m"),
        (of_m(512, 512, 512, 4, dtype="float32"), dict(tile_k=32), "8 bits, .* float32"),
        (of_m(512, 512, 512, 4, rhs_source="int8"), {}, "rhs of dtype int8: .* swap"),
        (of_m(512, 512, 512, 4, lhs_source="int8"), dict(swap=True), "not of int8"),
        (of_m(512, 520, 512, 4, rhs_source="int8"), dict(swap=True), "520 bytes"),
        (of_m(512, 512, 512, 4, "TN"), {}, "lhs_layout='m-major'"),
        (of_m(512, 512, 512, 4, epilogue=Epilogue(c_dtype="bfloat16")), {}, "exclude c"),
        (of_m(512, 512, 512, 4, epilogue=Epilogue(has_bias=True)), {}, "exclude c, bias"),
        (of_m(512, 512, 512, 4, epilogue=Epilogue(activation="relu")), {}, "activation"),
        (of_m(512, 508, 512, 4), {}, "n=508: .* multiple of 16 bytes"),
        (OF_M, dict(cluster_m=2), "cluster along rows"),
        (OF_M, dict(swap=True, cluster_n=2), "cluster along rows"),
        (OF_M, dict(misaligned="loads"), "misaligned='loads'"),
        (OF_M, dict(misaligned="skewed"), "misaligned='skewed'"),
        (OF_M, dict(tile_m=96), "tile_m=96"),
        (OF_M, dict(num_stages=30), "shared memory"),
        (of_m(512, 512, 512, 4, out_dtype="float32"), dict(swap=True), "swap=True"),
        (of_m(0, 512, 512, 4), {}, "m=0"),
    ],
)
def test_why_not_grouped_m(problem, fields, reason):
  found = GROUPED_KERNELS["grouped_m"].supports(problem, config_of(**fields))
  assert found is not None
  with pytest.raises(ValueError, match=reason):
    raise ValueError(found)


@pytest.mark.parametrize(
    "problem, fields, reason",
    [
        (OF_M, {}, "grouped_k is for groups of k"),
        (of_k(512, 512, 512, 4, dtype="float32"), dict(tile_k=32), "16-bit .* float32"),
        (dataclasses.replace(OF_K, rhs_layout="k-major"), {}, "layouts TT"),
        (dataclasses.replace(OF_K, lhs_layout="k-major"), {}, "layouts NN"),
        (of_k(512, 512, 512, 4, epilogue=Epilogue(c_dtype="float32")), {}, "exclude c"),
        (of_k(512, 508, 512, 4), {}, "n=508: .* multiple of 16 bytes"),
        (of_k(512, 510, 512, 4, out_dtype="float32"), {}, "n=510"),
        (OF_K, dict(misaligned="runs"), "misaligned='runs'"),
        (OF_K, dict(swap=True), "swap=True"),
        (OF_K, dict(wg_dim="n", tile_n=128, consumers=2), "tile_m=64 must .* of 128"),
        (OF_K, dict(tile_m=128, consumers=2), "tile_n=64 must be a multiple of 128"),
        (OF_K, dict(tile_n=80), "tile_n=80 must be a multiple of 64"),
        (OF_K, dict(num_stages=30), "shared memory"),
        (OF_K, dict(cluster_m=3), "clusters"),
    ],
)
def test_why_not_grouped_k(problem, fields, reason):
  found = GROUPED_KERNELS["grouped_k"].supports(problem, config_of(**fields))
  assert found is not None
  with pytest.raises(ValueError, match=reason):
    raise ValueError(found)


def test_no_other_kernel_takes_groups():
  from pallas_kernels import KERNELS

  for problem in (OF_M, OF_K):
    for name, kernel in KERNELS.items():
      if name not in ("gemv", "triton"):
        assert "groups of" in kernel.supports(problem, kernel.Config()), name
