"""Tiles: what shared memory and wgmma ask of them, and in which order they are done."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.problem import ALGORITHMS, OUT_DTYPES, Problem

WG_THREADS = 128  # Of a warpgroup.
SWIZZLE_BYTES = 128
SWIZZLE_ROWS = 8  # That a swizzled tile of so many bytes has.
SECTOR_BYTES = 32  # Of a line of 128: what the L2 and the memory write at least.
SMEM_LIMIT_BYTES = 232448  # What one CTA may have on Hopper.
MAX_CTAS = 8  # Of a cluster, on every GPU that has clusters.
BARRIER_BYTES = 1024  # Room for every mbarrier of a kernel, one alignment unit.
TMA_BOX_LIMIT = 256  # Elements of one dimension of a TMA box.
MAX_TILES = 2**30  # Their numbers, and those of splits, are of 32 bits.
WGMMA_COLS = 256  # Columns that one wgmma instruction multiplies.
WGMMA_K = 16  # Elements of k that it multiplies, of 16 bits.
LEAST_COLUMNS = 16  # Of a tile: the epilogue stores 32 bytes of a row or more.
GRID_WIDTH = 8  # Tiles of a band, where the config does not say (`tile_order`).


def cdiv(a: int, b: int) -> int:
  return -(-a // b)


def round_up(a: int, b: int) -> int:
  return cdiv(a, b) * b


def wrapped(place, count: int):
  """`place`, less than twice `count`, in a ring of `count` places.

  What loops count with: a remainder for each of their steps takes longer.
  """
  return lax.select(place >= count, place - count, place)


@functools.cache
def swizzle_elems(dtype) -> int:
  """Elements of one 128-byte row of a shared-memory tile."""
  return SWIZZLE_BYTES // jnp.dtype(dtype).itemsize


@functools.cache
def tma_stride_elems(dtype) -> int:
  """Row strides of arrays that TMA reads are multiples of this many elements."""
  return 16 // jnp.dtype(dtype).itemsize


def last_depth(k: int, tile_k: int) -> int:
  """Elements of k that are wanted of the last k tile, in multiples of WGMMA_K."""
  return min(tile_k, round_up(k - (cdiv(k, tile_k) - 1) * tile_k, WGMMA_K))


def swizzled(dtype, swizzle: int = SWIZZLE_BYTES) -> tuple[Any, ...]:
  """Transforms of shared memory that wgmma reads."""
  elems = swizzle // jnp.dtype(dtype).itemsize
  return (plgpu.TilingTransform((8, elems)), plgpu.SwizzleTransform(swizzle))


def row_layout(cols: int) -> plgpu.Layout:
  """How a warpgroup's threads share a row: each has a run of it."""
  return plgpu.Layout.WG_STRIDED((cols,), cols // WG_THREADS)


# -- Order of the tiles ----------------------------------------------------------


def divmod_of(index, size: int):
  """(index // size, index % size), of an index of CTAs: CUDA's grids are long in x alone.
  """
  whole = lax.div(index, jnp.int32(size))
  return whole, index - whole * size


def tile_order(index, tiles_m: int, tiles_n: int, minor: str, width: int):
  """Returns (m, n) of the `index`-th tile of one product.

  The tiles are walked in bands of `width` tiles along the `minor` dimension:
  within a band along `minor` first, then along the other dimension, there and
  back again in alternate bands. CTAs that run at the same time then share rows
  and columns of the operands, which the L2 holds.

  Source: the raster order with swizzle of CUTLASS's tile schedulers.
  """
  minor_size, major_size = (tiles_m, tiles_n) if minor == "m" else (tiles_n, tiles_m)
  width = min(width, minor_size)
  index = lax.convert_element_type(index, jnp.int32)
  full_bands, last_width = divmod(minor_size, width)

  def within_band(index, width: int):
    """(minor, major) of a band so wide: to divide by a constant is to multiply."""
    major = lax.div(index, jnp.int32(width))
    return index - major * width, major

  if full_bands + bool(last_width) == 1:  # The only band.
    minor_index, major = within_band(index, width)
    return (minor_index, major) if minor == "m" else (major, minor_index)
  band = lax.div(index, jnp.int32(width * major_size))
  within = index - band * (width * major_size)
  minor_index, major = within_band(within, width)
  if last_width:
    is_full = band < full_bands
    minor_last, major_last = within_band(within, last_width)
    minor_index = lax.select(is_full, minor_index, minor_last)
    major = lax.select(is_full, major, major_last)
  minor_index = band * width + minor_index
  backwards = lax.rem(band, jnp.int32(2)) == 1
  major = lax.select(backwards, major_size - 1 - major, major)
  return (minor_index, major) if minor == "m" else (major, minor_index)


def overlapping(size: int, tile: int, halo: int) -> int:
  """Tiles that cover `size`, each of which has the first `halo` of the next, too."""
  return cdiv(max(size - halo, 1), tile - halo)


def last_start(size: int, tile: int, halo: int = 0) -> int:
  """Where the last of those begins."""
  return (overlapping(size, tile, halo) - 1) * (tile - halo)


def apart(index, count: int, size: int):
  """(which group of `size` tiles, which of its tiles) of the `index`-th of `count`."""
  if count == size:
    return jnp.int32(0), index
  group = lax.div(index, jnp.int32(size))
  return group, index - group * size


@dataclasses.dataclass(frozen=True)
class TileGrid:
  """One CTA for each tile of each product of the batch.

  Each has the first `halo` columns of the next one, too.
  """

  tile_m: int
  tile_n: int
  tiles_m: int
  tiles_n: int
  num_tiles: int  # Over the batch.
  halo: int = 0

  @classmethod
  def of(cls, problem: Problem, tile_m: int, tile_n: int, halo: int = 0) -> TileGrid:
    tiles_m, tiles_n = cdiv(problem.m, tile_m), overlapping(problem.n, tile_n, halo)
    num_tiles = problem.batch * tiles_m * tiles_n
    return cls(tile_m, tile_n, tiles_m, tiles_n, num_tiles, halo)

  def locate(self, index):
    """(batch, m, n) of the `index`-th tile; m and n in elements."""
    batch, index = apart(index, self.num_tiles, self.tiles_m * self.tiles_n)
    mi, ni = tile_order(index, self.tiles_m, self.tiles_n, "m", GRID_WIDTH)
    return batch, mi * self.tile_m, ni * (self.tile_n - self.halo)


# -- Legality shared by the kernels ----------------------------------------------


def check_tile(
    problem: Problem, tile_m: int, tile_n: int, tile_k: int, *, most_n: int = WGMMA_COLS
) -> str | None:
  """Why wgmma and TMA cannot work on this tile, or None."""
  if problem.dtype == "float32" and problem.algorithm != "tf32_f32":
    return f"{problem.algorithm}: only persistent and split_k multiply parts of operands"
  elems = swizzle_elems(problem.dtype)
  if tile_m % 64 or not 64 <= tile_m <= TMA_BOX_LIMIT:
    return f"tile_m={tile_m} must be 64, 128, 192 or 256"
  if tile_k != elems:
    return f"tile_k={tile_k} must be {elems} for {problem.dtype}: 128 bytes of k a slot"
  step = column_step(problem.dtype)
  if tile_n % step or not LEAST_COLUMNS <= tile_n <= most_n:
    return (
        f"tile_n={tile_n} must be a multiple of {step}, from {LEAST_COLUMNS} to {most_n}"
    )
  return check_count(problem, tile_m, tile_n)


def check_count(problem: Problem, tile_m: int, tile_n: int) -> str | None:
  """Why there cannot be as many tiles, or None."""
  tiles_m, tiles_n = cdiv(problem.product_m, tile_m), cdiv(problem.product_n, tile_n)
  num_tiles = problem.batch * tiles_m * tiles_n
  if num_tiles > MAX_TILES:
    return f"{num_tiles} tiles of {tile_m}x{tile_n}: there may be {MAX_TILES}"
  return None


def column_step(dtype: str) -> int:
  """Columns of which tiles have a multiple, as wgmma takes it."""
  return 8 if jnp.dtype(dtype).itemsize == 2 else 16


def instruction_columns(cols: int) -> tuple[tuple[int, int], ...]:
  """(start, size) of the wgmma instructions that share the columns of a tile."""
  if cols <= WGMMA_COLS:
    return ((0, cols),)
  first = round_up(cols // 2, 64)
  return (0, first), (first, cols - first)


def reads_k_major_only(dtype: str) -> bool:
  """Whether wgmma reads such operands k-major only: all but those of 16 bits."""
  return jnp.dtype(dtype).itemsize != 2


def reads_rhs_k_major(problem: Problem) -> bool:
  """Whether the kernel sees rhs k-major (`preparing` may transpose it)."""
  return problem.rhs_layout == "k-major" or reads_k_major_only(problem.dtype)


def rhs_block(problem: Problem) -> int:
  """Columns of a block of rhs in shared memory, of which a slot has whole ones."""
  if reads_rhs_k_major(problem):
    return column_step(problem.dtype)
  return swizzle_elems(problem.dtype)


@functools.lru_cache(maxsize=1024)
def check_problem(
    problem: Problem, *, scales: bool = False, converts: bool = False,
    norms: bool = False, terms: bool = False,
) -> str | None:
  """Why a kernel cannot serve this problem, whatever its config; or None.

  Args:
    scales: whether the kernel applies factors of rows and columns, and forms the two
      products of gated ones: persistent does.
    converts: whether it takes an operand of 8 bits for one of 16: persistent and split_k.
    norms: whether it normalises lhs: persistent.
    terms: whether it adds up several products: persistent.
  """
  if problem.grouped:
    return f"groups of {problem.grouped}: only grouped_m and grouped_k have some"
  if problem.converts and not converts:
    return "operands of 8 bits: only persistent and split_k convert one to 16"
  if problem.norm_eps is not None and not norms:
    return "norm: only persistent normalises lhs"
  if problem.terms > 1 and not terms:
    return f"terms={problem.terms}: only persistent adds up products"
  scaling = problem.epilogue.scaling
  if problem.epilogue.gated and not scales:
    return "gated: only persistent forms two products at once"
  if scaling != "none":
    if not scales:
      return f"scaling={scaling!r}: only persistent scales a product"
    if jnp.dtype(problem.dtype).itemsize != 1 or problem.dtype == "int8":
      return f"scaling={scaling!r} is for 8-bit floating-point operands"
    if problem.epilogue.has_c or problem.epilogue.is_fused:
      return f"scaling={scaling!r} excludes c, bias and activation"
  if problem.dtype not in ALGORITHMS.values():
    return f"operands of dtype {problem.dtype}: want one of {sorted(ALGORITHMS.values())}"
  if ALGORITHMS.get(problem.algorithm) != problem.dtype:
    return f"algorithm {problem.algorithm} does not take {problem.dtype} operands"
  if problem.dtype == "int8":
    if problem.out_dtype != "int32":
      return f"result of dtype {problem.out_dtype}: int8 operands have one of int32"
    epilogue = problem.epilogue
    if epilogue.alpha != 1.0 or epilogue.has_c or epilogue.is_fused:
      return "int8 operands have no epilogue"
  elif problem.out_dtype not in OUT_DTYPES:
    return f"result of dtype {problem.out_dtype}: want one of {list(OUT_DTYPES)}"
  for name in ("batch", "m", "n", "k"):
    if not 1 <= getattr(problem, name) < 2**31:
      return f"{name}={getattr(problem, name)} must be in [1, 2**31)"
  return None


def check_smem(smem_bytes: int) -> str | None:
  if smem_bytes > SMEM_LIMIT_BYTES:
    return f"{smem_bytes} bytes of shared memory exceed the {SMEM_LIMIT_BYTES} of one CTA"
  return None


def slot_bytes(
    problem: Problem, tile_m: int, tile_n: int, tile_k: int, *, lhs_parts: int = 1,
    rhs_parts: int = 1,
) -> int:
  """Shared memory of one slot of the ring: a tile of each part of lhs and of rhs."""
  tile_n = round_up(tile_n, rhs_block(problem))
  return (
      lhs_parts * round_up(tile_m * tile_k * problem.itemsize, 1024)
      + rhs_parts * round_up(tile_n * tile_k * problem.itemsize, 1024)
  )
