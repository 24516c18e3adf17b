"""Rows of lhs divided by the roots of their mean squares, in the ring's slots.

  out = activation(alpha * (r * (lhs * weights)) @ rhs + bias) + beta * c
  r[i] = 1 / sqrt(mean over k of lhs[i, k] ** 2 + eps)

A row's factor leaves the sum over k, and is known at its end. So one more warpgroup takes
each tile of lhs from its slot, adds up the squares of its rows, writes it back multiplied
by the weights of k, rounded to its dtype, and hands the slot on; the consumer multiplies
its sums by r at last. Where few rows of activations meet many weights, which bound the
time, that hides behind those. A pass of its own is a kernel's launch. lhs * weights may
leave the range of a float16, which r would have brought back: operands are bfloat16.

  barrier   arrives                              waits
  ready[s]  this warpgroup, behind its writes    the consumer, in place of full[s]
  squares   the same, behind a tile's last       the consumer, before it stores
  applied   the consumer that has read them      this warpgroup, before the next tile's

A thread has 16 bytes of each 16th row, and so the same weights for all. On an H200
8x6144x4096 takes 14.5 us so (with a pass 15.1), 64x6144x4096 19.1 (17.1): for a k tile of
64x64 shared memory has 16 KB more to read and write, beside 32, which may be what bounds
it. In Pallas' words, of fragments as wgmma has them, both took 23; 28 by the consumer
itself, on lhs's way to wgmma through its registers.

Source: Zhang and Sennrich, "Root mean square layer normalization" (2019); the factor
behind the product is that of Graef, Clapp and Wasielewski, "FlashNorm" (2024).
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import math
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector
import numpy as np

from pallas_kernels import fragments, tiles
from pallas_kernels.configs import PersistentConfig
from pallas_kernels.integers import i32, i32_type
from pallas_kernels.problem import Problem

DTYPE = "bfloat16"
WEIGHTS = "norm_weights"  # Of k, in GMEM: the name of the input.
ROWS, COLS = 64, 64  # Of a tile.
_UNIT = 8  # Elements of a row that a thread has: 16 bytes.
_WEIGHTS_ROW = 256  # The most that TMA copies of a row; and of as many rows.
_SLOTS_FOR_TWO = 8
_FOR_SUMS = 2048  # Bytes of shared memory, with which Mosaic adds up columns.
_SQUARES = ROWS, COLS // _UNIT
_SQUARES_LAYOUT = plgpu.Layout.WG_STRIDED(_SQUARES, 1)
_SCALAR = plgpu.Layout.WG_SPLAT(())
Ref = Any


@dataclasses.dataclass(frozen=True)
class Norm:
  """What the rows of lhs are divided by.

  Attributes:
    eps: added to the mean square.
    m, k: rows of lhs, and their elements.
    emulated: whether an emulator stands in for the chip.
  """

  eps: float
  m: int
  k: int
  emulated: bool

  def scratch(self, num_slots: int) -> dict[str, Any]:
    return {
        "weights": plgpu.SMEM(_weights_shape(self.k), jnp.bfloat16),
        "weights_full": plgpu.Barrier(num_arrivals=1),
        "ready": plgpu.Barrier(num_arrivals=1, num_barriers=num_slots),
        "row_squares": plgpu.SMEM(_SQUARES, jnp.float32),
        "squares": plgpu.Barrier(num_arrivals=1),
        "applied": plgpu.Barrier(num_arrivals=1),
    }

  def begin(self, refs) -> None:
    """Brings the weights: each k tile's out of the L2 took longer than the tile."""
    plgpu.copy_gmem_to_smem(refs[WEIGHTS], refs["weights"], refs["weights_full"])
    plgpu.barrier_wait(refs["weights_full"])

  def weigh(self, found: Sequence[Ref], refs, k, squares: jax.Array) -> jax.Array:
    """Multiplies tiles [64, 64] of lhs, side by side from `k` on, by the weights.

    Returns the sums of squares [64, 8], of 8 columns each, with the tiles'.
    """
    if not self.emulated:
      return self._weigh_units(found, refs["weights"], k, squares)
    for i, tile in enumerate(found):
      first = jnp.int32(k + i * COLS)
      row, col = (op(first, jnp.int32(_WEIGHTS_ROW)) for op in (lax.div, lax.rem))
      rows, weights = tile[...], refs["weights"][row, pl.ds(col, COLS)]
      tile[...] = rows * weights
      of_units = jnp.square(rows.astype(jnp.float32)).reshape(*_SQUARES, _UNIT)
      squares = squares + jnp.sum(of_units, 2)
    return squares

  def _weigh_units(
      self, found: Sequence[Ref], weights: Ref, k, squares: jax.Array
  ) -> jax.Array:
    """The same on the chip: all loads first, as one waits as long as all."""
    turns = tiles.cdiv(min(self.m, ROWS), 16)
    tile_type = plgpu.RefType(tiles.swizzled(DTYPE))

    @plgpu.inline_mgpu(
        arg_types=(
            *[tile_type] * len(found), plgpu.RefType(), _SCALAR, _SQUARES_LAYOUT
        ),
        return_type=plgpu.ShapeDtypeStruct(_SQUARES, jnp.float32, _SQUARES_LAYOUT),
    )
    def weigh(_, *args):
      *found, weights, k, squares = args
      place, first = unit_of(mgpu.utils.thread_idx())
      source = fragments.address(weights, arith.addi(k.registers.item(), first))
      bases = [fragments.byte_address(tile, place) for tile in found]
      loaded = []
      for i, base in enumerate(bases):
        units = [_load(base, _turn(turn)) for turn in range(turns)]
        loaded.append((_load(source, 2 * COLS * i), units))
      sums = list(squares.registers.flat)
      for base, (factors, units) in zip(bases, loaded, strict=True):
        for turn, words in enumerate(units):
          sums[turn] = _with_squares(sums[turn], words)
          words = map(_product, words, factors)
          mgpu.utils.inline_ptx(
              f"st.shared.v4.b32 [$0 + {_turn(turn)}], {{$1, $2, $3, $4}};", base, *words,
              has_side_effects=True,
          )
      registers = np.empty((len(sums),), dtype=object)
      registers[:] = sums
      return mgpu.FragmentedArray(
          _registers=registers.reshape(squares.registers.shape),
          _layout=squares.layout, _is_signed=None,
      )

    return weigh(*found, weights, jnp.int32(k), squares)

  def no_squares(self) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros(_SQUARES, jnp.float32), _SQUARES_LAYOUT)

  def hand_over(self, refs, squares: jax.Array, local) -> None:
    """Hands the squares of the CTA's `local`-th tile to the consumer."""
    self.finish(refs, local)
    refs["row_squares"][...] = squares
    plgpu.commit_smem()
    plgpu.barrier_arrive(refs["squares"])

  def finish(self, refs, count) -> None:
    """Waits until the consumer has read those of the last of `count` tiles."""
    pl.when(count > 0)(lambda: plgpu.barrier_wait(refs["applied"]))

  def apply(self, refs, sums: jax.Array) -> jax.Array:
    """The sums [64, n] times the factors of their rows."""
    plgpu.barrier_wait(refs["squares"])
    squares = plgpu.load(
        refs["row_squares"], layout=plgpu.Layout.WGMMA, optimized=False
    )
    plgpu.barrier_arrive(refs["applied"])
    mean = jnp.sum(squares, 1) * jnp.float32(1 / self.k)
    factors = lax.rsqrt(mean + jnp.float32(self.eps))
    return sums * lax.broadcast_in_dim(factors, sums.shape, (0,))


def unit_of(thread: ir.Value) -> tuple[ir.Value, ir.Value]:
  """Where a thread's first unit is, in bytes of a tile, and which column it begins with.

  The rows of its others lie 16 further on each, where units are swizzled as here.
  """
  thread = arith.andi(thread, i32(tiles.WG_THREADS - 1))
  row, unit = arith.shrui(thread, i32(3)), arith.andi(thread, i32(7))
  turned = arith.xori(unit, arith.andi(row, i32(7)))
  place = arith.addi(arith.shli(row, i32(7)), arith.shli(turned, i32(4)))
  return place, arith.shli(unit, i32(3))


def _turn(number: int) -> int:
  """Bytes from a thread's first unit to that of a turn of 16 rows."""
  return number * 16 * tiles.SWIZZLE_BYTES


def _load(address: ir.Value, offset: int) -> list[ir.Value]:
  """Four words of shared memory."""
  return list(mgpu.utils.inline_ptx(
      f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4 + {offset}];", address,
      result_types=[i32_type()] * 4, has_side_effects=True,
  ))


def _product(word: ir.Value, factor: ir.Value) -> ir.Value:
  """Two elements times two others, rounded."""
  return mgpu.utils.inline_ptx(
      "mul.rn.bf16x2 $0, $1, $2;", word, factor, result_types=i32_type()
  )


def _with_squares(total: ir.Value, words: Sequence[ir.Value]) -> ir.Value:
  """A vector of one sum, with the squares of the words' elements."""
  found = vector.extract(total, dynamic_position=[], static_position=[0])
  for word in words:
    found = mgpu.utils.inline_ptx(
        "{ .reg .b32 x, y; .reg .f32 a, b; shl.b32 x, $2, 16; and.b32 y, $2, 0xffff0000;"
        " mov.b32 a, x; mov.b32 b, y; fma.rn.f32 a, a, a, $1; fma.rn.f32 $0, b, b, a; }",
        found, word, result_types=ir.F32Type.get(),
    )
  return vector.from_elements(total.type, [found])


def of(problem: Problem, *, emulated: bool) -> Norm | None:
  """That of the problem's lhs, or None."""
  if problem.norm_eps is None:
    return None
  return Norm(problem.norm_eps, problem.m, problem.k, emulated)


def at_once(num_stages: int) -> int:
  """k tiles that the warpgroup takes at once, of a ring of so many slots.

  They wait for loads and barriers together: 8x6144x4096 in 11 slots takes 17.3 us one by
  one, 14.5 two by two and 14.7 by three. A ring of few slots has none to spare for that.
  """
  return 2 if num_stages >= _SLOTS_FOR_TWO else 1


def prepare(weights: jax.Array) -> dict[str, jax.Array]:
  """The weights [k] by name, in whole rows."""
  shape = _weights_shape(weights.size)
  pad = math.prod(shape) - weights.size
  if pad:
    weights = lax.pad(weights, jnp.zeros((), weights.dtype), ((0, pad, 0),))
  return {WEIGHTS: lax.reshape(weights, shape)}


def pads(k: int) -> bool:
  """Whether `prepare` has to pad the weights, in a pass."""
  return k % _WEIGHTS_ROW > 0


def smem_bytes(problem: Problem) -> int:
  """Shared memory beside the ring."""
  if problem.norm_eps is None:
    return 0
  weights = math.prod(_weights_shape(problem.k)) * problem.itemsize
  return tiles.round_up(weights, 1024) + 4 * math.prod(_SQUARES) + _FOR_SUMS


def _weights_shape(k: int) -> tuple[int, int]:
  return tiles.cdiv(k, _WEIGHTS_ROW), _WEIGHTS_ROW


def check(problem: Problem, config: PersistentConfig) -> str | None:
  """Why the kernel cannot normalise lhs of the problem, or None."""
  if problem.norm_eps is None:
    return None
  if problem.dtype != DTYPE or problem.converts:
    return f"norm: operands are {DTYPE}, not {'/'.join(problem.stored_dtypes)}"
  if problem.lhs_layout != "k-major" or problem.batch > 1:
    return "norm: lhs is one array [m, k]"
  if problem.k > _WEIGHTS_ROW**2:
    return f"norm: the weights of k={problem.k} do not fit beside a ring"
  if problem.epilogue.scaling != "none" or problem.epilogue.slopes:
    return "norm excludes scales and slopes"
  wanted = dict(
      swap=False, misaligned="padded", consumers=1, tile_m=ROWS, tile_k=COLS,
      cluster_m=1, cluster_n=1,
  )
  for name, value in wanted.items():
    if getattr(config, name) != value:
      return f"{name}={getattr(config, name)!r}: norm takes {value!r}"
  return None
