"""Launches that may begin before the kernel in front of them has ended.

Hopper lets a kernel that says so begin while the one before it in its stream, or in its
graph, still runs: its CTAs take the SMs that become free, set up their barriers, and wait
until everything before them is done and to be seen (programmatic dependent launch; CUDA
C++ Programming Guide, 4.5). XLA launches its own kernels so. Those of ours that are
launched here wait before they touch anything in GMEM: whoever writes what they read, or
reads what they overwrite, has ended then, as the kernel in front has waited in the same
way. ptxas keeps loads behind the wait, but for those of what nobody is said to write
(`ld.global.nc`): there are none, see `register_loads`. The other kernels (`cotangents`
and `losses`, which change arrays in their places) do not ask to begin early, and begin
when all in front of them has ended.

They do not tell the kernel behind them to begin before they end. That shortened products
that follow one another by more (5% of 12 products of 8x4096x4096 on an H200 under JAX
0.12.0.1, in place of 2%), but let XLA's norms between products stand in the way (of 64
rows 1% more, in place of 2% less).

JAX 0.12 has this in CUDA graphs, as jit makes them, too. Under JAX 0.11 XLA puts each of
our kernels into its graph as a graph of its own, which begins when all before it has
ended.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu


def kernel(
    body: Callable[..., None], *, interpret: Any = None, **options: Any
) -> Callable[..., Any]:
  """`plgpu.kernel` of a body that waits first. Emulated kernels have none in front."""

  def wait_first(*gmem, **refs):
    if interpret is None:
      plgpu.griddepcontrol_wait()
    body(*gmem, **refs)

  return plgpu.kernel(wait_first, interpret=interpret, **options)
