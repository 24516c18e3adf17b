"""Rows of lhs normalised on their way to wgmma, where they are few.

  out = activation(alpha * (r * (lhs * weights)) @ rhs + bias) + beta * c
  r[i] = 1 / sqrt(mean over k of lhs[i, k] ** 2 + eps)

A row's factor leaves the sum over k, and is known at its end. So consumers take each tile
of lhs from its slot into registers, which wgmma's lhs may be: they add up the squares of
its rows, and multiply it by the weights of k, rounded to its dtype. They multiply their
sums by r at last. Where few rows of activations meet many weights, which bound the time,
that hides behind those. A pass of its own is a kernel's launch. lhs * weights may leave
the range of a float16, which r would have brought back: operands are bfloat16.

Of tiles of few columns wgmma does not take as long as what goes before. So with `wg_dim`
"k" two consumers take slots in turn, each those of its own parity, and the second hands
its sums and squares to the first, in pieces:

  barrier      arrives                            waits
  handed_over  the second, behind each piece      the first, before it adds the piece
  taken_over   the first, when it has added it    the second, before the next

On an H200 64x6144x4096 takes 14.9 us so (with a pass 17.0, without a norm 13.9), and
8x6144x4096 14.4 (15.1, 13.2).

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
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import norm_registers, tiles
from pallas_kernels.configs import PersistentConfig
from pallas_kernels.norm_registers import COLS, DTYPE, HALVES, ROWS, SQUARES, Loaded
from pallas_kernels.problem import Problem

WEIGHTS = "norm_weights"  # Of k, in GMEM: the name of the input.
_WEIGHTS_ROW = 256  # The most that TMA copies of a row; and of as many rows.
_PIECE = 32  # Columns of sums that are handed over at once.
Ref = Any


@dataclasses.dataclass(frozen=True)
class Norm:
  """What the rows of lhs are divided by.

  Attributes:
    eps: added to the mean square.
    k: elements of a row.
    readers: consumers that take k tiles in turn: 1 or 2.
    tile_n: columns of a tile.
    at_once: k tiles that a consumer takes at once.
    emulated: whether an emulator stands in for the chip.
  """

  eps: float
  k: int
  readers: int
  tile_n: int
  at_once: int
  emulated: bool

  def scratch(self) -> dict[str, Any]:
    own = (ROWS,) if self.emulated else (HALVES, tiles.WG_THREADS)
    found = {
        "weights": plgpu.SMEM(_weights_shape(self.k), jnp.bfloat16),
        "weights_full": plgpu.Barrier(num_arrivals=1),
        "row_squares": plgpu.SMEM((self.readers, *own), jnp.float32),
    }
    if self.readers == 1:
      return found
    vectors = ROWS * _PIECE // (tiles.WG_THREADS * norm_registers.VECTOR)
    shape = vectors, tiles.WG_THREADS, norm_registers.VECTOR
    if self.emulated:
      shape = ROWS, _PIECE
    return found | {
        "others_sums": plgpu.SMEM(shape, jnp.float32),
        "handed_over": plgpu.Barrier(num_arrivals=1),
        "taken_over": plgpu.Barrier(num_arrivals=1),
    }

  def begin(self, refs, reader: int) -> None:
    """Brings the weights: each k tile's out of the L2 took longer than the tile."""
    if reader == 0:
      plgpu.copy_gmem_to_smem(refs[WEIGHTS], refs["weights"], refs["weights_full"])
    plgpu.barrier_wait(refs["weights_full"])

  def load(self, tile: Ref, refs, k) -> Loaded:
    """A tile [64, 64] of lhs from `k` on, and its columns' weights; soon there."""
    if not self.emulated:
      return norm_registers.load(tile, refs["weights"], k)
    row, col = (op(jnp.int32(k), jnp.int32(_WEIGHTS_ROW)) for op in (lax.div, lax.rem))
    return tile[...], refs["weights"][row, pl.ds(col, COLS)]

  def weighed(self, loaded: Loaded) -> jax.Array:
    """The tile times its weights, rounded, as wgmma takes it."""
    rows, weights = loaded
    return rows * weights if self.emulated else norm_registers.weighed(rows, weights)

  def no_squares(self) -> jax.Array:
    none = jnp.zeros(SQUARES, jnp.float32)
    return plgpu.layout_cast(none, plgpu.Layout.WGMMA)

  def with_squares(
      self, found: Sequence[Loaded], squares: jax.Array, *, is_true: jax.Array
  ) -> jax.Array:
    """The sums of squares [64, 8] of the columns that are equal mod 8, and the tiles'.

    Behind a branch that is always taken, as ptxas cannot know: it would move them from
    beside wgmma in flight to behind the wait for those.
    """
    def add(squares):
      for rows, _ in found:
        if self.emulated:
          blocks = jnp.square(rows.astype(jnp.float32)).reshape(ROWS, -1, SQUARES[1])
          squares = squares + jnp.sum(blocks, 1)
        else:
          squares = norm_registers.with_squares(rows, squares)
      return squares

    return lax.cond(is_true, add, lambda squares: squares, squares)

  def keep(self, refs, squares: jax.Array, *, reader: int, is_first) -> None:
    """Keeps the squares of some k tiles with those of the tile's before.

    Each thread has its own.
    """
    kept = refs["row_squares"].at[reader]
    if not self.emulated:
      norm_registers.keep(kept, squares, is_first)
      return
    before = jnp.where(is_first, 0.0, kept[...])
    kept[...] = before + jnp.sum(squares, 1)

  def hand_over(self, refs, sums: jax.Array) -> None:
    """Hands the second consumer's sums over, and the squares that it keeps."""
    for first in range(0, self.tile_n, _PIECE):
      if self.emulated:
        refs["others_sums"][...] = sums[:, first : first + _PIECE]
      else:
        norm_registers.put(refs["others_sums"], sums, first)
      plgpu.barrier_arrive(refs["handed_over"])
      plgpu.barrier_wait(refs["taken_over"])

  def apply(self, refs, sums: jax.Array) -> jax.Array:
    """All sums [64, tile_n], times the factors of their rows."""
    if self.readers > 1:
      sums = self._taken_over(refs, sums)
    kept = refs["row_squares"].at[0]
    if not self.emulated:
      return norm_registers.scaled(sums, kept, self.k, self.eps)
    factors = lax.rsqrt(kept[...] * jnp.float32(1 / self.k) + jnp.float32(self.eps))
    return sums * factors[:, None]

  def _taken_over(self, refs, sums: jax.Array) -> jax.Array:
    for first in range(0, self.tile_n, _PIECE):
      plgpu.barrier_wait(refs["handed_over"])
      if not first:  # Behind the last piece the other may keep its next tile's.
        self._take_squares(refs["row_squares"])
      if self.emulated:
        columns = slice(first, first + _PIECE)
        sums = sums.at[:, columns].add(refs["others_sums"][...])
      else:
        sums = norm_registers.added(sums, refs["others_sums"], first)
      plgpu.barrier_arrive(refs["taken_over"])
    return sums

  def _take_squares(self, kept: Ref) -> None:
    """Adds the second consumer's squares to the first's."""
    if self.emulated:
      kept[0] = kept[0] + kept[1]
    else:
      norm_registers.take_over(kept)


def of(
    problem: Problem, config: PersistentConfig, *, emulated: bool
) -> Norm | None:
  """That of the problem's lhs, or None."""
  if problem.norm_eps is None:
    return None
  readers = _readers(config)
  return Norm(
      problem.norm_eps, problem.k, readers, config.tile_n,
      at_once(config.num_stages // readers), emulated,
  )


def at_once(num_slots: int) -> int:
  """k tiles that a consumer takes at once, of so many slots of its own.

  No more than half of them, so that others are loaded meanwhile: 64x6144x4096 of one
  consumer takes 18.1 us one by one, 16.1 two by two and 15.5 by four, of 12 slots.
  """
  if num_slots >= 8:
    return 4
  return 2 if num_slots >= 4 else 1


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


def smem_bytes(problem: Problem, config: PersistentConfig) -> int:
  """Shared memory beside the ring."""
  if problem.norm_eps is None:
    return 0
  weights = math.prod(_weights_shape(problem.k)) * problem.itemsize
  readers = _readers(config)
  squares = readers * HALVES * tiles.WG_THREADS * 4
  others = ROWS * _PIECE * 4 if readers > 1 else 0
  return sum(tiles.round_up(size, 1024) for size in (weights, squares, others))


def _readers(config: PersistentConfig) -> int:
  return config.consumers if config.wg_dim == "k" else 1


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
  shares_k = config.wg_dim == "k"
  wanted = dict(
      swap=False, misaligned="padded", consumers=1 + shares_k, tile_m=ROWS, tile_k=COLS,
      cluster_m=1, cluster_n=1,
  )
  for name, value in wanted.items():
    if getattr(config, name) != value:
      return f"{name}={getattr(config, name)!r}: norm takes {value!r}"
  if shares_k and config.num_stages % 2:
    return f"num_stages={config.num_stages}: with wg_dim='k' each consumer has half"
  if shares_k and config.tile_n % _PIECE:
    return f"tile_n={config.tile_n}: with wg_dim='k' a multiple of {_PIECE}"
  return None
