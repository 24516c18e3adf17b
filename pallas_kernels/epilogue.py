"""From the accumulator to the result: alpha, bias, activation, beta * c, cast, store.

Or alpha, the activation's slopes at c, cast, store.

The result leaves in pieces of 64 rows x up to 128 bytes, or 256 where threads store them.
Where those do not divide the tile, the last one begins earlier: what it has in common
with the one before is stored twice, the same bits each time. Each piece goes from
registers into a staging slot in shared memory and from there to GMEM, in one of five ways
(`staging.Staging.way`):

  flat    a TMA copy from an untiled view of the slot: any m and n whose row
          stride is a multiple of 16 bytes (TMA clips what lies outside);
  masked  ordinary coalesced stores, each guarded by its row and column: any
          stride (see `register_stores`). TMA cannot write such a result, and
          padding it would cost a second pass over it; or it is slower at it (see
          `epilogue_choice`);
  sectors  the same in whole sectors of 32 bytes, by tiles that overlap (see
          `sector_stores`);
  run     where that is so, and a tile has all columns: one run of memory, by a bulk copy
          (see `run_stores`);
  tiled   a TMA copy that undoes the tiling of the slot. Only in the emulator,
          which can do nothing else: Mosaic drops dimensions of size one from a
          copy, and then a piece beyond the last column of a narrow result
          would not be clipped.

A transposed accumulator (the operands have changed places) is written transposed into
its slot, which then holds rows of the result; so does a slot of c, which is read
transposed.

All threads meet before a slot is written, once it is free, and behind that, when it may
be copied. Several results of a piece do so together where there are slots for it.

`c` is read the same way back (flat or tiled; `prepare_c` pads a bad stride), two pieces
ahead: the first two of a tile travel while kernels multiply, as its vectors do (`begin`).
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import (
  activations,
  partial_stores,
  register_stores,
  run_stores,
  sector_stores,
  staging,
  tiles,
)
from pallas_kernels.exchange import Exchange, if_stores
from pallas_kernels.fragments import RowOrder
from pallas_kernels.problem import Problem
from pallas_kernels.scales import Scales
from pallas_kernels.staging import NUM_SLOTS, PIECE_ROWS, Staging
from pallas_kernels.vectors import MOST_SUMS, Vector

BIASES, OTHERS = ("bias", "bias_of_other"), ("other", "another")
C_SLOTS = ("c_slots", "other_c_slots")
Ref = Any
Refs = tuple[Ref, ...]


class Vectors(NamedTuple):
  """What a tile's rows or columns are multiplied by, and what is added to them."""

  factors: tuple[Vector, ...] = ()
  biases: tuple[Vector, ...] = ()


NO_VECTORS = Vectors()


@dataclasses.dataclass(frozen=True)
class Epilogue:
  """The static facts of one kernel's epilogue."""

  problem: Problem
  out: Staging
  c: Staging | None
  divided: bool = True  # Into pieces that have nothing in common.
  transposed: bool = False
  scales: Scales | None = None
  row_order: RowOrder = "as they are"  # Of sums: see `fragments.row_of`.
  halo: int = 0  # Columns that a tile, or a piece, shares with the next.

  @property
  def bias_cols(self) -> int:
    """Columns of the result that a piece has."""
    return PIECE_ROWS if self.transposed else self.out.cols

  @property
  def _step(self) -> int:
    """Columns of the product that a piece has."""
    return self.out.rows if self.transposed else self.out.cols

  @property
  def arithmetic(self) -> activations.Arithmetic:
    """Of the activation."""
    return activations.in_registers(
        self.problem.epilogue.activation, self.problem.out_itemsize,
        emulated=self.emulated,
    )

  @property
  def emulated(self) -> bool:
    """Whether an emulator stands in for the chip."""
    return self.out.way == "tiled"

  @functools.cached_property
  def smem_bytes(self) -> int:
    num_c = self.problem.epilogue.num_c
    return self.out.num_bytes + (self.c.num_bytes * num_c if self.c else 0)

  def scratch(self) -> dict[str, Any]:
    """Scratch by name; hand all of it to `store` (as `refs`)."""
    scratch = {"out_slots": self.out.slots()}
    if self.c:
      num_c = self.problem.epilogue.num_c
      scratch |= {name: self.c.slots() for name in C_SLOTS[:num_c]}
      scratch["c_barriers"] = plgpu.Barrier(
          num_arrivals=num_c, num_barriers=self.c.num_wgs * NUM_SLOTS
      )
    return scratch

  def begin(
      self, c_gmem: Refs, refs, *, shape: tuple[int, int], wg, batch, row, col,
      of_batch=None, exchange: Exchange | None = None,
  ) -> Vectors:
    """Asks for what is fused into a tile of `shape` at (row, col), as early as may be.

    That is of product `of_batch`, if not of the index `batch` of the result. Where CTAs
    `exchange` their sums, those that store some ask for c.
    Returns the vectors of the tile, for `store`.
    """
    of_batch = batch if of_batch is None else of_batch
    vectors = self._vectors(refs, shape=shape, of_batch=of_batch, row=row, col=col)
    if self.c is not None:
      if_stores(exchange, functools.partial(
          self._prefetch, c_gmem, refs, shape=shape, wg=wg, batch=batch, row=row, col=col
      ))
    return vectors

  def _vectors(self, refs, *, shape: tuple[int, int], of_batch, row, col) -> Vectors:
    """Asks for the vectors of a tile."""
    factors, biases = (), ()
    if self.scales:
      factors = self.scales.vectors(
          refs, batch=of_batch, row=row, col=col, emulated=self.emulated
      )
    if self.problem.epilogue.has_bias:
      # Along the columns of the result, which are the rows of a transposed piece.
      dim, start = (0, row) if self.transposed else (1, col)
      names = BIASES[: 1 + self.problem.epilogue.gated]
      biases = tuple(Vector(refs[name], dim, start, self.emulated) for name in names)
    sums = shape[0] * shape[1] * (1 + self.problem.epilogue.gated) // tiles.WG_THREADS
    sizes, starts = (PIECE_ROWS, self._step), self.pieces(shape)
    for each in (*factors, *biases):
      pieces = [(start[each.dim], sizes[each.dim]) for start in starts]
      each.ask(shape[each.dim], pieces, early=sums <= MOST_SUMS)
    return Vectors(factors, biases)

  def _prefetch(
      self, c_gmem: Refs, refs, *, shape: tuple[int, int], wg, batch, row, col
  ) -> None:
    """Starts to load the first pieces of each c for a tile of `shape` at (row, col)."""
    for n, (i, j, _) in enumerate(self.pieces(shape)[:NUM_SLOTS]):
      at = self._in_result(row + i, col + j)
      self._start_c(c_gmem, refs, n, wg=wg, batch=batch, **at)

  def store(
      self, acc, out_gmem: Ref, c_gmem: Refs, refs, *, wg, batch, row, col,
      vectors: Vectors = NO_VECTORS, end=None,
  ):
    """Stores a warpgroup's accumulator [rows, cols] at (row, col) of the product.

    Of a gated product the left half of `acc` is the gate's, or the upper half.
    `vectors` are those of the tile; zeros have none, which factors might make NaN.
    Rows of the result from `end` on are others', if it is given.

    Call `begin` before. Waits for the staging slot that it uses next, never for the last
    store: call `finish` before the kernel ends.
    """
    epilogue = self.problem.epilogue
    rows, cols = acc.shape
    halves = [(0, 0)]  # Where the sums of each matrix begin.
    if epilogue.gated and self.transposed:
      rows //= 2
      halves.append((rows, 0))
    elif epilogue.gated:
      cols //= 2
      halves.append((0, cols))
    index, starts, staged = 0, self.pieces((rows, cols)), []
    for n, (i, j, stored) in enumerate(starts):
      at = self._in_result(row + i, col + j)
      to = dict(
          slots=refs["out_slots"], wg=wg, stored=stored, end=end, staged=staged, **at
      )
      pieces = []
      for number, (down, right) in enumerate(halves):
        first, begin = i + down, j + right
        piece = acc[first : first + PIECE_ROWS, begin : begin + self._step]
        for each in vectors.factors:
          piece = piece * each.broadcast((i, j)[each.dim], piece.shape)
        if epilogue.alpha != 1.0:
          piece = piece * jnp.float32(epilogue.alpha)
        if epilogue.has_bias:
          bias = vectors.biases[number]
          piece = piece + bias.broadcast((i, j)[bias.dim], piece.shape)
        if epilogue.saves:
          saved = refs[OTHERS[number]].at[batch]
          self._store_piece(piece, saved, index=index, **to)
          index += 1
        pieces.append(piece)
      c = self._wait_c(refs, n, wg)
      if epilogue.slopes:
        slopes = activations.slopes(epilogue.activation, c, self.arithmetic)
        results = [pieces[0] * slope for slope in slopes]
      else:
        piece = activations.apply(epilogue.activation, pieces[0], self.arithmetic)
        if epilogue.gated:
          piece = piece * pieces[1]
        if c:
          piece = piece + c[0] * jnp.float32(epilogue.beta)
        results = [piece]
      others = [refs[name] for name in OTHERS[: len(results) - 1]]
      for result, gmem in zip(results, [out_gmem, *others], strict=True):
        self._store_piece(result, gmem.at[batch], index=index, **to)
        index += 1
      self._send(staged)
      ahead = n + NUM_SLOTS
      if ahead < len(starts):  # Every thread has read the slot: the store has a barrier.
        i, j, _ = starts[ahead]
        at = self._in_result(row + i, col + j)
        self._start_c(c_gmem, refs, ahead, wg=wg, batch=batch, **at)

  def _in_result(self, row, col) -> dict[str, Any]:
    """Where element (row, col) of the product lies in the result."""
    return dict(row=col, col=row) if self.transposed else dict(row=row, col=col)

  def pieces(self, shape: tuple[int, int]) -> list[tuple[int, int, int]]:
    """Where the pieces of a tile begin, in the order of their stores.

    And the columns of each that the one before has stored.
    """
    cols = staging.starts(shape[1] - self.halo, self._step - self.halo)
    return [
        (i, j, stored) for i in range(0, shape[0], PIECE_ROWS) for j, stored in cols
    ]

  @property
  def _sent_together(self) -> int:
    """Results of a piece that are written behind one barrier, and before another."""
    return min(1 + self.problem.epilogue.num_others, self.out.num_slots // 2)

  def _store_piece(
      self, piece, out_gmem, slots, *, wg, index, row, col, stored, end,
      staged: list[Callable[[], None]],
  ):
    piece = piece.astype(jnp.dtype(self.problem.out_dtype))
    if self.out.way == "masked":
      register_stores.store(
          piece, slots.at[wg], out_gmem, row, col, end, transposed=self.transposed,
          row_order=self.row_order,
      )
      return
    if self.out.way == "sectors":
      sector_stores.store(piece, slots.at[wg], out_gmem, row, col, halo=self.halo)
      return
    if self.out.way == "run":
      run_stores.store(piece, slots.at[wg], out_gmem, row, col)
      return
    copy = functools.partial(
        self._copy, out_gmem, slots, wg=wg, index=index, row=row, col=col, stored=stored
    )
    if end is None:
      if not staged:
        self._wait_for_slots(self._sent_together, index)
      self._write(piece, slots, wg=wg, index=index)
      staged.append(copy)
      if len(staged) == self._sent_together:
        self._send(staged)
      return

    @pl.when(row + self.out.rows <= end)
    def _store_whole():
      # Unless all pieces before have left in turn, their number does not tell of slots.
      self._wait_for_slots(1, 0 if self.transposed else index)
      self._write(piece, slots, wg=wg, index=index)
      self._send([copy])

    if self.out.way == "flat":
      partial_stores.store(piece, out_gmem, row, col, end, transposed=self.transposed)
      return

    @pl.when(row + self.out.rows > end)
    def _copy_each_row():
      self._wait_for_slots(1, 0)
      self._write(piece, slots, wg=wg, index=index)
      first = stored if self.transposed else 0
      self._send([
          functools.partial(
              pl.when(row + i < end), functools.partial(copy, of_rows=(i, 1))
          )
          for i in range(first, self.out.rows)
      ])

  def _wait_for_slots(self, count: int, index: int) -> None:
    """Waits until `count` slots are free, that of the `index`-th store first.

    Which they are once all but the youngest stores have read theirs. The first of a tile
    may follow one that used the same slot.
    """
    younger = self.out.num_slots - count if index else 0
    plgpu.wait_smem_to_gmem(younger, wait_read_only=True)

  def _write(self, piece, slots, *, wg, index) -> None:
    slot = index % self.out.num_slots
    self.out.write(piece, slots, wg, slot, transposed=self.transposed)

  def _send(self, staged: list[Callable[[], None]]) -> None:
    """Starts the copies of what stands in its slots."""
    if staged:
      plgpu.commit_smem()
    for copy in staged:
      copy()
    staged.clear()

  def _copy(
      self, out_gmem, slots, *, wg, index, row, col, stored, of_rows=None
  ) -> None:
    """Starts to store the piece that is in a slot, or some of its rows (first, count)."""
    tma, _ = self.out.views(slots)
    slot = index % self.out.num_slots
    first, rows = of_rows or (0, self.out.rows)
    skipped = 0
    if self.transposed and of_rows is None:
      first, rows = stored, rows - stored
    elif self.out.way == "tiled" and not self.transposed:
      skipped = stored  # To store the same bits twice is a race there.
    cols = self.out.cols - skipped
    plgpu.copy_smem_to_gmem(
        tma.at[wg, slot, pl.ds(first, rows), pl.ds(skipped, cols)],
        out_gmem.at[pl.ds(row + first, rows), pl.ds(col + skipped, cols)],
    )

  def _start_c(self, c_gmem: Refs, refs, n: int, *, wg, batch, row, col) -> None:
    """Starts to load each c at (row, col), the tile's `n`-th piece."""
    for source, name in zip(c_gmem, C_SLOTS, strict=False):
      tma, _ = self.c.views(refs[name])
      plgpu.copy_gmem_to_smem(
          source.at[batch, pl.ds(row, self.c.rows), pl.ds(col, self.c.cols)],
          tma.at[wg, n % NUM_SLOTS],
          refs["c_barriers"].at[wg * NUM_SLOTS + n % NUM_SLOTS],
      )

  def _wait_c(self, refs, n: int, wg) -> list[Any]:
    """The tile's `n`-th piece of each c, float32."""
    if self.c is None:
      return []
    plgpu.barrier_wait(refs["c_barriers"].at[wg * NUM_SLOTS + n % NUM_SLOTS])
    pieces = []
    for name in C_SLOTS[: self.problem.epilogue.num_c]:
      registers = self.c.views(refs[name])[1].at[wg, n % NUM_SLOTS]
      if self.transposed:
        registers = registers.transpose((1, 0))
      piece = plgpu.load(registers, layout=plgpu.Layout.WGMMA)
      pieces.append(piece.astype(jnp.float32))
    return pieces

  def finish(self) -> None:
    """Waits until every store of this warpgroup has left shared memory."""
    if not self.out.is_by_threads:
      plgpu.wait_smem_to_gmem(0)


def prepare_biases(epilogue: Epilogue, operands) -> dict[str, jax.Array]:
  """The biases [n], the last of the operands, by name; emulated in whole pieces."""
  problem, cols, pad = epilogue.problem, epilogue.bias_cols, 0
  if not problem.epilogue.has_bias:
    return {}
  if epilogue.emulated:
    pad = tiles.round_up(problem.n, cols) - problem.n
    if not epilogue.divided:  # Any column may be the first of a piece.
      pad += cols
  biases = operands[-1 - problem.epilogue.gated :]
  return {
      name: lax.pad(x, jnp.zeros((), x.dtype), ((0, pad, 0),)) if pad else x
      for name, x in zip(BIASES, biases, strict=False)
  }


def prepare_c(operands, problem: Problem) -> tuple[jax.Array, ...]:
  """Each c [batch, m, n], the first of the operands behind lhs and rhs.

  Their columns are padded if TMA cannot take their row stride.
  """
  return tuple(_padded(c, problem.n) for c in operands[: problem.epilogue.num_c])


def _padded(c: jax.Array, n: int) -> jax.Array:
  if n % tiles.tma_stride_elems(c.dtype) == 0:
    return c
  pad = tiles.round_up(n, tiles.swizzle_elems(c.dtype)) - n
  return lax.pad(c, jnp.zeros((), c.dtype), ((0, 0, 0), (0, 0, 0), (0, pad, 0)))
