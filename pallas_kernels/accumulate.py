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

Truncation goes towards zero, so that it takes the same share of every sum away, on
average. The sums of parts, whose other errors are smaller, get that back at their end.

Source: the promotion of DeepGEMM's FP8 kernels, and "DeepSeek-V3 technical
report" (2024), section 3.3.2.
"""

from __future__ import annotations

from collections.abc import Callable
import functools
import operator
from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import parts, tiles

Ref = Any
OTHER_REGISTERS = 32  # What a thread needs beside its sums.
MAX_ACC_REGISTERS = 232 - OTHER_REGISTERS
_LEAST_CORRECTED = 2.0**-100


def check(
    wg_tile_m: int, wg_tile_n: int, promote: int, registers: int = MAX_ACC_REGISTERS,
    *, num_accs: int = 1, in_blocks: bool = False,
) -> str | None:
  """Why a warpgroup cannot hold the sums of such a tile, or None.

  `in_blocks`: whether they are those of `sum_of_blocks`.
  """
  if promote < 0:
    return f"promote={promote} must be a number of k tiles, or 0"
  sums, what = 1, "an accumulator"
  if in_blocks:
    sums, what = 3, "two accumulators and a promoted sum"
  elif promote:
    sums, what = 2, "an accumulator and a promoted sum"
  elif num_accs > 1:
    # Two of 96 registers were slow: 8192^3 at bf16_x3 in 6.4 ms, 5.0 with two of 64.
    sums, what = 1.5 * num_accs, "an accumulator of each group of products"
  if sums * wg_tile_m * wg_tile_n // tiles.WG_THREADS > registers:
    return f"{what} of {wg_tile_m}x{wg_tile_n} a warpgroup exceeds its registers"
  return None


def fits(
    sums: int, shape: tuple[int, int], registers: int = MAX_ACC_REGISTERS
) -> bool:
  """Whether a warpgroup holds that many sums of a tile [rows, cols]."""
  return sums * shape[0] * shape[1] // tiles.WG_THREADS <= registers


def sum_over_k(
    multiply: Callable[[Ref, Any, Any], None], *, shape: tuple[int, int], k_steps: Any,
    promote: int, dtype: str = "float32",
):
  """Returns the sum [rows, cols] over `k_steps` k tiles, which may be traced.

  It is in registers.

  `multiply(acc, first, count)` adds the k tiles first .. first + count - 1 to the
  wgmma accumulator `acc`, of dtype `dtype`.
  """
  def part(first, count):
    return _registers(lambda acc: multiply(acc, first, count), shape, dtype)

  known = isinstance(k_steps, int)
  if not promote or known and promote >= k_steps:
    return part(jnp.int32(0), k_steps)
  rounds = k_steps // promote if known else lax.div(k_steps, jnp.int32(promote))
  rest = k_steps - rounds * promote
  total = lax.fori_loop(
      jnp.int32(0), jnp.int32(rounds),
      lambda i, total: total + part(i * promote, promote), zeros(shape, dtype),
  )
  if known and not rest:
    return total
  return total + part(jnp.int32(rounds * promote), rest)


def sum_of_blocks(
    begin: Callable[..., tuple[Any, Any, Any]], finish: Callable[[], None],
    apply: Callable[[Any, Any], Any], *, first: Any, shape: tuple[int, int], k_steps: int,
):
  """Returns the sum [rows, cols] over `k_steps` k tiles, the sums of each times factors.

  The tensor cores go on with the next k tile while the sums of one are added: two sets of
  registers take turns. So a turn of the loop has two k tiles, or ptxas would move what a
  turn hands on to other registers. It would also wait for each wgmma if some were in
  flight where others are waited for, as it does not follow that around a loop.

  `begin(place, is_first=)` returns the place of the next k tile (`first`: that of the
  first), the sums of this one, in flight until the next call or `finish`, and their
  factors; `apply(factors, sums)` multiplies them.
  """

  def add(total, sums, factors):
    return total + apply(factors, lax.optimization_barrier(sums))

  def go_on(carry):
    total, place, *last = carry
    following = begin(place, is_first=False)
    return add(total, *last), *following

  carry = lax.fori_loop(
      jnp.int32(0), jnp.int32((k_steps - 1) // 2), lambda _, carry: go_on(go_on(carry)),
      (zeros(shape), *begin(first, is_first=True)),
  )
  if k_steps % 2 == 0:
    carry = go_on(carry)
  finish()
  total, _, *last = carry
  return add(total, *last)


def sum_of_parts(
    multiply: Callable[[Ref, Any, int], None], *, first: Any,
    after: Callable[[Any], Any], shape: tuple[int, int], k_steps: int, of: parts.Parts,
    lost: float,
):
  """Returns the sum [rows, cols] over `k_steps` k tiles and all groups of products.

  `multiply(acc, slot, index)` adds the products of group `index` to the wgmma
  accumulator `acc`. The k tiles are in the slots `first`, `after(first)`, and so on.
  Where registers allow it, the smaller groups have a sum of their own, to which goes
  what the rounding of the other takes away: the error then does not grow with k. `lost`
  is the share of the sum that truncation takes away.
  """
  apart = fits(3, shape)

  def add(_, carry):
    slot, total, rest = carry
    for index, group in enumerate(of.groups):
      found = _registers(lambda acc, index=index: multiply(acc, slot, index), shape)
      if group is of.groups[-1]:
        if apart:
          total, rest = two_sum(total, rest, found)
        else:
          total = total + found
      elif apart:
        rest = rest + found * jnp.float32(group.scale)
      else:
        total = total + _smaller(found, of) * jnp.float32(group.scale)
    return after(slot), total, rest

  start = first, zeros(shape), zeros(shape) if apart else jnp.float32(0.0)
  _, total, rest = lax.fori_loop(jnp.int32(0), jnp.int32(k_steps), add, start)
  found = _given_back(total, lost)
  return total + finite(rest + found if apart else found)


def sum_of_groups(
    multiply: Callable[..., None], finish: Callable[[], None], *, first: Any,
    after: Callable[[Any], Any], shape: tuple[int, int], k_steps: int, of: parts.Parts,
    promote: int, lost: float, registers: int,
):
  """The same, while the tensor cores go on with the smaller products.

  Those are summed up in accumulators of their own until the end, the products of high
  high too, unless they are added to an ordinary sum after every `promote` k tiles. That
  keeps its rounding errors if `registers` of a thread hold them.

  `multiply(accs, groups, k_tile, slot, in_flight)` adds the products of groups to wgmma
  accumulators, and waits for all but those of the last `in_flight`; `finish` waits for
  these.
  """
  *smaller, largest = of.groups
  exact = fits(len(smaller) + 3, shape, registers)

  def scaled(accs):
    """Of the smaller products, the least first."""
    return [acc * jnp.float32(g.scale) for acc, g in zip(accs, smaller, strict=True)]

  def apart(*accs):
    def add(carry, k_tile, count):
      slot, *sums = carry

      def run(acc):
        place = slot
        for i in range(count):
          last = i == count - 1
          in_flight = len(smaller) if last else len(of.groups)
          multiply((acc, *accs), (largest, *smaller), k_tile + i, place, in_flight)
          place = after(place)
        # acc[...] would wait for the smaller products, too.
        found = plgpu.wgmma_accumulator_load(acc, wait_n=None)
        return place, lax.optimization_barrier(found)

      slot, found = pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))
      return slot, *(two_sum(*sums, found) if exact else (sums[0] + found,))

    rounds, rest = divmod(k_steps, promote)
    carry = lax.fori_loop(
        jnp.int32(0), jnp.int32(rounds),
        lambda i, carry: add(carry, i * promote, promote),
        (first, *(zeros(shape),) * (2 if exact else 1)),
    )
    if rest:
      carry = add(carry, jnp.int32(rounds * promote), rest)
    finish()
    _, *sums = carry
    (total, *rest), others = lax.optimization_barrier((sums, [acc[...] for acc in accs]))
    return total, scaled(others) + rest + [_given_back(total, lost)]

  if promote:
    accs = (plgpu.ACC(shape, jnp.float32) for _ in smaller)
    total, rest = pl.run_scoped(apart, *accs)
  else:
    *others, total = each_group(
        multiply, finish, first=first, after=after, shape=shape, k_steps=k_steps, of=of
    )
    rest = scaled(others)
  # Those first, so that the total is rounded once.
  return total + _smaller(functools.reduce(operator.add, rest), of)


def each_group(
    multiply: Callable[..., None], finish: Callable[[], None], *, first: Any,
    after: Callable[[Any], Any], shape: tuple[int, int], k_steps: int, of: parts.Parts,
) -> list:
  """The sum [rows, cols] of each group, by itself; arguments as of `sum_of_groups`."""

  def run(*accs):
    def add(k_tile, slot):
      multiply(accs, of.groups, k_tile, slot, len(accs))
      return after(slot)

    lax.fori_loop(jnp.int32(0), jnp.int32(k_steps), add, first)
    finish()
    return lax.optimization_barrier([acc[...] for acc in accs])

  return pl.run_scoped(run, *(plgpu.ACC(shape, jnp.float32) for _ in of.groups))


def two_sum(total, rest, x):
  """(total + x, rest + what the rounding of that takes away).

  Exactly so where x is no larger than the total (Dekker's fast two-sum).
  """
  larger = total + x
  return larger, rest + ((total - larger) + x)


def any_two_sum(total, rest, x):
  """The same, whichever is the larger (Knuth's two-sum)."""
  larger = total + x
  of_x = larger - total
  return larger, rest + ((total - (larger - of_x)) + (x - of_x))


def finite(sums):
  """The sums, or 0 where they are inf or nan."""
  return jnp.where((sums < jnp.inf) & (sums > -jnp.inf), sums, 0.0)


def _given_back(total, lost: float):
  """What truncation took of a sum.

  Nothing where that would be subnormal: rounded up there, it would be half a unit in the
  last place of the sum, which may be exact.
  """
  return jnp.where(jnp.abs(total) < _LEAST_CORRECTED, 0.0, total * jnp.float32(lost))


def _smaller(sums, of: parts.Parts):
  """Sums of smaller products, or 0 where operands made inf or nan of them."""
  return sums if of.scaled else finite(sums)


def _registers(
    multiply: Callable[[Ref], None], shape: tuple[int, int], dtype: str = "float32"
):
  """What `multiply` leaves in a wgmma accumulator that was zero."""

  def run(acc):
    multiply(acc)
    return lax.optimization_barrier(acc[...])

  return pl.run_scoped(run, plgpu.ACC(shape, jnp.dtype(dtype)))


def zeros(shape: tuple[int, int], dtype: str = "float32"):
  return plgpu.layout_cast(jnp.zeros(shape, jnp.dtype(dtype)), plgpu.Layout.WGMMA)
