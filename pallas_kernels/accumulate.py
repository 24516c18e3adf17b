"""The sum over k: on the tensor cores, or promoted into ordinary float32 sums.

wgmma truncates where it adds to its accumulator, once for every 16 or 8 of k, so
the error of a long sum grows with k: 4e-6 at k = 4096 (bfloat16, normal data),
where rounded float32 sums stay at 1e-7. A 16-bit result hides that; a float32
result shows it. With `promote` the accumulator is added to ordinary registers,
which round, every `promote` k tiles, and starts again from zero.

wgmma writes its registers while the warpgroup runs on. Nothing ties their readers
to the wait, so the compiler may move a conversion in front of it: with two k tiles
unrolled it did, and lost three of eight products. The accumulator therefore leaves
through an optimization barrier behind the wait.

Source: the promotion of DeepGEMM's FP8 kernels, and "DeepSeek-V3 technical
report" (2024), section 3.3.2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import parts

Ref = Any
OTHER_REGISTERS = 32  # What a thread needs beside its sums.
MAX_ACC_REGISTERS = 232 - OTHER_REGISTERS
WG_THREADS = 128


def check(
    wg_tile_m: int, wg_tile_n: int, promote: int, registers: int = MAX_ACC_REGISTERS,
) -> str | None:
  """Why a warpgroup cannot hold the sums of such a tile, or None."""
  if promote < 0:
    return f"promote={promote} must be a number of k tiles, or 0"
  sums, what = 1, "an accumulator"
  if promote:
    sums, what = 2, "an accumulator and a promoted sum"
  if sums * wg_tile_m * wg_tile_n // WG_THREADS > registers:
    return f"{what} of {wg_tile_m}x{wg_tile_n} a warpgroup exceeds its registers"
  return None


def sum_over_k(
    multiply: Callable[[Ref, Any, Any], None], *, shape: tuple[int, int], k_steps: int,
    promote: int, dtype: str = "float32",
):
  """Returns the sum [rows, cols] over `k_steps` k tiles, in registers.

  `multiply(acc, first, count)` adds the k tiles first .. first + count - 1 to the
  wgmma accumulator `acc`, of dtype `dtype`.
  """

  def part(first, count):
    return _registers(lambda acc: multiply(acc, first, count), shape, dtype)

  if not 0 < promote < k_steps:
    return part(jnp.int32(0), k_steps)
  rounds, rest = divmod(k_steps, promote)
  total = lax.fori_loop(
      jnp.int32(0), jnp.int32(rounds),
      lambda i, total: total + part(i * promote, promote), _zeros(shape, dtype),
  )
  return total + part(jnp.int32(rounds * promote), rest) if rest else total


def sum_of_parts(
    multiply: Callable[[Ref, Any, int], None], *, shape: tuple[int, int], k_steps: int,
    of: parts.Parts,
):
  """Returns the sum [rows, cols] over `k_steps` k tiles and all groups of products.

  `multiply(acc, k_tile, index)` adds the products of group `index` to the wgmma
  accumulator `acc`.
  """

  def add(k_tile, total):
    for index, group in enumerate(of.groups):
      sums = _registers(lambda acc, index=index: multiply(acc, k_tile, index), shape)
      if group is not of.groups[-1] and not of.scaled:
        sums = jnp.where((sums < jnp.inf) & (sums > -jnp.inf), sums, 0.0)
      total = total + sums * jnp.float32(group.scale)
    return total

  return lax.fori_loop(jnp.int32(0), jnp.int32(k_steps), add, _zeros(shape))


def _registers(
    multiply: Callable[[Ref], None], shape: tuple[int, int], dtype: str = "float32"
):
  """What `multiply` leaves in a wgmma accumulator that was zero."""

  def run(acc):
    multiply(acc)
    return lax.optimization_barrier(acc[...])

  return pl.run_scoped(run, plgpu.ACC(shape, jnp.dtype(dtype)))


def _zeros(shape: tuple[int, int], dtype: str = "float32"):
  return plgpu.layout_cast(jnp.zeros(shape, jnp.dtype(dtype)), plgpu.Layout.WGMMA)
