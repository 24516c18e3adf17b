"""Which algorithm of the kernels computes a product as exactly as it was asked for.

A kernel's result must be at least as accurate as XLA's for the same `precision`;
where no algorithm is, or where no kernel takes the dtypes, the answer is a reason.

  algorithm  operands  products  error of one product  asked for as (float32 operands)
  bf16_f32   bfloat16  1         none
  f16_f32    float16   1         none
  e4m3_f32   float8    1         none; the tensor cores sum to 14 bits or so
  i8_i32     int8      1         none, nor of the sum, which wraps
  tf32_f32   float32   1         2**-10                default, TF32_TF32_F32
  bf16_x3    float32   3         2**-14                high, BF16_BF16_F32_X3
  bf16_x6    float32   6         2**-23                highest, F32_F32_F32,
                                                       BF16_BF16_F32_X6,
                                                       TF32_TF32_F32_X3
  bf16_x9    float32   9         none                  BF16_BF16_F32_X9

Where the plan says so, bf16_x6 is formed from three products of float16 parts
(`pallas_kernels.halves`). Those are off by 2**-21 at most (2**-20 where a guard has seen
that it does no harm), by 2**-24 on average: less than a sum of a hundred terms is
rounded by. The plan does so for sums of 128 terms and more. Where it chooses `gemv`, for
few rows, operands of 16 and 32 bits are multiplied as float32, without error, and summed
up as float32, whatever the algorithm.

The error is relative, at most, before the sum over k: that is rounded as a float32 sum
is, for float32 results and partial sums (`promote` of the configs); for 16-bit results
the tensor cores' truncated sum is exact enough. The last rounding is to the result.

What is not an ordinary number:

  exponents  bf16_x3, bf16_x6, bf16_x9: all of float32; tf32_f32: float32's, of which
             rounding may take the largest to inf; the others: those of their dtype
  overflow   a sum beyond float32, or beyond the result's dtype, is inf; what else
             products of parts do close to that, `pallas_kernels.parts` says
  subnormal  operands count in every algorithm but tf32_f32, which may take them for 0;
             results are rounded to them
  inf, nan   as in float32; but a nan whose mantissa begins with seven zeros, which no
             arithmetic gives, is inf where it is split in registers (`split_lhs`)
"""

from __future__ import annotations

import functools
from typing import Any

from jax import lax
import jax.numpy as jnp

from pallas_kernels.problem import ALGORITHM_OF_DTYPE, ALGORITHM_OF_EIGHT_BITS, OUT_DTYPES

_Preset = lax.DotAlgorithmPreset

# What is at least as accurate as XLA's product for the same preset. tf32_f32 has no
# lower parts: a kernel of three TF32 products would be slower than bf16_x6 is.
_OF_PRESET = {
    "bfloat16": {_Preset.BF16_BF16_F32: "bf16_f32"},
    "float16": {_Preset.F16_F16_F32: "f16_f32"},
    "float32": {
        _Preset.TF32_TF32_F32: "tf32_f32",
        _Preset.TF32_TF32_F32_X3: "bf16_x6",
        _Preset.BF16_BF16_F32_X3: "bf16_x3",
        _Preset.BF16_BF16_F32_X6: "bf16_x6",
        _Preset.BF16_BF16_F32_X9: "bf16_x9",
        _Preset.F32_F32_F32: "bf16_x6",
    },
}
_OF_PRECISION = {  # Of float32 operands; 16-bit ones are never rounded.
    lax.Precision.DEFAULT: "tf32_f32",
    lax.Precision.HIGH: "bf16_x3",
    lax.Precision.HIGHEST: "bf16_x6",
}
# Presets of which XLA's own result is less accurate than they promise: TF32's accuracy
# for nine products (JAX 0.11.2), 4e-6 at k = 4096 for six.
_XLA_MISSES = (_Preset.BF16_BF16_F32_X6, _Preset.BF16_BF16_F32_X9)

# What an algorithm computes, for `explain`: the error of a product of two elements,
# relative to it; sums over k are rounded as float32 sums are.
ERRORS = {
    "bf16_f32": "products of bfloat16 are exact",
    **dict.fromkeys(
        ("e4m3_f32", "e5m2_f32", "e4m3_e5m2_f32", "e5m2_e4m3_f32"),
        "products of 8-bit operands are exact, their sums those of the tensor cores",
    ),
    "i8_i32": "exact, in int32, which wraps",
    "f16_f32": "products of float16 are exact",
    "tf32_f32": "operands rounded to TF32: 2**-11 each",
    "bf16_x3": "three products of bfloat16 parts: 2**-14",
    "bf16_x6": "six products of bfloat16 parts: 2**-23, or three of float16: 2**-20",
    "bf16_x9": "nine products of bfloat16 parts: exact",
}


@functools.lru_cache(maxsize=4096)
def choose_algorithm(
    lhs_dtype: str, rhs_dtype: str, out_dtype: str, precision: Any
) -> tuple[str | None, str]:
  """The algorithm that serves these dtypes at this precision, or why none does.

  Args:
    lhs_dtype, rhs_dtype, out_dtype: dtypes by name.
    precision: canonical: None, a pair of lax.Precision, a DotAlgorithmPreset or a
      DotAlgorithm.
  Returns: (algorithm, "") or (None, the reason).
  """
  if lhs_dtype != rhs_dtype:
    return None, (
        f"lhs is {lhs_dtype} and rhs {rhs_dtype}: the kernels need operands of one"
        " dtype"
    )
  if lhs_dtype in ALGORITHM_OF_EIGHT_BITS:
    return _of_eight_bits(lhs_dtype, out_dtype, precision)
  if lhs_dtype not in ALGORITHM_OF_DTYPE:
    known = (*ALGORITHM_OF_DTYPE, *ALGORITHM_OF_EIGHT_BITS)
    return None, f"lhs and rhs are {lhs_dtype}: the kernels take {', '.join(known)}"
  if out_dtype not in OUT_DTYPES:
    return None, f"the result is {out_dtype}: the kernels store {', '.join(OUT_DTYPES)}"
  algorithm = _algorithm(lhs_dtype, precision)
  if algorithm is None:
    return None, f"no kernel multiplies {lhs_dtype} operands at precision {precision}"
  return algorithm, ""


def _of_eight_bits(
    dtype: str, out_dtype: str, precision: Any
) -> tuple[str | None, str]:
  """As `choose_algorithm`, for operands of 8 bits.

  XLA sums more exactly on the tensor cores where more than the default is asked for.
  """
  known = ("int32",) if dtype == "int8" else OUT_DTYPES
  if out_dtype not in known:
    return None, f"the result is {out_dtype}: of {dtype} the kernels store {known}"
  if precision not in (None, (lax.Precision.DEFAULT,) * 2) and dtype != "int8":
    return None, f"no kernel multiplies {dtype} operands at precision {precision}"
  return ALGORITHM_OF_EIGHT_BITS[dtype], ""


def _algorithm(dtype: str, precision: Any) -> str | None:
  if isinstance(precision, lax.DotAlgorithm):
    return _OF_PRESET[dtype].get(_preset(precision))
  if precision in (None, _Preset.DEFAULT):
    return ALGORITHM_OF_DTYPE[dtype]
  if isinstance(precision, _Preset):
    return _OF_PRESET[dtype].get(precision)
  if dtype != "float32":
    return ALGORITHM_OF_DTYPE[dtype]
  # As XLA does: the higher of the two counts for both.
  return _OF_PRECISION[max(precision, key=list(_OF_PRECISION).index)]


def _preset(algorithm: lax.DotAlgorithm) -> lax.DotAlgorithmPreset | None:
  """The preset that an algorithm spells out, if there is one of float32 sums."""
  lhs, rhs, accumulation = (
      jnp.dtype(dtype).name for dtype in (
          algorithm.lhs_precision_type, algorithm.rhs_precision_type,
          algorithm.accumulation_type,
      )
  )
  known = {
      ("bfloat16", 1): _Preset.BF16_BF16_F32,
      ("bfloat16", 3): _Preset.BF16_BF16_F32_X3,
      ("bfloat16", 6): _Preset.BF16_BF16_F32_X6,
      ("bfloat16", 9): _Preset.BF16_BF16_F32_X9,
      ("float16", 1): _Preset.F16_F16_F32,
      ("float32", 1): _Preset.F32_F32_F32,
  }
  if lhs != rhs or accumulation != "float32":
    return None
  return known.get((lhs, algorithm.num_primitive_operations))


def asked_for(algorithm: str) -> Any:
  """The precision with which XLA computes a product like that of `algorithm`.

  For nine products of parts that is float32: see `for_xla`.
  """
  if algorithm == "bf16_x3":
    return _Preset.BF16_BF16_F32_X3
  if algorithm in ("bf16_x6", "bf16_x9"):
    return (lax.Precision.HIGHEST,) * 2
  return (lax.Precision.DEFAULT,) * 2


def exchanged(precision: Any) -> Any:
  """The same for operands that have changed places."""
  if isinstance(precision, lax.DotAlgorithm):
    return precision._replace(
        lhs_precision_type=precision.rhs_precision_type,
        rhs_precision_type=precision.lhs_precision_type,
        lhs_component_count=precision.rhs_component_count,
        rhs_component_count=precision.lhs_component_count,
    )
  return precision[::-1] if isinstance(precision, tuple) else precision


def for_xla(precision: Any) -> Any:
  """What to ask of XLA on an NVIDIA GPU, so that it computes no less than was asked."""
  if isinstance(precision, lax.DotAlgorithm):
    asked = _preset(precision)
  else:
    asked = precision
  return (lax.Precision.HIGHEST,) * 2 if asked in _XLA_MISSES else precision
