"""rungs: the library's first kernels with one of their habits left off.

  out = lhs @ rhs

One warpgroup computes one output tile, as in pallas_kernels/blocked.py (one slot) and
pallas_kernels/pipelined.py (more). What may be left off:

  swizzle  128 bytes of it, in the slots that wgmma reads: 32 and 64 leave bank conflicts
  sums     stay in registers; else each k tile begins anew, and what it gives is added to
           sums in "shared" memory, or in GMEM ("memory"), written back after each step
  output   is cached: it goes through shared memory, from which TMA copies whole lines;
           else each thread stores what it holds

  barrier  arrives                        waits
  full[s]  the TMA copies of lhs and rhs  the warpgroup, before wgmma

Sums that are written back need no barrier: each thread reads what it has written itself.
Constraints: see `supports`.
Source: the ladder of S. Boehm's "How to Optimize a CUDA Matmul Kernel" (2022), with TMA
and wgmma in place of loads and FMAs.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from experiments.lab import kernels_stores
from pallas_kernels import accumulate, calls, operand_tiles, slot_products, tiles
from pallas_kernels.problem import Problem

NAME = "lab_rungs"
_PIECE = 64  # Rows and columns of the sums that are added at once.


@dataclasses.dataclass(frozen=True)
class RungsConfig:
  """Tile of one CTA, its ring, and what is left off; see the module's docstring."""

  tile_m: int = 128
  tile_n: int = 128
  tile_k: int = 64
  num_stages: int = 1
  swizzle: int = 128
  sums: Literal["registers", "shared", "memory"] = "registers"
  cached_output: bool = True


@dataclasses.dataclass(frozen=True)
class _Swizzled(operand_tiles.Operand):
  """An operand whose slots have a swizzle of their own; it comes by tiled copies."""

  swizzle_bytes: int = tiles.SWIZZLE_BYTES

  @property
  def swizzle(self) -> int:
    return self.swizzle_bytes


def supports(problem: Problem, config: RungsConfig) -> str | None:
  """The reason why this kernel cannot serve, or None."""
  if config.swizzle not in (32, 64, 128):
    return (
        f"swizzle={config.swizzle}: Pallas gives wgmma operands swizzled by 32, 64 or"
        " 128 bytes alone"
    )
  if problem.batch > 1 or problem.epilogue.has_c or problem.epilogue.is_fused:
    return "rungs is built for one plain product"
  for name, tile in (("m", config.tile_m), ("n", config.tile_n), ("k", config.tile_k)):
    if getattr(problem, name) % tile:
      return f"tile_{name}={tile} must divide {name}={getattr(problem, name)}"
  return (
      tiles.check_problem(problem)
      or tiles.check_tile(problem, config.tile_m, config.tile_n, config.tile_k)
      or _check_sums(config)
      or accumulate.check(config.tile_m, config.tile_n, 0)
      or tiles.check_smem(smem_bytes(problem, config))
  )


def _check_sums(config: RungsConfig) -> str | None:
  if config.sums != "registers" and config.tile_n % _PIECE:
    return f"tile_n={config.tile_n}: sums are written back by {_PIECE} columns"
  return None


def smem_bytes(problem: Problem, config: RungsConfig) -> int:
  """Shared memory of one CTA: the ring, the staging slots or the sums, the barriers."""
  slot = tiles.slot_bytes(problem, config.tile_m, config.tile_n, config.tile_k)
  found = config.num_stages * slot + tiles.BARRIER_BYTES
  if config.sums == "shared":
    found += 4 * config.tile_m * config.tile_n
  if config.cached_output:
    found += calls.epilogue_bytes(problem, config.tile_n, 1)
  return found


def launch(
    operands, problem: Problem, config: RungsConfig, *, num_sms: int, interpret=None
) -> jax.Array:
  """Returns the result [1, m, n]; operands as `problem` stores them."""
  del num_sms  # One CTA a tile, however many SMs there are.
  shape = config.tile_m, config.tile_n
  call = calls.make_call(
      operands, problem, config, stored_cols=shape[1], num_wgs=1, interpret=interpret
  )
  prepared = call.prepared
  if config.swizzle != tiles.SWIZZLE_BYTES:
    prepared = _swizzled(prepared, config.swizzle)
  lhs, rhs = prepared.lhs_operand, prepared.rhs_operand
  grid = tiles.TileGrid.of(problem, *shape)
  k_steps, num_stages = tiles.cdiv(problem.k, config.tile_k), config.num_stages
  ahead = min(max(num_stages - 1, 1), k_steps)  # Loads before the first wgmma.
  written_back = config.sums != "registers"
  out_dtype = jnp.dtype(problem.out_dtype)

  def _kernel(lhs_gmem, rhs_gmem, out_gmem, sums_gmem, refs):
    _, m, n = grid.locate(lax.axis_index("cta"))
    tile = pl.ds(m, config.tile_m), pl.ds(n, config.tile_n)
    slots = refs["lhs_slots"], refs["rhs_slots"]

    def _slot(step):
      return lax.rem(jnp.int32(step), jnp.int32(num_stages))

    def _load(step):
      slot = _slot(step)
      full, at = refs["full"].at[slot], dict(batch=0, k=step * config.tile_k)
      lhs.load(lhs_gmem, slots[0], slot, full, mn=m, **at)
      rhs.load(rhs_gmem, slots[1], slot, full, mn=n, **at)

    def _multiply(acc, step):
      slot = _slot(step)
      plgpu.barrier_wait(refs["full"].at[slot])
      groups = slot_products.multiply(acc, prepared, slots, slot)
      # With one slot the next load overwrites what this wgmma reads.
      plgpu.wgmma_wait(groups if num_stages > 1 and not written_back else 0)

    def _load_ahead(step):
      @pl.when(step + ahead < k_steps)
      def _():
        _load(step + ahead)

    def _in_registers(acc, first, count):
      def step(i, _):
        _multiply(acc, first + i)
        _load_ahead(first + i)

      lax.fori_loop(jnp.int32(0), jnp.int32(count), step, None)

    def _sum(multiply, steps):
      return accumulate.sum_over_k(
          multiply, shape=shape, k_steps=steps, promote=0, dtype=problem.acc_dtype
      )

    def _written_back():
      corner = (0, 0) if config.sums == "shared" else (m, n)
      sums = refs["sums"] if config.sums == "shared" else sums_gmem

      def piece(row, col, rows, cols):
        return sums.at[pl.ds(corner[0] + row, rows), pl.ds(corner[1] + col, cols)]

      def _read(*at):
        return plgpu.load(piece(*at), layout=plgpu.Layout.WGMMA, optimized=False)

      def _write(value, *at):
        if config.sums == "shared":
          piece(*at)[...] = value
        else:
          kernels_stores.store(piece(*at), value)

      def step(i, _):
        found = _sum(lambda acc, *_: _multiply(acc, i), 1)
        _load_ahead(i)
        # Piece by piece: registers do not hold the sums twice.
        for row in range(0, shape[0], _PIECE):
          for col in range(0, shape[1], _PIECE):
            at = row, col, _PIECE, _PIECE
            _write(_read(*at) + found[row : row + _PIECE, col : col + _PIECE], *at)

      _write(accumulate.zeros(shape), 0, 0, *shape)
      lax.fori_loop(jnp.int32(0), jnp.int32(k_steps), step, None)
      return _read(0, 0, *shape)

    for step in range(ahead):
      _load(jnp.int32(step))
    acc = _written_back() if written_back else _sum(_in_registers, k_steps)
    if config.cached_output:
      call.epilogue.store(acc, out_gmem, (), refs, wg=0, batch=0, row=m, col=n)
      call.epilogue.finish()
    else:
      kernels_stores.store(out_gmem.at[0, *tile], acc.astype(out_dtype))

  scratch: dict[str, Any] = dict(
      lhs_slots=lhs.slots(num_stages),
      rhs_slots=rhs.slots(num_stages),
      full=plgpu.Barrier(num_arrivals=prepared.num_arrivals, num_barriers=num_stages),
  )
  if config.cached_output:
    scratch |= call.epilogue.scratch()
  if config.sums == "shared":
    scratch["sums"] = plgpu.SMEM(shape, jnp.float32)
  out_type = [jax.ShapeDtypeStruct(problem.out_shape, out_dtype)]
  if config.sums == "memory":
    out_type.append(jax.ShapeDtypeStruct((problem.m, problem.n), jnp.float32))
  flat, tree = jax.tree.flatten(call.inputs)

  def body(*gmem, **refs):
    *sources, _ = jax.tree.unflatten(tree, gmem[: len(flat)])  # No c.
    out_gmem, *sums_gmem = gmem[len(flat) :]
    _kernel(*sources, out_gmem, sums_gmem[0] if sums_gmem else None, refs)

  return plgpu.kernel(
      body, out_type=out_type, scratch_types=scratch, grid=(grid.num_tiles,),
      grid_names=("cta",), num_threads=1, thread_name="wg", interpret=interpret,
      kernel_name=f"jaxgemm_{NAME}",
  )(*flat)[0]


def _swizzled(prepared: operand_tiles.Prepared, swizzle: int) -> operand_tiles.Prepared:
  """The operands with slots of that swizzle, which one view serves."""
  found = {
      name: _Swizzled(**vars(operand) | dict(emulated=True), swizzle_bytes=swizzle)
      for name, operand in (
          ("lhs_operand", prepared.lhs_operand), ("rhs_operand", prepared.rhs_operand)
      )
  }
  return dataclasses.replace(prepared, **found)
