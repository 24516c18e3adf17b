"""GPU kernel times through CUPTI: variants interleaved, inputs rotated.

The time of a call is what its kernels add to the time of those before them (see
`profile.exposed_us`), those that pad an operand or reduce partial sums included; launch
gaps, copies and memory sets are not in it.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
import functools
import itertools
import random
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxgemm.autotune import profile

_MIN_SETS = 3
_MAX_SETS = 256
_MAX_SETS_BYTES = 16 << 30
_MAX_RESULTS_BYTES = 16 << 30
_IN_FLIGHT = 16  # Calls of a turn, so that the GPU never waits for the host.
_MAX_CALLS = 10_000  # Of a turn.
_MARK_BYTES = 192 << 20  # That a mark reads: half as much again as the largest L2.


def num_input_sets(set_bytes: int, l2_bytes: int) -> int:
  """Returns how many input sets to rotate over so that none is still in the L2.

  The sets together hold four times the L2, and are at least three. Two caps
  apply: 256 sets, which costs little to make but leaves inputs of less than
  about 1 MB partly in the L2, and 16 GiB.
  """
  wanted = max(_MIN_SETS, -(-4 * l2_bytes // max(set_bytes, 1)))
  affordable = max(1, _MAX_SETS_BYTES // max(set_bytes, 1))
  return min(wanted, _MAX_SETS, affordable)


def spread(times_us: Sequence[float]) -> float:
  """Returns half the distance between the first and the third quartile."""
  first, third = np.percentile(times_us, [25, 75])
  return float(third - first) / 2


def interleaved[Name: Hashable](
    variants: Mapping[Name, Callable[..., Any]],
    input_sets: Sequence[tuple[Any, ...]],
    repeats: int,
    *,
    burn_in_s: float = 0.0,
    turn_s: float = 0.0,
) -> dict[Name, list[float]]:
  """Returns `repeats` times of each variant: of its kernels, in microseconds.

  Each round calls every variant once, so that a drift of the clocks meets all of
  them alike, in an order drawn anew (with a fixed seed): a chip at its power limit
  slows a kernel down for what the one before it has spent, and in a fixed order
  each variant would pay for always the same other one (2.5% for two kernels of
  40 us on an H200). Each call takes the next input set, so that none finds the
  inputs of the one before it in the L2. One profile covers all the rounds.

  Between turns runs a mark of XLA's kernels: it tells them apart, and is the same
  neighbour for all. It reads more than the L2 holds, so that no call pays for what the
  one before it has left there to be written to memory (2.3 of 16.5 us at 64x6144x4096 on
  an H200, in turns with XLA, which splits k and writes parts). Then follows a tiny
  kernel: what starts early starts beside that.

  Even so, variants that take turns by the call share their clocks, and one that needs
  more energy for the same work slows the others down as much as itself: alone it would
  be slower (5% on an H200, of tiles of 128x128 against 128x256). With `turn_s` a turn
  lasts until the clocks have settled, and each variant has those that it leaves itself.

  Args:
    variants: jitted or compiled functions of one input set, to arrays.
    input_sets: arguments to rotate over.
    repeats: calls of each variant.
    burn_in_s: seconds of the same interleaved load before the measured calls.
      0 measures a burst at the clocks of a cool chip; some tens of seconds
      measure the clocks that the chip sustains.
    turn_s: seconds of a turn, a few tenths; a time is then the mean of the last quarter
      of a turn's calls. 0: a turn is one call.

  Raises:
    RuntimeError: a variant launched no kernel, the calls of a turn did not launch as many
      as each other, or the profiler did not see all of them.
  """
  mark = _make_mark()
  draw = random.Random(0)
  rounds = [draw.sample(list(variants), len(variants)) for _ in range(repeats)]
  calls = dict.fromkeys(variants, 1)

  def session(rounds: Sequence[Sequence[Name]]) -> list[Any]:
    sets = itertools.cycle(input_sets)
    # The results of a round are kept while memory allows, so that a call does not
    # write to what the one before it has just written; the profiler waits for them.
    results: collections.deque[Any] = collections.deque()
    most = max(len(variants), _IN_FLIGHT if turn_s else 0)
    marks = [mark()]
    for name in itertools.chain.from_iterable(rounds):
      for _ in range(calls[name]):
        result = variants[name](*next(sets))
        results.append(result)
        num_bytes = sum(array.nbytes for array in jax.tree.leaves(result))
        if len(results) > min(most, max(1, _MAX_RESULTS_BYTES // max(num_bytes, 1))):
          first = results.popleft()
          if turn_s:
            jax.block_until_ready(first)
      marks.append(mark())
    return [*results, marks[-1]]

  def turns(rounds: Sequence[Sequence[Name]]) -> Iterator[tuple[Name, list[float]]]:
    """Yields each turn of a session: what each of its calls adds to the time."""
    names = list(itertools.chain.from_iterable(rounds))
    found = _between_marks(profile.kernels(lambda: session(rounds)))
    if len(found) != len(names):
      raise RuntimeError(f"the profiler saw {len(found)} turns of {len(names)}")
    for name, kernels in zip(names, found, strict=True):
      per_call, left = divmod(len(kernels), calls[name])
      if left or not per_call:
        raise RuntimeError(
            f"{calls[name]} calls of {name!r} launched {len(kernels)} kernels"
        )
      times_us = [time_us for _, time_us in kernels]
      yield name, [sum(call) for call in itertools.batched(times_us, per_call)]

  def burn_in() -> None:
    some = rounds[:1] if turn_s else rounds
    jax.block_until_ready(session(some))
    end = time.monotonic() + burn_in_s
    while time.monotonic() < end:
      jax.block_until_ready(session(some))

  if turn_s:
    jax.block_until_ready(session(rounds[:1]))
    times_s = {name: sum(turn) / 1e6 for name, turn in turns(rounds[:1])}
    calls = {
        name: max(1, min(_MAX_CALLS, int(turn_s / max(time_s, 1e-9))))
        for name, time_s in times_s.items()
    }
  burn_in()
  times_us: dict[Name, list[float]] = {name: [] for name in variants}
  for name, turn in turns(rounds):
    settled = turn[-max(1, len(turn) // 4) :]
    times_us[name].append(sum(settled) / len(settled))
  return times_us


def by_kernel(
    function: Callable[..., Any], input_sets: Sequence[tuple[Any, ...]], repeats: int
) -> list[tuple[str, float]]:
  """Returns the kernels of a call in their order: names, and medians in microseconds.

  Each call is timed as a turn of `interleaved`, with none between.

  Raises:
    RuntimeError: calls did not launch as many kernels as each other.
  """
  mark, sets = _make_mark(), itertools.cycle(input_sets)

  def session() -> list[Any]:
    results = [mark()]
    for _ in range(repeats):
      results = [function(*next(sets)), mark()]
    return results

  jax.block_until_ready(session())
  calls = _between_marks(profile.kernels(session))
  if len(calls) != repeats or len({len(call) for call in calls}) != 1:
    counts = [len(call) for call in calls]
    raise RuntimeError(f"{repeats} calls launched as many kernels as {counts}")
  return [
      (kernels[0][0], statistics.median(time_us for _, time_us in kernels))
      for kernels in zip(*calls, strict=True)
  ]


_largest = jax.jit(jnp.max)
_count_bits = jax.jit(jax.lax.population_count)  # As no product does.


def _make_mark() -> Callable[[], jax.Array]:
  """Returns what launches the kernels of a mark."""
  more_than_l2 = jnp.zeros(_MARK_BYTES // 4, jnp.uint32)
  return lambda: _count_bits(_largest(more_than_l2))


@functools.cache
def _mark_names() -> tuple[str, ...]:
  """Returns the names of those kernels, of which no other has the last one's."""
  mark = _make_mark()
  jax.block_until_ready(mark())
  names = tuple(kernel.name for kernel in profile.kernels(mark))
  if not names:
    raise RuntimeError("the profiler saw no kernel: nothing to time")
  return names


def _between_marks(ran: Sequence[profile.Kernel]) -> list[list[tuple[str, float]]]:
  """Returns the kernels of each turn between marks, and what each adds to the time."""
  *first, last = _mark_names()
  found: list[list[tuple[str, float]]] = [[]]
  for kernel, time_us in zip(ran, profile.exposed_us(ran), strict=True):
    found[-1].append((kernel.name, time_us))
    if kernel.name == last:
      del found[-1][len(found[-1]) - len(first) - 1 :]
      found.append([])
  return found[1:-1]
