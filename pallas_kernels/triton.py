"""triton: the portable kernel, for GPUs beside Hopper, through jax-triton.

  out[b] = alpha * lhs[b] @ rhs[b] + beta * c[b]

One Triton function (`triton_kernel`) in three forms, which the config chooses:

  blocked    num_stages = 1: a CTA loads a k tile, waits, multiplies
  pipelined  num_stages > 1: the next k tiles travel while one is multiplied
  split-k    splits > 1: CTAs share the k of a tile and store float32 parts, which
             XLA then adds in the order 0 .. splits - 1, the epilogue included

There are no atomics, and whoever finishes first changes nothing: every run gives
the same bits. The compiler makes of a tile's product what the GPU has: mma.sync on
Ampere, Ada and consumer Blackwell, wgmma on Hopper, tcgen05 on Blackwell.

An operand is read where it lies, in any layout, but for two passes that XLA fuses
into whatever makes the operand: a row stride that is no multiple of 16 bytes is
padded, or no load would be wider than an element; and float32 is rounded to TF32,
which the tensor cores would truncate (at 2.6 times the error).

Needs the packages jax_triton and triton, which only `launch` imports. jax.export
does not vouch for their custom call, which holds PTX for one compute capability: an
export must name it in disabled_checks.
Constraints: see `supports`.
Source: Triton's `tl.dot` and its software pipeliner; Tillet, Kung, Cox, "Triton: an
intermediate language and compiler for tiled neural network computations" (2019);
tile order and split-k as in `tiles` and `split_k`, promotion as in `accumulate`.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from pallas_kernels import partial_sums, tiles
from pallas_kernels.configs import TritonConfig
from pallas_kernels.problem import Problem

NAME = "triton"
Config = TritonConfig
PACKAGES = ("jax_triton", "triton")
MAX_ACC_REGISTERS = 128  # A thread's accumulator, and its promoted sum.


@functools.cache
def missing_package() -> str | None:
  """The package without which this kernel cannot run, or None; imports nothing."""
  for package in PACKAGES:
    if importlib.util.find_spec(package) is None:
      return package
  return None


def supports(problem: Problem, config: TritonConfig) -> str | None:
  """The reason why this kernel cannot serve, or None.

  Whether the packages are installed, and what shared memory a GPU has, is for the
  plan to ask.
  """
  if problem.epilogue.is_fused:
    return "triton fuses no bias and no activation"
  return (
      tiles.check_problem(problem)
      or _check_config(problem, config)
      or tiles.check_smem(smem_bytes(problem, config))
  )


def _check_config(problem: Problem, config: TritonConfig) -> str | None:
  if problem.dtype == "float32" and problem.algorithm != "tf32_f32":
    return f"{problem.algorithm}: only persistent and split_k multiply parts of operands"
  if problem.itemsize == 1:
    return f"triton takes operands of 16 and 32 bits, not {problem.dtype}"
  for name in ("tile_m", "tile_n", "tile_k"):
    size = getattr(config, name)
    if not 16 <= size <= 256 or size & (size - 1):
      return f"{name}={size} must be 16, 32, 64, 128 or 256"
  if config.num_warps not in (1, 2, 4, 8, 16):
    return f"num_warps={config.num_warps} must be 1, 2, 4, 8 or 16"
  if not 1 <= config.num_stages <= 8:
    return f"num_stages={config.num_stages} must be in [1, 8]"
  if config.grid_width < 1:
    return f"grid_width={config.grid_width} must be positive"
  if config.promote < 0:
    return f"promote={config.promote} must be a number of k tiles, or 0"
  sums = 2 if config.promote else 1
  threads = 32 * config.num_warps
  if sums * config.tile_m * config.tile_n // threads > MAX_ACC_REGISTERS:
    what = "an accumulator and a promoted sum" if config.promote else "an accumulator"
    return (
        f"{what} of {config.tile_m}x{config.tile_n} exceeds the registers of"
        f" num_warps={config.num_warps}"
    )
  k_steps = tiles.cdiv(problem.k, config.tile_k)
  if not 1 <= config.splits <= k_steps:
    return (
        f"splits={config.splits} must be in [1, {k_steps}], the number of k tiles of"
        f" k={problem.k}"
    )
  if num_ctas(problem, config) >= 2**31:
    return f"{num_ctas(problem, config)} CTAs exceed what one grid holds"
  return None


def num_ctas(problem: Problem, config: TritonConfig) -> int:
  """CTAs of the grid: tiles, over the parts of k and the batch."""
  tiles_m = tiles.cdiv(problem.m, config.tile_m)
  tiles_n = tiles.cdiv(problem.n, config.tile_n)
  return problem.batch * config.splits * tiles_m * tiles_n


def smem_bytes(problem: Problem, config: TritonConfig, *, reads_smem: bool = True) -> int:
  """Shared memory of one CTA, or a little more: Triton decides when it compiles.

  Args:
    problem, config: what to compute, and how.
    reads_smem: whether the matrix instruction reads shared memory itself (wgmma,
      tcgen05). Where it reads registers (mma.sync) a pipelined loop has one slot less.
  """
  slots = config.num_stages if reads_smem else max(config.num_stages - 1, 1)
  slot = (config.tile_m + config.tile_n) * config.tile_k * problem.itemsize
  out_itemsize = 4 if config.splits > 1 else problem.out_itemsize
  # The store, which follows the last use of the slots, changes the layout there.
  return max(slots * slot, config.tile_m * config.tile_n * out_itemsize)


def launch(
    operands, problem: Problem, config: TritonConfig, *, num_sms: int, interpret=None,
    compute_capability: str | None = None,
) -> jax.Array:
  """Returns the result [batch, m, n]; operands as `problem` stores them.

  Args:
    operands: lhs, rhs and, where the epilogue has one, c.
    problem, config: what to compute, and how; `supports` holds.
    num_sms: not used; every tile has a CTA.
    interpret: anything but None runs the kernel in Triton's interpreter.
    compute_capability: of the GPU to compile for; None asks the first GPU.
  """
  del num_sms
  lhs, rhs, *c = operands
  lhs, rhs = _prepared(lhs), _prepared(rhs)
  parts = config.splits > 1
  out_dtype = "float32" if parts else problem.out_dtype
  out = jax.ShapeDtypeStruct(
      (problem.batch * config.splits, problem.m, problem.n), jnp.dtype(out_dtype)
  )
  call = _interpreted if interpret is not None else _compiled
  out = call(
      # A pointer must be passed for c in any case.
      (lhs, rhs, c[0] if c and not parts else lhs), out, num_ctas(problem, config),
      config, _constants(problem, config, lhs, rhs), compute_capability,
  )
  return partial_sums.add_up(out, c, problem, config.splits) if parts else out


def _prepared(x: jax.Array) -> jax.Array:
  """An operand, rounded if it is float32, in rows of whole 16 bytes."""
  if x.dtype == jnp.float32:
    x = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=10)
  pad = -x.shape[2] % tiles.tma_stride_elems(x.dtype)
  if not pad:
    return x
  return lax.pad(x, jnp.zeros((), x.dtype), ((0, 0, 0), (0, 0, 0), (0, pad, 0)))


def _constants(problem: Problem, config: TritonConfig, lhs, rhs) -> dict[str, Any]:
  """The constexpr arguments of the kernel, for operands as they are prepared."""
  lhs_k_major = problem.lhs_layout == "k-major"
  rhs_k_major = problem.rhs_layout == "k-major"
  lhs_m, lhs_k = lhs.shape[1:] if lhs_k_major else lhs.shape[:0:-1]
  rhs_n, rhs_k = rhs.shape[1:] if rhs_k_major else rhs.shape[:0:-1]
  epilogue, parts = problem.epilogue, config.splits > 1
  out_size = problem.batch * config.splits * problem.m * problem.n
  return dict(
      M=problem.m, N=problem.n, K=problem.k,
      LHS_M=lhs_m, LHS_K=lhs_k, RHS_N=rhs_n, RHS_K=rhs_k,
      LHS_K_MAJOR=lhs_k_major, RHS_K_MAJOR=rhs_k_major,
      LHS_BATCHED=problem.lhs_batched and problem.batch > 1,
      RHS_BATCHED=problem.rhs_batched and problem.batch > 1,
      ALPHA=1.0 if parts else epilogue.alpha, BETA=epilogue.beta,
      HAS_C=epilogue.has_c and not parts,
      TILE_M=config.tile_m, TILE_N=config.tile_n, TILE_K=config.tile_k,
      SPLITS=config.splits, GRID_WIDTH=config.grid_width, PROMOTE=config.promote,
      WIDE=max(lhs.size, rhs.size, out_size) >= 2**31,
  )


def _compiled(inputs, out, grid: int, config: TritonConfig, constants, capability):
  import jax_triton

  from pallas_kernels.triton_kernel import jaxgemm_triton

  # The name of the kernel is in a compressed module: the scope shows it in the HLO.
  with jax.named_scope(jaxgemm_triton.__name__):
    return jax_triton.triton_call(
        *inputs,
        kernel=jaxgemm_triton,
        out_shape=out,
        grid=grid,
        name=jaxgemm_triton.__name__,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        compute_capability=capability and int(capability.replace(".", "")),
        **constants,
    )


def _interpreted(inputs, out, grid: int, config: TritonConfig, constants, capability):
  from pallas_kernels import triton_interpret

  del config, capability  # The interpreter has neither warps nor stages.
  return triton_interpret.run(inputs, out, grid, constants)
