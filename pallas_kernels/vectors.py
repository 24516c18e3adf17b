"""Vectors that an epilogue reads: a bias, the factors of rows or columns.

From memory they come 0.3 to 0.4 us late (H200) if they are asked for as sums are stored,
of which nothing is hidden where a CTA has one tile. So they are asked for before a tile
is multiplied: into registers, where its sums leave some, else into the L2.

On the chip a vector needs no padding: what lies beyond its end is read from its end, for
elements of the result that nobody stores. So a vector of one element serves all.

Source: `prefetch` of the PTX manual.
"""

from __future__ import annotations

from collections.abc import Iterable
import dataclasses
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith
from jaxlib.mlir.dialects import vector as vectors
import numpy as np

from pallas_kernels import tiles
from pallas_kernels.integers import (
  const64,
  i32,
  i64,
  i64_address,
  less,
  place_of_fragment,
)

MOST_SUMS = 64  # Registers of a thread's sums beside which vectors have theirs.
_LINE_BYTES = 128
_SCALAR = plgpu.Layout.WG_SPLAT(())
# Of a fragment's rows, and of its columns.
_LAYOUTS = mgpu.WGMMA_ROW_LAYOUT, mgpu.WGMMA_COL_LAYOUT
Ref = Any


@dataclasses.dataclass(frozen=True)
class Vector:
  """A vector along the rows (`dim` 0) or the columns (1) of a tile.

  Attributes:
    ref: all of it, in GMEM.
    dim: 0 or 1.
    start: the element of the tile's first row, or column; of columns it is even.
    emulated: whether it is padded to what `start` and the tile may ask for.
    kept: what is in registers, by its place in the tile.
  """

  ref: Ref
  dim: int
  start: Any
  emulated: bool
  kept: dict[int, jax.Array] = dataclasses.field(default_factory=dict)

  def ask(self, count: int, pieces: Iterable[tuple[int, int]], *, early: bool) -> None:
    """Asks for `count` elements: if `early` for `pieces` (place, count) in registers."""
    if early:
      for place, size in dict.fromkeys(pieces):
        self.kept[place] = self._load(place, size)
    elif not self.emulated:
      _prefetch(self.ref, self.start, count)

  def broadcast(self, place: int, shape: tuple[int, int]) -> jax.Array:
    """Returns the elements of a piece of `shape` at `place`, float32, for all of it."""
    found = self.kept.get(place)
    if found is None:
      found = self._load(place, shape[self.dim])
    return lax.broadcast_in_dim(found.astype(jnp.float32), shape, (self.dim,))

  def _load(self, place: int, count: int) -> jax.Array:
    start = self.start + place
    if not self.emulated:
      return _load(self.ref, start, count, self.dim)
    # A piece beyond the end is not stored: what it gets does not matter.
    start = jnp.minimum(start, self.ref.shape[0] - count)
    return plgpu.load(
        self.ref.at[pl.ds(start, count)],
        layout=plgpu.Layout.WGMMA.reduce(1 - self.dim), optimized=False,
    )


def _load(vector: Ref, start, count: int, dim: int) -> jax.Array:
  """Returns elements from `start` on, spread over a warpgroup as a fragment is."""
  itemsize = jnp.dtype(vector.dtype).itemsize
  layout = _LAYOUTS[dim]

  @plgpu.inline_mgpu(
      arg_types=(plgpu.RefType(), _SCALAR),
      return_type=plgpu.ShapeDtypeStruct(
          (count,), vector.dtype, plgpu.Layout.WGMMA.reduce(1 - dim)
      ),
  )
  def load(_, vector, start):
    ref = ir.MemRefType(vector.type)
    [size] = ref.shape
    # Two columns at once where both are within, or none is.
    width = 2 if dim == 1 and size % 2 == 0 else 1
    warp, row, pair = place_of_fragment()
    if dim == 0:
      places = [64 * i + 8 * half for i in range(count // 64) for half in range(2)]
      first = arith.addi(arith.shli(warp, i32(4)), row)
    else:
      places = [8 * i + j for i in range(count // 8) for j in range(0, 2, width)]
      first = arith.shli(pair, i32(1))
    first = arith.addi(start.registers.item(), first)
    words = [
        _word(
            vector, arith.minsi(arith.addi(first, i32(place)), i32(size - width)),
            width, itemsize, ref.element_type,
        )
        for place in places
    ]
    if dim == 1 and width == 1:
      words = [_joined(words[i : i + 2]) for i in range(0, len(words), 2)]
    registers = np.empty((len(words),), dtype=object)
    registers[:] = words
    return mgpu.FragmentedArray(
        _registers=registers.reshape(layout.registers_shape((count,))), _layout=layout,
        _is_signed=None,
    )

  return load(vector, jnp.int32(start))


def _word(vector, index, width: int, itemsize: int, element: ir.Type) -> ir.Value:
  """The elements [index, index + width) as a vector, loaded here, not where it is used.
  """
  num_bytes = width * itemsize
  words = max(num_bytes // 4, 1)
  bits = ir.IntegerType.get_signless(8 * min(num_bytes, 4))
  to, suffix = ("$0", "") if words == 1 else ("{$0, $1}", ".v2")
  found = mgpu.utils.inline_ptx(
      f"ld.global{suffix}.b{bits.width} {to}, [${words}];",
      _address(vector, index, itemsize), result_types=[bits] * words,
      has_side_effects=True,
  )
  found = [found] if words == 1 and not isinstance(found, tuple) else list(found)
  whole = vectors.from_elements(ir.VectorType.get((words,), bits), found)
  return vectors.bitcast(ir.VectorType.get((width,), element), whole)


def _joined(words) -> ir.Value:
  """Two vectors of one element each as one of two."""
  elements = [
      vectors.extract(word, dynamic_position=[], static_position=[0]) for word in words
  ]
  return vectors.from_elements(ir.VectorType.get((2,), elements[0].type), elements)


def _prefetch(vector: Ref, start, count: int) -> None:
  """Asks for the lines of `count` elements from `start` on: one thread for each."""
  itemsize = jnp.dtype(vector.dtype).itemsize
  # One more than they fill: they may begin within a line.
  lines = tiles.cdiv(count * itemsize, _LINE_BYTES) + 1
  assert lines <= tiles.WG_THREADS, (count, itemsize)

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR))
  def ask(_, vector, start):
    [size] = ir.MemRefType(vector.type).shape
    thread = arith.remui(mgpu.utils.thread_idx(), i32(tiles.WG_THREADS))
    index = arith.addi(
        start.registers.item(), arith.muli(thread, i32(_LINE_BYTES // itemsize))
    )
    mgpu.utils.inline_ptx(
        "prefetch.global.L2 [$0];",
        _address(vector, arith.minsi(index, i32(size - 1)), itemsize),
        predicate=less(thread, lines), has_side_effects=True,
    )

  ask(vector, jnp.int32(start))


def _address(vector, index, itemsize: int) -> ir.Value:
  return arith.addi(
      i64_address(mgpu.utils.memref_ptr(vector)),
      arith.muli(i64(index), const64(itemsize)),
  )
