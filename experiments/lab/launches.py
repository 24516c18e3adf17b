"""How the driver launches a program's kernels: registers, shared memory, threads.

XLA's profiler notes them of each kernel, through CUPTI. A kernel's registers are those at
launch: what setmaxnreg moves between warpgroups later does not show.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import math
import re
from typing import Any

import jax

from experiments.lab.rows import Launch
from experiments.timing import profile

_DETAILS = re.compile(
    r"regs:(\d+)\s+static_shared:(\d+)\s+dynamic_shared:(\d+)\s+grid:([\d,]+)"
    r"\s+block:([\d,]+)"
)


def of_call(product: Callable[..., Any], inputs: tuple[jax.Array, ...]) -> Launch | None:
  """Returns how the longest kernel of a call is launched; None if none was seen."""
  jax.block_until_ready(product(*inputs))
  return longest(profile.kernels(lambda: product(*inputs)))


def longest(ran: Sequence[profile.Kernel]) -> Launch | None:
  """Returns the launch of the longest of some kernels, and how many there are."""
  known = [(kernel, match) for kernel in ran if (match := _DETAILS.match(kernel.details))]
  if not known:
    return None
  kernel, match = max(known, key=lambda one: one[0].end_ns - one[0].start_ns)
  registers, static, dynamic, grid, block = match.groups()
  return Launch(
      kernel=kernel.name,
      registers=int(registers),
      smem_bytes=int(static) + int(dynamic),
      threads=math.prod(map(int, block.split(","))),
      ctas=math.prod(map(int, grid.split(","))),
      kernels=len(known),
  )
