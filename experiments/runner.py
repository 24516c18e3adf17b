"""From cases to rows: compile, check, then time.

A run that measures sustained speed loads the chip before the first case for as long
as it is told. Each later case is itself the load for as long as the chip has rested
since the case before it (to be checked, or compiled, where a new chunk begins), at
least TOP_UP_S, so that the clocks stay down. There candidates take turns of TURN_S, so
that each has the clocks that its own power leaves it.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator, Sequence
import concurrent.futures
import contextlib
import dataclasses
import os
import time
import zlib

from absl import logging
import jax

from experiments import report, timing
from experiments.gate import Gate, Verdict
from experiments.products import (
  Candidate,
  Inputs,
  Product,
  compiled,
  make_inputs,
)
from experiments.suites import Case
from jaxgemm.device import Device
from pallas_kernels.problem import Problem

_CHUNK = 192  # About so many programs are compiled before the first is timed.
_MAX_THREADS = 16
_UNKNOWN_L2_BYTES = 64 << 20
TOP_UP_S = 1.0
TURN_S = 0.4
# What a kernel that is wrong raises as it is traced, compiled or run; JAX's own
# errors are RuntimeErrors. Such a kernel fails, and the run goes on.
_KERNEL_ERRORS = (
    ArithmeticError,
    AssertionError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


@dataclasses.dataclass(frozen=True)
class _Prepared:
  """A case with all its programs."""

  case: Case
  seed: int
  inputs: Callable[[jax.Array], Inputs]
  gate: Gate
  candidates: list[Candidate]


@dataclasses.dataclass(frozen=True)
class Runner:
  """Runs cases on one device and turns them into rows.

  Attributes:
    candidates: what to run of a problem, XLA the first and only then.
    device: the device whose rates give the floor, or None.
    on_gpu: whether to compile ahead of time; in emulation nothing is.
    seed: seed of the inputs.
    repeats: timed turns of each candidate; 0 times nothing.
    burn_in_s: seconds of load before the first case is timed; 0 measures bursts, of
      turns of one call.
    provenance: what all rows share.
    seconds: where the time went: "compile", "check" and "time".
  """

  candidates: Callable[[Problem], Sequence[Candidate]]
  device: Device | None
  on_gpu: bool
  seed: int
  repeats: int
  burn_in_s: float
  provenance: report.Provenance
  seconds: collections.Counter[str] = dataclasses.field(
      default_factory=collections.Counter, compare=False
  )

  def rows(self, cases: Sequence[Case]) -> Iterator[list[report.Row]]:
    """Yields the rows of one case after the other, in its candidates' order."""
    if not self.on_gpu:
      for case in cases:
        yield self._run(self._prepare(case), None)
      return
    busy_until = None
    remaining = collections.deque(cases)
    while remaining:
      chunk, programs = [], 0
      while remaining and programs < _CHUNK:
        chunk.append(remaining.popleft())
        programs += len(self.candidates(chunk[-1].problem))
      with self._spent("compile"):
        prepared = collections.deque(self._compile(chunk))
      while prepared:  # What has run is let go, with its programs and arrays.
        rows = self._run(prepared.popleft(), busy_until)
        busy_until = time.monotonic()
        yield rows

  @contextlib.contextmanager
  def _spent(self, phase: str) -> Iterator[None]:
    start = time.monotonic()
    try:
      yield
    finally:
      self.seconds[phase] += time.monotonic() - start

  def _load_s(self, busy_until: float | None) -> float:
    """Returns how long to load the chip that was busy until then; None: never."""
    if not self.burn_in_s or busy_until is None:
      return self.burn_in_s
    rested_s = time.monotonic() - busy_until
    return min(self.burn_in_s, max(TOP_UP_S, rested_s))

  def _prepare(self, case: Case) -> _Prepared:
    # The seed depends on the problem, not on its place in the suite.
    seed = zlib.crc32(f"{self.seed} {case.name}".encode())
    inputs = make_inputs(case.problem).lower(jax.random.key(seed)).compile()
    gate = Gate(case.problem, seed)
    return _Prepared(case, seed, inputs, gate, list(self.candidates(case.problem)))

  def _compile(self, cases: Iterable[Case]) -> list[_Prepared]:
    """Compiles everything before any case is timed; threads shorten the wait.

    XLA's own products compile one at a time if times are wanted: XLA times its
    alternatives on the GPU as it compiles, and two at once could mislead it.
    """
    num_threads = min(_MAX_THREADS, os.cpu_count() or 1)
    with concurrent.futures.ThreadPoolExecutor(num_threads) as pool:
      prepared, pending = [], []
      for one in pool.map(self._prepare, cases):
        prepared.append(one)
        for i, candidate in enumerate(one.candidates):
          if candidate.kernel != "xla" or not self.repeats:
            job = pool.submit(_compiled, candidate, one.case)
            pending.append((one.candidates, i, job))
      for one in prepared:
        for i, candidate in enumerate(one.candidates):
          if candidate.kernel == "xla" and self.repeats:
            one.candidates[i] = _compiled(candidate, one.case)
      for candidates, i, job in pending:
        candidates[i] = job.result()
    return prepared

  def _run(self, one: _Prepared, busy_until: float | None) -> list[report.Row]:
    """Returns the rows of one case: the gate first, then the times.

    The case before it was timed until `busy_until`, on time.monotonic's clock.
    """
    key = jax.random.key(one.seed)
    with self._spent("check"):
      inputs = one.inputs(key)
      # The baseline is the first; a product and its verdict go by their place.
      verdicts = [
          _verdict(one, i, inputs) if candidate.product is not None else None
          for i, candidate in enumerate(one.candidates)
      ]
    baseline = verdicts[0]
    assert one.candidates[0].implementation == "xla" and baseline is not None
    passed = {
        i: candidate.product
        for i, candidate in enumerate(one.candidates)
        if (verdict := verdicts[i]) is not None and verdict.passed
    }
    times_us: dict[int, list[float]] = {}
    if self.repeats and baseline.passed:
      set_bytes = sum(operand.nbytes for operand in inputs)
      l2_bytes = self.device.l2_bytes if self.device else _UNKNOWN_L2_BYTES
      # No more sets than calls.
      num_sets = min(
          timing.num_input_sets(set_bytes, l2_bytes), self.repeats * len(passed)
      )
      input_sets = [inputs] + [
          one.inputs(jax.random.fold_in(key, i)) for i in range(1, num_sets)
      ]
      try:
        with self._spent("time"):
          times_us = timing.interleaved(
              passed, input_sets, self.repeats, burn_in_s=self._load_s(busy_until),
              turn_s=TURN_S if self.burn_in_s else 0.0,
          )
      except RuntimeError as error:
        logging.exception("timing of %s", one.case.name)
        for i in passed:
          verdicts[i] = Verdict(verdicts[i].error, f"not timed: {error}")
    return [
        report.make_row(
            one.case,
            candidate,
            self.provenance,
            verdict=verdicts[i],
            xla_error=baseline.error,
            device=self.device,
            times_us=times_us.get(i),
            xla_times_us=times_us.get(0),
        )
        for i, candidate in enumerate(one.candidates)
    ]


def _compiled(candidate: Candidate, case: Case) -> Candidate:
  """As products.compiled; what does not compile fails when the gate calls it."""
  try:
    return compiled(candidate, case.problem)
  except _KERNEL_ERRORS as error:
    return dataclasses.replace(candidate, product=_raiser(error))


def _raiser(error: Exception) -> Product:
  def product(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    raise error

  return product


def _verdict(one: _Prepared, index: int, inputs: Inputs) -> Verdict:
  """Returns the gate's verdict; a product that raises fails, the run goes on."""
  candidate = one.candidates[index]
  assert candidate.product is not None
  check = one.gate.check if index else one.gate.set_baseline
  try:
    return check(candidate.product, inputs)
  except _KERNEL_ERRORS as error:
    logging.exception("%s under %s", one.case.name, candidate.plan)
    return Verdict(None, f"{type(error).__name__}: {error}")
