"""How long XLA is thought to take, and where it is chosen."""

from __future__ import annotations

import pytest

from jaxgemm import heuristics, xla_times
from jaxgemm.device import known_device
from pallas_kernels.problem import Problem
from tests import kernel_cases

pytestmark = pytest.mark.slow  # The other JAX version need not run them too.

H200 = known_device("NVIDIA H200")


@pytest.mark.parametrize(
    "problem",
    [Problem(2, 768, k, rhs_layout="k-major") for k in (1024, 16384, 65536, 2**22)]
    + [Problem(1, 4096, 4096, dtype=dtype, out_dtype=dtype, algorithm=algorithm)
       for dtype, algorithm in (("float32", "bf16_x6"), ("float32", "tf32_f32"))]
    + [Problem(3, 5000, 5000, 64, rhs_batched=False), Problem(8192, 8192, 64)],
    ids=str,
)
def test_xla_is_never_expected_below_the_floor(problem):
  found = xla_times.estimate(problem, H200)
  memory_us = problem.num_bytes / (H200.bandwidth_tbps * 1e6)
  busy_us = problem.flops / (H200.tflops(problem.dtype) * 1e6)
  assert found is None or found[0] >= max(memory_us, busy_us)


@pytest.mark.parametrize(("cols", "k"), [(4096, 4097), (1000, 30011)])
def test_a_row_of_odd_k_is_ours(cols, k):
  """XLA pads it in a pass, and took three times as long (H200, 2026-11-25)."""
  problem = Problem(1, cols, k, rhs_layout="k-major")
  assert heuristics.candidates(problem, H200)[0].kernel != "xla"


def test_xla_is_weighed_where_it_may_be_faster():
  for m, n, k, weighed, chosen in (
      (120, 357, 19, True, False),
      (64, 64, 8, True, False),  # 1.2 us, `direct` 1.3.
      (120, 360, 64, True, False),
      # Crooked rows of the result, and little else: 13.3 us, `direct` 13.2.
      (7488, 2344, 16, True, False),
      (3744, 3304, 16, True, False),
      (1064, 4240, 16, True, False),  # 4.8 us, `direct` 4.0.
      (3336, 6432, 8, True, False),  # A result of 43 MB: 12.8 us, `direct` 12.4.
      (477, 1337, 13, True, False),
      (4096, 4096, 64, True, False),
      (2047, 2049, 511, True, False),
      (333, 777, 22223, True, False),
      # A few results of a long k: 3.7 us, as `direct` took before it copied.
      (16, 88, 4096, True, False),
      (16, 16, 16384, True, True),  # 3.8 us, ours 4.7.
      (40, 88, 1024, False, False),
      (24, 16, 1040, False, False),
      (120, 360, 72, False, False),  # TMA takes the operands as they are.
  ):
    listed = heuristics.candidates(Problem(m, n, k), H200)
    assert any(c.kernel == "xla" for c in listed) == weighed, (m, n, k)
    assert (listed[0].kernel == "xla") == chosen, (m, n, k)


@pytest.mark.parametrize(
    "m, n, k, layouts", [(479, 1048, 73, "TT"), (472, 1440, 87, "NT")], ids=str
)
def test_xla_takes_four_us_where_strides_are_odd(m, n, k, layouts):
  """It had been thought to take 2.6 and 3.2, and took 4.3 and 4.4; direct 3.2 and 3.4."""
  listed = heuristics.candidates(kernel_cases.make_problem(m, n, k, layouts), H200)
  (xla,) = (c for c in listed if c.kernel == "xla")
  assert listed[0].kernel == "direct" and 4.0 < xla.time_us < 5.5


@pytest.mark.parametrize(
    ("m", "n", "layouts", "chosen"),
    [
        (1, 4096, "NT", True),  # The weights are read along k, as memory has them.
        (1, 2048, "NN", False),
        (1, 14336, "NN", False),  # gemv adds up columns as fast.
        (4096, 1, "NN", True),
    ],
)
def test_xla_is_chosen_for_one_row_of_float32_along_k(m, n, layouts, chosen):
  lhs_layout = "k-major" if layouts[0] == "N" else "m-major"
  rhs_layout = "k-major" if layouts[1] == "T" else "n-major"
  problem = Problem(
      m, n, 4096, lhs_layout=lhs_layout, rhs_layout=rhs_layout, dtype="float32",
      out_dtype="float32", algorithm="bf16_x6",
  )
  assert (heuristics.candidates(problem, H200)[0].kernel == "xla") == chosen
