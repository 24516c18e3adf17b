"""Operands as they lie in memory, where the caller has transposed them just before.

XLA's own dot takes x.T as it takes x: it looks through the transposition. A kernel is a
call into which XLA does not look, and gets a transposed copy, which of a matrix that
meets a vector takes twice as long as the product, and in the backward pass another one
of its gradient. So a product asks of which array its operand is the transposition, and is
a product of that one: it binds transpose(x.T), which XLA makes nothing of, and so is the
gradient once the caller's transposition is transposed.

What is found is a hint and nothing depends on it: an array that has been computed, or
that comes as an argument of an inner jit, is taken as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax import lax

from jaxgemm.dims import Axes
from pallas_kernels import compat


def as_stored(arrays: Sequence, axes: Axes) -> tuple[list, Axes]:
  """Operands of the same axes before they were transposed, all in the same way.

  Args:
    arrays: one operand, or both rhs of a gated product.
    axes: a label for each of their axes.
  Returns: arrays whose transpositions these are, and a label for each of their axes.
  """
  perms = {compat.transposition(x) for x in arrays}
  if len(perms) != 1:
    return list(arrays), axes
  (perm,) = perms
  if perm is None:
    return list(arrays), axes
  inverse = tuple(map(perm.index, range(len(perm))))
  return [lax.transpose(x, inverse) for x in arrays], tuple(axes[i] for i in inverse)
