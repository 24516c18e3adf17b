r"""Random problems through every implementation, their results poisoned and guarded.

Problem I of a seed is the same wherever it is drawn. It runs under each implementation
that serves it, as planned, and under legal configs drawn at random, on as many SMs as
are drawn. A problem with a size of 0 runs as jaxgemm.gemm plans it: XLA's.

Each array that a Mosaic kernel writes, partial sums included, lies within a larger one
that the kernel gets as it is: its place is full of NaN (int32: of a number), and before
and behind it lie guard zones of a known number, whole products of at least 8192 elements.
What the kernel sees is the slice between: m, n and strides are those of its problem, so
that tiles are clipped where they ever are; only the index of the batch moves. Then

  an element that nobody wrote   is NaN: the result is not finite
  a guard zone with another bit  turns the whole result into -inf: "wrote beyond"

That is the meaning of the program, not luck of the allocator. It does not show a write
further away than the zones, one of the guards' own number, nor one into an operand. TMA
would clip a write beyond the last product of the batch to nothing; here it lands in a
zone, and fails. The portable kernel takes its result as a pointer from XLA: buffers of
NaN are freed before it runs, where its result will most likely lie, and nothing is known
of what is around it.

A result passes by the rules of the gate (experiments/gate.py): finite, its error against
the float64 product at most twice the baseline's, no element further from the truth than
64 times that. The baseline is an ordinary float32 product on the host, of operands as the
algorithm reads them, rounded once: XLA's own would be compiled for each problem. A
program of few results is called on fresh operands until these are many: the errors of a
few say nothing.

Several processes share the GPU, one for each core, as JAX lowers one kernel at a time in
each. One that dies, or is not heard of for --silence seconds (a kernel that waits for
ever), is a failure, and another takes its place. Failures are printed with the command
that repeats them; the exit status is 1 if there are any. fuzz_SEED.jsonl has a line for
each plan and config of each problem.

  python -m experiments.fuzz --count=3000 --seed=1
  python -m experiments.fuzz --seed=1 --first=1234 --count=1 --workers=0
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
import concurrent.futures
import contextlib
import dataclasses
import json
import math
import multiprocessing
from multiprocessing.connection import Connection
import os
import random
import sys
import threading

from absl import app, flags, logging
import tabulate

from experiments import (
  cli,
  common_flags,
  fuzz_draws,
  fuzz_guards,
  fuzz_judge,
  products,
  report,
)
from jaxgemm import device as device_lib
from pallas_kernels import tiles
from pallas_kernels.problem import Problem

flags.adopt_module_key_flags(common_flags)
_PROBLEMS = flags.DEFINE_integer(
    "count", None, "Problems to draw (default 3000, without a GPU 3).", lower_bound=1
)
_FIRST = flags.DEFINE_integer("first", 0, "Number of the first problem.", lower_bound=0)
_CONFIGS = flags.DEFINE_integer(
    "configs",
    1,
    "Configs drawn for each problem, of an implementation that is drawn, beside its"
    " plans.",
    lower_bound=0,
)
_PROCESSES = flags.DEFINE_integer(
    "workers",
    None,
    "Processes that share the GPU, or 0 for this one alone (default: one for each core,"
    " without a GPU 0).",
    lower_bound=0,
)
_PATIENCE = flags.DEFINE_float(
    "silence", 240.0, "Seconds without news of a process that are a failure.",
    lower_bound=1.0,
)

_NUM_PROBLEMS = {"gpu": 3000, "cpu": 3}


@dataclasses.dataclass(frozen=True)
class Row:
  """What became of one plan of one problem.

  Attributes:
    name: the problem, in words.
    seed, index, configs: what draws it.
    implementation, plan: what ran.
    dtype: of lhs.
    calls: on fresh operands each.
    error, limit, reason: see fuzz_judge.Verdict.
    provenance: where, with what, when and how it ran.
  """

  name: str
  seed: int
  index: int
  configs: int
  implementation: str
  plan: str
  dtype: str
  calls: int
  error: float | None
  limit: float | None
  reason: str | None
  provenance: report.Provenance

  @property
  def failed(self) -> bool:
    return self.reason is not None

  def to_json(self) -> str:
    """Returns the row as one line of JSON."""
    fields = dataclasses.asdict(self)
    return json.dumps(fields | fields.pop("provenance"), allow_nan=False)

  def __str__(self) -> str:
    command = (
        f"python -m experiments.fuzz --seed={self.seed} --first={self.index} --count=1"
        f" --configs={self.configs} --workers=0"
    )
    return f"{self.name} under {self.plan}: {self.reason}\n    {command}"


@dataclasses.dataclass(frozen=True)
class Task:
  """A problem to draw and run.

  Attributes:
    seed, index, configs: what draws it.
    emulated: whether kernels run in emulation, for an H200.
    provenance: what all rows share.
  """

  seed: int
  index: int
  configs: int
  emulated: bool
  provenance: report.Provenance

  def draw(self) -> tuple[Problem, random.Random]:
    """Returns the problem, and the generator for what else is drawn of it."""
    rng = random.Random(f"{self.seed} {self.index}")
    bounds = fuzz_draws.EMULATED if self.emulated else fuzz_draws.ON_GPU
    return fuzz_draws.draw_problem(rng, bounds), rng

  def row(
      self, implementation: str, plan: str, calls: int, verdict: fuzz_judge.Verdict
  ) -> Row:
    problem, _ = self.draw()
    return Row(
        f"{self.index}: {problem}{_epilogue_words(problem)}", self.seed, self.index,
        self.configs, implementation, plan, problem.dtype, calls,
        provenance=self.provenance, **vars(verdict),
    )


def _epilogue_words(problem: Problem) -> str:
  epilogue = problem.epilogue
  words = f" {problem.algorithm}"
  if problem.batch > 1 and not (problem.lhs_batched and problem.rhs_batched):
    words += f", one {'rhs' if problem.lhs_batched else 'lhs'}"
  if epilogue.has_c:
    words += f", {epilogue.alpha} * product + {epilogue.beta} * {epilogue.c_dtype} c"
  return words


def run(task: Task) -> Iterator[Row]:
  """Yields a row for each plan of a problem; an exception fails its plan alone."""
  problem, rng = task.draw()
  if task.emulated:
    device, bounds = device_lib.known_device(cli.EMULATED_DEVICE), fuzz_draws.EMULATED
  else:
    device, bounds = device_lib.current_device(), fuzz_draws.ON_GPU
  elements = math.prod(problem.out_shape)
  calls = min(bounds.calls, tiles.cdiv(fuzz_draws.JUDGED, elements)) if elements else 1
  truths = [
      fuzz_judge.draw_truth(problem, (task.seed, task.index, call))
      for call in range(calls)
  ]
  for plan, told in fuzz_draws.draw_plans(rng, problem, device, task.configs):
    words = products.describe_config(plan.kernel, plan.config)
    words += f" [{plan.source}]" if told == device else f" [drawn, {told.num_sms} SMs]"
    try:
      verdict = fuzz_judge.check(plan, told, truths, emulated=task.emulated)
    except Exception as error:  # Whatever a kernel that is wrong raises is its failure.
      logging.exception("problem %d under %s", task.index, words)
      verdict = fuzz_judge.Verdict(reason=_first_line(error))
    yield task.row(plan.kernel, words, calls, verdict)


def _first_line(error: BaseException) -> str:
  return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"




class _Process:
  """A process that runs one task after the other."""

  def __init__(self):
    context = multiprocessing.get_context("spawn")
    self._here, there = context.Pipe()
    self._process = context.Process(target=_serve, args=(there,), daemon=True)
    self._process.start()
    there.close()  # Else nobody would hear that the process has died.

  def run(self, task: Task, patience_s: float) -> tuple[list[Row], bool]:
    """Returns the task's rows, and whether the process can be trusted with another."""
    rows: list[Row] = []
    try:
      self._here.send(task)
      while self._here.poll(patience_s):
        row = self._here.recv()
        if row is None:
          return rows, not any(row.failed and row.error is None for row in rows)
        rows.append(row)
      why = f"nothing was heard for {patience_s:g} s"
    except (EOFError, OSError):
      why = "the process died"
    after = f"what follows {rows[-1].plan}" if rows else "the first plan"
    rows.append(task.row("?", after, 0, fuzz_judge.Verdict(reason=why)))
    return rows, False

  def end(self) -> None:
    self._process.kill()
    self._process.join()
    self._here.close()


def _serve(connection: Connection) -> None:
  """Runs tasks until nobody sends any; a None follows the rows of each."""
  with fuzz_guards.guarded(), contextlib.suppress(EOFError):
    while True:
      for row in run(connection.recv()):
        connection.send(row)
      connection.send(None)


def run_in_processes(
    tasks: Sequence[Task], count: int, patience_s: float
) -> Iterator[list[Row]]:
  """Yields the rows of each task, as they are done, by `count` processes.

  A kernel that came to no result of its own may have left its process, or the GPU's
  context in it, of no use: a fresh one goes on.
  """
  lane = threading.local()
  processes: list[_Process] = []

  def rows_of(task: Task) -> list[Row]:
    if getattr(lane, "process", None) is None:
      lane.process = _Process()
      processes.append(lane.process)
    rows, trusted = lane.process.run(task, patience_s)
    if not trusted:
      lane.process.end()
      lane.process = None
    return rows

  with concurrent.futures.ThreadPoolExecutor(count) as pool:
    try:
      for job in concurrent.futures.as_completed(
          [pool.submit(rows_of, task) for task in tasks]
      ):
        yield job.result()
    finally:
      pool.shutdown(cancel_futures=True)
      for process in processes:
        process.end()


def run_here(tasks: Sequence[Task]) -> Iterator[list[Row]]:
  """Yields the rows of each task, by this process."""
  for task in tasks:
    with fuzz_guards.guarded():
      yield list(run(task))


def counts(rows: Sequence[Row]) -> str:
  """Returns the table of plans that ran, and failed, by implementation and dtype."""
  ran = collections.Counter((row.implementation, row.dtype) for row in rows)
  failed = collections.Counter(
      (row.implementation, row.dtype) for row in rows if row.failed
  )
  dtypes = sorted({dtype for _, dtype in ran})

  def cell(key: tuple[str, str]) -> str:
    if not ran[key]:
      return ""
    return f"{failed[key]} of {ran[key]} FAILED" if failed[key] else str(ran[key])

  lines = [
      {"implementation": name} | {dtype: cell((name, dtype)) for dtype in dtypes}
      for name in dict.fromkeys(sorted(name for name, _ in ran))
  ]
  return tabulate.tabulate(lines, headers="keys", disable_numparse=True)


def _set_environment() -> None:
  """What JAX and numpy of all processes read as they start."""
  # The processes share one GPU, and the cores.
  os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
  os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def main(argv: Sequence[str]) -> None:
  _set_environment()
  platform = cli.start(argv)
  if platform.device is None:
    raise app.UsageError(f"the heuristics know no {platform.name}")
  num_problems = _PROBLEMS.value or _NUM_PROBLEMS["gpu" if platform.on_gpu else "cpu"]
  seed, num_processes = common_flags.SEED.value, _PROCESSES.value
  if num_processes is None:
    num_processes = (os.cpu_count() or 1) if platform.on_gpu else 0
  provenance = cli.row_provenance("fuzz", platform, "experiments.fuzz")
  tasks = [
      Task(seed, index, _CONFIGS.value, not platform.on_gpu, provenance)
      for index in range(_FIRST.value, _FIRST.value + num_problems)
  ]
  if num_processes:
    found = run_in_processes(tasks, num_processes, _PATIENCE.value)
  else:
    found = run_here(tasks)
  path = cli.output_path(f"fuzz_{seed}").with_suffix(".jsonl")
  rows = cli.record(found, len(tasks), path)
  print(counts(rows))
  failed = [row for row in rows if row.failed]
  for row in failed:
    print(f"FAILED: {row}", file=sys.stderr)
  print(f"{len(tasks)} problems, {len(rows)} plans, {len(failed)} failed: {path}")
  if failed:
    sys.exit(1)


if __name__ == "__main__":
  app.run(main)
