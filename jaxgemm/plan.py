"""From a problem to a plan: override, then measured table, then heuristic, then XLA."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from jaxgemm import heuristics, table
from jaxgemm.device import Device, supported
from pallas_kernels import KERNELS
from pallas_kernels.problem import Config, Problem

IMPLEMENTATIONS = (*KERNELS, "xla")


@dataclasses.dataclass(frozen=True)
class Plan:
  """Which kernel computes a problem, and why.

  Attributes:
    kernel: a key of pallas_kernels.KERNELS, or "xla".
    config: the kernel's config, or None for XLA.
    source: "override", "table", "heuristic" or "fallback".
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
    return f"{self.problem}: {self.kernel}{config}\n  {self.source}: {self.reason}"


@functools.lru_cache(maxsize=4096)
def make_plan(
    problem: Problem, device: Device | None, *, implementation: str | None = None,
    config: Config | None = None,
) -> Plan:
  """The plan of a problem on a device: a pure function of its arguments.

  Args:
    problem: what to compute.
    device: where; None stands for any device that the kernels do not know.
    implementation: None, a kernel's name or "xla".
    config: the config of that kernel; alone, it also names its kernel.
  Returns: a plan, always: XLA's where no kernel serves and none is named.
  Raises:
    ValueError: the named kernel cannot serve; the message names the operand, the
      dimension and the constraint, or the device.
  """
  implementation = check_implementation(implementation, config)
  if implementation == "xla":
    return Plan("xla", None, "override", "implementation='xla'", problem)
  if not (problem.batch and problem.m and problem.n and problem.k):
    reason = "the product is empty or sums nothing, so that no kernel need run"
    return Plan("xla", None, "fallback", reason, problem)
  if implementation is not None:
    return _named(problem, device, implementation, config)
  if not supported(device):
    return Plan("xla", None, "fallback", _why_unsupported(device), problem)
  row = table.lookup(problem, device)
  if row is not None:
    return Plan(row.kernel, row.config, "table", row.reason, problem)
  for candidate in heuristics.candidates(problem, device):
    return Plan(
        candidate.kernel, candidate.config, "heuristic", candidate.reason, problem
    )
  return Plan("xla", None, "fallback", "no kernel serves this problem", problem)


def describe(plan: Plan, device: Device | None) -> str:
  """The plan in words, and the candidates that the heuristics weighed."""
  lines = [str(plan)]
  if supported(device) and plan.source != "fallback":
    candidates = heuristics.candidates(plan.problem, device)
    lines.append(f"  the best of {len(candidates)} candidates on {device.kind}:")
    lines += [
        f"    {c.time_us:9.1f} us  {c.kernel} {c.config or ''} ({c.reason})"
        for c in candidates[:8]
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
  kernels = [name for name, kernel in KERNELS.items() if type(config) is kernel.Config]
  if implementation is None and kernels:
    return kernels[0]
  if implementation not in kernels:
    raise ValueError(
        f"config {config!r} is not a config of implementation {implementation!r}"
    )
  return implementation


def run(plan: Plan, operands, device: Device, interpret=None):
  """Launches the planned kernel on operands [batch, ., .], as the problem has them."""
  kernel = KERNELS[plan.kernel]
  return kernel.launch(
      operands, plan.problem, plan.config, num_sms=device.num_sms, interpret=interpret
  )


def _named(
    problem: Problem, device: Device | None, name: str, config: Config | None
) -> Plan:
  """The plan with a kernel that the caller insists on."""
  if not supported(device):
    raise ValueError(
        f"implementation {name!r} cannot run: {_why_unsupported(device)}."
        " jaxgemm.emulate() runs it on a CPU, jaxgemm.target() lowers it for a GPU"
        " that is not here"
    )
  kernel = KERNELS[name]
  why = f"implementation={name!r}"
  if config is None:
    row = table.lookup(problem, device)
    if row is not None and row.kernel == name:
      return Plan(name, row.config, "override", f"{why}; {row.reason}", problem)
    candidates = heuristics.candidates(problem, device)
    for candidate in candidates:
      if candidate.kernel == name:
        why = f"{why}; {candidate.reason}"
        return Plan(name, candidate.config, "override", why, problem)
    config = kernel.Config()
    if name == "split_k":  # The heuristics split no small k, which the caller wants.
      for candidate in candidates:
        if candidate.kernel == "persistent":
          config = kernel.Config(**vars(candidate.config), splits=2)
          break
  reason = kernel.supports(problem, config)
  if reason is not None:
    raise ValueError(f"implementation {name!r} cannot serve {problem}: {reason}")
  return Plan(name, config, "override", why, problem)


def _why_unsupported(device: Device | None) -> str:
  needs = "the kernels need an NVIDIA GPU of compute capability 9.0 (Hopper)"
  if device is None:
    return f"{needs}, and the default device is none"
  return f"{needs}, and {device.kind} has {device.compute_capability}"
