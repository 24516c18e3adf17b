"""lhs whose rows TMA cannot stride over, brought by TMA all the same, skewed.

TMA wants rows that begin a multiple of 16 bytes apart, and windows that begin at such
an address. Every eighth row of any 16-bit array does begin so, counted from the first
of them. So TMA sees eight arrays, of the rows j, j + 8, j + 16, ...; each begins at the
last 16 bytes before its first element, up to 7 elements early: its skew. A tile comes
in eight copies, a window of each, wide enough for what the skew takes. The last of the
elements that TMA sees of a row is the row's own last: what lies beyond k is zeros.

Of several products all rows are one array's. One whose number is no multiple of 8
begins with another of the eight arrays than the one before, which rotates their places
in a slot. What lies beyond its last row is the next one's: of rows of k that would be
added, so m-major products have whole tiles of those.

wgmma reads no such tile. Its lhs may be registers, though, and these are loaded element
by element, each from its place. (rhs may not: it has another way, or operands change
places.) Of a slot [8, tile rows / 8, pitch], without swizzle:

  k-major   a warp takes the rows of two of the eight arrays, 8 of each, so that the
            threads of a load read 8 rows of one skew: the rows of an accumulator stand
            for others of its 64, see `fragments.row_of`
  m-major   a thread takes k from two of the eight arrays, its neighbours from others;
            each two windows begin 16 bytes earlier than the two before, as all rows
            would begin in the same bank

Source: the fragments are those of the PTX manual for wgmma's matrix A in registers.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu.launch_context import MemRefTransform
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref

from pallas_kernels import arrivals, compat, fragments, tiles
from pallas_kernels.configs import PersistentConfig
from pallas_kernels.fragments import BLOCKS, ROWS, TILE_K
from pallas_kernels.integers import i32, place_of_fragment
from pallas_kernels.problem import Problem

ARRAYS = 8  # Rows of 16-bit elements that lie so many apart are aligned alike.
_UNIT = 8  # Elements in 16 bytes.
_SCALAR = plgpu.Layout.WG_SPLAT(())
Ref = Any


class View(NamedTuple):
  """Elements of a flat array as rows that begin `pitch` apart, the first at `offset`."""

  offset: int
  rows: int
  cols: int
  pitch: int


@dataclasses.dataclass(frozen=True)
class _Window(MemRefTransform):
  """Has TMA copy a box of a view in place of a part of the flat array.

  Attributes:
    view: what TMA sees.
    box: rows and columns that it copies.
    start: where the box begins.
  """

  view: View
  box: tuple[int, int]
  start: tuple[Any, Any] = dataclasses.field(compare=False)  # No part of TMA's map.

  def apply(self, ref: ir.Value) -> ir.Value:
    flat, (offset, rows, cols, pitch) = ir.MemRefType(ref.type), self.view
    layout = ir.StridedLayoutAttr.get(offset, [pitch, 1])
    seen = ir.MemRefType.get((rows, cols), flat.element_type, layout, flat.memory_space)
    return memref.reinterpret_cast(
        seen, ref, [], [], [], static_offsets=[offset], static_sizes=[rows, cols],
        static_strides=[pitch, 1],
    )

  def transform_index(self, idx):
    return self.start

  def transform_shape(self, shape):
    return self.box

  def transform_gmem_shape(self, shape):
    return self.view.rows, self.view.cols

  def transform_strides(self, strides):
    return self.view.pitch, 1


@dataclasses.dataclass(frozen=True)
class Skewed:
  """Tiles of an array of 16-bit elements.

  Attributes:
    rows, cols: of the array as it is stored, those of all products.
    tile_m: rows of the product that a tile has.
    k_major: whether a row holds elements of k, else of m.
    dtype: by name.
    product_rows: of one product, where there are several; else 0.
  """

  rows: int
  cols: int
  tile_m: int
  k_major: bool
  dtype: str
  product_rows: int = 0

  @property
  def slot_shape(self) -> tuple[int, int, int]:
    """Of one tile in shared memory: array, row, element."""
    rows, cols = (self.tile_m, TILE_K) if self.k_major else (TILE_K, self.tile_m)
    return ARRAYS, rows // ARRAYS, cols + _UNIT + self.lead(ARRAYS - 1)

  @property
  def rotates(self) -> bool:
    """Whether not all products begin with the same of the eight arrays: k-major ones."""
    return self.product_rows % ARRAYS > 0

  def rotation(self, batch) -> Any:
    """Of a product's slots: the array that comes first in them."""
    return batch * (self.product_rows % ARRAYS) & (ARRAYS - 1) if self.rotates else 0

  def skew(self, array: int) -> int:
    """Elements by which TMA's view begins before the array."""
    return array * self.cols % _UNIT

  def lead(self, array: int) -> int:
    """Elements by which a window begins before the tile."""
    return 0 if self.k_major else array // 2 * _UNIT

  def view(self, array: int) -> View:
    """The rows `array`, `array` + 8, ..., each from its skew on to its end."""
    skew = self.skew(array)
    return View(
        array * self.cols - skew, tiles.cdiv(self.rows - array, ARRAYS),
        self.cols + skew, ARRAYS * self.cols,
    )

  def load(self, gmem: Ref, slot: Ref, barrier: Ref, batch, row, col) -> None:
    """Starts the copies of a product's tile at (row, col); they arrive as one.

    One warp calls. `gmem` is flat; row and col are multiples of 8.
    """
    num_bytes, box = 2 * math.prod(self.slot_shape), self.slot_shape[1:]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), _SCALAR, _SCALAR, _SCALAR)
    )
    def copy(context, gmem, slot, address, row, col):
      address, row, col = (x.registers.item() for x in (address, row, col))
      one_lane = mgpu.utils.single_thread_predicate(mgpu.utils.ThreadSubset.WARP)
      arrivals.expect(address, i32(num_bytes), one_lane)
      barrier = arrivals.barrier(address)
      for array in range(ARRAYS):
        place, *start = self._begin(array, row, col)
        start = tuple(map(_index, start))
        context.async_copy(
            src_ref=gmem, dst_ref=mgpu.utils.memref_slice(slot, _index(place)),
            # As many elements; the window says which.
            gmem_slice=(mgpu.utils.ds(_index(i32(0)), math.prod(box)),),
            gmem_transform=(_Window(self.view(array), box, start),),
            barrier=barrier, arrive=False, predicate=one_lane,
        )

    row = batch * self.product_rows + row
    copy(gmem, slot, compat.barrier_address(barrier), jnp.int32(row), jnp.int32(col))

  def _begin(self, array: int, row, col) -> tuple[Any, Any, Any]:
    """The place of an array in a slot, and (row, col) of its view where its box begins.

    `row` is one of all products' rows.
    """
    place = i32(array)
    if self.rotates:
      place = arith.andi(arith.subi(place, row), i32(ARRAYS - 1))
      row = arith.addi(row, place)
    return place, arith.shrui(row, i32(3)), arith.subi(col, i32(self.lead(array)))

  def load_fragments(self, slot: Ref, start, batch) -> jax.Array:
    """64 rows of the tile from `start` on, for `fragments`: int32 [64, 64] of (m, k).

    The loads are on their way when this returns. Each integer is one element, or the
    first of each two is both.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), _SCALAR, _SCALAR),
        return_type=plgpu.ShapeDtypeStruct(
            (ROWS, TILE_K), jnp.int32, layout=plgpu.Layout.WGMMA
        ),
    )
    def load(_, slot, start, rotation):
      at = slot, start.registers.item()
      if self.k_major:
        words = self._from_rows(*at, rotation.registers.item())
      else:
        words = self._from_columns(*at)
      return fragments.words(words)

    return load(slot, jnp.int32(start), jnp.int32(self.rotation(batch)))

  def fragments(self, loaded: jax.Array) -> jax.Array:
    """What `load_fragments` loaded, [64, 64] as wgmma takes it."""
    return fragments.joined(loaded, self.dtype, self._is_whole)

  def _is_whole(self, half: int) -> bool:
    """Whether two elements of k lie in one word: the skew is even."""
    always = half == 0 and self.product_rows % 2 == 0  # Of arrays 0, 2, 4 and 6.
    return self.k_major and (always or self.cols % 2 == 0)

  def _from_rows(self, slot, start, rotation) -> list[tuple[ir.Value, ir.Value]]:
    """A thread's pairs of neighbours of k, of k-major rows."""
    warp, group, lane = place_of_fragment()
    _, rows, pitch = self.slot_shape
    row = arith.addi(arith.shrui(start, i32(3)), group)
    bases = []
    for half in range(2):
      array = arith.addi(arith.shli(warp, i32(1)), i32(half))
      element = arith.addi(
          arith.muli(arith.addi(arith.muli(array, i32(rows)), row), i32(pitch)),
          arith.addi(
              self._skew_of(arith.addi(array, rotation)), arith.shli(lane, i32(1))
          ),
      )
      bases.append(fragments.address(slot, element))
    return [
        (fragments.load("b32", bases[half], 16 * block), i32(0)) if self._is_whole(half)
        else tuple(fragments.load("u16", bases[half], 16 * block + at) for at in (0, 2))
        for block in range(BLOCKS) for half in range(2)
    ]

  def _from_columns(self, slot, start) -> list[tuple[ir.Value, ir.Value]]:
    """The same of m-major ones, rows of k: the two come from two of the arrays."""
    warp, group, lane = place_of_fragment()
    _, rows, pitch = self.slot_shape
    col = arith.addi(start, arith.addi(arith.shli(warp, i32(4)), group))
    bases = []
    for odd in range(2):
      array = arith.addi(arith.shli(lane, i32(1)), i32(odd))
      lead = arith.shli(lane, i32(3))  # As `lead` says: array // 2 units.
      element = arith.addi(
          arith.muli(arith.muli(array, i32(rows)), i32(pitch)),
          arith.addi(arith.addi(self._skew_of(array), lead), col),
      )
      bases.append(fragments.address(slot, element))
    return [
        tuple(
            fragments.load("u16", base, 2 * (block * pitch + 8 * half)) for base in bases
        )
        for block in range(BLOCKS) for half in range(2)
    ]

  def _skew_of(self, array: ir.Value) -> ir.Value:
    """As `skew` says; of arrays beyond the eighth those that they stand for."""
    return arith.andi(arith.muli(array, i32(self.cols % _UNIT)), i32(_UNIT - 1))


def slot_bytes(tile_m: int, *, k_major: bool) -> int:
  """Shared memory of one tile."""
  return 2 * math.prod(Skewed(0, 0, tile_m, k_major, "bfloat16").slot_shape)


def check(problem: Problem, config: PersistentConfig) -> str | None:
  """Why lhs of `problem`, which is what the kernel multiplies, cannot come so, or None.
  """
  k_major = problem.lhs_layout == "k-major"
  rows, cols = problem.lhs_shape[1:]
  if problem.itemsize != 2:
    return f"misaligned='skewed': so come 16-bit operands, not {problem.dtype}"
  if cols % _UNIT == 0:
    return "misaligned='skewed': TMA strides over the rows of this lhs"
  if rows < ARRAYS:
    return f"misaligned='skewed': lhs has {rows} rows, fewer than {ARRAYS}"
  several = problem.batch > 1 and problem.lhs_batched
  if several and not k_major and rows % TILE_K:
    return (
        f"misaligned='skewed': tiles of {rows} rows of k would reach into the next"
        " product's"
    )
  tile = Skewed(rows, cols, config.tile_m, k_major, problem.dtype)
  if tile.slot_shape[-1] > tiles.TMA_BOX_LIMIT:
    most = tiles.TMA_BOX_LIMIT
    return f"tile_m={config.tile_m}: TMA copies {most} elements of an m-major row"
  if config.tile_k != TILE_K:
    return f"tile_k={config.tile_k}: misaligned='skewed' takes {TILE_K}"
  return None


def _index(value: ir.Value) -> ir.Value:
  return arith.index_cast(ir.IndexType.get(), value)
