"""Timing: kernels of each call, inputs that rotate, turns, load."""

from __future__ import annotations

import collections
import itertools

import jax.numpy as jnp
import pytest

from experiments import (
  timing,
)
from jaxgemm.autotune.timing import _take as take


def test_interleaved_sums_the_kernels_of_each_call(cupti):
  sets = [(jnp.full(2, i),) for i in range(3)]
  times_us = timing.interleaved(
      {
          "one": cupti.variant(("gemm", 0.5)),
          2: cupti.variant(("pad", 0.125), ("gemm", 0.25), ("reduce", 0.5)),
      },
      sets,
      4,
  )
  assert times_us == {"one": [500.0] * 4, 2: [875.0] * 4}
  # One call of each to learn its kernels, then all the rounds in one session.
  assert [len(session) for session in cupti.sessions] == [1, 3, 16]
  names = [name for name, _ in cupti.sessions[-1]]
  one, other = ["gemm"], ["pad", "gemm", "reduce"]
  rounds = [names[i : i + 4] for i in range(0, 16, 4)]
  assert all(found in (one + other, other + one) for found in rounds)
  assert one + other in rounds and other + one in rounds  # Neither always leads.
  assert cupti.finalized


def test_interleaved_rotates_the_inputs(cupti):
  calls = []
  sets = [(jnp.full(2, i),) for i in range(3)]
  variants = {name: cupti.variant((name, 1.0), calls=calls) for name in "ab"}
  timing.interleaved(variants, sets, 5)
  measured = [int(array[0]) for array in calls[-10:]]
  assert measured == list(itertools.islice(itertools.cycle(range(3)), 10))


def test_interleaved_burns_in(cupti):
  calls = []
  variants = {"a": cupti.variant(("a", 1.0), calls=calls)}
  timing.interleaved(variants, [(jnp.ones(1),)], 1)
  cold = len(calls)
  timing.interleaved(variants, [(jnp.ones(1),)], 1, burn_in_s=0.05)
  assert len(calls) > 2 * cold + 5
  assert len(cupti.sessions[-1]) == 1


def test_turns_last_until_clocks_settle(cupti):
  """A variant's calls follow each other, and the last quarter of them counts."""
  times_ms = []  # Of the calls of a turn, as clocks fall.

  def hot(array):
    if cupti.active:
      learnt = len(cupti.sessions) == 1
      if not learnt and not times_ms:
        times_ms.extend([10.0] * 30 + [15.0] * 10)
      cupti.sessions[-1].append(("hot", 10.0 if learnt else times_ms.pop(0)))
    return array

  calls = []
  variants = {"hot": hot, "slow": cupti.variant(("slow", 100.0), calls=calls)}
  times_us = timing.interleaved(variants, [(jnp.ones(1),)], 3, turn_s=0.4)
  assert times_us == {"hot": [15e3] * 3, "slow": [100e3] * 3}
  names = [name for name, _ in cupti.sessions[-1]]
  assert names.count("hot") == 3 * 40 and names.count("slow") == 3 * 4
  for name, same in itertools.groupby(names):  # Two turns at once where a round ends.
    assert len(list(same)) in {"hot": (40, 80), "slow": (4, 8)}[name]
  assert len(calls) == 2 + 4 + 3 * 4  # Learnt; one round to warm up; three.


def test_interleaved_wants_the_same_kernels_in_every_call(cupti):
  names = iter("xyxxy")  # To warm up, to learn, to warm up, measured, measured.

  def fickle(array):
    name = next(names)
    if cupti.active:
      cupti.sessions[-1].append((name, 1.0))
    return array

  with pytest.raises(RuntimeError, match=r"launched \['x'\], its first call \['y'\]"):
    timing.interleaved({"fickle": fickle}, [(jnp.ones(1),)], 1)


def test_a_kernel_told_late_counts_where_it_was_launched():
  """As CUPTI tells of a conditional's branch: after the kernels of the next call."""
  kernels = collections.deque(
      [("split", 1.0), ("pad", 2.0), ("gemm", 4.0), ("gemm", 8.0), ("split", 16.0)]
  )
  assert take(kernels, "one", ["split", "gemm"]) == 5000.0
  assert take(kernels, 2, ["pad", "gemm"]) == 10000.0
  assert list(kernels) == [("split", 16.0)]
  with pytest.raises(RuntimeError, match=r"launched \[\], its first call"):
    take(kernels, "one", ["split", "gemm"])


def test_interleaved_wants_kernels(cupti):
  with pytest.raises(RuntimeError, match="no kernel"):
    timing.interleaved({"idle": cupti.variant()}, [(jnp.ones(1),)], 1)


@pytest.mark.parametrize(
    "set_bytes, sets",
    [(1 << 10, 256), (4 << 20, 60), (100 << 20, 3), (8 << 30, 2), (40 << 30, 1)],
)
def test_num_input_sets(set_bytes, sets):
  assert timing.num_input_sets(set_bytes, 60 << 20) == sets


def test_spread():
  assert timing.spread([1.0, 2.0, 3.0, 4.0, 100.0]) == 1.0
