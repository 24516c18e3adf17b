"""Partial sums of a cluster, added up through distributed shared memory.

The CTAs of a cluster hold partial sums of the same output tile. Each CTA adds up a
share of the columns: the others send it their sums of that share, straight from
their registers into its inbox in shared memory. It adds them in the order of their
ranks, so that every run gives the same bits; nothing goes through memory.

  barrier  arrives                                  waits
  inbox    the bytes of all parts of the share      its consumer, before it adds
  free     consumers of all CTAs, when they start   consumers, before they send
           and when they have added up a tile

A part is read by the same thread of the same warpgroup that sent it, in the order
of the registers, 16 bytes at a time: no bank conflicts arise. The emulator has no
distributed shared memory: there the sums are parked in GMEM, and a barrier of the
cluster takes the place of `inbox`.

Source: `st.async` and `mapa` of the PTX manual; distributed shared memory in the
CUDA C++ programming guide.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, nvvm, vector
import numpy as np

from pallas_kernels import tiles
from pallas_kernels.configs import ALONG_K
from pallas_kernels.integers import i32

VECTOR = 4  # Sums that a thread sends at once: 16 bytes.
Ref = Any


@dataclasses.dataclass(frozen=True)
class Exchange:
  """The exchange of one kernel.

  Attributes:
    size: CTAs of a cluster.
    rows, cols: the sums of one consumer warpgroup.
    num_wgs: consumers of a CTA.
    emulated: see the module's docstring.
  """

  size: int
  rows: int
  cols: int
  num_wgs: int
  emulated: bool

  @property
  def share_cols(self) -> int:
    """Columns that one CTA adds up."""
    return share_cols(self.cols, self.size)

  @property
  def num_shares(self) -> int:
    """CTAs that add up anything; the others only send."""
    return self.cols // self.share_cols

  @property
  def smem_bytes(self) -> int:
    inbox = 4 * self.size * self.rows * self.share_cols
    return self.num_wgs * inbox + tiles.BARRIER_BYTES

  def scratch(self) -> dict[str, Any]:
    barrier = plgpu.ClusterBarrier(
        collective_axes=(ALONG_K,), num_arrivals=self.num_wgs
    )
    if self.emulated:
      return {"free": barrier, "parked": barrier}
    vectors = self.rows * self.share_cols // (tiles.WG_THREADS * VECTOR)
    shape = (self.num_wgs, self.size, vectors, tiles.WG_THREADS, VECTOR)
    return {
        "free": barrier,
        "inbox": plgpu.SMEM(shape, jnp.float32),
        "inbox_barriers": plgpu.SMEM((self.num_wgs, 2), jnp.uint32),
    }

  def workspace(self, num_clusters: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Arrays in GMEM that stand in for shared memory in the emulator."""
    if not self.emulated:
      return {}
    shape = (num_clusters, self.size, self.num_wgs, self.rows, self.cols)
    return {"parts": jax.ShapeDtypeStruct(shape, jnp.float32)}

  def start(self, refs, *, wg) -> None:
    """To be called by each consumer before its first tile."""
    if not self.emulated:
      _init(refs["inbox_barriers"].at[wg])
    plgpu.barrier_arrive(refs["free"])

  def add_up(
      self, acc, refs, *, wg, index, count, store: Callable[[jax.Array], None]
  ) -> None:
    """Calls `store(sums)` with this CTA's share of the columns, added up.

    `index` counts the tiles of this CTA, and `count` is how many they are.
    """
    rank = lax.axis_index(ALONG_K)
    plgpu.barrier_wait(refs["free"])
    if self.emulated:
      refs["parts"][lax.axis_index("cta"), rank, wg] = acc
      plgpu.barrier_arrive(refs["parked"])
      plgpu.barrier_wait(refs["parked"])
    else:
      inbox, barrier = refs["inbox"].at[wg], refs["inbox_barriers"].at[wg]
      _send(acc, inbox, barrier, rank, self.num_shares)

    def add_up():
      if self.emulated:
        sums = self._sum_parked(refs["parts"], wg, rank)
      else:
        _receive(inbox, barrier, lax.rem(index, jnp.int32(2)))
        sums = _sum(inbox, (self.rows, self.share_cols))
      store(sums)

    if_stores(self, add_up)

    # Nobody arrives after the last tile: the CTA on whose barrier it does may be gone.
    @pl.when(index + 1 < count)
    def _free():
      plgpu.barrier_arrive(refs["free"])

  def _sum_parked(self, parts: Ref, wg, rank) -> jax.Array:
    cols = pl.ds(rank * self.share_cols, self.share_cols)
    total = None
    for i in range(self.size):
      part = parts.at[lax.axis_index("cta"), i, wg, :, cols]
      part = plgpu.load(part, layout=plgpu.Layout.WGMMA, optimized=False)
      total = part if total is None else total + part
    return total


def first_col(exchange: Exchange | None):
  """The first column of a tile that this CTA stores: beyond all if it stores none."""
  return lax.axis_index(ALONG_K) * exchange.share_cols if exchange else 0


def if_stores(exchange: Exchange | None, do: Callable[[], None]) -> None:
  """Calls `do` where this CTA stores some of its tile: everywhere without exchange."""
  if exchange is None:
    do()
  else:
    pl.when(lax.axis_index(ALONG_K) < exchange.num_shares)(do)


def share_cols(cols: int, size: int) -> int:
  """Columns of a share, if at most `size` CTAs share out `cols` of them."""
  share = tiles.LEAST_COLUMNS
  while cols % share or cols // share > size:
    share += 8
  return share


_SCALAR = plgpu.Layout.WG_SPLAT(())


def _init(barrier: Ref) -> None:
  """Makes the eight bytes of `barrier` an mbarrier for one arrival a phase."""

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
  def init(_, barrier):
    mgpu.utils.inline_ptx(
        "mbarrier.init.shared::cta.b64 [$0], 1;", mgpu.utils.memref_ptr(barrier),
        predicate=_one_thread(), has_side_effects=True,
    )
    mgpu.utils.inline_ptx("fence.mbarrier_init.release.cluster;", has_side_effects=True)
    mgpu.utils.warpgroup_barrier()  # Another thread says that the inbox is free.

  init(barrier)


def _send(acc, inbox: Ref, barrier: Ref, rank, num_shares: int) -> None:
  """Sends each share of `acc` to its CTA; `rank` is this one's."""
  _, vectors, *_ = inbox.shape
  width = acc.shape[1] // num_shares
  vector_bytes = tiles.WG_THREADS * VECTOR * 4
  part_bytes = vectors * vector_bytes

  @plgpu.inline_mgpu(
      arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(), plgpu.RefType(), _SCALAR)
  )
  def send(_, acc, inbox, barrier, rank):
    rank = rank.registers.item()
    offset = arith.addi(
        arith.muli(rank, i32(part_bytes)), arith.muli(_thread(), i32(VECTOR * 4))
    )
    for share in range(num_shares):
      registers = acc[:, share * width : (share + 1) * width].registers.ravel()
      address = arith.addi(_address_in(share, inbox), offset)
      arrival = _address_in(share, barrier)
      for i in range(vectors):
        values = [
            vector.extract(pair, dynamic_position=[], static_position=[element])
            for pair in registers[2 * i : 2 * i + 2] for element in range(2)
        ]
        mgpu.utils.inline_ptx(
            "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32"
            f" [$0+{i * vector_bytes}], {{$1, $2, $3, $4}}, [$5];",
            address, *values, arrival, has_side_effects=True,
        )

  send(acc, inbox, barrier, rank)


def _receive(inbox: Ref, barrier: Ref, parity) -> None:
  """Waits until every part of this CTA's share is in its inbox."""
  num_bytes = 4 * inbox.size

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR))
  def receive(_, barrier, parity):
    address = mgpu.utils.memref_ptr(barrier)
    mgpu.utils.inline_ptx(
        f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {num_bytes};", address,
        predicate=_one_thread(), has_side_effects=True,
    )
    nvvm.mbarrier_try_wait_parity(address, parity.registers.item(), i32(10_000_000))

  receive(barrier, parity)


def _sum(inbox: Ref, shape: tuple[int, int]) -> jax.Array:
  """The sum of all parts in the inbox."""
  size, vectors, *_ = inbox.shape

  @plgpu.inline_mgpu(
      arg_types=(plgpu.RefType(),),
      return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, plgpu.Layout.WGMMA),
  )
  def add(_, inbox):
    index = lambda value: arith.constant(ir.IndexType.get(), value)
    thread = arith.index_cast(ir.IndexType.get(), _thread())
    vector_type = ir.VectorType.get((VECTOR,), ir.F32Type.get())
    registers = np.empty((2 * vectors,), dtype=object)
    for i in range(vectors):
      at = [index(i), thread, index(0)]
      parts = [vector.load(vector_type, inbox, [index(cta), *at]) for cta in range(size)]
      total = functools.reduce(arith.addf, parts)
      registers[2 * i] = mgpu.utils.vector_slice(total, slice(0, 2))
      registers[2 * i + 1] = mgpu.utils.vector_slice(total, slice(2, 4))
    return mgpu.FragmentedArray(
        _registers=registers.reshape(mgpu.WGMMA_LAYOUT.registers_shape(shape)),
        _layout=mgpu.WGMMA_LAYOUT, _is_signed=None,
    )

  return add(inbox)


def _address_in(cta: int, ref: ir.Value) -> ir.Value:
  """Address of what CTA `cta` of the cluster has in the place of `ref`."""
  return mgpu.utils.inline_ptx(
      "mapa.shared::cluster.u32 $0, $1, $2;", mgpu.utils.memref_ptr(ref), i32(cta),
      result_types=ir.IntegerType.get_signless(32),
  )


def _thread() -> ir.Value:
  """The thread's index within its warpgroup."""
  return arith.remui(mgpu.utils.thread_idx(), i32(tiles.WG_THREADS))


def _one_thread() -> ir.Value:
  return arith.cmpi(arith.CmpIPredicate.eq, _thread(), i32(0))
