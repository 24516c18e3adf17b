"""Timing: kernels of each call, inputs that rotate, turns, load."""

from __future__ import annotations

import itertools

from experiment_cases import MARK
import jax.numpy as jnp
from jax.profiler import ProfileData
import pytest

from experiments import timing
from jaxgemm.autotune import profile

pytestmark = pytest.mark.slow  # The other JAX version need not run them too.


def test_interleaved_sums_the_kernels_of_each_call(gpu):
  sets = [(jnp.full(2, i),) for i in range(3)]
  times_us = timing.interleaved(
      {
          "one": gpu.variant(("gemm", 0.5)),
          2: gpu.variant(("pad", 0.125), ("gemm", 0.25), ("reduce", 0.5)),
      },
      sets,
      4,
  )
  assert times_us == {
      "one": pytest.approx([500.0] * 4), 2: pytest.approx([875.0] * 4)
  }
  (session,) = gpu.sessions  # All the rounds.
  names = [name for name, _ in session if name not in MARK]
  one, other = ["gemm"], ["pad", "gemm", "reduce"]
  rounds = [names[i : i + 4] for i in range(0, 16, 4)]
  assert all(found in (one + other, other + one) for found in rounds)
  assert one + other in rounds and other + one in rounds  # Neither always leads.
  marks = [i for i, (name, _) in enumerate(session) if name == "mark"]
  assert len(marks) == 9 and marks[0] == 1 and marks[-1] == len(session) - 1


def test_a_kernel_named_like_one_of_the_mark(gpu):
  """Of the mark's kernels the last alone needs a name of its own."""
  times_us = timing.interleaved(
      {"one": gpu.variant(("gemm", 0.5), ("flush", 0.25))}, [(jnp.ones(1),)], 2
  )
  assert times_us == {"one": pytest.approx([750.0] * 2)}


def test_time_beside_an_earlier_kernel_counts_once(gpu):
  """Of a kernel that starts before the one before it ends, and waits for it."""
  early = gpu.variant(("gemm", 0.5, 3.0), ("reduce", 0.25, 100.0))
  sets = [(jnp.ones(1),)]
  variants = {"early": early, "late": gpu.variant(("gemm", 0.5))}
  times_us = timing.interleaved(variants, sets, 2)
  assert times_us["early"] == pytest.approx([750.0] * 2)
  assert times_us["late"] == pytest.approx([500.0] * 2)


def test_by_kernel(gpu):
  calls = []
  sets = [(jnp.full(2, i),) for i in range(2)]
  early = gpu.variant(("gemm", 0.5, 3.0), ("reduce", 0.25, 100.0), calls=calls)
  found = timing.by_kernel(early, sets, 3)
  assert [name for name, _ in found] == ["gemm", "reduce"]
  assert sum(time_us for _, time_us in found) == pytest.approx(750.0)
  assert [int(array[0]) for array in calls[-3:]] in ([0, 1, 0], [1, 0, 1])
  calls.clear()
  counts = itertools.cycle([1, 2])

  def uneven(array):
    for _ in range(next(counts)):
      gpu.launch("gemm", 0.5)
    return array

  with pytest.raises(RuntimeError, match="3 calls launched as many kernels as"):
    timing.by_kernel(uneven, sets, 3)


def test_exposed_time_of_kernels_in_any_position():
  def exposed(*spans):
    ran = [profile.Kernel(1e3 * start, 1e3 * end, "x", "") for start, end in spans]
    return list(profile.exposed_us(ran))

  assert exposed((5.0, 7.0), (8.0, 9.0)) == [2.0, 1.0]  # A gap counts for neither.
  assert exposed((0.0, 10.0), (4.0, 12.0)) == [10.0, 2.0]
  assert exposed((0.0, 10.0), (4.0, 6.0), (5.0, 11.0)) == [10.0, 0.0, 1.0]
  assert exposed() == []


PROFILE = """
planes {
  name: "/device:GPU:0"
  event_metadata { key: 1 value { id: 1 name: "second" } }
  event_metadata { key: 2 value { id: 2 name: "first" } }
  event_metadata { key: 3 value { id: 3 name: "MemcpyD2D" } }
  stat_metadata { key: 1 value { id: 1 name: "kernel_details" } }
  stat_metadata { key: 2 value { id: 2 name: "memcpy_details" } }
  lines {
    events { metadata_id: 1 offset_ps: 4000000 duration_ps: 1000000
      stats { metadata_id: 1 str_value: "regs:32" } }
    events { metadata_id: 3 offset_ps: 2000000 duration_ps: 1000000
      stats { metadata_id: 2 str_value: "size:8" } }
  }
  lines { events { metadata_id: 2 offset_ps: 1000000 duration_ps: 9000000
      stats { metadata_id: 1 str_value: "regs:40" } } }
}
"""


def test_kernels_of_a_profile():
  serialised = ProfileData.text_proto_to_serialized_xspace(PROFILE)
  found = profile.of_profile(ProfileData.from_serialized_xspace(serialised))
  assert sorted(found) == [
      profile.Kernel(1e3, 10e3, "first", "regs:40"),
      profile.Kernel(4e3, 5e3, "second", "regs:32"),
  ]


def test_a_profile_is_taken_of_what_runs():
  ran = []
  assert profile.kernels(lambda: ran.append(1)) == []  # None on a CPU.
  assert ran == [1]


def test_interleaved_rotates_the_inputs(gpu):
  calls = []
  sets = [(jnp.full(2, i),) for i in range(3)]
  variants = {name: gpu.variant((name, 1.0), calls=calls) for name in "ab"}
  timing.interleaved(variants, sets, 5)
  measured = [int(array[0]) for array in calls[-10:]]
  assert measured == list(itertools.islice(itertools.cycle(range(3)), 10))


def test_interleaved_burns_in(gpu):
  calls = []
  variants = {"a": gpu.variant(("a", 1.0), calls=calls)}
  timing.interleaved(variants, [(jnp.ones(1),)], 1)
  cold = len(calls)
  timing.interleaved(variants, [(jnp.ones(1),)], 1, burn_in_s=0.05)
  assert len(calls) > 2 * cold + 5
  assert [name for name, _ in gpu.sessions[-1]] == [*MARK, "a", *MARK]


def test_turns_last_until_clocks_settle(gpu):
  """A variant's calls follow each other, and the last quarter of them counts."""
  times_ms = []  # Of the calls of a turn, as clocks fall.

  def hot(array):
    if gpu.active:
      learnt = len(gpu.sessions) == 1
      if not learnt and not times_ms:
        times_ms.extend([10.0] * 30 + [15.0] * 10)
      gpu.launch("hot", 10.0 if learnt else times_ms.pop(0))
    return array

  calls = []
  variants = {"hot": hot, "slow": gpu.variant(("slow", 100.0), calls=calls)}
  times_us = timing.interleaved(variants, [(jnp.ones(1),)], 3, turn_s=0.4)
  assert times_us == {
      "hot": pytest.approx([15e3] * 3), "slow": pytest.approx([100e3] * 3)
  }
  names = [name for name, _ in gpu.sessions[-1]]
  assert names.count("hot") == 3 * 40 and names.count("slow") == 3 * 4
  turns = [(name, len(list(same))) for name, same in itertools.groupby(names)]
  assert {turn for turn in turns if turn[0] not in MARK} == {("hot", 40), ("slow", 4)}
  assert len(calls) == 2 + 4 + 3 * 4  # Learnt; one round to warm up; three.


def test_calls_of_a_turn_launch_alike(gpu):
  """Or their times cannot be told apart."""
  extra = iter([False, False, True, False, True, False])

  def fickle(array):
    gpu.launch("one", 200.0)
    if len(gpu.sessions) == 2 and next(extra):
      gpu.launch("another", 1.0)
    return array

  with pytest.raises(RuntimeError, match="2 calls of 'fickle' launched 3 kernels"):
    timing.interleaved({"fickle": fickle}, [(jnp.ones(1),)], 3, turn_s=0.4)


def test_interleaved_wants_kernels(gpu):
  with pytest.raises(RuntimeError, match="1 calls of 'idle' launched 0 kernels"):
    timing.interleaved({"idle": gpu.variant()}, [(jnp.ones(1),)], 1)


def test_turns_that_the_profiler_lost(gpu, monkeypatch):
  variants = {"a": gpu.variant(("a", 1.0))}
  monkeypatch.setattr(profile, "kernels", lambda run: gpu.kernels(run)[:-3])
  with pytest.raises(RuntimeError, match="the profiler saw 1 turns of 2"):
    timing.interleaved(variants, [(jnp.ones(1),)], 2)


def test_nothing_to_time_without_a_gpu():
  with pytest.raises(RuntimeError, match="saw no kernel"):
    timing.interleaved({"a": jnp.negative}, [(jnp.ones(1),)], 1)


@pytest.mark.parametrize(
    "set_bytes, sets",
    [(1 << 10, 256), (4 << 20, 60), (100 << 20, 3), (8 << 30, 2), (40 << 30, 1)],
)
def test_num_input_sets(set_bytes, sets):
  assert timing.num_input_sets(set_bytes, 60 << 20) == sets


def test_spread():
  assert timing.spread([1.0, 2.0, 3.0, 4.0, 100.0]) == 1.0
