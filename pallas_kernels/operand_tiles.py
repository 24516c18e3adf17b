"""Operands: their ways into shared memory, and how wgmma finds them there.

Shared memory that wgmma reads is swizzled by 128 bytes and tiled by 8 rows x 128 bytes
(by 64 bytes the rhs of lhs that is split in registers). An operand gets there in one of
seven ways (`Operand.way`):

  flat     k-major operands: one TMA copy of rank 2 into an untiled view of the
           slot. A slot is exactly 128 bytes wide, so that both views have the
           same byte order.
  tiled    other operands: one TMA copy of rank 4 that tiles as it copies. Each
           dimension of the array must be a multiple of the 8 x 128 byte tile, or
           smaller than it.
  chunks   other operands that do not fit, and the two matrices of a gated product:
           the slot is made of chunks of 128 bytes of mn, each copied as a flat slot
           is. One wgmma takes them all (see `partial_wgmma`); the emulator takes
           each by itself.
  loads    operands that fit in no other way, where the config says so: the producer
           loads them through registers (see `register_loads`).
  skewed   lhs that fits in none of the first three, where the config says so: TMA
           copies it skewed, and consumers take it from there (see `skewed`).
  runs     such lhs in tiles of whole rows, where the config says so: each is one bulk
           copy, and consumers take it from there (see `run_loads`).
  converted  lhs in 8 bits: copied as a flat slot is, in rows of 64 or 128 bytes, and
           converted by consumers (see `conversions`).

The first three want a row stride that is a multiple of 16 bytes; flat and chunks serve
any size: TMA fills what lies beyond k with zeros, and rows and chunks beyond the last are
not loaded, nor rows of k of which a kernel wants none (`depth`). What does not fit is
padded before (see `preparing`). In the emulator every copy is a tiled one: it gives each
view of shared memory a memory of its own, and has no rule about sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import (
  conversions,
  fragments,
  register_loads,
  run_loads,
  skewed,
  tiles,
  ways,
)
from pallas_kernels.configs import ALONG_M, ALONG_N

Ref = Any  # A Pallas reference.


@dataclasses.dataclass(frozen=True)
class Operand:
  """One operand of the product: its tile, and its way into shared memory.

  Attributes:
    is_lhs: lhs or rhs.
    k_major: whether it is stored [mn, k] (else [k, mn]).
    tile_mn, tile_k: its share of the tile of one CTA.
    dtype: by name.
    batched: whether it has a batch dimension larger than one.
    mn, k: rows and columns (lhs, or transposed rhs) that the whole operand has.
    way: see the module's docstring.
    num_parts: arrays of which it consists; a slot has a tile of each (see `parts`).
    emulated: whether every copy is a tiled one.
    num_arrays: arrays whose tiles lie side by side in one slot, along mn: the two
      matrices of a gated product. `mn` is of one of them, `tile_mn` of all.
    packed: whether they are one array, the one behind the other along mn.
    source: dtype of the array that consumers convert, or "".
    shared: CTAs of a cluster that have the same tile: each copies a part of it for all.
  """

  is_lhs: bool
  k_major: bool
  tile_mn: int
  tile_k: int
  dtype: str
  batched: bool
  mn: int
  k: int
  way: str
  emulated: bool
  num_parts: int = 1
  num_arrays: int = 1
  packed: bool = False
  source: str = ""
  shared: int = 1

  @property
  def swizzle(self) -> int:
    """Bytes of a row of the shared-memory tile: those of k, however it is stored.

    Mosaic has wgmma read as many elements of k as a row has, where mn is contiguous, too.
    """
    return self.tile_k * jnp.dtype(self.dtype).itemsize

  @property
  def num_copies(self) -> int:
    """TMA copies that bring a tile, by their arrivals on the slot's barrier."""
    if self.way == "loads":
      return 0
    if self.way == "converted":
      return self._narrow.slot_shape[0]
    if self.in_registers:
      return 1
    if self.way == "chunks":
      return self.num_parts * self._num_chunks
    if self.way == "tiled":
      return self.num_parts
    return self.num_parts * self.num_arrays * len(self._boxes)

  @property
  def in_registers(self) -> bool:
    """Whether it goes to wgmma through the consumers' registers."""
    return self.way in ("converted", "skewed", "runs")

  @property
  def stays(self) -> bool:
    """Whether a tile's first load brings all of k, for all of its k tiles."""
    return self.way == "runs" and self.k_major

  @property
  def row_order(self) -> fragments.RowOrder:
    """Which rows those of a sum stand for."""
    return ways.row_order(self.way, k_major=self.k_major)

  @property
  def slot_mn(self) -> int:
    """The share of mn that a slot has room for: whole rows of 128 bytes."""
    if self.k_major:
      return self.tile_mn
    return tiles.round_up(self.tile_mn, tiles.swizzle_elems(self.dtype))

  @property
  def _num_chunks(self) -> int:
    return self.slot_mn // tiles.swizzle_elems(self.dtype)

  @property
  def array_mn(self) -> int:
    """The share of one array of `tile_mn`."""
    return self.tile_mn // self.num_arrays

  @property
  def shared_along(self) -> str:
    """The axis of a cluster whose CTAs have the same tile of this operand."""
    return ALONG_N if self.is_lhs else ALONG_M

  @property
  def _shared_rows(self) -> int:
    """What the rows of a copy that CTAs share divide by: each copies whole tiles of 8."""
    return tiles.SWIZZLE_ROWS * self.shared

  @property
  def _boxes(self) -> tuple[tuple[int, int], ...]:
    """(first row, rows) of the copies of a flat tile of one array.

    The last may be of rows too few to share: each CTA of a cluster copies those for
    itself.
    """
    rest = self.array_mn % self._shared_rows
    rows = self.array_mn - rest
    boxes = ((0, rows),)
    if rows > tiles.TMA_BOX_LIMIT:
      boxes = tiles.instruction_columns(rows)
    return tuple(box for box in (*boxes, (rows, rest)) if box[1])

  def slots(self, num_slots: int) -> Any:
    """Scratch type of `num_slots` slots in shared memory, each a tile of each part."""
    if self.way == "skewed":
      return plgpu.SMEM((num_slots, *self._skewed(0).slot_shape), jnp.dtype(self.dtype))
    if self.way == "runs":
      return plgpu.SMEM((num_slots, self._run.slot_elements), jnp.dtype(self.dtype))
    if self.way == "converted":
      narrow = self._narrow
      return plgpu.SMEM(
          (num_slots, *narrow.slot_shape), jnp.dtype(self.source),
          transforms=narrow.transforms,
      )
    num_slots *= self.num_parts
    width = tiles.swizzle_elems(self.dtype)
    shape = {
        "flat": (num_slots, self.tile_mn, self.tile_k),
        "tiled": (num_slots, self.tile_k, self.slot_mn),
        "loads": (num_slots, *self._tile_as_stored()),
        "chunks": (num_slots, self._num_chunks, self.tile_k, width),
    }[self.way]
    transforms = tiles.swizzled(self.dtype, self.swizzle)
    tiled = plgpu.SMEM(shape, jnp.dtype(self.dtype), transforms=transforms)
    if not self._union:
      return tiled
    untiled = plgpu.SMEM(shape, jnp.dtype(self.dtype), transforms=transforms[1:])
    return plgpu.RefUnion(untiled, tiled)

  def load(
      self, gmem: Sequence[Ref], slots: Ref, slot, barrier: Ref, *, batch, mn, k, part=0,
      depth: int | None = None,
  ) -> None:
    """Starts the copies of a part of the tile at (mn, k); they arrive on `barrier`.

    `depth` of k are wanted; by default all. Rows of k beyond them are not loaded, of an
    operand in one of the first three ways.
    """
    batch = batch if self.batched else 0
    if self.way == "runs":
      row, wanted = (mn, k == 0) if self.k_major else (k, True)
      self._run.load(gmem[0], slots.at[slot], barrier, batch, row, wanted)
      return
    if self.way == "skewed":
      tile = self._skewed(gmem[0].size // (self.k if self.k_major else self.mn))
      at = (mn, k) if self.k_major else (k, mn)
      tile.load(gmem[0], slots.at[slot], barrier, batch, *at)
      return
    slots = self._views(slots)[0]
    slot, size = slot * self.num_parts + part, self.array_mn
    depth = min(self.tile_k, tiles.round_up(depth or self.tile_k, self._shared_rows))

    def copy(array, dst, rows, cols, wanted=True):
      source = gmem[0 if self.packed else part + array]
      is_shared = self.shared > 1 and rows[1] % self._shared_rows == 0
      _copy_if(
          wanted, source.at[batch, pl.ds(*rows), pl.ds(*cols)], dst, barrier,
          collective_axes=(self.shared_along,) if is_shared else None,
          emulated=self.emulated,
      )

    if self.way == "converted":
      chunks, rows, width = self._narrow.slot_shape
      first, *at = (mn, k) if self.k_major else (k, mn)
      for chunk in range(chunks):
        cols = at[0] + chunk * width, width
        copy(0, slots.at[slot, chunk], (first, rows), cols)
      return
    if self.way == "chunks":
      self._load_chunks(copy, slots.at[slot], mn, k, depth)
      return
    if self.way == "tiled":
      box = slots.at[slot, pl.ds(0, depth), pl.ds(0, size)]
      copy(0, box, (k, depth), (mn, size))
      return
    for array in range(self.num_arrays):
      copy_rows = functools.partial(copy, array, cols=(k, self.tile_k))
      origin = self._origin(array)
      self._load_rows(copy_rows, slots.at[slot], array * size, mn, origin)

  def _load_chunks(self, copy, slot: Ref, mn, k, depth: int) -> None:
    """Loads `depth` rows of the chunks of the tile at (mn, k) that have any of mn."""
    width, size = tiles.swizzle_elems(self.dtype), self.array_mn

    def load(all_wanted: bool) -> None:
      for i in range(self._num_chunks):
        array, first = divmod(i * width, size)
        cols = mn + first + self._origin(array), width
        wanted = all_wanted or mn + first < self.mn
        copy(array, slot.at[i, pl.ds(0, depth)], (k, depth), cols, wanted)

    if self._last_mn == size:
      load(True)
      return
    pl.when(mn + size <= self.mn)(lambda: load(True))
    pl.when(mn + size > self.mn)(lambda: load(False))

  def _load_rows(self, copy, slot: Ref, begin: int, mn, origin) -> None:
    """Loads the rows of one array's tile at `mn` to those of a slot from `begin` on.

    Of the last tile no more than it has, but for what CTAs that share it round it up to.
    """

    def load(num_rows: int, wanted=True) -> None:
      for first, rows in self._boxes:
        some = num_rows > first
        rows = min(rows, num_rows - first) if some else rows
        to, at = slot.at[pl.ds(begin + first, rows)], (mn + origin + first, rows)
        copy(to, at, wanted=some and wanted)

    size, last = self.array_mn, tiles.round_up(self._last_mn, self._shared_rows)
    if self.mn < size or last >= size:
      load(min(last, size))
      return
    start = self.mn - self._last_mn  # A tile of a group of rows may begin behind it.
    pl.when(mn < start)(lambda: load(size))
    pl.when(mn == start)(lambda: load(last))
    pl.when(mn > start)(lambda: load(size, mn < self.mn))

  @property
  def _last_mn(self) -> int:
    """The share of mn that the last tile has of one array.

    What lies beyond is not loaded: what comes of it is not stored, and TMA takes (on an
    H200) twice as long to fill a row with zeros as to bring one.
    """
    return self.mn % self.array_mn or self.array_mn

  def _origin(self, array: int) -> int:
    """Where the array begins along mn."""
    return array * self.mn if self.packed else 0

  def by_registers(
      self, gmem: Sequence[Ref], slots: Ref, slot, *, batch, mn, k, depth=None, halo=0
  ) -> tuple:
    """What `register_loads.load` wants to know of the tile at element (mn, k).

    `depth` of k are wanted; by default all. Of mn the next tile has `halo`, too.
    """
    loads = register_loads.RegisterLoads.of(
        self.mn, self.k, self.tile_mn, self.tile_k, k_major=self.k_major,
        depth=depth or self.tile_k, transforms=tiles.swizzled(self.dtype), halo=halo,
    )
    at = (mn, k) if self.k_major else (k, mn)
    return loads, gmem[0], slots.at[slot], batch if self.batched else 0, *at

  def _tile_as_stored(self) -> tuple[int, int]:
    tile = self.slot_mn, self.tile_k
    return tile if self.k_major else tile[::-1]

  def _skewed(self, num_rows: int) -> skewed.Skewed:
    """The tiles of this operand's `num_rows` rows, those of all products."""
    rows, cols = (self.mn, self.k) if self.k_major else (self.k, self.mn)
    return skewed.Skewed(
        num_rows, cols, self.tile_mn, self.k_major, self.dtype, rows * self.batched
    )

  @property
  def _narrow(self) -> conversions.Narrow:
    return conversions.Narrow(self.tile_mn, self.k_major, self.source, self.dtype)

  @property
  def _run(self) -> run_loads.Run:
    """The tiles of this operand, which are whole rows."""
    rows, cols = (self.mn, self.k) if self.k_major else (self.k, self.mn)
    return run_loads.Run(
        rows, cols, self.tile_mn, self.k_major, self.dtype, self.batched
    )

  def load_fragments(
      self, slots: Ref, slot, start, rows: int, *, batch, mn, k, step
  ) -> jax.Array:
    """`rows` of mn from `start` on, of an operand `in_registers`: for `fragments`.

    Of the k tile `step` of the tile at (mn, k), in a slot.
    """
    if self.way == "skewed":
      return self._skewed(0).load_fragments(slots.at[slot], start, batch)
    if self.way == "converted":
      return self._narrow.load_fragments(slots.at[slot], start, rows)
    run, first = self._run, step * self.tile_k
    valid = self.k - k - first
    at = (mn, first) if self.k_major else (k + first, 0)
    phase = run.phase(batch, at[0])
    return run.load_fragments(slots.at[slot], start, rows, phase, at[1], valid)

  def fragments(self, loaded: jax.Array) -> jax.Array:
    """What `load_fragments` loaded, as wgmma takes it."""
    if self.way == "converted":
      return self._narrow.fragments(loaded)
    tiles_of = self._run if self.way == "runs" else self._skewed(0)
    return tiles_of.fragments(loaded)

  def parts(self, size: int) -> tuple[tuple[int, int], ...]:
    """(start, size) of the wgmma that share `size` of mn; rows need not be shared."""
    if self.way == "chunks":
      width = tiles.swizzle_elems(self.dtype)
      starts = range(0, size, width)
      return tuple((start, min(width, size - start)) for start in starts)
    return ((0, size),) if self.is_lhs else tiles.instruction_columns(size)

  def view(
      self, slots: Ref, slot, start, size: int, part: int = 0, depth: int | None = None
  ) -> Ref:
    """`size` of mn from `start` on, as wgmma wants it: [mn, k] of lhs, [k, mn] of rhs.

    Of all k, or of the first `depth`.
    """
    is_short = depth not in (None, self.tile_k)
    depths = pl.ds(0, depth) if is_short else slice(None)
    if self.way == "chunks":  # One of them, or what is wanted of the last.
      width = tiles.swizzle_elems(self.dtype)
      chunk = lax.div(jnp.int32(start), jnp.int32(width))
      cols = slice(None) if size == width else pl.ds(0, size)
      ref = self._views(slots)[1].at[slot * self.num_parts + part, chunk, depths, cols]
    else:
      ref = self.stored(slots, slot, start, size, part)
      if is_short:
        ref = ref.at[:, depths] if self.k_major else ref.at[depths]
    return ref if self.k_major == self.is_lhs else ref.transpose((1, 0))

  def stored(self, slots: Ref, slot, start, size: int, part: int = 0) -> Ref:
    """The same as it lies there: [mn, k], [k, mn], or chunks [mn / width, k, width]."""
    slot = slot * self.num_parts + part
    slots = self._views(slots)[1]
    if self.way == "chunks":
      width = tiles.swizzle_elems(self.dtype)
      start, size = lax.div(jnp.int32(start), jnp.int32(width)), size // width
      return slots.at[slot, pl.ds(start, size)]
    span = slice(None) if size == self.slot_mn else pl.ds(start, size)
    return slots.at[slot, span] if self.k_major else slots.at[slot, :, span]

  def _views(self, slots: Ref) -> tuple[Ref, Ref]:
    """(the view that TMA uses, the view that wgmma uses)."""
    return (slots[0], slots[1]) if self._union else (slots, slots)

  @property
  def _union(self) -> bool:
    """Whether TMA and wgmma use different views of the slots."""
    return self.way in ("flat", "chunks") and not self.emulated


@dataclasses.dataclass(frozen=True)
class Prepared:
  """Operands as the kernels read them: the arrays of which each consists.

  Of several terms each has an array for every one, of equal shares of k.
  """

  lhs: tuple[jax.Array, ...]
  rhs: tuple[jax.Array, ...]
  lhs_operand: Operand
  rhs_operand: Operand
  num_terms: int = 1

  @property
  def num_arrivals(self) -> int:
    """On a slot's barrier: one for each TMA copy, one for all that registers load."""
    operands = self.lhs_operand, self.rhs_operand
    loads = any(operand.way == "loads" for operand in operands)
    return sum(operand.num_copies for operand in operands) + loads


def _copy_if(
    wanted, source: Ref, dst: Ref, barrier: Ref, *, collective_axes, emulated: bool
) -> None:
  """Copies where that is wanted; the barrier has its arrival all the same."""
  copy = functools.partial(
      plgpu.copy_gmem_to_smem, source, dst, barrier, collective_axes=collective_axes
  )
  if wanted is True:
    copy()
  elif emulated:  # It knows no predicates.
    pl.when(wanted)(copy)
    pl.when(jnp.logical_not(wanted))(lambda: plgpu.barrier_arrive(barrier))
  else:
    copy(predicate=jnp.asarray(wanted))
