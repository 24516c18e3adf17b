"""jaxgemm.autotune: measures what the heuristics can only estimate, and remembers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import datetime
import importlib.util
import os
import statistics
from typing import Any

import jax
from jax import lax

from jaxgemm import cost_model, user_table
from jaxgemm import plan as plans
from jaxgemm.autotune import measure as gpu
from jaxgemm.autotune import progress, timing
from jaxgemm.autotune.measure import Job, Measure, Measurement
from jaxgemm.autotune.programs import Choice
from jaxgemm.contexts import current_target, device_of
from jaxgemm.device import Device, portable, supported
from jaxgemm.recording import recorded
from jaxgemm.table import FAILURES, Row
from pallas_kernels.problem import Problem

MAX_CANDIDATES = 12
_INSIDE_A_TRACE = "jaxgemm.autotune measures nothing inside a trace: call it outside"


@dataclasses.dataclass(frozen=True)
class Result:
  """What has been measured of one problem.

  Attributes:
    problem: what was measured.
    plan: its plan from now on, where it need not be batch invariant.
    time_us: median time of the plan; None if nothing could be measured.
    xla_time_us: XLA's, in the same run.
    failures: candidates that failed, and why.
  """

  problem: Problem
  plan: plans.Plan
  time_us: float | None
  xla_time_us: float | None
  failures: tuple[str, ...] = ()

  @property
  def speedup(self) -> float | None:
    """XLA's time over the plan's."""
    if self.time_us is None or self.xla_time_us is None:
      return None
    return self.xla_time_us / self.time_us


class Results(list[Result]):
  """A list of results that prints as a table."""

  def __str__(self) -> str:
    if not self:
      return "no problem for which there is a choice"
    width = max(len(str(result.problem)) for result in self)
    lines = [f"{'problem':{width}}  {'us':>9}  {'XLA us':>9}  x XLA  plan"]
    for result in self:
      figures = (
          f"{_figure(result.time_us, '.1f'):>9}  {_figure(result.xla_time_us, '.1f'):>9}"
          f"  {_figure(result.speedup, '.2f'):>5}"
      )
      choice = Choice(result.plan.kernel, result.plan.config)
      lines.append(f"{result.problem!s:{width}}  {figures}  {choice}")
      lines += [f"  failed: {failure}" for failure in result.failures]
    return "\n".join(lines)


def autotune(
    fn: Callable[..., Any], *args: Any, max_candidates: int = MAX_CANDIDATES,
    force: bool = False, measure: Measure | None = None,
) -> Results:
  """Measures the products of a function, and has the fastest kernel compute each.

  The function is traced and lowered, not run. Every product of jaxgemm that it comes
  to, those of its gradients and of each device's shards included, is measured on
  random operands under XLA and the heuristics' best candidates, each checked first.
  The winners, those that are the fastest under a load that lasts (see
  `cost_model.sustained_us`), go into the user's table, which later processes read by
  themselves: the folder $JAXGEMM_CACHE_DIR, or the platform's cache folder for jaxgemm.

  If a plan changes, JAX's caches are cleared: functions already jitted are traced
  and compiled anew, with the new plans, when they are next called. What is compiled
  ahead of time keeps its plans. Programs of several processes should be tuned by one
  process beforehand, so that all of them read the same table.

  Products with an `implementation` are left as they are, and those in groups of rows
  whose matrices the kernel converts from 8 bits. Others in groups are measured with
  groups whose sizes differ by half their mean. Products that are `batch_invariant` are
  measured like others, but take only winners that do not split k.
  Of products that jit shards by itself, XLA must compile the function to reveal the
  shards.

  Args:
    fn: a function, jitted or not; bind its keyword arguments with functools.partial.
    *args: its arguments, or jax.ShapeDtypeStructs in their place.
    max_candidates: how many candidates to measure of each problem, beside XLA.
    force: whether to measure again what the user's table has already.
    measure: what measures in place of this machine's GPU; see
      jaxgemm/autotune/measure.py.
  Returns: a Results, one Result a problem; it prints as a table.
  Raises:
    TypeError, ValueError: an argument is not what it should be; the message names it.
    RuntimeError: there is no GPU to measure on, or a trace is under way.
    ImportError: a package of the extra `autotune` is missing.
  Example: print(jaxgemm.autotune(jax.grad(loss), params, batch))
  """
  for name, value in (("fn", fn), ("measure", measure)):
    if not callable(value) and (name, value) != ("measure", None):
      raise TypeError(f"jaxgemm.autotune: {name}={value!r} must be a function")
  if not isinstance(max_candidates, int) or max_candidates < 1:
    raise ValueError(
        f"jaxgemm.autotune: max_candidates={max_candidates!r} must be a positive integer"
    )
  if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(args)):
    raise RuntimeError(_INSIDE_A_TRACE)
  device = measuring_device(measure)
  name = getattr(fn, "__name__", type(fn).__name__)
  return tune(
      collect(fn, *args, device=device), device, command=f"jaxgemm.autotune({name})",
      max_candidates=max_candidates, force=force, measure=measure,
  )


def measuring_device(measure: Measure | None = None) -> Device:
  """The device to tune for.

  Raises:
    RuntimeError: there is none, or a trace is under way.
    ImportError: a package of the extra `autotune` is missing.
  """
  if isinstance(lax.full((), 0), jax.core.Tracer):
    raise RuntimeError(_INSIDE_A_TRACE)
  _check_extra()
  target = current_target()
  if measure is None and target is not None:
    raise RuntimeError(
        "jaxgemm.autotune measures on the GPU at hand, not on the"
        f" {target} that jaxgemm.target or jaxgemm.emulate names: leave that context"
    )
  device = device_of(target)
  if not (supported(device) or portable(device)):
    raise RuntimeError(
        "jaxgemm.autotune needs a GPU that the kernels serve, and JAX's default device"
        f" is {jax.devices()[0].device_kind}: there is nothing to measure"
    )
  assert device is not None
  return device


def collect(fn: Callable[..., Any], *args: Any, device: Device) -> list[Problem]:
  """The problems of a function on this device, in the order of their lowering."""
  found = recorded(fn, *args)
  return [problem for problem, where in found.problems if where == device]


def tune(
    problems: Sequence[Problem], device: Device, *, command: str,
    max_candidates: int = MAX_CANDIDATES, force: bool = False,
    measure: Measure | None = None,
) -> Results:
  """Measures problems, and stores the winners in the user's table of the device.

  Problems of which there is no choice (an empty product, an unknown dtype) are left
  out of the results. Each winner is stored at once: a run that is cut short keeps
  what it has measured.
  """
  problems = list(dict.fromkeys(problem.canonical for problem in problems))
  before = {p: plans.make_plan(p, device) for p in problems}
  jobs = {
      problem: job
      for problem, plan in before.items()
      if (force or _unmeasured(user_table.lookup(problem, device)))
      and (job := make_job(plan, device, max_candidates)) is not None
  }
  rows: dict[Problem, Row] = {}
  failures: dict[Problem, tuple[str, ...]] = {}
  bar = progress.bar(total=len(jobs), desc="autotune", unit="problem")
  try:
    with bar:
      measured = (measure or gpu.measure)(list(jobs.values()), device)
      for (problem, job), found in zip(jobs.items(), measured, strict=True):
        failures[problem] = tuple(
            f"{choice}: {one.failure}"
            for choice, one in zip(job.choices, found, strict=True)
            if one.failure is not None
        )
        row = _winner(job, found, command, device)
        if row is not None:
          rows[problem] = row
          user_table.store([row], device.kind)
        bar.set_postfix_str(str(problem), refresh=False)
        bar.update()
  finally:
    plans.make_plan.cache_clear()
    after = {p: plans.make_plan(p, device) for p in problems}
    if any(_measured_choice(before[p]) != _measured_choice(after[p]) for p in problems):
      # Else what is jitted keeps the old plans: the table is no part of JAX's keys.
      jax.clear_caches()
  results = Results()
  for problem in problems:
    row = rows.get(problem)
    if row is None and problem not in jobs:
      row = user_table.lookup(problem, device)
    if row is not None or problem in jobs:
      evidence = {} if row is None else dict(row.evidence)
      results.append(Result(
          problem, after[problem], evidence.get("time_us"), evidence.get("xla_time_us"),
          failures.get(problem, ()),
      ))
  return results


def make_job(plan: plans.Plan, device: Device, max_candidates: int) -> Job | None:
  """XLA, the present plan and the best candidates; None if XLA stands alone.

  The best of every kernel is among them, lest the estimates are wrong of a whole one.
  """
  if plan.source == "fallback":
    return None
  listed = [
      Choice(candidate.kernel, candidate.config)
      for candidate in plans.candidates(plan.problem, device, everything=True)
      if candidate.kernel != "xla"
  ]
  best_of_kernel: dict[str, Choice] = {}
  for choice in listed:
    best_of_kernel.setdefault(choice.kernel, choice)
  kernels = list(dict.fromkeys([*best_of_kernel.values(), *listed]))[:max_candidates]
  choices = dict.fromkeys([Choice("xla", None), _choice(plan), *kernels])
  return Job(plan.problem, tuple(choices)) if len(choices) > 1 else None


def _winner(
    job: Job, found: Sequence[Measurement], command: str, device: Device
) -> Row | None:
  """The row of the fastest kernel; of XLA, if it is faster by more than the noise.

  XLA's row also stands in where every kernel fails; the next run then tries them again.
  """
  timed = {
      choice: one.times_us
      for choice, one in zip(job.choices, found, strict=True)
      if one.failure is None
  }
  xla, *_ = job.choices
  if xla not in timed:
    return None
  medians = {choice: statistics.median(times) for choice, times in timed.items()}
  kernels = [choice for choice in timed if choice != xla]

  def sustained_us(choice: Choice) -> float:
    return cost_model.sustained_us(medians[choice], job.problem, choice.config, device)

  best = min(kernels, key=sustained_us, default=xla)
  noise = timing.spread(timed[best]) + timing.spread(timed[xla])
  if medians[best] - medians[xla] > noise:
    best = xla
  evidence = {
      "time_us": _rounded(medians[best]),
      "xla_time_us": _rounded(medians[xla]),
      "jax": jax.__version__,
      "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
      "command": command,
  }
  if not kernels:
    failures = [one.failure for one in found if one.failure is not None]
    evidence[FAILURES] = f"all {len(failures)} kernels failed, the first: {failures[0]}"
  return Row(job.problem, best.kernel, best.config, tuple(evidence.items()))


def _unmeasured(row: Row | None) -> bool:
  return row is None or FAILURES in dict(row.evidence)


def _measured_choice(plan: plans.Plan) -> tuple[Choice, bool]:
  """What is chosen, and whether by a table: fused products take such rows as well."""
  return _choice(plan), plan.source in ("user table", "table")


def _choice(plan: plans.Plan) -> Choice:
  return Choice(plan.kernel, plan.config)


def _check_extra() -> None:
  needed = ["filelock", "tqdm"]
  if user_table.ENVIRONMENT not in os.environ:
    needed.append("platformdirs")
  for name in needed:
    if importlib.util.find_spec(name) is None:
      raise ImportError(
          f"jaxgemm.autotune needs {name}, which the extra 'autotune' brings:"
          " pip install 'jaxgemm[autotune]'"
      )


def _rounded(time_us: float) -> float:
  return float(f"{time_us:.5g}")


def _figure(value: float | None, form: str) -> str:
  return "-" if value is None else format(value, form)
