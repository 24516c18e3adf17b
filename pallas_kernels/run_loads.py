"""lhs whose rows TMA cannot stride over, in tiles of whole rows: each one run of memory.

Rows that follow one another in memory without a gap are copied in bulk, however long
they are: a bulk copy wants addresses and a size in 16 bytes and nothing else. So a
tile that has all of its rows' elements comes as it lies there, at the same place within
16 bytes; consumers take it from there into registers, element by element (see
`fragments`).

  k-major   a tile has all of k: it is loaded once, for all of its k tiles
  m-major   a tile has all of m, and 64 rows of k

What lies beyond a tile's rows are others', or whatever its slot held: where these would
be elements of k, the fragments have zeros. The last elements of an array that are no
whole 16 bytes are copied by threads.

Source: the PTX manual's cp.async.bulk; `run_stores` has results leave in the same way.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels import arrivals, compat, fragments, tiles
from pallas_kernels.configs import PersistentConfig
from pallas_kernels.fragments import BLOCKS, ROWS, TILE_K
from pallas_kernels.integers import (
  const64,
  i32,
  i32_type,
  i64,
  i64_address,
  less,
  place_of_fragment,
)
from pallas_kernels.problem import Problem

_BYTES = 16  # That addresses and sizes of a bulk copy are multiples of: a unit.
_UNIT = _BYTES // 2  # Its elements.
_BANKS = 32  # Of shared memory, words of 32 bits in turn.
_SCALAR = plgpu.Layout.WG_SPLAT(())
Ref = Any


@dataclasses.dataclass(frozen=True)
class Run:
  """Tiles of an array of 16-bit elements.

  Attributes:
    rows, cols: of one product as it is stored.
    tile_m: rows of the product that a tile has; no fewer than `cols`, if these are of m.
    k_major: whether a row holds elements of k, else of m.
    dtype: by name.
    batched: whether each product has rows of its own.
  """

  rows: int
  cols: int
  tile_m: int
  k_major: bool
  dtype: str
  batched: bool

  @property
  def tile_rows(self) -> int:
    """Of the array, in a slot."""
    return min(self.tile_m, self.rows) if self.k_major else TILE_K

  @property
  def slot_elements(self) -> int:
    """Of a tile in shared memory, and of what else its threads may read.

    It begins anywhere within 16 bytes. Rows of m that the tile has and the array has not
    lie behind the last row of k; of k-major rows a thread reads none beyond k but the
    second of two.
    """
    beyond = 0 if self.k_major else max(self.tile_m - self.cols, 0)
    return tiles.round_up(self.tile_rows * self.cols + beyond + _UNIT, 64)

  def phase(self, batch, row):
    """Elements of the slot before the tile's first; their int32 number may wrap."""
    return (batch * self.rows * self.batched + row) * self.cols & (_UNIT - 1)

  def load(self, gmem: Ref, slot: Ref, barrier: Ref, batch, row, wanted) -> None:
    """Starts to copy the tile from `row` of a product on; it arrives once.

    One warp calls. `gmem` is flat. Where `wanted` is false nothing is copied, and the
    arrival is all.
    """
    size = gmem.size

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), *(_SCALAR,) * 4))
    def copy(_, gmem, slot, *scalars):
      address, *scalars = (x.registers.item() for x in scalars)
      one_lane = mgpu.utils.single_thread_predicate(mgpu.utils.ThreadSubset.WARP)
      begin, num_bytes, end = self._places(size, *scalars)
      source = arith.addi(i64_address(mgpu.utils.memref_ptr(gmem)), begin)
      target = mgpu.utils.memref_ptr(slot)
      if size % _UNIT:
        _copy_elements(source, target, num_bytes, end)
      arrivals.expect(address, num_bytes, one_lane)
      mgpu.utils.inline_ptx(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
          " [$0], [$1], $2, [$3];",
          target, source, num_bytes, address,
          predicate=arith.andi(one_lane, less(i32(0), num_bytes)),
          has_side_effects=True,
      )

    scalars = (batch, row, wanted)
    copy(
        gmem, slot, compat.barrier_address(barrier), *(jnp.int32(x) for x in scalars)
    )

  def _places(self, size: int, batch, row, wanted) -> tuple[Any, Any, Any]:
    """Of a tile in an array of `size` elements: what is copied, all in bytes.

    Returns:
      Where the slot's first byte lies in memory, how many are copied in bulk from there,
      and where those that are wanted end; behind the former, fewer than 16 are left.
    """
    rows = arith.minsi(arith.subi(i32(self.rows), row), i32(self.tile_rows))
    rows = arith.maxsi(arith.muli(rows, wanted), i32(0))
    if self.batched:
      row = arith.addi(row, arith.muli(batch, i32(self.rows)))
    begin = arith.muli(i64(row), const64(2 * self.cols))
    phase = arith.andi(begin, const64(_BYTES - 1))
    begin, phase = arith.subi(begin, phase), arith.trunci(i32_type(), phase)
    end = arith.addi(phase, arith.muli(rows, i32(2 * self.cols)))
    num_bytes = arith.andi(arith.addi(end, i32(_BYTES - 1)), i32(-_BYTES))
    if size % _UNIT:  # Nobody owns all of the last unit.
      whole = arith.subi(const64(2 * (size - size % _UNIT)), begin)
      num_bytes = arith.trunci(i32_type(), arith.minsi(whole, i64(num_bytes)))
    some = less(i32(0), rows)
    return begin, arith.select(some, num_bytes, i32(0)), arith.select(some, end, i32(0))

  def load_fragments(self, slot: Ref, start, rows: int, phase, first, valid):
    """`rows` of the tile from `start` on, for `fragments`: int32 [rows, 64] of (m, k).

    The loads are on their way when this returns.

    Args:
      slot: flat, of `slot_elements`.
      start: of m, in the tile.
      rows: a multiple of 64.
      phase: see `phase`.
      first: of k, in the slot.
      valid: elements of k from there on; beyond them are zeros.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), *(_SCALAR,) * 4),
        return_type=plgpu.ShapeDtypeStruct(
            (rows, TILE_K), jnp.int32, layout=plgpu.Layout.WGMMA
        ),
    )
    def load(_, slot, *scalars):
      start, phase, first, valid = (x.registers.item() for x in scalars)
      words = []
      for row in range(0, rows, ROWS):
        at = slot, arith.addi(start, i32(row)), phase, first, valid
        words += self._from_rows(*at) if self.k_major else self._from_columns(*at)
      return fragments.words(words, rows)

    return load(slot, *(jnp.int32(x) for x in (start, phase, first, valid)))

  def fragments(self, loaded: jax.Array) -> jax.Array:
    """What `load_fragments` loaded, as wgmma takes it."""
    return fragments.joined(loaded, self.dtype, lambda _: self._is_whole)

  @property
  def _is_whole(self) -> bool:
    """Whether two elements of k lie in one word."""
    return self.k_major and self.cols % 2 == 0

  def _from_rows(self, slot, start, phase, first, valid) -> fragments.Words:
    """A thread's pairs of neighbours of k, of k-major rows."""
    warp, group, lane = place_of_fragment()
    row = arith.addi(arith.addi(start, arith.shli(warp, i32(4))), group)
    col = arith.addi(arith.addi(first, phase), arith.shli(lane, i32(1)))
    bases = []
    for half in range(2):
      # Of rows that the array has not the slot's last, which is not stored: anything may.
      its = arith.minsi(arith.addi(row, i32(8 * half)), i32(self.tile_rows - 1))
      element = arith.addi(arith.muli(its, i32(self.cols)), col)
      bases.append(fragments.address(slot, element))
    valid, load = arith.subi(valid, arith.shli(lane, i32(1))), fragments.load_within
    return [
        (load("b32", bases[half], 16 * block, valid, 8 * block), i32(0))
        if self._is_whole else tuple(
            load("u16", bases[half], 16 * block + 2 * odd, valid, 8 * block + odd)
            for odd in range(2)
        )
        for block in range(BLOCKS) for half in range(2)
    ]

  def _from_columns(self, slot, start, phase, first, valid) -> fragments.Words:
    """The same of rows of k: the two come from two of them."""
    warp, group, lane = place_of_fragment()
    col = arith.addi(arith.addi(start, arith.shli(warp, i32(4))), group)
    row = arith.addi(first, arith.shli(lane, i32(1)))
    element = arith.addi(arith.addi(arith.muli(row, i32(self.cols)), col), phase)
    base = fragments.address(slot, element)
    valid = arith.subi(valid, arith.shli(lane, i32(1)))
    return [
        tuple(
            fragments.load_within(
                "u16", base, 2 * ((8 * block + odd) * self.cols + 8 * half), valid,
                8 * block + odd,
            )
            for odd in range(2)
        )
        for block in range(BLOCKS) for half in range(2)
    ]


def check(problem: Problem, config: PersistentConfig) -> str | None:
  """Why lhs of `problem`, which is what the kernel multiplies, cannot come so, or None.
  """
  k_major = problem.lhs_layout == "k-major"
  cols = problem.lhs_shape[2]
  if problem.itemsize != 2:
    return f"misaligned='runs': so come 16-bit operands, not {problem.dtype}"
  if cols % _UNIT == 0:
    return "misaligned='runs': TMA strides over the rows of this lhs"
  if config.tile_k != TILE_K:
    return f"tile_k={config.tile_k}: misaligned='runs' takes {TILE_K}"
  if not k_major and config.tile_m < problem.m:
    return f"tile_m={config.tile_m}: misaligned='runs' takes all of m={problem.m} rows"
  if problem.batch * problem.lhs_shape[1] >= 2**31:
    return "misaligned='runs': rows of lhs are counted in 32 bits"
  if k_major and getattr(config, "splits", 1) > 1:
    return f"splits={config.splits}: misaligned='runs' takes all of k in a tile"
  return None


@functools.lru_cache(maxsize=256)
def conflicts(cols: int, *, k_major: bool) -> float:
  """How many words of one bank a warp's load of rows of `cols` elements wants, at most.

  The mean over where the rows may begin.
  """
  found = []
  for phase in range(_UNIT):
    banks = [set() for _ in range(_BANKS)]
    for group, lane in itertools.product(range(8), range(4)):
      at = (group, 2 * lane) if k_major else (2 * lane, group)
      word = (at[0] * cols + at[1] + phase) // 2
      banks[word % _BANKS].add(word)
    found.append(max(map(len, banks)))
  return sum(found) / _UNIT


def num_slots(stages: int, k_steps: int, *, k_major: bool) -> int:
  """Of lhs, where the ring has `stages` and a tile `k_steps`.

  A tile that is loaded once stays for all of its k tiles. When the ring comes to the
  next, all but the last `stages` - 1 steps have been read: tiles that are further back
  are done with, and nobody needs to say so.
  """
  return tiles.cdiv(stages - 1, k_steps) + 1 if k_major else stages


def slots_bytes(problem: Problem, config: PersistentConfig) -> int:
  """Shared memory of all slots of lhs of `problem`, which is what is multiplied."""
  k_major = problem.lhs_layout == "k-major"
  run = Run(*problem.lhs_shape[1:], config.tile_m, k_major, problem.dtype, False)
  k_steps = tiles.cdiv(problem.k, TILE_K)
  count = num_slots(config.num_stages, k_steps, k_major=k_major)
  return 2 * run.slot_elements * count


def _copy_elements(source, target, begin, end) -> None:
  """Copies the elements of a unit, from byte `begin` to `end`, by one warp."""
  thread = arith.andi(mgpu.utils.thread_idx(), i32(31))
  at = arith.addi(begin, arith.shli(thread, i32(1)))
  inside = arith.andi(less(thread, _UNIT), less(at, end))
  mgpu.utils.inline_ptx(
      "{ .reg .pred p; .reg .b16 v; setp.ne.b32 p, $2, 0;"
      " @p ld.global.b16 v, [$0]; @p st.shared.b16 [$1], v; bar.warp.sync -1; }",
      arith.addi(source, i64(at)),
      mgpu.utils.getelementptr(target, [at], ir.IntegerType.get_signless(8)),
      arith.extui(i32_type(), inside), has_side_effects=True,
  )
