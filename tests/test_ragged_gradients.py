"""jaxgemm.ragged_dot: derivatives."""

from __future__ import annotations

from collections import Counter
import functools

import jax
from jax import lax
import jax.numpy as jnp
from jax.test_util import check_grads
import numpy as np
import pytest

import jaxgemm
from jaxgemm import reference
from tests.kernel_cases import more
from tests.product_cases import count_primitives, cuda_kernels, normal
from tests.ragged_cases import (
  PRIMITIVE,
  SIZES,
  M,
  N,
  check_as_exact,
  check_close,
  exact_gradients,
  float64,
  operands_of,
  plain,
  ragged,
)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_gradients(dtype, transposed, rng):
  *operands, sizes = operands_of(rng, dtype, transposed=transposed)
  ct = normal(rng, M, N, dtype=dtype)
  ours = lambda *x: jaxgemm.ragged_dot(*x, sizes, transposed=transposed)

  def xla(lhs, rhs):
    return lax.ragged_dot(lhs, rhs.swapaxes(1, 2) if transposed else rhs, sizes)

  found, theirs = (jax.vjp(f, *operands)[1](ct) for f in (ours, xla))
  wanted = exact_gradients(*operands, sizes, ct, transposed=transposed)
  check_as_exact(found, theirs, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("transposed", [False, more(True)])
def test_emulated_gradients(transposed, rng):
  *operands, sizes = operands_of(rng, "bfloat16", transposed=transposed)
  ct = normal(rng, M, N, dtype="bfloat16")
  ours = lambda *x: jaxgemm.ragged_dot(*x, sizes, transposed=transposed)
  theirs = jax.vjp(ours, *operands)[1](ct)
  with jaxgemm.emulate():
    found = jax.vjp(ours, *operands)[1](ct)
  wanted = exact_gradients(*operands, sizes, ct, transposed=transposed)
  check_as_exact(found, theirs, wanted)
  assert np.isfinite(float64(found[1])).all()
  np.testing.assert_array_equal(found[1][1], 0.0)  # Of the group without rows.
  np.testing.assert_array_equal(found[0][sum(SIZES):], 0.0)


@pytest.mark.parametrize("transposed", [False, True])
def test_numerical_gradients(transposed, rng):
  """Of both modes, and of second order."""
  lhs, rhs, sizes = operands_of(rng, transposed=transposed)
  run = lambda lhs, rhs: ragged(transposed=transposed)(lhs, rhs, sizes)
  check_grads(run, (lhs / 8, rhs), order=2, atol=2e-2, rtol=2e-2)


def hvp(f):
  """Of the square's sum, along the operands themselves."""
  loss = lambda *x: jnp.sum(jnp.sin(f(*x)) ** 2)
  return lambda *x: jax.jvp(jax.grad(loss, (0, 1)), x, x)[1]


SECOND = {
    "forward over reverse": hvp,
    "reverse over reverse": lambda f: jax.grad(
        lambda *x: sum(
            jnp.sum(jnp.cos(g))
            for g in jax.grad(lambda *y: jnp.sum(jnp.sin(f(*y))), (0, 1))(*x)
        ), (0, 1),
    ),
    "third": lambda f: jax.grad(
        lambda *x: sum(jnp.sum(jnp.sin(g)) for g in hvp(f)(*x)), (0, 1)
    ),
}


@pytest.mark.parametrize("order", SECOND)
@pytest.mark.parametrize("transposed", [False, True])
def test_higher_derivatives(transposed, order, rng):
  lhs, rhs, sizes = operands_of(rng, transposed=transposed)
  lhs = lhs / 9
  of = lambda f: lambda *x: f(*x, sizes)
  ours = of(ragged(transposed=transposed))
  theirs = of(functools.partial(plain, transposed=transposed))
  found = jax.jit(SECOND[order](ours))(lhs, rhs)
  check_close(found, jax.jit(SECOND[order](theirs))(lhs, rhs), 1e-5)


@pytest.mark.slow
@pytest.mark.more
def test_second_derivatives_emulated(rng):
  lhs, rhs, sizes = operands_of(rng, "bfloat16")

  def second(lhs, rhs):
    loss = lambda *x: jnp.sum(jaxgemm.ragged_dot(*x, sizes).astype("float32") ** 2)
    return jax.jvp(jax.grad(loss, (0, 1)), (lhs, rhs), (lhs, rhs))[1]

  xla = second(lhs, rhs)
  with jaxgemm.emulate():
    found = jax.jit(second)(lhs, rhs)
  for one, other in zip(found, xla, strict=True):
    assert reference.relative_error(one, other) < 1e-2


def test_jvp_and_linearize(rng):
  lhs, rhs, sizes = operands_of(rng)
  tangents = normal(rng, *lhs.shape), normal(rng, *rhs.shape)
  ours, theirs = (lambda *x, f=f: f(*x, sizes) for f in (ragged(), plain))
  wanted = jax.jvp(theirs, (lhs, rhs), tangents)
  check_close(jax.jvp(ours, (lhs, rhs), tangents), wanted)
  out, linear = jax.linearize(ours, lhs, rhs)
  check_close((out, linear(*tangents)), wanted)
  # One operand alone has one product more.
  one = lambda lhs: ours(lhs, rhs)
  assert count_primitives(lambda x: jax.jvp(one, (x,), (x,)), lhs)[PRIMITIVE] == 2
  check_close(jax.jvp(one, (lhs,), tangents[:1])[1], theirs(tangents[0], rhs))
  ct = normal(rng, M, N)
  (transpose,) = jax.linear_transpose(one, lhs)(ct)
  check_close(transpose, jax.linear_transpose(lambda x: theirs(x, rhs), lhs)(ct)[0])


@pytest.mark.parametrize("argnums, count", [(0, 1), (1, 1), ((0, 1), 2)])
def test_only_what_is_asked_for_is_multiplied(argnums, count, rng):
  """Beside the forward product, which XLA drops where nobody wants it."""
  lhs, rhs, sizes = operands_of(rng)
  loss = lambda *x: jaxgemm.ragged_dot(*x, sizes).sum()
  assert count_primitives(jax.grad(loss, argnums), lhs, rhs)[PRIMITIVE] == count + 1


def test_gradients_of_kernels_are_kernels(rng):
  """Three of the forward product's two operands, in place: nothing is transposed."""
  lhs, rhs, sizes = operands_of(rng, "bfloat16")
  loss = lambda *x: jnp.sum(jnp.sin(jaxgemm.ragged_dot(*x).astype("float32")))
  for argnums, wanted in (
      (0, dict(grouped_m=2)), (1, dict(grouped_m=1, grouped_k=1)),
      ((0, 1), dict(grouped_m=2, grouped_k=1)),
  ):
    found = cuda_kernels(jax.grad(loss, argnums), lhs, rhs, sizes)
    assert found == Counter(wanted)
  for transposed in (False, True):
    lhs, rhs, sizes = operands_of(rng, "bfloat16", transposed=transposed)
    with jaxgemm.target("NVIDIA H200"):
      run = lambda *x: jaxgemm.ragged_dot(*x, sizes, transposed=transposed).sum()
      exported = jax.export.export(jax.jit(jax.grad(run, (0, 1))), platforms=["cuda"])
      assert "stablehlo.transpose" not in exported(lhs, rhs).mlir_module()
