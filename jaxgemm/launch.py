"""Launches the kernel of a plan."""

from __future__ import annotations

from jaxgemm.device import Device
from jaxgemm.plan import Plan
from pallas_kernels import GROUPED_KERNELS, KERNELS, persistent, triton
from pallas_kernels.problem import Problem

# Of a round of a persistent kernel beside collectives, about. The tensor-parallel step of
# a Llama block on two H200s, whose products take 650 us, has 0.96, 0.985, 0.995, 0.98,
# 0.974 of XLA's speed with rounds of 60, 100, 160, 240, 320 us, and 0.958 without. Alone,
# such a product takes 1 to 1.6% longer in four rounds.
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
  kernel, config = (KERNELS | GROUPED_KERNELS)[plan.kernel], plan.config
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
  """In how many rounds a persistent kernel does its tiles beside collectives.

  The kernel of a collective gets SMs where CTAs end, and the other devices wait for it:
  in one round, until the product is done. If it is there first, the CTAs that find no SM
  begin with their share of the tiles when others have ended with theirs.
  """
  time_us = problem.flops / (device.tflops(problem.dtype) * 1e6)
  return max(1, round(time_us / _ROUND_US))
