"""Cases and rows that the tests of the experiments share."""

from __future__ import annotations

from experiments import gate, products, report, suites
from jaxgemm.autotune import profile
from jaxgemm.device import known_device

H200 = known_device("NVIDIA H200")
PROVENANCE = report.Provenance(
    suite="a suite", device="NVIDIA H200", jax="1.2.3", commit="abc", date="today",
    command="python -m experiments.run",
)
FIELDS = [
    "suite", "class", "name", "batch", "m", "n", "k", "lhs_layout", "rhs_layout",
    "dtype", "out_dtype", "precision", "implementation", "plan", "time_us",
    "spread_us", "tflops", "gbps", "ratio_to_xla", "floor_share", "error",
    "xla_error", "device", "jax", "commit", "date", "command",
]
CASE = suites.make_case(1000, 500, 2000, "TN", "float16")
# Problems that leave the heuristics a choice.
SWEPT = [
    suites.make_case(16, 4096, 4096),
    suites.make_case(512, 1024, 2048, "NT"),
    suites.make_case(4096, 2048, 512, "TT", "float16"),
    suites.make_case(1001, 1003, 517),
    suites.make_case(768, 768, 8192, "TN"),
    suites.make_case(256, 512, 1024, dtype="float32"),
]


def make_row(
    case=CASE, implementation="xla", *, verdict=None, plan="the plan", **changes
) -> report.Row:
  candidate = products.Candidate(implementation, plan, implementation, None)
  return report.make_row(
      case, candidate, PROVENANCE, verdict=verdict or gate.Verdict(1e-3, None),
      xla_error=2e-3, device=H200, **changes,
  )


MARK = "flush", "mark"  # What stands in for the kernels between turns.


class Gpu:
  """Stands in for the GPU that XLA's profiler sees: a session is a profile's kernels.

  One kernel follows the other, 1 us later, or `early_us` before the other's end.
  """

  def __init__(self):
    self.active = False
    self.sessions: list[list[tuple[str, float]]] = []
    self._ran: list[profile.Kernel] = []

  def kernels(self, run) -> list[profile.Kernel]:
    """As `profile.kernels`."""
    self.active, self._ran = True, []
    self.sessions.append([])
    run()
    self.active = False
    return self._ran

  def launch(self, name: str, time_ms: float, early_us: float = -1.0) -> None:
    """Runs a kernel for `time_ms` beyond the end of the one before it."""
    if not self.active:
      return
    self.sessions[-1].append((name, time_ms))
    end_ns = self._ran[-1].end_ns if self._ran else 0.0
    start_ns = end_ns - 1e3 * early_us
    self._ran.append(
        profile.Kernel(start_ns, max(start_ns, end_ns) + 1e6 * time_ms, name, "")
    )

  def variant(self, *kernels, calls=None):
    """Returns a function of an array that launches kernels: see `launch`."""

    def function(array):
      if calls is not None:
        calls.append(array)
      for kernel in kernels:
        self.launch(*kernel)
      return array

    return function
