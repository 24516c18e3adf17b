"""The problems, kernels and configs of the question of occupancy."""

from __future__ import annotations

from experiments import products, suites
from experiments.lab import variants
from pallas_kernels.configs import (
  BlockedConfig,
  Config,
  PersistentConfig,
  PipelinedConfig,
  SplitKConfig,
)
from pallas_kernels.problem import Problem

_WG_THREADS = 128


def cases(lab: variants.Lab) -> list[suites.Case]:
  shapes = lab.pick(
      full=[(16, 4096, 4096), (4096, 4096, 4096)], quick=[(4096, 4096, 4096)],
      emulated=[(64, 64, 128)],
  )
  return [suites.make_case(*shape) for shape in shapes]


def _configs(lab: variants.Lab) -> list[Config]:
  if not lab.on_gpu:
    return [BlockedConfig(64, 64), PipelinedConfig(64, 64, num_stages=2)]
  return [
      BlockedConfig(128, 128), BlockedConfig(64, 64),
      *(PipelinedConfig(128, 128, num_stages=stages) for stages in (2, 3, 4, 6)),
      *(PipelinedConfig(64, 64, num_stages=stages) for stages in (2, 4, 8)),
      PersistentConfig(64, 64, num_stages=4, consumers=1),
      PersistentConfig(128, 128, num_stages=4),
      PersistentConfig(128, 256, num_stages=3),
      PersistentConfig(128, 256, num_stages=4, cluster_m=2),
      PersistentConfig(128, 192, num_stages=4, wg_dim="tile"),
      SplitKConfig(128, 128, num_stages=4, splits=2),
      SplitKConfig(128, 128, num_stages=4, splits=2, cluster_k=2),
  ]


def kernels(lab: variants.Lab, problem: Problem) -> list[variants.Variant]:
  """Returns each kernel and config."""
  found = []
  for config in _configs(lab):
    kernel = next(
        name for name, x in variants.TILE_KERNELS.items() if type(config) is x.Config
    )
    name = products.describe_config(kernel, config, brief=True)
    stages = getattr(config, "num_stages", 1)
    consumers = getattr(config, "consumers", 0)
    details = {
        "prefetch": stages - 1,
        "threads": _WG_THREADS * (consumers + 1),  # A producer beside the consumers.
    }
    found.append(variants.of_kernel(lab, problem, name, config, details=details))
  return found
