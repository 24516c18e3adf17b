"""What the public functions answer to bad inputs: one table of all of them.

Each case has a call, and the error and message that it gets. A message names the operand
or argument, the dimension, and the rule. What a plan alone refuses is in
tests/test_plan.py, what autotune refuses to measure in tests/test_autotune.py.
"""

from __future__ import annotations

from collections.abc import Callable
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxgemm
from jaxgemm import RMSNorm, checkpoint_policies
from pallas_kernels.configs import (
  BlockedConfig,
  PersistentConfig,
  PipelinedConfig,
  SplitKConfig,
)


def ones(*shape: int, dtype="float32") -> np.ndarray:
  return np.ones(shape, dtype)


A, B, C = ones(8, 16), ones(16, 4), ones(8, 4)
BIAS, LABELS = ones(4), np.zeros(8, "int32")
INTS = ones(8, 16, dtype="int32"), ones(16, 4, dtype="int32")
HALF = ones(64, 64, dtype=jnp.bfloat16)
VALUES = ones(256, 256, dtype=jnp.float8_e4m3fn)
WORDS = np.array([["a", "b"]])
NUMBERS = (((1,), (0,)), ((), ()))


def batched(*sizes: int) -> np.ndarray:
  return ones(*sizes, 4, 4)


matmul, gemm, einsum, linear, gated, mlp, gated_mlp, losses, scaled = (
    functools.partial(functools.partial, f)
    for f in (
        jaxgemm.matmul, jaxgemm.gemm, jaxgemm.einsum, jaxgemm.linear,
        jaxgemm.gated_linear, jaxgemm.mlp, jaxgemm.gated_mlp,
        jaxgemm.linear_cross_entropy, jaxgemm.scaled_matmul,
    )
)
quantise, dequantise, explain = (
    functools.partial(functools.partial, f)
    for f in (jaxgemm.quantise, jaxgemm.dequantise, jaxgemm.explain)
)


def dot(numbers) -> Callable[[], Any]:
  return lambda: jaxgemm.dot_general(ones(4, 5), ones(5, 6), numbers)


def keys() -> jax.Array:
  return jax.random.split(jax.random.key(0), 4).reshape(2, 2)


def on_h200(call: Callable[[], Any]) -> Callable[[], Any]:
  """The call, planned for a GPU that the kernels run on."""
  def run():
    with jaxgemm.target("NVIDIA H200"):
      return call()

  return run


def tune(fn, *args, measure=lambda jobs, device: iter(()), **options):
  return on_h200(lambda: jaxgemm.autotune(fn, *args, measure=measure, **options))


Case = tuple[Callable[[], Any], type[Exception], str]

OF_MATMUL: dict[str, Case] = {
    "a list for a": (
        matmul([[1.0]], A), TypeError, "matmul: a is of type list; it must be an array"),
    "no b": (matmul(A, None), TypeError, "matmul: b is of type NoneType; it must be"),
    "an array of words": (
        matmul(WORDS, A), TypeError, "matmul: a is of dtype <U1; it must be of numbers"),
    "an array of keys": (
        lambda: jaxgemm.matmul(A, keys()), TypeError,
        "matmul: b is of dtype key<fry>; it must be of numbers"),
    "k of two matrices": (
        matmul(ones(2, 3), ones(4, 5)), TypeError,
        r"matmul: a has shape \(2, 3\) and b \(4, 5\); k is the last dimension of a, 3,"
        " and the last but one of b, 4"),
    "k of two vectors": (
        matmul(ones(3), ones(4)), TypeError,
        r"a has shape \(3,\) and b \(4,\); k is the last dimension of a, 3, and the only"
        " of b, 4"),
    "batches": (
        matmul(batched(2), batched(3)), ValueError,
        r"a has shape \(2, 4, 4\) and b \(3, 4, 4\); their batches do not broadcast"),
    "a scalar": (
        matmul(1.0, A), ValueError, r"a has shape \(\) and b \(8, 16\); neither may"),
    "no dtype": (
        matmul(A, B, preferred_element_type="float33"), TypeError,
        "preferred_element_type='float33' is no dtype"),
    "a dtype of objects": (
        matmul(A, B, preferred_element_type=object), TypeError,
        "preferred_element_type=.*object.* is no dtype of numbers"),
    "precision": (
        matmul(A, B, precision="exact"), ValueError, "(?s)Precision argument.*exact"),
    "three precisions": (
        matmul(A, B, precision=("high",) * 3), ValueError, "(?s)Precision argument"),
    "sharding": (
        matmul(A, B, out_sharding="x"), TypeError, "`out_sharding` argument of matmul"),
    "no such kernel": (
        matmul(A, B, implementation="fast"), ValueError,
        "implementation 'fast' is unknown; it is None or one of 'blocked'"),
    "a list of kernels": (
        matmul(A, B, implementation=["xla"]), ValueError,
        r"implementation \['xla'\] is unknown"),
    "a dict for a config": (
        matmul(A, B, config={"tile_m": 64}), ValueError,
        "config {'tile_m': 64} is not a config of any kernel: those are in pallas"),
    "a number for a config": (
        matmul(A, B, config=3), ValueError, "config 3 is not a config of any kernel"),
    "no common dtype": (
        matmul(A, B.astype(jnp.float8_e4m3fn)), ValueError,
        "matmul: a is float32 and b float8_e4m3fn, which JAX promotes to no common"),
    "gemm: no common dtype": (
        gemm(A, B.astype(jnp.float8_e4m3fn)), ValueError,
        "gemm: a is float32 and b float8_e4m3fn"),
    "gemm: an endless alpha": (
        gemm(A, B, alpha=10**400), ValueError,
        "gemm: alpha is an integer beyond float64"),
    "einsum: a kernel that is none, and no product": (
        einsum("ij->ji", A, implementation="fast"), ValueError,
        "implementation 'fast' is unknown"),
    "another kernel's config": (
        matmul(A, B, implementation="direct", config=BlockedConfig()), ValueError,
        "config BlockedConfig.* is not a config of implementation 'direct'"),
    "a float for a size": (
        matmul(A, B, config=BlockedConfig(tile_m=128.0)), TypeError,
        "config BlockedConfig.*: tile_m is 128.0, which is no int"),
    "a bool for a size": (
        matmul(A, B, config=BlockedConfig(promote=True)), TypeError,
        "promote is True, which is no int"),
    "no such dimension to share out": (
        matmul(A, B, config=PersistentConfig(wg_dim="k")), TypeError,
        r"wg_dim is 'k', which is no m\|n\|tile"),
    "an int for a bool": (
        matmul(A, B, config=PersistentConfig(swap=1)), TypeError,
        "swap is 1, which is no bool"),
}

OF_KERNELS: dict[str, Case] = {  # Named, for a GPU that runs them.
    "dtype": (
        matmul(*INTS, implementation="persistent"), ValueError,
        "'persistent' cannot serve: lhs and rhs are int32: the kernels take bfloat16"),
    "result": (
        matmul(HALF, HALF, implementation="blocked", preferred_element_type="int32"),
        ValueError, "'blocked' cannot serve: the result is int32: the kernels store"),
    "precision": (
        matmul(A, B, implementation="persistent", precision="BF16_BF16_F32"), ValueError,
        "no kernel multiplies float32 operands at precision.*BF16_BF16_F32"),
    "precision of another kernel": (
        matmul(A, B, implementation="blocked", precision="highest"), ValueError,
        "'blocked' cannot serve 8x4x16 .*only persistent and split_k"),
    "operands of two dtypes": (
        functools.partial(
            jaxgemm.dot_general, HALF, ones(64, 8), NUMBERS, implementation="persistent"
        ), ValueError, "lhs is bfloat16 and rhs float32: the kernels need operands of"),
    "tile": (
        matmul(HALF, HALF, config=BlockedConfig(tile_m=100)), ValueError,
        "'blocked' cannot serve 64x64x64 .*tile_m"),
    "a negative tile": (
        matmul(HALF, HALF, config=PersistentConfig(tile_m=-64)), ValueError,
        "tile_m=-64 over 2 warpgroups"),
    "stages": (
        matmul(HALF, HALF, config=PipelinedConfig(num_stages=0)), ValueError,
        "num_stages=0: a ring has at least 2"),
    "splits": (
        matmul(HALF, HALF, config=SplitKConfig(128, 128, splits=99)), ValueError,
        "k=64 is one k tile of 64: nothing can be split"),
    "grid": (
        matmul(HALF, HALF, config=PersistentConfig(128, 128, grid_width=0)), ValueError,
        "grid_width=0 must be at least 1"),
    "layers of 8 bits": (
        linear(
            VALUES, VALUES, config=PersistentConfig(), preferred_element_type="bfloat16"
        ), ValueError,
        "'persistent' cannot serve: layers of float8_e4m3fn operands are XLA's"),
    "scales": (
        scaled(VALUES, VALUES, implementation="split_k"), ValueError,
        "'split_k' cannot serve .*only persistent"),
}

OF_DOT_GENERAL: dict[str, Case] = {
    "a list": (
        lambda: jaxgemm.dot_general([1.0], B, NUMBERS), TypeError,
        "dot_general: lhs is of type list"),
    "sizes": (
        dot((((1,), (1,)), ((), ()))), TypeError,
        r"lhs has shape \(4, 5\) and rhs \(5, 6\) with .*: dimension 1 of lhs is 5,"
        " dimension 1 of rhs 6"),
    "no dimension of lhs": (
        dot((((2,), (0,)), ((), ()))), TypeError, "lhs has no such dimension as one of"),
    "a negative dimension": (
        dot((((1,), (-2,)), ((), ()))), TypeError, "rhs has no such dimension as one of"),
    "two to one": (
        dot((((1, 0), (0,)), ((), ()))), TypeError,
        "2 contracting dimensions in lhs, 1 in rhs"),
    "batch of one operand": (
        dot((((1,), (0,)), ((0,), ()))), TypeError, "1 batch dimensions in lhs, 0 in"),
    "contracted twice": (
        dot((((1, 1), (0, 0)), ((), ()))), TypeError, r"rhs appears twice in \(0, 0\)"),
    "contracted and of the batch": (
        dot((((1,), (0,)), ((1,), (0,)))), TypeError, "appears twice"),
    "no numbers": (
        dot(None), TypeError,
        r"dimension_numbers None must be \(\(lhs contracting, rhs contracting\)"),
    "one pair": (dot(((1,), (0,))), TypeError, "dimension_numbers .* each a sequence"),
    "a fraction": (
        dot((((0.5,), (0,)), ((), ()))), TypeError, "dimension_numbers .* of integers"),
}

OF_GEMM: dict[str, Case] = {
    "no c": (gemm(A, B, beta=1), ValueError, "gemm: beta is given, but c is not"),
    "shape of c": (
        gemm(A, B, ones(3, 4), beta=1), ValueError,
        r"gemm: c has shape \(3, 4\), which does not broadcast to \(8, 4\), that of the"
        " result"),
    "a vector": (
        gemm(ones(16), B), ValueError,
        r"a has shape \(16,\) and b \(16, 4\); both must be matrices"),
    "k": (gemm(A, A), TypeError, r"gemm: a has shape \(8, 16\) and b \(8, 16\); k is"),
    "words for alpha": (
        gemm(A, B, alpha="2"), TypeError, "gemm: alpha='2' must be a number or an array"),
    "no beta": (
        gemm(A, B, C, beta=None), TypeError, "gemm: beta=None must be a number or an"),
    "shape of alpha": (
        gemm(A, B, alpha=ones(3)), ValueError,
        r"gemm: alpha has shape \(3,\), which does not broadcast to \(8, 4\)"),
    "an alpha that enlarges": (
        gemm(A, B, alpha=ones(2, 8, 4)), ValueError, r"alpha has shape \(2, 8, 4\)"),
    "a complex alpha": (
        gemm(A, B, alpha=1j), TypeError,
        "gemm: alpha is complex, and the result float32: the imaginary part would be"),
    "a complex c": (
        gemm(A, B, ones(8, 4, dtype="complex64"), beta=1), TypeError,
        "gemm: c is complex, and the result float32"),
    "no dtype": (
        gemm(A, B, preferred_element_type="f33"), TypeError,
        "preferred_element_type='f33' is no dtype"),
}

OF_EINSUM: dict[str, Case] = {
    "k": (
        einsum("mk,kn->mn", A, ones(15, 4)), ValueError,
        r"label 'k' for operand 1 \(16\) does not match previous terms \(15\)"),
    "one operand of two": (
        einsum("mk,kn->mn", A), ValueError, "Number of einsum subscripts, 2, .*"),
    "rank": (
        einsum("mkl,kn->mn", A, B), ValueError, "'mkl' does not contain .* for"),
    "a label from nowhere": (
        einsum("mk,kn->mz", A, B), ValueError, "Output character 'z'"),
    "a list": (
        einsum("mk,kn->mn", A, [[1.0]]), TypeError, "got <class 'list'> at position 1"),
    "no such kernel": (
        einsum("mk,kn->mn", A, B, implementation="fast"), ValueError, "'fast' is"),
}

OF_LAYERS: dict[str, Case] = {
    "linear: k": (
        linear(A, ones(15, 4)), TypeError,
        r"linear: x has shape \(8, 16\) and w \(15, 4\); the last dimension of x must be"
        " k=15"),
    "linear: k of a transposed w": (
        linear(A, B, transposed=True), TypeError, "the last dimension of x must be k=4"),
    "linear: w": (
        linear(A, ones(16)), ValueError, r"w \(16,\); w must be a matrix"),
    "linear: x": (
        linear(np.float32(1), B), ValueError, r"x has shape \(\) .*, and x no scalar"),
    "linear: words": (linear("1", B), TypeError, "linear: x is of type str"),
    "linear: bias": (
        linear(A, B, ones(5)), TypeError,
        r"linear: bias has shape \(5,\), and w has n=4 columns"),
    "linear: a complex bias": (
        linear(A, B, ones(4, dtype="complex64")), TypeError,
        "linear: bias is complex, and the result float32"),
    "linear: residual": (
        linear(A, B, residual=ones(7, 4)), ValueError,
        r"residual has shape \(7, 4\), which does not broadcast to \(8, 4\)"),
    "linear: activation": (
        linear(A, B, activation="swish"), ValueError,
        "linear: activation 'swish' is neither a callable nor one of relu"),
    "linear: a list of activations": (
        linear(A, B, activation=["relu"]), ValueError,
        r"linear: activation \['relu'\] does not hash"),
    "linear: an activation that sums": (
        linear(A, B, activation=jnp.sum), ValueError,
        r"activation .* of a float32 array \[2, 3\] gives .*: it must be floating point,"
        " element by element"),
    "linear: an activation of rows": (
        linear(A, B, activation=jax.nn.softmax), ValueError,
        "activation .* is not computed element by element: it has reduce_max"),
    "linear: an activation of all": (
        linear(A, B, activation=lambda z: z - z.max()), ValueError,
        "is not computed element by element: it has reduce_max"),
    "linear: an activation that sorts": (
        linear(A, B, activation=jnp.sort), ValueError, "by element: it has sort"),
    "linear: an activation that turns about": (
        linear(A, B, activation=jnp.flip), ValueError, "by element: it has rev"),
    "linear: an activation of columns": (
        linear(A, B, activation=lambda z: z * np.arange(3.0, dtype="float32")),
        ValueError, "is not computed element by element"),
    "linear: an activation of no argument": (
        linear(A, B, activation=lambda: 0), ValueError,
        "activation .* of a float32 array raises TypeError: .* 0 positional"),
    "linear: save": (
        linear(A, B, save="all"), ValueError,
        "linear: save='all' must be one of preactivation, nothing"),
    "linear: words for scale": (
        linear(A, B, scale="2"), TypeError, "linear: scale='2' must be a number or an"),
    "linear: a scale of columns of x": (
        linear(A, B, scale=ones(16)), ValueError,
        r"scale has shape \(16,\), which does not broadcast to \(8, 1\), that of x with"
        " one column"),
    "linear: a complex scale": (
        linear(A, B, scale=1j), TypeError, "linear: scale is complex, and x float32"),
    "linear: a kernel that is not here": (
        linear(A, B, implementation="persistent"), ValueError,
        "'persistent' cannot run: .*Hopper"),
    "linear: norm": (
        linear(A, B, norm=ones(16)), TypeError,
        "linear: norm is a ndarray, and no jaxgemm.RMSNorm"),
    "linear: weights of the norm": (
        linear(A, B, norm=RMSNorm(ones(8))), TypeError,
        r"linear: norm.weights has shape \(8,\), and x \(8, 16\): .* \[16\]"),
    "linear: complex weights of the norm": (
        linear(A, B, norm=RMSNorm(1j * ones(16))), TypeError,
        "linear: norm.weights is complex"),
    "linear: returns_x": (
        linear(A, B, returns_x=True), ValueError,
        "linear: returns_x is for layers with a norm"),
    "gated_linear: eps": (
        gated(A, B, B, norm=RMSNorm(ones(16), 0)), ValueError,
        "gated_linear: norm.eps=0 must be a number above 0"),
    "mlp: weights of the norm": (
        mlp(A, B, B.T, norm=RMSNorm(ones(8))), TypeError, "mlp: norm.weights has shape"),
    "gated_mlp: norm": (
        gated_mlp(A, B, B, B.T, norm="rms"), TypeError, "gated_mlp: norm is a str"),
    "RMSNorm: a scalar": (
        lambda: RMSNorm(ones(1))(np.float32(1)), ValueError, "RMSNorm: x is a scalar"),
    "RMSNorm: weights": (
        lambda: RMSNorm(ones(8))(A), TypeError, "RMSNorm: norm.weights has shape"),
    "gated_linear: w_up": (
        gated(A, B, ones(16, 5)), TypeError,
        r"w_gate has shape \(16, 4\) and w_up \(16, 5\); they must be the same"),
    "gated_linear: one bias": (
        gated(A, B, B, bias_gate=BIAS), ValueError, "bias_gate and bias_up are given"),
    "gated_linear: bias": (
        gated(A, B, B, bias_gate=ones(5), bias_up=BIAS), TypeError,
        r"bias_gate has shape \(5,\), and w has n=4 columns"),
    "gated_linear: packed": (
        gated(A, B, packed="mixed"), ValueError,
        "packed='mixed' must be one of concatenated, interleaved"),
    "gated_linear: packed of two": (
        gated(A, B, B, packed="mixed"), ValueError, "packed='mixed' must be one of"),
    "gated_linear: odd columns": (
        gated(A, ones(16, 5)), TypeError, r"w_gate has shape \(16, 5\); .* holds two"),
    "gated_linear: activation": (
        gated(A, B, B, activation="swish"), ValueError, "gated_linear: activation"),
    "mlp: w_up": (
        mlp(A, ones(15, 4), B), TypeError, "mlp: x has .* must be k=15"),
    "mlp: w_down": (
        mlp(A, B, ones(5, 16)), TypeError,
        r"mlp: w_up has shape \(16, 4\), for 4 hidden, and w_down \(5, 16\): its first"),
    "mlp: bias_up": (
        mlp(A, B, B.T, ones(5)), TypeError, r"mlp: bias_up has shape \(5,\)"),
    "mlp: bias_down": (
        mlp(A, B, B.T, None, ones(5)), TypeError, r"mlp: bias_down has shape \(5,\)"),
    "mlp: activation": (
        mlp(A, B, B.T, activation="swish"), ValueError, "mlp: activation 'swish'"),
    "gated_mlp: shapes": (
        gated_mlp(A, B, ones(16, 5), B.T), TypeError,
        r"the shapes of w_gate \(16, 4\) and w_up \(16, 5\) must be the same"),
    "gated_mlp: one bias": (
        gated_mlp(A, B, B, B.T, bias_up=BIAS), ValueError,
        "gated_mlp: bias_gate and bias_up are given both or not at all"),
    "gated_mlp: residual": (
        gated_mlp(A, B, B, B.T, residual=ones(7, 16)), ValueError, "gated_mlp: residual"),
    "linear_cross_entropy: labels": (
        losses(A, B, ones(8)), TypeError, "labels are float32; they must be integers"),
    "linear_cross_entropy: shape of labels": (
        losses(A, B, LABELS[:7]), TypeError,
        r"labels have shape \(7,\) and x \(8, 16\): each row of x has one"),
    "linear_cross_entropy: k": (
        losses(A, ones(9, 4), LABELS), TypeError,
        r"linear_cross_entropy: x has shape \(8, 16\) and w \(9, 4\); .* k=9"),
    "linear_cross_entropy: w": (
        losses(A, ones(16), LABELS), ValueError, "linear_cross_entropy: .* must be a"),
    "linear_cross_entropy: x": (
        losses(np.float32(1), B, 0), ValueError, "linear_cross_entropy: .* x no scalar"),
    "linear_cross_entropy: bias": (
        losses(A, B, LABELS, ones(9)), TypeError,
        r"linear_cross_entropy: bias has shape \(9,\), and w has n=4 columns"),
    "linear_cross_entropy: logits of integers": (
        losses(A, B, LABELS, preferred_element_type="int32"), TypeError,
        "the logits are int32; they must be floating point"),
    "linear_cross_entropy: scale": (
        losses(A, B, LABELS, scale=ones(3)), ValueError,
        r"linear_cross_entropy: scale has shape \(3,\)"),
}

OF_8_BITS: dict[str, Case] = {
    "scaled_matmul: k": (
        scaled(VALUES, VALUES[:100]), TypeError,
        r"lhs has shape \(256, 256\) and rhs \(100, 256\); k, the last dimension of lhs"),
    "scaled_matmul: batches": (
        scaled(batched(2), batched(3)), TypeError, "or of the same batch"),
    "scaled_matmul: a list": (
        scaled([[1.0]], B), TypeError, "scaled_matmul: lhs is of type list"),
    "scaled_matmul: a vector": (
        scaled(VALUES[0], VALUES), ValueError, "both must be matrices or batches"),
    "scaled_matmul: integers": (
        scaled(VALUES, VALUES.astype("int8")), ValueError, "rhs is int8: want a"),
    "scaled_matmul: shape of a scale": (
        scaled(VALUES, VALUES, ones(3, 1)), ValueError,
        r"lhs_scale has shape \(3, 1\), its operand \(256, 256\): along each of the"),
    "scaled_matmul: a scale of k": (
        scaled(VALUES, VALUES, 1.0, ones(256, 1)), ValueError,
        r"rhs_scale has shape \(256, 1\): one for every element of k=256 cannot be"),
    "scaled_matmul: words for a scale": (
        scaled(VALUES, VALUES, "1"), TypeError, "scaled_matmul: lhs_scale is of type"),
    "scaled_matmul: a complex scale": (
        scaled(VALUES, VALUES, 1.0, 1j), TypeError, "rhs_scale is complex, and its"),
    "scaled_matmul: result": (
        scaled(VALUES, VALUES, preferred_element_type="int32"), ValueError,
        "preferred_element_type int32 must be one of float32"),
    "scaled_matmul: no result": (
        scaled(VALUES, VALUES, preferred_element_type=None), ValueError,
        "preferred_element_type None must be one of float32"),
    "scaled_matmul: dtype": (
        scaled(VALUES, VALUES, dtype="float9"), TypeError, "dtype='float9' is no dtype"),
    "scaled_matmul: cotangents": (
        scaled(VALUES, VALUES, cotangent_dtype="int8"), ValueError,
        "cotangent_dtype int8 must be one of None, float8_e4m3fn"),
    "quantise: a list": (quantise([[1.0]]), TypeError, "quantise: x is of type list"),
    "quantise: a vector": (
        quantise(BIAS), ValueError, r"quantise: x has shape \(4,\); it must be a matrix"),
    "quantise: integers": (
        quantise(INTS[0]), ValueError, "quantise: x is int32; it must be floating point"),
    "quantise: dtype": (
        quantise(A, "int8"), ValueError, "quantise: dtype int8 must be one of"),
    "quantise: no dtype": (
        quantise(A, "float9"), TypeError, "quantise: dtype='float9' is no dtype"),
    "quantise: block": (
        quantise(A, block=(2, 1)), ValueError, r"block \(2, 1\) must be two of 1, 128"),
    "quantise: one number for a block": (
        quantise(A, block=128), ValueError, "quantise: block 128 must be two of 1, 128"),
    "dequantise: a list": (
        dequantise([[1.0]], ones(1, 1)), TypeError, "dequantise: values is of type list"),
    "dequantise: a vector": (
        dequantise(BIAS, ones(1)), ValueError, r"dequantise: values have shape \(4,\)"),
    "dequantise: a scale of too few": (
        dequantise(VALUES, ones(1, 1, 1)), ValueError,
        r"dequantise: scale has shape \(1, 1, 1\), its operand \(256, 256\)"),
    "dequantise: shape of the scale": (  # One for every 128 would be two.
        dequantise(VALUES, ones(3, 1)), ValueError,
        r"dequantise: scale has shape \(3, 1\), its operand \(256, 256\): along each"),
    "dequantise: a number for the scale": (
        dequantise(VALUES, 1.0), ValueError, r"dequantise: scale has shape \(\)"),
    "dequantise: no dtype": (
        dequantise(VALUES, ones(1, 1), "float9"), TypeError,
        "dequantise: dtype='float9' is no dtype"),
}

OF_PLANS: dict[str, Case] = {
    "accelerate: an array": (
        lambda: jaxgemm.accelerate(A), TypeError,
        "accelerate: fun is of type .*; it must be a function"),
    "explain: a list": (
        explain([[1.0]], A), TypeError,
        "explain: a is of type list; it must be an array, or have a shape and a dtype"),
    "explain: a shape alone": (explain(A, (16, 4)), TypeError, "explain: b is of type"),
    "explain: keys": (
        lambda: jaxgemm.explain(keys(), A), TypeError, "explain: a is of dtype key<fry>"),
    "explain: one operand": (
        explain(A), TypeError, "explain: a product has two operands, not 1"),
    "explain: an option of a function": (
        explain(jnp.matmul, A, B, implementation="xla"), TypeError,
        "explain: implementation is that of a product, and a is a function"),
    "explain: k": (explain(A, A), TypeError, "explain: a has shape .* k is the last"),
    "explain: no such kernel": (
        explain(A, B, implementation="fast"), ValueError, "'fast' is unknown"),
    "autotune: no function": (
        tune("matmul"), TypeError, "autotune: fn='matmul' must be a function"),
    "autotune: no number": (
        tune(jaxgemm.matmul, A, B, max_candidates=0), ValueError,
        "autotune: max_candidates=0 must be a positive integer"),
    "autotune: words for a number": (
        tune(jaxgemm.matmul, A, B, max_candidates="3"), ValueError,
        "autotune: max_candidates='3' must be a positive integer"),
    "autotune: nothing that measures": (
        tune(jaxgemm.matmul, A, B, measure=3), TypeError,
        "autotune: measure=3 must be a function"),
    "autotune: an argument": (
        tune(jaxgemm.matmul, "a", B), TypeError, "(?s)<class 'str'>.*at path a"),
    "target: a device that is unknown": (
        lambda: jaxgemm.target("H3000"), ValueError,
        "unknown device 'H3000'; known devices: 'NVIDIA H200'"),
    "target: no device": (
        lambda: jaxgemm.target(None), ValueError, "unknown device None; known devices"),
    "target: a list": (
        lambda: jaxgemm.target(["NVIDIA H200"]), ValueError,
        r"unknown device \['NVIDIA H200'\]; known devices"),
    "emulate: a device that is unknown": (
        lambda: jaxgemm.emulate("H3000"), ValueError, "unknown device 'H3000'"),
    "checkpoint_policies: no such policy": (
        lambda: checkpoint_policies.all_saveable, AttributeError, "'all_saveable'"),
}


def _table() -> dict[str, Case]:
  found = OF_LAYERS | OF_8_BITS | OF_PLANS
  for function, cases in (
      ("matmul", OF_MATMUL), ("dot_general", OF_DOT_GENERAL), ("gemm", OF_GEMM),
      ("einsum", OF_EINSUM),
  ):
    found |= {f"{function}: {what}": case for what, case in cases.items()}
  found |= {
      f"kernels: {what}": (on_h200(call), error, message)
      for what, (call, error, message) in OF_KERNELS.items()
  }
  return found


TABLE = _table()


@pytest.mark.parametrize("name", TABLE)
def test_message(name):
  call, error, message = TABLE[name]
  if name == "linear: a kernel that is not here" and jax.default_backend() == "gpu":
    pytest.skip("a GPU may run it")
  with pytest.raises(error, match=message):
    call()


def test_the_table_has_every_public_function():
  public = {
      name for name, value in vars(jaxgemm).items()
      if inspect.isroutine(value) and not name.startswith("_")
  }
  # What only a batch-invariant product refuses: tests/test_invariance.py. Those of
  # groups of rows: tests/test_ragged_plans.py, tests/test_scaled_ragged.py.
  elsewhere = {"batch_invariant", "ragged_dot", "scaled_ragged_dot"}
  assert public - {name.split(":")[0] for name in TABLE} <= elsewhere


def test_a_function_that_hashes_once_is_checked_once():
  """Layers are traced often, and their activation is the same object each time."""
  def activation(x):
    calls.append(x.shape)
    return jnp.where(x > 0, x, 0.0)

  calls = []
  for _ in range(3):
    jax.make_jaxpr(lambda x: jaxgemm.linear(x, B, activation=activation))(A)
  assert calls.count((2, 3)) == 1


def test_arrays_without_elements_are_no_bad_input():
  for shape, block, wanted in (
      ((0, 4), (-1, -1), (1, 1)), ((4, 0), (1, -1), (4, 1)), ((4, 0), (1, 128), (4, 0)),
  ):
    values, scale = jaxgemm.quantise(ones(*shape), block=block)
    assert values.shape == shape and scale.shape == wanted
    assert jaxgemm.dequantise(values, scale).shape == shape
