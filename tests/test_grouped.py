"""Kernels of products in groups of rows: emulated with races, lowered, on the chip."""

from __future__ import annotations

import dataclasses
import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgemm import grouped_heuristics, reference
from jaxgemm.device import current_device, known_device
from pallas_kernels import GROUPED_KERNELS, compat, grouped_grid
from pallas_kernels.conversions import SOURCES
from pallas_kernels.problem import Epilogue, PersistentConfig, Problem
from tests import kernel_cases
from tests.kernel_cases import as_multiplied, make_problem, more, random_operands

H200 = known_device("NVIDIA H200")
SMALL = dict(tile_m=64, tile_n=64, consumers=1, num_stages=3)
# NumPy, which multiplies in the emulator, warns of what is not finite.
INFINITE = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
# Of a transposed product: one consumer of 64 columns, and few rows.
SWAP = SMALL | dict(swap=True, tile_n=16)


def of_m(m, n, k, groups, layouts="NN", dtype="bfloat16", **fields) -> Problem:
  fields |= dict(batch=groups, lhs_batched=False, grouped="m")
  return make_problem(m, n, k, layouts, dtype, **fields)


def of_k(m, n, k, groups, dtype="bfloat16", **fields) -> Problem:
  """k are the rows of all groups."""
  fields |= dict(batch=groups, lhs_batched=False, rhs_batched=False, grouped="k")
  return make_problem(m, n, k, "TN", dtype, **fields)


def bounds(sizes, rows: int) -> list[tuple[int, int]]:
  """(first, end) of each group's rows."""
  ends = np.minimum(np.cumsum(np.maximum(sizes, 0)), rows)
  return list(zip(np.append(0, ends[:-1]), ends, strict=True))


def truth(problem: Problem, operands, sizes) -> np.ndarray:
  (lhs,), rhs = as_multiplied(problem, operands)
  out = np.zeros(problem.out_shape)
  rows = problem.m if problem.grouped == "m" else problem.k
  for group, (first, end) in enumerate(bounds(sizes, rows)):
    if problem.grouped == "m":
      out[0, first:end] = lhs[first:end] @ rhs[group]
    else:
      out[group] = lhs[:, first:end] @ rhs[0, first:end]
  return out


def by_xla(problem: Problem, operands, sizes) -> jax.Array:
  lhs, rhs = operands[0][0], operands[1].astype(problem.dtype)
  if problem.grouped == "m":
    contracted = (1,), (1 if problem.rhs_layout == "n-major" else 2,)
    ragged, group = (0,), (0,)
  else:
    rhs, contracted, ragged, group = rhs[0], ((0,), (0,)), (0,), ()
  out = lax.ragged_dot_general(
      lhs, rhs, jnp.asarray(sizes, jnp.int32),
      lax.RaggedDotDimensionNumbers((contracted, ((), ())), ragged, group),
      preferred_element_type=jnp.dtype(problem.out_dtype),
  )
  return out.reshape(problem.out_shape)


def config_of(**fields) -> PersistentConfig:
  return PersistentConfig(**{**SMALL, **fields})


def emulate(problem: Problem, config, operands, sizes, *, num_sms=3) -> jax.Array:
  """The kernel's result in GPU interpret mode; raises if it raced."""
  kernel = GROUPED_KERNELS[f"grouped_{problem.grouped}"]
  assert kernel.supports(problem, config) is None
  operands = *operands, jnp.asarray(sizes, jnp.int32)
  return compat.run_interpreted(
      lambda params: kernel.launch(
          operands, problem, config, num_sms=num_sms, interpret=params
      )
  )


def check_results(problem: Problem, results, operands, sizes) -> None:
  """At most twice as far off as XLA's, and zeros where nothing is multiplied."""
  exact = truth(problem, operands, sizes)
  limit = 2 * reference.relative_error(by_xla(problem, operands, sizes), exact)
  for config, result in results:
    assert result.shape == problem.out_shape and result.dtype == problem.out_dtype
    error = reference.relative_error(result, exact)
    assert error <= max(limit, 1e-7), (problem, config, sizes)
    where, rows = np.asarray(result).astype(np.float64), exact != 0
    np.testing.assert_array_equal(where[~rows.any(-1)], 0.0)


def check(problem: Problem, config, sizes, *, seed=0, num_sms=3) -> None:
  operands = random_operands(problem, seed)
  result = emulate(problem, config, operands, sizes, num_sms=num_sms)
  check_results(problem, [(config, result)], operands, sizes)


# Of 150 rows.
SIZES = {
    "some empty": (0, 70, 0, 1, 79, 0),
    "one row each": (1, 1, 1, 1),
    "all in one": (0, 150, 0),
    "fewer": (30, 0, 67),
    "more": (90, 40, 60, 9),
    "none": (0, 0),
}


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


def poison(problem: Problem, operands, sizes, at, rhs_group=None):
  """Operands with NaN and inf in rows of lhs, and in a group's rhs."""
  lhs, rhs = (np.array(x) for x in operands)
  lhs[0, at[::2]], lhs[0, at[1::2]] = np.nan, np.inf
  if rhs_group is not None:
    rhs[rhs_group] = np.nan
  elif problem.grouped == "k":
    rhs[0, at[1::2]], rhs[0, at[::2]] = np.nan, -np.inf
  return jnp.asarray(lhs), jnp.asarray(rhs)


ISOLATED_ROWS = 128, 72, 100, 5
ISOLATED_SIZES = 30, 20, 0, 21, 33  # And 24 rows of nobody.


def check_rows_alone(problem, launch):
  """The last row of one group, all of another, a group without rows, nobody's rows."""
  rows = np.array([29, 50, 104, 110])
  operands = random_operands(problem)
  for group in (1, 2):
    found = launch(poison(problem, operands, ISOLATED_SIZES, rows, group))
    exact = truth(problem, operands, ISOLATED_SIZES)
    reached = np.zeros(problem.m, bool)
    reached[[29, 50]] = True
    if group == 1:
      reached[30:50] = True
    found = np.asarray(found).astype(np.float64)
    assert not np.isfinite(found[0, reached]).any()
    assert reference.relative_error(found[0, ~reached], exact[0, ~reached]) < 3e-3
    np.testing.assert_array_equal(found[0, sum(ISOLATED_SIZES):], 0.0)


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


ISOLATED_SUMS = 72, 136, 128, 6
# The second and the fourth have what is not finite, and nobody's 20 rows.
ISOLATED_SUM_SIZES = 30, 20, 0, 9, 13, 36


def check_sums_alone(problem, launch):
  """The rows beside other groups', in the same slots: first, last, and nobody's."""
  rows = np.array([30, 49, 50, 58, 108, 109, 127])
  operands = random_operands(problem)
  found = launch(poison(problem, operands, ISOLATED_SUM_SIZES, rows))
  found = np.asarray(found).astype(np.float64)
  exact = truth(problem, operands, ISOLATED_SUM_SIZES)
  for group in (0, 2, 4, 5):
    assert reference.relative_error(found[group], exact[group]) < 3e-3, group
  assert not np.isfinite(found[[1, 3]]).any()


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


# -- The table of row tiles --------------------------------------------------------

TABLES = [  # m, groups, rows of a tile
    (1, 1, 8), (5, 3, 8), (100, 1, 16), (100, 7, 16), (96, 12, 32), (500, 40, 64),
    (257, 3, 256), (16, 50, 8),
]


def random_sizes(rng, m: int, groups: int) -> np.ndarray:
  """Often with empty groups, with all rows or too few, or too many."""
  weights = rng.random(groups) ** 3 * (rng.random(groups) < 0.7)
  total = m * rng.choice([0.3, 1.0, 1.4])
  return (weights / max(weights.sum(), 1e-9) * total).astype(np.int32)


def owners(sizes, m: int) -> np.ndarray:
  """The group of each row; that of nobody's is their number."""
  found = np.full(m, len(sizes))
  for group, (first, end) in enumerate(bounds(sizes, m)):
    found[first:end] = group
  return found


@pytest.mark.parametrize("m, groups, tile_rows", TABLES)
def test_row_tiles(m, groups, tile_rows, rng):
  make = jax.jit(lambda sizes: grouped_grid.row_tiles(sizes, m, tile_rows))
  most = grouped_grid.most_row_tiles(m, groups, tile_rows)
  edges = [
      np.zeros(groups), np.full(groups, m), np.full(groups, -1), np.eye(groups)[-1],
      np.full(groups, 2**31 - 1),
  ]
  for sizes in edges + [random_sizes(rng, m, groups) for _ in range(40)]:
    sizes = sizes.astype(np.int32)
    table = np.asarray(make(sizes))
    assert table.shape == (2 + 3 * most,)
    of_groups, in_all = table[:2]
    assert 0 <= of_groups <= in_all <= most
    group, first, end = table[2:].reshape(3, most)[:, :in_all]
    assert (0 <= first).all() and (end <= m).all() and (end - first <= tile_rows).all()
    if sizes.clip(0).sum(dtype=np.int64) <= m:
      assert (first < end).all()  # Only tiles of rows that are cut off have none.
    assert (0 <= group).all() and (group < groups).all()
    found = np.full(m, -1)
    for i in range(in_all):
      rows = slice(first[i], max(first[i], end[i]))
      assert (found[rows] == -1).all()  # No row is in two tiles.
      found[rows] = group[i] if i < of_groups else groups
    np.testing.assert_array_equal(found, owners(sizes, m))
    # No more tiles than each group needs.
    assert of_groups == min(most, (-(-sizes.clip(0, m) // tile_rows)).sum())


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "uint32"])
def test_row_tiles_of_other_integers(dtype):
  sizes = np.array([100, 0, 27, 100])
  wanted = grouped_grid.row_tiles(jnp.asarray(sizes, jnp.int32), 250, 16)
  found = grouped_grid.row_tiles(jnp.asarray(sizes, dtype), 250, 16)
  np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("cluster, transposed", [(1, False), (2, True)])
@pytest.mark.parametrize(
    "m, groups, width, num_sms", [(100, 7, 4, 5), (300, 3, 1, 8), (40, 9, 8, 132)]
)
def test_each_tile_has_one_cta(m, groups, width, num_sms, cluster, transposed, rng):
  axis, n, tile_rows, tile_cols = "along", 200, 16, 32
  grid = grouped_grid.GroupedGrid.of(
      m, n, groups, tile_rows=tile_rows, tile_cols=tile_cols, cluster=cluster, axis=axis,
      transposed=transposed, width=width, num_sms=num_sms,
  )

  def over_ctas(f, *args):
    per_cta = jax.vmap(
        lambda cta, *x: jax.vmap(lambda _: f(*x), axis_name=axis)(jnp.arange(cluster)),
        in_axes=(0, *[None] * len(args)), axis_name="cta",
    )
    return per_cta(jnp.arange(grid.num_clusters), *args)

  def walk(table):
    known = dataclasses.replace(grid, table=table)
    return [
        (over_ctas(count), jax.vmap(lambda i: over_ctas(locate, i))(jnp.arange(most)))
        for count, locate in (
            (known.local_count, known.locate), (known.empty_count, known.locate_empty)
        )
    ]

  most = -(-grid.most * grid.tiles_n // grid.num_clusters)
  walk = jax.jit(walk)
  for _ in range(3):
    sizes = random_sizes(rng, m, groups)
    table = grouped_grid.row_tiles(jnp.asarray(sizes), m, tile_rows)
    of_groups, in_all = np.asarray(table[:2])
    group, first, end = np.asarray(table[2:]).reshape(3, -1)
    tiles_n = grid.tiles_n * cluster
    for (counts, places), (begin, stop) in zip(
        walk(table), ((0, of_groups), (of_groups, in_all)), strict=True
    ):
      wanted = {
          (group[i], first[i], end[i], j * tile_cols)
          for i in range(begin, stop) for j in range(tiles_n)
      }
      found = []
      for i in range(most):
        place = jax.tree.map(lambda x: np.asarray(x)[i], places)
        rows, cols = (place.n, place.m) if transposed else (place.m, place.n)
        at = np.stack(np.broadcast_arrays(place.index, rows, place.end, cols), -1)
        found += map(tuple, at[np.asarray(counts) > i].tolist())
      assert len(found) == len(wanted) and set(found) == wanted


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


# -- Lowered for CUDA --------------------------------------------------------------

PLANNED = [
    of_m(16384, 4096, 2048, 64),
    of_m(1024, 1536, 4096, 128, "NT"),
    of_m(100, 520, 130, 8, dtype="float16"),
    of_m(8192, 7168, 2048, 8, "NT", out_dtype="float32"),
    of_m(128, 2048, 7168, 256),
    of_m(4096, 136, 1000, 3),
    of_m(128, 2048, 7168, 64, rhs_source="int8"),
    of_m(8192, 2048, 7168, 64, "NT", "float8_e4m3fn", out_dtype="bfloat16"),
    of_m(100, 528, 4096, 8, "NT", "int8", out_dtype="int32"),
    of_m(1000, 528, 1040, 9, "NT", "float8_e4m3fn", out_dtype="float16"),
    of_m(1024, 1536, 4096, 8, "NT", "float16", rhs_source="float8_e4m3fn"),
    of_k(4096, 2048, 16384, 64),
    of_k(2048, 7168, 8192, 8, out_dtype="float32"),
    of_k(130, 520, 100, 8, "float16"),
    of_k(1536, 4096, 1024, 128),
    of_k(136, 72, 4096, 3),
    of_k(7168, 2048, 30000, 256),
]


@functools.cache
def planned(problem: Problem, count: int) -> list[PersistentConfig]:
  found = grouped_heuristics.candidates(problem, H200)[:count]
  assert found and {c.kernel for c in found} == {f"grouped_{problem.grouped}"}
  return [each.config for each in found]


def lowered(problem: Problem, config, *scales) -> str:
  kernel = GROUPED_KERNELS[f"grouped_{problem.grouped}"]
  operands = [
      jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
      for shape, dtype in kernel_cases.operand_types(problem)
  ]
  operands += [*scales, jax.ShapeDtypeStruct((problem.batch,), jnp.int32)]
  launch = lambda *x: kernel.launch(x, problem, config, num_sms=132)
  return jax.export.export(jax.jit(launch), platforms=["cuda"])(*operands).mlir_module()


@pytest.mark.parametrize("problem", PLANNED, ids=str)
def test_the_planned_config_lowers(problem):
  text = lowered(problem, planned(problem, 12)[0])
  assert f"jaxgemm_grouped_{problem.grouped}" in text
  assert "stablehlo.transpose" not in text  # Operands are as they are stored.


@pytest.mark.slow
@pytest.mark.more
@pytest.mark.parametrize("problem", PLANNED, ids=str)
def test_candidates_lower(problem):
  for config in planned(problem, 12)[1:]:
    assert f"jaxgemm_grouped_{problem.grouped}" in lowered(problem, config)


PROMOTED = {"float8_e4m3fn": ["float32", "float16"]}


def test_candidates_are_in_order_and_supported():
  for problem in PLANNED:
    found = grouped_heuristics.candidates(problem, H200)
    times = [each.time_us for each in found]
    assert times == sorted(times) and times[0] > 0
    assert len({each.config for each in found}) == len(found)
    kernel = GROUPED_KERNELS[f"grouped_{problem.grouped}"]
    for each in found:
      assert kernel.supports(problem, each.config) is None
      assert (each.config.promote > 0) == (
          problem.out_dtype in PROMOTED.get(problem.dtype, ["float32"])
      )
      assert each.config.tile_k == 128 // problem.itemsize


# -- On the chip -------------------------------------------------------------------


@functools.cache
def jitted(problem: Problem, config):
  kernel = GROUPED_KERNELS[f"grouped_{problem.grouped}"]
  assert kernel.supports(problem, config) is None
  num_sms = current_device().num_sms
  return jax.jit(lambda *x: kernel.launch(x, problem, config, num_sms=num_sms))


def launch(problem: Problem, config, operands, sizes) -> jax.Array:
  # As in gpu_cases: what is left unwritten shows as NaN.
  jnp.full(problem.out_shape, jnp.nan, problem.out_dtype).block_until_ready()
  return jitted(problem, config)(*operands, jnp.asarray(sizes, jnp.int32))


GPU_ROWS = (
    dict(tile_m=128, tile_n=256),
    dict(tile_m=128, tile_n=128),
    dict(tile_m=256, tile_n=128, cluster_n=2),
    dict(tile_m=128, tile_n=192, wg_dim="tile", num_stages=3),
    dict(tile_m=128, tile_n=128, consumers=2, wg_dim="n", cluster_n=2),
    dict(tile_m=192, tile_n=128, consumers=3),
    dict(tile_m=64, tile_n=320, consumers=1, num_stages=3),
    dict(tile_m=64, tile_n=80, consumers=1),
    dict(swap=True, tile_m=128, tile_n=16, num_stages=6),
    dict(swap=True, tile_m=256, tile_n=32),
    dict(swap=True, tile_m=128, tile_n=48, cluster_m=2),
    dict(swap=True, tile_m=128, tile_n=72, wg_dim="tile"),
    dict(swap=True, tile_m=256, tile_n=136, num_stages=3),
    dict(swap=True, tile_m=128, tile_n=256, grid_width=1),
    dict(swap=True, tile_m=64, tile_n=64, consumers=1, cluster_m=4, num_stages=8),
)
# Of rhs in 8 bits.
GPU_NARROW = (
    dict(tile_m=128, tile_n=16, num_stages=9),
    dict(tile_m=64, tile_n=72, consumers=1, num_stages=8),
    dict(tile_m=256, tile_n=32, num_stages=5),
    dict(tile_m=256, tile_n=88, num_stages=5),
    dict(tile_m=128, tile_n=256, num_stages=3, grid_width=1),
    dict(tile_m=128, tile_n=64, cluster_m=2),
)
GPU_SUMS = (
    dict(tile_m=128, tile_n=256),
    dict(tile_m=256, tile_n=128, cluster_m=2),
    dict(tile_m=128, tile_n=128, cluster_n=2),
    dict(tile_m=128, tile_n=128, wg_dim="n", cluster_m=2, cluster_n=2),
    dict(tile_m=192, tile_n=192, consumers=3, num_stages=3),
    dict(tile_m=64, tile_n=64, consumers=1, num_stages=8),
    dict(tile_m=64, tile_n=192, consumers=1, num_stages=2),
    dict(tile_m=128, tile_n=128, wg_dim="tile"),
    dict(tile_m=128, tile_n=192, wg_dim="tile", num_stages=3, cluster_n=2),
)


def named(x) -> str:
  """A case's id; that of a function's address would differ between processes."""
  return getattr(x, "__name__", str(x))


# (maker of the problem, fields of the config)
GPU_CONFIGS = [*((of_m, each) for each in GPU_ROWS), *((of_k, each) for each in GPU_SUMS)]


@pytest.mark.parametrize("make, fields", kernel_cases.mostly_more(GPU_CONFIGS), ids=named)
def test_what_runs_on_the_chip_lowers(make, fields):
  problem = make(1000, 520, 1000, 9)
  kernel = GROUPED_KERNELS[f"grouped_{problem.grouped}"]
  assert kernel.supports(problem, PersistentConfig(**fields)) is None
  assert f"jaxgemm_{kernel.NAME}" in lowered(problem, PersistentConfig(**fields))


def gpu_sizes(m: int, groups: int) -> list[np.ndarray]:
  rng = np.random.default_rng(m + groups)
  found = [random_sizes(rng, m, groups) for _ in range(4)]
  return [*found, np.zeros(groups, int), np.eye(groups, dtype=int)[groups // 2] * m,
          np.full(groups, m // groups)]


def check_on_chip(problem: Problem, configs) -> None:
  operands = random_operands(problem)
  rows = problem.m if problem.grouped == "m" else problem.k
  for sizes in gpu_sizes(rows, problem.batch):
    results = ((config, launch(problem, config, operands, sizes)) for config in configs)
    check_results(problem, results, operands, sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("layouts", ["NN", "NT"])
@pytest.mark.parametrize("fields", GPU_ROWS, ids=str)
def test_gpu_rows(fields, layouts):
  for m, n, k, groups in ((1000, 520, 1000, 9), (2000, 328, 264, 64), (77, 72, 130, 5)):
    for dtype in ("bfloat16", "float16") if k == 1000 else ("bfloat16",):
      check_on_chip(of_m(m, n, k, groups, layouts, dtype), [PersistentConfig(**fields)])


GPU_EIGHT = (
    dict(tile_m=128, tile_n=256),
    dict(tile_m=128, tile_n=192, wg_dim="tile"),
    dict(tile_m=64, tile_n=128, consumers=1, num_stages=6),
    dict(tile_m=256, tile_n=128, cluster_n=2),
    dict(tile_m=128, tile_n=128, promote=1),
)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
@pytest.mark.parametrize("fields", GPU_EIGHT, ids=str)
def test_gpu_eight_bits(fields, dtype):
  config = config_of(**dict(consumers=2, tile_k=128, num_stages=4) | fields)
  kinds = ["int32"] if dtype == "int8" else ["bfloat16"]
  if fields.get("promote"):
    kinds = [] if dtype == "int8" else ["float16"]
  for out_dtype in kinds:
    for layouts, n in (("NT", 520), ("NN", 528)):
      problem = of_m(1000, n, 1040, 9, layouts, dtype, out_dtype=out_dtype)
      check_on_chip(problem, [config])


def of_narrow(fields) -> PersistentConfig:
  return config_of(**dict(swap=True, consumers=2) | fields)


@pytest.mark.slow
@pytest.mark.parametrize("fields", kernel_cases.mostly_more(GPU_NARROW), ids=str)
def test_rhs_in_8_bits_lowers(fields):
  for layouts, source in (("NN", "int8"), ("NT", "float8_e5m2")):
    problem = of_m(1000, 528, 1008, 9, layouts, rhs_source=source)
    assert GROUPED_KERNELS["grouped_m"].supports(problem, of_narrow(fields)) is None
    assert "jaxgemm_grouped_m" in lowered(problem, of_narrow(fields))


@pytest.mark.gpu
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("layouts", ["NN", "NT"])
@pytest.mark.parametrize("fields", GPU_NARROW, ids=str)
def test_gpu_rhs_in_8_bits(fields, layouts, source):
  config = of_narrow(fields)
  for m, n, k, groups in ((1000, 528, 1008, 9), (77, 80, 144, 5)):
    for dtype in ("bfloat16", "float16"):
      problem = of_m(m, n, k, groups, layouts, dtype, rhs_source=source)
      check_on_chip(problem, [config])
  problem = of_m(1000, 1104, 2064, 24, layouts, rhs_source=source)
  sizes, operands = gpu_sizes(1000, 24)[0], random_operands(problem)
  first, *others = (
      np.asarray(launch(problem, config, operands, sizes)).view(np.uint16)
      for _ in range(10)
  )
  for other in others:
    np.testing.assert_array_equal(other, first)


@pytest.mark.gpu
@pytest.mark.parametrize("fields", GPU_SUMS, ids=str)
def test_gpu_sums(fields):
  for m, n, k, groups in ((520, 1000, 1003, 9), (328, 264, 4096, 64), (130, 72, 77, 5)):
    for dtype in ("bfloat16", "float16") if k == 1003 else ("bfloat16",):
      check_on_chip(of_k(m, n, k, groups, dtype), [PersistentConfig(**fields)])


@pytest.mark.gpu
@pytest.mark.parametrize("promote", [1, 4])
@pytest.mark.parametrize("make", [of_m, of_k], ids=named)
def test_gpu_float32_results(make, promote):
  fields = dict(tile_m=128, tile_n=128), dict(tile_m=64, tile_n=64, consumers=1)
  configs = [PersistentConfig(promote=promote, **each) for each in fields]
  check_on_chip(make(1000, 520, 1000, 9, out_dtype="float32"), configs)


@pytest.mark.gpu
@pytest.mark.parametrize("problem", PLANNED, ids=str)
def test_gpu_candidates(problem):
  """Of problems too large to be multiplied in float64; at a part of them."""
  part = dataclasses.replace(
      problem, m=min(problem.m, 1000), n=min(problem.n, 528), k=min(problem.k, 1008),
      batch=min(problem.batch, 9),
  )
  kernel = GROUPED_KERNELS[f"grouped_{problem.grouped}"]
  found = grouped_heuristics.candidates(problem, current_device())[:8]
  configs = [each.config for each in found if kernel.supports(part, each.config) is None]
  assert len(configs) > len(found) // 2
  check_on_chip(part, configs)


@pytest.mark.gpu
@pytest.mark.parametrize("make, fields", GPU_CONFIGS, ids=named)
def test_gpu_repeated_bits(make, fields):
  problem = make(2056, 1096, 2056, 24)
  sizes = random_sizes(np.random.default_rng(2), 2056, 24)
  operands = random_operands(problem)
  first, *others = (
      np.asarray(launch(problem, PersistentConfig(**fields), operands, sizes))
      for _ in range(20)
  )
  assert np.isfinite(first.astype(np.float32)).all()
  for other in others:
    np.testing.assert_array_equal(other.view(np.uint16), first.view(np.uint16))


@pytest.mark.gpu
@pytest.mark.parametrize("fields", GPU_ROWS, ids=str)
def test_gpu_what_is_not_finite_stays_in_its_rows(fields):
  problem = of_m(*ISOLATED_ROWS)
  run = functools.partial(
      launch, problem, PersistentConfig(**fields), sizes=ISOLATED_SIZES
  )
  check_rows_alone(problem, run)


@pytest.mark.gpu
@pytest.mark.parametrize("fields", GPU_SUMS, ids=str)
def test_gpu_what_is_not_finite_stays_in_its_group(fields):
  problem = of_k(*ISOLATED_SUMS)
  run = functools.partial(
      launch, problem, PersistentConfig(**fields), sizes=ISOLATED_SUM_SIZES
  )
  check_sums_alone(problem, run)
