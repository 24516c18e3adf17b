"""Products that share an operand: one product of all, where that is faster."""

from __future__ import annotations

import contextlib
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxgemm
from jaxgemm import (
  contraction,
  forms,
  heuristics,
  lowering,
  precision,
  primitive,
  reference,
)
from jaxgemm.device import known_device
from jaxgemm.dims import Dims
from jaxgemm.recording import recording
from pallas_kernels.problem import Epilogue
from tests.kernel_cases import LAYOUTS, make_problem
from tests.product_cases import equations, normal, products

H200 = known_device("NVIDIA H200")
SHARED = {
    # What is written, and the shapes of a shared operand and of one that is not.
    "vmap of matrix @ vector": (
        jax.vmap(jaxgemm.matmul, (None, 0)), (72, 48), (5, 48)),
    "vmap of matrix @ column": (
        jax.vmap(jaxgemm.matmul, (None, 0)), (72, 48), (5, 48, 1)),
    "vmap of matrix @ vector, last": (
        jax.vmap(jaxgemm.matmul, (None, 1), 1), (72, 48), (48, 5)),
    "vmap of vector @ matrix": (
        lambda a, v: jax.vmap(lambda x: jaxgemm.matmul(x, a))(v), (48, 72), (5, 48)),
    "einsum oi,bi->bo": (
        functools.partial(jaxgemm.einsum, "oi,bi->bo"), (72, 48), (5, 48)),
    "einsum io,bi->ob": (
        functools.partial(jaxgemm.einsum, "io,bi->ob"), (48, 72), (5, 48)),
    "matrix @ matrices": (jaxgemm.matmul, (72, 48), (5, 48, 8)),
    "matrix @ transposed": (
        lambda a, w: jaxgemm.matmul(a, w.swapaxes(-1, -2)), (72, 48), (5, 8, 48)),
    "transposed @ matrices": (
        lambda a, w: jaxgemm.matmul(a.T, w), (48, 72), (5, 48, 8)),
    "einsum bkm,kn->bmn": (
        lambda a, x: jaxgemm.einsum("bkm,kn->bmn", x, a), (48, 72), (5, 48, 8)),
}


def theirs(name: str, shared, other):
  """The same without us."""
  if name.startswith("einsum"):
    operands = (other, shared) if "bkm" in name else (shared, other)
    return jnp.einsum(name.removeprefix("einsum "), *operands)
  if "vector @ matrix" in name:
    return other @ shared
  if "last" in name:
    return shared @ other
  if "vector" in name:
    return other @ shared.T
  shared = shared.T if name.startswith("transposed") else shared
  return shared @ (other.swapaxes(-1, -2) if name == "matrix @ transposed" else other)


def exact(name: str, shared, other) -> np.ndarray:
  """The result to float32, whatever the operands' dtype."""
  with jax.default_matmul_precision("highest"):
    return np.asarray(theirs(name, *(x.astype(jnp.float32) for x in (shared, other))))


@pytest.mark.parametrize(
    ("emulated", "dtype", "bound"),
    [(False, "float32", 1e-6),
     pytest.param(True, "bfloat16", 3.4e-3, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("name", SHARED)
def test_products_and_gradients(name, emulated, dtype, bound, rng):
  multiply, *shapes = SHARED[name]
  operands = [normal(rng, *shape, dtype=dtype) for shape in shapes]
  wanted = exact(name, *operands)
  ct = normal(rng, *wanted.shape, dtype=dtype)
  total = lambda *x: jnp.sum((multiply(*x) * ct).astype(jnp.float32))
  with jaxgemm.emulate() if emulated else contextlib.nullcontext():
    found, grads = multiply(*operands), jax.grad(total, (0, 1))(*operands)
  assert found.shape == wanted.shape
  assert reference.relative_error(found, wanted) < bound
  weighted = lambda *x: jnp.sum(theirs(name, *x) * ct.astype(jnp.float32))
  with jax.default_matmul_precision("highest"):
    wanted = jax.grad(weighted, (0, 1))(*(x.astype(jnp.float32) for x in operands))
  for grad, one, operand in zip(grads, wanted, operands, strict=True):
    assert grad.shape == operand.shape and grad.dtype == operand.dtype
    assert reference.relative_error(grad, np.asarray(one)) < bound


@pytest.mark.slow
@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize("shared", ["lhs", "rhs"])
def test_merged(shared, layouts, monkeypatch, rng):
  """By kernels whose problem is of all products, with XLA's transpositions around it."""
  plans, problem = [], make_problem(40, 24, 72, layouts, batch=3)
  monkeypatch.setattr(forms, "form", lambda problem, _: problem.merged or problem)
  monkeypatch.setattr(lowering, "record_plan", plans.append)
  lhs, rhs = (
      normal(rng, *shape[name == shared :], dtype="bfloat16")
      for name, shape in (("lhs", problem.lhs_shape), ("rhs", problem.rhs_shape))
  )
  # Not by fold's choice: as bound, the batch is one of its own.
  groups = "bkm" if layouts[0] == "T" else "bmk", "bnk" if layouts[1] == "T" else "bkn"
  groups = (
      each[name == shared :] for name, each in zip(("lhs", "rhs"), groups, strict=True)
  )
  dims = Dims(*groups, b=1)
  with jaxgemm.emulate():
    product, _ = contraction.product_of(lhs.dtype, rhs.dtype, None, None, None, None)
    found = primitive.bind(lhs, rhs, product=product.replace(dims=dims))
  jax.clear_caches()  # Of what was planned so.
  assert [plan.problem.batch for plan in plans] == [1] and plans[0].kernel != "xla"
  truth = np.einsum(
      f"{dims.lhs},{dims.rhs}->bmn", *(np.asarray(x, np.float64) for x in (lhs, rhs))
  )
  assert reference.relative_error(found, truth) < 3.4e-3


def test_precisions_change_places_with_the_operands():
  a, x = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((72, 48), (5, 48)))
  one, other = jax.lax.Precision.HIGH, jax.lax.Precision.HIGHEST
  multiply = functools.partial(jaxgemm.matmul, precision=(one, other))
  (product,) = products(jax.vmap(multiply, (None, 0)), a, x)
  assert product.precision == (other, one)
  algorithm = jax.lax.DotAlgorithm("float16", "bfloat16", "float32", 1, 2)
  wanted = jax.lax.DotAlgorithm("bfloat16", "float16", "float32", 2, 1)
  assert precision.exchanged(algorithm) == wanted
  assert precision.exchanged("highest") == "highest" and precision.exchanged(None) is None


@pytest.mark.parametrize("name", SHARED)
def test_gradients_need_no_more_memory_than_their_arrays(name):
  """No array has a gradient of the shared operand for each product."""
  multiply, *shapes = SHARED[name]
  operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
  total = lambda *x: jnp.sum(multiply(*x).astype(jnp.float32))
  jaxpr = jax.make_jaxpr(jax.grad(total, (0, 1)))(*operands).jaxpr
  most = max(map(math.prod, (*shapes, jax.eval_shape(multiply, *operands).shape)))
  sizes = [math.prod(x.aval.shape) for eqn in equations(jaxpr) for x in eqn.outvars]
  assert max(sizes) <= most


@pytest.mark.parametrize(
    "name", [name for name in SHARED if "vector" in name or "column" in name]
    + ["einsum oi,bi->bo", "einsum io,bi->ob"],
)
def test_a_batch_of_vectors_is_one_product(name):
  multiply, *shapes = SHARED[name]
  operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
  (product,) = products(multiply, *operands)
  assert product.dims.b == 0


def test_few_gradients_of_many_columns_are_summed_up():
  """Where transposing the operands would move more."""
  a, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((64, 64), (2, 64, 4096)))
  total = lambda *x: jnp.sum(jaxgemm.matmul(*x).astype(jnp.float32))
  product = products(jax.grad(total), a, w)[-1]
  assert product.dims.b == 1 and product.out_dtype == "float32"


@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize("shared", ["lhs", "rhs"])
@pytest.mark.parametrize(("size", "merged"), [(8, True), (256, False)])
def test_narrow_products_are_one(size, merged, shared, layouts):
  """Each tile of theirs would be filled by few columns, or rows, of one product."""
  m, n = (4096, size) if shared == "lhs" else (size, 4096)
  problem = make_problem(m, n, 2048, layouts, batch=64, **{f"{shared}_batched": False})
  form = forms.form(problem, H200)
  rows_lie_together = shared == "rhs" and layouts[0] == "N"
  if not rows_lie_together:  # Which costs nothing, and may gain in either case.
    assert (form.batch == 1) == merged
  if form.batch == 1:
    assert form.m * form.n == 64 * m * n and form.k == problem.k


def test_what_merging_costs():
  """The chosen form is the faster one, with its passes."""
  for size in (2, 8, 24, 48, 64, 96, 512):
    for k in (16, 64, 1024):
      problem = make_problem(1024, size, k, batch=32, lhs_batched=False)
      form = forms.form(problem, H200)
      moved = sum(forms.transposed_bytes(problem).values())
      assert moved == 2 * 2 * 32 * (k * size + 1024 * size)
      both = problem, problem.merged
      alone, together = (heuristics.candidates(x, H200)[0].time_us for x in both)
      floor = moved / (H200.bandwidth_tbps * 1e6)
      if form.batch == 1:
        assert together + floor < alone
      elif together + floor < alone:  # Passes are slower than the memory, by little.
        assert together + 2 * floor + 3.0 > alone


@pytest.mark.parametrize(
    "epilogue",
    [
        Epilogue(has_bias=True), Epilogue(beta=1.0, c_dtype="bfloat16"),
        Epilogue(activation="silu", gated=True), Epilogue(scaling="rows"),
    ],
    ids=str,
)
def test_what_lies_along_columns_is_not_merged(epilogue):
  problem = make_problem(
      4096, 8, 2048, "NT", batch=64, lhs_batched=False, epilogue=epilogue
  )
  assert problem.merged is None and forms.form(problem, H200) == problem


def test_explain_says_so(capsys):
  a, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((4096, 2048), (64, 2048, 8)))
  with jaxgemm.target("NVIDIA H200"):
    plan = jaxgemm.explain(a, w)
  assert (plan.problem.m, plan.problem.n, plan.problem.batch) == (4096, 512, 1)
  assert "one product of all 64, for which XLA transposes rhs, the result" in plan.reason
  with jaxgemm.target("NVIDIA H200"), jaxgemm.batch_invariant():
    assert jaxgemm.explain(a, w).problem.batch == 64
  capsys.readouterr()


def test_rows_of_a_batch_invariant_gradient_stay_rows():
  """Those of a, which lie along its columns: the operands do not change places."""
  a, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((48, 40), (3, 48, 8)))
  multiply = functools.partial(jaxgemm.einsum, "km,bkn->bmn")
  total = lambda a, w: jnp.sum(multiply(a, w).astype(jnp.float32))
  for invariant, rows in ((True, 40), (False, 48)):
    with jaxgemm.target("NVIDIA H200"), recording() as record:
      with jaxgemm.batch_invariant(invariant):
        jax.jit(jax.grad(total)).trace(a, w).lower(lowering_platforms=("cuda",))
    (problem,) = (plan.problem for plan in record.plans if plan.problem.k == 24)
    assert problem.m == rows


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHARED)
def test_on_the_chip(name, rng):
  multiply, *shapes = SHARED[name]
  shapes = [tuple(16 * size if size > 8 else size for size in shape) for shape in shapes]
  shared, other = (normal(rng, *shape, dtype="bfloat16") for shape in shapes)
  found = jax.jit(multiply)(shared, other)
  assert reference.relative_error(found, exact(name, shared, other)) < 3.4e-3
