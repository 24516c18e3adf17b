"""The frame that every kernel's launch shares: operands in, result out."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import epilogue as epilogues
from pallas_kernels import operand_tiles, parts
from pallas_kernels.problem import Config, Problem


@dataclasses.dataclass(frozen=True)
class Call:
  """Operands and epilogue of one launch.

  Calling it runs `kernel(lhs_gmem, rhs_gmem, c_gmem, out_gmem, refs)`; see `run`.
  """

  result: Problem
  prepared: operand_tiles.Prepared
  epilogue: epilogues.Epilogue
  inputs: tuple[jax.Array, ...]
  interpret: Any

  def __call__(self, kernel: Callable[..., None], **kwargs) -> jax.Array:
    return run(
        kernel, self.inputs, self.result, self.epilogue, interpret=self.interpret,
        **kwargs,
    )


def run(
    kernel: Callable[..., None], inputs: tuple[jax.Array, ...], result: Problem,
    epilogue: epilogues.Epilogue, *, name: str, scratch: dict[str, Any], grid: int,
    num_wgs: int, cluster: int = 1, workspace: dict[str, Any] | None = None, interpret,
) -> jax.Array:
  """Runs `kernel(*inputs, c_gmem, out_gmem, refs)` and returns what it stored.

  The grid is `grid` clusters (axis "cta") of `cluster` CTAs (axis "cluster") of
  `num_wgs` warpgroups (axis "wg"). `c_gmem`, the last input, is None without c;
  `refs` is the scratch by name, the epilogue's and the `workspace` in GMEM included.
  """
  workspace = workspace or {}
  out = jax.ShapeDtypeStruct(result.out_shape, jnp.dtype(result.out_dtype))

  def body(*gmem, **refs):
    sources, (out_gmem, *arrays) = list(gmem[: len(inputs)]), gmem[len(inputs) :]
    if epilogue.c is None:
      sources.append(None)
    kernel(*sources, out_gmem, refs | dict(zip(workspace, arrays, strict=True)))

  result, *_ = plgpu.kernel(
      body,
      out_type=[out, *workspace.values()],
      scratch_types={**scratch, **epilogue.scratch()},
      grid=(grid,),
      grid_names=("cta",),
      cluster=(cluster,),
      cluster_names=("cluster",),
      num_threads=num_wgs,
      thread_name="wg",
      interpret=interpret,
      kernel_name=f"jaxgemm_{name}",
  )(*inputs)
  return result


def make_call(
    operands, problem: Problem, config: Config, *, wg_tile: tuple[int, int],
    num_wgs: int, interpret, result: Problem | None = None,
    stored_cols: int | None = None, by_registers: bool = False,
) -> Call:
  """Prepares operands (lhs, rhs[, c]) for a kernel.

  Args:
    operands, interpret: as `launch` gets them.
    problem, config: what is multiplied, and how.
    wg_tile: rows and columns that each of `num_wgs` warpgroups multiplies.
    result: describes the array that is stored where that is not the product (the
      partial sums of split-k), or where that is the product of its parts: its batch,
      m, n, out_dtype, algorithm and epilogue count.
    stored_cols: columns that a warpgroup stores, if not all that it multiplies.
    by_registers: whether registers, not TMA, bring the operands and take the result.
  """
  result = result or problem
  emulated = interpret is not None
  lhs_and_rhs, num_parts = operands[:2], parts.num_parts(result)
  if parts.is_split(result):
    lhs_and_rhs = [parts.split(x, num_parts) for x in lhs_and_rhs]
  prepared = operand_tiles.prepare(
      *lhs_and_rhs, problem, config, wg_tile, emulated=emulated,
      by_registers=by_registers, num_parts=num_parts,
  )
  epilogue = epilogues.make_epilogue(
      result, stored_cols or wg_tile[1], num_wgs, emulated=emulated,
      transposed=getattr(config, "swap", False), by_registers=by_registers,
  )
  inputs = [prepared.lhs, prepared.rhs]
  if epilogue.c is not None:
    inputs.append(epilogues.prepare_c(operands[2], problem))
  return Call(result, prepared, epilogue, tuple(inputs), interpret)


@functools.lru_cache(maxsize=1024)  # A plan asks for the same few again and again.
def epilogue_bytes(
    problem: Problem, wg_tile_n: int, num_wgs: int, transposed: bool = False,
    by_registers: bool = False,
) -> int:
  """Shared memory of the epilogue of such a kernel on the chip."""
  return epilogues.make_epilogue(
      problem, wg_tile_n, num_wgs, emulated=False, transposed=transposed,
      by_registers=by_registers,
  ).smem_bytes
