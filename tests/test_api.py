"""matmul and dot_general: their namesakes' semantics."""

from __future__ import annotations

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxgemm
from jaxgemm import reference
from jaxgemm.dims import Dims, fold, label_axes
from tests.product_cases import assert_close, normal, product_dims, products

MATMUL_SHAPES = [
    ((4, 5), (5, 6)),
    ((5,), (5, 6)),
    ((4, 5), (5,)),
    ((5,), (5,)),
    ((3, 4, 5), (5, 6)),
    ((4, 5), (3, 5, 6)),
    ((3, 4, 5), (3, 5, 6)),
    ((3, 4, 5), (5,)),
    ((5,), (3, 5, 6)),
    ((1, 4, 5), (3, 5, 6)),
    ((3, 4, 5), (1, 5, 6)),
    ((1, 4, 5), (1, 5, 6)),
    ((2, 3, 4, 5), (3, 5, 6)),
    ((3, 4, 5), (2, 3, 5, 6)),
    ((2, 1, 4, 5), (1, 3, 5, 6)),
    ((2, 3, 4, 5), (2, 1, 5, 6)),
    ((7, 2, 3, 4, 5), (2, 1, 5, 6)),
    ((0, 5), (5, 6)),
    ((4, 0), (0, 6)),
    ((4, 5), (5, 0)),
    ((0, 4, 5), (0, 5, 6)),
    ((0, 4, 5), (5, 6)),
    ((1, 1), (1, 1)),
]


@pytest.mark.parametrize("shapes", MATMUL_SHAPES, ids=str)
def test_matmul_shapes(shapes, rng):
  a, b = (normal(rng, *shape) for shape in shapes)
  result = jaxgemm.matmul(a, b)
  assert result.shape == jnp.matmul(a, b).shape
  assert_close(result, reference.matmul(a, b), "float32")
  # Not by way of XLA's dot: the product is one of ours.
  assert len(products(jaxgemm.matmul, a, b)) == 1


@pytest.mark.parametrize(
    "shapes, dims",
    [
        (((4, 5), (5, 6)), Dims()),
        (((3, 4, 5), (5, 6)), Dims(m=2)),
        (((4, 5), (3, 5, 6)), Dims("mk", "bkn", b=1)),
        (((3, 4, 5), (3, 5, 6)), Dims(b=1)),
        (((7, 3, 4, 5), (7, 3, 5, 6)), Dims(b=2)),
        (((5,), (5, 6)), Dims(m=0)),
        (((5,), (5,)), Dims(m=0, n=0)),
        (((1, 4, 5), (3, 5, 6)), Dims("mk", "bkn", b=1)),
    ],
    ids=str,
)
def test_matmul_copies_nothing_that_folds(shapes, dims):
  a, b = (jnp.zeros(shape) for shape in shapes)
  jaxpr = jax.make_jaxpr(jaxgemm.matmul)(a, b)
  assert "transpose" not in str(jaxpr) and "broadcast" not in str(jaxpr)
  assert product_dims(jaxgemm.matmul, a, b) == [dims]


# -- dot_general -------------------------------------------------------------------

DIMENSION_NUMBERS = {
    "NN": ((4, 5), (5, 6), (((1,), (0,)), ((), ()))),
    "NT": ((4, 5), (6, 5), (((1,), (1,)), ((), ()))),
    "TN": ((5, 4), (5, 6), (((0,), (0,)), ((), ()))),
    "TT": ((5, 4), (6, 5), (((0,), (1,)), ((), ()))),
    "batch TN": ((3, 5, 4), (3, 5, 6), (((1,), (1,)), ((0,), (0,)))),
    "two k": ((4, 2, 5), (2, 5, 6), (((1, 2), (0, 1)), ((), ()))),
    "two k crossed": ((4, 2, 5), (5, 2, 6), (((1, 2), (1, 0)), ((), ()))),
    "outer": ((4,), (6,), (((), ()), ((), ()))),
    "full": ((4, 5), (4, 5), (((0, 1), (0, 1)), ((), ()))),
    "k inside lhs": ((2, 5, 4), (5, 6), (((1,), (0,)), ((), ()))),
    "k inside rhs": ((4, 5), (2, 5, 6), (((1,), (1,)), ((), ()))),
    "k inside both": ((2, 5, 4), (3, 5, 6), (((1,), (1,)), ((), ()))),
    "batch last": ((4, 5, 3), (5, 6, 3), (((1,), (0,)), ((2,), (2,)))),
    "heads": ((3, 7, 2, 5), (3, 8, 2, 5), (((3,), (3,)), ((0, 2), (0, 2)))),
    "batch crossed": ((3, 2, 4, 5), (2, 3, 5, 6), (((3,), (2,)), ((0, 1), (1, 0)))),
    "batch backwards": ((3, 2, 4, 5), (3, 2, 5, 6), (((3,), (2,)), ((1, 0), (1, 0)))),
    "batch only": ((3, 2), (3, 2), (((), ()), ((0, 1), (0, 1)))),
    "lists": ((4, 5), (5, 6), [([1], [0]), ([], [])]),
}


@pytest.mark.parametrize("name", DIMENSION_NUMBERS)
def test_dot_general(name, rng):
  lhs_shape, rhs_shape, numbers = DIMENSION_NUMBERS[name]
  lhs, rhs = normal(rng, *lhs_shape), normal(rng, *rhs_shape)
  result = jaxgemm.dot_general(lhs, rhs, numbers)
  assert result.shape == lax.dot_general(lhs, rhs, numbers).shape
  assert_close(result, reference.dot_general(lhs, rhs, numbers), "float32")
  assert len(products(lambda x, y: jaxgemm.dot_general(x, y, numbers), lhs, rhs)) == 1


@pytest.mark.parametrize("name", ["NN", "NT", "TN", "TT", "batch TN", "k inside lhs"])
def test_dot_general_multiplies_in_place(name):
  lhs_shape, rhs_shape, numbers = DIMENSION_NUMBERS[name]
  axes = label_axes(len(lhs_shape), len(rhs_shape), numbers)
  folding = fold(*axes, lhs_shape, rhs_shape)
  assert folding.moved == 0
  assert folding.lhs_perm is folding.rhs_perm is folding.out_perm is None


def test_fold_moves_the_smaller():
  # k lies inside n: moving rhs costs k * 64, moving the result m * 64.
  axes = (("m", "k"), ("n0", "k", "n1"), ("m", "n0", "n1"))
  small_m = fold(*axes, (2, 100), (8, 100, 8))
  assert small_m.moved == 2 * 64 and small_m.out_perm and small_m.dims.shared == "lhs"
  small_k = fold(*axes, (100, 2), (8, 2, 8))
  assert small_k.moved == 2 * 64 and small_k.rhs_perm


@pytest.mark.parametrize("may_exchange", [False, True])
def test_fold_is_right_for_random_einsums(may_exchange, rng):
  """Whatever the order of the axes, transposing and multiplying gives the einsum."""
  many = {"b": 2, "c": 3, "m": 4, "p": 2, "n": 3, "q": 2, "k": 5, "l": 2}
  exchanged = 0
  for _ in range(300):
    sizes = {axis: 1 if rng.random() < 0.2 else size for axis, size in many.items()}
    kinds = {axis: rng.random() < 0.7 for axis in sizes}
    lhs = tuple(rng.permutation([a for a in "bcmpkl" if kinds[a]]))
    rhs = tuple(rng.permutation([a for a in "bcnqkl" if kinds[a]]))
    out = tuple(rng.permutation([a for a in "bcmpnq" if kinds[a]]))
    if not lhs or not rhs:
      continue
    x, y = (
        rng.standard_normal([sizes[a] for a in axes]).astype(np.float32)
        for axes in (lhs, rhs)
    )
    folding = fold(lhs, rhs, out, x.shape, y.shape, may_exchange=may_exchange)
    dims = folding.dims
    truth = np.einsum(f"{''.join(lhs)},{''.join(rhs)}->{''.join(out)}", x, y)
    exchanged += folding.exchanged
    x, y = (y, x) if folding.exchanged else (x, y)
    x = x if folding.lhs_perm is None else x.transpose(folding.lhs_perm)
    y = y if folding.rhs_perm is None else y.transpose(folding.rhs_perm)
    names = [dims.names(groups) for groups in (dims.lhs, dims.rhs, dims.out)]
    label = dict(zip(sorted({*sum(names, [])}), "abcdefghijkl", strict=False))
    lhs, rhs, out = ("".join(label[name] for name in group) for group in names)
    result = np.einsum(f"{lhs},{rhs}->{out}", x, y)
    if folding.out_perm is not None:
      result = result.transpose(folding.out_perm)
    np.testing.assert_allclose(result, truth, rtol=1e-4, atol=1e-4)
  assert (exchanged > 20) == may_exchange


def test_fold_exchanges_the_operands_where_that_moves_less():
  """And where a batch would share one: that is one product with rows of the other."""
  shapes = (64, 32), (8, 32)
  axes = ("m", "k"), ("b", "k")
  folding = fold(*axes, ("b", "m"), *shapes, may_exchange=True)
  assert folding.exchanged and folding.moved == 0 and folding.dims == Dims(rhs="bnk")
  assert fold(*axes, ("b", "m"), *shapes).dims.shared == "lhs"
  assert not fold(*axes, ("m", "b"), *shapes, may_exchange=True).exchanged
  # A column counts as none.
  column = fold(
      ("m", "k"), ("b", "k", "n"), ("b", "m", "n"), (64, 32), (8, 32, 1),
      may_exchange=True,
  )
  assert column.exchanged and column.moved == 0 and column.dims.shared is None


@pytest.mark.parametrize(
    "spec, shapes",
    [
        ("bqhd,bkhd->bhqk", ((2, 3, 4, 5), (2, 6, 4, 5))),
        ("mk,nk->nm", ((3, 4), (5, 4))),
        ("abc,cd->abd", ((2, 3, 4), (4, 5))),
        ("ab,ab->", ((2, 3), (2, 3))),
    ],
    ids=str,
)
def test_einsum_takes_dot_general(spec, shapes, rng):
  operands = [normal(rng, *shape) for shape in shapes]
  ours = jnp.einsum(spec, *operands, _dot_general=jaxgemm.dot_general)
  assert_close(ours, np.einsum(spec, *map(np.asarray, operands)), "float32")


# -- operands that are not arrays, and named kernels -------------------------------


def test_numpy_operands(rng):
  a = rng.standard_normal((4, 5)).astype("float32")
  assert_close(jaxgemm.matmul(a, a.T), reference.matmul(a, a.T), "float32")


def test_named_kernels_on_a_cpu():
  a = jnp.ones((64, 64), "bfloat16")
  if jax.default_backend() == "gpu":
    pytest.skip("a GPU may run it")
  for f in (jaxgemm.matmul, jax.jit(jaxgemm.matmul, static_argnames="implementation")):
    with pytest.raises(ValueError, match="'pipelined' cannot run: .*emulate"):
      f(a, a, implementation="pipelined")


def test_implementation_xla_is_xlas_dot(rng):
  a, b = normal(rng, 3, 4, 5), normal(rng, 5, 6)
  f = lambda a, b: jaxgemm.matmul(a, b, implementation="xla")
  assert not products(f, a, b)
  assert np.array_equal(f(a, b), jnp.matmul(a, b))
  numbers = (((2,), (0,)), ((), ()))
  f = lambda a, b: jaxgemm.dot_general(a, b, numbers, implementation="xla")
  assert not products(f, a, b)


def test_debug_nans_sees_the_product():
  with jax.debug_nans(True):
    with pytest.raises(FloatingPointError):
      jaxgemm.matmul(jnp.full((2, 2), jnp.nan), jnp.ones((2, 2)))
    with pytest.raises(FloatingPointError):
      jaxgemm.linear(jnp.full((2, 2), jnp.nan), jnp.ones((2, 2)), activation="relu")
