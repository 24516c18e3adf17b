"""Operands, what should come of them, and whether it did; see experiments/fuzz.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from experiments import fuzz_guards
from experiments.gate import DEVIATION_FACTOR, ERROR_FACTOR
import jaxgemm
from jaxgemm import reference
from jaxgemm.device import Device
from jaxgemm.launch import run
from jaxgemm.plan import Plan
from pallas_kernels import compat
from pallas_kernels.problem import Problem

Array = np.ndarray
_LEAST_SIZE = 64


@dataclasses.dataclass(frozen=True)
class Truth:
  """Operands, and what should come of them.

  Attributes:
    operands: as the problem stores them.
    exact: the float64 product.
    baseline: the float32 product, rounded.
  """

  operands: tuple[Array, ...]
  exact: Array
  baseline: Array


def draw_truth(problem: Problem, seed: Sequence[int]) -> Truth:
  """Returns normal operands, or integers of all sizes, and their product."""
  rng = np.random.default_rng(seed)
  operands = [
      _drawn(rng, problem.lhs_shape, problem.dtype),
      _drawn(rng, problem.rhs_shape, problem.rhs_dtype),
  ]
  epilogue = problem.epilogue
  if epilogue.c_dtype is not None:
    operands.append(_drawn(rng, problem.out_shape, epilogue.c_dtype))
  lhs, rhs, *c = operands
  lhs = lhs.swapaxes(1, 2) if problem.lhs_layout == "m-major" else lhs
  rhs = rhs.swapaxes(1, 2) if problem.rhs_layout == "k-major" else rhs
  exact = reference.matmul(lhs, rhs, *c, alpha=epilogue.alpha, beta=epilogue.beta)
  if problem.dtype == "int8":
    return Truth(tuple(operands), exact, exact)
  out = _float32_product(problem.algorithm, lhs, rhs) * np.float32(epilogue.alpha)
  if c:
    out = out + c[0].astype(np.float32) * np.float32(epilogue.beta)
  return Truth(tuple(operands), exact, out.astype(jnp.dtype(problem.out_dtype)))


def _drawn(rng: np.random.Generator, shape: Sequence[int], dtype: str) -> Array:
  if dtype == "int8":
    return rng.integers(-128, 128, shape, np.int8)
  return rng.standard_normal(shape, np.float32).astype(jnp.dtype(dtype))


def _float32_product(algorithm: str, lhs: Array, rhs: Array) -> Array:
  """Returns the product in float32, of operands as the algorithm reads them."""
  rows, cols = lhs.shape[1], rhs.shape[2]
  lhs, rhs = lhs.astype(np.float32), rhs.astype(np.float32)
  # Of few rows or columns BLAS adds in other ways: some lose less than an ordinary sum,
  # some more (16x22x2064: 0.8e-7 or 3.3e-7, by the machine; of 64 and more 1.5e-7).
  lhs = np.pad(lhs, ((0, 0), (0, max(0, _LEAST_SIZE - rows)), (0, 0)))
  rhs = np.pad(rhs, ((0, 0), (0, 0), (0, max(0, _LEAST_SIZE - cols))))
  if algorithm == "tf32_f32":
    lhs, rhs = _tf32(lhs), _tf32(rhs)
  if algorithm == "bf16_x3":
    (high, low), (rhs_high, rhs_low) = _halves(lhs), _halves(rhs)
    out = high @ rhs_low + low @ rhs_high + high @ rhs_high
  else:
    out = lhs @ rhs
  return out[:, :rows, :cols]


def _tf32(x: Array) -> Array:
  """Returns x rounded to ten bits after the first, to even ones."""
  bits = x.view(np.uint32)
  bits = bits + np.uint32(0xFFF) + (bits >> np.uint32(13) & np.uint32(1))
  return (bits & np.uint32(0xFFFFE000)).view(np.float32)


def _halves(x: Array) -> tuple[Array, Array]:
  high = x.astype(ml_dtypes.bfloat16).astype(np.float32)
  return high, (x - high).astype(ml_dtypes.bfloat16).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Verdict:
  """What is to be said of a program's results.

  Attributes:
    error, limit: the error of all, relative to the norm of the truth, and what it may
      be; None where there is none.
    reason: why they fail, None if they pass.
  """

  error: float | None = None
  limit: float | None = None
  reason: str | None = None


def judge(problem: Problem, truths: Sequence[Truth], results: Sequence[Array]) -> Verdict:
  """Returns the verdict on one result for each truth."""
  for result in results:
    if (result.shape, result.dtype.name) != (problem.out_shape, problem.out_dtype):
      found = f"{result.dtype.name} {result.shape}"
      return Verdict(reason=f"the result is {found}, not of the problem")
    is_integer = result.dtype.kind == "i"
    beyond = result == fuzz_guards.BEYOND if is_integer else np.isinf(result)
    if result.size and beyond.all():
      return Verdict(reason="the kernel wrote beyond its result")
  out, exact = np.stack(results), np.stack([truth.exact for truth in truths])
  baseline = np.stack([truth.baseline for truth in truths])
  if out.dtype.kind != "i" and (lost := np.count_nonzero(~np.isfinite(out))):
    return Verdict(reason=f"{lost} of {out.size} elements are not finite")
  error = reference.relative_error(out, exact)
  scale = max(reference.relative_error(baseline, exact), _least_scale(problem))
  limit = ERROR_FACTOR * scale
  if not error <= limit:
    return Verdict(error, limit, f"error {error:.2e}, where {limit:.2e} is allowed")
  furthest = reference.max_error(out, exact)
  if not furthest <= DEVIATION_FACTOR * scale:
    return Verdict(error, limit, f"an element is off by {furthest:.2e}")
  return Verdict(error, limit)


def _least_scale(problem: Problem) -> float:
  """Returns the error below which a baseline's is luck: see `gate`."""
  if problem.out_dtype == "int32":
    return 0.0
  last_bit = float(jnp.finfo(problem.out_dtype).eps)
  return last_bit / (1 if problem.out_dtype == "float32" else 2) / ERROR_FACTOR


def check(
    plan: Plan, device: Device, truths: Sequence[Truth], *, emulated: bool
) -> Verdict:
  """Runs a plan on the operands of each truth, within `guarded`, and judges it."""
  launch = _program(plan, device, emulated)
  results = [_called(plan.problem, launch, truth.operands) for truth in truths]
  return judge(plan.problem, truths, results)


def _program(
    plan: Plan, device: Device, emulated: bool
) -> Callable[..., jax.Array]:
  """Returns the program of a plan, of operands as its problem stores them."""
  if plan.kernel == "xla":
    return functools.partial(_by_name, plan.problem)
  if emulated:
    return lambda *operands: compat.run_interpreted(
        lambda params: run(plan, operands, device, params)
    )
  return jax.jit(lambda *operands: run(plan, operands, device))


def _by_name(problem: Problem, lhs: jax.Array, rhs: jax.Array, *c: jax.Array):
  """The problem by jaxgemm.gemm."""
  lhs = lhs.swapaxes(1, 2) if problem.lhs_layout == "m-major" else lhs
  rhs = rhs.swapaxes(1, 2) if problem.rhs_layout == "k-major" else rhs
  return jaxgemm.gemm(
      lhs, rhs, *c, alpha=problem.epilogue.alpha, beta=problem.epilogue.beta,
      preferred_element_type=problem.out_dtype,
  )


def _called(
    problem: Problem, launch: Callable[..., jax.Array], operands: Sequence[Array]
) -> Array:
  """Returns a result; buffers of NaN are freed before, where it may come to lie."""
  arrays = [jnp.asarray(x) for x in operands]
  if problem.out_dtype != "int32":
    nans = np.full(problem.out_shape, np.nan, jnp.dtype(problem.out_dtype))
    for buffer in jax.block_until_ready([jax.device_put(nans) for _ in range(2)]):
      buffer.delete()
  return np.asarray(launch(*arrays))
