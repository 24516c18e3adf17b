"""Which form of a problem is planned, and its arrays in that form.

A product of one row or column is planned as a row times rows of k (Problem.canonical),
from the same arrays. A batch that shares an operand is planned as it is, with tiles of
each product, for which the shared operand is read again; or as one product
(Problem.merged), for which XLA may have to transpose arrays. The estimates decide.
"""

from __future__ import annotations

import functools

from jax import lax

from jaxgemm import heuristics
from jaxgemm.cost_constants import MODEL
from jaxgemm.device import Device, supported
from pallas_kernels.problem import Problem


@functools.lru_cache(maxsize=4096)
def form(problem: Problem, device: Device | None) -> Problem:
  """The form of a problem that is planned."""
  problem = problem.canonical
  merged = problem.merged
  if merged is None or not supported(device):
    return problem
  alone, together = (heuristics.candidates(each, device) for each in (problem, merged))
  if not alone or not together:
    return problem
  moved = transposed_bytes(problem)
  passes_us = sum(MODEL.pass_launch + each / MODEL.pass_rate for each in moved.values())
  return merged if together[0].time_us + passes_us <= alone[0].time_us else problem


def transposed_bytes(problem: Problem) -> dict[str, int]:
  """What is transposed around the merged problem, and the bytes that this moves."""
  found = {}
  if problem.lhs_batched and problem.lhs_layout == "m-major":
    found["lhs"] = 2 * problem.batch * problem.m * problem.k * problem.itemsize
  if problem.rhs_batched and problem.rhs_layout == "n-major":
    found["rhs"] = 2 * problem.batch * problem.k * problem.n * problem.itemsize
  if problem.rhs_batched and problem.m > 1:
    size = problem.batch * problem.m * problem.n
    found["the result"] = 2 * size * problem.out_itemsize
  return found


def operands(problem: Problem, planned: Problem, lhs, rhs):
  """lhs and rhs of the problem, of any shapes, as the planned form of it has them."""
  if planned != problem:
    canonical = problem.canonical
    if canonical.n != problem.n:  # It is the transposed one.
      lhs, rhs = rhs, lhs
    problem = canonical
  lhs, rhs = lax.reshape(lhs, problem.lhs_shape), lax.reshape(rhs, problem.rhs_shape)
  if planned != problem:
    lhs = _beside_k(lhs) if problem.lhs_layout == "m-major" else lhs
    rhs = _beside_k(rhs) if problem.rhs_layout == "n-major" else rhs
  return lax.reshape(lhs, planned.lhs_shape), lax.reshape(rhs, planned.rhs_shape)


def result(problem: Problem, planned: Problem, found):
  """What a kernel found of the planned form, as the result of the problem lies."""
  canonical = problem.canonical
  if planned in (problem, canonical) or canonical.lhs_batched:
    return found
  shape = canonical.m, canonical.batch, canonical.n
  return lax.transpose(lax.reshape(found, shape), (1, 0, 2))


def _beside_k(x):
  """[batch, k, .] as [k, batch, .]."""
  return lax.transpose(x, (1, 0, 2))
