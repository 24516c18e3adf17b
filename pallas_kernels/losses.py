"""The loss of each row of logits, and the logits' slopes in their place.

  log_sum[r] = log(sum over j of exp(z[r, j]))          slope[r, j] = exp(z[r, j] -
                                                          log_sum[r]) - (j == label[r])

A CTA of one warpgroup has one row, and sweeps over it twice, 64 x 64 elements at a time.
TMA brings the next pieces while it computes:

  load (TMA)    0 | 1 | 2 | ... | 0 | 1 | 2 | ...
  warpgroup         | largest, sum | ...  | slopes of 0, store | slopes of 1, store | ...

A row of which two CTAs' fit into an SM stays in shared memory. A longer one is loaded
again, from the L2, as long as the rows of all CTAs fit there.

Element (i, j) of a piece p is column (64 * p + i) * 64 + j of the row: each of the 64
lines has a largest element and a sum of its own until the first sweep ends (Milakov,
Gimelshein, "Online normalizer calculation for softmax", 2018).

Each slope takes the place of its logit, which nothing needs any more: 4 bytes move for
each element of 16 bits. XLA takes 8, in three passes (2.2 ms for 16384 x 50304 bfloat16
on an H200).
"""

from __future__ import annotations

import dataclasses
import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import compat, tiles
from pallas_kernels.staging import NUM_SLOTS, PIECE_ROWS, Staging

NAME = "losses"
LEAST_ELEMENTS = 1 << 22  # Of the logits; below, XLA's passes stay in the L2.
NUM_LOADS = 8  # Pieces of a row that does not stay, on their way to a CTA at once.
MAX_STAYING = 13  # Pieces of a row that stays: 104 KB.
_LEAST = -3.4028234e38  # Finite, so that exp of a difference is never nan for its sake.


@dataclasses.dataclass(frozen=True)
class Losses:
  """The static facts of one pass.

  Attributes:
    rows, cols: of the logits.
    num_classes: columns that count, from the first on.
    dtype: of the logits and their slopes, by name.
  """

  rows: int
  cols: int
  num_classes: int
  dtype: str

  @property
  def line(self) -> int:
    """Elements of 128 bytes."""
    return tiles.swizzle_elems(self.dtype)


def supports(facts: Losses) -> str | None:
  """The reason why this kernel cannot serve, or None."""
  if jnp.dtype(facts.dtype).itemsize != 2:
    return f"logits of 16 bits, not of {facts.dtype}"
  if facts.cols % facts.line:
    return f"rows of {facts.cols} elements are not made of lines of {facts.line}"
  if facts.rows * facts.cols < LEAST_ELEMENTS:
    return f"{facts.rows}x{facts.cols} elements are a small pass"
  return None


def launch(logits, labels, facts: Losses, *, interpret=None) -> tuple[jax.Array, ...]:
  """Returns (the log of each row's sum, the logit of each label, all slopes).

  Args:
    logits: [rows, cols].
    labels: [rows] int32. Where one is not within 0 .. num_classes - 1, its logit and the
      row's slopes are undefined.
  Returns: [rows] float32 twice, and [rows, cols] as the logits.
  """
  emulated, line = interpret is not None, facts.line
  lines = facts.cols // line
  pieces = tiles.cdiv(lines, PIECE_ROWS)
  whole = facts.num_classes // (PIECE_ROWS * line)  # Pieces of which all columns count.
  stays = pieces <= MAX_STAYING
  num_loads = pieces if stays else NUM_LOADS
  way = "tiled" if emulated else "flat"
  loads = Staging(way, facts.dtype, line, 1, num_slots=num_loads)
  stores = Staging(way, facts.dtype, line, 1)
  shape = PIECE_ROWS, line

  def _kernel(in_place, labels_gmem, log_sums, labelled, *, slots, out_slots, barriers):
    row = lax.axis_index("row")
    label = labels_gmem[row]

    def box(piece):
      return in_place.at[row, pl.ds(piece * PIECE_ROWS, PIECE_ROWS)]

    def start(step):
      slot, piece = lax.rem(step, jnp.int32(num_loads)), lax.rem(step, jnp.int32(pieces))
      plgpu.copy_gmem_to_smem(
          box(piece), loads.views(slots)[0].at[0, slot], barriers.at[slot]
      )

    def columns(piece):
      """The column of each element of a piece."""
      first = piece * (PIECE_ROWS * line)
      i, j = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
      return first + i * line + j

    def take(step, piece, *, counts: bool):
      """The logits of a piece; has its slot filled anew."""
      slot = lax.rem(step, jnp.int32(num_loads))
      if not stays:
        plgpu.barrier_wait(barriers.at[slot])
      else:
        @pl.when(step < pieces)
        def _wait():
          plgpu.barrier_wait(barriers.at[slot])
      z = plgpu.load(loads.views(slots)[1].at[0, slot], layout=plgpu.Layout.WGMMA)
      z = z.astype(jnp.float32)
      if not stays:
        plgpu.commit_smem()  # Has a barrier: all have read.

        @pl.when(step + num_loads < 2 * pieces)
        def _load_ahead():
          start(step + num_loads)

      return z if counts else jnp.where(columns(piece) < facts.num_classes, z, -jnp.inf)

    def sweep(body, carry):
      carry = lax.fori_loop(
          jnp.int32(0), jnp.int32(whole), functools.partial(body, counts=True), carry
      )
      for piece in range(whole, pieces):
        carry = body(jnp.int32(piece), carry, counts=False)
      return carry

    def add(piece, carry, *, counts):
      largest, total = carry
      z = take(piece, piece, counts=counts)
      larger = jnp.maximum(largest, jnp.max(z, axis=1))
      terms = jnp.exp(z - lax.broadcast_in_dim(larger, shape, (0,)))
      return larger, total * jnp.exp(largest - larger) + jnp.sum(terms, axis=1)

    def store_slopes(piece, _, *, counts):
      z = take(piece + pieces, piece, counts=counts)
      slopes = jnp.exp(z - lax.broadcast_in_dim(log_sum, shape, (1,)))
      if stays:
        slot, (by_tma, by_registers) = piece, loads.views(slots)
      else:
        slot, (by_tma, by_registers) = (
            lax.rem(piece, jnp.int32(NUM_SLOTS)), stores.views(out_slots)
        )
        plgpu.wait_smem_to_gmem(NUM_SLOTS - 1, wait_read_only=True)
      by_registers[0, slot] = slopes.astype(jnp.dtype(facts.dtype))

      @pl.when(lax.div(label, jnp.int32(PIECE_ROWS * line)) == piece)
      def _is_here():
        here = columns(piece) == label
        labelled[row] = jnp.sum(jnp.where(here, z, 0.0), axis=0)
        by_registers[0, slot] = jnp.where(here, slopes - 1.0, slopes).astype(
            jnp.dtype(facts.dtype)
        )

      plgpu.commit_smem()
      plgpu.copy_smem_to_gmem(by_tma.at[0, slot], box(piece))

    for step in range(num_loads):
      start(jnp.int32(step))
    of_lines = plgpu.Layout.WGMMA.reduce(1)
    largest, total = sweep(add, tuple(
        plgpu.layout_cast(jnp.full((PIECE_ROWS,), x, jnp.float32), of_lines)
        for x in (_LEAST, 0.0)
    ))
    # The lines' own, each in a row of 64 alike, to those of all: alike in every column.
    largest, total = (lax.broadcast_in_dim(x, shape, (0,)) for x in (largest, total))
    all_largest = jnp.max(largest, axis=0)
    total *= jnp.exp(largest - lax.broadcast_in_dim(all_largest, shape, (1,)))
    log_sum = all_largest + jnp.log(jnp.sum(total, axis=0))
    log_sums[row] = log_sum
    sweep(store_slopes, None)
    plgpu.wait_smem_to_gmem(0)

  wide = jax.ShapeDtypeStruct((facts.rows, line), jnp.float32)
  scratch = dict(
      slots=loads.slots(), out_slots=None if stays else stores.slots(),
      barriers=plgpu.Barrier(num_barriers=num_loads),
  )
  mesh = plgpu.Mesh(
      grid=(facts.rows,), grid_names=("row",), kernel_name=f"jaxgemm_{NAME}"
  )

  def change(refs):
    in_place, found = refs
    with compat.without_manual_axes():
      # plgpu.kernel takes no references of arrays that it may change.
      results = pl.kernel(
          lambda *gmem: pl.run_scoped(functools.partial(_kernel, *gmem), **scratch),
          out_type=[wide, wide],
          mesh=mesh,
          compiler_params=plgpu.CompilerParams(approx_math=True),
          interpret=False if interpret is None else interpret,
          name=f"jaxgemm_{NAME}",
      )(in_place, labels)
    for ref, result in zip(found, results, strict=True):
      ref[...] = result

  unset = [jnp.zeros(wide.shape, wide.dtype)] * 2
  of_lines = lax.reshape(logits, (facts.rows, lines, line))
  slopes, (log_sums, labelled) = pl.run_state(change)((of_lines, unset))
  return (
      log_sums[:, 0], jnp.sum(labelled, axis=1), lax.reshape(slopes, logits.shape)
  )
