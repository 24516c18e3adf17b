"""GPU kernel times through CUPTI: variants interleaved, inputs rotated.

The time of a call is the sum over every kernel that it launches, those that pad
an operand or reduce partial sums included; launch gaps, copies and memory sets
are not in it. jax.experimental.mosaic.gpu.profiler reads the times: its
`Cupti.measure` calls a function once to warm up, attaches CUPTI, calls it again
and returns the kernels of that second call in the order of their launch.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable, Mapping, Sequence
import itertools
import random
import time
from typing import Any

import jax
from jax.experimental.mosaic.gpu import profiler
import numpy as np

Kernels = list[tuple[str, float]]  # (kernel name, time in ms), in launch order

_MIN_SETS = 3
_MAX_SETS = 256
_MAX_SETS_BYTES = 16 << 30
_MAX_RESULTS_BYTES = 16 << 30
_IN_FLIGHT = 16  # Calls of a turn, so that the GPU never waits for the host.
_MAX_CALLS = 10_000  # Of a turn.


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
  inputs of the one before it in the L2. One CUPTI session covers all the rounds.

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
    RuntimeError: a call launched other kernels than its variant did at first,
      so that the times cannot be told apart.
  """
  # Which kernels belong to a variant is learnt from one call of it alone.
  kernel_names, calls = {}, {}
  for name, variant in variants.items():
    call = _once(variant, input_sets[0])
    learnt = _measure(call, call, detach=False)
    kernel_names[name] = [kernel for kernel, _ in learnt]
    time_s = sum(time_ms for _, time_ms in learnt) / 1e3
    calls[name] = max(1, min(_MAX_CALLS, int(turn_s / max(time_s, 1e-9))))

  draw = random.Random(0)
  rounds = [draw.sample(list(variants), len(variants)) for _ in range(repeats)]

  def session(rounds: Sequence[Sequence[Name]]) -> list[Any]:
    sets = itertools.cycle(input_sets)
    # The results of a round are kept while memory allows, so that a call does not
    # write to what the one before it has just written; the profiler waits for them.
    results: collections.deque[Any] = collections.deque()
    most = max(len(variants), _IN_FLIGHT if turn_s else 0)
    for name in itertools.chain.from_iterable(rounds):
      for _ in range(calls[name]):
        result = variants[name](*next(sets))
        results.append(result)
        num_bytes = sum(array.nbytes for array in jax.tree.leaves(result))
        if len(results) > min(most, max(1, _MAX_RESULTS_BYTES // max(num_bytes, 1))):
          first = results.popleft()
          if turn_s:
            jax.block_until_ready(first)
    return list(results)

  def burn_in() -> list[Any]:
    some = rounds[:1] if turn_s else rounds
    results = session(some)
    end = time.monotonic() + burn_in_s
    while time.monotonic() < end:
      results = jax.block_until_ready(session(some))
    return results

  kernels = collections.deque(
      _measure(burn_in, lambda: session(rounds), detach=True)
  )
  times_us: dict[Name, list[float]] = {name: [] for name in variants}
  for name in itertools.chain.from_iterable(rounds):
    turn = [_take(kernels, name, kernel_names[name]) for _ in range(calls[name])]
    settled = turn[-max(1, len(turn) // 4) :]
    times_us[name].append(sum(settled) / len(settled))
  if kernels:
    raise RuntimeError(f"{len(kernels)} kernels more than expected: {kernels[0][0]} ...")
  return times_us


class _Session(jax.stages.Wrapped):
  """Two functions in the form that `Cupti.measure` takes.

  It would jit a plain function; a stages.Wrapped it calls as it is: first
  to warm up, then for the measurement.
  """

  def __init__(self, warm_up: Callable[[], object], timed: Callable[[], object]):
    self._phases = iter((warm_up, timed))

  def __call__(self) -> object:
    return next(self._phases)()


def _measure(
    warm_up: Callable[[], object], timed: Callable[[], object], *, detach: bool
) -> Kernels:
  """Returns the kernels of `timed`; CUPTI stays attached unless told to detach."""
  cupti = profiler.Cupti(finalize=detach)
  _, kernels = cupti.measure(_Session(warm_up, timed), aggregate=False)()
  if kernels is None:
    raise RuntimeError("CUPTI saw no kernel: nothing to time")
  return kernels


def _once(
    variant: Callable[..., Any], arguments: tuple[Any, ...]
) -> Callable[[], Any]:
  return lambda: variant(*arguments)


def _take(
    kernels: collections.deque[tuple[str, float]], name: Hashable,
    expected: Sequence[str],
) -> float:
  """Takes the kernels of the next call, `expected`, and returns their microseconds.

  CUPTI tells of the kernel of a conditional branch after those of the next call: of
  each name the first counts. A kernel that is not there leaves too few for the last.
  """
  time_ms = 0.0
  for kernel in expected:
    index = next((i for i, (found, _) in enumerate(kernels) if found == kernel), None)
    if index is None:
      left = [found for found, _ in itertools.islice(kernels, len(expected))]
      raise RuntimeError(
          f"a call of {name!r} launched {left}, its first call {list(expected)}"
      )
    time_ms += kernels[index][1]
    del kernels[index]
  return 1e3 * time_ms
