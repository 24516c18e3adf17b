"""The frame that every kernel's launch shares: operands in, result out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import (
  activations,
  block_scales,
  dependent,
  epilogue_choice,
  lhs_registers,
  norms,
  operand_tiles,
  padding,
  parts,
  preparing,
  tiles,
)
from pallas_kernels import epilogue as epilogues
from pallas_kernels.configs import Config
from pallas_kernels.halves import Halves
from pallas_kernels.problem import Problem
from pallas_kernels.scales import make_scales

# [batch, m, n], and of an epilogue that has more results all of them, of the same shape.
Results = jax.Array | tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class Call:
  """Operands and epilogue of one launch.

  Calling it runs `kernel(lhs_gmem, rhs_gmem, c_gmem, out_gmem, refs)`.
  """

  result: Problem
  prepared: operand_tiles.Prepared
  epilogue: epilogues.Epilogue
  inputs: tuple[Any, ...]
  interpret: Any
  by_name: dict[str, jax.Array] = dataclasses.field(default_factory=dict)

  def __call__(
      self, kernel: Callable[..., None], *, name: str, scratch: dict[str, Any], grid: int,
      num_wgs: int, cluster: Mapping[str, int] | None = None,
      workspace: dict[str, Any] | None = None,
  ) -> Results:
    """Returns what the kernel stored: several arrays if the epilogue has other results.

    Each input is an array, or a tuple of arrays (the parts of an operand).
    The grid is `grid` clusters (axis "cta") of as many CTAs as `cluster` says along each
    of its axes, of `num_wgs` warpgroups (axis "wg"). `c_gmem`, the last input, has none,
    one or two; `refs` is the scratch by name, the epilogue's, the `workspace` and further
    inputs (`by_name`) in GMEM included.
    """
    result = self.result
    flat, tree = jax.tree.flatten((self.inputs, self.by_name))
    out = jax.ShapeDtypeStruct(result.out_shape, jnp.dtype(result.out_dtype))
    names = epilogues.OTHERS[: result.epilogue.num_others]
    workspace = dict.fromkeys(names, out) | dict(workspace or {})

    def body(*gmem, **refs):
      sources, named = jax.tree.unflatten(tree, gmem[: len(flat)])
      out_gmem, *arrays = gmem[len(flat) :]
      named |= zip(workspace, arrays, strict=True)
      kernel(*sources, out_gmem, refs | named)

    found, *others = dependent.kernel(
        body,
        out_type=[out, *workspace.values()],
        scratch_types={**scratch, **self.epilogue.scratch()},
        grid=(grid,),
        grid_names=("cta",),
        cluster=tuple((cluster or {}).values()),
        cluster_names=tuple(cluster or {}),
        num_threads=num_wgs,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=self.epilogue.arithmetic is activations.APPROXIMATE
        ),
        interpret=self.interpret,
        kernel_name=f"jaxgemm_{name}",
    )(*flat)
    return (found, *others[: len(names)]) if names else found


def make_call(
    operands, problem: Problem, config: Config, *, stored_cols: int, num_wgs: int,
    interpret, result: Problem | None = None, by_registers: bool = False,
    overlapping: bool = False, halves: Halves | None = None,
    room: int | None = None,
) -> Call:
  """Prepares operands (lhs, rhs[, c][, biases], or scales) for a kernel.

  A gated product's rhs is a tuple: of the gate's and the other matrix, or of one array
  that holds the one behind the other along n.

  Args:
    operands, interpret: as `launch` gets them.
    problem, config: what is multiplied, and how.
    stored_cols: columns that each of `num_wgs` warpgroups stores.
    result: describes the array that is stored where that is not the product (the
      partial sums of split-k), or where that is the product of its parts: its batch,
      m, n, out_dtype, algorithm and epilogue count.
    by_registers: whether registers, not TMA, bring the operands and take the result.
    overlapping: whether tiles may overlap: the grid's by the epilogue's `halo`.
    halves: the operands' float16 parts, where these are multiplied.
    room: bytes of shared memory that the ring leaves to the epilogue; None: enough.
  """
  result = result or problem
  emulated = interpret is not None
  split = parts.of(result, config)
  lhs_and_rhs = [x if isinstance(x, tuple) else (x,) for x in operands[:2]]
  facts, by_name = None, {}
  if result.norm_eps is not None:
    *operands, weights = operands
    by_name = norms.prepare(weights)
  if halves is not None:
    lhs_and_rhs = halves.lhs, halves.rhs
    facts, by_name = make_scales(
        halves.row_scales, halves.col_scales, result, config, emulated=emulated
    )
  elif result.epilogue.scaling == "rows":
    rows, cols = (x.reshape(x.shape[0], 1, -1) for x in operands[-2:])
    facts, by_name = make_scales(rows, cols, result, config, emulated=emulated)
  elif result.epilogue.scaling == "blocks":
    by_name = block_scales.prepare(*operands[-2:], config, emulated=emulated)
  elif parts.is_split(result) and not split.lhs_in_registers:
    lhs_and_rhs = [
        parts.split(padding.mend_stride(x, split.dtype), split.count)
        for x in operands[:2]
    ]
  if split is not None and split.lhs_in_registers:
    prepared = lhs_registers.prepare(*operands[:2], problem, config, emulated=emulated)
  else:
    prepared = preparing.prepare(
        *lhs_and_rhs, problem, config, emulated=emulated, by_registers=by_registers,
    )
  epilogue = epilogue_choice.make_epilogue(
      result, stored_cols, num_wgs, emulated=emulated,
      transposed=getattr(config, "swap", False), by_registers=by_registers,
      overlapping=overlapping, room=tiles.SMEM_LIMIT_BYTES if room is None else room,
      row_order=prepared.lhs_operand.row_order,
  )
  if room is not None:
    epilogue = epilogue_choice.with_more_slots(epilogue, room)
  epilogue = dataclasses.replace(epilogue, scales=facts)
  by_name |= epilogues.prepare_biases(epilogue, operands)
  inputs = prepared.lhs, prepared.rhs, epilogues.prepare_c(operands[2:], result)
  return Call(result, prepared, epilogue, inputs, interpret, by_name)


def epilogue_bytes(*args, **kwargs) -> int:
  """Shared memory on the chip of what `make_epilogue` returns."""
  return epilogue_choice.make_epilogue(*args, emulated=False, **kwargs).smem_bytes
