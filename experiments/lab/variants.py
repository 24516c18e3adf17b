"""What a question runs: variants of a problem, and where it runs them."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
from types import ModuleType
from typing import Any

import jax

from experiments import cli, products, report
from experiments.lab.rows import XLA
from experiments.suites import Case
from jaxgemm.device import Device
from jaxgemm.plan import make_plan
from pallas_kernels import TILE_KERNELS, compat
from pallas_kernels.configs import Config
from pallas_kernels.problem import Problem

KernelModule = ModuleType  # With NAME, supports, smem_bytes and launch.


@dataclasses.dataclass(frozen=True)
class Lab:
  """Where the questions are asked, and how thoroughly.

  Attributes:
    platform: where.
    quick: whether fewer problems and variants will do.
    seed: of all operands.
    repeats: timed calls of each variant; 0 times nothing.
    provenance: what all rows share.
  """

  platform: cli.Platform
  quick: bool
  seed: int
  repeats: int
  provenance: report.Provenance

  @property
  def on_gpu(self) -> bool:
    return self.platform.on_gpu

  @property
  def device(self) -> Device:
    assert self.platform.device is not None
    return self.platform.device

  def pick[T](self, *, full: T, quick: T, emulated: T) -> T:
    """Returns what to ask here: `emulated` is small enough for a CPU."""
    if not self.on_gpu:
      return emulated
    return quick if self.quick else full


@dataclasses.dataclass(frozen=True, eq=False)
class Variant:
  """One way to compute a problem.

  Attributes:
    name: what tables call it; XLA, and only then, is the baseline.
    candidate: what runs, not yet compiled; without a product where nothing can.
    config: of its kernel.
    inputs: how its operands are drawn; its baseline has the same.
    smem_bytes: shared memory of one CTA, if the kernel says.
    details: for the row.
  """

  name: str
  candidate: products.Candidate
  config: Config | None = None
  inputs: str = "normal"
  smem_bytes: int | None = None
  details: dict[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def is_xla(self) -> bool:
    return self.name == XLA


@dataclasses.dataclass(frozen=True)
class Job:
  """A problem and the variants that are timed in turn.

  Attributes:
    table: of the question's tables, the one that its rows belong to.
    case: the problem.
    variants: XLA among them, first, for each way to draw operands.
    repeats: timed calls of each variant; None: as the lab has it.
    launches: whether to ask how the driver launches each.
  """

  table: str
  case: Case
  variants: Sequence[Variant]
  repeats: int | None = None
  launches: bool = False


def xla(lab: Lab, problem: Problem, **fields) -> Variant:
  """Returns the baseline."""
  candidate = products.make_candidate(
      problem, "xla", lab.device, emulated=not lab.on_gpu
  )
  return Variant(XLA, candidate, **fields)


def planned(lab: Lab, problem: Problem, name: str = "jaxgemm", **fields) -> Variant:
  """Returns what jaxgemm chooses."""
  plan = make_plan(problem.canonical, lab.device)
  candidate = products.make_candidate(
      problem, "auto", lab.device, emulated=not lab.on_gpu
  )
  smem_bytes = _smem_bytes(plan.kernel, plan.problem, plan.config)
  return Variant(name, candidate, plan.config, smem_bytes=smem_bytes, **fields)


def of_kernel(
    lab: Lab, problem: Problem, name: str, config: Config, **fields
) -> Variant:
  """Returns a kernel of the library with a config; n/a where it cannot serve."""
  kernel = next(key for key, x in TILE_KERNELS.items() if type(config) is x.Config)
  reason = TILE_KERNELS[kernel].supports(problem, config)
  if reason is not None:
    return unavailable(name, reason, **fields)
  candidate = products.make_candidate(
      problem, kernel, lab.device, emulated=not lab.on_gpu, config=config
  )
  smem_bytes = _smem_bytes(kernel, problem, config)
  return Variant(name, candidate, config, smem_bytes=smem_bytes, **fields)


def of_experiment(
    lab: Lab, problem: Problem, name: str, module: KernelModule, config: Any, **fields
) -> Variant:
  """Returns a kernel of the laboratory, which has no batch; n/a if it cannot serve."""
  reason = module.supports(problem, config)
  if reason is not None:
    return unavailable(name, reason, **fields)
  num_sms = lab.device.num_sms if lab.on_gpu else 4

  def launch(lhs: jax.Array, rhs: jax.Array, interpret=None) -> jax.Array:
    operands = lhs[None], rhs[None]
    return module.launch(
        operands, problem, config, num_sms=num_sms, interpret=interpret
    )[0]

  def emulated(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return compat.run_interpreted(lambda params: launch(lhs, rhs, params))

  words = products.describe_config(module.NAME, config)
  product = jax.jit(launch) if lab.on_gpu else emulated
  candidate = products.Candidate(module.NAME, words, module.NAME, product)
  smem_bytes = module.smem_bytes(problem, config)
  return Variant(name, candidate, config, smem_bytes=smem_bytes, **fields)


def unavailable(name: str, reason: str, **fields) -> Variant:
  """Returns what cannot run, and says why."""
  return Variant(name, products.Candidate(name, f"n/a: {reason}", name, None), **fields)


def _smem_bytes(kernel: str, problem: Problem, config: Config | None) -> int | None:
  if kernel not in TILE_KERNELS:
    return None
  return TILE_KERNELS[kernel].smem_bytes(problem, config)
