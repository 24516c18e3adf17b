"""accelerate: lax.ragged_dot, its gradients, and what is left alone."""

from __future__ import annotations

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxgemm
from jaxgemm import reference
from tests.product_cases import count_primitives, normal

SIZES = jnp.array([7, 0, 4, 9], jnp.int32)
X, W, Y = (20, 16), (4, 16, 24), (20, 24)
SUMS = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])


def drawn(rng, *shapes, dtype="bfloat16"):
  return [normal(rng, *shape, dtype=dtype) for shape in shapes]


def rows(x, w, sizes=SIZES, **options):
  return lax.ragged_dot(x, w, sizes, **options)


def loss(x, w):
  return jnp.sum(jnp.sin(rows(x, w).astype("float32")))


# A function, the shapes of its operands, and how many products it has.
TAKEN = {
    "rows": (rows, (X, W), 1),
    "rows of what is transposed": (
        lambda x, w: rows(x, w.swapaxes(1, 2)), (X, (4, 24, 16)), 1),
    "sums": (
        lambda x, y: lax.ragged_dot_general(x, y, SIZES, SUMS), (X, Y), 1),
    "sums, transposed": (
        lambda x, y: lax.ragged_dot_general(x, y, SIZES, SUMS).swapaxes(1, 2), (X, Y), 1),
    "narrowed": (
        lambda x, w: rows(x, w, preferred_element_type="float32").astype("bfloat16"),
        (X, W), 1),
    "two": (lambda x, w, v: rows(rows(x, w), v), (X, W, (4, 24, 8)), 2),
    "gradients": (jax.grad(loss, (0, 1)), (X, W), 3),
    "in a jit": (jax.jit(rows), (X, W), 1),
    "in a checkpoint": (jax.checkpoint(rows), (X, W), 1),
    "in a loop": (
        lambda x, w: lax.scan(lambda c, _: (rows(c, w), None), x, None, length=2)[0],
        (X, (4, 16, 16)), 1),
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_is_taken(name, rng):
  function, shapes, count = TAKEN[name]
  operands = drawn(rng, *shapes)
  found = jax.jit(jaxgemm.accelerate(function))(*operands)
  wanted = jax.jit(function)(*operands)
  assert jax.tree.structure(found) == jax.tree.structure(wanted)
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    assert reference.relative_error(a, np.asarray(b, "float64")) < 4e-3
  counts = count_primitives(jaxgemm.accelerate(function), *operands)
  assert counts["jaxgemm_ragged"] == count and not counts["ragged_dot_general"]


@pytest.mark.parametrize("name", ["narrowed", "sums, transposed"])
def test_what_follows_is_taken_too(name, rng):
  function, shapes, _ = TAKEN[name]
  operands = drawn(rng, *shapes)
  counts = count_primitives(jaxgemm.accelerate(function), *operands)
  assert set(counts) == {"jaxgemm_ragged"}


@pytest.mark.parametrize("accelerated", [False, True])
def test_transposed_matrices_are_read_as_they_lie(accelerated, rng):
  """Transposed back, of which XLA makes nothing."""
  function, shapes, _ = TAKEN["rows of what is transposed"]
  ours = lambda x, w: jaxgemm.ragged_dot(x, w.swapaxes(1, 2), SIZES)
  function = jaxgemm.accelerate(function) if accelerated else ours
  operands = drawn(rng, *shapes)
  jaxpr = jax.make_jaxpr(function)(*operands)
  (product,) = (
      each for each in jaxpr.eqns if each.primitive.name == "jaxgemm_ragged"
  )
  assert product.params["facts"].transposed
  assert product.invars[1].aval.shape == shapes[1]


@pytest.mark.parametrize("order", ["before", "after"])
def test_gradients(order, rng):
  operands = drawn(rng, X, W)
  if order == "before":
    found = jaxgemm.accelerate(jax.grad(loss, (0, 1)))(*operands)
  else:
    found = jax.grad(jaxgemm.accelerate(loss), (0, 1))(*operands)
  for a, b in zip(found, jax.grad(loss, (0, 1))(*operands), strict=True):
    assert a.dtype == b.dtype
    assert reference.relative_error(a, np.asarray(b, "float64")) < 4e-3


@pytest.mark.slow
def test_kernels(rng):
  operands = drawn(rng, (40, 64), (4, 64, 32))
  with jaxgemm.emulate():
    found = jax.jit(jaxgemm.accelerate(jax.grad(loss, (0, 1))))(*operands)
  for a, b in zip(found, jax.grad(loss, (0, 1))(*operands), strict=True):
    assert reference.relative_error(a, np.asarray(b, "float64")) < 4e-3


def test_float8_with_narrow_results(rng):
  """Which float32 of XLA's is not: the tensor cores keep 14 bits. Rows alone are ours."""
  x, w = (each.astype("float8_e4m3fn") for each in drawn(rng, X, W))
  for out, count in (("bfloat16", 1), ("float32", 0)):
    function = lambda x, w, out=out: rows(x, w, preferred_element_type=out)
    counts = count_primitives(jaxgemm.accelerate(function), x, w)
    assert counts["jaxgemm_ragged"] == count
    found = jaxgemm.accelerate(function)(x, w)
    np.testing.assert_array_equal(found, function(x, w))
  sums = lambda x, y: lax.ragged_dot_general(
      x, y, SIZES, SUMS, preferred_element_type="bfloat16"
  )
  counts = count_primitives(jaxgemm.accelerate(sums), x, x)
  assert counts["ragged_dot_general"] == 1


BATCHED = lax.RaggedDotDimensionNumbers((((2,), (2,)), ((0,), (1,))), [1], [0])
LEFT = {
    "float32": (rows, (X, W), "float32"),
    "lhs stored otherwise": (
        lambda x, w: lax.ragged_dot_general(
            x, w, SIZES, lax.RaggedDotDimensionNumbers((((0,), (1,)), ((), ())), [1], [0])
        ), ((16, 20), W), "bfloat16"),
    "a batch": (
        lambda x, w: lax.ragged_dot_general(x, w, SIZES, BATCHED),
        ((2, *X), (4, 2, 16, 24)), "bfloat16"),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left(name, rng):
  function, shapes, dtype = LEFT[name]
  operands = drawn(rng, *shapes, dtype=dtype)
  counts = count_primitives(jaxgemm.accelerate(function), *operands)
  assert counts["ragged_dot_general"] == 1 and not counts["jaxgemm_ragged"]


@pytest.mark.parametrize("ragged_dot", [lax.ragged_dot, jaxgemm.ragged_dot])
def test_sums_of_integers_are_converted_by_xla(ragged_dot, rng):
  """The kernel has int32 of int8 alone."""
  function = lambda x, w: ragged_dot(
      x, w, SIZES, preferred_element_type="int32"
  ).astype("bfloat16")
  x, w = ((9 * each).astype("int8") for each in drawn(rng, X, W, dtype="float32"))
  found = jaxgemm.accelerate(function)(x, w)
  np.testing.assert_array_equal(found, function(x, w))
  (product,) = (
      each for each in jax.make_jaxpr(jaxgemm.accelerate(function))(x, w).eqns
      if each.primitive.name == "jaxgemm_ragged"
  )
  assert product.outvars[0].aval.dtype == "int32"


def test_what_another_wants_stays_as_wide(rng):
  both = lambda x, w: (lambda y: (y, y.astype("bfloat16")))(
      rows(x, w, preferred_element_type="float32")
  )
  wide, narrow = jaxgemm.accelerate(both)(*drawn(rng, X, W))
  assert wide.dtype == "float32" and narrow.dtype == "bfloat16"
  np.testing.assert_array_equal(wide.astype("bfloat16"), narrow)


def test_named_kernels_stay(rng):
  operands = drawn(rng, X, W)
  named = lambda x, w: jaxgemm.ragged_dot(x, w, SIZES, implementation="xla")
  jaxpr = jax.make_jaxpr(jaxgemm.accelerate(named))(*operands)
  (facts,) = (
      each.params["facts"] for each in jaxpr.eqns
      if each.primitive.name == "jaxgemm_ragged"
  )
  assert facts.implementation == "xla"
