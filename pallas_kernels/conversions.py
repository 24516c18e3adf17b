"""lhs in 8 bits, converted to 16 by the consumers, on its way through their registers.

Weights in 8 bits that few rows of activations multiply are bound by the memory that
they are read from. A pass that converts them moves five bytes for each that it reads.
So the ring brings them as they are, 64 of k a slot, and a consumer takes its 64 rows of
a slot into registers, converts them, and hands them to wgmma, which takes lhs so. Each
value of 8 bits is one of bfloat16 and of float16: nothing is rounded.

Rows of a slot are 64 or 128 bytes, swizzled by as many, so that the threads of a warp
find what they load in banks of their own. Each load is of two neighbours:

  k-major   of k, as the fragment has them
  m-major   of m: so the rows of an accumulator stand for others, see
            `fragments.row_of`; k comes together from two loads

The emulator's wgmma reads no registers: there XLA converts lhs first.

Source: the mixed-input products of CUTLASS (sm90); int8 as the low bits of a float16
whose last place is 1, from which a constant is taken, is FasterTransformer's (Kim, Henry,
Fahim, Awadalla, "Who says elephants can't run", 2022). bfloat16 has seven such bits, one
too few; but its smallest numbers, denormal ones and those behind them, lie evenly. (Masks
that put the sign's bit into the constant took 8% longer: the pipe of integers is the
bound, and multiplications have another.)
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from pallas_kernels import fragments, tiles
from pallas_kernels.configs import PersistentConfig
from pallas_kernels.fragments import BLOCKS, ROWS, TILE_K
from pallas_kernels.integers import i32, i32_type, place_of_fragment
from pallas_kernels.problem import ALGORITHM_OF_EIGHT_BITS, Problem

SOURCES = tuple(ALGORITHM_OF_EIGHT_BITS)
_UNIT = 16  # Bytes of a row that a swizzle moves as one.
_SCALAR = plgpu.Layout.WG_SPLAT(())
# Which bytes of two words make two elements: of rows of k, of the first and second half
# of pairs of m. Packed, or apart by zeros, which every word has above its two.
_PACKED = 0x3210, 0x2240, 0x2251
_APART = 0x2120, 0x2420, 0x2521
Ref = Any


@dataclasses.dataclass(frozen=True)
class Narrow:
  """Tiles of an array of 8-bit elements.

  Attributes:
    tile_m: rows of the product that a tile has.
    k_major: whether a row of the array holds elements of k, else of m.
    source: dtype of the array, by name.
    dtype: what wgmma multiplies, by name.
  """

  tile_m: int
  k_major: bool
  source: str
  dtype: str

  @property
  def width(self) -> int:
    """Bytes of a row of a slot."""
    return TILE_K if self.k_major else min(self.tile_m, tiles.SWIZZLE_BYTES)

  @property
  def slot_shape(self) -> tuple[int, int, int]:
    """Of one tile in shared memory: chunk, row, element."""
    rows, cols = (self.tile_m, TILE_K) if self.k_major else (TILE_K, self.tile_m)
    return cols // self.width, rows, self.width

  @property
  def transforms(self) -> tuple[Any, ...]:
    return (plgpu.SwizzleTransform(self.width),)

  def load_fragments(self, slot: Ref, start, rows: int) -> jax.Array:
    """`rows` of the tile from `start` on, for `fragments`: int32 [rows, 64].

    Each two integers hold the bytes of a register of two elements. `rows` is a multiple
    of 64. The loads are on their way when this returns.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(self.transforms), _SCALAR),
        return_type=plgpu.ShapeDtypeStruct(
            (rows, TILE_K), jnp.int32, layout=plgpu.Layout.WGMMA
        ),
    )
    def load(_, slot, start):
      start, found = start.registers.item(), []
      words = self._from_rows if self.k_major else self._from_columns
      for row in range(0, rows, ROWS):
        found += words(slot, arith.addi(start, i32(row)))
      return fragments.words(found, rows)

    return load(slot, jnp.int32(start))

  def fragments(self, loaded: jax.Array) -> jax.Array:
    """What `load_fragments` loaded, converted, [rows, 64] as wgmma takes it.

    Not before the wait for wgmma in flight: were registers that the next ones read
    written meanwhile, ptxas would have each wgmma wait for the one before.
    """
    rows = loaded.shape[0]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA,),
        return_type=plgpu.ShapeDtypeStruct(
            (rows, TILE_K), jnp.dtype(self.dtype), layout=plgpu.Layout.WGMMA
        ),
    )
    def convert(_, loaded):
      found = []
      for i, pair in enumerate(loaded.registers.flat):
        words = [
            vector.extract(pair, dynamic_position=[], static_position=[at])
            for at in range(2)
        ]
        found.append(self._converted(words, i % 2))
      return fragments.of_words(found, self.dtype, rows)

    return convert(loaded)

  def _from_rows(self, slot, start) -> fragments.Words:
    """A thread's pairs of neighbours of k, each in one word."""
    warp, group, lane = place_of_fragment()
    row = arith.addi(arith.addi(start, arith.shli(warp, i32(4))), group)
    base = arith.addi(arith.muli(row, i32(self.width)), arith.shli(lane, i32(1)))
    turn = arith.andi(arith.shrui(group, i32(1)), i32(3))  # The row's, as of 8 more.
    units = []
    for unit in range(TILE_K // _UNIT):
      turned = arith.shli(arith.xori(turn, i32(unit)), i32(4))  # In bytes.
      units.append(fragments.byte_address(slot, arith.addi(base, turned)))
    words = []
    for block in range(BLOCKS):
      for half in range(2):
        offset = 8 * half * self.width + 8 * (block % 2)
        word = fragments.load("u16", units[block // 2], offset)
        words.append((word, word))
    return words

  def _from_columns(self, slot, start) -> fragments.Words:
    """Pairs of neighbours of m, of one k and of the next."""
    warp, group, lane = place_of_fragment()
    _, rows, width = self.slot_shape
    whole = width == tiles.SWIZZLE_BYTES
    chunk = arith.shrui(start, i32(7)) if whole else i32(0)
    unit = arith.addi(
        arith.shrui(arith.andi(start, i32(width - 1)), i32(4)), warp
    )
    bases = []
    for odd in range(2):
      row = arith.addi(arith.shli(lane, i32(1)), i32(odd))  # Of the blocks' first.
      turned = arith.shli(arith.xori(unit, row if whole else lane), i32(4))
      place = arith.addi(
          arith.muli(arith.addi(arith.muli(chunk, i32(rows)), row), i32(width)),
          arith.addi(turned, arith.shli(group, i32(1))),
      )
      bases.append(fragments.byte_address(slot, place))
    words = []
    for block in range(BLOCKS):
      first, second = (fragments.load("u16", base, 8 * block * width) for base in bases)
      words += [(first, second)] * 2
    return words

  def _converted(self, words: list[ir.Value], half: int) -> ir.Value:
    """Two elements of k from the words that hold their bytes."""
    selectors = _APART if self.source == "int8" else _PACKED
    selector = selectors[0] if self.k_major else selectors[1 + half]
    if self.source == "int8":
      convert = _OF_INT8[self.dtype]
    else:
      kind = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}[self.source]
      convert = (
          f"mov.b32 {{p, q}}, x; cvt.rn.f16x2.{kind}x2 x, p; {_OF_HALVES[self.dtype]}"
      )
    registers = ".reg .b32 x, y, z; .reg .b16 p, q; .reg .f32 a, b;"
    return mgpu.utils.inline_ptx(
        f"{{ {registers} prmt.b32 x, $1, $2, {selector}; {convert} }}", *words,
        result_types=i32_type(),
    )


# PTX, from x to $0. The bytes of int8 stand apart in x, the upper ones are zeros. With
# 128 added, which turns the sign's bit, they have no sign.
_OF_INT8 = {
    # As bfloat16 such a byte is its number times 2**-133, denormal or not: times 2**127,
    # then times 64 less 128.
    "bfloat16": (
        "xor.b32 x, x, 0x00800080; mov.b32 y, 0x7f007f00;"
        " mul.rn.bf16x2 x, x, y; mov.b32 y, 0x42804280; mov.b32 z, 0xc300c300;"
        " fma.rn.bf16x2 $0, x, y, z;"
    ),
    # 1024 + 128 + the number, less the former two.
    "float16": (
        "lop3.b32 x, x, 0x00800080, 0x64006400, 0xBE; mov.b32 y, 0x64806480;"
        " sub.rn.f16x2 $0, x, y;"
    ),
}
_OF_HALVES = {
    "bfloat16": (
        "mov.b32 {p, q}, x; cvt.f32.f16 a, p; cvt.f32.f16 b, q;"
        " cvt.rn.bf16x2.f32 $0, b, a;"
    ),
    "float16": "mov.b32 $0, x;",
}


def slot_bytes(tile_m: int) -> int:
  """Shared memory of one tile."""
  return tile_m * TILE_K


def check(problem: Problem, config: PersistentConfig) -> str | None:
  """Why lhs of `problem`, which is what the kernel multiplies, cannot come so, or None.
  """
  if problem.rhs_source:
    return f"rhs of dtype {problem.rhs_source}: consumers convert lhs; see swap"
  if problem.lhs_source not in SOURCES:
    return f"lhs of dtype {problem.lhs_source}: consumers convert {', '.join(SOURCES)}"
  if problem.itemsize != 2:
    return f"consumers convert lhs to 16 bits, not to {problem.dtype}"
  cols = problem.lhs_shape[2]
  if cols % _UNIT:
    return f"TMA cannot stride over the rows of lhs, {cols} bytes: they take {_UNIT}"
  if config.misaligned != "padded":
    return f"misaligned={config.misaligned!r} is of operands of 16 bits"
  if config.tile_k != TILE_K:
    return f"tile_k={config.tile_k}: lhs that is converted takes {TILE_K}"
  k_major = problem.lhs_layout == "k-major"
  if not k_major and config.tile_m > 128 and config.tile_m % 128:
    return f"tile_m={config.tile_m}: rows of m come in chunks of 128 bytes"
  return None
