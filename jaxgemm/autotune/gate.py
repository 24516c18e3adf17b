"""The correctness gate: no time counts before the result has passed it.

The inputs are fresh and normal, and buffers of NaN are freed just before each
call. A result passes if, in this order,

1. every element is finite;
2. its error against a float64 oracle, Frobenius and relative, is at most twice
   the error that XLA's result has on the same elements of the same inputs;
3. no element is further from XLA's result than rounding could take the two apart:
   64 times XLA's error, relative to the element or, for a small one, to the root
   mean square of all (in bfloat16, a tenth of a typical value).

All of this holds for the operand c, too, where a product has one.

Small problems are compared with the oracle in full. Of large ones, and of groups of
rows, the oracle covers 64 rows by 64 columns of up to four products of the batch, all
of k: one row and one column at random from each of 64 equal strata, the first and the
last always among them. The third check reads every element, so that a wrong
tile between the sampled ones does not slip through.

The poison is best effort: JAX allocates a result itself, most likely, but not
certainly, where the freed NaN buffer lay. An element that the kernel leaves
unwritten is then NaN and fails the first check; otherwise it is stale and
fails the third.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxgemm import reference
from jaxgemm.autotune.operands import (
  Inputs,
  group_sizes,
  has_scales,
  operand_types,
  out_shape,
)
from jaxgemm.quantisation import expand
from pallas_kernels.problem import Problem

Product = Callable[..., jax.Array]  # Of operands as stored.

ERROR_FACTOR = 2.0
# Two results whose errors are within ERROR_FACTOR differ by about 2 errors; the
# largest of a billion normal differences is 6 times as large, and the rest allows
# for rows and columns of unlike norms.
DEVIATION_FACTOR = 64.0
_FULL_ORACLE_FLOPS = 1 << 28
_SAMPLE = 64
_BATCH_SAMPLE = 4
_POISON = -1_234_567_891  # Of integers, which have no NaN.


@dataclasses.dataclass(frozen=True)
class Verdict:
  """What the gate says of one result.

  Attributes:
    error: relative Frobenius error against the oracle, None if not finite.
    reason: why the result failed, None if it passed.
  """

  error: float | None
  reason: str | None

  @property
  def passed(self) -> bool:
    return self.reason is None


class Gate:
  """The gate of one problem; compiles its device programs when built.

  Attributes:
    baseline_error: relative Frobenius error of XLA's result; None until
      `set_baseline` has found it finite.
  """

  def __init__(self, problem: Problem, seed: int):
    self._problem = problem
    rng = np.random.default_rng(seed)
    self._group = None  # Of each row.
    if problem.grouped:
      self._group = np.repeat(np.arange(problem.batch), group_sizes(problem))
    if problem.flops <= _FULL_ORACLE_FLOPS and not problem.grouped:
      sizes = (problem.batch, problem.m, problem.n)
      self._indices = tuple(np.arange(size) for size in sizes)
    else:
      self._indices = (
          _stratified(problem.out_shape[0], _BATCH_SAMPLE, rng),
          _stratified(problem.m, _SAMPLE, rng),
          _stratified(problem.n, _SAMPLE, rng),
      )
    shape = out_shape(problem)
    out = jax.ShapeDtypeStruct(shape, problem.out_dtype)
    unwritten = _POISON if self._is_exact else jnp.nan
    poison = jax.jit(lambda: jnp.full(shape, unwritten, problem.out_dtype))
    self._poison = poison.lower().compile()
    self._sample_inputs = jax.jit(self._sampled_inputs).lower(
        *operand_types(problem)
    ).compile()
    self._inspect = jax.jit(self._inspection).lower(out, out).compile()
    self._oracle: np.ndarray | None = None
    self._baseline: jax.Array | None = None
    self.baseline_error: float | None = None

  @property
  def _is_exact(self) -> bool:
    """Whether sums are integers, in which nothing is rounded."""
    return self._problem.out_dtype == "int32"

  def set_baseline(self, product: Product, inputs: Inputs) -> Verdict:
    """Computes the oracle of `inputs` and XLA's own error; keeps XLA's result."""
    epilogue = self._problem.epilogue
    self._oracle = reference.matmul(
        *self._sample_inputs(*inputs), alpha=epilogue.alpha, beta=epilogue.beta
    )
    out = self._call(product, inputs)
    finite, sample, *_ = self._inspect(out, out)
    if not finite:
      return Verdict(None, "XLA's own result is not finite")
    self._oracle = self._oracle.reshape(sample.shape)
    self._baseline = out
    self.baseline_error = self._error(sample)
    return Verdict(self.baseline_error, None)

  def check(self, product: Product, inputs: Inputs) -> Verdict:
    """Returns the verdict on `product(*inputs)`; `set_baseline` comes first."""
    if self._baseline is None:
      return Verdict(None, "there is no result of XLA's to compare with")
    out = self._call(product, inputs)
    finite, sample, deviation = self._inspect(out, self._baseline)
    if not finite:
      return Verdict(None, "the result is not finite everywhere")
    error = self._error(sample)
    scale = self.baseline_error
    if scale == 0.0 and not self._is_exact:
      # XLA is exact here: allow half a unit in the last place, the finest rounding.
      scale = float(jnp.finfo(self._problem.out_dtype).eps) / 2 / ERROR_FACTOR
    if not error <= ERROR_FACTOR * scale:
      return Verdict(error, f"error {error:.2e}, XLA's is {self.baseline_error:.2e}")
    if not deviation <= DEVIATION_FACTOR * scale:
      return Verdict(
          error,
          f"an element is {float(deviation):.2e} from XLA's, where rounding explains"
          f" {DEVIATION_FACTOR * scale:.2e}",
      )
    return Verdict(error, None)

  def _call(self, product: Product, inputs: Inputs) -> jax.Array:
    poison = [self._poison() for _ in range(2)]
    jax.block_until_ready(poison)
    for buffer in poison:
      buffer.delete()
    return jax.block_until_ready(product(*inputs))

  def _error(self, sample: jax.Array) -> float:
    difference = np.asarray(sample, np.float64) - self._oracle
    norm = np.linalg.norm(self._oracle)
    return float(np.linalg.norm(difference) / norm) if norm else float(difference.any())

  def _sampled_inputs(
      self, lhs: jax.Array, rhs: jax.Array, *others: jax.Array
  ) -> Inputs:
    """Returns lhs [b, rows, k], rhs [b, k, columns], c [b, rows, columns] of the sample.

    An operand that serves the whole batch has b = 1. Of a product whose rows are in
    groups each row is a product of its own: lhs [rows, 1, k], rhs [rows, k, columns].
    Values that have scales are float32, times these.
    """
    problem = self._problem
    batch, rows, columns = self._indices
    lhs = lhs.reshape(problem.lhs_shape)
    rhs = rhs.reshape(problem.rhs_shape)
    if problem.lhs_layout == "m-major":
      lhs = lhs.swapaxes(1, 2)
    if problem.rhs_layout == "k-major":
      rhs = rhs.swapaxes(1, 2)
    found = self._sampled(lhs, rhs)
    if has_scales(problem):
      scales = self._sampled(*_full_scales(problem, *others[:2]))
      found = tuple(
          x.astype(jnp.float32) * expand(scale, x.shape)
          for x, scale in zip(found, scales, strict=True)
      )
    if problem.grouped == "k":
      lhs, rhs = found
      belongs = self._group == batch[:, None]
      return jnp.where(belongs[:, None], lhs, 0), rhs
    if problem.epilogue.has_c:
      c = others[0].reshape(problem.out_shape)[batch]
      return *found, c[:, rows][:, :, columns]
    return found

  def _sampled(self, lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of arrays [b, m, .] and [b, ., n] what belongs to the sample."""
    problem = self._problem
    batch, rows, columns = self._indices
    if problem.grouped == "m":
      return lhs[0, rows][:, None], rhs[self._group[rows]][:, :, columns]
    lhs = lhs[batch] if problem.lhs_batched else lhs
    rhs = rhs[batch] if problem.rhs_batched else rhs
    return lhs[:, rows], rhs[:, :, columns]

  def _inspection(
      self, out: jax.Array, baseline: jax.Array
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns: all finite, the sample, and the largest deviation of an element.

    The deviation is the distance from the baseline's element, relative to that or,
    if it is larger, to the root mean square of all of the baseline: a small sum of
    large terms carries the rounding of its terms.
    """
    batch, rows, columns = self._indices
    out = out.reshape(self._problem.out_shape)
    baseline = baseline.reshape(self._problem.out_shape)
    sample = out[batch][:, rows][:, :, columns]
    baseline = baseline.astype(jnp.float32)
    scale = jnp.sqrt(jnp.mean(jnp.square(baseline)))
    distance = jnp.abs(out.astype(jnp.float32) - baseline)
    deviation = jnp.max(distance / jnp.maximum(jnp.abs(baseline), scale))
    return jnp.isfinite(out).all(), sample, deviation


def _full_scales(
    problem: Problem, rows: jax.Array, cols: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns the scales of lhs [b, m, blocks of k] and of rhs [b, blocks of k, n]."""
  if problem.epilogue.scaling == "rows":
    return rows.reshape(-1, problem.m, 1), cols[:, None]
  rows = rows.reshape(-1, *rows.shape[-2:]).swapaxes(1, 2)
  return rows, expand(cols, (*cols.shape[:2], problem.n))


def _stratified(size: int, count: int, rng: np.random.Generator) -> np.ndarray:
  """Returns `count` indices below `size`, one from each of `count` equal strata."""
  if size <= count:
    return np.arange(size)
  edges = np.linspace(0, size, count + 1).astype(int)
  indices = rng.integers(edges[:-1], edges[1:])
  indices[0], indices[-1] = 0, size - 1
  return indices
