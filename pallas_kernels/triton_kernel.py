"""The Triton function of the portable kernel; `pallas_kernels.triton` launches it.

Importing this module imports Triton, so that only a launch does. Every size is a
constexpr: the compiler then knows which strides and limits are multiples of 16
bytes, and moves whole vectors there, masks included.

The function calls no other compiled Triton function (tl.zeros and tl.cdiv are such),
so that Triton's interpreter can run it, too.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def jaxgemm_triton(
    lhs, rhs, c, out,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    LHS_M: tl.constexpr, LHS_K: tl.constexpr,
    RHS_N: tl.constexpr, RHS_K: tl.constexpr,
    LHS_K_MAJOR: tl.constexpr, RHS_K_MAJOR: tl.constexpr,
    LHS_BATCHED: tl.constexpr, RHS_BATCHED: tl.constexpr,
    ALPHA: tl.constexpr, BETA: tl.constexpr, HAS_C: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    SPLITS: tl.constexpr, GRID_WIDTH: tl.constexpr, PROMOTE: tl.constexpr,
    WIDE: tl.constexpr,
):
  """One tile of one part of one product.

  Args:
    lhs, rhs, c, out: pointers. `out` has the SPLITS parts of each product of the
      batch one after the other; `c` is read if HAS_C.
    M, N, K: sizes of the product.
    LHS_M, LHS_K, RHS_N, RHS_K: sizes of the operands as stored, padding included.
    LHS_K_MAJOR, RHS_K_MAJOR: which of their two dimensions is contiguous.
    LHS_BATCHED, RHS_BATCHED: whether each product has an operand of its own.
    ALPHA, BETA: factors of the product and of c.
    TILE_M to PROMOTE: see TritonConfig.
    WIDE: whether offsets need 64 bits.
  """
  TILES_M: tl.constexpr = (M + TILE_M - 1) // TILE_M
  TILES_N: tl.constexpr = (N + TILE_N - 1) // TILE_N
  part = tl.program_id(0) // (TILES_M * TILES_N)
  index = tl.program_id(0) % (TILES_M * TILES_N)
  batch = part // SPLITS
  split = part % SPLITS

  # Bands of GRID_WIDTH rows of tiles, each walked column by column, there and back
  # again in turns: CTAs that run together share operands in the L2.
  band = index // (GRID_WIDTH * TILES_N)
  within = index % (GRID_WIDTH * TILES_N)
  height = tl.minimum(TILES_M - band * GRID_WIDTH, GRID_WIDTH)
  tile_m = band * GRID_WIDTH + within % height
  tile_n = within // height
  tile_n = tl.where(band % 2 == 1, TILES_N - 1 - tile_n, tile_n)

  # The k tiles that are full, shared out; what is left of k is the last split's.
  FULL_TILES: tl.constexpr = K // TILE_K
  PER_SPLIT: tl.constexpr = (FULL_TILES + SPLITS - 1) // SPLITS
  first = tl.minimum(split * PER_SPLIT, FULL_TILES)
  last = tl.minimum(first + PER_SPLIT, FULL_TILES)
  first_k = first * TILE_K

  if WIDE:
    part = part.to(tl.int64)
    batch = batch.to(tl.int64)
    tile_m = tile_m.to(tl.int64)
    tile_n = tile_n.to(tl.int64)
    first_k = first_k.to(tl.int64)
  ms = tile_m * TILE_M + tl.arange(0, TILE_M)
  ns = tile_n * TILE_N + tl.arange(0, TILE_N)
  ks = first_k + tl.arange(0, TILE_K)

  LHS_STRIDE_M: tl.constexpr = LHS_K if LHS_K_MAJOR else 1
  LHS_STRIDE_K: tl.constexpr = 1 if LHS_K_MAJOR else LHS_M
  RHS_STRIDE_N: tl.constexpr = RHS_K if RHS_K_MAJOR else 1
  RHS_STRIDE_K: tl.constexpr = 1 if RHS_K_MAJOR else RHS_N
  if LHS_BATCHED:
    lhs += batch * (LHS_M * LHS_K)
  if RHS_BATCHED:
    rhs += batch * (RHS_N * RHS_K)
  lhs_tile = lhs + (ms[:, None] * LHS_STRIDE_M + ks[None, :] * LHS_STRIDE_K)
  rhs_tile = rhs + (ks[:, None] * RHS_STRIDE_K + ns[None, :] * RHS_STRIDE_N)
  lhs_inside = ms[:, None] < LHS_M
  rhs_inside = ns[None, :] < RHS_N

  acc = tl.full((TILE_M, TILE_N), 0.0, tl.float32)
  total = acc
  for step in range(first, last):
    # No mask, unless some tiles hang over the edge.
    if M % TILE_M == 0:
      lhs_values = tl.load(lhs_tile)
    else:
      lhs_values = tl.load(lhs_tile, mask=lhs_inside, other=0.0)
    if N % TILE_N == 0:
      rhs_values = tl.load(rhs_tile)
    else:
      rhs_values = tl.load(rhs_tile, mask=rhs_inside, other=0.0)
    # The last argument keeps the compiler from making a promoted sum the accumulator
    # again; it has no other meaning for these dtypes.
    acc = tl.dot(
        lhs_values, rhs_values, acc, input_precision="tf32",
        max_num_imprecise_acc=TILE_K if PROMOTE else 0,
    )
    lhs_tile += TILE_K * LHS_STRIDE_K
    rhs_tile += TILE_K * RHS_STRIDE_K
    if PROMOTE == 1:
      total += acc
      acc = tl.full((TILE_M, TILE_N), 0.0, tl.float32)
    elif PROMOTE > 1:
      if (step - first) % PROMOTE == PROMOTE - 1:
        total += acc
        acc = tl.full((TILE_M, TILE_N), 0.0, tl.float32)
  if K % TILE_K != 0:
    TAIL: tl.constexpr = FULL_TILES * TILE_K
    lhs_left = LHS_K - TAIL
    rhs_left = RHS_K - TAIL
    if SPLITS > 1:  # The other splits read nothing, and add zeros.
      lhs_left = tl.where(split == SPLITS - 1, lhs_left, 0)
      rhs_left = tl.where(split == SPLITS - 1, rhs_left, 0)
    left = tl.arange(0, TILE_K)
    lhs_values = tl.load(
        lhs_tile, mask=lhs_inside & (left[None, :] < lhs_left), other=0.0
    )
    rhs_values = tl.load(
        rhs_tile, mask=rhs_inside & (left[:, None] < rhs_left), other=0.0
    )
    acc = tl.dot(
        lhs_values, rhs_values, acc, input_precision="tf32",
        max_num_imprecise_acc=TILE_K if PROMOTE else 0,
    )
  if PROMOTE > 0:
    acc += total

  # Offsets relative to a scalar pointer cost a register less an element.
  out += part * (M * N)
  offsets = ms[:, None] * N + ns[None, :]
  inside = (ms[:, None] < M) & (ns[None, :] < N)
  if ALPHA != 1.0:
    acc = acc * ALPHA
  if HAS_C:
    c += part * (M * N)
    acc += tl.load(c + offsets, mask=inside, other=0.0).to(tl.float32) * BETA
  tl.store(out + offsets, acc.to(out.dtype.element_ty), mask=inside)
