"""What is done to operands before a kernel: padding, rounding, transposing.

Those that TMA and wgmma take are passed on as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses

import jax
from jax import lax
import jax.numpy as jnp

from pallas_kernels import padding, tiles, ways
from pallas_kernels.operand_tiles import Operand, Prepared
from pallas_kernels.problem import Problem


def prepare(
    lhs: Sequence[jax.Array], rhs: Sequence[jax.Array], problem: Problem, config,
    *, emulated: bool, by_registers: bool = False,
) -> Prepared:
  """Brings two operands into a form that TMA and wgmma read.

  Operands with strides that TMA cannot take are padded; other 16-bit operands
  are passed on as they are. wgmma reads others k-major only, so that any other layout
  is transposed. float32 operands are rounded in the same pass: wgmma drops the mantissa
  bits that TF32 lacks (dropping them would cost 2.6 times the error).

  Args:
    lhs, rhs: [batch, ., .] as the problem stores them: the parts of each, or the two
      matrices of a gated product, in one array or two, or those of each of its terms.
    problem: the problem.
    config: has `tile_m`, `tile_n` and `tile_k`, and may say the way of what is
      misaligned.
    emulated: whether the kernel runs in the emulator.
    by_registers: whether all operands come through registers, on the chip.
  """
  if problem.lhs_source and emulated:
    lhs = tuple(lax.convert_element_type(x, jnp.dtype(problem.dtype)) for x in lhs)
    problem = dataclasses.replace(problem, lhs_source="")
  if problem.dtype == "float32":
    lhs, rhs = map(_round_to_tf32, lhs), map(_round_to_tf32, rhs)
  if tiles.reads_k_major_only(problem.dtype):
    if problem.lhs_layout != "k-major":
      lhs = (lax.transpose(x, (0, 2, 1)) for x in lhs)
    if problem.rhs_layout != "k-major":
      rhs = (lax.transpose(x, (0, 2, 1)) for x in rhs)
    problem = dataclasses.replace(problem, lhs_layout="k-major", rhs_layout="k-major")
  several = problem.batch > 1
  lhs_k_major, rhs_k_major = (
      layout == "k-major" for layout in (problem.lhs_layout, problem.rhs_layout)
  )
  arrays, pad_for, found = [], [], []
  dtypes = problem.dtype, problem.rhs_dtype
  lhs_way, rhs_way = ways.of(problem)
  # Neighbours along n share a tile of lhs, those along m one of rhs.
  lhs_shared, rhs_shared = (
      getattr(config, axis, 1) for axis in ("cluster_n", "cluster_m")
  )
  lhs_facts = (
      tuple(lhs), lhs_k_major, config.tile_m, problem.m, problem.lhs_batched, lhs_shared
  )
  rhs_facts = (
      tuple(rhs), rhs_k_major, config.tile_n, problem.n, problem.rhs_batched, rhs_shared
  )
  for is_lhs, dtype, its_way, (its, k_major, tile_mn, mn, batched, shared) in (
      (True, dtypes[0], lhs_way, lhs_facts), (False, dtypes[1], rhs_way, rhs_facts),
  ):
    if its_way == "tiled" and tile_mn % tiles.swizzle_elems(dtype):
      its_way = "chunks"
    pad_for.append(None)
    if by_registers and not emulated:
      its_way = "loads"
    elif is_lhs and problem.lhs_source:
      its_way = "converted"
    elif is_lhs and (way := ways.of_lhs(problem, config)) and not emulated:
      its_way, its = way, tuple(x.reshape(-1) for x in its)
    elif padding.needs_padding(*its[0].shape[1:], dtype, its_way):
      if ways.takes_loads(problem, config) and not emulated:
        its_way = "loads"
      else:
        pad_for[-1] = its_way
    arrays.append(its)
    counts = len(its), 1, False
    if problem.matrices_of("lhs" if is_lhs else "rhs") > 1:
      counts = 1, 2, len(its) == 1
    elif problem.terms > 1:
      counts = 1, 1, False
    found.append(
        Operand(
            is_lhs, k_major, tile_mn, config.tile_k, dtype, several and batched, mn,
            problem.k, its_way, emulated, *counts,
            source=problem.lhs_source if is_lhs else "",
            shared=shared,
        )
    )
  by_kernel = not emulated and problem.dtype != "float32"  # Those are rounded anyway.
  arrays = padding.pad_all(arrays, dtypes, pad_for, by_kernel=by_kernel)
  return Prepared(*arrays, *found, num_terms=problem.terms)


def _round_to_tf32(x: jax.Array) -> jax.Array:
  return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=10)
