"""Derivatives: right to second order in both modes, and products like any other."""

from __future__ import annotations

import functools

import jax
from jax import lax
import jax.numpy as jnp
from jax.test_util import check_grads
import numpy as np
import pytest

import jaxgemm
from jaxgemm import reference
from jaxgemm.dims import Dims
from tests.product_cases import count_primitives, normal, products

# A CPU computes float32 products of any precision in float32.
check_second_order = functools.partial(
    check_grads, order=2, modes=("fwd", "rev"), atol=2e-2, rtol=2e-2
)
NUMBERS = {
    "NN": ((3, 4), (4, 2), (((1,), (0,)), ((), ()))),
    "NT": ((3, 4), (2, 4), (((1,), (1,)), ((), ()))),
    "TN": ((4, 3), (4, 2), (((0,), (0,)), ((), ()))),
    "TT": ((4, 3), (2, 4), (((0,), (1,)), ((), ()))),
    "two m": ((2, 3, 4), (4, 2), (((2,), (0,)), ((), ()))),
    "two k": ((3, 2, 4), (2, 4, 2), (((1, 2), (0, 1)), ((), ()))),
    "batch NN": ((2, 3, 4), (2, 4, 2), (((2,), (1,)), ((0,), (0,)))),
    "batch NT": ((2, 3, 4), (2, 2, 4), (((2,), (2,)), ((0,), (0,)))),
    "batch TN": ((2, 4, 3), (2, 4, 2), (((1,), (1,)), ((0,), (0,)))),
    "batch TT": ((2, 4, 3), (2, 2, 4), (((1,), (2,)), ((0,), (0,)))),
    "shared rhs, N": ((2, 4, 3), (4, 2), (((1,), (0,)), ((), ()))),
    "shared rhs, T": ((2, 4, 3), (2, 4), (((1,), (1,)), ((), ()))),
}


@pytest.mark.parametrize("precision", [None, "highest"])
@pytest.mark.parametrize("name", NUMBERS)
def test_dot_general(name, precision, rng):
  lhs_shape, rhs_shape, numbers = NUMBERS[name]
  f = lambda x, y: jnp.sin(jaxgemm.dot_general(x, y, numbers, precision))
  check_second_order(f, (normal(rng, *lhs_shape), normal(rng, *rhs_shape)))


@pytest.mark.parametrize(
    "shapes",
    [
        ((3, 4), (2, 4, 3)), ((4,), (4, 2)), ((3, 4), (4,)), ((4,), (4,)),
        ((2, 1, 3, 4), (3, 4, 2)), ((0, 4), (4, 2)), ((3, 0), (0, 2)),
    ],
    ids=str,
)
def test_matmul(shapes, rng):
  a, b = (normal(rng, *shape) for shape in shapes)
  check_second_order(lambda a, b: jnp.sin(jaxgemm.matmul(a, b)), (a, b))


@pytest.mark.parametrize("beta", [0.0, 1.0, -0.5])
def test_gemm(beta, rng):
  a, b, c = normal(rng, 3, 4), normal(rng, 4, 2), normal(rng, 3, 2)
  f = lambda a, b, c: jnp.sin(jaxgemm.gemm(a, b, c, alpha=2.0, beta=beta))
  check_second_order(f, (a, b, c))


def test_gemm_with_traced_factors(rng):
  operands = normal(rng, 3, 4), normal(rng, 4, 2), normal(rng, 3, 2)
  factors = normal(rng, 2)
  f = lambda a, b, c, x: jnp.sin(jaxgemm.gemm(a, b, c, alpha=x[0], beta=x[1]))
  check_second_order(f, (*operands, factors))


# -- The gradients' own products ---------------------------------------------------


def _gradient(f):
  """d sum(f) / d operands, from a cotangent that is no constant."""
  return jax.grad(lambda *x: jnp.sum(jnp.sin(f(*x).astype("float32"))), (0, 1))


@pytest.mark.parametrize("name", NUMBERS)
def test_gradients_are_products_in_place(name, rng):
  """Three products, of operands as they are stored, and no transposition."""
  lhs_shape, rhs_shape, numbers = NUMBERS[name]
  f = _gradient(lambda x, y: jaxgemm.dot_general(x, y, numbers))
  lhs, rhs = normal(rng, *lhs_shape), normal(rng, *rhs_shape)
  counts = count_primitives(f, lhs, rhs)
  assert counts["jaxgemm"] == 3 and counts["dot_general"] == 0
  assert counts["transpose"] == counts["copy"] == 0


@pytest.mark.parametrize(
    "name, lhs_gradient, rhs_gradient",
    [
        ("NN", Dims("bmk", "bnk"), Dims("bkm", "bkn")),
        ("NT", Dims("bmk", "bkn"), Dims("bkm", "bkn")),
        ("TN", Dims("bmk", "bnk"), Dims("bmk", "bkn")),
        ("TT", Dims("bkm", "bnk"), Dims("bkm", "bnk")),
        ("two m", Dims("bmk", "bnk", m=2), Dims("bkm", "bkn", k=2)),
        ("two k", Dims("bmk", "bnk", n=2), Dims("bkm", "bkn", m=2)),
        ("batch NN", Dims("bmk", "bnk", b=1), Dims("bkm", "bkn", b=1)),
        ("shared rhs, N", Dims("mk", "bnk", b=1), Dims("bmk", "bkn", b=1)),
    ],
)
def test_layouts_of_gradients(name, lhs_gradient, rhs_gradient, rng):
  lhs_shape, rhs_shape, numbers = NUMBERS[name]
  lhs, rhs = normal(rng, *lhs_shape), normal(rng, *rhs_shape)
  f = lambda x, y: jaxgemm.dot_general(x, y, numbers)
  for index, dims in enumerate((lhs_gradient, rhs_gradient)):
    _, pullback = jax.vjp(f, lhs, rhs)
    found = products(lambda ct, i=index: pullback(ct)[i], f(lhs, rhs))
    assert dims in [product.dims for product in found]


def test_the_weight_gradient_of_a_batch_is_one_product(rng):
  """x [batch, seq, width] @ w: d w sums over batch and seq at once."""
  x, w = normal(rng, 2, 3, 4), normal(rng, 4, 5)
  dw = jax.grad(lambda w: jaxgemm.matmul(x, w).sum())
  (forward, backward) = products(dw, w)
  assert backward.dims == Dims("bkm", "bkn", b=0, m=1, n=1, k=2)
  assert count_primitives(dw, w)["reduce_sum"] == 1  # The loss's own.


def test_a_shared_operand_sums_its_batch_in_float32(rng):
  x, w = normal(rng, 4, 3, dtype="bfloat16"), normal(rng, 64, 3, 5, dtype="bfloat16")
  ct = normal(rng, 64, 4, 5, dtype="bfloat16")
  _, pullback = jax.vjp(jaxgemm.matmul, x, w)
  batched = [p for p in products(pullback, ct) if p.out_dtype == "float32"]
  assert len(batched) == 1
  truth = reference.matmul(ct, np.swapaxes(w, 1, 2)).sum(0)
  dx, _ = pullback(ct)
  assert dx.dtype == x.dtype
  assert reference.relative_error(dx, truth) < 3e-3


def test_gradients_keep_implementation_target_and_precision(rng):
  a = normal(rng, 8, 8, dtype="bfloat16")
  f = _gradient(lambda a, b: jaxgemm.matmul(
      a, b, precision="high", implementation="blocked"))
  with jaxgemm.target("NVIDIA H200"):
    forward, *backward = products(f, a, a)
  assert forward.must_serve
  for product in backward:
    assert product.implementation == "blocked" and not product.must_serve
    assert product.target.device.kind == "NVIDIA H200"
    assert product.precision == (lax.Precision.HIGH,) * 2


def test_alpha_scales_gradients(rng):
  a, b = normal(rng, 3, 4), normal(rng, 4, 2)
  ours = _gradient(lambda a, b: jaxgemm.gemm(a, b, alpha=3.0))(a, b)
  theirs = _gradient(lambda a, b: 3.0 * (a @ b))(a, b)
  for x, y in zip(ours, theirs, strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


# -- dtypes ------------------------------------------------------------------------


@pytest.mark.parametrize("precision", [None, "highest", "BF16_BF16_F32"])
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32", "float16"])
def test_gradients_have_their_operands_dtypes(out_dtype, precision, rng):
  """And are as accurate as XLA's, also where the cotangent has another dtype."""
  a, b = normal(rng, 32, 64, dtype="bfloat16"), normal(rng, 64, 16, dtype="bfloat16")
  ct = normal(rng, 32, 16, dtype=out_dtype)
  options = dict(precision=precision, preferred_element_type=out_dtype)
  ours = jax.vjp(lambda a, b: jaxgemm.matmul(a, b, **options), a, b)[1](ct)
  theirs = jax.vjp(lambda a, b: jnp.matmul(a, b, **options), a, b)[1](ct)
  truths = (
      reference.matmul(ct, np.asarray(b).T), reference.matmul(np.asarray(a).T, ct)
  )
  for x, y, truth in zip(ours, theirs, truths, strict=True):
    assert x.dtype == y.dtype == jnp.bfloat16
    xla_error = reference.relative_error(y, truth)
    # A CPU computes BF16_BF16_F32 of a float32 cotangent in float32, a GPU rounds it.
    slack = 2.0 if precision == "BF16_BF16_F32" else 1.1
    assert reference.relative_error(x, truth) <= slack * xla_error


@pytest.mark.parametrize(
    "dtype, out_dtype, precision, algorithms",
    [
        ("bfloat16", "bfloat16", None, ["bf16_f32", "bf16_f32"]),
        ("bfloat16", "bfloat16", "highest", ["bf16_f32", "bf16_f32"]),
        ("bfloat16", "float32", None, ["tf32_f32", "tf32_f32"]),
        ("bfloat16", "float32", "BF16_BF16_F32", ["bf16_f32", "bf16_f32"]),
        ("bfloat16", "float32", "highest", ["bf16_x6", "bf16_x6"]),
        ("float32", "float32", "high", ["bf16_x3", "bf16_x3"]),
        ("float16", "bfloat16", None, ["tf32_f32", "tf32_f32"]),
        ("float32", "bfloat16", None, ["tf32_f32", "tf32_f32"]),
    ],
    ids=str,
)
def test_algorithms_of_gradients(dtype, out_dtype, precision, algorithms, rng):
  """A float32 cotangent of 16-bit operands is not rounded to 16 bits."""
  a = normal(rng, 8, 8, dtype=dtype)
  f = lambda a, b: jaxgemm.matmul(
      a, b, precision=precision, preferred_element_type=out_dtype)
  _, *gradients = products(_gradient(f), a, a)
  assert [product.algorithm for product in gradients] == algorithms


# -- Other transformations ---------------------------------------------------------


def test_jacobians_and_hessians(rng):
  a, b = normal(rng, 3, 4), normal(rng, 4, 2)
  for jacobian in (jax.jacfwd, jax.jacrev, jax.hessian):
    ours = jacobian(lambda a: jnp.sin(jaxgemm.matmul(a, b)))(a)
    theirs = jacobian(lambda a: jnp.sin(a @ b))(a)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_linear_transpose(rng):
  a, b, c = normal(rng, 3, 4), normal(rng, 4, 2), normal(rng, 3, 2)
  (at,) = jax.linear_transpose(lambda a: jaxgemm.matmul(a, b), a)(c)
  np.testing.assert_allclose(at, c @ b.T, rtol=1e-5, atol=1e-5)
  at, ct = jax.linear_transpose(
      lambda a, c: jaxgemm.gemm(a, b, c, alpha=2.0, beta=0.5), a, c
  )(c)
  np.testing.assert_allclose(at, 2 * c @ b.T, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(ct, 0.5 * c, rtol=1e-5, atol=1e-5)


def test_linearize_and_hvp(rng):
  a, b, t = normal(rng, 3, 4), normal(rng, 4, 2), normal(rng, 3, 4)
  out, linear = jax.linearize(lambda a: jaxgemm.matmul(a, b), a)
  np.testing.assert_allclose(out, a @ b, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(linear(t), t @ b, rtol=1e-5, atol=1e-5)
  loss = lambda mm: lambda a: jnp.sum(jnp.sin(mm(a, b)))
  hvp = lambda f: jax.jvp(jax.grad(f), (a,), (t,))[1]
  np.testing.assert_allclose(
      hvp(loss(jaxgemm.matmul)), hvp(loss(jnp.matmul)), rtol=1e-4, atol=1e-4
  )
