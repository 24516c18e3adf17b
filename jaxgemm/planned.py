"""Primitives of a product and the arrays that belong to it, planned where it is lowered.

Those of scales and of groups of rows; gemm_p, whose dims are any, has rules of its own
(`primitive`). On one device the planned kernel computes it, of shards each device's, and
XLA whatever has no plan: symbolic sizes, devices without a mesh, other platforms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import functools
import math
from typing import Any, Protocol

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import batching

from jaxgemm.contexts import Target, emulates
from jaxgemm.dims import are_known
from jaxgemm.layouts import ShardedArray, choose_layout
from jaxgemm.lowering_rules import (
  can_partition,
  check_invariant,
  check_shards,
  lower_local,
  register,
)
from jaxgemm.partitioning import added, of_one_device, sharding, with_arity
from jaxgemm.recording import record_partitioned
from pallas_kernels import compat
from pallas_kernels.problem import SCALE_BLOCK

Function = Callable[..., jax.Array]  # Of operands, and `facts` by name.
_BLOCKS = {"q": "k", "p": "n"}  # What has one for every block of a dimension.


class Facts(Protocol):
  """The parameters of such a primitive: a frozen dataclass with these, among others.

  Attributes:
    scaling: "blocks" where blocks of k and n have scales, which are not cut.
    implementation, config, target: as of the user's call.
    batch_invariant: whether a row's result must not depend on other rows.
    beside_collectives: whether those of other devices may run at the same time.
    whole: the dimensions that are never cut.
    result: the dimensions of the result, a letter each.
  """

  scaling: str
  implementation: str | None
  config: Any
  target: Target | None
  batch_invariant: bool
  beside_collectives: bool
  whole: str
  result: str

  def operands(self, count: int) -> tuple[str, ...]:
    """The dimensions of the first `count` operands: q are blocks of k, p those of n."""


@dataclasses.dataclass(frozen=True)
class _Rules:
  by_xla: Function
  on_one_device: Function


def define(
    name: str, by_xla: Function, on_one_device: Function,
    abstract_eval: Callable[..., Any], batch: Callable[..., Any],
) -> Primitive:
  """Returns a primitive of one result that has no derivatives yet.

  Args:
    name: of the primitive.
    by_xla: by_xla(*operands, facts=facts).
    on_one_device: the same by the planned kernel, of operands that lie whole.
    abstract_eval: abstract_eval(*avals, facts=facts), with their shardings.
    batch: batch(operands, axes, facts=facts), the batching rule.
  """
  primitive, rules = Primitive(name), _Rules(by_xla, on_one_device)
  # Without it: "Abstract evaluation for 'jaxgemm_scaled' not implemented".
  primitive.def_abstract_eval(abstract_eval)
  register(
      primitive, functools.partial(_lower_xla, rules),
      functools.partial(_lower_kernel, rules), lambda facts: facts.target,
  )
  # Without it: "Batching rule for 'jaxgemm_scaled' not implemented".
  batching.primitive_batchers[primitive] = batch
  return primitive


def _lower_xla(
    rules: _Rules, ctx, *operands, facts: Facts, where: str = "on this platform"
):
  check_invariant(ctx, facts.batch_invariant, where)
  return _lower(ctx, functools.partial(rules.by_xla, facts=facts), operands)


def _lower_kernel(rules: _Rules, ctx, *operands, facts: Facts):
  """For CUDA (or emulated): the planned kernel, on each device's shards."""
  num_devices, _, is_manual = compat.lowering_mesh(ctx)
  by_xla = functools.partial(_lower_xla, rules, ctx, *operands, facts=facts)
  if not are_known(size for aval in ctx.avals_in for size in aval.shape):
    return by_xla(where="symbolic sizes")
  if num_devices == 1:
    local = dataclasses.replace(facts, beside_collectives=is_manual)
    function = functools.partial(rules.on_one_device, facts=local)
    return _lower(ctx, function, operands)
  if can_partition(ctx) and facts.implementation != "xla":
    check_shards(ctx, facts.target, facts.batch_invariant)
    record_partitioned()
    return _lower(ctx, _partitioned(rules, facts, len(operands)), operands)
  return by_xla(where="over several devices")


def _lower(ctx, function, operands):
  # XLA's products of groups have no rule for explicit axes, and a kernel has none.
  return lower_local(ctx, of_one_device(function), operands)


# -- Over several devices ----------------------------------------------------------


@functools.lru_cache(maxsize=256)
def _partitioned(rules: _Rules, facts: Facts, num_operands: int):
  """A function of the operands that XLA's partitioner knows how to shard."""
  function = custom_partitioning(
      with_arity(functools.partial(rules.by_xla, facts=facts), num_operands)
  )
  operands = facts.operands(num_operands)
  uncut = [*facts.whole, *(_BLOCKS if facts.scaling == "blocks" else "")]
  function.def_partition(
      functools.partial(_partition, rules, facts),
      sharding_rule=f"{', '.join(map(' '.join, operands))} -> {' '.join(facts.result)}",
      reduction_factors=("k",) if "k" in operands[0] else (),
      need_replication_factors=tuple(uncut),
  )
  return function


def _partition(rules: _Rules, facts: Facts, mesh, operands, result):
  """What each device computes, and how operands and result lie over the mesh."""
  names = facts.operands(len(operands))
  arrays = [ShardedArray.of(*each) for each in zip(names, operands, strict=True)]
  out, whole = ShardedArray.of(facts.result, result), set(facts.whole)
  if facts.scaling == "blocks":
    whole |= _cut_blocks((*arrays[:2], out), mesh)
  lhs, rhs, wanted = (
      dataclasses.replace(
          each, parts={x: axes for x, axes in each.parts.items() if x not in whole}
      )
      for each in (*arrays[:2], out)
  )
  layout = choose_layout([lhs, rhs], [wanted], dict(mesh.shape))
  (reduction,) = layout.reductions
  # A block lies where its elements do.
  parts = layout.parts | {
      block: layout.parts.get(of, ()) for block, of in _BLOCKS.items()
  }
  local = dataclasses.replace(facts, beside_collectives=True)
  if emulates(facts.target):
    # JAX loses the host callbacks of a partition, so XLA computes the shards.
    local = dataclasses.replace(local, target=None, implementation=None, config=None)

  def compute(*operands):
    return added(rules.on_one_device(*operands, facts=local), wanted, reduction)

  return (
      mesh, of_one_device(compute), sharding(mesh, wanted, layout.result_parts(0)),
      tuple(sharding(mesh, array, parts) for array in arrays),
  )


def _cut_blocks(arrays: Sequence[ShardedArray], mesh) -> set[str]:
  """Which of k and n some array has in shares that are not whole blocks."""
  found = set()
  for name in _BLOCKS.values():
    for array in arrays:
      count = math.prod(mesh.shape[axis] for axis in array.parts.get(name, ()))
      if array.sizes.get(name, 0) % (count * SCALE_BLOCK):
        found.add(name)
  return found
