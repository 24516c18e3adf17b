"""What only the chip can show: `make test-gpu` on an NVIDIA Hopper GPU."""

from __future__ import annotations

import dataclasses
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxgemm
from jaxgemm import heuristics, reference
from jaxgemm.device import current_device
from pallas_kernels import TILE_KERNELS as KERNELS
from pallas_kernels import epilogue_choice
from pallas_kernels.problem import Epilogue
from tests import kernel_cases
from tests.gpu_cases import check, check_all, launch
from tests.kernel_cases import LAYOUTS, make_problem, small_config

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "size", [(256, 256, 256), (1000, 1000, 1000), (1001, 515, 333)], ids=str
)
@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize(("kernel", "dtype"), kernel_cases.KERNELS_AND_DTYPES)
def test_layouts_and_dtypes(kernel, layouts, dtype, size):
  check(kernel, make_problem(*size, layouts, dtype), small_config(kernel, dtype))


@pytest.mark.parametrize("n", [96, 100, 101])
@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_out_dtypes_and_ways_of_the_store(kernel, out_dtype, n):
  epilogue = Epilogue(0.5, -2.0, "float32")
  problem = make_problem(
      130, n, 256, dtype="float16", batch=2, out_dtype=out_dtype, epilogue=epilogue
  )
  config = small_config(kernel)
  if out_dtype == "float32":  # XLA's error is that of a rounded sum: see accumulate.py.
    config = small_config(kernel, tile_m=64 if kernel == "blocked" else 128, tile_n=64,
                          promote=1)
  check(kernel, problem, config)


@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize("cluster_k", [2, 3, 5, 8])
def test_sums_within_clusters(cluster_k, layouts):
  """Through distributed shared memory; also several tiles a CTA, and two stages."""
  for n, fields in [(96, dict(tile_n=64)), (101, dict(wg_dim="n")), (4000, {})]:
    for splits in (cluster_k, 2 * cluster_k):
      config = small_config("split_k", splits=splits, cluster_k=cluster_k, num_stages=2,
                            **fields)
      check("split_k", make_problem(300, n, 2048 - 8, layouts), config)


@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize("size", [(1, 4096, 1000), (8, 520, 4096), (200, 264, 136),
                                  (72, 88, 4104)], ids=str)
def test_one_consumer(size, layouts):
  """64x64 tiles: operands that are not k-major come in chunks, of any size."""
  config = small_config("persistent", tile_m=64, tile_n=64, consumers=1, num_stages=8)
  check("persistent", make_problem(*size, layouts), config)


@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize("fields, n", kernel_cases.WIDE_TILES, ids=str)
def test_wide_tiles(fields, n, layouts):
  config = small_config("persistent", **fields)
  check("persistent", make_problem(1000, n, 520, layouts), config)
  check("persistent", make_problem(1000, n + 8, 128, layouts), config)
  if "wg_dim" not in fields and "cluster_n" not in fields and "cluster_m" not in fields:
    config = small_config("split_k", **fields, splits=2, cluster_k=2)
    if KERNELS["split_k"].supports(make_problem(1, 1, 1024), config) is None:
      check("split_k", make_problem(200, n, 1024, layouts), config)


@pytest.mark.parametrize("cluster", [(4, 1), (1, 4), (2, 2)], ids=str)
@pytest.mark.parametrize("layouts", LAYOUTS)
def test_clusters_of_four(layouts, cluster):
  config = small_config("persistent", cluster_m=cluster[0], cluster_n=cluster[1])
  for size in ((1000, 1000, 1000), (40, 72, 200), (2000, 3000, 520)):
    check("persistent", make_problem(*size, layouts), config)


@pytest.mark.parametrize("n", [1000, 1001])
@pytest.mark.parametrize("tile_n", [48, 80, 88, 112, 136, 176, 240])
def test_tiles_that_pieces_do_not_divide(tile_n, n):
  """Their last piece stores some columns once more, by TMA or by masked stores."""
  for out_dtype in ("bfloat16", "float32"):
    problem = make_problem(500, n, 200, "TT", out_dtype=out_dtype)
    check("persistent", problem, small_config("persistent", tile_n=tile_n))
  config = small_config("persistent", tile_n=tile_n, swap=True)
  if n % 8 == 0:
    check("persistent", make_problem(500, n, 200, "NN"), config)


@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize("fields, m, n", kernel_cases.SWAPPED_TILES, ids=str)
def test_swapped_operands(fields, m, n, layouts):
  config = small_config("persistent", **fields, swap=True)
  for k in (64, 520):
    check("persistent", make_problem(m, n, k, layouts), config)
    check("persistent", make_problem(3 * m + 1, 3 * n + 8, k, layouts, batch=2), config)
  if "wg_dim" not in fields and "cluster_m" not in fields:
    config = small_config("split_k", **fields, splits=2, cluster_k=2, swap=True)
    if KERNELS["split_k"].supports(make_problem(m, n, 1024, layouts), config) is None:
      check("split_k", make_problem(m, n, 1024, layouts), config)


@pytest.mark.parametrize("layouts", ["NN", "TN"])
@pytest.mark.parametrize("kernel, fields", kernel_cases.N_MAJOR_TILES, ids=str)
def test_columns_between_the_blocks_of_an_n_major_rhs(kernel, fields, layouts):
  for n in (320, 1000, 1001):  # In blocks as stored, in chunks, padded.
    for k in (200, 64, 1032):
      problem = make_problem(520, n, k, layouts)
      if k > 64 or kernel != "split_k":
        check(kernel, problem, small_config(kernel, **fields))
  problem = make_problem(520, 1000, 200, layouts, out_dtype="float32", batch=2)
  check(kernel, problem, small_config(kernel, **fields))


@pytest.mark.parametrize("fields", kernel_cases.CHUNKED_TILES, ids=str)
def test_operands_in_chunks(fields):
  config = small_config("persistent", **fields)
  for size in ((200, 328, 140), (1000, 1000, 1001), (72, 520, 4)):
    for layouts in LAYOUTS:
      check("persistent", make_problem(*size, layouts), config)


@pytest.mark.parametrize("k", [64, 128, 192, 256])
@pytest.mark.parametrize("kernel", KERNELS)
def test_few_k_tiles(kernel, k):
  """The compiler unrolls a loop of two steps, and then moves what nothing holds."""
  fields = dict(splits=2) if kernel == "split_k" else {}
  if k > 64 or kernel != "split_k":
    check(kernel, make_problem(72, 136, k), small_config(kernel, **fields))


@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize("tile", [(64, 64), (128, 64), (64, 128), (64, 32), (64, 16)],
                         ids=str)
def test_direct(tile, layouts):
  """Rows of every alignment, of operands and of the result."""
  config = small_config("direct", tile_m=tile[0], tile_n=tile[1])
  for size in ((24, 208, 16), (265, 955, 21), (13, 50, 135), (300, 116, 240), (7, 9, 3),
               (70, 88, 40), (129, 66, 80), (130, 72, 1100), (120, 104, 200),
               (72, 1000, 1032)):
    problem = make_problem(*size, layouts, batch=2, lhs_batched=False)
    if KERNELS["direct"].supports(problem, config) is None:
      check("direct", problem, config)


@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize("splits", [2, 3, 8])
def test_direct_of_ctas_that_share_k(splits, layouts):
  """Rows of every alignment, and ranks whose k tiles lie beyond k."""
  for tile in ((64, 64), (128, 64), (64, 48), (64, 16)):
    config = small_config("direct", tile_m=tile[0], tile_n=tile[1], splits=splits)
    for size in ((24, 208, 512), (265, 955, 577), (13, 50, 699), (130, 72, 1100),
                 (120, 104, 712), (72, 200, 2056)):
      problem = make_problem(*size, layouts, batch=2, lhs_batched=False)
      if KERNELS["direct"].supports(problem, config) is None:
        check("direct", problem, config)


@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize("size", [(1000, 1000, 64), (520, 776, 1096), (4096, 264, 200)],
                         ids=str)
def test_consumers_that_take_tiles_in_turn(size, layouts):
  for tile_m, tile_n, fields in [
      (128, 64, {}), (128, 128, dict(cluster_m=2)), (128, 192, {}),
      (128, 176, dict(cluster_n=2, grid_minor="n")), (192, 112, dict(cluster_m=2)),
      (128, 200, dict(cluster_m=2)),
  ]:
    config = small_config(
        "persistent", tile_m=tile_m, tile_n=tile_n, wg_dim="tile", **fields
    )
    check("persistent", make_problem(*size, layouts), config)


@pytest.mark.parametrize("order", [("n", 8), ("n", 4), ("m", 4), ("m", 2)], ids=str)
@pytest.mark.parametrize("fields", [{}, dict(cluster_n=2), dict(cluster_m=2)], ids=str)
def test_orders_of_tiles(fields, order):
  """Last bands that are narrower, and products of a batch behind each other."""
  config = small_config(
      "persistent", **fields, grid_minor=order[0], grid_width=order[1]
  )
  for size in ((1000, 1720, 200), (2200, 136, 136), (40, 3000, 64)):
    check("persistent", make_problem(*size, batch=3), config)


@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize("size", [(197, 64, 197), (1, 4097, 997), (130, 257, 65),
                                  (333, 65, 1004), (9, 72, 1002), (1001, 515, 333)],
                         ids=str)
@pytest.mark.parametrize("tile", kernel_cases.LOADING_TILES, ids=str)
def test_operands_loaded_through_registers(tile, size, layouts):
  """Rows that begin at any even address; inf and nan stay in their rows."""
  fields = dict(
      tile_m=tile[0], tile_n=tile[1], consumers=1, num_stages=6, misaligned="loads"
  )
  for kernel, more in [("persistent", {}), ("split_k", dict(splits=2, cluster_k=2)),
                       ("split_k", dict(splits=2))]:
    if kernel == "persistent" or size[2] > 64:
      for batch in (1, 3):
        problem = make_problem(*size, layouts, batch=batch)
        check(kernel, problem, small_config(kernel, **fields, **more))
  problem = make_problem(*size, "NT")
  lhs, rhs = kernel_cases.random_operands(problem)
  lhs = jnp.asarray(lhs).at[0, -1].set(jnp.inf)
  result = launch("persistent", problem, small_config("persistent", **fields), (lhs, rhs))
  finite = np.isfinite(np.asarray(result.astype(jnp.float32)))[0]
  assert finite[:-1].all() and not finite[-1].any()


@pytest.mark.parametrize(("layouts", "swap"), kernel_cases.SKEWED)
@pytest.mark.parametrize(
    "size", [(205, 203, 333), (1000, 776, 1005), (777, 1001, 1002), (64, 72, 4100)],
    ids=str,
)
def test_lhs_that_comes_skewed(size, layouts, swap):
  """Every way that rows lie to 16 bytes; inf and nan stay in their rows."""
  run = 0
  for batch, fields in [
      (1, {}), (1, dict(tile_m=128, consumers=2)), (1, dict(num_stages=3, tile_n=48)),
      (3, {}),
  ]:
    problem = make_problem(*size, layouts, batch=batch)
    for kernel, more in [
        ("persistent", {}), ("split_k", dict(splits=2, cluster_k=2)),
        ("split_k", dict(splits=3)),
    ]:
      fields_of_all = kernel_cases.SKEWED_FIELDS | fields | more
      config = small_config(kernel, swap=swap, **fields_of_all)
      if KERNELS[kernel].supports(problem, config) is None:
        check(kernel, problem, config)
        run += 1
  problem = make_problem(*size, layouts)
  config = small_config("persistent", swap=swap, **kernel_cases.SKEWED_FIELDS)
  if KERNELS["persistent"].supports(problem, config) is not None:
    assert run == 0
    return
  lhs, rhs = (np.array(x) for x in kernel_cases.random_operands(problem))
  lhs[(0, 5) if problem.lhs_layout == "k-major" else (0, slice(None), 5)] = np.inf
  rhs[(0, 5) if problem.rhs_layout == "k-major" else (0, slice(None), 5)] = np.nan
  result = np.asarray(launch("persistent", problem, config, (lhs, rhs)))
  finite = np.isfinite(result.astype(np.float32))[0]
  assert run and not finite[5].any() and not finite[:, 5].any()
  assert np.delete(np.delete(finite, 5, 0), 5, 1).all()
  problem = make_problem(*size, layouts, batch=3)
  if KERNELS["persistent"].supports(problem, config) is not None:
    return
  lhs, rhs = (np.array(x) for x in kernel_cases.random_operands(problem))
  (rhs if swap else lhs)[1] = np.nan
  result = np.asarray(launch("persistent", problem, config, (lhs, rhs)))
  finite = np.isfinite(result.astype(np.float32))
  assert finite[0].all() and not finite[1].any() and finite[2].all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("layouts", "size"),
    [("NN", (1024, 512, 4097)), ("TN", (1025, 512, 4096)), ("NT", (1024, 520, 2047)),
     ("TT", (1025, 520, 2047))],
)
def test_skewed_lhs_sums_as_padded_does(layouts, size, dtype):
  """Bit by bit: what `jaxgemm.invariance` relies on."""
  problem = make_problem(*size, layouts, dtype, out_dtype="float32")
  config = small_config("persistent", promote=4)
  operands = kernel_cases.random_operands(problem)
  found = [
      np.asarray(launch("persistent", problem, each, operands))
      for each in (config, dataclasses.replace(config, misaligned="skewed"))
  ]
  np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kernel, fields", [
    ("persistent", dict(tile_m=128)),
    ("persistent", dict(wg_dim="tile")),
    ("persistent", dict(tile_n=72, consumers=1)),
    ("pipelined", {}),
    ("blocked", {}),
], ids=str)
def test_results_of_whole_rows(kernel, fields, out_dtype):
  """Runs of memory that begin anywhere, of any length; the last tile's are short."""
  promote = int(out_dtype == "float32")
  for m, n in ((1000, 71), (1, 1), (63, 69), (3, 5), (129, 61)):
    for batch in (1, 3):
      problem = make_problem(m, n, 200, "NT", batch=batch, out_dtype=out_dtype)
      assert epilogue_choice.stores_runs(problem, 72)
      wanted = dict(tile_m=64, tile_n=80, promote=promote) | fields
      check(kernel, problem, small_config(kernel, **wanted))


@pytest.mark.parametrize("n", [8, 16, 32, 64])
@pytest.mark.parametrize("wg_dim", ["m", "n"])
@pytest.mark.parametrize("kernel", ["persistent", "split_k"])
def test_results_narrower_than_a_tile(kernel, wg_dim, n):
  """What lies beyond the last column must be clipped, not wrapped."""
  config = small_config(kernel, wg_dim=wg_dim)
  check(kernel, make_problem(200, n, 1024, "TN"), config)
  check(kernel, make_problem(n, 200, 1024, "NT"), config)


@pytest.mark.parametrize("size", [(130, 96, 256), (16, 4096, 4096), (512, 768, 2048)],
                         ids=str)
def test_float32_results_are_sums_that_round(size):
  """As planned: the tensor cores' truncation does not show (see accumulate.py)."""
  problem = make_problem(*size, out_dtype="float32")
  operands = kernel_cases.random_operands(problem)
  result = jaxgemm.matmul(
      operands[0][0], operands[1][0], preferred_element_type=jnp.float32
  )
  error = reference.relative_error(result, kernel_cases.truth(problem, operands)[0])
  assert error <= 2 * kernel_cases.baseline_error(problem, operands), error


@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize("size", [(520, 776, 1096), (1024, 1024, 1024), (64, 512, 4096),
                                  (2048, 2048, 64), (9, 1003, 2047)], ids=str)
def test_every_candidate_of_ordinary_problems(size, layouts):
  """Each config that the heuristics weigh, on the chip."""
  problem = make_problem(*size, layouts)
  listed = heuristics.candidates(problem, current_device())
  check_all(problem, [(x.kernel, x.config) for x in listed if x.kernel in KERNELS])


def _random_problem(rng: random.Random):
  m, n, k = (int(2 ** rng.uniform(0, 11)) for _ in range(3))
  if rng.random() < 1 / 3:
    m, n, k = m | 1, n | 1, k | 1
  return make_problem(
      m, n, k, rng.choice(list(LAYOUTS)), rng.choice(["bfloat16", "float16", "float32"])
  )


@pytest.mark.parametrize("seed", range(40))
def test_random_problems_as_planned(seed):
  problem = _random_problem(random.Random(seed))
  operands = kernel_cases.random_operands(problem, seed)
  lhs_k = 1 if problem.lhs_layout == "k-major" else 0
  rhs_k = 0 if problem.rhs_layout == "n-major" else 1
  dims = (((lhs_k,), (rhs_k,)), ((), ()))
  result = jaxgemm.dot_general(operands[0][0], operands[1][0], dims)
  error = reference.relative_error(result, kernel_cases.truth(problem, operands)[0])
  limit = 2 * kernel_cases.baseline_error(problem, operands)
  assert error <= max(limit, 1e-7), problem


def test_split_k_is_bitwise_the_same_on_every_run():
  problem = make_problem(256, 256, 65536)
  operands = kernel_cases.random_operands(problem)
  for cluster_k in (1, 4):
    config = small_config("split_k", splits=32, cluster_k=cluster_k)
    runs = [np.asarray(launch("split_k", problem, config, operands)) for _ in range(20)]
    for run in runs[1:]:
      np.testing.assert_array_equal(runs[0], run)


def test_one_short_tile_after_another():
  """One k step a tile, many tiles a CTA, an odd number of pieces a tile."""
  problem = make_problem(4096, 4096, 32, "NT")
  for tile_n, wg_dim in [(64, "m"), (128, "n"), (192, "m")]:
    config = small_config("persistent", tile_n=tile_n, wg_dim=wg_dim)
    for seed in range(5):
      check("persistent", problem, config, seed)


def test_gradients_run_on_our_kernels():
  def loss(a, b):
    return jnp.sum(jaxgemm.matmul(a, b).astype(jnp.float32) ** 2)

  keys = jax.random.split(jax.random.key(0), 2)
  a = jax.random.normal(keys[0], (512, 384), jnp.bfloat16)
  b = jax.random.normal(keys[1], (384, 640), jnp.bfloat16)
  step = jax.jit(jax.grad(loss, (0, 1))).lower(a, b).compile()
  text = step.as_text()
  assert text.count("jaxgemm_") >= 3 and "__cublas" not in text
  da, db = step(a, b)
  a64, b64 = (np.asarray(x).astype(np.float64) for x in (a, b))
  out = np.asarray(jaxgemm.matmul(a, b)).astype(np.float64)
  assert reference.relative_error(da, 2 * out @ b64.T) < 1e-2
  assert reference.relative_error(db, 2 * a64.T @ out) < 1e-2


def test_other_precisions_go_to_xla():
  a = jnp.ones((256, 256), jnp.float32)
  for precision in ("high", "highest"):
    assert jaxgemm.explain(a, a, precision=precision).kernel == "xla"
  exact = jaxgemm.matmul(a / 3, a / 3, precision="highest")
  np.testing.assert_allclose(exact, 256 / 9, rtol=1e-5)
