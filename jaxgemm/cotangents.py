"""cotangents_p: the cotangents of a layer's products, and the gradients of its biases.

Its rules are those of the element-wise operations that it stands for. On one Hopper GPU
`pallas_kernels.cotangents` computes all of it in one pass; elsewhere, where its results
are sharded, and where that kernel does not serve, XLA does.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
import jax.numpy as jnp

from jaxgemm.contexts import Target
from jaxgemm.device import current_device, supported
from jaxgemm.lowering import in_emulator
from pallas_kernels import compat
from pallas_kernels import cotangents as kernel
from pallas_kernels.problem import Activation

cotangents_p = Primitive("jaxgemm_cotangents")
cotangents_p.multiple_results = True


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
  device = current_device() if facts.target is None else facts.target.device
  emulated = facts.target is not None and facts.target.emulate
  shape, dtype = operands[-1].shape, operands[-1].dtype
  its = facts.facts(shape, dtype)
  if facts.by_xla or not supported(device) or kernel.supports(its) is not None:
    return _by_xla(*operands, facts=facts)
  flat = [lax.reshape(x, (its.rows, its.cols)) for x in operands]
  launch = functools.partial(kernel.launch, facts=its, num_sms=device.num_sms)
  if emulated:
    out = jax.eval_shape(launch, flat)
    found, sums = in_emulator(launch, out, flat)
  else:
    found, sums = launch(flat)
  bias_shape = shape[len(shape) - facts.bias_rank :]
  return [lax.reshape(x, shape) for x in found] + [
      lax.reshape(x, bias_shape) for x in sums
  ]


def _impl(*operands, facts: Pass):
  with jax.disable_jit(False):
    return _jitted(facts)(*operands)


@functools.lru_cache(maxsize=1024)
def _jitted(facts: Pass):
  return jax.jit(functools.partial(cotangents_p.bind, facts=facts))


def _lower(ctx, *operands, facts: Pass):
  """For every platform but CUDA."""
  if facts.target is not None and facts.target.emulate:
    return _lower_kernel(ctx, *operands, facts=facts)
  return mlir.lower_fun(_by_xla, multiple_results=True)(ctx, *operands, facts=facts)


def _lower_kernel(ctx, *operands, facts: Pass):
  num_devices, _, _ = compat.lowering_mesh(ctx)
  if num_devices > 1:  # XLA shards what it knows.
    return mlir.lower_fun(_by_xla, multiple_results=True)(ctx, *operands, facts=facts)
  # What runs on one device knows nothing of the mesh in its operands' types.
  local = ctx.replace(
      avals_in=[jax.core.ShapedArray(a.shape, a.dtype) for a in ctx.avals_in]
  )
  lowered = mlir.lower_fun(_by_kernel, multiple_results=True)
  return lowered(local, *operands, facts=facts)


def _abstract_eval(*operands, facts: Pass):
  ct = operands[-1]
  rows = tuple(range(ct.ndim - facts.bias_rank))
  total, _ = lax.reduce_sum_p.abstract_eval(
      ct.update(dtype=jnp.dtype("float32")), axes=rows, out_sharding=None
  )
  return [ct] * (len(operands) - 1) + [total] * ((1 + facts.gated) * facts.sums)


def _jvp(primals, tangents, *, facts: Pass):
  tangents = tuple(ad.instantiate_zeros(x) for x in tangents)
  function = functools.partial(_by_xla, facts=facts)
  return jax.jvp(function, tuple(primals), tangents)


def _batch(operands, axes, *, facts: Pass):
  found = jax.vmap(functools.partial(_by_xla, facts=facts), tuple(axes))(*operands)
  return found, [0] * len(found)


cotangents_p.def_impl(_impl)
cotangents_p.def_abstract_eval(_abstract_eval)
mlir.register_lowering(cotangents_p, _lower)
mlir.register_lowering(cotangents_p, _lower_kernel, platform="cuda")
compat.requires_devices(cotangents_p)
ad.primitive_jvps[cotangents_p] = _jvp
batching.primitive_batchers[cotangents_p] = _batch
