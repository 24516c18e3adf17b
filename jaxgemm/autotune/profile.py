"""What ran on the GPU, and when: kernels as XLA's profiler sees them, through CUPTI."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
import pathlib
import tempfile
from typing import NamedTuple
import warnings

import jax
from jax.profiler import ProfileData

_DETAILS = "kernel_details"  # What kernels have, and copies and memory sets have not.


class Kernel(NamedTuple):
  """A kernel that ran.

  Attributes:
    start_ns, end_ns: on a clock of the profile's own.
    name: the function's.
    details: the driver's words on how it was launched.
  """

  start_ns: float
  end_ns: float
  name: str
  details: str


def kernels(run: Callable[[], object]) -> list[Kernel]:
  """Returns the kernels that `run()` launches, in the order in which they start.

  Copies and memory sets are not among them, what runs on other GPUs of the process is.
  What `run` returns is waited for.
  """
  options = jax.profiler.ProfileOptions()
  options.host_tracer_level = options.python_tracer_level = 0  # The device's alone.
  options.enable_hlo_proto = False
  with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder, profiler_options=options):
      jax.block_until_ready(run())
    found = [
        kernel
        for path in pathlib.Path(folder).rglob("*.xplane.pb")
        for kernel in of_profile(ProfileData.from_file(str(path)))
    ]
  return sorted(found)


def of_profile(profile: ProfileData) -> Iterator[Kernel]:
  """Yields the kernels of a profile."""
  with warnings.catch_warnings():
    # JAX 0.11 warns of a type of its own; as an error that ends the process.
    warnings.simplefilter("ignore", DeprecationWarning)
    for plane in profile.planes:
      if plane.name.startswith("/device:GPU"):
        for line in plane.lines:
          for event in line.events:
            details = dict(event.stats).get(_DETAILS)
            if details is not None:
              end_ns = event.start_ns + event.duration_ns
              yield Kernel(event.start_ns, end_ns, event.name, str(details))


def exposed_us(ran: Iterable[Kernel]) -> Iterator[float]:
  """Yields what each of the kernels, in the order of their starts, adds to the time.

  That is the time from its start, or from the end of those before it if that is later,
  to its end, in microseconds. A kernel may start before the one before it has ended,
  and wait for it (programmatic dependent launch): sums of durations count such time
  twice. XLA launches its own kernels so, 0.4 us early, or 2 us where they split k.
  """
  covered_ns = float("-inf")
  for kernel in ran:
    yield max(0.0, kernel.end_ns - max(kernel.start_ns, covered_ns)) / 1e3
    covered_ns = max(covered_ns, kernel.end_ns)
