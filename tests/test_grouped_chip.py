"""Kernels of products in groups of rows: lowered for CUDA, and on the chip."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgemm import grouped_heuristics
from jaxgemm.device import current_device
from pallas_kernels import GROUPED_KERNELS
from pallas_kernels.configs import PersistentConfig
from pallas_kernels.conversions import SOURCES
from pallas_kernels.problem import Problem
from tests import kernel_cases
from tests.grouped_cases import (
  H200,
  ISOLATED_ROWS,
  ISOLATED_SIZES,
  ISOLATED_SUM_SIZES,
  ISOLATED_SUMS,
  check_results,
  check_rows_alone,
  check_sums_alone,
  config_of,
  gpu_sizes,
  lowered,
  of_k,
  of_m,
  random_sizes,
)
from tests.kernel_cases import random_operands

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
