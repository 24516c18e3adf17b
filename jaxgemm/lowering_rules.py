"""How primitives are lowered: XLA's operations, or the kernels of one device or shard.

`register` makes a primitive lower by the kernels for CUDA and where they are emulated,
and by XLA elsewhere. What else several primitives' rules have in common is here, too.
"""

from __future__ import annotations

from collections.abc import Callable
import math
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jaxgemm.contexts import Target, emulates
from pallas_kernels import compat

Rule = Callable[..., Any]  # Of a context, operands, and the primitive's parameters.


def register(
    primitive: Primitive, lower_xla: Rule, lower_kernels: Rule,
    target_of: Callable[..., Target | None],
) -> None:
  """Registers both rules; elsewhere than on CUDA `target_of(**parameters)` chooses."""

  def lower(ctx, *operands, **parameters):
    """For every platform but CUDA."""
    rule = lower_kernels if emulates(target_of(**parameters)) else lower_xla
    return rule(ctx, *operands, **parameters)

  # Without it: "Evaluation rule for 'jaxgemm' not implemented", outside of jit.
  compat.computes_by_lowering(primitive)
  # Without them: "MLIR translation rule for primitive 'jaxgemm' not found".
  mlir.register_lowering(primitive, lower)
  mlir.register_lowering(primitive, lower_kernels, platform="cuda")
  # Else jit hides its devices from lowering rules, and nothing can be partitioned.
  compat.requires_devices(primitive)


def lower_local(ctx, function, operands, *, multiple_results: bool = False):
  """What a function lowers to that knows nothing of the mesh in its operands' types."""
  local = ctx.replace(
      avals_in=[jax.core.ShapedArray(a.shape, a.dtype) for a in ctx.avals_in]
  )
  lowered = mlir.lower_fun(function, multiple_results=multiple_results)
  return [
      compat.constrain_result(ctx, result, aval)
      for result, aval in zip(lowered(local, *operands), ctx.avals_out, strict=True)
  ]


def check_invariant(ctx, batch_invariant: bool, where: str) -> None:
  """Raises where no kernel can run, which `where` says, and XLA's product must not."""
  if batch_invariant and all(math.prod(aval.shape) for aval in ctx.avals_in):
    raise ValueError(
        f"batch_invariant: no kernel serves {where}; those that are need an NVIDIA GPU of"
        " compute capability 9.0 (Hopper), or jaxgemm.emulate()"
    )


def can_partition(ctx) -> bool:
  """Whether a computation is for several devices, whose mesh names their shards."""
  num_devices, mesh, is_manual = compat.lowering_mesh(ctx)
  named = mesh is not None and not is_manual and jax.config.jax_use_shardy_partitioner
  return num_devices > 1 and named


def check_shards(ctx, target: Target | None, batch_invariant: bool) -> None:
  """Raises where shards that XLA's partitioner makes cannot be what they must be.

  Of exported products it would have to make them in another process; under
  `jaxgemm.emulate` they are XLA's products, as JAX loses the emulator's callbacks.
  """
  num_devices, *_ = compat.lowering_mesh(ctx)
  if batch_invariant and emulates(target):
    raise ValueError(
        f"batch_invariant: of a product that jit shares out over {num_devices} devices,"
        " XLA computes the shards under jaxgemm.emulate(): put it in a jax.shard_map"
    )
  if compat.is_exported(ctx):
    raise NotImplementedError(
        f"jax.export of a product that jit shares out over {num_devices} devices: XLA"
        " would have to call back into this process to partition it; put it in a"
        " jax.shard_map, or name implementation='xla'"
    )
