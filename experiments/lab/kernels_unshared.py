"""unshared: a product without shared memory, the rung below the ladder.

  out = the sum over k of lhs[:, k] (outer) rhs[k, :]

One warpgroup computes one output tile. For each k every thread reads the elements of
lhs and rhs that its sums need, straight from memory into registers, and multiplies on
the ordinary float32 units: what one thread has read no other can use, but for what the
L1 and L2 still hold. The tensor cores have no part in it, as wgmma reads rhs from shared
memory alone.

There are no barriers. Constraints: see `supports`.
Source: the product without shared memory of the CUDA C++ programming guide, with a tile
of sums in place of one.
"""

from __future__ import annotations

import dataclasses

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from experiments.lab import kernels_stores
from pallas_kernels import accumulate, tiles
from pallas_kernels.problem import Problem

NAME = "lab_unshared"


@dataclasses.dataclass(frozen=True)
class UnsharedConfig:
  """Tile of one warpgroup."""

  tile_m: int = 64
  tile_n: int = 64


def supports(problem: Problem, config: UnsharedConfig) -> str | None:
  """The reason why this kernel cannot serve, or None."""
  if problem.batch > 1 or problem.layouts != "NN":
    return "unshared is built for one product, NN"
  if problem.m % config.tile_m or problem.n % config.tile_n:
    return f"{config.tile_m}x{config.tile_n} must divide {problem.m}x{problem.n}"
  return accumulate.check(config.tile_m, config.tile_n, 0)


def smem_bytes(problem: Problem, config: UnsharedConfig) -> int:
  del problem, config
  return 0


def launch(
    operands, problem: Problem, config: UnsharedConfig, *, num_sms: int, interpret=None
) -> jax.Array:
  """Returns the result [1, m, n] of lhs [1, m, k] and rhs [1, k, n]."""
  del num_sms  # One CTA a tile, however many SMs there are.
  grid = tiles.TileGrid.of(problem, config.tile_m, config.tile_n)

  def _kernel(lhs_gmem, rhs_gmem, out_gmem):
    _, m, n = grid.locate(lax.axis_index("cta"))
    rows, cols = pl.ds(m, config.tile_m), pl.ds(n, config.tile_n)

    def _load(ref, dim):
      found = plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(1 - dim), optimized=False)
      shape = config.tile_m, config.tile_n
      return lax.broadcast_in_dim(found.astype(jnp.float32), shape, (dim,))

    def _multiply(k, sums):
      return sums + _load(lhs_gmem.at[0, rows, k], 0) * _load(rhs_gmem.at[0, k, cols], 1)

    sums = lax.fori_loop(
        jnp.int32(0), jnp.int32(problem.k), _multiply,
        accumulate.zeros((config.tile_m, config.tile_n)),
    )
    kernels_stores.store(
        out_gmem.at[0, rows, cols], sums.astype(jnp.dtype(problem.out_dtype))
    )

  return plgpu.kernel(
      _kernel,
      out_type=jax.ShapeDtypeStruct(problem.out_shape, jnp.dtype(problem.out_dtype)),
      grid=(grid.num_tiles,),
      grid_names=("cta",),
      num_threads=1,
      thread_name="wg",
      interpret=interpret,
      kernel_name=f"jaxgemm_{NAME}",
  )(*operands)
