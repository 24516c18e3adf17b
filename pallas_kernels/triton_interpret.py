"""The portable kernel in Triton's interpreter: its numbers, on any machine.

The interpreter runs the CTAs of a grid one after the other with NumPy. It knows
nothing of threads, of shared memory or of a race. It wants tensors of torch, of
which it asks no more than `_HostArray` has; and it keeps bfloat16 as integers that
it cannot multiply, so that every operand is widened to float32 here, which is exact.
"""

from __future__ import annotations

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
from triton.runtime.interpreter import InterpretedFunction

from pallas_kernels.triton_kernel import jaxgemm_triton


def run(inputs, out: jax.ShapeDtypeStruct, grid: int, constants) -> jax.Array:
  """Returns what the kernel stores, for concrete inputs lhs, rhs and c."""
  arrays = [np.ascontiguousarray(x, np.float32) for x in inputs]
  # What the kernel does not store stays NaN.
  arrays.append(np.full(out.shape, np.nan, np.float32))
  _interpreted_kernel()[(grid,)](*map(_HostArray, arrays), **constants)
  return jnp.asarray(arrays[-1]).astype(out.dtype)


@functools.cache
def _interpreted_kernel() -> InterpretedFunction:
  """The kernel with globals of its own, to which the interpreter adds many."""
  kernel = jaxgemm_triton.fn
  own_globals = {**kernel.__globals__, "range": _range}
  copy = types.FunctionType(kernel.__code__, own_globals, kernel.__name__)
  return InterpretedFunction(functools.update_wrapper(copy, kernel))


def _range(*bounds) -> range:
  """range of scalars, which are arrays of one element in the interpreter.

  Triton 3.6 makes an int of such an array, which NumPy 2.5 refuses.
  """
  return range(*(x.handle.data.item() for x in bounds))


class _HostArray:
  """A NumPy array with as much of a torch tensor as the interpreter asks for."""

  def __init__(self, array: np.ndarray):
    self.array = array
    self.dtype = array.dtype.name

  def data_ptr(self) -> int:
    return self.array.ctypes.data

  def untyped_storage(self) -> _HostArray:
    return self

  def cpu(self) -> _HostArray:
    return self

  def new_empty(self, *_, **__) -> _HostArray:
    return self

  def storage_offset(self) -> int:
    return 0

  def size(self) -> tuple[int, ...]:
    return self.array.shape

  def stride(self) -> tuple[int, ...]:
    return self.array.strides

  def set_(self, *_) -> None:
    """The host's copy is the array itself: there is nothing to set."""

  def copy_(self, _) -> None:
    """Nor to copy back."""
