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

from collections.abc import Callable, Sequence
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
    num_groups: int = 1,
) -> str | None:
  """Why a warpgroup cannot hold the sums of such a tile, or None."""
  if promote < 0:
    return f"promote={promote} must be a number of k tiles, or 0"
  sums, what = 1, "an accumulator"
  if promote:
    sums, what = 2, "an accumulator and a promoted sum"
  elif num_groups > 1:
    sums, what = num_groups, "an accumulator of each group of products"
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
  accumulator `acc`. Where registers allow it, the smaller groups have a sum of their
  own, to which goes what the rounding of the other takes away (Dekker's fast
  two-sum): the error then does not grow with k.
  """
  apart = 3 * shape[0] * shape[1] // WG_THREADS <= MAX_ACC_REGISTERS

  def add(k_tile, sums):
    total, rest = sums
    for index, group in enumerate(of.groups):
      found = _registers(lambda acc, index=index: multiply(acc, k_tile, index), shape)
      if group is of.groups[-1]:
        larger = total + found
        if apart:
          rest = rest + ((total - larger) + found)
        total = larger
      elif apart:
        rest = rest + found * jnp.float32(group.scale)
      else:
        total = total + _finite(found, of) * jnp.float32(group.scale)
    return total, rest

  start = _zeros(shape), _zeros(shape) if apart else jnp.float32(0.0)
  total, rest = lax.fori_loop(jnp.int32(0), jnp.int32(k_steps), add, start)
  return total + _finite(rest, of) if apart else total


def sum_of_groups(
    multiply: Callable[[Sequence[Ref]], None], *, shape: tuple[int, int], of: parts.Parts
):
  """Returns the sum [rows, cols] over all k tiles, each group's on the tensor cores.

  `multiply(accs)` adds all products to the wgmma accumulators of their groups.
  """

  def run(*accs):
    multiply(accs)
    return lax.optimization_barrier([acc[...] for acc in accs])

  *smaller, largest = pl.run_scoped(
      run, *(plgpu.ACC(shape, jnp.float32) for _ in of.groups)
  )
  for group, sums in zip(of.groups, smaller, strict=False):
    largest = largest + _finite(sums, of) * jnp.float32(group.scale)
  return largest


def _finite(sums, of: parts.Parts):
  """Sums of smaller products, or 0 where operands made inf or nan of them."""
  if of.scaled:
    return sums
  return jnp.where((sums < jnp.inf) & (sums > -jnp.inf), sums, 0.0)


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
