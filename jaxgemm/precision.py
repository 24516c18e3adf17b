"""Which algorithm of the kernels computes a product as exactly as it was asked for.

A kernel's result must be at least as accurate as XLA's for the same `precision`;
where no algorithm is, or where no kernel takes the dtypes, the answer is a reason.
"""

from __future__ import annotations

import functools
from typing import Any

from jax import lax
import jax.numpy as jnp

from pallas_kernels.problem import ALGORITHM_OF_DTYPE, ALGORITHMS, OUT_DTYPES

_PRESETS = {
    "bf16_f32": lax.DotAlgorithmPreset.BF16_BF16_F32,
    "f16_f32": lax.DotAlgorithmPreset.F16_F16_F32,
    "tf32_f32": lax.DotAlgorithmPreset.TF32_TF32_F32,
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
  if lhs_dtype not in ALGORITHM_OF_DTYPE:
    return None, (
        f"lhs and rhs are {lhs_dtype}: the kernels take {', '.join(ALGORITHM_OF_DTYPE)}"
    )
  if out_dtype not in OUT_DTYPES:
    return None, f"the result is {out_dtype}: the kernels store {', '.join(OUT_DTYPES)}"
  algorithm = ALGORITHM_OF_DTYPE[lhs_dtype]
  if not _is_exact_enough(algorithm, precision):
    return None, (
        f"precision {precision} asks of {lhs_dtype} operands what {algorithm} does not"
        " compute"
    )
  return algorithm, ""


def _is_exact_enough(algorithm: str, precision: Any) -> bool:
  if precision in (None, lax.DotAlgorithmPreset.DEFAULT, _PRESETS[algorithm]):
    return True
  if isinstance(precision, lax.DotAlgorithmPreset):
    return False
  if isinstance(precision, lax.DotAlgorithm):
    return algorithm != "tf32_f32" and precision == lax.DotAlgorithm(
        lhs_precision_type=jnp.dtype(ALGORITHMS[algorithm]),
        rhs_precision_type=jnp.dtype(ALGORITHMS[algorithm]),
        accumulation_type=jnp.dtype("float32"),
    )
  # lax.Precision speaks of how operands are rounded: 16-bit ones never are.
  return algorithm != "tf32_f32" or set(precision) == {lax.Precision.DEFAULT}
