"""roofline: moves so many bytes and multiplies so often, neither waiting for the other.

  out[row]  = values[a row that the same CTA reads: see `sources`]
  sums[cta] = the sum over the columns and `k_tiles` products of the same lhs @ rhs

One CTA an SM. A warpgroup walks over rows of ROW_BYTES: TMA brings chunks of them into a
ring of slots, and what is to be written leaves from those slots. Nothing waits but for a
slot: this is what a product's operands and its result take to be moved. Two more multiply
tiles that stay in shared memory (experiments/resident_tiles.py) as often as the product
has operations for the SM. So it takes what a product takes whose loads and products never
wait for each other, and whose tiles are as even as can be; the launch, the first bytes'
way and the power that both need are included.

  barrier       arrives                    waits
  full[s]       the TMA copy into slot s   the warpgroup that moves, before it stores from
                                           it or asks for the chunk that takes its place
  tile_full[0]  the TMA copies of a tile   each that multiplies, before its first wgmma

A result that is smaller than the operands is stored in the last steps, as an epilogue
would; a larger one several chunks a step.

Source: the producer of the persistent kernel (pallas_kernels/persistent.py), without
those that it feeds; S. Williams et al., "Roofline" (2009), for the idea of the bound.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from experiments.lab import kernels_stores
from experiments.resident_tiles import NUM_WARPGROUPS, TILE_M, WG_ROWS, ResidentTiles
from pallas_kernels import roles, tiles

NAME = "roofline"
RESIDENT = ResidentTiles(tile_n=256, num_slots=1)
ROW = 128  # Elements of a row, 32 bits each.
ROW_BYTES = 4 * ROW
MOST_ROWS = 32  # Of a chunk; 16 KB.
_LEAST_ROWS = 12  # Where a share has more, so that equal chunks fit it closely.
_AHEAD_BYTES = 96 << 10  # That a CTA asks for; more would wait in the memory's queues.
_LAG = 2  # Steps that stores have to leave a slot before it is filled again.


@dataclasses.dataclass(frozen=True)
class Shares:
  """What each CTA moves and multiplies.

  Attributes:
    num_ctas: that move and multiply something.
    steps: chunks that a CTA reads.
    rows: of a chunk.
    stores, store_steps: chunks that it writes in each of its last `store_steps` steps.
    store_rows: of these.
    k_tiles: of RESIDENT that it multiplies; 0: none, and nothing is loaded for them.
  """

  num_ctas: int
  steps: int
  rows: int
  stores: int
  store_steps: int
  store_rows: int
  k_tiles: int

  @classmethod
  def of(
      cls, read_bytes: int, written_bytes: int, flops: int, num_ctas: int
  ) -> Shares:
    """Returns shares as even as can be: at least those bytes, at most those `flops`."""
    read = _share(read_bytes, num_ctas)
    written = _share(written_bytes, num_ctas)
    steps, rows = _chunks(read)
    store_steps = min(steps, tiles.cdiv(written, rows))
    stores = tiles.cdiv(tiles.cdiv(written, store_steps), rows)
    store_rows = tiles.cdiv(written, store_steps * stores)
    k_tiles = flops // num_ctas // RESIDENT.flops
    return cls(num_ctas, steps, rows, stores, store_steps, store_rows, k_tiles)

  @property
  def read_shape(self) -> tuple[int, int]:
    """Of what is read, in elements of 32 bits."""
    return self.num_ctas * self.steps * self.rows, ROW

  @property
  def written_shape(self) -> tuple[int, int]:
    written = self.store_steps * self.stores * self.store_rows
    return self.num_ctas * written, ROW

  @property
  def flops(self) -> int:
    """Operations of all CTAs."""
    return self.num_ctas * self.k_tiles * RESIDENT.flops

  @property
  def slots(self) -> int:
    return min(self.steps, tiles.cdiv(_AHEAD_BYTES, self.rows * ROW_BYTES))


def _share(num_bytes: int, num_ctas: int) -> int:
  return max(1, tiles.cdiv(tiles.cdiv(num_bytes, ROW_BYTES), num_ctas))


def _chunks(rows: int) -> tuple[int, int]:
  """Returns (steps, rows of a chunk) that cover `rows` with the fewest to spare."""
  sizes = range(min(rows, MOST_ROWS), min(rows, _LEAST_ROWS) - 1, -1)
  best = min(sizes, key=lambda size: tiles.cdiv(rows, size) * size)
  return tiles.cdiv(rows, best), best


def launch(
    values: jax.Array, lhs: jax.Array, rhs: jax.Array, shares: Shares, *,
    spread: bool = False, interpret=None,
) -> tuple[jax.Array, ...]:
  """Returns what is written, uint32 `shares.written_shape` (see `sources`), and the sums.

  The sums, float32 [num_ctas, TILE_M], are there if `shares.k_tiles` is not 0.

  Args:
    values: uint32 `shares.read_shape`.
    lhs, rhs: bfloat16 `RESIDENT.operand_shapes`.
    spread: whether the chunks that CTAs move at a time lie side by side, not those that
      one of them moves.
    interpret: of the emulator; None on the chip.
  """
  prepared = RESIDENT.prepare(lhs, rhs, emulated=interpret is not None)
  num_multiply = NUM_WARPGROUPS if shares.k_tiles else 0

  def _kernel(values_gmem, lhs_gmem, rhs_gmem, out_gmem, *sums_gmem, **refs):
    cta, wg = lax.axis_index("cta"), lax.axis_index("wg")

    @pl.when(wg == num_multiply)
    def _move():
      if num_multiply:
        plgpu.set_max_registers(
            roles.PRODUCER_REGISTERS[num_multiply], action="decrease"
        )
      move(values_gmem, out_gmem, cta, refs["slots"], refs["full"])

    if not num_multiply:
      return

    @pl.when(wg == 0)
    def _load():
      RESIDENT.load(prepared, (lhs_gmem, rhs_gmem), refs)

    @pl.when(wg < num_multiply)
    def _multiply():
      plgpu.set_max_registers(roles.CONSUMER_REGISTERS[num_multiply], action="increase")
      sums = RESIDENT.sums(prepared, refs, wg, shares.k_tiles)
      (to,) = sums_gmem
      rows = pl.ds(wg * WG_ROWS, WG_ROWS)
      kernels_stores.store(to.at[cta, rows], jnp.sum(sums, axis=1))

  def move(values_gmem, out_gmem, cta, slots, full):
    num_slots, steps = shares.slots, shares.steps

    def chunk(step, count, size):
      at = step * shares.num_ctas + cta if spread else cta * count + step
      return pl.ds(at * size, size)

    def _load(step, slot):
      plgpu.copy_gmem_to_smem(
          values_gmem.at[chunk(step, steps, shares.rows)], slots.at[slot],
          full.at[slot],
      )

    def _store(step, slot):
      first = (step - (steps - shares.store_steps)) * shares.stores
      for i in range(shares.stores):
        to = chunk(first + i, shares.store_steps * shares.stores, shares.store_rows)
        plgpu.copy_smem_to_gmem(
            slots.at[slot, pl.ds(0, shares.store_rows)], out_gmem.at[to]
        )

    def step_of(step, slot, *, stores: bool):
      plgpu.barrier_wait(full.at[slot])
      lag = 0
      if stores:
        _store(step, slot)
        lag = min(_LAG, num_slots - 1)
        plgpu.wait_smem_to_gmem(lag * shares.stores, wait_read_only=True)
      freed = step - lag  # Its slot has nothing to store any more.
      after = freed + num_slots
      # Those before the first that stores have been followed already.
      new = freed >= (steps - shares.store_steps if stores else 0)

      @pl.when(new & (after < steps))
      def _follow():
        _load(after, tiles.wrapped(slot + (num_slots - lag), num_slots))

      return tiles.wrapped(slot + 1, num_slots)

    for step in range(num_slots):
      _load(jnp.int32(step), step)
    silent = steps - shares.store_steps
    slot = lax.fori_loop(
        0, silent, functools.partial(step_of, stores=False), jnp.int32(0)
    )
    lax.fori_loop(silent, steps, functools.partial(step_of, stores=True), slot)
    plgpu.wait_smem_to_gmem(0)

  scratch = dict(
      slots=plgpu.SMEM((shares.slots, shares.rows, ROW), jnp.uint32),
      full=plgpu.Barrier(num_arrivals=1, num_barriers=shares.slots),
  )
  results = (jax.ShapeDtypeStruct(shares.written_shape, jnp.uint32),)
  if num_multiply:
    scratch |= RESIDENT.scratch(prepared)
    results += (jax.ShapeDtypeStruct((shares.num_ctas, TILE_M), jnp.float32),)
  return plgpu.kernel(
      _kernel,
      out_type=results,
      scratch_types=scratch,
      grid=(shares.num_ctas,),
      grid_names=("cta",),
      num_threads=num_multiply + 1,
      thread_name="wg",
      interpret=interpret,
      kernel_name=f"jaxgemm_{NAME}",
  )(values, *prepared.lhs, *prepared.rhs)


def sources(shares: Shares, *, spread: bool = False) -> np.ndarray:
  """Returns of each row that `launch` writes which row of `values` it is."""
  count = shares.store_steps * shares.stores
  cta, chunk, row = np.ogrid[: shares.num_ctas, :count, : shares.store_rows]
  step = shares.steps - shares.store_steps + chunk // shares.stores
  found = np.empty(shares.written_shape[0], np.int32)
  ctas = shares.num_ctas
  to = chunk * ctas + cta if spread else cta * count + chunk
  source = step * ctas + cta if spread else cta * shares.steps + step
  found[to * shares.store_rows + row] = source * shares.rows + row
  return found


def truth(lhs: jax.Array, rhs: jax.Array, shares: Shares) -> np.ndarray:
  """Returns the sums of a CTA in float64, [TILE_M]."""
  return RESIDENT.truth(lhs, rhs, shares.k_tiles).sum(axis=1)
