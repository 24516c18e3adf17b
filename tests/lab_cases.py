"""Rows of the laboratory's questions with made-up times: no GPU was asked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
import dataclasses
import zlib

from experiment_cases import H200, PROVENANCE

from experiments import cli
from experiments.lab import measuring
from experiments.lab.questions import QUESTIONS
from experiments.lab.rows import Launch, Row, problem_fields
from experiments.lab.variants import Job, Lab, Variant

GPU = cli.Platform(True, H200, H200.kind)
CPU = cli.Platform(False, H200, "cpu")
LAUNCH = Launch("a_kernel", 168, 200 << 10, 384, 132, 1)
TimeOf = Callable[[Job, Variant], float]


def lab(platform: cli.Platform = GPU, *, quick: bool = False) -> Lab:
  return Lab(platform, quick, 0, 20 if platform.on_gpu else 0, PROVENANCE)


def made_up_time(job: Job, variant: Variant, run: int = 0) -> float:
  """A time in microseconds that nothing but names and the run decide."""
  problem = job.case.problem
  least = max(problem.flops / 700e6, problem.num_bytes / 4e6, 2.0)
  name = f"{job.case.name} {variant.name} {variant.inputs} {run}"
  return least * (1 + zlib.crc32(name.encode()) % 1000 / 500)


def made_up_rows(
    name: str, time_of: TimeOf = made_up_time, *, quick: bool = False
) -> list[Row]:
  """The rows of a question as a GPU would give them, with times from `time_of`."""
  jobs: list[Job] = []

  def remember(lab: Lab, question: str, found: Iterable[Job]) -> Iterator[Row]:
    for job in found:
      jobs.append(job)
      yield from _rows(question, job, time_of)

  real, measuring.measure = measuring.measure, remember
  try:
    return list(QUESTIONS[name].measure(lab(quick=quick)))
  finally:
    measuring.measure = real


def _rows(question: str, job: Job, time_of: TimeOf) -> Iterator[Row]:
  xla_times = {v.inputs: time_of(job, v) for v in job.variants if v.is_xla}
  for variant in job.variants:
    serves = variant.candidate.product is not None
    time_us = time_of(job, variant)
    yield Row(
        question=question, table=job.table, name=job.case.name,
        problem=problem_fields(job.case.problem), variant=variant.name,
        kernel=variant.candidate.kernel if serves else None,
        config=dataclasses.asdict(variant.config) if variant.config else None,
        inputs=variant.inputs, status="ok" if serves else variant.candidate.plan,
        times_us=tuple(time_us * x for x in (1.0, 0.99, 1.01, 1.02)) if serves else None,
        xla_time_us=xla_times[variant.inputs], error=1e-3 if serves else None,
        xla_error=1e-3, smem_bytes=variant.smem_bytes,
        launch=LAUNCH if job.launches and serves else None,
        details=variant.details, provenance=PROVENANCE,
    )
