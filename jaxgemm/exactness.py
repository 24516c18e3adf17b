"""Which configs form sums as exact as what they stand for: as XLA's own."""

from __future__ import annotations

from pallas_kernels import accumulate, parts, specialised, tiles
from pallas_kernels.configs import PersistentConfig
from pallas_kernels.problem import Problem

_SPLITS_K = 1 << 19  # Elements of a result: of fewer, cuBLAS splits k.
_LEAST_HALVES = 1 << 17  # Elements of a result from float16 parts.
# k tiles of 64 whose sum the tensor cores truncate by 1e-5: by no more than XLA's own
# BF16_BF16_F32_X3 is off in all (1.4e-5).
_MOST_TRUNCATED = 128
# The same of float8, whose sums the tensor cores keep in 14 bits.
_MOST_OF_FLOAT8 = 64


def is_as_exact(problem: Problem, config: PersistentConfig) -> bool:
  """Whether the sums of parts are as exact as XLA's float32 product.

  Sums that keep their rounding errors are off by 5e-8 (H200, normal and uniform data, k
  of 64 to 8192; split_lhs up to 1.2e-7 at 8192, as its smaller products stay in the
  tensor cores), others by 1.4e-7 and 1e-7 at k = 1024, 3.6e-7 and 2.2e-7 at 8192.
  float16 parts are off by 1.9e-7 at k = 4096, 2.4e-7 and 2.2e-7 at 8192.
  cuBLAS is off by 1.3e-8 to 1.8e-8 times the root of k, but where it has too few tiles
  for all SMs it splits k: then by 2.1e-7 and 0.7e-7 at 1024, 4.2e-7 and 1.0e-7 at 8192.
  """
  if problem.algorithm != "bf16_x6":
    return True
  rows, cols = specialised.wg_tile(config)
  k = tiles.cdiv(problem.k, getattr(config, "splits", 1))
  splits_k = problem.batch * problem.m * problem.n < _SPLITS_K
  if config.split_lhs:
    return k <= 8192 or not splits_k
  apart = accumulate.fits(3, (rows, cols))
  if config.float16_parts:
    if problem.k < 128 or problem.batch * problem.m * problem.n < _LEAST_HALVES:
      return False
    return k <= 4096 and apart if splits_k else k >= 512 or apart
  return apart or k <= 1024 or not splits_k


def promotion(problem: Problem, k_steps: int, *, split_lhs: bool = False) -> int:
  """The `promote` that keeps a sum of `k_steps` k tiles as exact as its result.

  Only a float32 result of 16-bit operands shows the tensor cores' truncation. A
  quarter of a short sum, or four tiles of a long one, truncate less than the
  float32 sum around them rounds.

  Sums of float8 are those of the tensor cores, as XLA's are; but not of groups, where
  XLA's are float32. To 1000 of k truncation has an error of 6e-4, of 8192 2e-3; rounding
  to bfloat16 1.7e-3, to float16 2.8e-4.
  """
  if parts.is_split(problem):
    if split_lhs:  # 64 of k. An odd tile left over cost 10% of products of 43 and 75.
      return 1 + (k_steps % 2 == 0)
    return int(problem.algorithm != "bf16_x3" or k_steps > _MOST_TRUNCATED)
  if problem.epilogue.scaling == "blocks":
    return 1
  if problem.out_dtype == "float32" and problem.dtype != "float32":
    return max(1, min(4, k_steps // 4))
  if problem.grouped and problem.itemsize == 1 and problem.dtype != "int8":
    if problem.out_dtype == "float16":
      return 1
    return _MOST_OF_FLOAT8 // 4 if k_steps > _MOST_OF_FLOAT8 else 0
  return 0
