"""The pass that makes float16 parts (see `halves`), as kernels.

XLA reads an operand twice, and needs small kernels in between. Here one whose rows run
along k is read once. A CTA keeps in its registers

  by_rows    a row, where that runs along k: its largest element, parts and marks
  by_cols    some columns of some rows, where k runs across: parts and marks; the largest
             elements of the columns come from a pass of XLA's

Both want columns in multiples of 128, as a warpgroup has 128 threads.

Source: the row-wise kernels of Triton's softmax tutorial, which keep a row likewise.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import dependent, halves_of, tiles

NAME = "halves"
MOST_COLS = 16384  # Of a row that registers hold: 128 elements of each thread.
ROWS = 8  # Of a CTA that goes by columns.


def serves(shape: tuple[int, ...], along_cols: bool) -> bool:
  """Whether a kernel takes an operand [batch, rows, cols], scaled along cols or rows."""
  _, rows, cols = shape
  if cols % tiles.WG_THREADS:
    return False
  return cols <= MOST_COLS if along_cols else rows % ROWS == 0


def by_rows(x: jax.Array, *, interpret: Any = None):
  """The parts of x [batch, rows, cols], and factors and marks of each row.

  Returns (high, low), float16 as x; float32 [batch, 2, rows]; int32 [batch, rows].
  """
  batch, rows, cols = x.shape
  layout = plgpu.Layout.WG_STRIDED((cols,), vec_size=_vector(cols))

  def body(x_gmem, high, low, factors, marks):
    at = tiles.divmod_of(lax.axis_index("cta"), rows)
    x = plgpu.load(x_gmem.at[at], layout=layout, optimized=False)
    # As an array: Mosaic reads no number's bits.
    largest = lax.broadcast(jnp.max(halves_of.magnitude(x)), (cols,))
    found = halves_of.parts(x, largest, rounded=_rounded)
    high[at], low[at] = found.high, found.low
    marks[at] = jnp.max(found.marks)
    for i, factor in enumerate(halves_of.factors(largest)):
      factors[at[0], i, at[1]] = jnp.max(factor)

  parts = jax.ShapeDtypeStruct(x.shape, jnp.float16)
  of_rows = jax.ShapeDtypeStruct((batch, rows), jnp.int32)
  factors = jax.ShapeDtypeStruct((batch, 2, rows), jnp.float32)
  high, low, factors, marks = dependent.kernel(
      body, out_type=(parts, parts, factors, of_rows), grid=(batch * rows,),
      grid_names=("cta",), kernel_name=f"jaxgemm_{NAME}_rows", interpret=interpret,
  )(x)
  return (high, low), factors, marks


def by_cols(x: jax.Array, largest: jax.Array, *, interpret: Any = None):
  """The parts of x [batch, rows, cols], factors of each column, and marks of each CTA.

  `largest` int32 [batch, cols] is the magnitude of the largest of each column. Returns
  (high, low), float16 as x; float32 [batch, 2, cols]; int32 [batch, ., .].
  """
  batch, rows, cols = x.shape
  vector = _vector(cols)
  width = tiles.WG_THREADS * vector
  layout = plgpu.Layout.WG_STRIDED((width,), vec_size=vector)
  bands, chunks = rows // ROWS, cols // width

  def body(x_gmem, largest_gmem, high, low, factors, marks):
    index, rest = tiles.divmod_of(lax.axis_index("cta"), bands * chunks)
    i, j = tiles.divmod_of(rest, chunks)
    own = pl.ds(j * width, width)
    load = lambda ref: plgpu.load(ref, layout=layout, optimized=False)
    largest = load(largest_gmem.at[index, own])
    its = [load(x_gmem.at[index, i * ROWS + row, own]) for row in range(ROWS)]
    seen = None
    for row, x in enumerate(its):
      found = halves_of.parts(x, largest, rounded=_rounded)
      high[index, i * ROWS + row, own] = found.high
      low[index, i * ROWS + row, own] = found.low
      seen = found.marks if seen is None else jnp.maximum(seen, found.marks)
    marks[index, i, j] = jnp.max(seen)

    @pl.when(i == 0)
    def _():
      for which, factor in enumerate(halves_of.factors(largest)):
        factors[index, which, own] = factor

  parts = jax.ShapeDtypeStruct(x.shape, jnp.float16)
  of_ctas = jax.ShapeDtypeStruct((batch, bands, chunks), jnp.int32)
  factors = jax.ShapeDtypeStruct((batch, 2, cols), jnp.float32)
  high, low, factors, marks = dependent.kernel(
      body, out_type=(parts, parts, factors, of_ctas), grid=(batch * bands * chunks,),
      grid_names=("cta",), kernel_name=f"jaxgemm_{NAME}_cols", interpret=interpret,
  )(x, largest)
  return (high, low), factors, marks


def _vector(cols: int) -> int:
  """Elements that a thread loads at once."""
  return next(size for size in (4, 2, 1) if cols % (tiles.WG_THREADS * size) == 0)


def _rounded(x):
  """x rounded to float16, and the same in float32."""
  high = x.astype(jnp.float16)
  return high, high.astype(jnp.float32)
