"""Candidates: the kernels and configs that may serve a problem, the best first.

Pure functions of (Problem, Device), and of the times that `cost_model` estimates.
"""

from __future__ import annotations

from collections.abc import Iterable
import dataclasses
import functools
import math
from typing import Any

from jaxgemm import cost_model, kernel_configs, multicasts, tile_orders, xla_times
from jaxgemm.device import Device
from pallas_kernels import KERNELS, gemv
from pallas_kernels.configs import CLUSTER_AXES, Config, PersistentConfig
from pallas_kernels.problem import Problem

_LEAST_TF32 = 16  # XLA multiplies smaller float32 operands without tensor cores.
_WORTH_SHARING = 1.5  # Times the least estimate.


@dataclasses.dataclass(frozen=True)
class Candidate:
  """A kernel and config that serve a problem, and their estimated time."""

  kernel: str
  config: Config | None
  time_us: float
  what: Any  # What the estimate consists of; put into words only when asked for.

  @property
  def reason(self) -> str:
    return str(self.what)


@functools.lru_cache(maxsize=64)
def candidates(problem: Problem, device: Device) -> tuple[Candidate, ...]:
  """Every candidate for a problem, the fastest by estimate first."""
  alone = _estimated(problem, kernel_configs.listed(problem, device), device)
  # What is slow by far without multicast need not be weighed.
  least = min(map(_time, alone), default=0.0)
  fast = [
      (c.kernel, c.config) for c in alone if c.time_us < _WORTH_SHARING * least
  ]
  shared = multicasts.shared(problem, fast)
  # First among equals: multicast moves less data, which tells when clocks fall.
  found = sorted(_estimated(problem, shared, device) + alone, key=_time)
  estimate = xla_times.estimate(problem, device)
  if estimate is not None:
    xla = Candidate("xla", None, *estimate)
    exact = problem.algorithm == "tf32_f32" and (
        min(problem.m, problem.n, problem.k) < _LEAST_TF32
    )
    faster, slower = [], []
    for c in found:
      allowed = c.kernel == gemv.NAME or not exact
      (faster if allowed and c.time_us < xla.time_us else slower).append(c)
    found = [*faster, xla, *slower]
  return tuple(found)


def _time(candidate: Candidate) -> float:
  return candidate.time_us


def _estimated(
    problem: Problem, configs: Iterable[tuple[str, Config]], device: Device
) -> list[Candidate]:
  """Those of the configs that serve here, with their estimated times.

  A GPU of few SMs, such as a part of one, runs no large clusters.
  """
  found = []
  for kernel, config in configs:
    cluster = math.prod(getattr(config, axis, 1) for axis in CLUSTER_AXES)
    if device.max_clusters(cluster) and KERNELS[kernel].supports(problem, config) is None:
      if isinstance(config, PersistentConfig):
        config = tile_orders.ordered(problem, config, device)
      estimate = cost_model.estimate(problem, kernel, config, device)
      found.append(Candidate(kernel, config, estimate.time_us, estimate))
  return found
