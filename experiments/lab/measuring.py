"""From jobs to rows: compile, check, then time, as experiments/runner.py does.

What differs is what the questions want to know: each call's time, kernels that only
the laboratory has, operands drawn in several ways, and how the driver launches them.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator, Sequence
import concurrent.futures
import dataclasses
import functools
import os
import statistics
from typing import Any
import zlib

from absl import logging
import jax
import jax.numpy as jnp

from experiments import products, timing
from experiments.gate import Gate, Verdict
from experiments.kernel_count import count_gemms
from experiments.lab import launches, operands
from experiments.lab.rows import Row, problem_fields
from experiments.lab.variants import Job, Lab, Variant
from jaxgemm.autotune.operands import Inputs, operand_types
from pallas_kernels import KERNELS

_CHUNK = 64  # About so many programs are compiled before the first is timed.
_MAX_THREADS = 16
_LONG_FLOPS = 1e12  # Of a product that takes so long that few calls will do.
_FEWEST = 5


@dataclasses.dataclass(frozen=True)
class _Frame:
  """The seed, what draws operands from a key, and the gate of results of them."""

  seed: int
  draw: Callable[[jax.Array], Inputs]
  gate: Gate

  def inputs(self, index: int = 0) -> Inputs:
    """Returns the `index`-th set of operands."""
    key = jax.random.key(self.seed)
    return self.draw(jax.random.fold_in(key, index) if index else key)


_Programs = dict[int, Any]  # By the place of their variants.
_Frames = dict[str, _Frame]  # By how operands are drawn.


def measure(lab: Lab, question: str, jobs: Iterable[Job]) -> Iterator[Row]:
  """Yields the rows of one job after the other, in the order of its variants."""
  for run in _runs(lab, question, jobs):
    rows = run.rows()
    yield from run.with_launches(rows) if run.job.launches else rows
    del run  # With its programs and arrays, before the next ones are made.


def _runs(lab: Lab, question: str, jobs: Iterable[Job]) -> Iterator[_Run]:
  """Yields the jobs with their programs, and keeps none that it has yielded."""
  for chunk in _chunks(lab, jobs):
    runs = collections.deque(
        _Run(lab, question, job, programs, frames)
        for job, programs, frames in zip(chunk, *_compile(lab, chunk), strict=True)
    )
    while runs:
      yield runs.popleft()


def _chunks(lab: Lab, jobs: Iterable[Job]) -> Iterator[list[Job]]:
  """Yields the jobs whose programs are compiled together."""
  chunk: list[Job] = []
  for job in jobs:
    chunk.append(job)
    if not lab.on_gpu or sum(len(one.variants) for one in chunk) >= _CHUNK:
      yield chunk
      chunk = []
  if chunk:
    yield chunk


def _compile(lab: Lab, jobs: Sequence[Job]) -> tuple[list[_Programs], list[_Frames]]:
  """Returns the programs of each job by the place of their variants, and its frames.

  Variants that cannot serve have no program; an exception is what did not compile. A
  program that several variants share compiles once.

  XLA's own products compile one at a time: XLA times its alternatives on the GPU as it
  compiles, and two at once could mislead it.
  """
  with concurrent.futures.ThreadPoolExecutor(
      min(_MAX_THREADS, os.cpu_count() or 1)
  ) as pool:
    frames = list(pool.map(functools.partial(_frames, lab), jobs))
    if not lab.on_gpu:
      return [
          {i: v.candidate.product for i, v in enumerate(job.variants) if _serves(v)}
          for job in jobs
      ], frames
    pending: dict[products.Product, Any] = {}
    late: list[tuple[products.Product, Job, Variant]] = []
    for job in jobs:
      for variant in filter(_serves, job.variants):
        product = variant.candidate.product
        if product in pending:
          continue
        pending[product] = None
        if variant.candidate.kernel == "xla":
          late.append((product, job, variant))
        else:
          pending[product] = pool.submit(_compiled, variant, job)
    found = {product: job.result() for product, job in pending.items() if job}
  found |= {product: _compiled(variant, job) for product, job, variant in late}
  return [
      {i: found[v.candidate.product] for i, v in enumerate(job.variants) if _serves(v)}
      for job in jobs
  ], frames


def _frames(lab: Lab, job: Job) -> _Frames:
  """Returns what draws the operands of a job, and what checks its results, by inputs."""
  # The seed depends on the problem, not on its place among the jobs.
  seed = zlib.crc32(f"{lab.seed} {job.case.name}".encode())
  found = {}
  for how in dict.fromkeys(variant.inputs for variant in job.variants):
    draw = operands.make_inputs(job.case.problem, how)
    compiled = draw.lower(jax.random.key(seed)).compile()
    found[how] = _Frame(seed, compiled, Gate(job.case.problem, seed))
  return found


def _serves(variant: Variant) -> bool:
  return variant.candidate.product is not None


def _compiled(variant: Variant, job: Job) -> products.Product | Exception:
  candidate, problem = variant.candidate, job.case.problem
  try:
    if candidate.kernel in (*KERNELS, "xla"):  # It also checks which kernel runs.
      return products.compiled(candidate, problem).product
    return candidate.product.lower(*operand_types(problem)).compile()
  except Exception as error:  # Whatever a kernel that is wrong raises is its failure.
    return error


def _check_zeros(program: products.Product, inputs) -> Verdict:
  """Returns whether a product of zeros is zero everywhere."""
  if bool(jnp.any(program(*inputs) != 0)):
    return Verdict(None, "a product of zeros is not zero")
  return Verdict(0.0, None)


def _failure(error: Exception) -> Verdict:
  """Returns the verdict on what raised an error, with the first line of its message."""
  first_line = str(error).partition("\n")[0]
  return Verdict(None, f"{type(error).__name__}: {first_line}")


@dataclasses.dataclass(frozen=True)
class _Run:
  """One job with its programs, by the place of its variants."""

  lab: Lab
  question: str
  job: Job
  programs: _Programs
  frames: _Frames

  def rows(self) -> list[Row]:
    """Returns the rows, without launches: the gate first, then the times."""
    try:
      verdicts, xla_errors = self._check()
    except RuntimeError as error:  # Out of memory, most likely.
      logging.exception("operands of %s", self.job.case.name)
      verdicts, xla_errors = dict.fromkeys(self.programs, _failure(error)), {}
    passed = [i for i, verdict in verdicts.items() if verdict.passed]
    times_us = {}
    repeats = self._repeats()
    if repeats and passed:
      try:
        times_us = self._times(passed, repeats)
      except RuntimeError as error:
        logging.exception("timing of %s", self.job.case.name)
        for i in passed:
          verdicts[i] = Verdict(verdicts[i].error, f"not timed: {error}")
    return [
        self._row(i, variant, verdicts, xla_errors, times_us)
        for i, variant in enumerate(self.job.variants)
    ]

  def with_launches(self, rows: Sequence[Row]) -> Iterator[Row]:
    """Yields its rows, those that have times with their launches."""
    for i, row in enumerate(rows):
      yield dataclasses.replace(row, launch=self._launch(i)) if row.times_us else row

  def _repeats(self) -> int:
    repeats = self.lab.repeats and (self.job.repeats or self.lab.repeats)
    if self.job.case.problem.flops >= _LONG_FLOPS:
      return min(repeats, max(_FEWEST, repeats // 4))
    return repeats

  def _check(self) -> tuple[dict[int, Verdict], dict[str, float | None]]:
    """Returns the verdict of each program, and XLA's error on each kind of inputs."""
    verdicts, xla_errors = {}, {}
    for how, frame in self.frames.items():
      inputs = frame.inputs()
      for i, program in self.programs.items():
        variant = self.job.variants[i]
        if variant.inputs == how:
          verdicts[i] = self._verdict(frame.gate, variant, program, inputs)
          if variant.is_xla:
            xla_errors[how] = verdicts[i].error
    return verdicts, xla_errors

  def _verdict(self, gate: Gate, variant: Variant, program, inputs) -> Verdict:
    check = gate.set_baseline if variant.is_xla else gate.check
    if variant.inputs == "zeros":  # The gate's errors are relative ones.
      check = _check_zeros
    try:
      if isinstance(program, Exception):
        raise program
      return check(program, inputs)
    except Exception as error:
      logging.exception("%s as %s", self.job.case.name, variant.name)
      return _failure(error)

  def _times(self, passed: Sequence[int], repeats: int) -> dict[int, list[float]]:
    """Returns the times of the programs, each on the operands of its own kind."""
    set_bytes = sum(
        x.size * x.dtype.itemsize for x in operand_types(self.job.case.problem)
    )
    num_sets = min(
        timing.num_input_sets(set_bytes, self.lab.device.l2_bytes), repeats * len(passed)
    )
    sets = {
        how: [frame.inputs(i) for i in range(num_sets)]
        for how, frame in self.frames.items()
    }

    def call(i: int):
      program, drawn = self.programs[i], sets[self.job.variants[i].inputs]
      return lambda index: program(*drawn[index])

    calls = {i: call(i) for i in passed}
    return timing.interleaved(calls, [(index,) for index in range(num_sets)], repeats)

  def _launch(self, i: int) -> launches.Launch | None:
    try:
      inputs = self.frames[self.job.variants[i].inputs].inputs()
      return launches.of_call(self.programs[i], inputs)
    except Exception:  # Whatever it is, the row has its times.
      logging.exception("launch of %s", self.job.variants[i].name)
      return None

  def _baseline_kinds(self, i: int) -> dict[str, Any]:
    """Returns what computes XLA's product, by the names of kernel_count.py."""
    program = self.programs.get(i)
    if not self.job.variants[i].is_xla or not isinstance(program, jax.stages.Compiled):
      return {}
    return {"xla": sorted(count_gemms(program.as_text()).xla)}

  def _row(self, i: int, variant: Variant, verdicts, xla_errors, times_us) -> Row:
    verdict, candidate = verdicts.get(i), variant.candidate
    status = candidate.plan if verdict is None else "ok"
    if verdict is not None and not verdict.passed:
      status = f"failed: {verdict.reason}"
    baseline = next(
        (
            j for j, other in enumerate(self.job.variants)
            if other.is_xla and other.inputs == variant.inputs
        ),
        None,
    )
    xla_times = times_us.get(baseline)
    return Row(
        question=self.question,
        table=self.job.table,
        name=self.job.case.name,
        problem=problem_fields(self.job.case.problem),
        variant=variant.name,
        kernel=candidate.kernel if _serves(variant) else None,
        config=dataclasses.asdict(variant.config) if variant.config else None,
        inputs=variant.inputs,
        status=status,
        times_us=tuple(times_us[i]) if i in times_us else None,
        xla_time_us=statistics.median(xla_times) if xla_times else None,
        error=verdict.error if verdict else None,
        xla_error=xla_errors.get(variant.inputs),
        smem_bytes=variant.smem_bytes,
        launch=None,
        details=variant.details | self._baseline_kinds(i),
        provenance=self.lab.provenance,
    )
