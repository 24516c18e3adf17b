"""lhs in float32, split by the consumers: in emulation and lowered for CUDA."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxgemm import reference
from pallas_kernels import KERNELS
from pallas_kernels.configs import PersistentConfig
from pallas_kernels.problem import Epilogue
from tests import kernel_cases
from tests.kernel_cases import LAYOUTS, lowered, make_problem

CONFIG = PersistentConfig(128, 48, 32, num_stages=4, promote=1, split_lhs=True)
KERNEL_FIELDS = (
    ("persistent", {}), ("split_k", dict(splits=2)),
    ("split_k", dict(splits=2, cluster_k=2)),
)


def config_of(kernel: str, **fields):
  return KERNELS[kernel].Config(**{**vars(CONFIG), **fields})


def problem_of(m, n, k, layouts="NN", **fields):
  return make_problem(m, n, k, layouts, "float32", algorithm="bf16_x6", **fields)


def check(kernel, problem, config, operands=None):
  operands = operands or kernel_cases.random_operands(problem)
  result = kernel_cases.emulate(kernel, problem, config, operands, num_sms=2)
  error = reference.relative_error(result, kernel_cases.truth(problem, operands))
  assert error < 1e-7


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "fields"), KERNEL_FIELDS, ids=str)
@pytest.mark.parametrize("layouts", kernel_cases.mostly_more(["TT", "NN"]))
def test_layouts(layouts, kernel, fields):
  check(kernel, problem_of(264, 40, 200, layouts), config_of(kernel, **fields))


@pytest.mark.slow
@pytest.mark.parametrize("layouts", LAYOUTS)
def test_swapped(layouts):
  config = config_of("persistent", swap=True, tile_n=16, num_stages=7)
  check("persistent", problem_of(5, 268, 132, layouts), config)


@pytest.mark.parametrize(
    ("cols", "fields"),
    [
        (64, {}),
        pytest.param(40, dict(cluster_m=2), marks=pytest.mark.slow),
        kernel_cases.more(136, {}),
        kernel_cases.more(197, dict(tile_m=192, consumers=3)),
    ],
    ids=str,
)
def test_n_major_rhs_as_it_is(cols, fields):
  config = config_of("persistent", tile_n=64, **fields)
  check("persistent", problem_of(200, cols, 100, "NN", batch=2), config)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    kernel_cases.mostly_more(
        [dict(cluster_m=2), dict(tile_m=64, consumers=1), dict(tile_m=192, consumers=3)],
    ),
    ids=str,
)
def test_configs(fields):
  problem = problem_of(
      400, 70, 100, "TN", batch=2, rhs_batched=False,
      epilogue=Epilogue(0.5, -2.0, "float32"),
  )
  check("persistent", problem, dataclasses.replace(CONFIG, **fields))


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid")
@pytest.mark.slow
def test_every_number_comes_through(rng):
  """Exactly, times one; inf and nan as in float32."""
  exponents = rng.integers(-100, 128, size=(1, 128, 64))
  x = (1 + rng.random((1, 128, 64))) * np.exp2(exponents - 1.0)
  x[0, 3, 3] = np.finfo(np.float32).max
  operands = jnp.asarray(x, jnp.float32), jnp.eye(64, dtype=jnp.float32)[None]
  problem = problem_of(128, 64, 64)
  config = config_of("persistent", tile_n=64)
  run = lambda *operands: np.asarray(
      kernel_cases.emulate("persistent", problem, config, operands, num_sms=2)
  )
  np.testing.assert_array_equal(run(*operands), np.asarray(operands[0]))
  x[0, 5, 7], x[0, 6, 1], x[0, 8, 2] = np.inf, -np.inf, np.nan
  ones = jnp.full((1, 64, 64), 2.0)
  lhs = jnp.asarray(x, jnp.float32)
  truth = np.asarray(lhs).astype(np.float64).sum(axis=2) * 2.0
  result = run(lhs, ones)[0, :, 0]
  np.testing.assert_array_equal(np.isnan(result), np.isnan(truth[0]))
  expected = truth[0].astype(np.float32)
  np.testing.assert_array_equal(np.isinf(result), np.isinf(expected))


@pytest.mark.parametrize(("kernel", "fields"), KERNEL_FIELDS, ids=str)
@pytest.mark.parametrize("layouts", LAYOUTS)
def test_lowers_without_a_pass_over_lhs(layouts, kernel, fields):
  problem = problem_of(4096, 40, 2048, layouts)
  text = lowered(kernel, problem, config_of(kernel, **fields))
  assert f"jaxgemm_{kernel}" in text
  lhs = "x".join(map(str, problem.lhs_shape))
  assert f"tensor<{lhs}xbf16>" not in text and f"tensor<{lhs}xf32>" in text


@pytest.mark.parametrize("cols", [64, 100, 197])
def test_n_major_rhs_is_not_transposed(cols):
  config = config_of("persistent", tile_n=64)
  text = lowered("persistent", problem_of(4096, cols, 2048), config)
  assert "stablehlo.transpose" not in text
  padded = 64 * -(-cols // 64)
  assert f"tensor<1x2048x{padded}xbf16>" in text


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (dict(tile_k=64), "tile_k=64"),
        (dict(tile_n=112), "tile_n=112"),
        (dict(tile_m=256), "64 rows"),
        (dict(float16_parts=True), "not of float16 parts"),
        (dict(promote=0), "promote=0"),
        (dict(num_stages=16), "shared memory"),
    ],
)
def test_supports_names_the_constraint(fields, named):
  reason = KERNELS["persistent"].supports(
      problem_of(256, 64, 256), config_of("persistent", **fields)
  )
  assert named in reason
  high = dataclasses.replace(problem_of(256, 64, 256), algorithm="bf16_x3")
  assert "bf16_x6" in KERNELS["persistent"].supports(high, CONFIG)
