"""The pass behind a layer of normalised rows: what its input's cotangent becomes.

  y = n * weights, n = x * r            r = 1 / sqrt(mean over k of x ** 2 + eps)
  dx = r * (dy * weights - n * mean over k of dy * weights * n) + passing
  dw = sum over rows of dy * n

`passing` is the cotangent of what passes by the layer, a residual. Each CTA is a
warpgroup and has every so many-th row; it asks for the next one before it adds up this
one's squares, so that the memory never waits. Its share of dw stays in registers, and is
a row of an array whose few rows are then added, in order.

A row is read once: 8192x4096 in bfloat16 takes 67 us on an H200, nearly the memory's
rate, where XLA, which reads x and dy for the sums and once more for dx, takes 123.

Source: Zhang and Sennrich, "Root mean square layer normalization" (2019).
"""

from __future__ import annotations

import dataclasses

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import dependent, tiles

NAME = "norm_gradients"
LEAST_ELEMENTS = 1 << 20  # Of x; below, XLA's passes stay in the L2.
MOST_COLS = 8192  # Of x: a thread has 64 sums of dw then, beside its share of a row.
_MOST_AHEAD = 4096  # Columns of a row that has room in registers beside another.
_SM_COLS = 8192  # Of the rows of all CTAs of an SM.
_FEWEST_CTAS, _MOST_CTAS = 2, 6  # Of an SM; eight took longer for rows of 1024.
_LEAST_STEP = 2 * tiles.WG_THREADS  # Columns of which each thread has whole words.


@dataclasses.dataclass(frozen=True)
class NormGradients:
  """The static facts of one pass.

  Attributes:
    rows, cols: of x; cols are what is called k above.
    dtype: of x, dy, passing and dx, by name.
    eps: added to the mean square.
  """

  rows: int
  cols: int
  dtype: str
  eps: float

  @property
  def layout(self) -> plgpu.Layout:
    """How the threads of a warpgroup share a row: up to eight elements side by side."""
    step = next(n for n in (8, 4, 2) if self.cols % (n * tiles.WG_THREADS) == 0)
    return plgpu.Layout.WG_STRIDED((self.cols,), step)

  def num_ctas(self, num_sms: int) -> int:
    of_sm = max(_FEWEST_CTAS, min(_MOST_CTAS, _SM_COLS // self.cols))
    return min(self.rows, num_sms * of_sm)


def supports(facts: NormGradients) -> str | None:
  """The reason why this kernel cannot serve, or None."""
  if jnp.dtype(facts.dtype).itemsize != 2:
    return f"rows of 16 bits, not of {facts.dtype}"
  if facts.cols % _LEAST_STEP:
    return f"rows of {facts.cols} elements: the threads share {_LEAST_STEP} at a time"
  if facts.cols > MOST_COLS:
    return f"rows of {facts.cols} elements: registers hold up to {MOST_COLS}"
  if facts.rows * facts.cols < LEAST_ELEMENTS:
    return f"{facts.rows}x{facts.cols} elements are a small pass"
  return None


def launch(
    operands, facts: NormGradients, *, num_sms: int, interpret=None
) -> tuple[jax.Array, jax.Array]:
  """Returns dx [rows, cols], and dw [cols] in float32.

  `operands` are x, the weights [cols] of any dtype, dy and passing, the others
  [rows, cols].
  """
  cols, dtype, layout = facts.cols, jnp.dtype(facts.dtype), facts.layout
  num_ctas = facts.num_ctas(num_sms)
  ahead = cols <= _MOST_AHEAD

  def load(ref):
    return plgpu.load(ref, layout=layout, optimized=False)

  def _kernel(x, weights, dy, passing, dx, partial):
    cta, share = lax.axis_index("cta"), jnp.float32(1 / cols)

    def ask(local):
      """What there is of the `local`-th row; behind the last, of that one again."""
      row = jnp.minimum(cta + local * num_ctas, facts.rows - 1)
      return [load(ref.at[row]) for ref in (x, dy, passing)]

    def compute(local, carry):
      total, loaded = carry
      its, d_its, its_passing = loaded or ask(local)
      loaded = ask(local + 1) if ahead else []
      its, d_its = (v.astype(jnp.float32) for v in (its, d_its))
      weighted = d_its * load(weights).astype(jnp.float32)
      r = lax.rsqrt(jnp.sum(its * its) * share + jnp.float32(facts.eps))
      along = jnp.sum(weighted * its) * share * r * r * r
      found = weighted * r - its * along + its_passing.astype(jnp.float32)
      dx[cta + local * num_ctas] = found.astype(dtype)
      return total + d_its * its * r, loaded

    count = lax.div(facts.rows - cta + num_ctas - 1, jnp.int32(num_ctas))
    none = plgpu.layout_cast(jnp.zeros((cols,), jnp.float32), layout)
    first = ask(jnp.int32(0)) if ahead else []
    total, _ = lax.fori_loop(jnp.int32(0), count, compute, (none, first))
    partial[cta] = total

  dx, partial = dependent.kernel(
      _kernel,
      out_type=[
          jax.ShapeDtypeStruct((facts.rows, cols), dtype),
          jax.ShapeDtypeStruct((num_ctas, cols), jnp.float32),
      ],
      grid=(num_ctas,),
      grid_names=("cta",),
      interpret=interpret,
      kernel_name=f"jaxgemm_{NAME}",
  )(*operands)
  return dx, jnp.sum(partial, 0)
