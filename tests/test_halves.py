"""float32 products of float16 parts: the split, the guard, the kernels in emulation."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxgemm
from jaxgemm import plan, reference
from jaxgemm.device import known_device
from pallas_kernels import KERNELS, halves
from pallas_kernels.configs import PersistentConfig, SplitKConfig
from pallas_kernels.problem import Epilogue
from tests import kernel_cases
from tests.kernel_cases import LAYOUTS, lowered, make_problem

H200 = known_device("NVIDIA H200")
BOUND = 3e-7  # Of a float32 sum of a few hundred.
SMALL = PersistentConfig(tile_n=64, num_stages=2, promote=1, float16_parts=True)


def problem_of(m, n, k, layouts="NN", **fields):
  return make_problem(m, n, k, layouts, "float32", algorithm="bf16_x6", **fields)


def emulated(problem, config, operands, kernel="persistent") -> np.ndarray:
  return np.asarray(kernel_cases.emulate(kernel, problem, config, operands, num_sms=2))


def check(problem, config, kernel="persistent", operands=None):
  operands = operands or kernel_cases.random_operands(problem)
  result = emulated(problem, config, operands, kernel)
  error = reference.relative_error(result, kernel_cases.truth(problem, operands))
  assert error < BOUND


def split(lhs, rhs) -> halves.Halves:
  """Of two matrices [m, k] and [k, n]."""
  (m, k), (_, n) = lhs.shape, rhs.shape
  operands = (jnp.asarray(x, jnp.float32)[None] for x in (lhs, rhs))
  return jax.jit(halves.split, static_argnums=2)(*operands, problem_of(m, n, k))


def wide(x) -> np.ndarray:
  return np.asarray(x).astype(np.float64)


@pytest.mark.slow
@pytest.mark.parametrize("layouts", kernel_cases.mostly_more(LAYOUTS))
def test_layouts(layouts):
  check(problem_of(133, 203, 141, layouts), dataclasses.replace(SMALL, tile_n=192))


@pytest.mark.parametrize(
    "fields",
    kernel_cases.mostly_more([
        dict(cluster_n=2, wg_dim="n", tile_n=128),
        dict(wg_dim="tile", tile_m=64),
        dict(consumers=1, tile_m=64),
        dict(cluster_m=2),
    ]),
    ids=str,
)
@pytest.mark.slow
def test_configs(fields):
  check(problem_of(264, 272, 200), dataclasses.replace(SMALL, **fields))


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields", [dict(cluster_k=2), kernel_cases.more(dict())], ids=str
)
def test_split_k(fields):
  config = SplitKConfig(**{**vars(SMALL), "splits": 2, **fields})
  check(problem_of(72, 136, 64 * 5, batch=2), config, "split_k")


@pytest.mark.slow
@pytest.mark.parametrize(
    "shared",
    kernel_cases.mostly_more([{"lhs_batched": False}, {"rhs_batched": False}, {}]),
    ids=str,
)
def test_batches_and_epilogues(shared):
  epilogue = Epilogue(0.5, -2.0, "float32")
  check(problem_of(70, 130, 100, "TN", batch=2, **shared, epilogue=epilogue), SMALL)


def test_parts_hold_22_bits(rng):
  x = rng.standard_normal((32, 4096)) * np.exp2(rng.uniform(-14, 14, (32, 4096)))
  found = split(x, np.ones((4096, 8)))
  high, low = (wide(part)[0] for part in found.lhs)
  factor = wide(found.row_scales)[0].prod(axis=0)[:, None]
  scaled = x.astype(np.float32).astype(np.float64) / factor
  assert np.all(np.abs(scaled).max(axis=1) < 2.0**15)
  assert np.all(np.abs(scaled).max(axis=1) >= 2.0**14)
  off = np.abs(high + low / 2**11 - scaled)
  assert np.all(off <= np.maximum(2.0**-23 * np.abs(scaled), 2.0**-36))


TINY = 2.0**-40


@pytest.mark.parametrize(
    ("lhs", "rhs", "exact"),
    [
        ({}, {}, True),
        ({(3, 1): TINY}, {}, True),  # What meets it is as large as what meets the rest.
        ({}, {(1, 4): TINY}, True),
        ({(3, 1): TINY}, {(0, 5): 0.0}, False),
        ({(3, 1): TINY}, {(0, 5): TINY}, False),
        ({(2, 2): 0.0}, {(1, 4): TINY}, False),
        ({(2, 2): 0.0}, {(1, 4): 0.0}, True),  # Zeros lose nothing.
        ({(3, 1): 2.0**-25}, {(0, 5): 0.0}, True),
        ({(3, 1): np.inf}, {}, False),
        ({}, {(0, 0): np.nan}, False),
    ],
    ids=str,
)
def test_guard(lhs, rhs, exact):
  operands = np.ones((8, 16)), np.ones((16, 8))
  for x, changes in zip(operands, (lhs, rhs), strict=True):
    for at, value in changes.items():
      x[at] = value
  assert bool(split(*operands).exact) == exact


def test_zero_rows_are_exact():
  lhs, rhs = np.ones((8, 16)), np.ones((16, 8))
  lhs[2] = 0.0
  rhs[:, 3] = 0.0
  assert bool(split(lhs, rhs).exact)


@pytest.mark.slow
def test_rows_and_columns_of_any_size(rng):
  """Factors that float32 cannot hold at once, and sums that it just can."""
  m, n, k = 64, 64, 32
  rows, cols = np.exp2(np.linspace(-90, 100, m)), np.exp2(np.linspace(26, -100, n))
  lhs = rng.uniform(1, 2, (m, k)) * rows[:, None]
  rhs = rng.uniform(1, 2, (k, n)) * cols
  operands = tuple(jnp.asarray(x, jnp.float32)[None] for x in (lhs, rhs))
  result = emulated(problem_of(m, n, k), SMALL, operands)[0]
  truth = wide(operands[0])[0] @ wide(operands[1])[0]
  normal = (truth > 2.0**-120) & (truth < 2.0**127)  # The CPU has no subnormals.
  assert normal.mean() > 0.5
  np.testing.assert_allclose(result[normal], truth[normal], rtol=1e-6)


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid")
@pytest.mark.slow
def test_what_float16_cannot_hold_is_exact_all_the_same(rng):
  problem = problem_of(72, 64, 96)
  lhs, rhs = (rng.standard_normal(s) for s in (problem.lhs_shape, problem.rhs_shape))
  lhs *= np.exp2(rng.uniform(-40, 40, lhs.shape))
  check(problem, SMALL, operands=tuple(jnp.asarray(x, jnp.float32) for x in (lhs, rhs)))
  rhs[0, 3, 5], lhs[0, 7, 2] = np.inf, np.nan
  operands = tuple(jnp.asarray(x, jnp.float32) for x in (lhs, rhs))
  result = emulated(problem, SMALL, operands)
  truth = np.asarray(operands[0]) @ np.asarray(operands[1])
  np.testing.assert_array_equal(np.isnan(result), np.isnan(truth))
  np.testing.assert_array_equal(np.isposinf(result), np.isposinf(truth))


@pytest.mark.parametrize(
    ("kernel", "fields", "named"),
    [
        ("persistent", dict(promote=0), "promote=0"),
        ("persistent", dict(swap=True), "excludes swap"),
        ("persistent", dict(tile_n=256), "promoted sum"),
        ("split_k", dict(splits=2, swap=True), "excludes swap"),
    ],
)
def test_supports_names_the_constraint(kernel, fields, named):
  config = KERNELS[kernel].Config(**{**vars(SMALL), **fields})
  assert named in KERNELS[kernel].supports(problem_of(256, 256, 256), config)
  other = make_problem(256, 256, 256, "NN", "bfloat16")
  config = KERNELS[kernel].Config(**{**vars(SMALL), **fields, "swap": False})
  assert "a way of bf16_x6" in KERNELS[kernel].supports(other, config)


@pytest.mark.parametrize("layouts", LAYOUTS)
def test_lowers_with_a_choice_on_the_device(layouts):
  for size in ((2048, 2048, 1024), (2001, 2050, 333)):
    problem = problem_of(*size, layouts)
    config = dataclasses.replace(SMALL, tile_n=128, num_stages=3)
    text = lowered("persistent", problem, config)
    assert text.count("stablehlo.case") == 1 and "stablehlo.transpose" not in text


def test_plans_take_float16_parts_where_these_are_as_exact():
  assert plan.make_plan(problem_of(4096, 4096, 4096), H200).config.float16_parts
  for size in ((256, 256, 512), (8192, 8192, 64)):
    found = plan.make_plan(problem_of(*size), H200)
    assert found.kernel == "xla" or not found.config.float16_parts
  high = dataclasses.replace(problem_of(4096, 4096, 4096), algorithm="bf16_x3")
  assert not plan.make_plan(high, H200).config.float16_parts


@pytest.mark.slow
@pytest.mark.more
def test_gradients_in_emulation(rng):
  a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((72, 96), (96, 40)))
  ct = rng.standard_normal((72, 40)).astype(np.float32)
  f = lambda a, b: jaxgemm.matmul(a, b, precision="highest", config=SMALL)
  with jaxgemm.emulate():
    out, pull = jax.vjp(f, jnp.asarray(a), jnp.asarray(b))
    results = out, *pull(jnp.asarray(ct))
  a, b, ct = map(wide, (a, b, ct))
  for result, truth in zip(results, (a @ b, ct @ b.T, a.T @ ct), strict=True):
    assert result.dtype == jnp.float32
    assert reference.relative_error(result, truth) < BOUND
