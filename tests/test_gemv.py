"""gemv: few rows times a matrix, in float32 arithmetic."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxgemm
from jaxgemm import heuristics, plan, reference
from jaxgemm.device import known_device
from pallas_kernels import gemv
from pallas_kernels.configs import GemvConfig
from pallas_kernels.problem import Epilogue
from tests import kernel_cases
from tests.kernel_cases import emulate, make_problem, mostly_slow

H200 = known_device("NVIDIA H200")
ROUNDING = 2.0**-24  # Of a float32 result: no error is asked to be below that.

# (m, n, k, layouts, splits): whole vectors of four, two and one; ends of k and of columns
# that fill no group; a column in place of a row.
CASES = [
    (1, 700, 100, "NN", 3), (2, 512, 64, "NN", 4), (4, 258, 16, "TN", 1),
    (3, 129, 37, "TN", 2), (1, 1025, 5, "NN", 1), (300, 1, 90, "TN", 6),
    (514, 4, 33, "TT", 3), (128, 2, 48, "TN", 1),
]


def of(m, n, k, layouts="NN", **fields):
  return make_problem(m, n, k, layouts, "float32", algorithm="bf16_x6", **fields)


def check(found, problem, operands) -> None:
  """Asserts that the error is at most twice that of a product in float32 (of BLAS).

  The result of that is rounded as this one's, and 16-bit operands are exact in float32.
  """
  truth = kernel_cases.truth(problem, operands)
  lhs, rhs, *c = kernel_cases.as_multiplied(problem, operands, np.float32)
  epilogue = problem.epilogue
  plain = epilogue.alpha * (lhs @ rhs) + sum(epilogue.beta * x for x in c)
  baseline = reference.relative_error(jnp.asarray(plain, problem.out_dtype), truth)
  assert reference.relative_error(found, truth) <= 2 * max(baseline, ROUNDING)


@pytest.mark.parametrize("case", mostly_slow(CASES, 4), ids=str)
def test_as_exact_as_float32(case):
  *sizes, splits = case
  problem = of(*sizes)
  operands = kernel_cases.random_operands(problem)
  found = emulate("gemv", problem, GemvConfig(splits), operands)
  assert found.shape == problem.out_shape and found.dtype == jnp.float32
  check(found, problem, operands)


@pytest.mark.parametrize("dtype", mostly_slow(["bfloat16", "float16"]))
@pytest.mark.parametrize(
    "sizes", [(1, 257, 37), (2, 1024, 40), (3, 770, 40), (257, 2, 50, "TN")], ids=str
)
def test_16_bits(dtype, sizes):
  problem = make_problem(*sizes, dtype=dtype, out_dtype="float32")
  operands = kernel_cases.random_operands(problem)
  found = emulate("gemv", problem, GemvConfig(2), operands)
  check(found, problem, operands)


@pytest.mark.parametrize(
    "shared", mostly_slow([{"rhs_batched": False}, {"lhs_batched": False}, {}]), ids=str
)
@pytest.mark.parametrize("sizes", [(2, 200, 40, "NN"), (200, 2, 40, "TN")], ids=str)
def test_batches(sizes, shared):
  problem = of(*sizes, batch=3, **shared)
  operands = kernel_cases.random_operands(problem)
  found = emulate("gemv", problem, GemvConfig(2), operands)
  check(found, problem, operands)


@pytest.mark.parametrize("out_dtype", mostly_slow(["bfloat16", "float16"]))
@pytest.mark.parametrize("sizes", [(2, 200, 40, "NN"), (200, 2, 40, "TN")], ids=str)
def test_epilogue(sizes, out_dtype):
  epilogue = Epilogue(-0.5, 2.0, "float32")
  problem = of(*sizes, out_dtype=out_dtype, epilogue=epilogue)
  operands = kernel_cases.random_operands(problem)
  found = emulate("gemv", problem, GemvConfig(3), operands)
  assert found.dtype == out_dtype
  check(found, problem, operands)


def test_layers_take_it(rng):
  """Bias, activation, what the gradient wants saved, and the gradient itself."""
  x, w, b = (
      jnp.asarray(rng.standard_normal(shape), jnp.float32)
      for shape in ((1, 48), (48, 256), (256,))
  )
  layer = lambda x, w, b: jaxgemm.linear(x, w, b, activation="gelu", precision="highest")
  plain = lambda x, w, b: jax.nn.gelu(jnp.matmul(x, w, precision="highest") + b)
  with jaxgemm.emulate():
    assert "gemv" in str(jaxgemm.explain(layer, x, w, b))
    found = jax.jit(jax.value_and_grad(lambda *a: layer(*a).sum(), (0, 1, 2)))(x, w, b)
  gradient = jax.value_and_grad(lambda *a: plain(*a).sum(), (0, 1, 2))
  baseline = jax.jit(gradient)(x, w, b)
  with jax.enable_x64(True):
    truth = gradient(*(jnp.asarray(np.asarray(a), jnp.float64) for a in (x, w, b)))
  leaves = map(jax.tree.leaves, (found, baseline, truth))
  for ours, xla, exact in zip(*leaves, strict=True):
    bound = 2 * max(reference.relative_error(xla, exact), ROUNDING)
    assert reference.relative_error(ours, exact) <= bound


def test_sums_lose_nothing_that_cancels():
  """What is left where groups cancel: the rounding errors of sums are kept."""
  x = np.ones((1, 1, 64), np.float32)
  w = np.zeros((1, 64, 128), np.float32)
  w[0, 0], w[0, 20], w[0, 40] = 2.0**30, 1.0, -(2.0**30)
  for splits in (1, 4):
    found = emulate("gemv", of(1, 128, 64), GemvConfig(splits), (x, w))
    np.testing.assert_array_equal(found, 1.0)


def test_inf_and_nan(rng):
  x = rng.standard_normal((1, 2, 40)).astype(np.float32)
  w = rng.standard_normal((1, 40, 128)).astype(np.float32)
  x[0, 1, 3], w[0, 7, 5], w[0, 39, 9] = np.inf, np.nan, -np.inf
  found = emulate("gemv", of(2, 128, 40), GemvConfig(2), (x, w))
  with np.errstate(invalid="ignore"):
    wanted = x @ w
  np.testing.assert_array_equal(np.isfinite(found), np.isfinite(wanted))
  np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted))


@pytest.mark.parametrize(
    ("problem", "splits", "reason"),
    [
        (make_problem(1, 256, 64, dtype="int8", out_dtype="int32"), 1, "16 and 32 bits"),
        (of(5, 256, 64), 1, "m up to 4"),
        (of(1, 256, 64, "NT"), 1, "n-major"),
        (of(1, 127, 64), 1, "at least 128 columns"),
        (of(1, 256, 64), 5, r"splits=5 must be in \[1, 4\]"),
        (of(1, 256, 160), 7, "the last would have nothing"),
        (of(1, 256, 64), 0, "splits=0"),
    ],
    ids=str,
)
def test_what_it_refuses(problem, splits, reason):
  with pytest.raises(ValueError, match=reason):
    plan.make_plan(
        problem, H200, implementation="gemv", config=GemvConfig(splits)
    )


@pytest.mark.parametrize("algorithm", ["bf16_x6", "tf32_f32", "bf16_x3"])
def test_plans(algorithm):
  """Where sums run down columns; elsewhere XLA is as fast as the memory."""
  for sizes in ((1, 4096, 4096), (3, 6144, 4096), (4096, 1, 4096, "TN"), (1, 4097, 4097)):
    problem = dataclasses.replace(of(*sizes), algorithm=algorithm)
    assert plan.make_plan(problem, H200).kernel == "gemv"
  assert plan.make_plan(make_problem(1, 4097, 4097), H200).kernel == "gemv"
  assert plan.make_plan(make_problem(1, 4096, 4096), H200).kernel != "gemv"
  for sizes in ((1, 4096, 4096, "NT"), (5, 4096, 4096), (1, 100, 4096)):
    assert plan.make_plan(of(*sizes), H200).kernel != "gemv"


@pytest.mark.parametrize("sizes", [(1, 6144, 4096), (1, 4097, 997), (1, 1 << 20, 16)])
def test_candidates_leave_no_split_empty(sizes):
  found = [c for c in heuristics.candidates(of(*sizes), H200) if c.kernel == "gemv"]
  assert found
  for splits in (c.config.splits for c in found):
    depth = gemv.Geometry.of(of(*sizes), splits).depth
    assert (splits - 1) * depth < sizes[2] <= splits * depth


@pytest.mark.parametrize("splits", [1, 3])
def test_lowering(splits):
  text = kernel_cases.lowered("gemv", of(1, 4100, 100), GemvConfig(splits))
  assert text.count("custom_call @mosaic_gpu") == 1 and "jaxgemm_gemv" in text


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("layouts", ["NN", "TN"])
@pytest.mark.parametrize("n", [128, 1536, 770, 1025])
@pytest.mark.parametrize("m", [1, 3, 4])
def test_gpu_as_exact_as_float32(m, n, layouts, batch):
  for k in (1, 1003):
    for problem in (of(m, n, k, layouts, batch=batch), of(n, m, k, "TN", batch=batch)):
      operands = kernel_cases.random_operands(problem)
      groups = gemv.num_groups(problem)
      for splits in {1, groups}:
        found = gemv.launch(operands, problem, GemvConfig(splits), num_sms=132)
        check(found, problem, operands)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("n", [128, 1536, 2052, 770, 1025])
@pytest.mark.parametrize("m", [1, 4])
def test_gpu_16_bits(m, n, dtype):
  problem = make_problem(m, n, 1003, "TN", dtype, out_dtype="float32")
  operands = kernel_cases.random_operands(problem)
  for splits in (1, 63):
    found = gemv.launch(operands, problem, GemvConfig(splits), num_sms=132)
    check(found, problem, operands)


@pytest.mark.gpu
def test_gpu_more_than_2_to_the_16_products():
  problem = of(1, 128, 16, batch=70_000)
  operands = kernel_cases.random_operands(problem)
  found = gemv.launch(operands, problem, GemvConfig(), num_sms=132)
  check(found, problem, operands)
