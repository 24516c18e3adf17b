"""cotangents_p: the cotangents of a layer's products, and the gradients of its biases.

On one Hopper GPU `pallas_kernels.cotangents` computes all of it in one pass; elsewhere,
where its results are sharded, and where that kernel does not serve, XLA does.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
from jax import lax
import jax.numpy as jnp

from jaxgemm import passes
from jaxgemm.contexts import Target
from pallas_kernels import compat
from pallas_kernels import cotangents as kernel
from pallas_kernels.problem import Activation


@dataclasses.dataclass(frozen=True)
class Pass:
  """The parameters of cotangents_p.

  Its operands are what enters the activation (two arrays if gated, none without one)
  and the cotangent, all of one shape and dtype. Its results are the cotangent of each
  product, where that is another, and if `sums` the float32 sum of each over all
  dimensions but the last `bias_rank`.
  """

  activation: Activation
  gated: bool
  sums: bool
  bias_rank: int
  by_xla: bool
  target: Target | None

  def facts(self, shape, dtype) -> kernel.Cotangents:
    """What the kernel wants to know of operands like this."""
    cols = math.prod(shape[len(shape) - self.bias_rank :])
    rows = math.prod(shape[: len(shape) - self.bias_rank])
    return kernel.Cotangents(
        rows, cols, jnp.dtype(dtype).name, self.activation, self.gated, self.sums
    )


def cotangents(entering, ct, facts: Pass) -> tuple[list[jax.Array], list[jax.Array]]:
  """The cotangent of each product, and the sum of each if wanted."""
  if not entering and not facts.sums:
    return [ct], []
  operands = compat.vary_alike(*entering, ct)
  found = cotangents_p.bind(*operands, facts=facts)
  return found[: len(entering)] or [ct], found[len(entering) :]


def _by_xla(*operands, facts: Pass) -> list[jax.Array]:
  *entering, ct = (lax.convert_element_type(x, jnp.float32) for x in operands)
  shape, dtype = operands[-1].shape, operands[-1].dtype
  found = kernel.derivatives(facts.facts(shape, dtype), entering, ct)
  rows = tuple(range(len(shape) - facts.bias_rank))
  sums = [jnp.sum(x, rows) for x in found] if facts.sums else []
  stored = found[: len(entering)]
  return [lax.convert_element_type(x, dtype) for x in stored] + sums


def _by_kernel(*operands, facts: Pass) -> list[jax.Array]:
  shape, dtype = operands[-1].shape, operands[-1].dtype
  device, its = passes.serving_device(facts.target), facts.facts(shape, dtype)
  if facts.by_xla or device is None or kernel.supports(its) is not None:
    return _by_xla(*operands, facts=facts)
  flat = [lax.reshape(x, (its.rows, its.cols)) for x in operands]
  launch = functools.partial(kernel.launch, facts=its, num_sms=device.num_sms)
  found, sums = passes.run(launch, flat, facts.target)
  bias_shape = shape[len(shape) - facts.bias_rank :]
  return [lax.reshape(x, shape) for x in found] + [
      lax.reshape(x, bias_shape) for x in sums
  ]


def _abstract_eval(*operands, facts: Pass):
  ct = operands[-1]
  rows = tuple(range(ct.ndim - facts.bias_rank))
  total, _ = lax.reduce_sum_p.abstract_eval(
      ct.update(dtype=jnp.dtype("float32")), axes=rows, out_sharding=None
  )
  return [ct] * (len(operands) - 1) + [total] * ((1 + facts.gated) * facts.sums)


cotangents_p = passes.define("jaxgemm_cotangents", _by_xla, _by_kernel, _abstract_eval)
