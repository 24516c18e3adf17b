"""From candidates to times: compile them all, check each, then time them in turn.

`measure` is what jaxgemm.autotune calls on a GPU. Another function of its form can
stand in for it: that is how the tests tune without one.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Sequence
import concurrent.futures
import dataclasses
import functools
import os
import zlib

import jax

from jaxgemm.autotune import timing
from jaxgemm.autotune.gate import Gate, Product
from jaxgemm.autotune.operands import Inputs, make_inputs, operand_types
from jaxgemm.autotune.programs import Choice, program
from jaxgemm.device import Device
from pallas_kernels.problem import Problem

_CHUNK = 192  # About so many programs are compiled before the first is timed.
_MAX_THREADS = 16
_REPEATS = 20


@dataclasses.dataclass(frozen=True)
class Job:
  """A problem and what to measure of it, XLA the first."""

  problem: Problem
  choices: tuple[Choice, ...]


@dataclasses.dataclass(frozen=True)
class Measurement:
  """The times of one choice, or why there are none.

  Attributes:
    times_us: one for each timed call; empty if it failed.
    failure: what failed, in words; None where there are times.
  """

  times_us: tuple[float, ...] = ()
  failure: str | None = None


Measure = Callable[[Sequence[Job], Device], Iterator[Sequence[Measurement]]]
_Frame = tuple[Callable[[jax.Array], Inputs], Gate]


def measure(
    jobs: Sequence[Job], device: Device, *,
    timer: Callable[..., dict[int, list[float]]] = timing.interleaved,
) -> Iterator[list[Measurement]]:
  """Yields the measurements of each job, in the order of its choices.

  A choice that does not compile, run, or pass the gate fails; the others go on. All
  of a job fail if its operands do not fit beside what already lies on the device.

  Args:
    jobs: problems with their choices, of which the first is XLA, the baseline.
    device: the device at hand, for the size of its L2.
    timer: as timing.interleaved, for where there is no GPU to time.
  """
  remaining = collections.deque(jobs)
  while remaining:
    chunk, programs = [], 0
    while remaining and programs < _CHUNK:
      chunk.append(remaining.popleft())
      programs += len(chunk[-1].choices)
    prepared = collections.deque(_prepare(chunk))
    while prepared:  # What has run is let go, with its programs.
      yield _run(prepared.popleft(), device, timer)


@dataclasses.dataclass(frozen=True)
class _Prepared:
  """A job with all that it runs, compiled; an exception is what did not compile.

  Attributes:
    seed: of its operands.
    frame: what makes the operands, and what checks the results.
    programs: one for each choice.
  """

  seed: int
  frame: _Frame | Exception
  programs: list[Product | Exception]


def _prepare(jobs: Sequence[Job]) -> list[_Prepared]:
  """Compiles everything of all jobs; threads shorten the wait.

  XLA's own products compile one at a time: XLA times its alternatives on the GPU as
  it compiles, and two at once could mislead it.
  """
  threads = min(_MAX_THREADS, os.cpu_count() or 1)
  with concurrent.futures.ThreadPoolExecutor(threads) as pool:
    pending = []
    for job in jobs:
      # The seed depends on the problem, not on its place among the jobs.
      seed = zlib.crc32(str(job.problem).encode())
      frame = pool.submit(_frame, job.problem, seed)
      programs = []
      for choice in job.choices:
        try:
          compile_it = _lower(job.problem, choice).compile
          if choice.kernel != "xla":
            compile_it = pool.submit(compile_it).result
        except Exception as error:
          compile_it = functools.partial(_raise, error)
        programs.append(compile_it)
      pending.append((seed, frame, programs))
    # XLA's compile where they are called here; the others are only waited for.
    return [
        _Prepared(seed, _result(frame.result), [_result(one) for one in programs])
        for seed, frame, programs in pending
    ]


def _lower(problem: Problem, choice: Choice) -> jax.stages.Lowered:
  return jax.jit(program(problem, choice)).lower(*operand_types(problem))


def _frame(problem: Problem, seed: int) -> _Frame:
  inputs = make_inputs(problem).lower(jax.random.key(seed)).compile()
  return inputs, Gate(problem, seed)


def _result[T](compile_it: Callable[[], T]) -> T | Exception:
  try:
    return compile_it()
  except Exception as error:  # Whatever a kernel that is wrong raises is its failure.
    return error


def _raise(error: Exception) -> Product:
  raise error


def _run(one: _Prepared, device: Device, timer) -> list[Measurement]:
  """Returns the measurements of one job: the gate first, then the times."""
  try:
    if isinstance(one.frame, Exception):
      raise one.frame
    make_set, gate = one.frame
    key = jax.random.key(one.seed)
    inputs = make_set(key)
    failures = _check(gate, one.programs, inputs)
    if failures[0] is not None:
      raise RuntimeError(f"XLA's product: {failures[0]}")
    passed = {
        i: one.programs[i] for i, failure in enumerate(failures) if failure is None
    }
    set_bytes = sum(operand.nbytes for operand in inputs)
    num_sets = min(
        timing.num_input_sets(set_bytes, device.l2_bytes), _REPEATS * len(passed)
    )
    input_sets = [inputs] + [
        make_set(jax.random.fold_in(key, i)) for i in range(1, num_sets)
    ]
    times_us = timer(passed, input_sets, _REPEATS)
  except Exception as error:  # Out of memory, most likely, or no CUPTI.
    return [Measurement(failure=_reason(error))] * len(one.programs)
  return [
      Measurement(tuple(times_us.get(i, ())), failure)
      for i, failure in enumerate(failures)
  ]


def _check(
    gate: Gate, programs: list[Product | Exception], inputs: Inputs
) -> list[str | None]:
  """Returns why each program fails, XLA's first; None where it passes the gate."""
  failures: list[str | None] = []
  for index, compiled in enumerate(programs):
    check = gate.check if index else gate.set_baseline
    try:
      if isinstance(compiled, Exception):
        raise compiled
      failures.append(check(compiled, inputs).reason)
    except Exception as error:
      failures.append(_reason(error))
  return failures


def _reason(error: Exception) -> str:
  first_line = str(error).strip().partition("\n")[0]
  return f"{type(error).__name__}: {first_line}"
