"""Random problems, legal configs and plans: what experiments/fuzz.py runs."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random

import jax.numpy as jnp
import numpy as np

from jaxgemm import exactness, triton_heuristics
from jaxgemm import plan as plans
from jaxgemm.device import Device
from jaxgemm.plan import Plan
from pallas_kernels import KERNELS, parts, tiles, triton
from pallas_kernels.configs import Config
from pallas_kernels.problem import ALGORITHMS, OUT_DTYPES, Epilogue, Problem

Array = np.ndarray


@dataclasses.dataclass(frozen=True)
class Bounds:
  """How large problems may be.

  Attributes:
    size: m, n and k.
    elements: of the result.
    products: of two numbers, in all.
    calls: of one program, where its result has few elements.
  """

  size: int
  elements: int
  products: int
  calls: int


JUDGED = 256  # Elements whose errors together say something.
ON_GPU = Bounds(4096, 1 << 20, 1 << 27, calls=JUDGED)
EMULATED = Bounds(512, 1 << 14, 1 << 20, calls=1)  # Each takes a second or so.

_WEIGHTS = {
    "bfloat16": 3, "float16": 2, "float32": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int8": 1,
}
_FACTORS = (1.0, -0.5, 2.0)
_MOST_BATCHES = 5
_NUM_SMS = (1, 5, 132)
_TRIES = 400  # Illegal configs, after which there is none.
# k up to which sums of parts are exact in any config: see exactness.is_as_exact.
_MOST_OF_PARTS = 1024
_CHOICES = {
    "tile_m": (64, 128, 192, 256),
    "tile_n": (*range(16, 128, 16), *range(128, 385, 64)),
    "num_stages": range(2, 9),
    "consumers": (1, 2, 3),
    "wg_dim": ("m", "n", "tile"),
    "cluster_m": (1, 1, 2, 4),
    "cluster_n": (1, 1, 2, 4),
    "grid_minor": ("m", "n"),
    "grid_width": (1, 3, 8),
    "misaligned": ("padded", "padded", "loads", "skewed", "runs"),
    "swap": (False, False, True),
    "splits": range(1, 17),
    "cluster_k": (1, 1, 2, 3, 4, 5, 8),
    "num_warps": (4, 8),
}
_TRITON_CHOICES = {
    "tile_m": (16, 32, 64, 128), "tile_n": (16, 32, 64, 128), "tile_k": (16, 32, 64),
    "num_stages": (1, 2, 3, 4), "splits": (1, 1, 2, 5),
}


def draw_problem(rng: random.Random, bounds: Bounds, *, empty: bool = True) -> Problem:
  """Returns a problem: sizes log-uniform from 1 on, half of them multiples of 8.

  One in three has a c, and one in four is a batch, of which an operand may be shared.
  One in 32 has a size of 0, unless it has 8-bit operands or `empty` is false. 8-bit
  floats have bfloat16 results:
  the tensor cores sum them to 14 bits, which a wider result would show. So do results of
  few elements, if they are not called again and again: what their sums lose is chance.
  """
  (dtype,) = rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))
  algorithm = rng.choice([name for name, of in ALGORITHMS.items() if of == dtype])
  batch = rng.randint(2, _MOST_BATCHES) if rng.random() < 1 / 4 else 1
  shared = [(True, True), (True, False), (False, True)]
  lhs_batched, rhs_batched = rng.choice(shared) if batch > 1 else shared[0]
  sizes = [_size(rng, bounds.size) for _ in range(3)]
  while batch * sizes[0] * sizes[1] > bounds.elements:
    sizes[sizes[1] > sizes[0]] //= 2
  while batch * math.prod(sizes) > bounds.products:
    sizes[sizes.index(max(sizes))] //= 2
  wide = jnp.dtype(dtype).itemsize > 1
  if empty and wide and rng.random() < 1 / 32:
    sizes[rng.randrange(3)] = 0
  m, n, k = sizes
  out_dtype, epilogue = "int32", Epilogue()
  if dtype != "int8":
    few = batch * m * n * bounds.calls < JUDGED
    out_dtype = "bfloat16" if few or not wide else rng.choice(OUT_DTYPES)
    if rng.random() < 1 / 3:
      epilogue = Epilogue(
          rng.choice(_FACTORS), rng.choice(_FACTORS), rng.choice(OUT_DTYPES)
      )
  return Problem(
      m, n, k, batch, lhs_batched, rhs_batched,
      lhs_layout=rng.choice(("k-major", "m-major")),
      rhs_layout=rng.choice(("n-major", "k-major")),
      dtype=dtype, out_dtype=out_dtype, algorithm=algorithm, epilogue=epilogue,
  )


def _size(rng: random.Random, largest: int) -> int:
  size = min(largest, int(2 ** rng.uniform(0, math.log2(largest + 1))))
  return size if rng.random() < 0.5 else max(8, size // 8 * 8)


def draw_config(
    rng: random.Random, problem: Problem, kernel: str, device: Device
) -> Config | None:
  """Returns a legal config that keeps sums as exact as promised, or None."""
  if problem.algorithm in ("bf16_x6", "bf16_x9") and problem.k > _MOST_OF_PARTS:
    return None
  default = KERNELS[kernel].Config()
  choices = _CHOICES | (_TRITON_CHOICES if kernel == triton.NAME else {})
  for _ in range(_TRIES):
    drawn = {
        name: rng.choice(choices[name]) for name in vars(default) if name in choices
    }
    if "tile_k" in vars(default) and kernel != triton.NAME:
      drawn["tile_k"] = tiles.swizzle_elems(parts.product(problem).dtype)
    config = dataclasses.replace(default, **drawn)
    if "promote" in vars(default):
      config = dataclasses.replace(config, promote=_promote(rng, problem, config))
    if _why_not(problem, kernel, config, device) is None:
      return config
  return None


def _promote(rng: random.Random, problem: Problem, config: Config) -> int:
  """Returns after how many k tiles to promote: whatever shows no truncation."""
  k_steps = tiles.cdiv(problem.k, config.tile_k)
  most = exactness.promotion(
      problem, tiles.cdiv(k_steps, getattr(config, "splits", 1))
  )
  if most or parts.is_split(problem):
    return rng.randint(1, max(1, most))
  return rng.choice((0, 0, 1, 3))


def _why_not(
    problem: Problem, kernel: str, config: Config, device: Device
) -> str | None:
  if kernel == triton.NAME:
    return triton_heuristics.supports(problem, config, device)
  return KERNELS[kernel].supports(problem, config)


def draw_plans(
    rng: random.Random, problem: Problem, device: Device, configs: int
) -> list[tuple[Plan, Device]]:
  """Returns what to run of a problem, each with the device as it is told of it.

  The plan of every implementation that serves, and `configs` that are drawn; XLA's, of
  jaxgemm.gemm, where the problem is empty.
  """
  if not problem.flops:
    return [(plans.make_plan(problem, device), device)]
  found = []
  for kernel in KERNELS:
    with contextlib.suppress(ValueError):
      found.append((plans.make_plan(problem, device, implementation=kernel), device))
  for _ in range(configs):
    kernel = rng.choice([plan.kernel for plan, _ in found])
    config = draw_config(rng, problem, kernel, device)
    if config is not None:
      few = dataclasses.replace(device, num_sms=rng.choice(_NUM_SMS))
      found.append((Plan(kernel, config, "drawn", "drawn", problem), few))
  return found
