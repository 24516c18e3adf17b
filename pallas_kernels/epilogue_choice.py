"""Which epilogue a kernel gets: the way of its stores, and the size of its pieces.

Both follow from the problem, the columns that a warpgroup stores, and the shared memory
that is left. What the ways are: see `epilogue`.
"""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp

from pallas_kernels import sector_stores, staging, tiles
from pallas_kernels.epilogue import Epilogue
from pallas_kernels.fragments import RowOrder
from pallas_kernels.problem import Problem
from pallas_kernels.staging import Staging

_MOST_SLOTS = 4  # For pieces of a warpgroup, where stores take the longest; else two.
# Which they do up to so many elements of k for each result of as many columns as are
# multiplied: a tile's two results of bfloat16 are 10.7 bytes for each cycle of its
# products where k is 768. What saves the inputs of gelu and silu took 0.95 to 0.98 times
# as long with four slots as with two (16384x3072x768), 1.02 times (6304x4096x1024).
_STORED_LONG = 400


def stores_runs(problem: Problem, wg_tile_n: int) -> bool:
  """Whether pieces of a result that TMA cannot store are runs of memory on the chip.

  If there is room for a slot of so many columns.
  """
  epilogue = problem.epilogue
  odd = problem.n % tiles.tma_stride_elems(problem.out_dtype)
  plain = not (epilogue.num_c or epilogue.gated or epilogue.scaling != "none")
  return bool(odd) and plain and problem.n <= wg_tile_n and problem.out_itemsize > 1


def stores_wide(problem: Problem, wg_tile_n: int) -> bool:
  """Whether threads store a result that TMA could, on the chip, in wide pieces.

  Its rows begin within sectors of 32 bytes, of which each piece fills two in part: TMA
  takes 19.8 us for 28616x856 in pieces of 64 columns, 18.4 of 128, threads 16.5 in such
  (H100; where rows begin with sectors, all 14). Rows of c have pieces of 128 bytes.
  """
  within = problem.n * problem.out_itemsize % tiles.SECTOR_BYTES > 0
  aligned = problem.n % tiles.tma_stride_elems(problem.out_dtype) == 0
  narrow = wg_tile_n <= tiles.swizzle_elems(problem.out_dtype)
  plain = problem.out_itemsize == 2 and problem.epilogue.num_c == 0
  return within and aligned and plain and not narrow


@functools.lru_cache(maxsize=1024)  # A plan asks for the same few again and again.
def epilogues(
    problem: Problem, wg_tile_n: int, num_wgs: int, *, emulated: bool,
    transposed: bool = False, by_registers: bool = False, overlapping: bool = False,
    row_order: RowOrder = "as they are",
) -> tuple[Epilogue, ...]:
  """Epilogues of pieces of several sizes, where those do not divide the tile; or one.

  That of the largest comes first: it should be taken if there is room for its slots.
  The way of the store follows from the row stride of the result; `by_registers` asks for
  the masked way whatever the stride; `overlapping` says that tiles may overlap along n by
  the `halo` of what is returned. The emulator has neither alignment rules nor the
  masked store's instructions: it always takes the tiled way.
  """
  copied = "tiled" if emulated else "flat"
  dtype, c_dtype = problem.out_dtype, problem.epilogue.c_dtype
  if overlapping and not emulated:
    halo = sector_stores.halo(problem.n)
    cols = staging.sector_cols(wg_tile_n, halo)
    out = Staging("sectors", dtype, cols, num_wgs)
    return (Epilogue(problem, out, None, halo=halo),)
  reordered = row_order != "as they are"
  masked = by_registers or reordered or problem.n % tiles.tma_stride_elems(dtype)
  way = "masked" if masked and not emulated else copied
  if transposed:
    cols = tiles.swizzle_elems(dtype)
    return tuple(
        Epilogue(
            problem, Staging(way, dtype, cols, num_wgs, rows),
            None if c_dtype is None else Staging(copied, c_dtype, cols, num_wgs, rows),
            transposed=True, row_order=row_order,
        )
        for rows in staging.piece_rows(wg_tile_n)
    )
  itemsize = least = problem.out_itemsize
  if c_dtype is not None:  # A wider c takes narrower pieces: both have the same columns.
    c_itemsize = jnp.dtype(c_dtype).itemsize
    itemsize, least = max(c_itemsize, itemsize), min(c_itemsize, itemsize)
  found = []
  if way == "masked" and not (by_registers or reordered):
    if stores_runs(problem, wg_tile_n):
      found.append(Epilogue(problem, Staging("run", dtype, wg_tile_n, num_wgs), None))
  sizes = [(way, cols) for cols in staging.piece_cols(wg_tile_n, itemsize, least)]
  if not (emulated or by_registers) and stores_wide(problem, wg_tile_n):
    sizes.insert(0, ("masked", staging.wide_cols(wg_tile_n)))
  for way, cols in sizes:
    if problem.epilogue.slopes == 2 and cols >= 32:
      cols //= 2  # Three arrays have slots, which the ring would lack.
    found.append(Epilogue(
        problem, Staging(way, dtype, cols, num_wgs),
        None if c_dtype is None else Staging(copied, c_dtype, cols, num_wgs),
        divided=wg_tile_n % cols == 0, row_order=row_order,
    ))
  return tuple(found)


def make_epilogue(
    *args, room: int = tiles.SMEM_LIMIT_BYTES, **kwargs
) -> Epilogue:
  """The first of `epilogues` that `room`, in bytes of shared memory, has slots for."""
  found = epilogues(*args, **kwargs)
  return next((each for each in found if each.smem_bytes <= room), found[-1])


def with_more_slots(epilogue: Epilogue, room: int) -> Epilogue:
  """The epilogue with more slots, if `room` has them, where stores take the longest.

  There the tensor cores wait for them. Elsewhere more copies at once are in the way of
  the loads: 16384x2304x768 by tiles in turns takes 1.6% longer with four slots.
  """
  out, problem = epilogue.out, epilogue.problem
  results = (1 + problem.epilogue.num_others) / (1 + problem.epilogue.gated)
  if out.way not in ("flat", "tiled") or problem.k > _STORED_LONG * results:
    return epilogue
  more = (room - epilogue.smem_bytes) // (out.num_bytes // out.num_slots)
  num_slots = max(out.num_slots, min(_MOST_SLOTS, out.num_slots + more))
  return dataclasses.replace(
      epilogue, out=dataclasses.replace(out, num_slots=num_slots)
  )
