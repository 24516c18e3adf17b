"""Kernels on the chip, held against float64 and the baseline."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxgemm import reference
from jaxgemm.device import current_device
from pallas_kernels import TILE_KERNELS as KERNELS
from tests import kernel_cases


def launch(kernel: str, problem, config, operands) -> jax.Array:
  module = KERNELS[kernel]
  assert module.supports(problem, config) is None
  num_sms = current_device().num_sms
  # A freed buffer of NaN where the result is likely to come to lie: a kernel that
  # leaves an element unwritten then shows it.
  jnp.full(problem.out_shape, jnp.nan, problem.out_dtype).block_until_ready()
  return jax.jit(lambda *x: module.launch(x, problem, config, num_sms=num_sms))(*operands)


def check(kernel: str, problem, config, seed=0) -> None:
  check_all(problem, [(kernel, config)], seed)


def check_all(problem, launches, seed=0) -> None:
  """Each (kernel, config) of `launches` is at most twice as far off as the baseline."""
  operands = kernel_cases.random_operands(problem, seed)
  truth = kernel_cases.truth(problem, operands)
  limit = max(2 * kernel_cases.baseline_error(problem, operands), 1e-7)
  for kernel, config in launches:
    error = reference.relative_error(launch(kernel, problem, config, operands), truth)
    assert error <= limit, (kernel, problem, config)
