"""Primitives of passes over memory that a kernel computes on one Hopper GPU, else XLA.

Their rules are those of the operations that `by_xla` names: derivatives, batches and
shards are XLA's. On one device, where the kernel serves, `by_kernel` is lowered instead;
on several, if there is `over_devices`, that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import functools
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxgemm.contexts import Target, device_of, emulates
from jaxgemm.device import supported
from jaxgemm.dims import are_known
from jaxgemm.lowering import in_emulator
from jaxgemm.lowering_rules import can_partition, lower_local, register
from pallas_kernels import compat

# Of operands, and `facts` by name: hashable, with the `target` that is lowered for.
Function = Callable[..., list[jax.Array]]


def define(
    name: str, by_xla: Function, by_kernel: Function,
    abstract_eval: Callable[..., Sequence[Any]], over_devices: Function | None = None,
) -> Primitive:
  """Returns a primitive of several results, all its rules registered.

  Args:
    name: of the primitive.
    by_xla: by_xla(*operands, facts=facts), differentiable.
    by_kernel: the same by a kernel, or by `by_xla` where none serves.
    abstract_eval: abstract_eval(*avals, facts=facts), with their shardings.
    over_devices: the same of what lies on several devices, for XLA's partitioner.
  """
  primitive = Primitive(name)
  primitive.multiple_results = True

  def lower_xla(ctx, *operands, facts):
    return mlir.lower_fun(by_xla, multiple_results=True)(ctx, *operands, facts=facts)

  def lower_kernel(ctx, *operands, facts):
    num_devices, _, _ = compat.lowering_mesh(ctx)
    known = are_known(size for aval in ctx.avals_in for size in aval.shape)
    if known and over_devices and can_partition(ctx) and not compat.is_exported(ctx):
      function = functools.partial(over_devices, facts=facts)
      return mlir.lower_fun(function, multiple_results=True)(ctx, *operands)
    if num_devices > 1 or not known:  # XLA shards what it knows, and takes any sizes.
      return lower_xla(ctx, *operands, facts=facts)
    function = functools.partial(by_kernel, facts=facts)
    return lower_local(ctx, function, operands, multiple_results=True)

  def jvp(primals, tangents, *, facts):
    tangents = tuple(map(ad.instantiate_zeros, tangents))
    return jax.jvp(functools.partial(by_xla, facts=facts), tuple(primals), tangents)

  def batch(operands, axes, *, facts):
    found = jax.vmap(functools.partial(by_xla, facts=facts), tuple(axes))(*operands)
    return found, [0] * len(found)

  primitive.def_abstract_eval(abstract_eval)
  register(primitive, lower_xla, lower_kernel, lambda facts: facts.target)
  ad.primitive_jvps[primitive] = jvp
  batching.primitive_batchers[primitive] = batch
  return primitive


def run(launch: Callable[..., Any], operands: Sequence[jax.Array], target: Target | None):
  """launch(operands), on the chip, or in the emulator if the target says so."""
  if emulates(target):
    return in_emulator(launch, jax.eval_shape(launch, operands), operands)
  return launch(operands)


def serving_device(target: Target | None):
  """The device whose kernels may serve, or None."""
  device = device_of(target)
  return device if supported(device) else None
