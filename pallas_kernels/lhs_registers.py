"""lhs in float32, split into bfloat16 parts by the consumers, in their registers.

Where lhs is large and rhs has few columns, memory bounds the product, and passes that
split lhs would triple its traffic. So the ring brings lhs as it is, 32 of k a slot, and
rhs in parts, made in a pass. A consumer loads its 64 rows of the slot, splits them (see
`parts`), and hands the parts to wgmma as registers, whichever way lhs is stored.

The emulator's wgmma reads no registers: there the parts go through shared memory, in
two slots that take turns.

Source: the mixed-input products of CUTLASS (sm90), whose consumers convert one operand
in registers.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import accumulate, operand_tiles, padding, parts, tiles
from pallas_kernels.configs import PersistentConfig
from pallas_kernels.problem import Problem

TILE_K = 32  # 128 bytes of k-major lhs.
ROWS = 64  # Of a consumer.
COLUMN_STEP = 16  # Of tiles.
SUMS = 4  # Of a tile: two groups of smaller products, high high, and the promoted one.
PARTS = "lhs_parts"
Ref = Any


def check(config: PersistentConfig, registers: int) -> str | None:
  """Why a config cannot split lhs, or None; a thread has `registers` for its sums."""
  if config.tile_k != TILE_K:
    return f"tile_k={config.tile_k}: split_lhs=True takes {TILE_K}"
  if config.tile_n % COLUMN_STEP or config.tile_n < COLUMN_STEP:
    return f"tile_n={config.tile_n}: split_lhs=True takes multiples of {COLUMN_STEP}"
  if not accumulate.fits(SUMS, (ROWS, config.tile_n), registers):
    return (
        f"tile_n={config.tile_n}: {SUMS} sums of split_lhs=True exceed {registers}"
        " registers"
    )
  return None


def takes_n_major(config: PersistentConfig) -> bool:
  """Whether the tiles of an n-major rhs can be multiplied: of 128 bytes of columns."""
  return config.tile_n == tiles.swizzle_elems(jnp.bfloat16)


def slot_bytes(config: PersistentConfig) -> int:
  """Shared memory of one slot of the ring."""
  return TILE_K * (4 * config.tile_m + 3 * 2 * config.tile_n)


def prepare(
    lhs: jax.Array, rhs: jax.Array, problem: Problem, config: PersistentConfig, *,
    emulated: bool,
) -> operand_tiles.Prepared:
  """lhs as it is, but for its stride; the parts of rhs, as it is stored if that goes."""
  k_major = problem.lhs_layout == "k-major"
  way = "flat" if k_major else "tiled"
  needed = padding.needs_padding(*lhs.shape[1:], jnp.float32, way)
  [(lhs,)] = padding.pad_all(
      [(lhs,)], ["float32"], [way if needed else None], by_kernel=not emulated
  )
  rhs_k_major = problem.rhs_layout == "k-major"
  if not rhs_k_major and not takes_n_major(config):
    # In a pass of its own: XLA's fusion with the split read and wrote rhs three times.
    rhs = lax.optimization_barrier(lax.transpose(rhs, (0, 2, 1)))
    rhs_k_major = True
  rhs_way = "flat" if rhs_k_major else "tiled"
  if not rhs_k_major and rhs.shape[2] % TILE_K and rhs.shape[2] > TILE_K:
    # Its blocks are 8 x 32: a slot has 32 of k.
    pad = tiles.round_up(rhs.shape[2], TILE_K) - rhs.shape[2]
    rhs = lax.pad(rhs, jnp.zeros((), rhs.dtype), ((0, 0, 0), (0, 0, 0), (0, pad, 0)))
  if padding.needs_padding(*rhs.shape[1:], jnp.bfloat16, rhs_way):
    # Before it is split, so that one pass does both.
    rhs = padding.pad_for_tma(rhs, jnp.bfloat16, rhs_way)
  split = parts.split(rhs, 3)
  several = problem.batch > 1
  return operand_tiles.Prepared(
      (lhs,), split,
      operand_tiles.Operand(
          True, k_major, config.tile_m, TILE_K, "float32",
          several and problem.lhs_batched, problem.m, problem.k, way, emulated,
          shared=config.cluster_n,
      ),
      operand_tiles.Operand(
          False, rhs_k_major, config.tile_n, TILE_K, "bfloat16",
          several and problem.rhs_batched, problem.n, problem.k, rhs_way, emulated, 3,
          shared=config.cluster_m,
      ),
  )


def scratch(num_consumers: int) -> dict[str, Any]:
  """Where the emulator keeps the parts."""
  shape = (num_consumers, 2, 3, ROWS, TILE_K)
  dtype = jnp.dtype(jnp.bfloat16)
  return {PARTS: plgpu.SMEM(shape, dtype, transforms=tiles.swizzled(dtype, 2 * TILE_K))}


def load(lhs: operand_tiles.Operand, refs, slot, start, *, wg, turn) -> list:
  """The parts of 64 rows of a slot from `start` on, as wgmma takes them."""
  # wgmma in flight may still read the registers of the last parts.
  plgpu.wgmma_wait(0)
  rows = plgpu.load(
      lhs.view(refs["lhs_slots"], slot, start, ROWS), layout=plgpu.Layout.WGMMA
  )
  found = parts.split_registers(lax.optimization_barrier(rows))
  if not lhs.emulated:
    return list(found)
  for i, part in enumerate(found):
    refs[PARTS][wg, turn, i] = part
  plgpu.commit_smem()
  return [refs[PARTS].at[wg, turn, i] for i in range(3)]
