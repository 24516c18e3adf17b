"""gemv: one to four rows times a matrix whose rows lie across k.

  out[b] = alpha * lhs[b] @ rhs[b] + beta * c[b]

Such a product reads each element of the matrix once, for one multiplication a row: no
tensor core is needed, and float32 arithmetic is as exact as it is asked for. The memory
bounds it, if enough loads are on their way. Those take rows of any length, of operands of
16 and 32 bits. A CTA of one warpgroup has some columns, and some of the k:

          columns
        | CTA 0     | CTA 1     | ...   of split 0    threads 0 1 2 ... 127: a vector
    k   | CTA c     | CTA c + 1 | ...   of split 1    each, of ROWS rows at once

  group   load ROWS rows, multiply each by its element of lhs, add up
  sums    of groups, and what their rounding takes away

XLA adds up the sums of the splits, in their order (see `partial_sums`). The last columns
are those that end with the matrix; some of them may be another CTA's as well.

Nothing goes through shared memory, and there are no barriers. Where n is small (of a
column) and lhs is m-major, the same with the operands in each other's place.

Constraints: see `supports`.
Source: the gemv of BLAS for a matrix that is not transposed, column by column.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import accumulate, dependent, partial_sums, tiles
from pallas_kernels.configs import GemvConfig
from pallas_kernels.problem import Problem

NAME = "gemv"
Config = GemvConfig
MOST_ROWS = 4  # Of lhs. From eight on, tiles of the tensor cores are as fast.
ROWS = 16  # Of the matrix, loaded at once.
ITEMSIZES = 2, 4
MOST_RESIDENT = 8  # CTAs of an SM, if its registers hold what they load:
LOADED_BYTES = 1 << 17  # so much.


@dataclasses.dataclass(frozen=True)
class Geometry:
  """Who reads what of the matrix [k, cols].

  Attributes:
    vector: elements that a thread loads at once: rows begin at multiples of it.
    width, chunks: columns of a CTA, and how many CTAs have all.
    depth: rows of a split; of the last one maybe fewer.
    group_bytes: what a CTA loads at once.
  """

  vector: int
  width: int
  chunks: int
  depth: int
  group_bytes: int

  @classmethod
  def of(cls, problem: Problem, splits: int) -> Geometry:
    cols, vector = oriented(problem).n, 16 // problem.itemsize
    while cols % vector or cols < vector * tiles.WG_THREADS:
      vector //= 2
    width = vector * tiles.WG_THREADS
    depth = ROWS * tiles.cdiv(num_groups(problem), splits)
    group_bytes = ROWS * width * problem.itemsize
    return cls(vector, width, tiles.cdiv(cols, width), depth, group_bytes)

  @property
  def resident(self) -> int:
    """CTAs that an SM holds."""
    return min(MOST_RESIDENT, LOADED_BYTES // self.group_bytes)


def oriented(problem: Problem) -> Problem:
  """The problem whose rhs is the matrix: itself, or transposed."""
  is_row = problem.m <= MOST_ROWS and problem.rhs_layout == "n-major"
  return problem if is_row else problem.transposed


def num_groups(problem: Problem) -> int:
  """Groups of ROWS rows of the matrix: each is loaded at once."""
  return tiles.cdiv(problem.k, ROWS)


def supports(problem: Problem, config: GemvConfig) -> str | None:
  """The reason why this kernel cannot serve, or None."""
  if problem.itemsize not in ITEMSIZES:
    return f"gemv multiplies operands of 16 and 32 bits, not {problem.dtype}"
  product = oriented(problem)
  if product.m > MOST_ROWS or product.rhs_layout != "n-major":
    return (
        f"gemv takes m up to {MOST_ROWS} with an n-major rhs, or n up to {MOST_ROWS} with"
        f" an m-major lhs, not m={problem.m}, n={problem.n} {problem.layouts}"
    )
  if product.n < tiles.WG_THREADS:
    return f"gemv wants a matrix of at least {tiles.WG_THREADS} columns, not {product.n}"
  groups = num_groups(problem)
  if not 1 <= config.splits <= groups:
    return (
        f"splits={config.splits} must be in [1, {groups}], the groups of {ROWS} of"
        f" k={problem.k}"
    )
  if tiles.cdiv(groups, tiles.cdiv(groups, config.splits)) != config.splits:
    return f"splits={config.splits}: the last would have nothing of k={problem.k}"
  return tiles.check_problem(problem)


def smem_bytes(problem: Problem, config: GemvConfig) -> int:
  """Shared memory of one CTA."""
  del problem, config
  return 0


def launch(
    operands, problem: Problem, config: GemvConfig, *, num_sms: int, interpret: Any = None
) -> jax.Array | tuple[jax.Array, ...]:
  """Returns the result [batch, m, n]; operands as `problem` stores them."""
  del num_sms  # The config says how many CTAs there are.
  product = oriented(problem)
  transposed = product is not problem
  vectors, matrix = operands[1::-1] if transposed else operands[:2]
  sums = _sums(vectors, matrix, product, config, interpret)
  return partial_sums.add_up(
      sums, operands[2:], problem, config.splits, transposed=transposed
  )


def _sums(
    vectors: jax.Array, matrix: jax.Array, product: Problem, config: GemvConfig,
    interpret: Any,
) -> jax.Array:
  """The sums of each split [batch * splits, m, n], float32."""
  shape = Geometry.of(product, config.splits)
  layout = plgpu.Layout.WG_STRIDED((shape.width,), vec_size=shape.vector)
  per_batch = config.splits * shape.chunks
  k_major = product.lhs_layout == "k-major"

  def body(vectors_gmem, matrix_gmem, out_gmem):
    cta = lax.axis_index("cta")
    batch, rest = tiles.divmod_of(cta, per_batch)
    split, chunk = tiles.divmod_of(rest, shape.chunks)
    col = jnp.minimum(chunk * shape.width, product.n - shape.width)
    first = split * shape.depth
    of_vectors = batch if product.lhs_batched else 0
    of_matrix = batch if product.rhs_batched else 0

    def element(row, k):
      at = (row, k) if k_major else (k, row)
      return vectors_gmem[(of_vectors, *at)].astype(jnp.float32)

    def add(k, sums, num_rows):
      """Adds the products of so many rows of the matrix, from k on."""
      own = pl.ds(col, shape.width)
      rows = [
          plgpu.load(
              matrix_gmem.at[of_matrix, k + i, own], layout=layout, optimized=False
          )
          for i in range(num_rows)
      ]
      rows = [x.astype(jnp.float32) for x in rows]
      factors = [
          [element(row, k + i) for row in range(product.m)] for i in range(num_rows)
      ]
      found = []
      for row, (total, rest) in enumerate(sums):
        group = rows[0] * factors[0][row]
        for x, its in zip(rows[1:], factors[1:], strict=True):
          group = group + x * its[row]
        found.append(accumulate.any_two_sum(total, rest, group))
      return tuple(found)

    zero = plgpu.layout_cast(jnp.zeros((shape.width,), jnp.float32), layout)
    whole = jnp.minimum(shape.depth, product.k - first) // ROWS
    sums = lax.fori_loop(
        jnp.int32(0), whole, lambda i, sums: add(first + i * ROWS, sums, ROWS),
        ((zero, zero),) * product.m,
    )
    if left := product.k % ROWS:
      is_last = (split == config.splits - 1).astype(jnp.int32)  # One turn, or none.
      sums = lax.fori_loop(
          jnp.int32(0), is_last, lambda _, sums: add(product.k - left, sums, left), sums
      )
    for row, (total, rest) in enumerate(sums):
      at = pl.ds(chunk * shape.width, shape.width)
      out_gmem[batch * config.splits + split, row, at] = total + accumulate.finite(rest)

  stored = product.batch * config.splits, product.m, shape.chunks * shape.width
  sums = dependent.kernel(
      body, out_type=jax.ShapeDtypeStruct(stored, jnp.float32),
      grid=(product.batch * per_batch,), grid_names=("cta",),
      kernel_name=f"jaxgemm_{NAME}", interpret=interpret,
  )(vectors, matrix)
  return _in_order(sums, product.n, shape)


def _in_order(sums: jax.Array, cols: int, shape: Geometry) -> jax.Array:
  """The columns, without those that the last chunk shares with the one before."""
  shared = shape.chunks * shape.width - cols
  if not shared:
    return sums
  begin = (shape.chunks - 1) * shape.width
  return jnp.concatenate([sums[..., :begin], sums[..., begin + shared :]], axis=-1)
