"""Candidates for products in groups of rows, whose sizes are not known before they run.

A config takes as long as for a batch of equal products, by `cost_model`, of as many row
tiles as groups of about the mean size have on average: half a tile of each group is in
vain, but every group has one.
"""

from __future__ import annotations

import dataclasses
import functools
import math

from jaxgemm import cost_model, exactness, heuristics
from jaxgemm.device import Device
from jaxgemm.heuristics import Candidate
from pallas_kernels import GROUPED_KERNELS, grouped_m, persistent, tiles
from pallas_kernels.configs import PersistentConfig
from pallas_kernels.problem import Problem


@functools.lru_cache(maxsize=256)
def candidates(problem: Problem, device: Device) -> tuple[Candidate, ...]:
  """Every candidate for a problem that is `grouped`, the fastest by estimate first."""
  kernel = f"grouped_{problem.grouped}"
  rows = problem.m if problem.grouped == "m" else problem.k
  mean = rows / problem.batch
  what = f"estimated for {problem.batch} groups of about {mean:.3g} rows"
  configs = dict.fromkeys(
      config
      for size in (mean, 2 * mean)  # Of larger groups, too: tiles fit no size.
      for config in _configs(problem, _batch(problem, math.ceil(size)), device)
  )
  found = []
  for config in configs:
    if GROUPED_KERNELS[kernel].supports(problem, config) is None:
      time_us = _time_us(problem, config, mean, device)
      found.append(Candidate(kernel, config, time_us, what))
  return tuple(sorted(found, key=lambda each: each.time_us))


def _time_us(
    problem: Problem, config: PersistentConfig, mean: float, device: Device
) -> float:
  """Of groups that have `mean` rows on average."""
  step = grouped_m.tile_rows(config) if problem.grouped == "m" else config.tile_k
  count = max(1.0, mean / step + 0.5)
  whole, part = math.floor(count), count % 1

  def of(count: int) -> float:
    batch = _batch(problem, count * step)
    return cost_model.estimate(batch, persistent.NAME, config, device).time_us

  return of(whole) if not part else (1 - part) * of(whole) + part * of(whole + 1)


def _batch(problem: Problem, rows: int) -> Problem:
  """A batch of products, each of a group of so many rows."""
  return dataclasses.replace(
      problem, grouped="", lhs_batched=True, rhs_batched=True, **{problem.grouped: rows}
  )


def _configs(
    problem: Problem, batch: Problem, device: Device
) -> list[PersistentConfig]:
  """Those that the batch has, for groups."""
  found = [
      each.config for each in heuristics.candidates(batch, device)
      if each.kernel == persistent.NAME
  ]
  # Promotion follows from all rows of sums: what a group has is data.
  steps = tiles.cdiv(problem.k, tiles.swizzle_elems(problem.dtype))
  promote = exactness.promotion(problem, steps)
  found = [dataclasses.replace(config, promote=promote) for config in found]
  if problem.grouped == "k":
    return found
  # Which row tiles are whose is data: their order is `grouped_grid`'s.
  order = dict(grid_minor="m", grid_width=tiles.GRID_WIDTH)
  return [dataclasses.replace(config, **order) for config in found]
