"""The pass between a layer's cotangent and its backward products.

  dz[r, j] = ct[r, j] * slope(z[r, j])                      sum over r of dz[r, j]

or, of a gated product, for each factor of activation(z0) * z1:

  dz0 = ct * slope(z0) * z1,  dz1 = ct * activation(z0)     the sums of both

or, without an activation, the sums of ct alone. All in one pass: what the products
multiply is stored, rounded, and the gradients of the biases are summed up before
rounding, each CTA's rows in a row of their own; what is left to add are few rows.

Each warpgroup walks down a strip of columns, 64 rows at a time. TMA brings the next
pieces while it computes:

  load (TMA)    0 | 1 | 2 | ...
  warpgroup         | slopes of 0, store | slopes of 1, store | ...

Each dz takes the place of its z, which nothing needs any more: the pass needs no room.
It moves the least bytes that there are; XLA needs two passes where it does not fuse the
sums with the rest (396 us for 8192 x 14336 bfloat16 and gelu on an H200).
"""

from __future__ import annotations

import dataclasses
import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import accumulate, activations, compat, tiles
from pallas_kernels.problem import NONE, Activation
from pallas_kernels.staging import NUM_SLOTS, PIECE_ROWS, Staging

NAME = "cotangents"
NUM_WGS = 2  # Of a CTA. More of them, with less on the way for each, were 5% slower.
LEAST_ELEMENTS = 1 << 20  # Of the cotangent; below, XLA's passes stay in the L2.
_MIN_PIECES = 4  # That a warpgroup walks down.


@dataclasses.dataclass(frozen=True)
class Cotangents:
  """The static facts of one pass.

  Attributes:
    rows, cols: of the cotangent.
    dtype: of all arrays, by name.
    activation: see `activations`. Without one there is no z, and no result but the sums.
    gated: whether there are two arrays z and two results.
    sums: whether their sums over rows are wanted.
  """

  rows: int
  cols: int
  dtype: str
  activation: Activation
  gated: bool = False
  sums: bool = True

  @property
  def count(self) -> int:
    """Cotangents of products."""
    return 1 + self.gated

  @property
  def num_entering(self) -> int:
    """Arrays z, and results that are stored."""
    return self.count if self.gated or self.activation != NONE else 0

  @property
  def num_loads(self) -> int:
    """Pieces of each array that are on their way to a warpgroup at once."""
    return (6, 3, 2)[self.num_entering]

  def num_chunks(self, num_sms: int) -> int:
    """Parts of the rows, as many as keep most SMs busy to the end."""
    strips = tiles.cdiv(self.cols, NUM_WGS * tiles.swizzle_elems(self.dtype))
    pieces = tiles.cdiv(self.rows, PIECE_ROWS)

    def time(chunks: int) -> int:
      return tiles.cdiv(strips * chunks, num_sms) * (1 + tiles.cdiv(pieces, chunks))

    return min(range(1, max(1, pieces // _MIN_PIECES) + 1), key=time)


def supports(facts: Cotangents) -> str | None:
  """The reason why this kernel cannot serve, or None."""
  if jnp.dtype(facts.dtype).itemsize != 2:
    return f"cotangents of 16 bits, not of {facts.dtype}"
  if facts.cols % tiles.tma_stride_elems(facts.dtype):
    return f"TMA cannot read rows of {facts.cols} elements"
  if facts.rows * facts.cols < LEAST_ELEMENTS:
    return f"{facts.rows}x{facts.cols} elements are a small pass"
  return None


def derivatives(
    facts: Cotangents, entering, ct, by: activations.Arithmetic = activations.ARRAYS
) -> list[jax.Array]:
  """Each dz, float32, from what enters the activation and the cotangent, float32."""
  if not entering:
    return [ct]
  return [ct * slope for slope in activations.slopes(facts.activation, entering, by)]


def launch(
    operands, facts: Cotangents, *, num_sms: int, interpret=None
) -> tuple[list[jax.Array], list[jax.Array]]:
  """Returns each dz [rows, cols], unless it is ct, and if wanted the sums, float32.

  `operands` are each z and the cotangent, [rows, cols].
  """
  emulated, num_loads = interpret is not None, facts.num_loads
  count, num_stored = facts.count, facts.num_entering
  chunks = facts.num_chunks(num_sms)
  pieces = tiles.cdiv(tiles.cdiv(facts.rows, PIECE_ROWS), chunks)
  cols = tiles.swizzle_elems(facts.dtype)
  strips = tiles.cdiv(facts.cols, cols * NUM_WGS)
  padded_cols = strips * NUM_WGS * cols
  way = "tiled" if emulated else "flat"
  arithmetic = activations.in_registers(facts.activation, 2, emulated=emulated)
  loads = Staging(way, facts.dtype, cols, NUM_WGS, num_slots=num_loads)
  stores = Staging(way, facts.dtype, cols, NUM_WGS)

  def _kernel(*gmem, slots, out_slots, barriers, turns):
    sources, results = gmem[: num_stored + 1], gmem[num_stored + 1 :]
    in_place = sources[:num_stored]
    wg, cta = lax.axis_index("wg"), lax.axis_index("cta")
    chunk = lax.div(cta, jnp.int32(strips))
    strip = (cta - chunk * strips) * NUM_WGS + wg
    col, first_row = strip * cols, chunk * (pieces * PIECE_ROWS)

    def box(gmem_ref, piece):
      row = first_row + piece * PIECE_ROWS
      return gmem_ref.at[pl.ds(row, PIECE_ROWS), pl.ds(col, cols)]

    def start(piece):
      slot = lax.rem(piece, jnp.int32(num_loads))
      for source, its in zip(sources, slots, strict=True):
        plgpu.copy_gmem_to_smem(
            box(source, piece), loads.views(its)[0].at[wg, slot],
            barriers.at[wg * num_loads + slot],
        )

    def compute(piece, sums):
      slot = lax.rem(piece, jnp.int32(num_loads))
      plgpu.barrier_wait(barriers.at[wg * num_loads + slot])
      *entering, ct = (
          plgpu.load(loads.views(its)[1].at[wg, slot], layout=plgpu.Layout.WGMMA)
          .astype(jnp.float32)
          for its in slots
      )
      found = derivatives(facts, entering, ct, arithmetic)
      out_slot = lax.rem(piece, jnp.int32(NUM_SLOTS))
      # The slots are free once all stores but those of the last piece have read theirs.
      plgpu.wait_smem_to_gmem(num_stored * (NUM_SLOTS - 1), wait_read_only=True)
      for dz, its in zip(found, out_slots, strict=False):
        stores.views(its)[1][wg, out_slot] = dz.astype(jnp.dtype(facts.dtype))
      plgpu.commit_smem()
      for its, result in zip(out_slots, in_place, strict=True):
        plgpu.copy_smem_to_gmem(stores.views(its)[0].at[wg, out_slot], box(result, piece))

      # All have read their slot: the commit has a barrier.
      @pl.when(piece + num_loads < pieces)
      def _load_ahead():
        start(piece + num_loads)

      if callable(facts.activation) and chunks * pieces * PIECE_ROWS > facts.rows:
        # TMA fills rows beyond the last with zeros, whose slope may be inf or nan.
        left = facts.rows - first_row - piece * PIECE_ROWS
        inside = lax.broadcasted_iota(jnp.int32, (PIECE_ROWS, cols), 0) < left
        found = [jnp.where(inside, dz, 0.0) for dz in found]
      return [total + dz for total, dz in zip(sums, found, strict=True)]

    for piece in range(min(num_loads, pieces)):
      start(jnp.int32(piece))
    zeros = [accumulate.zeros((PIECE_ROWS, cols))] * count
    sums = lax.fori_loop(jnp.int32(0), jnp.int32(pieces), compute, zeros)
    if facts.sums:
      # Mosaic reduces through scratch memory that all warpgroups share: in turns.
      @pl.when(wg > 0)
      def _wait_for_the_one_before():
        plgpu.barrier_wait(turns.at[wg - 1])

      for total, result in zip(sums, results, strict=True):
        result[chunk, pl.ds(col, cols)] = jnp.sum(total, axis=0)

      @pl.when(wg < NUM_WGS - 1)
      def _let_the_next():
        plgpu.barrier_arrive(turns.at[wg])

    plgpu.wait_smem_to_gmem(0)

  partial = jax.ShapeDtypeStruct((chunks, padded_cols), jnp.float32)
  scratch = dict(
      slots=[loads.slots() for _ in range(num_stored + 1)],
      out_slots=[stores.slots() for _ in range(num_stored)],
      barriers=plgpu.Barrier(
          num_arrivals=num_stored + 1, num_barriers=NUM_WGS * num_loads
      ),
      turns=plgpu.Barrier(num_barriers=NUM_WGS - 1),
  )
  mesh = plgpu.Mesh(
      grid=(strips * chunks,), grid_names=("cta",), num_threads=NUM_WGS, thread_name="wg",
      kernel_name=f"jaxgemm_{NAME}",
  )

  def change(refs):
    in_place, sums = refs
    with compat.without_manual_axes():
      # plgpu.kernel takes no references of arrays that it may change.
      partials = pl.kernel(
          lambda *gmem: pl.run_scoped(
              functools.partial(_kernel, *gmem), collective_axes="wg", **scratch
          ),
          out_type=[partial] * (count * facts.sums),
          mesh=mesh,
          compiler_params=plgpu.CompilerParams(
              approx_math=arithmetic is activations.APPROXIMATE
          ),
          interpret=False if interpret is None else interpret,
          name=f"jaxgemm_{NAME}",
      )(*in_place, operands[-1])
    for ref, found in zip(sums, partials, strict=True):
      ref[...] = found

  unset = [jnp.zeros(partial.shape, partial.dtype)] * (count * facts.sums)
  found, sums = pl.run_state(change)((list(operands[:-1]), unset))
  return found, [jnp.sum(x, axis=0)[: facts.cols] for x in sums]
