"""What a warpgroup does to normalise lhs in its registers, in PTX.

A tile [64, 64] of lhs goes from shared memory to wgmma's fragments by ldmatrix, four
matrices of 8x8 at once: a warp's 16 rows of 16 columns. So do the weights of its columns:
of a matrix whose rows are all the same 8 weights each thread gets those of its columns.

Source: `ldmatrix` and the fragments of wgmma's matrix A in the PTX manual.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector

from pallas_kernels import fragments, tiles
from pallas_kernels.integers import i32, i32_type

DTYPE = "bfloat16"
ROWS, COLS = 64, 64  # Of a tile.
SQUARES = ROWS, 8  # Sums of squares of the columns that are equal mod 8.
HALVES = 2  # Rows that a thread has elements of, 8 apart.
VECTOR = 4  # Sums that a thread stores at once.
_WGMMA = plgpu.Layout.WGMMA
_SCALAR = plgpu.Layout.WG_SPLAT(())
Ref = Any
Loaded = tuple[jax.Array, jax.Array]  # A tile of lhs, and its columns' weights.


def load(tile: Ref, weights: Ref, k) -> Loaded:
  """The tile, and the weights of its columns, which begin with `k`; soon there."""

  @plgpu.inline_mgpu(
      arg_types=(plgpu.RefType(tiles.swizzled(DTYPE)), plgpu.RefType(), _SCALAR),
      return_type=(_fragment(COLS), _fragment(COLS // 2)),
  )
  def load(_, tile, weights, k):
    thread = mgpu.utils.thread_idx()
    row, turned = unit_of(thread)
    found = []
    for step in range(COLS // 16):
      unit = arith.xori(turned, i32(step << 5))
      found += _matrices(fragments.byte_address(tile, arith.addi(row, unit)))
    first = arith.addi(k.registers.item(), arith.andi(thread, i32(24)))
    place = fragments.address(weights, first)
    factors = _matrices(place) + _matrices(place, 64)
    return tuple(
        fragments.of_words(words, DTYPE, ROWS, cols)
        for words, cols in ((found, COLS), (factors, COLS // 2))
    )

  return load(tile, weights, jnp.int32(k))


def weighed(rows: jax.Array, weights: jax.Array) -> jax.Array:
  """A tile times its weights, rounded."""

  @plgpu.inline_mgpu(arg_types=(_WGMMA,) * 2, return_type=_fragment(COLS))
  def weigh(_, rows, weights):
    factors = [_word(pair) for pair in weights.registers.flat]
    found = [
        mgpu.utils.inline_ptx(
            "mul.rn.bf16x2 $0, $1, $2;", _word(pair), factors[i // HALVES],
            result_types=i32_type(),
        )
        for i, pair in enumerate(rows.registers.flat)
    ]
    return fragments.of_words(found, DTYPE, ROWS)

  return weigh(rows, weights)


def with_squares(rows: jax.Array, squares: jax.Array) -> jax.Array:
  """Sums of squares, and those of a tile."""
  like = plgpu.ShapeDtypeStruct(SQUARES, jnp.float32, _WGMMA)

  @plgpu.inline_mgpu(arg_types=(_WGMMA,) * 2, return_type=like)
  def add(_, rows, squares):
    sums = [_elements(pair) for pair in squares.registers.flat]
    for i, pair in enumerate(rows.registers.flat):
      sums[i % HALVES] = mgpu.utils.inline_ptx(
          "{ .reg .b32 x, y; .reg .f32 a, b; shl.b32 x, $2, 16;"
          " and.b32 y, $2, 0xffff0000; mov.b32 a, x; mov.b32 b, y;"
          " fma.rn.f32 $0, a, a, $3; fma.rn.f32 $1, b, b, $4; }",
          _word(pair), *sums[i % HALVES], result_types=[ir.F32Type.get()] * 2,
      )
    return _like(squares, [element for pair in sums for element in pair])

  return add(rows, squares)


def keep(kept: Ref, squares: jax.Array, is_first) -> None:
  """Adds sums of squares to each thread's own in `kept` [2, 128]; stores the first."""

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _WGMMA, _SCALAR))
  def add(_, kept, squares, is_first):
    zero = arith.constant(ir.F32Type.get(), 0.0)
    first = arith.cmpi(arith.CmpIPredicate.ne, is_first.registers.item(), i32(0))
    for half, pair in enumerate(squares.registers.flat):
      place = _place(half)
      before = arith.select(first, zero, memref.load(kept, place))
      total = arith.addf(before, arith.addf(*_elements(pair)))
      memref.store(total, kept, place)

  add(kept, squares, jnp.int32(is_first))


def take_over(kept: Ref) -> None:
  """Adds the second of two such `kept` to the first."""

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
  def add(_, kept):
    for half in range(HALVES):
      own, other = (memref.load(kept, _place(reader, half)) for reader in range(2))
      memref.store(arith.addf(own, other), kept, _place(0, half))

  add(kept)


def scaled(sums: jax.Array, kept: Ref, k: int, eps: float) -> jax.Array:
  """The sums [64, n] divided by the roots of their rows' mean squares.

  `kept` [2, 128] has each thread's sums of squares; four threads share a row.
  """

  @plgpu.inline_mgpu(
      arg_types=(_WGMMA, plgpu.RefType()),
      return_type=plgpu.ShapeDtypeStruct(sums.shape, sums.dtype, _WGMMA),
  )
  def scale(_, sums, kept):
    factors = []
    for half in range(HALVES):
      factors.append(mgpu.utils.inline_ptx(
          "{ .reg .f32 s, t; shfl.sync.bfly.b32 t, $1, 1, 31, -1; add.rn.f32 s, $1, t;"
          " shfl.sync.bfly.b32 t, s, 2, 31, -1; add.rn.f32 s, s, t;"
          " fma.rn.f32 s, s, $2, $3; rsqrt.approx.f32 $0, s; }",
          memref.load(kept, _place(half)), _float(1 / k), _float(eps),
          result_types=ir.F32Type.get(), has_side_effects=True,
      ))
    found = []
    for i, pair in enumerate(sums.registers.flat):
      found += [arith.mulf(x, factors[i % HALVES]) for x in _elements(pair)]
    return _like(sums, found)

  return scale(sums, kept)


def put(ref: Ref, sums: jax.Array, first_col: int) -> None:
  """Stores a piece of the columns of sums [64, n] as threads have them.

  `ref` [vectors, 128, 4]: no bank conflicts arise.
  """
  vectors, *_ = ref.shape

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _WGMMA))
  def store(_, ref, sums):
    found = [x for pair in _piece(sums, first_col, vectors) for x in _elements(pair)]
    for i in range(vectors):
      value = vector.from_elements(_four(), found[VECTOR * i : VECTOR * (i + 1)])
      vector.store(value, ref, [*_place(i), _index(0)])

  store(ref, sums)


def added(sums: jax.Array, ref: Ref, first_col: int) -> jax.Array:
  """The sums, to which those that `put` stored are added."""
  vectors, *_ = ref.shape

  @plgpu.inline_mgpu(
      arg_types=(_WGMMA, plgpu.RefType()),
      return_type=plgpu.ShapeDtypeStruct(sums.shape, sums.dtype, _WGMMA),
  )
  def add(_, sums, ref):
    found = [x for pair in sums.registers.flat for x in _elements(pair)]
    first = first_col // 2  # Of a thread's, which has four of each eight columns.
    for i in range(vectors):
      part = vector.load(_four(), ref, [*_place(i), _index(0)])
      for j in range(VECTOR):
        other = vector.extract(part, dynamic_position=[], static_position=[j])
        at = first + VECTOR * i + j
        found[at] = arith.addf(found[at], other)
    return _like(sums, found)

  return add(sums, ref)


def unit_of(thread: ir.Value) -> tuple[ir.Value, ir.Value]:
  """Where the row and the unit of 16 bytes lie that a thread names to ldmatrix.

  In bytes of a slot: the row's begin, and the unit within it as it is swizzled. Of the
  next 16 columns that is bitwise another. Each eight threads name a matrix: the upper
  and lower 8 rows of a warp's 16, of the first 8 columns and of the second.
  """
  thread = arith.andi(thread, i32(tiles.WG_THREADS - 1))
  warp, lane = arith.shrui(thread, i32(5)), arith.andi(thread, i32(31))
  row = arith.addi(arith.shli(warp, i32(4)), arith.andi(lane, i32(15)))
  unit = arith.xori(arith.shrui(lane, i32(4)), arith.andi(lane, i32(7)))
  return arith.shli(row, i32(7)), arith.shli(unit, i32(4))


def _fragment(cols: int) -> plgpu.ShapeDtypeStruct:
  """Columns of lhs; or of a row of weights, two registers of which stand for four."""
  return plgpu.ShapeDtypeStruct((ROWS, cols), jnp.dtype(DTYPE), _WGMMA)


def _matrices(address: ir.Value, offset: int = 0) -> list[ir.Value]:
  """A word of each of four matrices, `offset` bytes behind an address."""
  return list(mgpu.utils.inline_ptx(
      f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$0, $1, $2, $3}}, [$4 + {offset}];",
      address, result_types=[i32_type()] * 4, has_side_effects=True,
  ))


def _word(pair: ir.Value) -> ir.Value:
  """Two elements as an integer."""
  word = vector.bitcast(ir.VectorType.get((1,), i32_type()), pair)
  return vector.extract(word, dynamic_position=[], static_position=[0])


def _elements(pair: ir.Value) -> list[ir.Value]:
  return [
      vector.extract(pair, dynamic_position=[], static_position=[i]) for i in range(2)
  ]


def _piece(sums: mgpu.FragmentedArray, first_col: int, vectors: int):
  """The pairs of so many vectors, of the columns from one on."""
  first, count = first_col // 4, vectors * VECTOR // 2
  return list(sums.registers.flat)[first : first + count]


def _like(array: mgpu.FragmentedArray, elements: Sequence[ir.Value]):
  """An array as another, whose registers have two elements each, of these."""
  found = array.registers.copy()
  found.flat = [
      vector.from_elements(found.flat[0].type, elements[i : i + 2])
      for i in range(0, len(elements), 2)
  ]
  return mgpu.FragmentedArray(_registers=found, _layout=array.layout, _is_signed=None)


def _place(*first: int) -> list[ir.Value]:
  """Indices of the thread's own in an array [..., 128] of its warpgroup."""
  thread = arith.andi(mgpu.utils.thread_idx(), i32(tiles.WG_THREADS - 1))
  own = arith.index_cast(ir.IndexType.get(), thread)
  return [*map(_index, first), own]


def _index(value: int) -> ir.Value:
  return arith.constant(ir.IndexType.get(), value)


def _float(value: float) -> ir.Value:
  return arith.constant(ir.F32Type.get(), value)


def _four() -> ir.Type:
  return ir.VectorType.get((VECTOR,), ir.F32Type.get())
