"""Launches the kernel of a plan."""

from __future__ import annotations

from jaxgemm.device import Device
from jaxgemm.plan import Plan
from pallas_kernels import KERNELS, persistent, triton
from pallas_kernels.problem import Problem

# Of a round of a persistent kernel beside collectives, about. In a Llama block on two
# H200s four rounds of products of 650 us had data-parallel steps go from 0.97 of XLA's
# speed to 1.06, tensor-parallel ones from 0.99 to 1.01.
_ROUND_US = 160.0


def run(
    plan: Plan, operands, device: Device, interpret=None, *,
    beside_collectives: bool = False,
):
  """The results of the planned kernel.

  Args:
    plan: of a kernel, not of XLA.
    operands: [batch, ., .], as plan.problem has them.
    device: where it runs.
    interpret: parameters of the GPU interpret mode, or None.
    beside_collectives: whether kernels of collectives may want SMs while it runs.
  """
  kernel, config = KERNELS[plan.kernel], plan.config
  options = {}
  if plan.kernel == triton.NAME:  # Compiled where it is lowered, maybe for elsewhere.
    options["compute_capability"] = device.compute_capability
  if plan.kernel == persistent.NAME and beside_collectives:
    options["rounds"] = num_rounds(plan.problem, device)
  # Of a persistent grid more CTAs would run in two waves.
  at_once = device.ctas_at_once(getattr(config, "cluster", 1))
  return kernel.launch(
      operands, plan.problem, config, num_sms=at_once, interpret=interpret, **options
  )


def num_rounds(problem: Problem, device: Device) -> int:
  """Rounds of a persistent kernel while which collectives get SMs soon enough.

  The kernel of a collective gets SMs where CTAs end, and the other devices wait for it.
  If it was there before, CTAs that find no SM begin with all of their tiles once others
  are done with theirs.
  """
  time_us = problem.flops / (device.tflops(problem.dtype) * 1e6)
  return max(1, round(time_us / _ROUND_US))
