"""float32 products of bfloat16 parts: exact splits, and the kernels in emulation."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxgemm
from jaxgemm import plan, reference
from jaxgemm.device import known_device
from pallas_kernels import KERNELS, accumulate, parts
from pallas_kernels.configs import PersistentConfig, SplitKConfig
from pallas_kernels.problem import Epilogue, Problem
from tests import kernel_cases
from tests.kernel_cases import LAYOUTS, lowered, make_problem

# Of the parts that are left out, and of a float32 sum of a few hundred.
H200 = known_device("NVIDIA H200")
BOUNDS = {"bf16_x3": 6e-6, "bf16_x6": 3e-7, "bf16_x9": 2e-7}


def problem_in_parts(m, n, k, layouts="NN", algorithm="bf16_x6", **fields) -> Problem:
  return make_problem(m, n, k, layouts, "float32", algorithm=algorithm, **fields)


def emulated(problem, config, operands, kernel="persistent") -> np.ndarray:
  return np.asarray(kernel_cases.emulate(kernel, problem, config, operands, num_sms=2))


def check(problem, config, kernel="persistent"):
  operands = kernel_cases.random_operands(problem)
  result = emulated(problem, config, operands, kernel)
  error = reference.relative_error(result, kernel_cases.truth(problem, operands))
  assert error < BOUNDS[problem.algorithm]
  return error


def small(**fields) -> PersistentConfig:
  return PersistentConfig(**{**dict(tile_n=128, num_stages=2, promote=1), **fields})


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", parts.OF_ALGORITHM)
@pytest.mark.parametrize("layouts", kernel_cases.mostly_more(["NN", "TT"]))
def test_layouts(layouts, algorithm):
  check(problem_in_parts(133, 203, 141, layouts, algorithm), small())


@pytest.mark.slow
def test_more_products_are_more_exact():
  errors = [
      check(problem_in_parts(128, 128, 320, algorithm=name), small())
      for name in ("bf16_x3", "bf16_x6", "bf16_x9")
  ]
  assert errors[0] > 10 * errors[1] and errors[1] >= 0.9 * errors[2]


@pytest.mark.parametrize(
    "fields",
    kernel_cases.mostly_more([
        dict(cluster_n=2, wg_dim="n"),
        dict(wg_dim="tile", tile_m=64, tile_n=64),
        dict(consumers=1, tile_m=64, tile_n=64),
        dict(cluster_m=2),
    ]),
    ids=str,
)
@pytest.mark.slow
def test_configs(fields):
  check(problem_in_parts(264, 272, 200), small(**fields))


@pytest.mark.parametrize("fields", [dict(cluster_k=2), dict()], ids=str)
@pytest.mark.slow
def test_split_k(fields):
  config = SplitKConfig(**{**vars(small(tile_n=64)), "splits": 2, **fields})
  check(problem_in_parts(72, 136, 64 * 5), config, "split_k")


@pytest.mark.slow
@pytest.mark.parametrize("shared", [{}, {"lhs_batched": False}, {"rhs_batched": False}],
                         ids=str)
def test_batches_and_epilogues(shared):
  check(
      problem_in_parts(70, 130, 100, "TN", batch=2, **shared,
                       epilogue=Epilogue(0.5, -2.0, "float32")),
      small(tile_n=64),
  )


def test_split_is_exact(rng):
  exponents = rng.integers(-100, 128, size=4096)  # XLA's CPU code has no subnormals.
  x = (1 + rng.random(4096)) * np.exp2(exponents - 1.0)
  x = np.concatenate([x, -x, [1.0, 3.0, np.finfo(np.float32).max, 0.0]])
  x = x.astype(np.float32)[None, :, None]
  split = jax.jit(lambda x: parts.split(x, 3))(jnp.asarray(x))
  assert [(part.dtype, part.shape) for part in split] == [(jnp.bfloat16, x.shape)] * 3
  high, mid, low = (np.asarray(part).astype(np.float64) for part in split)
  whole = high + mid / 2**8 + low / 2**16
  np.testing.assert_array_equal(whole, x)
  two = [np.asarray(part).astype(np.float64) for part in parts.split(jnp.asarray(x), 2)]
  assert np.all(np.abs(two[0] + two[1] / 2**8 - x) <= 2.0**-16 * np.abs(x))


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid")
@pytest.mark.slow
def test_inf_and_nan_are_those_of_float32():
  """Also times numbers whose lower parts are zero."""
  lhs = np.ones((1, 64, 8), np.float32)
  rhs = np.full((1, 8, 64), 2.0, np.float32)
  lhs[0, 1, 0], lhs[0, 2, 1], lhs[0, 3, 2] = np.inf, -np.inf, np.nan
  lhs[0, 4, 0], lhs[0, 4, 1] = np.inf, -np.inf
  lhs[0, 5, 0], rhs[0, 0, 5] = 3e38, 1e37  # Their product is more than the largest.
  rhs[0, 0, 6], rhs[0, 3, 7], rhs[0, 4, 8] = 0.0, np.inf, -np.inf
  rhs[0, 0, 8], rhs[0, 1, 9] = 1e-3, -1e-20
  lhs[0, 6] = 0.0
  with np.errstate(invalid="ignore", over="ignore"):
    truth = (lhs[0].astype(np.float64) @ rhs[0].astype(np.float64)).astype(np.float32)
  for algorithm, tolerance in (("bf16_x3", 1e-4), ("bf16_x6", 1e-6), ("bf16_x9", 1e-6)):
    problem = problem_in_parts(64, 64, 8, algorithm=algorithm)
    operands = jnp.asarray(lhs), jnp.asarray(rhs)
    result = emulated(problem, small(tile_n=64, consumers=1, tile_m=64), operands)[0]
    np.testing.assert_array_equal(np.isnan(result), np.isnan(truth))
    np.testing.assert_allclose(result, truth, rtol=tolerance)


@pytest.mark.parametrize(
    ("kernel", "config", "named"),
    [
        ("persistent", small(promote=0), "promote=0"),
        ("persistent", small(promote=3), "promote=3"),
        ("persistent", small(misaligned="loads", consumers=1), "misaligned='loads'"),
        ("persistent", small(tile_n=256), "promoted sum"),
        ("persistent", small(num_stages=3), "shared memory"),
        ("persistent", small(tile_k=32), "tile_k=32 must be 64"),
        ("blocked", KERNELS["blocked"].Config(), "multiply parts"),
        ("triton", KERNELS["triton"].Config(), "multiply parts"),
    ],
)
def test_supports_names_the_constraint(kernel, config, named):
  assert named in KERNELS[kernel].supports(problem_in_parts(256, 256, 256), config)


@pytest.mark.parametrize("kernel", ["persistent", "split_k"])
@pytest.mark.parametrize("way", ["loads", "skewed", "runs"])
@pytest.mark.parametrize("float16_parts", [False, True])
def test_parts_come_padded(float16_parts, way, kernel):
  config = KERNELS[kernel].Config(
      tile_m=64, tile_n=64, num_stages=3, promote=1, consumers=1, misaligned=way,
      float16_parts=float16_parts,
  )
  reason = KERNELS[kernel].supports(problem_in_parts(256, 256, 255), config)
  assert reason is not None
  if (way, kernel) != ("runs", "split_k"):  # Which are no parts of k in any case.
    assert f"misaligned='{way}': parts" in reason
  padded = dataclasses.replace(config, misaligned="padded")
  assert KERNELS[kernel].supports(problem_in_parts(256, 256, 255), padded) is None


@pytest.mark.parametrize("kernel", ["persistent", "split_k"])
@pytest.mark.parametrize("layouts", LAYOUTS)
def test_parts_lower(layouts, kernel):
  """Split by one pass an operand, without a transposed copy of either."""
  for size, algorithm in (((512, 768, 1024), "bf16_x6"), ((70, 101, 333), "bf16_x3")):
    problem = problem_in_parts(*size, layouts, algorithm)
    chosen = plan.make_plan(problem, H200, implementation=kernel)
    text = lowered(kernel, problem, chosen.config)
    assert f"jaxgemm_{kernel}" in text and "stablehlo.transpose" not in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "bound"), [kernel_cases.more("high", 6e-6), ("highest", 3e-7)]
)
def test_products_and_gradients_in_emulation(precision, bound, rng):
  a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((72, 96), (96, 40)))
  ct = rng.standard_normal((72, 40)).astype(np.float32)
  f = lambda a, b: jaxgemm.matmul(
      a, b, precision=precision, implementation="persistent"
  )
  with jaxgemm.emulate():
    out, pull = jax.vjp(f, jnp.asarray(a), jnp.asarray(b))
    results = out, *pull(jnp.asarray(ct))
  wide = [x.astype(np.float64) for x in (a, b, ct)]
  truths = wide[0] @ wide[1], wide[2] @ wide[1].T, wide[0].T @ wide[2]
  for result, truth in zip(results, truths, strict=True):
    assert result.dtype == jnp.float32
    assert reference.relative_error(result, truth) < bound


def test_what_is_given_back_spares_exact_sums(rng):
  """Less than half a unit in the last place, of whatever parts."""
  values = np.concatenate([
      rng.uniform(1.0, 2.0, 10000), [1.0, np.nextafter(2.0, 0.0), 256.0],
  ]).astype(np.float32)
  for one in (*parts.OF_ALGORITHM.values(), parts.SPLIT_LHS, parts.HALVES):
    back = accumulate._given_back(jnp.asarray(values), one.lost)
    np.testing.assert_array_equal(values + np.asarray(back), values)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [64, 1024])
def test_gpu_exact_products_are_exact(n):
  """Ones, and rows of the identity: whichever parts the plan has."""
  keys = jax.random.split(jax.random.key(0))
  ones = jnp.ones((n, n))
  whole = jax.random.randint(keys[0], (n, n), -1000, 1000).astype(jnp.float32)
  picked = jax.nn.one_hot(jax.random.randint(keys[1], (n,), 0, n), n)
  multiply = jax.jit(functools.partial(jaxgemm.matmul, precision="highest"))
  np.testing.assert_array_equal(multiply(ones, ones), n * np.ones((n, n)))
  np.testing.assert_array_equal(
      multiply(picked, whole), np.asarray(picked) @ np.asarray(whole)
  )
