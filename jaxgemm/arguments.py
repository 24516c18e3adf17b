"""What a caller hands in, and the errors that name what is wrong with it."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_SCALARS = (np.generic, bool, int, float, complex)


def as_array(function: str, name: str, x: Any) -> jax.Array:
  """x as an array of numbers; TypeError, with the argument's name, if it is none."""
  if isinstance(x, jax.Array):
    check_numbers(function, name, x.dtype)
    return x
  if isinstance(x, np.ndarray):
    check_numbers(function, name, x.dtype)  # JAX would name no argument.
  elif not (isinstance(x, _SCALARS) or hasattr(x, "__jax_array__")):
    raise TypeError(
        f"{function}: {name} is of type {type(x).__name__}; it must be an array"
    )
  return jnp.asarray(x)


def check_numbers(function: str, name: str, dtype: Any) -> None:
  """Raises TypeError unless the dtype of an argument is one of numbers, or bool."""
  if not _is_numeric(dtype):
    raise TypeError(f"{function}: {name} is of dtype {dtype}; it must be of numbers")


@functools.lru_cache(maxsize=256)
def _is_numeric(dtype: Any) -> bool:
  return jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool_)


def as_dtype(name: str, value: Any) -> np.dtype:
  """The dtype that an argument names; TypeError if it names none."""
  try:
    dtype = jnp.dtype(value)
  except TypeError:
    raise TypeError(f"{name}={value!r} is no dtype") from None
  if not _is_numeric(dtype):
    raise TypeError(f"{name}={value!r} is no dtype of numbers")
  return dtype


def common_dtype(function: str, hint: str = "", **operands: Any) -> np.dtype:
  """The dtype that JAX promotes two arrays, or dtypes, to; by their arguments' names.

  Raises:
    ValueError: there is none. JAX's own error names no argument.
  """
  try:
    return jnp.result_type(*operands.values())
  except ValueError:
    (one, its), (other, others) = (
        (name, getattr(x, "dtype", x)) for name, x in operands.items()
    )
    raise ValueError(
        f"{function}: {one} is {its} and {other} {others}, which JAX promotes to no"
        f" common dtype: convert one of them{hint}"
    ) from None


def at_least_float32(dtype: np.dtype) -> np.dtype:
  """The dtype, or float32 if that is wider or the dtype one of integers."""
  if jnp.issubdtype(dtype, jnp.inexact) and dtype.itemsize >= 4:
    return dtype
  return np.dtype(np.float32)


def as_factor(function: str, name: str, factor: Any) -> float | jax.Array:
  """A float, if the factor is known where it is traced; else an array."""
  if isinstance(factor, (int, float, np.integer, np.floating)):
    try:
      return float(factor)
    except OverflowError:
      raise ValueError(f"{function}: {name} is an integer beyond float64") from None
  if isinstance(factor, str | None):
    raise TypeError(f"{function}: {name}={factor!r} must be a number or an array")
  return as_array(function, name, factor)


def times(factor: float | jax.Array, x: jax.Array) -> jax.Array:
  """factor * x; of integers exactly, where the factor is a known integer."""
  if isinstance(factor, float) and factor == 1.0:
    return x
  exact = isinstance(factor, float) and factor.is_integer()
  if exact and jnp.issubdtype(x.dtype, jnp.integer):
    return int(factor) * x
  return factor * x


def check_real(function: str, name: str, x: Any, of: str, dtype: Any) -> None:
  """Raises TypeError if x is complex and `of`, which takes it in, is not."""
  dtype = np.dtype(dtype)
  if jnp.iscomplexobj(x) and not jnp.issubdtype(dtype, np.complexfloating):
    raise TypeError(
        f"{function}: {name} is complex, and {of} {dtype.name}: the imaginary part"
        " would be lost"
    )


def check_broadcasts(
    function: str, name: str, x: jax.Array, of: str, shape: tuple[int, ...]
) -> None:
  """Raises ValueError unless x broadcasts to `shape`, that of `of`."""
  try:
    broadcasts = jnp.broadcast_shapes(x.shape, shape) == shape
  except ValueError:
    broadcasts = False
  if not broadcasts:
    raise ValueError(
        f"{function}: {name} has shape {x.shape}, which does not broadcast to {shape},"
        f" that of {of}"
    )
