"""scaled_p: the product of 8-bit values with the factors of rows, columns or blocks of k.

  out[b, m, n] = sum_k lhs * rhs, times rows[b, m] * cols[b, n]
  out[b, m, n] = sum over blocks q of k of their sum * rows[b, q, m] * cols[b, q, n / 128]

Planned where it is lowered, for one device or for its shards, as gemm_p is. It has no
derivatives: `scaled` gives those of the values.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import functools
import math
from typing import Literal

import jax
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
import jax.numpy as jnp

from jaxgemm import plan as plans
from jaxgemm.contexts import Target, device_of, emulates
from jaxgemm.dims import Dims, are_known
from jaxgemm.launch import run
from jaxgemm.layouts import ShardedArray, choose_layout
from jaxgemm.lowering import emulated_product
from jaxgemm.partitioning import added, of_one_device, sharding, with_arity
from jaxgemm.primitive import can_partition, check_not_exported, result_type
from jaxgemm.product import Product
from jaxgemm.quantisation import dequantise, num_blocks
from jaxgemm.recording import record_partitioned, record_plan
from pallas_kernels import compat
from pallas_kernels.problem import SCALE_BLOCK, Config, Epilogue, Problem

ALGORITHMS = {
    ("float8_e4m3fn", "float8_e4m3fn"): "e4m3_f32",
    ("float8_e5m2", "float8_e5m2"): "e5m2_f32",
    ("float8_e4m3fn", "float8_e5m2"): "e4m3_e5m2_f32",
    ("float8_e5m2", "float8_e4m3fn"): "e5m2_e4m3_f32",
}
# The dimensions of the operands: q are blocks of k, p those of n.
_GROUPS = {
    "rows": ("bmk", "bkn", "bm", "bn"),
    "blocks": ("bmk", "bkn", "bqm", "bqp"),
}


@dataclasses.dataclass(frozen=True)
class Scaled:
  """The parameters of scaled_p, whose operands are lhs, rhs, rows and cols.

  Attributes:
    scaling: what has factors: "rows" and columns, or "blocks" of k.
    out_dtype: dtype of the result, by name.
    implementation, config: as in jaxgemm.matmul.
    batch_invariant: whether a row's result must not depend on other rows.
    target: the device to plan for; None for the device that runs it.
    beside_collectives: whether those of other devices may run at the same time.
  """

  scaling: Literal["rows", "blocks"]
  out_dtype: str
  implementation: str | None
  config: Config | None
  batch_invariant: bool
  target: Target | None
  beside_collectives: bool = False


def scaled_product(lhs, rhs, rows, cols, facts: Scaled) -> jax.Array:
  """The product of lhs [b, m, k] and rhs [b, k, n], by its factors.

  Raises:
    ValueError: the named kernel, or one that is batch invariant, cannot serve.
  """
  operands = lhs, rhs, rows, cols
  if facts.implementation is not None or facts.batch_invariant:
    if are_known(size for x in operands for size in x.shape):
      _plan(facts, *operands)  # Raises here, where the user's call is.
  return scaled_p.bind(*operands, facts=facts)


def _plan(facts: Scaled, lhs, rhs, rows, cols) -> plans.Plan:
  del rows
  (batch, m, k), n = lhs.shape, rhs.shape[2]
  problem = Problem(
      m, n, k, batch, dtype=lhs.dtype.name, out_dtype=facts.out_dtype,
      algorithm=ALGORITHMS[lhs.dtype.name, rhs.dtype.name],
      epilogue=Epilogue(scaling=facts.scaling),
  )
  if facts.scaling == "blocks" and cols.shape[2] != num_blocks(n):
    reason = (
        f"rhs_scale has blocks of k, and {cols.shape[2]} columns where the kernel wants"
        f" one for every {SCALE_BLOCK}"
    )
    if facts.batch_invariant:
      raise ValueError(f"batch_invariant: no kernel serves: {reason}")
    if facts.implementation not in (None, "xla"):
      raise ValueError(
          f"implementation {facts.implementation!r} cannot serve: {reason}"
      )
    return plans.Plan("xla", None, "fallback", reason, problem)
  return plans.make_plan(
      problem, device_of(facts.target), implementation=facts.implementation,
      config=facts.config, batch_invariant=facts.batch_invariant,
  )


def _on_one_device(*operands, facts: Scaled) -> jax.Array:
  """By the planned kernel, or XLA's products."""
  plan = _plan(facts, *operands)
  record_plan(plan)
  if plan.kernel == "xla":
    return _by_xla(*operands, facts=facts)
  device = device_of(facts.target)
  launch = functools.partial(
      run, plan, device=device, beside_collectives=facts.beside_collectives
  )
  if emulates(facts.target):
    return emulated_product(plan, operands, launch)
  return launch(operands)


def _by_xla(lhs, rhs, rows, cols, *, facts: Scaled) -> jax.Array:
  """The same from XLA's products."""
  numbers = (((2,), (1,)), ((0,), (0,)))
  if facts.scaling == "rows":
    out = lax.dot_general(lhs, rhs, numbers, preferred_element_type=jnp.float32)
    out = out * rows[:, :, None] * cols[:, None, :]
  else:
    out = lax.dot_general(
        dequantise(lhs, rows.swapaxes(1, 2)), dequantise(rhs, cols), numbers,
        precision=lax.Precision.HIGHEST,
    )
  return out.astype(facts.out_dtype)


# -- Over several devices ----------------------------------------------------------


@functools.lru_cache(maxsize=256)
def _partitioned(facts: Scaled):
  """A function of the operands that XLA's partitioner knows how to shard."""
  groups = _GROUPS[facts.scaling]
  function = custom_partitioning(
      with_arity(functools.partial(_by_xla, facts=facts), len(groups))
  )
  function.def_partition(
      functools.partial(_partition, facts, groups),
      sharding_rule=f"{', '.join(' '.join(group) for group in groups)} -> b m n",
      reduction_factors=("k",),
      need_replication_factors=("q", "p") if facts.scaling == "blocks" else (),
  )
  return function


def _partition(facts: Scaled, groups, mesh, operands, result):
  """What each device computes, and how operands and result lie over the mesh.

  Blocks of k, and of n, are not cut: what would cut them lies whole.
  """
  arrays = [ShardedArray.of(*each) for each in zip(groups, operands, strict=True)]
  out, whole = ShardedArray.of("bmn", result), set[str]()
  if facts.scaling == "blocks":
    whole = cut_blocks((*arrays[:2], out), mesh)
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
      block: layout.parts.get(of, ()) for block, of in (("q", "k"), ("p", "n"))
  }
  local = dataclasses.replace(facts, beside_collectives=True)
  if emulates(facts.target):
    # JAX loses the host callbacks of a partition, so XLA computes the shards.
    local = dataclasses.replace(local, target=None, implementation=None, config=None)

  def compute(*operands):
    return added(_on_one_device(*operands, facts=local), out, reduction)

  return (
      mesh, of_one_device(compute), sharding(mesh, out, layout.result_parts(0)),
      tuple(sharding(mesh, array, parts) for array in arrays),
  )


def cut_blocks(arrays: Sequence[ShardedArray], mesh) -> set[str]:
  """Which of k and n some array has in shares that are not whole blocks."""
  found = set()
  for name in "kn":
    for array in arrays:
      count = math.prod(mesh.shape[axis] for axis in array.parts.get(name, ()))
      if array.sizes.get(name, 0) % (count * SCALE_BLOCK):
        found.add(name)
  return found


# -- Rules and registrations -------------------------------------------------------


# Without it: "Abstract evaluation for 'jaxgemm_scaled' not implemented".
def _abstract_eval(lhs, rhs, rows, cols, *, facts: Scaled):
  del rows, cols
  return result_type(lhs, rhs, Product(Dims(b=1), facts.out_dtype, "xla"))


# Without them: "MLIR translation rule for primitive 'jaxgemm_scaled' not found".
def _lower(ctx, *operands, facts: Scaled):
  """For every platform but CUDA: XLA's products, or the kernel emulated."""
  if emulates(facts.target):
    return _lower_kernel(ctx, *operands, facts=facts)
  return _lower_function(ctx, functools.partial(_by_xla, facts=facts), operands)


def _lower_kernel(ctx, *operands, facts: Scaled):
  num_devices, _, is_manual = compat.lowering_mesh(ctx)
  function = functools.partial(_by_xla, facts=facts)
  if are_known(size for aval in ctx.avals_in for size in aval.shape):
    if num_devices == 1:
      local = dataclasses.replace(facts, beside_collectives=is_manual)
      function = functools.partial(_on_one_device, facts=local)
    elif can_partition(ctx) and facts.implementation != "xla":
      check_not_exported(ctx, num_devices)
      record_partitioned()
      function = _partitioned(facts)
  # What runs on one device knows nothing of the mesh in its operands' types.
  local = ctx.replace(
      avals_in=[jax.core.ShapedArray(a.shape, a.dtype) for a in ctx.avals_in]
  )
  results = _lower_function(local, function, operands)
  return [
      compat.constrain_result(ctx, result, aval)
      for result, aval in zip(results, ctx.avals_out, strict=True)
  ]


def _lower_function(ctx, function, operands):
  return mlir.lower_fun(function, multiple_results=False)(ctx, *operands)


# Without it: "Batching rule for 'jaxgemm_scaled' not implemented".
def _batch(operands, axes, *, facts: Scaled):
  """The new batch joins the one that there is."""
  size = next(
      x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None
  )
  operands = [
      jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
      for x, axis in zip(operands, axes, strict=True)
  ]
  batch = operands[0].shape[1]
  joined = (x.reshape(size * batch, *x.shape[2:]) for x in operands)
  out = scaled_p.bind(*joined, facts=facts)
  return out.reshape(size, batch, *out.shape[1:]), 0


scaled_p = Primitive("jaxgemm_scaled")
scaled_p.def_abstract_eval(_abstract_eval)
compat.computes_by_lowering(scaled_p)
mlir.register_lowering(scaled_p, _lower)
mlir.register_lowering(scaled_p, _lower_kernel, platform="cuda")
# Else jit hides its devices from lowering rules, and nothing can be partitioned.
compat.requires_devices(scaled_p)
batching.primitive_batchers[scaled_p] = _batch
