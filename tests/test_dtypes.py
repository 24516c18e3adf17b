"""Of which dtype results are, and how exactly products are formed."""

from __future__ import annotations

import itertools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxgemm
from jaxgemm import reference
from jaxgemm.precision import choose_algorithm
from tests.product_cases import assert_close, normal, products

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
  assert_close(result, reference.matmul(a, b), out_dtype)
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
  assert_close(result, reference.matmul(a, a), dtype)


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
