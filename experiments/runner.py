"""From cases to rows: compile, check, then time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import concurrent.futures
import dataclasses
import os
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
  make_candidate,
  make_inputs,
)
from experiments.suites import Case
from jaxgemm.device import Device

_CHUNK = 32  # Cases compiled together before the first of them is timed.
_UNKNOWN_L2_BYTES = 64 << 20
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
    implementations: members of products.IMPLEMENTATIONS, "xla" the first.
    device: the device to plan for, whose rates give the floor; or None.
    on_gpu: whether to compile ahead of time; in emulation nothing is.
    seed: seed of the inputs.
    repeats: timed calls of each implementation; 0 times nothing.
    burn_in_s: seconds of load before each case is timed.
    provenance: what all rows share.
  """

  implementations: Sequence[str]
  device: Device | None
  on_gpu: bool
  seed: int
  repeats: int
  burn_in_s: float
  provenance: report.Provenance

  def rows(self, cases: Sequence[Case]) -> Iterator[list[report.Row]]:
    """Yields the rows of one case after the other."""
    for start in range(0, len(cases), _CHUNK):
      chunk = cases[start : start + _CHUNK]
      prepared = self._compile(chunk) if self.on_gpu else map(self._prepare, chunk)
      for one in prepared:
        yield self._run(one)

  def _prepare(self, case: Case) -> _Prepared:
    # The seed depends on the problem, not on its place in the suite.
    seed = zlib.crc32(f"{self.seed} {case.name}".encode())
    return _Prepared(
        case,
        seed,
        make_inputs(case.problem),
        Gate(case.problem, seed),
        [
            make_candidate(
                case.problem, name, self.device, emulated=not self.on_gpu
            )
            for name in self.implementations
        ],
    )

  def _compile(self, cases: Sequence[Case]) -> list[_Prepared]:
    """Compiles everything before any case is timed; threads shorten the wait.

    XLA's own products compile one at a time if times are wanted: XLA times its
    alternatives on the GPU as it compiles, and two at once could mislead it.
    """
    with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
      prepared = list(pool.map(self._prepare, cases))
      pending = []
      for one in prepared:
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

  def _run(self, one: _Prepared) -> list[report.Row]:
    """Returns the rows of one case: the gate first, then the times."""
    key = jax.random.key(one.seed)
    inputs = one.inputs(key)
    verdicts = {
        candidate.implementation: _verdict(one, candidate, inputs)
        for candidate in one.candidates
        if candidate.product is not None
    }
    passed = {
        candidate.implementation: candidate.product
        for candidate in one.candidates
        if (verdict := verdicts.get(candidate.implementation)) and verdict.passed
    }
    times_us: dict[str, list[float]] = {}
    if self.repeats and "xla" in passed:
      set_bytes = sum(operand.nbytes for operand in inputs)
      l2_bytes = self.device.l2_bytes if self.device else _UNKNOWN_L2_BYTES
      input_sets = [inputs] + [
          one.inputs(jax.random.fold_in(key, i))
          for i in range(1, timing.num_input_sets(set_bytes, l2_bytes))
      ]
      try:
        times_us = timing.interleaved(
            passed, input_sets, self.repeats, burn_in_s=self.burn_in_s
        )
      except RuntimeError as error:
        logging.exception("timing of %s", one.case.name)
        for name in passed:
          verdicts[name] = Verdict(verdicts[name].error, f"not timed: {error}")
    return [
        report.make_row(
            one.case,
            candidate,
            self.provenance,
            verdict=verdicts.get(candidate.implementation),
            xla_error=verdicts["xla"].error,
            device=self.device,
            times_us=times_us.get(candidate.implementation),
            xla_times_us=times_us.get("xla"),
        )
        for candidate in one.candidates
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


def _verdict(one: _Prepared, candidate: Candidate, inputs: Inputs) -> Verdict:
  """Returns the gate's verdict; a product that raises fails, the run goes on."""
  assert candidate.product is not None
  is_baseline = candidate.implementation == "xla"
  check = one.gate.set_baseline if is_baseline else one.gate.check
  try:
    return check(candidate.product, inputs)
  except _KERNEL_ERRORS as error:
    logging.exception("%s under %s", one.case.name, candidate.implementation)
    return Verdict(None, f"{type(error).__name__}: {error}")
