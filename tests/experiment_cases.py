"""Cases and rows that the tests of the experiments share."""

from __future__ import annotations

from experiments import gate, products, report, suites
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


class Cupti:
  """Stands in for Mosaic GPU's CUPTI bindings: a session records what is launched."""

  def __init__(self):
    self.active = False
    self.sessions = []

  def _cupti_init(self):
    self.active = True
    self.sessions.append([])

  def _cupti_get_timings(self, finalize):
    self.active = False
    self.finalized = finalize
    return list(self.sessions[-1])

  def variant(self, *kernels, calls=None):
    """Returns a function of an array that launches (name, ms) kernels."""

    def function(array):
      if calls is not None:
        calls.append(array)
      if self.active:
        self.sessions[-1].extend(kernels)
      return array

    return function
