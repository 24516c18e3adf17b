"""The same kernel lowers to the same bytes, however many were lowered before it.

JAX 0.11 names a kernel's debugging dumps by a count of all that the process has
lowered, and writes the name into the module: JAX's persistent compilation cache then
misses a program only because a tuner, or another thread, lowered something first,
and one kernel that a program runs twice compiles twice. JAX 0.12 leaves the name out.
"""

from __future__ import annotations

import os

import jax
from jax.experimental.mosaic.gpu import dialect
from jax.extend.mlir import ir

_ATTRIBUTE = "mosaic_gpu.dump_basename"


def keep_stable() -> None:
  """Names the dumps of our kernels by the kernels alone, those of others as ever."""
  dumping = any(name.startswith("MOSAIC_GPU_DUMP") for name in os.environ)
  if jax.__version_info__ >= (0, 12) or dumping:
    return
  get_or_set = dialect.get_or_set_dump_options

  def with_stable_name(module: ir.Module):
    attributes = module.operation.attributes
    if "sym_name" in attributes and _ATTRIBUTE not in attributes:
      name = ir.StringAttr(attributes["sym_name"]).value
      if name.startswith("jaxgemm_"):
        attributes[_ATTRIBUTE] = ir.StringAttr.get(name, context=module.context)
    return get_or_set(module)

  dialect.get_or_set_dump_options = with_stable_name
