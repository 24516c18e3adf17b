"""Random calls of the library against float64, and random kernels in emulation.

The examples are the same on every run; Hypothesis shrinks those that fail. Products of a
few numbers are held to what rounding can do to each element, kernels to the gate.
"""

from __future__ import annotations

import contextlib
import random

from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import fuzz_draws, fuzz_guards, fuzz_judge
import jaxgemm
from jaxgemm import reference
from jaxgemm.device import known_device
from jaxgemm.plan import Plan
from pallas_kernels import KERNELS, TILE_KERNELS, activations, triton
from tests import kernel_cases

pytestmark = pytest.mark.slow  # The other JAX version need not run them too.

H200 = known_device("NVIDIA H200")
SIZES = (0, 1, 2, 3, 5, 8)
FLOATS = ("bfloat16", "float16", "float32")
EIGHT_BITS = ("float8_e4m3fn", "float8_e5m2")
SEEDS = st.integers(0, 2**32 - 1)
EMULATED = fuzz_draws.Bounds(size=400, elements=1 << 12, products=1 << 19, calls=1)


def examples(count: int) -> settings:
  return settings(
      max_examples=count, derandomize=True, deadline=None, database=None
  )


def drawn(seed: int, shape, dtype) -> jax.Array:
  rng = np.random.default_rng([seed, *shape])
  if jnp.issubdtype(dtype, jnp.integer):
    return jnp.asarray(rng.integers(-100, 100, shape), dtype)
  return jnp.asarray(rng.standard_normal(shape, np.float32), dtype)


def wide(x) -> np.ndarray:
  return np.asarray(x).astype(np.float64)


def rounding(values, dtype) -> np.ndarray:
  """What rounding to a dtype can do to each of the values, twice."""
  facts = jnp.finfo(dtype)
  return float(facts.eps) * np.abs(values) + float(facts.smallest_subnormal)


def of_sums(terms, count: int) -> np.ndarray:
  """What float32 can do to sums of `count` terms, `terms` of which is that of absolutes.
  """
  return (count + 4) * 2.0**-23 * terms


def assert_within(result, truth, bound) -> None:
  assert np.asarray(result).shape == truth.shape
  off = ~(np.abs(wide(result) - truth) <= bound)
  assert not off.any(), (wide(result)[off], truth[off])


# -- dot_general -------------------------------------------------------------------


@st.composite
def contractions(draw, sizes=SIZES, most=4):
  """Shapes of lhs and rhs and dimension numbers: any dimension may be any."""
  lhs_rank, rhs_rank = draw(st.integers(1, most)), draw(st.integers(1, most))
  paired = draw(st.integers(0, min(lhs_rank, rhs_rank)))
  num_batch = draw(st.integers(0, paired))
  lhs_dims = draw(st.permutations(range(lhs_rank)))[:paired]
  rhs_dims = draw(st.permutations(range(rhs_rank)))[:paired]
  size = st.sampled_from(sizes)
  lhs_shape = [draw(size) for _ in range(lhs_rank)]
  rhs_shape = [draw(size) for _ in range(rhs_rank)]
  for i, j in zip(lhs_dims, rhs_dims, strict=True):
    rhs_shape[j] = lhs_shape[i]
  numbers = (
      (tuple(lhs_dims[num_batch:]), tuple(rhs_dims[num_batch:])),
      (tuple(lhs_dims[:num_batch]), tuple(rhs_dims[:num_batch])),
  )
  return tuple(lhs_shape), tuple(rhs_shape), numbers


@st.composite
def dtypes_of_products(draw):
  """Dtypes of lhs and rhs, and a preferred one of the result."""
  kind = draw(st.sampled_from(("alike", "mixed", "eight", "integers")))
  if kind == "integers":
    return "int8", "int8", draw(st.sampled_from((None, "int32")))
  lhs = draw(st.sampled_from(EIGHT_BITS if kind == "eight" else FLOATS))
  rhs = lhs
  if kind != "alike":
    rhs = draw(st.sampled_from(EIGHT_BITS if kind == "eight" else FLOATS))
  # lax has no common dtype of two 8-bit ones.
  preferred = st.sampled_from(FLOATS if kind == "eight" else (None, *FLOATS))
  return lhs, rhs, draw(preferred)


def terms_of(lhs, rhs, numbers) -> tuple[np.ndarray, int]:
  """The sums of absolute terms of a contraction, and how many terms each has."""
  count = 1
  for dim in numbers[0][0]:
    count *= lhs.shape[dim]
  return reference.dot_general(np.abs(wide(lhs)), np.abs(wide(rhs)), numbers), count


@examples(20)
@given(
    contractions(), dtypes_of_products(),
    st.sampled_from((None, "default", "high", "highest")), SEEDS,
)
def test_dot_general(contraction, dtypes, precision, seed):
  lhs_shape, rhs_shape, numbers = contraction
  lhs_dtype, rhs_dtype, preferred = dtypes
  lhs, rhs = drawn(seed, lhs_shape, lhs_dtype), drawn(seed + 1, rhs_shape, rhs_dtype)
  options = dict(precision=precision, preferred_element_type=preferred)
  ours = jaxgemm.dot_general(lhs, rhs, numbers, **options)
  theirs = lax.dot_general(lhs, rhs, numbers, **options)
  assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
  if lhs_dtype == "int8":
    np.testing.assert_array_equal(ours, theirs)
    return
  truth = reference.dot_general(lhs, rhs, numbers)
  terms, count = terms_of(lhs, rhs, numbers)
  bound = rounding(truth, ours.dtype) + of_sums(terms, count)
  assert_within(ours, truth, np.maximum(bound, 2 * np.abs(wide(theirs) - truth)))


@examples(12)
@given(contractions(), SEEDS)
def test_gradients_of_dot_general(contraction, seed):
  lhs_shape, rhs_shape, numbers = contraction
  lhs, rhs = drawn(seed, lhs_shape, "float32"), drawn(seed + 1, rhs_shape, "float32")
  ct = drawn(seed + 2, jax.eval_shape(
      lambda x, y: lax.dot_general(x, y, numbers), lhs, rhs
  ).shape, "float32")

  def gradients(dot_general, *operands):
    return jax.vjp(lambda x, y: dot_general(x, y, numbers), *operands[:2])[1](operands[2])

  ours = gradients(jaxgemm.dot_general, lhs, rhs, ct)
  with jax.enable_x64(True):
    exact = [jnp.asarray(wide(x)) for x in (lhs, rhs, ct)]
    truths = [wide(x) for x in gradients(lax.dot_general, *exact)]
    terms = [wide(x) for x in gradients(lax.dot_general, *map(jnp.abs, exact))]
  for x, found, truth, absolute in zip((lhs, rhs), ours, truths, terms, strict=True):
    assert (found.shape, found.dtype) == (x.shape, x.dtype)
    count = max(1, ct.size)
    assert_within(found, truth, rounding(truth, "float32") + of_sums(absolute, count))


# -- matmul, gemm, einsum ----------------------------------------------------------


@examples(30)
@given(
    arrays.mutually_broadcastable_shapes(
        signature=np.matmul.signature, max_dims=2, min_side=0, max_side=5
    ),
    st.sampled_from(FLOATS), st.sampled_from(FLOATS), SEEDS,
)
def test_matmul(shapes, a_dtype, b_dtype, seed):
  a_shape, b_shape = shapes.input_shapes
  a, b = drawn(seed, a_shape, a_dtype), drawn(seed + 1, b_shape, b_dtype)
  result = jaxgemm.matmul(a, b)
  assert result.shape == shapes.result_shape
  assert result.dtype == jnp.matmul(a, b).dtype
  # What is promoted is rounded first.
  a, b = a.astype(result.dtype), b.astype(result.dtype)
  truth = reference.matmul(a, b)
  terms = reference.matmul(np.abs(wide(a)), np.abs(wide(b)))
  bound = rounding(truth, result.dtype) + of_sums(terms, a_shape[-1])
  assert_within(result, truth, bound)


@examples(20)
@given(
    arrays.mutually_broadcastable_shapes(
        signature="(m,k),(k,n),(m,n)->(m,n)", max_dims=2, min_side=0, max_side=5
    ),
    st.data(), SEEDS,
)
def test_gemm(shapes, data, seed):
  """c broadcasts to the product, but not the product to c."""
  a_shape, b_shape, c_shape = shapes.input_shapes
  out_shape = np.broadcast_shapes(a_shape[:-2], b_shape[:-2]) + c_shape[-2:]
  c_shape = out_shape[data.draw(st.integers(0, len(out_shape))) :]
  dtype, c_dtype, preferred = (
      data.draw(st.sampled_from(choices)) for choices in (FLOATS, FLOATS, (None, *FLOATS))
  )
  alpha, beta = (data.draw(st.sampled_from((0, 1, -0.5, 3))) for _ in range(2))
  traced = data.draw(st.booleans())
  a, b = drawn(seed, a_shape, dtype), drawn(seed + 1, b_shape, dtype)
  c = drawn(seed + 2, c_shape, c_dtype)
  factors = (jnp.float32(x) if traced else x for x in (alpha, beta))
  result = jaxgemm.gemm(
      a, b, c, **dict(zip(("alpha", "beta"), factors, strict=True)),
      preferred_element_type=preferred,
  )
  assert result.dtype == (preferred or dtype)
  truth = reference.matmul(a, b, c, alpha=alpha, beta=beta)
  terms = reference.matmul(
      *(np.abs(wide(x)) for x in (a, b, c)), alpha=abs(alpha), beta=abs(beta)
  )
  bound = rounding(truth, result.dtype) + of_sums(terms, a_shape[-1])
  assert_within(result, truth, bound)


@st.composite
def subscripts(draw):
  """Two or three operands, each of some letters, and a result of some of theirs."""
  letters = st.permutations("abcde")
  operands = [
      draw(letters)[: draw(st.integers(1, 3))] for _ in range(draw(st.integers(2, 3)))
  ]
  known = sorted({letter for operand in operands for letter in operand})
  out = draw(st.permutations(known))[: draw(st.integers(0, len(known)))]
  sizes = {letter: draw(st.sampled_from((1, 2, 3, 5))) for letter in known}
  return [[*map("".join, operands), "".join(out)], sizes]


@examples(20)
@given(subscripts(), SEEDS)
def test_einsum(spec, seed):
  (*terms, out), sizes = spec
  operands = [
      drawn(seed + i, [sizes[letter] for letter in letters], "float32")
      for i, letters in enumerate(terms)
  ]
  text = f"{','.join(terms)}->{out}"
  result = jaxgemm.einsum(text, *operands)
  assert result.dtype == jnp.float32
  truth = np.einsum(text, *map(wide, operands))
  absolutes = np.einsum(text, *(np.abs(wide(x)) for x in operands))
  assert_within(result, truth, of_sums(absolutes, np.prod([*sizes.values()])))


# -- Layers ------------------------------------------------------------------------


LAYER_SHAPES = st.tuples(
    st.lists(st.sampled_from((0, 1, 3)), max_size=2), st.sampled_from((1, 2, 5, 16)),
    st.sampled_from((1, 3, 8)),
)
ACTIVATIONS = st.sampled_from((None, *activations.NAMES))


def entering(x, w, bias, scale, dtype) -> tuple[np.ndarray, np.ndarray]:
  """What enters the activation, and how far from it that may be.

  Elsewhere than in a kernel the product is rounded before what follows.
  """
  x, w, scale = wide(x), wide(w), float(scale)
  added = 0.0 if bias is None else wide(bias)
  truth = scale * (x @ w) + added
  terms = np.abs(scale) * (np.abs(x) @ np.abs(w)) + np.abs(added)
  rounded = rounding(truth, dtype) + rounding(truth - added, dtype)
  return truth, rounded + abs(scale) * rounding(x @ w, dtype) + of_sums(terms, len(w))


def activated(activation, z, off) -> tuple[np.ndarray, np.ndarray]:
  """The activation of z, and how far from it that of what is `off` from z may be."""
  steepest = 1.2 if activation != "squared_relu" else 2 * (np.abs(z) + off)
  with jax.enable_x64(True):
    out = wide(activations.apply(activation or "none", jnp.asarray(z)))
  return out, steepest * off + 2.0**-20 * np.abs(z)


def layer_operands(data, seed, shapes, num_weights):
  batch, k, n = shapes
  dtype = data.draw(st.sampled_from(FLOATS))
  has_bias, has_residual, transposed = (data.draw(st.booleans()) for _ in range(3))
  x = drawn(seed, (*batch, k), dtype)
  weights = [drawn(seed + 1 + i, (k, n), dtype) for i in range(num_weights)]
  biases = [
      drawn(seed + 4 + i, (n,), dtype) if has_bias else None for i in range(num_weights)
  ]
  residual = drawn(seed + 7, (*batch, n), dtype) if has_residual else None
  given = [w.T if transposed else w for w in weights]
  return dtype, x, weights, given, biases, residual, transposed


def assert_layer(result, dtype, truth, bound, residual) -> None:
  assert result.dtype == dtype
  if residual is not None:
    truth = truth + wide(residual)
  assert_within(result, truth, bound + rounding(truth, dtype))


@examples(20)
@given(LAYER_SHAPES, ACTIVATIONS, st.sampled_from((1, -0.5)), st.data(), SEEDS)
def test_linear(shapes, activation, scale, data, seed):
  dtype, x, (w,), (stored,), (bias,), residual, transposed = layer_operands(
      data, seed, shapes, 1
  )
  result = jaxgemm.linear(
      x, stored, bias, activation=activation, residual=residual, scale=scale,
      transposed=transposed,
  )
  z, off = entering(x, w, bias, scale, dtype)
  truth, bound = activated(activation, z, off)
  assert_layer(result, dtype, truth, bound, residual)


@examples(20)
@given(LAYER_SHAPES, ACTIVATIONS, st.booleans(), st.data(), SEEDS)
def test_gated_linear(shapes, activation, packed, data, seed):
  dtype, x, weights, stored, biases, residual, transposed = layer_operands(
      data, seed, shapes, 2
  )
  if packed:
    stored = [jnp.concatenate(stored, 0 if transposed else 1)]
  result = jaxgemm.gated_linear(
      x, *stored, bias_gate=biases[0], bias_up=biases[1], activation=activation,
      residual=residual, transposed=transposed,
  )
  (z, off), (up, up_off) = (
      entering(x, w, bias, 1, dtype) for w, bias in zip(weights, biases, strict=True)
  )
  gate, gate_off = activated(activation, z, off)
  bound = gate_off * np.abs(up) + np.abs(gate) * up_off + gate_off * up_off
  assert_layer(result, dtype, gate * up, bound, residual)


@examples(20)
@given(
    st.lists(st.sampled_from((0, 1, 3)), max_size=2), st.sampled_from((1, 5, 16)),
    st.sampled_from((1, 2, 63, 64, 70)), st.sampled_from(FLOATS), st.booleans(),
    st.booleans(), SEEDS,
)
def test_linear_cross_entropy(batch, k, n, dtype, has_bias, transposed, seed):
  x, w = drawn(seed, (*batch, k), dtype), drawn(seed + 1, (k, n), dtype)
  bias = drawn(seed + 2, (n,), dtype) if has_bias else None
  labels = np.random.default_rng(seed).integers(-1, n + 1, batch)
  result = jaxgemm.linear_cross_entropy(
      x, w.T if transposed else w, jnp.asarray(labels), bias, transposed=transposed
  )
  assert result.dtype == jnp.float32
  logits, off = entering(x, w, bias, 1, dtype)
  counts = (labels >= 0) & (labels < n)
  at = np.clip(labels, 0, n - 1)[..., None]
  log_sums = np.log(np.sum(np.exp(logits), -1))
  truth = np.where(counts, log_sums - np.take_along_axis(logits, at, -1)[..., 0], 0.0)
  largest = np.abs(logits).max(-1) + np.log(n) + 1
  bound = np.where(counts, 2 * off.max(-1) + 2.0**-20 * largest, 0.0)
  assert_within(result, truth, bound)


# -- Kernels -----------------------------------------------------------------------


def plan_of(kernel: str, seed: int, bounds: fuzz_draws.Bounds) -> Plan:
  """A problem that a kernel serves, and a config that it may have."""
  rng = random.Random(seed)
  while True:
    problem = fuzz_draws.draw_problem(rng, bounds, empty=False)
    config = fuzz_draws.draw_config(rng, problem, kernel, H200)
    if config is not None:
      return Plan(kernel, config, "drawn", "drawn", problem)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kernel",
    [x if x in ("persistent", "split_k") else kernel_cases.more(x) for x in KERNELS],
)
def test_kernels(kernel):
  """Poisoned, guarded, and by the gate: no race, no element unwritten, none beyond."""
  if kernel == triton.NAME and triton.missing_package() is not None:
    pytest.skip("needs triton, and jax-triton")

  @examples(3 if kernel == "split_k" else 4)
  @given(SEEDS)
  def run(seed):
    plan = plan_of(kernel, seed, EMULATED)
    truth = fuzz_judge.draw_truth(plan.problem, [seed])
    with fuzz_guards.guarded():
      verdict = fuzz_judge.check(plan, H200, [truth], emulated=True)
    assert verdict.reason is None, (plan, verdict)

  run()


@pytest.mark.slow
@pytest.mark.parametrize("kernel", TILE_KERNELS)
def test_kernels_lower(kernel):
  """Whatever `supports` lets through is legal to Mosaic, guarded or not."""

  @examples(4)
  @given(SEEDS, st.booleans())
  def run(seed, guarded):
    plan = plan_of(kernel, seed, fuzz_draws.ON_GPU)
    with fuzz_guards.guarded() if guarded else contextlib.nullcontext():
      text = kernel_cases.lowered(kernel, plan.problem, plan.config)
    assert ("output_operand_alias" in text) == guarded

  run()


@pytest.mark.slow
@examples(10)
@given(
    contractions(sizes=(1, 3, 8, 17), most=3), st.sampled_from((None, *KERNELS)), SEEDS
)
@example(((40, 72), (72, 24), (((1,), (0,)), ((), ()))), "persistent", 0)
def test_dot_general_in_emulation(contraction, implementation, seed):
  lhs_shape, rhs_shape, numbers = contraction
  lhs, rhs = drawn(seed, lhs_shape, "bfloat16"), drawn(seed + 1, rhs_shape, "bfloat16")
  with jaxgemm.emulate():
    try:
      result = jaxgemm.dot_general(lhs, rhs, numbers, implementation=implementation)
    except ValueError as error:
      assert "cannot serve" in str(error) or "needs the package" in str(error)
      return
  truth = reference.dot_general(lhs, rhs, numbers)
  terms, count = terms_of(lhs, rhs, numbers)
  assert_within(result, truth, rounding(truth, "bfloat16") + of_sums(terms, count))
