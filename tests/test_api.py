"""matmul, dot_general and gemm: their namesakes' semantics."""

from __future__ import annotations

import functools
import itertools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxgemm
from jaxgemm import reference
from jaxgemm.dims import Dims, fold, label_axes
from jaxgemm.precision import choose_algorithm
from tests.product_cases import normal, product_dims, products

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


def _assert_close(result, truth, dtype):
  assert result.dtype == dtype
  bound = {"float32": 2e-6, "bfloat16": 4e-3, "float16": 5e-4}[jnp.dtype(dtype).name]
  assert reference.relative_error(result, truth) <= bound


@pytest.mark.parametrize("shapes", MATMUL_SHAPES, ids=str)
def test_matmul_shapes(shapes, rng):
  a, b = (normal(rng, *shape) for shape in shapes)
  result = jaxgemm.matmul(a, b)
  assert result.shape == jnp.matmul(a, b).shape
  _assert_close(result, reference.matmul(a, b), "float32")
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
  _assert_close(result, reference.dot_general(lhs, rhs, numbers), "float32")
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
  _assert_close(ours, np.einsum(spec, *map(np.asarray, operands)), "float32")


# -- dtypes and precision ----------------------------------------------------------

_DTYPES = ["bfloat16", "float16", "float32", "int32", "int8", "bool", "complex64"]


@pytest.mark.parametrize("dtypes", [*itertools.product(_DTYPES, _DTYPES)], ids=str)
def test_matmul_promotes_as_jnp(dtypes, rng):
  a, b = (jnp.asarray(4 * rng.standard_normal((8, 8)), dtype) for dtype in dtypes)
  ours, theirs = jaxgemm.matmul(a, b), jnp.matmul(a, b)
  assert ours.dtype == theirs.dtype
  truth = np.matmul(np.asarray(a, np.complex128), np.asarray(b, np.complex128))
  if jnp.issubdtype(ours.dtype, jnp.inexact):
    error = np.linalg.norm(np.asarray(ours, np.complex128) - truth)
    xla_error = np.linalg.norm(np.asarray(theirs, np.complex128) - truth)
    assert error <= 2 * xla_error + 1e-6 * np.linalg.norm(truth)
  else:
    assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float16", "float32"])
def test_preferred_element_type(dtype, out_dtype, rng):
  a, b = normal(rng, 32, 64, dtype=dtype), normal(rng, 64, 16, dtype=dtype)
  result = jaxgemm.matmul(a, b, preferred_element_type=out_dtype)
  _assert_close(result, reference.matmul(a, b), out_dtype)
  (product,) = products(
      lambda a, b: jaxgemm.matmul(a, b, preferred_element_type=out_dtype), a, b
  )
  assert product.out_dtype == out_dtype


_HIGHEST = (lax.Precision.HIGHEST,) * 2
_DEFAULT = (lax.Precision.DEFAULT,) * 2
_PRESET = lax.DotAlgorithmPreset


@pytest.mark.parametrize(
    "dtype, precision, algorithm",
    [
        ("bfloat16", None, "bf16_f32"),
        ("bfloat16", _HIGHEST, "bf16_f32"),
        ("bfloat16", (lax.Precision.HIGH, lax.Precision.DEFAULT), "bf16_f32"),
        ("bfloat16", _PRESET.DEFAULT, "bf16_f32"),
        ("bfloat16", _PRESET.BF16_BF16_F32, "bf16_f32"),
        ("bfloat16", _PRESET.BF16_BF16_BF16, None),
        ("bfloat16", _PRESET.TF32_TF32_F32, None),
        ("bfloat16", lax.DotAlgorithm(jnp.bfloat16, jnp.bfloat16, jnp.float32),
         "bf16_f32"),
        ("float16", _HIGHEST, "f16_f32"),
        ("float16", _PRESET.F16_F16_F32, "f16_f32"),
        ("float16", _PRESET.F16_F16_F16, None),
        ("float16", _PRESET.BF16_BF16_F32, None),
        ("float32", None, "tf32_f32"),
        ("float32", _DEFAULT, "tf32_f32"),
        ("float32", _PRESET.TF32_TF32_F32, "tf32_f32"),
        ("float32", (lax.Precision.HIGH,) * 2, "bf16_x3"),
        ("float32", _HIGHEST, "bf16_x6"),
        ("float32", (lax.Precision.DEFAULT, lax.Precision.HIGHEST), "bf16_x6"),
        ("float32", (lax.Precision.HIGH, lax.Precision.DEFAULT), "bf16_x3"),
        ("float32", _PRESET.BF16_BF16_F32, None),
        ("float32", _PRESET.BF16_BF16_F32_X3, "bf16_x3"),
        ("float32", _PRESET.BF16_BF16_F32_X6, "bf16_x6"),
        ("float32", _PRESET.BF16_BF16_F32_X9, "bf16_x9"),
        ("float32", _PRESET.TF32_TF32_F32_X3, "bf16_x6"),
        ("float32", _PRESET.F32_F32_F32, "bf16_x6"),
        ("float32", lax.DotAlgorithm(jnp.float32, jnp.float32, jnp.float32), "bf16_x6"),
        ("float32", lax.DotAlgorithm(
            jnp.bfloat16, jnp.bfloat16, jnp.float32, num_primitive_operations=3),
         "bf16_x3"),
        ("float32", lax.DotAlgorithm(jnp.bfloat16, jnp.bfloat16, jnp.float32), None),
        ("float32", lax.DotAlgorithm(jnp.float64, jnp.float64, jnp.float64), None),
        ("float64", None, None),
        ("int8", None, None),
    ],
    ids=str,
)
def test_algorithm_of_precision(dtype, precision, algorithm):
  chosen, reason = choose_algorithm(dtype, dtype, dtype, precision)
  assert chosen == algorithm
  assert bool(reason) == (algorithm is None)
  if algorithm is None:
    assert dtype in reason


def test_float32_obeys_the_default_precision(rng):
  a = normal(rng, 8, 8)
  matmul = lambda x: jaxgemm.matmul(x, x)
  assert len(products(matmul, a)) == 1
  with jax.default_matmul_precision("highest"):
    assert [p.algorithm for p in products(matmul, a)] == ["bf16_x6"]
    assert len(products(matmul, a.astype("bfloat16"))) == 1


@pytest.mark.parametrize(
    "dtype, precision", [("float32", "TF32_TF32_F32"), ("float16", "F16_F16_F32")]
)
def test_presets_that_a_cpu_does_not_know(dtype, precision, rng):
  a = normal(rng, 16, 16, dtype=dtype)
  result = jaxgemm.matmul(a, a, precision=precision)
  _assert_close(result, reference.matmul(a, a), dtype)


def test_xla_gets_the_precision_as_it_is(rng):
  a = normal(rng, 8, 8)
  f = lambda a: jaxgemm.matmul(a, a, precision=("highest", "default"))
  assert "HIGHEST" in jax.jit(f).lower(a).as_text()
  f = lambda a: jaxgemm.matmul(a, a, precision=("high", "highest"))
  text = jax.jit(jax.grad(lambda a: f(a).sum())).lower(a).as_text()
  assert "HIGHEST" in text and "HIGH," in text


@pytest.mark.parametrize(
    ("asked", "lowered"),
    [("BF16_BF16_F32_X9", "HIGHEST"), ("BF16_BF16_F32_X6", "HIGHEST"),
     ("BF16_BF16_F32_X3", "num_primitive_operations = 3")],
)
def test_xla_is_asked_for_more_where_it_gives_less(asked, lowered):
  x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
  f = jax.jit(lambda a, b: jaxgemm.matmul(a, b, precision=asked))
  assert lowered in f.trace(x, x).lower(lowering_platforms=("cuda",)).as_text()


def test_mixed_dtypes_of_dot_general_go_to_xla(rng):
  a, b = normal(rng, 4, 5, dtype="bfloat16"), normal(rng, 5, 6)
  numbers = (((1,), (0,)), ((), ()))
  f = lambda a, b: jaxgemm.dot_general(a, b, numbers)
  assert not products(f, a, b)
  assert f(a, b).dtype == lax.dot_general(a, b, numbers).dtype


def test_one_weak_operand_gives_what_jax_gives():
  weak, halves = jnp.full((3, 3), 2.0), jnp.ones((3, 3), jnp.bfloat16)
  for other in (jnp.ones((3, 3), jnp.int8), jnp.ones((3, 3)), halves):
    for operands in ((weak, other), (other, weak)):
      found, wanted = jaxgemm.matmul(*operands), jnp.matmul(*operands)
      assert jax.typeof(found) == jax.typeof(wanted)


def test_weak_types_stay_weak():
  weak = lax.full((4, 4), 1.0)
  assert weak.weak_type
  assert jaxgemm.matmul(weak, weak).weak_type == jnp.matmul(weak, weak).weak_type
  half = jnp.ones((4, 4), "bfloat16")
  assert jaxgemm.matmul(weak, half).dtype == jnp.matmul(weak, half).dtype == half.dtype


# -- operands that are not arrays, and named kernels -------------------------------


def test_numpy_operands(rng):
  a = rng.standard_normal((4, 5)).astype("float32")
  _assert_close(jaxgemm.matmul(a, a.T), reference.matmul(a, a.T), "float32")


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


# -- gemm --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int32"])
@pytest.mark.parametrize("factors", [(1, 0), (2, 0), (1, 1), (0.5, -2.0)], ids=str)
@pytest.mark.parametrize("traced", [False, True], ids=["static", "traced"])
def test_gemm(dtype, factors, traced, rng):
  a, b, c = (
      (8 * normal(rng, *shape)).astype(dtype) for shape in ((8, 16), (16, 4), (8, 4))
  )
  alpha, beta = factors
  if dtype == "int32":
    alpha, beta = int(2 * alpha), int(beta)
  truth = reference.matmul(a, b, c, alpha=alpha, beta=beta)
  if traced:
    f = jax.jit(lambda a, b, c, x, y: jaxgemm.gemm(a, b, c, alpha=x, beta=y))
    result = f(a, b, c, alpha, beta)
  else:
    result = jaxgemm.gemm(a, b, c, alpha=alpha, beta=beta)
  if dtype == "int32":
    assert result.dtype == jnp.int32 and np.array_equal(result, truth)
  else:
    _assert_close(result, truth, dtype)


def test_gemm_fuses_python_numbers(rng):
  a, b, c = normal(rng, 4, 5), normal(rng, 5, 6), normal(rng, 4, 6, dtype="bfloat16")
  (product,) = products(lambda *x: jaxgemm.gemm(*x, alpha=2, beta=np.float32(3)), a, b, c)
  assert (product.alpha, product.beta) == (2.0, 3.0)
  (product,) = products(lambda *x: jaxgemm.gemm(*x, alpha=jnp.float32(2)), a, b)
  assert (product.alpha, product.beta) == (1.0, 0.0)


def test_gemm_broadcasts(rng):
  a, b, c = normal(rng, 2, 1, 4, 5), normal(rng, 3, 5, 6), normal(rng, 6)
  result = jaxgemm.gemm(a, b, c, beta=1)
  truth = reference.matmul(a, b, c, beta=1)
  assert result.shape == (2, 3, 4, 6)
  _assert_close(result, truth, "float32")


def test_gemm_rounds_once(rng):
  """With 16-bit results, alpha, beta and c act before the rounding."""
  a, b, c = (normal(rng, 64, 64, dtype="bfloat16") for _ in range(3))
  truth = reference.matmul(a, b, c, alpha=3.0, beta=-3.0)
  once = np.asarray(jnp.asarray(truth, "float32").astype("bfloat16"))
  for alpha in (3.0, jnp.float32(3.0)):
    result = jaxgemm.gemm(a, b, c, alpha=alpha, beta=-3.0)
    same = np.mean(np.asarray(result) == once)
    assert same > 0.99


def test_gemm_reads_no_c_where_beta_is_0(rng):
  a = normal(rng, 4, 4)
  result = jaxgemm.gemm(a, a, jnp.full((4, 4), jnp.nan))
  assert np.all(np.isfinite(result))


def test_eight_bits_with_c_and_alpha_are_exact():
  """Sums of int8 wrap, and are no float32 on the way."""
  a, b = jnp.full((4, 64), 100, jnp.int8), jnp.full((64, 4), 100, jnp.int8)
  c = jnp.full((4, 4), 2**30 + 1, jnp.int32)
  gemm = functools.partial(jaxgemm.gemm, preferred_element_type="int32")
  assert gemm(a, b, c, beta=1)[0, 0] == 2**30 + 1 + 640_000
  found = jax.vmap(lambda c: gemm(a, b, c, beta=1))(jnp.stack([c, 0 * c]))
  assert found[:, 0, 0].tolist() == [2**30 + 1 + 640_000, 640_000]
  most = jnp.full((1, 2**16), 127, jnp.int8)
  wrapped = np.array(3 * 127 * 127 * 2**16).astype(np.int32)
  assert gemm(most, most.T, alpha=3)[0, 0] == wrapped


@pytest.mark.parametrize("alpha", [1 / 64, jnp.float32(1 / 64)], ids=["known", "array"])
def test_eight_bits_of_a_result_are_rounded_last(alpha):
  """4096 is beyond float8_e4m3fn, and 64 is not."""
  a, b = jnp.full((2, 64), 8, "float8_e4m3fn"), jnp.full((64, 2), 8, "float8_e4m3fn")
  found = jaxgemm.gemm(a, b, alpha=alpha)
  assert found.dtype == a.dtype and found.astype("float32").tolist() == [[64.0] * 2] * 2
  c = jnp.full((2, 2), -62.0)
  assert jaxgemm.gemm(a, b, c, alpha=alpha, beta=1)[0, 0] == 2.0


@pytest.mark.parametrize(
    ("a", "b"), [("float8_e4m3fn", "float8_e5m2"), ("bfloat16", "float8_e4m3fn")]
)
def test_operands_of_no_common_dtype(a, b):
  """As jnp.matmul takes them, where it is said what the result is to be."""
  a, b = jnp.ones((4, 8), a), jnp.ones((8, 4), b)
  for implementation in (None, "xla"):
    found = jaxgemm.matmul(
        a, b, preferred_element_type="float32", implementation=implementation
    )
    assert found.dtype == np.float32 and (found == 8.0).all()
  with pytest.raises(ValueError, match="cannot serve: lhs is"):
    jaxgemm.matmul(
        a, b, preferred_element_type="float32", implementation="persistent"
    )
  plan = jaxgemm.explain(a, b, preferred_element_type="float32")
  assert plan.kernel == "xla"


def test_integers_are_exact():
  """Where every factor is an integer; no float32 lies between."""
  big, one = jnp.full((1, 1), 2**24 + 1, jnp.int32), jnp.ones((1, 1), jnp.int32)
  for found, times in (
      (jaxgemm.gemm(big, one), 1), (jaxgemm.gemm(big, one, alpha=-3), -3),
      (jaxgemm.gemm(one, one, big, alpha=0, beta=1), 1), (jaxgemm.linear(big, one), 1),
      (jaxgemm.linear(big, one, scale=2), 2),
      (jaxgemm.linear(one, one, bias=big[0] - 1), 1),
  ):
    assert found.dtype == jnp.int32 and int(found[0, 0]) == times * (2**24 + 1)


@pytest.mark.parametrize("scale", [0.5, jnp.float32(0.5)], ids=["number", "array"])
def test_a_scale_of_integers_is_not_cut_off(scale):
  x, w = jnp.asarray([[3, 5]]), jnp.ones((2, 1))
  np.testing.assert_array_equal(jaxgemm.linear(x, w, scale=scale), [[4.0]])


def test_strict_promotion_of_ranks_and_dtypes():
  """What is added to rows, and what is promoted, is ours to say."""
  x, w, b = jnp.ones((2, 70)), jnp.ones((70, 70)), jnp.ones(70)
  labels = jnp.zeros(2, jnp.int32)
  layer = lambda x, w, b: jaxgemm.linear(x, w, b, activation="gelu").sum()
  loss = lambda x, w, b: jaxgemm.linear_cross_entropy(x, w, labels, b).sum()
  for dtype in ("float32", "bfloat16"):
    operands = [z.astype(dtype) for z in (x, w, b)]
    for run in (layer, loss):
      wanted = jax.grad(run, (0, 1, 2))(*operands)
      with jax.numpy_rank_promotion("raise"):
        jax.grad(layer, (0, 1, 2))(*operands)
      with jax.numpy_dtype_promotion("strict"):
        found = jax.grad(run, (0, 1, 2))(*operands)
      jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_debug_nans_sees_the_product():
  with jax.debug_nans(True):
    with pytest.raises(FloatingPointError):
      jaxgemm.matmul(jnp.full((2, 2), jnp.nan), jnp.ones((2, 2)))
    with pytest.raises(FloatingPointError):
      jaxgemm.linear(jnp.full((2, 2), jnp.nan), jnp.ones((2, 2)), activation="relu")


_SYMBOLIC = {
    "matmul": (jaxgemm.matmul, "b,8", "8,16"),
    "gemm": (lambda a, b, c: jaxgemm.gemm(a, b, c, beta=1), "b,8", "8,16", "b,16"),
    "transposed batch": (
        lambda a, b: jaxgemm.einsum("bkh,ckd->bhcd", a, b), "b,32,s", "512,32,16"),
    "vmap": (jax.vmap(jaxgemm.matmul, (None, 0)), "b,32", "4,32,16"),
    "linear": (
        lambda x, w, r: jaxgemm.linear(x, w, activation="silu", residual=r),
        "b,s,8", "8,16", "b,s,16"),
    "mlp": (
        lambda x, w, v, r: jaxgemm.mlp(x, w, v, residual=r), "b,8", "8,16", "16,8",
        "b,8"),
    "gradient": (
        jax.grad(lambda x, w, v: jnp.sum(jaxgemm.gated_linear(x, w, v) ** 2), (0, 1)),
        "b,8", "8,16", "8,16"),
    "loss": (
        jax.grad(lambda x, w: jaxgemm.linear_cross_entropy(
            x, w, jnp.zeros(x.shape[:-1], jnp.int32)).sum(), (0, 1)), "b,8", "8,100"),
    "loss of any number of classes": (
        lambda x, w: jaxgemm.linear_cross_entropy(
            x, w, jnp.zeros(x.shape[:-1], jnp.int32)), "b,8", "8,c"),
}


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("name", _SYMBOLIC)
def test_symbolic_shapes_are_exported(name, platform, rng):
  """Their products are XLA's: no plan knows the sizes."""
  run, *shapes = _SYMBOLIC[name]
  scope = jax.export.SymbolicScope()
  args = [
      jax.ShapeDtypeStruct(jax.export.symbolic_shape(shape, scope=scope), "float32")
      for shape in shapes
  ]
  with jaxgemm.target("NVIDIA H200"):
    exported = jax.export.export(jax.jit(run), platforms=[platform])(*args)
  if platform == "cuda":
    assert "mosaic_gpu" not in exported.mlir_module()
    return
  sizes = {"b": 6, "s": 5, "c": 100}
  values = [
      normal(rng, *(sizes.get(one) or int(one) for one in shape.split(",")))
      for shape in shapes
  ]
  found, wanted = exported.call(*values), run(*values)
  jax.tree.map(
      lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4), found, wanted
  )


def test_a_plan_of_symbolic_sizes():
  (rows,) = jax.export.symbolic_shape("b")
  a, b = (jax.ShapeDtypeStruct(s, "bfloat16") for s in ((rows, 64), (64, 96)))
  with jaxgemm.target("NVIDIA H200"):
    plan = jaxgemm.explain(a, b)
  assert plan.kernel == "xla" and "symbolic" in plan.reason
