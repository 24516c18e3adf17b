"""How the driver launches a program's kernels: registers, shared memory, threads.

XLA's profiler (jax.profiler) notes them of each kernel, through CUPTI. A kernel's
registers are those at launch: what setmaxnreg moves between warpgroups later does not
show.

Mosaic's profiler, which times, uses CUPTI too, and the two do not alternate: to time
after XLA's profiler has run in the same process aborts it ("activity records were
dropped"). So a process first times all that it has to, and asks for launches then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import math
import pathlib
import re
import tempfile
from typing import Any
import warnings

import jax
from jax.profiler import ProfileData

from experiments.lab.rows import Launch

_DETAILS = re.compile(
    r"regs:(\d+)\s+static_shared:(\d+)\s+dynamic_shared:(\d+)\s+grid:([\d,]+)"
    r"\s+block:([\d,]+)"
)


def of_call(product: Callable[..., Any], inputs: tuple[jax.Array, ...]) -> Launch | None:
  """Returns how the longest kernel of a call is launched; None if none was seen."""
  jax.block_until_ready(product(*inputs))
  options = jax.profiler.ProfileOptions()
  options.host_tracer_level = options.python_tracer_level = 0  # The device's alone.
  options.enable_hlo_proto = False
  with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder, profiler_options=options):
      jax.block_until_ready(product(*inputs))
    for path in sorted(pathlib.Path(folder).rglob("*.xplane.pb")):
      return longest(ProfileData.from_file(str(path)))
  return None


def _kernels(profile: ProfileData) -> Iterator[tuple[float, str, re.Match[str]]]:
  """Yields the duration, the name and the details of each kernel."""
  for plane in profile.planes:
    if plane.name.startswith("/device:GPU"):
      for line in plane.lines:
        for event in line.events:
          for key, value in event.stats:
            if key == "kernel_details" and (match := _DETAILS.match(str(value))):
              yield event.duration_ns, event.name, match


def longest(profile: ProfileData) -> Launch | None:
  """Returns the launch of the longest kernel of a profile, and how many there were."""
  with warnings.catch_warnings():
    # JAX 0.11 warns of a type of its own; as an error that ends the process.
    warnings.simplefilter("ignore", DeprecationWarning)
    found = list(_kernels(profile))
  if not found:
    return None
  _, name, match = max(found, key=lambda one: one[0])
  registers, static, dynamic, grid, block = match.groups()
  return Launch(
      kernel=name,
      registers=int(registers),
      smem_bytes=int(static) + int(dynamic),
      threads=math.prod(map(int, block.split(","))),
      ctas=math.prod(map(int, grid.split(","))),
      kernels=len(found),
  )
