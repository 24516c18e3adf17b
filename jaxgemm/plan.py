"""From a problem to a plan: override, then measured, then heuristic, then XLA.

Measured is what a table has a row of: first the user's own, which jaxgemm.autotune
writes, then the one that we ship.
"""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import functools
import math
from typing import Any

import jax.numpy as jnp

from jaxgemm import (
  exactness,
  grouped_heuristics,
  heuristics,
  invariance,
  ring_slots,
  table,
  triton_heuristics,
  user_table,
  xla_times,
)
from jaxgemm.cost_constants import MODEL
from jaxgemm.device import Device, supported
from jaxgemm.precision import ERRORS
from pallas_kernels import ALL_KERNELS, GROUPED_KERNELS, gemv, tiles, triton
from pallas_kernels.configs import Config
from pallas_kernels.problem import Problem

IMPLEMENTATIONS = (*ALL_KERNELS, "xla")


@dataclasses.dataclass(frozen=True)
class Plan:
  """Which kernel computes a problem, and why.

  Attributes:
    kernel: a key of pallas_kernels.ALL_KERNELS, or "xla".
    config: the kernel's config, or None for XLA.
    source: "override", "user table" (jaxgemm/user_table.py), "table" (the shipped
      one), "heuristic" or "fallback".
    reason: in words.
    problem: what is planned.
  """

  kernel: str
  config: Config | None
  source: str
  reason: str
  problem: Problem

  def __str__(self) -> str:
    config = "" if self.config is None else f" {self.config}"
    lines = [f"{self.problem}: {self.kernel}{config}"]
    if self.kernel != "xla":
      lines.append(f"{self.problem.algorithm}: {ERRORS[self.problem.algorithm]}")
    return "\n  ".join((*lines, f"{self.source}: {self.reason}"))


@functools.lru_cache(maxsize=4096)
def make_plan(
    problem: Problem, device: Device | None, *, implementation: str | None = None,
    config: Config | None = None, batch_invariant: bool = False,
) -> Plan:
  """The plan of a problem on a device: a pure function of its arguments and tables.

  Each table is read once a process; see `forget_tables`.

  Args:
    problem: what to compute, as it is: see `jaxgemm.forms`.
    device: where; None stands for any device that the kernels do not know.
    implementation: None, a kernel's name or "xla".
    config: the config of that kernel; alone, it also names its kernel.
    batch_invariant: whether a row's result must be the same, bit by bit, whatever other
      rows there are.
  Returns: a plan, always: XLA's where no kernel serves, unless it is asked for more.
  Raises:
    ValueError: the named kernel, or for `batch_invariant` any, cannot serve; the message
      names the operand, the dimension and the constraint, or the device.
  """
  if batch_invariant:
    return _invariant(problem, device, implementation, config)
  implementation = check_implementation(implementation, config)
  if implementation == "xla":
    return Plan("xla", None, "override", "implementation='xla'", problem)
  if not (problem.batch and problem.m and problem.n and problem.k):
    reason = "the product is empty or sums nothing, so that no kernel need run"
    return Plan("xla", None, "fallback", reason, problem)
  if implementation is not None:
    return _named(problem, device, implementation, config)
  if (reason := _why_none_runs(device)) is not None:
    return Plan("xla", None, "fallback", reason, problem)
  for source, row in _rows(problem, device):
    return Plan(row.kernel, row.config, source, row.reason(problem), problem)
  for candidate in candidates(problem, device):
    return Plan(
        candidate.kernel, candidate.config, "heuristic", candidate.reason, problem
    )
  reason = "no kernel serves this problem"
  if problem.grouped:
    kernel = GROUPED_KERNELS[f"grouped_{problem.grouped}"]
    reason = kernel.supports(problem, kernel.Config()) or reason
  return Plan("xla", None, "fallback", reason, problem)


def converting(
    problem: Problem, sources: tuple[str, str], device: Device | None, *, attached: str
) -> Plan | None:
  """The plan of a kernel that converts an operand itself, if that is faster.

  Which saves a pass over a matrix that few rows of another multiply: weights in 8 bits,
  or in float32, which XLA converts in its own kernel.

  Args:
    problem: of the operands once they are converted.
    sources: dtypes of what lhs and rhs are converted from, by name; "": they are not.
    device: where.
    attached: "lhs" or "rhs" if its array is at hand as it was before its conversion; "".
  Returns: XLA's plan, or one of ours, whose problem names what it converts, or None.
  """
  empty = not (problem.batch and problem.m and problem.n and problem.k)
  if empty or problem.itemsize != 2 or not supported(device):
    return None
  sizes = {"lhs": math.prod(problem.lhs_shape), "rhs": math.prod(problem.rhs_shape)}
  name = max(sizes, key=sizes.__getitem__)
  source = sources[list(sizes).index(name)]
  found = candidates(problem.canonical, device)
  if not source or not found:
    return None
  moved = sizes[name] * (jnp.dtype(source).itemsize + problem.itemsize)
  apart_us = found[0].time_us + MODEL.pass_launch + moved / MODEL.pass_rate
  narrow = dataclasses.replace(problem, **{f"{name}_source": source}).canonical
  if attached == name:
    plan = make_plan(narrow, device)
    found = candidates(narrow, device)
    if plan.kernel != "xla":
      return plan if found[0].time_us < 0.95 * apart_us else None
  if problem.grouped:  # XLA multiplies by all groups' matrices.
    return None
  if xla_times.converting(narrow, device) > 0.95 * apart_us:
    return None
  return Plan("xla", None, "heuristic", f"it converts {name} within its kernel", problem)


def normed(problem: Problem, device: Device | None) -> Plan | None:
  """The plan of a kernel that normalises lhs, if that is faster than a pass that does.

  Args:
    problem: whose lhs is to be normalised.
    device: where.
  Returns: one of ours, or None.
  """
  plan = make_plan(problem, device)
  if plan.kernel == "xla":
    return None
  within, *_ = candidates(problem, device)
  alone = dataclasses.replace(problem, norm_eps=None).canonical
  apart_us = min(each.time_us for each in candidates(alone, device))
  return plan if within.time_us < apart_us + MODEL.pass_launch else None


def summed(problem: Problem, device: Device | None) -> Plan | None:
  """The plan of one kernel that adds up products, if that is faster than several.

  Of those each but the first adds the sum of the ones before it to its own.

  Args:
    problem: of several terms.
    device: where.
  Returns: one of ours, or None.
  """
  plan = make_plan(problem, device)
  if plan.kernel == "xla":
    return None
  epilogue = dataclasses.replace(problem.epilogue, beta=1.0, c_dtype=problem.out_dtype)
  further = dataclasses.replace(problem.term, epilogue=epilogue)
  within_us, first_us, further_us = (
      candidates(each, device)[0].time_us for each in (problem, problem.term, further)
  )
  apart_us = first_us + (problem.terms - 1) * further_us
  return plan if within_us < apart_us else None


def _invariant(
    problem: Problem, device: Device | None, implementation: str | None,
    config: Config | None,
) -> Plan:
  """The plan that gives a row of the result the same bits whatever the others are."""
  if not (problem.batch and problem.m and problem.n and problem.k):
    return make_plan(problem, device)
  plan = make_plan(problem, device, implementation=implementation, config=config)
  reason = invariance.why_not(problem, plan.config)
  if reason is None:
    return plan
  if plan.source == "fallback":
    raise ValueError(f"batch_invariant: no kernel serves {problem}: {plan.reason}")
  if config is None and implementation != "xla":
    for found in candidates(problem, device):
      named = implementation in (None, found.kernel)
      if named and invariance.why_not(problem, found.config) is None:
        why = f"batch invariant; {found.reason}"
        return Plan(found.kernel, found.config, "heuristic", why, problem)
  raise ValueError(f"batch_invariant: {plan.kernel} cannot serve {problem}: {reason}")


def candidates(
    problem: Problem, device: Device, *, everything: bool = False
) -> tuple[heuristics.Candidate, ...]:
  """The candidates for a problem on a device that a kernel serves, the best first.

  Args:
    problem, device: what to compute, and where.
    everything: also those of the portable kernel on Hopper, after the others: a tuner
      may measure what the estimates never choose.
  """
  if problem.grouped:
    return grouped_heuristics.candidates(problem, device) if supported(device) else ()
  portable = ()
  if triton_heuristics.why_not(device) is None:
    portable = triton_heuristics.candidates(problem, device)
  if not supported(device):
    return portable
  found = heuristics.candidates(problem, device)
  return (*found, *portable) if everything else found


def describe(plan: Plan, device: Device | None) -> str:
  """The plan in words, and the candidates that the heuristics weighed."""
  lines = [str(plan)]
  if plan.source != "fallback" and _why_none_runs(device) is None:
    found = candidates(plan.problem, device)
    if plan.kernel == triton.NAME:  # It has rivals of its own kind.
      found = triton_heuristics.candidates(plan.problem, device)
    lines.append(f"  the best of {len(found)} candidates on {device.kind}:")
    lines += [
        f"    {c.time_us:9.1f} us  {c.kernel} {c.config or ''} ({c.reason})"
        for c in found[:8]
    ]
  return "\n".join(lines)


def check_implementation(implementation: Any, config: Any) -> str | None:
  """The implementation that the two arguments name; ValueError where none is."""
  if implementation is not None and implementation not in IMPLEMENTATIONS:
    raise ValueError(
        f"implementation {implementation!r} is unknown; it is None or one of"
        f" {', '.join(map(repr, IMPLEMENTATIONS))}"
    )
  if config is None:
    return implementation
  kernels = [
      name for name, kernel in ALL_KERNELS.items() if type(config) is kernel.Config
  ]
  if implementation is None and kernels:
    return kernels[0]
  if implementation not in kernels:
    of = "any kernel" if implementation is None else f"implementation {implementation!r}"
    raise ValueError(
        f"config {config!r} is not a config of {of}: those are in"
        " pallas_kernels.configs, PersistentConfig and others"
    )
  return implementation


def forget_tables() -> None:
  """Makes the next plan read the user's table anew.

  What is traced already keeps its plans until `jax.clear_caches()`.
  """
  user_table.forget()
  make_plan.cache_clear()


def _rows(problem: Problem, device: Device) -> Iterator[tuple[str, table.Row]]:
  """The measured plans of a problem, each with its source; the one that counts first.

  XLA's counts for nothing but what was measured, a kernel's if it serves the problem,
  maybe with fewer slots than the one that was measured.
  """
  alike = table.alike(problem)
  for source, lookup in (("user table", user_table.lookup), ("table", table.lookup)):
    for row in filter(None, (lookup(one, device) for one in alike)):
      if row.kernel == "xla":
        if row.problem == problem:
          yield source, row
      # A row of the portable kernel is of no use once its packages are gone.
      elif _why_not(row.kernel, device) is None:
        config = ring_slots.with_room(problem, row.kernel, row.config)
        if config is not None:
          yield source, dataclasses.replace(row, config=config)


def _named(
    problem: Problem, device: Device | None, name: str, config: Config | None
) -> Plan:
  """The plan with a kernel that the caller insists on."""
  if name == triton.NAME and (package := triton.missing_package()) is not None:
    raise ValueError(
        f"implementation {name!r} needs the package {package}:"
        " pip install jaxgemm[triton]"
    )
  reason = _why_not(name, device)
  if reason is not None:
    raise ValueError(
        f"implementation {name!r} cannot run: {reason}."
        " jaxgemm.emulate() runs it on a CPU, jaxgemm.target() lowers it for a GPU"
        " that is not here"
    )
  kernel = ALL_KERNELS[name]
  why = f"implementation={name!r}"
  if config is None:
    for _, row in _rows(problem, device):
      if row.kernel == name:
        why = f"{why}; {row.reason(problem)}"
        return Plan(name, row.config, "override", why, problem)
    found = (
        triton_heuristics.candidates(problem, device) if name == triton.NAME
        else candidates(problem, device)
    )
    for candidate in found:
      if candidate.kernel == name:
        why = f"{why}; {candidate.reason}"
        return Plan(name, candidate.config, "override", why, problem)
    config = _default_config(problem, name)
    if name == "split_k":  # The heuristics split no small k, which the caller wants.
      for candidate in found:
        if candidate.kernel == "persistent" and candidate.config.wg_dim != "tile":
          config = kernel.Config(**vars(candidate.config), splits=2)
          break
  if name == triton.NAME:
    reason = triton_heuristics.supports(problem, config, device)
  else:
    reason = kernel.supports(problem, config)
  if reason is not None:
    raise ValueError(f"implementation {name!r} cannot serve {problem}: {reason}")
  return Plan(name, config, "override", why, problem)


def _default_config(problem: Problem, name: str) -> Config:
  """That of a kernel which no candidate has, as exact as those."""
  config = ALL_KERNELS[name].Config()
  if name in (gemv.NAME, triton.NAME):
    return config
  tile_k = tiles.swizzle_elems(problem.dtype)
  promote = exactness.promotion(problem, tiles.cdiv(problem.k, tile_k))
  config = dataclasses.replace(config, tile_k=tile_k, promote=promote)
  if promote and ALL_KERNELS[name].supports(problem, config) is not None:
    return dataclasses.replace(config, tile_m=64)  # Two sums need registers.
  return config


def _why_not(name: str, device: Device | None) -> str | None:
  """The reason why a kernel cannot run on a device, or None."""
  if name == triton.NAME:
    return triton_heuristics.why_not(device)
  return None if supported(device) else _why_unsupported(device)


def _why_none_runs(device: Device | None) -> str | None:
  """The reason why no kernel can run on a device, or None."""
  if supported(device):
    return None
  reason = triton_heuristics.why_not(device)
  if reason is None or device is None:
    return reason and _why_unsupported(device)
  return f"{_why_unsupported(device)}; for the portable kernel, {reason}"


def _why_unsupported(device: Device | None) -> str:
  needs = "the kernels need an NVIDIA GPU of compute capability 9.0 (Hopper)"
  if device is None:
    return f"{needs}, and the default device is none"
  return f"{needs}, and {device.kind} has {device.compute_capability}"
