"""scaled_ragged_dot: products in groups of rows, of 8-bit values that have scales.

As `scaled` does it for one matrix: the kernel applies the scales on the way.

Source: the "m-grouped contiguous" products of DeepGEMM; "DeepSeek-V3 technical report"
(2024) for blocks of 128.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxgemm.arguments import as_array
from jaxgemm.contexts import Target, current_target, is_batch_invariant
from jaxgemm.dims import are_known
from jaxgemm.quantisation import FLOAT8, dequantise, expand
from jaxgemm.ragged import check_shapes, kernel_of_groups
from jaxgemm.ragged_product import Ragged, bind_scaled, gradients, plan_of
from jaxgemm.scaled import (
  check_operands,
  factors,
  in_8_bits,
  known_dtype,
  per_row,
  scale_of,
)
from pallas_kernels.configs import Config
from pallas_kernels.problem import OUT_DTYPES

_NAME = "scaled_ragged_dot"


@dataclasses.dataclass(frozen=True)
class _Options:
  """What is static of a call."""

  transposed: bool
  out_dtype: str
  dtype: str
  implementation: str | None
  config: Config | None
  batch_invariant: bool
  target: Target | None


def scaled_ragged_dot(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, lhs_scale=1.0,
    rhs_scale=1.0, *, transposed: bool = False, preferred_element_type=jnp.bfloat16,
    dtype="float8_e4m3fn", implementation: str | None = None,
    config: Config | None = None,
) -> jax.Array:
  """Returns each row of lhs * lhs_scale times the matrix of its group of rhs * rhs_scale.

  Of 8-bit floating-point values, as `scaled_matmul`, and of groups, as `ragged_dot`. An
  operand of another floating-point dtype is first divided by its scale and rounded to
  `dtype`. Gradients are those of the product as if nothing had been rounded (straight
  through), by products as of `ragged_dot`, of the values times their scales, rounded to
  the cotangent's dtype. Scales are constants to derivatives. The gradient of an operand
  in 8 bits is of its dtype: NaN or infinite where that has no such number.

  Args:
    lhs: [m, k], sorted by group: float8_e4m3fn, float8_e5m2, or to be rounded.
    rhs: [groups, k, n], likewise.
    group_sizes: [groups], integers: the rows of each.
    lhs_scale: a number, or [., .] with 1, m or one for every 128 of m, by 1 or one for
      every 128 of k (see jaxgemm.quantise).
    rhs_scale: a number, or [groups or 1, ., .] with 1 or one for every 128 of k, by 1, n
      or one for every 128 of n; of transposed rhs in the order of its dimensions.
    transposed: whether rhs is [groups, n, k], which is how the tensor cores read 8 bits:
      a pass over all matrices transposes the other.
    preferred_element_type: dtype of the result: bfloat16, float16 or float32. Sums are
      float32, promoted out of the tensor cores at least every 128 of k where a scale
      has blocks of k.
    dtype: what operands of other dtypes are rounded to.
    implementation, config: as for jaxgemm.ragged_dot.
  Returns: [m, n]; rows that no group has are zeros. It has gradients of the first order
    in reverse mode alone.
  Raises:
    TypeError: a shape is none of these; the message names the argument.
    ValueError: a dtype or scale is none of these, or the named kernel cannot serve.
  Example:
    x8, sx = jaxgemm.quantise(x, block=(1, 128))
    w8, sw = jaxgemm.quantise(w, block=(128, 128))       # [experts, n, k]
    y = jaxgemm.scaled_ragged_dot(x8, w8, sizes, sx, sw, transposed=True)
  """
  lhs, rhs, group_sizes = (
      as_array(_NAME, name, x)
      for name, x in (("lhs", lhs), ("rhs", rhs), ("group_sizes", group_sizes))
  )
  check_shapes(_NAME, lhs, rhs, group_sizes, transposed)
  k_axis = -1 if transposed else -2
  check_operands(_NAME, lhs, rhs, k_axis)
  options = _Options(
      transposed,
      known_dtype(_NAME, "preferred_element_type", preferred_element_type, OUT_DTYPES),
      known_dtype(_NAME, "dtype", dtype, FLOAT8),
      kernel_of_groups(_NAME, implementation, config), config, is_batch_invariant(),
      current_target(),
  )
  lhs_scale = scale_of(_NAME, "lhs_scale", lhs_scale, lhs, -1)
  rhs_scale = scale_of(_NAME, "rhs_scale", rhs_scale, rhs, k_axis)
  return _scaled(lhs, rhs, group_sizes, lhs_scale, rhs_scale, options)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _scaled(lhs, rhs, group_sizes, lhs_scale, rhs_scale, options: _Options):
  return _forward(lhs, rhs, group_sizes, lhs_scale, rhs_scale, options)[0]


def _forward(lhs, rhs, group_sizes, lhs_scale, rhs_scale, options: _Options):
  values, tokens = in_8_bits(lhs, rhs, lhs_scale, rhs_scale, options.dtype)
  out = _multiply(*values, group_sizes, lhs_scale, rhs_scale, options)
  return out, (*values, group_sizes, lhs_scale, rhs_scale, *tokens)


def _backward(options: _Options, saved, ct):
  lhs, rhs, group_sizes, lhs_scale, rhs_scale, *tokens = saved
  scales = lhs_scale, rhs_scale
  wide = [
      dequantise(x, scale, ct.dtype)
      for x, scale in zip((lhs, rhs), scales, strict=True)
  ]
  facts = _facts(options, out_dtype=ct.dtype.name, scaling="none")
  found = gradients(ct, *wide, group_sizes, facts)
  grads = []
  for x_ct, scale, token in zip(found, scales, tokens, strict=True):
    if token.dtype.name in FLOAT8:  # What is asked for is that of the values.
      x_ct = x_ct.astype(jnp.float32) * expand(scale, x_ct.shape)
    grads.append(x_ct.astype(token.dtype))
  of_sizes = np.zeros(group_sizes.shape, jax.dtypes.float0)
  return (*grads, of_sizes, *map(jnp.zeros_like, scales))


_scaled.defvjp(_forward, _backward)


def _facts(options: _Options, **fields) -> Ragged:
  return Ragged(
      sums=False, transposed=options.transposed, precision=None,
      implementation=options.implementation, config=options.config, must_serve=True,
      batch_invariant=options.batch_invariant, target=options.target, **fields,
  )


def _multiply(lhs, rhs, group_sizes, lhs_scale, rhs_scale, options: _Options):
  """The product of 8-bit values."""
  m, groups = lhs.shape[0], rhs.shape[0]
  cols = rhs_scale.swapaxes(1, 2) if options.transposed else rhs_scale
  cols = jnp.broadcast_to(cols, (groups, *cols.shape[1:]))
  n = rhs.shape[1 if options.transposed else 2]
  scaling, rows, cols = factors(per_row(lhs_scale, m)[None], cols, n)
  facts = _facts(options, out_dtype=options.out_dtype, scaling=scaling)
  operands = lhs, rhs, group_sizes, rows[0], cols
  if facts.implementation not in (None, "xla") or facts.batch_invariant:
    if are_known(size for x in operands for size in x.shape):
      plan_of(*operands, facts=facts)  # Raises here, where the user's call is.
  return bind_scaled(*operands, facts=facts)
