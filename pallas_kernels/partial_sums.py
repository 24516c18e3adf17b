"""Adds up the partial sums of a product whose k is shared out, then the epilogue.

By operations of JAX, which XLA makes one kernel of: each element's parts are loaded at
once, in whole lines, and added in their order, so that every run gives the same bits.
A kernel of ours, which had its registers in wgmma's layout, took 0.7 to 3 us longer,
with 64 and more parts 4 to 8.
"""

from __future__ import annotations

import jax
from jax import lax
import jax.numpy as jnp

from pallas_kernels import accumulate, activations
from pallas_kernels.problem import Problem


def add_up(
    partials: jax.Array, others, problem: Problem, splits: int, *,
    transposed: bool = False,
) -> jax.Array | tuple[jax.Array, ...]:
  """Returns the result, or the results, of the problem.

  Args:
    partials: [batch * splits, rows, cols], float32; beyond m and n they do not count.
    others: the operands behind lhs and rhs.
    problem: what is to result.
    splits: parts of each element.
    transposed: whether the parts are those of the transposed product.
  """
  m, n = (problem.n, problem.m) if transposed else (problem.m, problem.n)
  parts = lax.reshape(partials, (problem.batch, splits, *partials.shape[1:]))
  total = _sum([parts[:, i, :m, :n] for i in range(splits)])
  if transposed:
    total = lax.transpose(total, (0, 2, 1))
  found = [x.astype(problem.out_dtype) for x in _epilogue(total, others, problem)]
  # A result is rounded, whatever follows: XLA drops conversions back and forth.
  found = lax.optimization_barrier(found)
  return tuple(found) if len(found) > 1 else found[0]


def _sum(parts) -> jax.Array:
  """The sum in order, with what rounding takes away of it given back at the end.

  Also where a part is larger than the sum before. It costs nothing here: the loads take
  longer.
  """
  total, rest = parts[0], jnp.zeros_like(parts[0])
  for part in parts[1:]:
    total, rest = accumulate.any_two_sum(total, rest, part)
  return total + accumulate.finite(rest)


def _epilogue(total: jax.Array, others, problem: Problem) -> list[jax.Array]:
  """The results, float32: see `epilogue`."""
  epilogue = problem.epilogue
  elements = [c.astype(jnp.float32) for c in others[: epilogue.num_c]]
  if epilogue.alpha != 1.0:
    total = total * jnp.float32(epilogue.alpha)
  if epilogue.slopes:
    slopes = activations.slopes(epilogue.activation, elements)
    return [total * slope for slope in slopes]
  if epilogue.has_bias:
    total = total + others[-1].astype(jnp.float32)
  out = activations.apply(epilogue.activation, total)
  for c in elements:
    out = out + c * jnp.float32(epilogue.beta)
  return [out, total] if epilogue.saves else [out]
