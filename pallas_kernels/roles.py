"""The roles of a CTA's warpgroups: those that multiply, and those that load."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

# What a thread keeps, by the number of consumers: all CTA's threads share 64 K.
PRODUCER_REGISTERS = {1: 40, 2: 40, 3: 32}
CONSUMER_REGISTERS = {1: 232, 2: 232, 3: 160}


def specialise(
    wg: Any, num_consumers: int, produce: Callable[[], None],
    consume: Callable[[], None], *, only_copies: bool,
    share_k: Callable[[], None] | None = None,
) -> None:
  """Runs `consume` in the first `num_consumers` warpgroups, `produce` in the others.

  But `share_k`, if it is given, in the last of the consumers. A producer that
  `only_copies`, through TMA, gives most of its registers to the others: to consumers,
  whose accumulators need them. One of its warps does all the work: four would have to
  meet at a barrier before each copy.
  """

  @pl.when(wg >= num_consumers)
  def _produce():
    if only_copies:
      plgpu.set_max_registers(PRODUCER_REGISTERS[num_consumers], action="decrease")
      plgpu.warp_map(lambda warp: pl.when(warp == 0)(produce))
    else:
      produce()

  def work(does: Callable[[], None]) -> None:
    if only_copies:
      plgpu.set_max_registers(CONSUMER_REGISTERS[num_consumers], action="increase")
    does()

  last = num_consumers - 1
  if share_k is None:
    pl.when(wg < num_consumers)(lambda: work(consume))
  else:
    pl.when(wg < last)(lambda: work(consume))
    pl.when(wg == last)(lambda: work(share_k))
