"""The pass between a layer's cotangent and its backward products.

  dz[r, j] = ct[r, j] * slope(z[r, j])                      sum over r of dz[r, j]

or, of a gated product, for each factor of activation(z0) * z1:

  dz0 = ct * slope(z0) * z1,  dz1 = ct * activation(z0)     the sums of both

or, without an activation, the sums of ct alone. All in one pass: what the products
multiply is stored, rounded, and the gradients of the biases are summed up before
rounding, each CTA's rows in a row of their own; what is left to add are few rows.

Each CTA is a warpgroup, and walks down a strip of columns, a few rows at a time. TMA
brings the next pieces while it computes:

  load (TMA)    0 | 1 | 2 | ...
  warpgroup         | slopes of 0, store | slopes of 1, store | ...

A thread has the same columns of every row, so that it adds up their sums by itself. Each
dz takes the place of its z, which nothing needs any more: the pass needs no room. It
moves the least bytes that there are; XLA needs two passes where it does not fuse the sums
with the rest (396 us for 8192 x 14336 bfloat16 and gelu on an H200).
"""

from __future__ import annotations

import dataclasses
import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import activations, compat, tiles
from pallas_kernels.problem import NONE, Activation

NAME = "cotangents"
# Of a piece. Others, of 4 to 32 rows, took 0.96 to 1.15 times as long on an H200.
ROWS, COLS = 16, tiles.TMA_BOX_LIMIT
NUM_LOADS = 3  # Pieces of each array that are on their way at once.
NUM_STORES = 2  # Pieces of each result that may wait to leave.
LEAST_ELEMENTS = 1 << 20  # Of the cotangent; below, XLA's passes stay in the L2.
_MIN_PIECES = 4  # That a CTA walks down.


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
  def smem_bytes(self) -> int:
    """Of a CTA."""
    slots = NUM_LOADS * (1 + self.num_entering) + NUM_STORES * self.num_entering
    piece = ROWS * COLS * jnp.dtype(self.dtype).itemsize
    return slots * piece + tiles.BARRIER_BYTES

  @property
  def num_strips(self) -> int:
    return tiles.cdiv(self.cols, COLS)

  def num_chunks(self, num_sms: int) -> int:
    """Parts of the rows, as many as keep most SMs busy to the end."""
    pieces = tiles.cdiv(self.rows, ROWS)
    at_once = num_sms * (tiles.SMEM_LIMIT_BYTES // self.smem_bytes)

    def time(chunks: int) -> int:
      waves = tiles.cdiv(self.num_strips * chunks, at_once)
      return waves * (NUM_LOADS + tiles.cdiv(pieces, chunks))

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
  emulated = interpret is not None
  count, num_stored, strips = facts.count, facts.num_entering, facts.num_strips
  chunks = facts.num_chunks(num_sms)
  pieces = tiles.cdiv(tiles.cdiv(facts.rows, ROWS), chunks)
  dtype, layout = jnp.dtype(facts.dtype), tiles.row_layout(COLS)
  arithmetic = activations.in_registers(facts.activation, 2, emulated=emulated)
  # TMA fills rows beyond the last with zeros, whose slope may be inf or nan.
  masked = callable(facts.activation) and chunks * pieces * ROWS > facts.rows

  def _kernel(*gmem, slots, out_slots, barriers):
    sources, results = gmem[: num_stored + 1], gmem[num_stored + 1 :]
    in_place = sources[:num_stored]
    cta = lax.axis_index("cta")
    chunk, strip = tiles.divmod_of(cta, strips)
    col, first_row = strip * COLS, chunk * (pieces * ROWS)

    def box(gmem_ref, piece):
      row = first_row + piece * ROWS
      return gmem_ref.at[pl.ds(row, ROWS), pl.ds(col, COLS)]

    def start(piece):
      slot = lax.rem(piece, jnp.int32(NUM_LOADS))
      for source, its in zip(sources, slots, strict=True):
        plgpu.copy_gmem_to_smem(box(source, piece), its.at[slot], barriers.at[slot])

    def each_row(slot):
      """Each dz of each row of a piece."""
      for row in range(ROWS):
        *entering, ct = (
            plgpu.load(its.at[slot, row], layout=layout).astype(jnp.float32)
            for its in slots
        )
        yield derivatives(facts, entering, ct, arithmetic)

    def compute(piece, sums):
      slot = lax.rem(piece, jnp.int32(NUM_LOADS))
      plgpu.barrier_wait(barriers.at[slot])
      found = list(zip(*each_row(slot), strict=True))
      out_slot = lax.rem(piece, jnp.int32(NUM_STORES))
      # The slots are free once all stores but those of the last piece have read theirs.
      plgpu.wait_smem_to_gmem(num_stored * (NUM_STORES - 1), wait_read_only=True)
      for rows, its in zip(found, out_slots, strict=False):
        _write([dz.astype(dtype) for dz in rows], its.at[out_slot], emulated=emulated)
      plgpu.commit_smem()
      for its, result in zip(out_slots, in_place, strict=True):
        plgpu.copy_smem_to_gmem(its.at[out_slot], box(result, piece))

      # All have read their slot: the commit has a barrier.
      @pl.when(piece + NUM_LOADS < pieces)
      def _load_ahead():
        start(piece + NUM_LOADS)

      left = facts.rows - first_row - piece * ROWS
      for i, rows in enumerate(found):
        for row, dz in enumerate(rows):
          sums[i] += jnp.where(row < left, dz, 0.0) if masked else dz
      return sums

    for piece in range(min(NUM_LOADS, pieces)):
      start(jnp.int32(piece))
    zeros = [plgpu.layout_cast(jnp.zeros((COLS,), jnp.float32), layout)] * count
    sums = lax.fori_loop(jnp.int32(0), jnp.int32(pieces), compute, zeros)
    for total, result in zip(sums, results, strict=False):
      result[chunk, pl.ds(col, COLS)] = total
    plgpu.wait_smem_to_gmem(0)

  partial = jax.ShapeDtypeStruct((chunks, strips * COLS), jnp.float32)
  scratch = dict(
      slots=[plgpu.SMEM((NUM_LOADS, ROWS, COLS), dtype)] * (num_stored + 1),
      out_slots=[plgpu.SMEM((NUM_STORES, ROWS, COLS), dtype)] * num_stored,
      barriers=plgpu.Barrier(num_arrivals=num_stored + 1, num_barriers=NUM_LOADS),
  )
  mesh = plgpu.Mesh(
      grid=(strips * chunks,), grid_names=("cta",), num_threads=1, thread_name="wg",
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


def _write(rows: list[jax.Array], to, *, emulated: bool) -> None:
  """Writes rows into a slot; on the chip without the barriers of Pallas around each."""
  if emulated:
    for row, values in enumerate(rows):
      to[row] = values
    return

  @plgpu.inline_mgpu(arg_types=([tiles.row_layout(COLS)] * len(rows), plgpu.RefType()))
  def store(_, rows, to):
    for row, values in enumerate(rows):
      values.store_untiled(mgpu.memref_slice(to, row))

  store(rows, to)
