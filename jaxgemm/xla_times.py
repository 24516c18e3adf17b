"""The estimated time of XLA, where it may be faster than any kernel of ours.

Rules of thumb, from what autotuned XLA has been seen to do on an H200. Something is added
for what is not known of it.
"""

from __future__ import annotations

import math

from jaxgemm.cost_constants import MODEL
from jaxgemm.cost_model import soft_max
from jaxgemm.device import Device
from jaxgemm.operand_passes import misaligned
from jaxgemm.traffic import crooked
from pallas_kernels import parts, tiles
from pallas_kernels.problem import Problem

_SGEMM = 0.127  # cuBLAS's rate in float32 over the tensor cores' in TF32.
_FEW = 1536  # Results: ours split k among CTAs, which takes longer to add up.
_NO_PASS = "one kernel without a pass over the operands"


def estimate(problem: Problem, device: Device) -> tuple[float, str] | None:
  """(estimated time of XLA in us, why it may be faster), or None if it hardly is."""
  bytes_per_us = device.bandwidth_tbps * 1e6
  busy = problem.flops / (device.tflops(problem.dtype) * 1e6)
  memory = problem.num_bytes / bytes_per_us
  if problem.converts:
    return converting(problem, device), "it converts an operand within its kernel"
  if problem.m == problem.n == 1:
    found = 2.0 + 1.1 * memory, "sums of products, element by element"
  elif problem.algorithm == "bf16_x3":
    time = min(busy, 35.0) + soft_max(busy / 0.5, memory / 0.8)
    found = 4.0 + time, "its own three products"
  elif parts.is_split(problem):
    found = _as_exact_as_float32(problem, busy, memory)
  elif problem.dtype == "float32":
    found = _tf32(problem, busy, memory)
  elif problem.dtype == "int8":
    found = _int8(problem, busy, memory)
  elif problem.itemsize == 1:  # Measured: never faster.
    found = None
  else:
    found = _sixteen_bits(problem, busy, memory)
  if found is None:
    return None
  time, reason = found
  time = max(time, memory, busy)
  if problem.epilogue.is_fused:  # Another kernel.
    stored = problem.batch * problem.m * problem.n * problem.out_itemsize
    time += 1.0 + 2 * stored / bytes_per_us
  return time, reason


def converting(problem: Problem, device: Device) -> float:
  """The estimated time of XLA where it converts an operand within its own kernel.

  14336x4096 of int8, of float8, and 4096x4096 of float32 took 1.8, 1.7 and 1.2 times what
  the memory takes, of 16 rows; a row alone 3.1 times, of 28672x8192 1.6 times. From 512
  rows on the tensor cores reach 0.6 of their rate, of 64 half of that. Of eight rows
  14336x4096 of int8 stored along k took 1.4 times what the memory takes.
  """
  memory = problem.num_bytes / (device.bandwidth_tbps * 1e6)
  narrow = 1 in problem.stored_itemsizes
  rows = min(problem.m, problem.n)
  larger = problem.rhs_layout if problem.m < problem.n else problem.lhs_layout
  wanted = (1.0 if rows < 16 and larger == "k-major" else 1.6) if narrow else 0.9
  if rows == 1:
    return min(3.1 * memory, 4.0 + wanted * memory)
  busy = problem.flops / (device.tflops(problem.dtype) * 1e6)
  share = 0.6 if narrow and rows >= 256 else 0.3
  return 4.0 + soft_max(wanted * memory, busy / share)


def _as_exact_as_float32(
    problem: Problem, busy: float, memory: float
) -> tuple[float, str]:
  """cuBLAS, whose tiles have 128 x 128 elements, and makes no pass over operands."""
  if min(problem.m, problem.n) == 1:
    matrix = problem.rhs_layout if problem.m == 1 else problem.lhs_layout
    if matrix == "k-major":
      return 2.0 + 1.05 * memory, "one row or column, as fast as the memory"
    return _down_columns(problem, memory), "one row or column, sums down columns"
  rows, cols = (
      tiles.round_up(size, 128 if size > 64 else 32) for size in (problem.m, problem.n)
  )
  begin, rate = 4.0, 0.75 * _SGEMM
  if min(problem.m, problem.n) > 64:
    begin, rate = 4.0 + 0.012 * min(problem.k, 256), 0.95 * _SGEMM
  busy *= rows * cols / (problem.m * problem.n * rate)
  return begin + soft_max(busy, memory / 0.8), "no pass that splits the operands"


def _single_k_tile(problem: Problem, memory: float) -> float:
  """Off by 12% (root mean square of 106 products of k up to 64 whose inputs were in no
  cache, 1 to 70 us; by 15% of those that a fit to the other half had not seen).

  XLA now and then takes two or three times as long as for others like it. The first bytes
  of a result cost more than those that follow, and then more where rows begin within
  lines, the longer k is, or within 16 bytes.
  """
  row_bytes = problem.n * problem.out_itemsize
  stored = memory * problem.batch * problem.m * row_bytes / problem.num_bytes
  each = 0.0145 if misaligned(problem, 16) else 0.0063
  further = 1.14 + 0.0136 * problem.k * crooked(row_bytes, MODEL)
  further += 0.64 * (row_bytes % 16 > 0)
  begin = 1.21 + each * problem.k + min(13.0 * stored, 0.5)
  return begin + 1.03 * (memory - stored) + further * stored


def _down_columns(problem: Problem, memory: float) -> float:
  """One row times a matrix whose rows lie across k.

  Over soon, or after the memory's time. (4096 x 4096 takes twice that.)
  """
  begin = 0.8 + min(0.006 * problem.k, 2.5 + 4.0 * memory)
  return min(begin + memory, 8.0 + 0.94 * memory)


def _tf32(problem: Problem, busy: float, memory: float) -> tuple[float, str]:
  """XLA needs no pass over the operands where TMA takes them; TN is slow."""
  aligned = problem.k % 4 == 0 and problem.n % 4 == 0 and problem.m % 4 == 0
  rate = 0.9 if aligned else 0.3
  if problem.lhs_layout == "m-major" and problem.rhs_layout == "n-major":
    rate = min(rate, 0.65)
  time = 4.0 + soft_max(busy / rate, memory / 0.8)
  if min(problem.m, problem.n) == 1:
    time = min(time, _down_columns(problem, memory))
  return time, "TF32 without a pass over the operands"


def _int8(problem: Problem, busy: float, memory: float) -> tuple[float, str]:
  """A kernel of Triton's that reads any layout, at a low rate."""
  if min(problem.m, problem.n) == 1:
    return 1.0 + 1.1 * memory, "one row or column, as fast as the memory"
  return 3.0 + max(busy / 0.13, memory / 0.4), _NO_PASS


def _sixteen_bits(
    problem: Problem, busy: float, memory: float
) -> tuple[float, str] | None:
  """With one k tile XLA's kernel is over about as soon as ours.

  A few results of a long k took it 2.24 us (16x88x1024) to 3.84 (16x16x16384), but twice
  that where k is no multiple of 256.

  With strides that TMA refuses it loads operands as they are, which is slow where there
  is much to load, and else over before a pass has been launched.
  """
  if problem.k <= tiles.swizzle_elems(problem.dtype):
    return 1.1 * _single_k_tile(problem, memory), "one kernel of a single k tile"
  if not misaligned(problem, 16):
    few = problem.batch * problem.m * problem.n <= _FEW and min(problem.m, problem.n) > 1
    if not few or not 1024 <= problem.k <= 16384 or problem.k % 256:
      return None
    return 1.1 * (2.2 + 0.45 * math.log2(problem.k / 1024)), "few results of a long k"
  time = 1.1 * (3.6 + max(0.004 * problem.k, busy / 0.12, memory / 0.5))
  if min(problem.m, problem.n) == 1 and problem.k % 8:  # It pads k, in a pass.
    time = min(time, 0.5 + 3.0 * memory)
  elif min(problem.m, problem.n) == 1:
    time = min(time, 1.2 * _down_columns(problem, memory))
  return time, _NO_PASS
