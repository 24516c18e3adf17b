"""scaled_matmul: products of 8-bit floating-point operands that have scales.

The kernel multiplies the 8-bit values and applies the scales on the way: those of rows,
columns and whole matrices to the finished sums, those of blocks of k to the sums of each
128 of k. What no kernel serves is computed by XLA, from the same values.

Source: "DeepSeek-V3 technical report" (2024) for the blocks; "FP8 formats for deep
learning" (2022) for e5m2 cotangents.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp

from jaxgemm.api import matmul
from jaxgemm.arguments import as_array, as_dtype, check_real
from jaxgemm.contexts import Target, current_target, is_batch_invariant, restored
from jaxgemm.contraction import named_kernel
from jaxgemm.primitive import explicit
from jaxgemm.quantisation import (
  FLOAT8,
  check_scale,
  dequantise,
  expand,
  num_blocks,
  quantise,
  rounded,
)
from jaxgemm.scaled_product import Scaled, scaled_product
from pallas_kernels import compat
from pallas_kernels.configs import Config
from pallas_kernels.problem import OUT_DTYPES, SCALE_BLOCK


@dataclasses.dataclass(frozen=True)
class _Options:
  """What is static of a call."""

  out_dtype: str
  dtype: str
  cotangent_dtype: str | None
  implementation: str | None
  config: Config | None
  batch_invariant: bool
  target: Target | None


def scaled_matmul(
    lhs: jax.Array, rhs: jax.Array, lhs_scale=1.0, rhs_scale=1.0, *,
    preferred_element_type=jnp.bfloat16, dtype="float8_e4m3fn", cotangent_dtype=None,
    implementation: str | None = None, config: Config | None = None,
) -> jax.Array:
  """Returns (lhs * lhs_scale) @ (rhs * rhs_scale), of 8-bit floating-point values.

  An operand of another floating-point dtype is first divided by its scale and rounded
  to `dtype`; its gradient is that of the product as if it had not been rounded
  (straight through). Scales are constants to derivatives.

  Args:
    lhs: [*batch, m, k]: float8_e4m3fn, float8_e5m2, or to be rounded.
    rhs: [k, n] or [*batch, k, n], likewise.
    lhs_scale: a number, or [*batch, ., .] with 1, m or one for every 128 of m, by 1 or
      one for every 128 of k (see jaxgemm.quantise).
    rhs_scale: the same of k and n: 1 or one for every 128 of k, by 1, n or one for
      every 128 of n.
    preferred_element_type: dtype of the result: bfloat16, float16 or float32. Sums are
      float32, promoted out of the tensor cores at least every 128 of k where a scale
      has blocks of k.
    dtype: what operands of other dtypes are rounded to.
    cotangent_dtype: None, or "float8_e5m2" for gradients that are products of 8-bit
      operands, too: the cotangent is quantised by rows, columns or blocks of 128.
    implementation, config: as for jaxgemm.matmul; "persistent" is the kernel.
  Returns: [*batch, m, n]. It has gradients of the first order in reverse mode alone.
  Raises:
    TypeError: k or the batches differ; the message names both shapes.
    ValueError: a dtype or scale is none of these, or the named kernel cannot serve.
  Example:
    (x8, sx), (w8, sw) = jaxgemm.quantise(x, block=(1, 128)), jaxgemm.quantise(
        w, block=(128, 128))
    y = jaxgemm.scaled_matmul(x8, w8, sx, sw)
  """
  lhs = as_array("scaled_matmul", "lhs", lhs)
  rhs = as_array("scaled_matmul", "rhs", rhs)
  shapes = f"lhs has shape {lhs.shape} and rhs {rhs.shape}"
  if lhs.ndim < 2 or rhs.ndim < 2:
    raise ValueError(f"scaled_matmul: {shapes}; both must be matrices or batches")
  if lhs.shape[-1] != rhs.shape[-2] or rhs.shape[:-2] not in ((), lhs.shape[:-2]):
    raise TypeError(
        f"scaled_matmul: {shapes}; k, the last dimension of lhs and the last but one of"
        " rhs, must be the same, and rhs a matrix or of the same batch"
    )
  check_operands("scaled_matmul", lhs, rhs, -2)
  dtypes = [
      known_dtype("scaled_matmul", name, value, known)
      for name, value, known in (
          ("preferred_element_type", preferred_element_type, OUT_DTYPES),
          ("dtype", dtype, FLOAT8),
          ("cotangent_dtype", cotangent_dtype, (None, *FLOAT8)),
      )
  ]
  scales = [
      scale_of("scaled_matmul", name, scale, x, k_axis)
      for name, scale, x, k_axis in (
          ("lhs_scale", lhs_scale, lhs, -1), ("rhs_scale", rhs_scale, rhs, -2)
      )
  ]
  options = _Options(
      *dtypes, named_kernel(implementation, config), config, is_batch_invariant(),
      current_target(),
  )
  return _scaled_matmul(*compat.vary_alike(lhs, rhs, *scales), options)


def check_operands(function: str, lhs, rhs, k_axis: int) -> None:
  """Raises ValueError unless both are of floating point, and one whole along k.

  Over explicit axes of a mesh, that is; XLA's partitioner adds up shares of k by itself.
  """
  for name, x in (("lhs", lhs), ("rhs", rhs)):
    if not jnp.issubdtype(x.dtype, jnp.floating):
      raise ValueError(f"{function}: {name} is {x.dtype}: want a floating-point dtype")
  types = jax.typeof(lhs), jax.typeof(rhs)
  if None not in (types[0].sharding.spec[-1], types[1].sharding.spec[k_axis]):
    raise ValueError(
        f"{function}: lhs is {types[0]} and rhs {types[1]}, with k over explicit axes of"
        " the mesh: what each device has is a part of the sum; use jax.shard_map and"
        " lax.psum, or jax.sharding.reshard"
    )


def known_dtype(function: str, name: str, value, known: Sequence) -> str | None:
  """The name of a dtype, or None; raises ValueError if it is not among `known`."""
  found = None if value is None else as_dtype(f"{function}: {name}", value).name
  if found not in known:
    raise ValueError(
        f"{function}: {name} {found} must be one of {', '.join(map(str, known))}"
    )
  return found


def scale_of(function: str, name: str, scale, x, k_axis: int) -> jax.Array:
  """The scale of x, float32, of as many dimensions; raises ValueError if it has none."""
  scale = as_array(function, name, scale)
  check_real(function, name, scale, "its operand", x.dtype)
  scale = scale.astype(jnp.float32)
  if scale.ndim == 0:
    scale = scale.reshape((1,) * x.ndim)
  check_scale(f"{function}: {name}", scale, x.shape)
  if scale.shape[k_axis] not in (1, num_blocks(x.shape[k_axis])):
    raise ValueError(
        f"{function}: {name} has shape {scale.shape}: one for every element of"
        f" k={x.shape[k_axis]} cannot be taken out of the sum"
    )
  return scale


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _scaled_matmul(lhs, rhs, lhs_scale, rhs_scale, options: _Options):
  return _forward(lhs, rhs, lhs_scale, rhs_scale, options)[0]


def _forward(lhs, rhs, lhs_scale, rhs_scale, options: _Options):
  values, tokens = in_8_bits(lhs, rhs, lhs_scale, rhs_scale, options.dtype)
  out = _multiply(*values, lhs_scale, rhs_scale, options)
  return out, (*values, lhs_scale, rhs_scale, *tokens)


def in_8_bits(lhs, rhs, lhs_scale, rhs_scale, dtype: str):
  """Both operands in 8 bits, and arrays without elements that carry their dtypes."""
  values = [
      x if x.dtype.name in FLOAT8 else rounded(x, scale, dtype)
      for x, scale in ((lhs, lhs_scale), (rhs, rhs_scale))
  ]
  return values, [jnp.zeros((0,), x.dtype) for x in (lhs, rhs)]


def _backward(options: _Options, saved, ct):
  lhs, rhs, lhs_scale, rhs_scale, *tokens = saved
  if options.cotangent_dtype is None:
    multiply = functools.partial(
        matmul, preferred_element_type=jnp.float32, implementation=_of_gradients(options)
    )
    with restored(options.target, options.batch_invariant):
      lhs_ct = multiply(
          ct, _transposed(dequantise(rhs, rhs_scale, ct.dtype)),
          out_sharding=_explicit(lhs),
      )
    with restored(options.target, False):  # A sum over all rows.
      rhs_ct = _summed_matmul(multiply, dequantise(lhs, lhs_scale, ct.dtype), ct, rhs)
  else:
    lhs_ct, rhs_ct = _narrow_gradients(options, lhs, rhs, lhs_scale, rhs_scale, ct)
  grads = []
  for x_ct, scale, token in (
      (lhs_ct, lhs_scale, tokens[0]), (rhs_ct, rhs_scale, tokens[1])
  ):
    if token.dtype.name in FLOAT8:  # What is asked for is that of the values.
      x_ct = x_ct * expand(scale, x_ct.shape)
    grads.append(x_ct.astype(token.dtype))
  return (*grads, jnp.zeros_like(lhs_scale), jnp.zeros_like(rhs_scale))


_scaled_matmul.defvjp(_forward, _backward)


def _of_gradients(options: _Options) -> str | None:
  """The implementation of gradients: XLA's where XLA was named, else the plan's."""
  return "xla" if options.implementation == "xla" else None


def _summed_matmul(multiply, lhs, ct, rhs):
  """lhs^T ct, the gradient of rhs: summed over the batch where that has none."""
  if rhs.ndim == 2:
    lhs, ct = map(_as_matrix, (lhs, ct))
  return multiply(_transposed(lhs), ct, out_sharding=_explicit(rhs))


def _explicit(x: jax.Array):
  """The sharding of x, and of its gradient, over explicit axes of a mesh; or None."""
  return explicit(jax.typeof(x).sharding)


def _narrow_gradients(options: _Options, lhs, rhs, lhs_scale, rhs_scale, ct):
  """Both gradients as products of 8-bit operands.

  A scale that lies along what is now summed joins the cotangent before that is
  quantised, unless it has blocks: then so has the cotangent, and lhs is quantised anew.
  """
  narrow, shape = options.cotangent_dtype, lhs.shape
  options = dataclasses.replace(
      options, out_dtype="float32", implementation=_of_gradients(options), config=None
  )
  if not rhs.ndim - 2:
    lhs_scale = jnp.broadcast_to(
        lhs_scale, (*lhs.shape[:-2], *lhs_scale.shape[-2:])
    )
    lhs_scale = per_row(lhs_scale, lhs.shape[-2])
    lhs, ct, lhs_scale = map(_as_matrix, (lhs, ct, lhs_scale))
  of_rhs = dataclasses.replace(options, batch_invariant=False)  # A sum over all rows.
  one = jnp.ones((1,) * lhs.ndim, jnp.float32)
  if lhs_scale.shape[-1] == 1 and rhs_scale.shape[-2] == 1:
    by_rows, rows = quantise(ct * expand(rhs_scale, ct.shape), narrow, block=(1, -1))
    by_cols, cols = quantise(ct * expand(lhs_scale, ct.shape), narrow, block=(-1, 1))
    return (
        _multiply(by_rows, _transposed(rhs), rows, one, options).reshape(shape),
        _multiply(_transposed(lhs), by_cols, one, cols, of_rhs),
    )
  by_rows, rows = quantise(ct, narrow, block=(1, SCALE_BLOCK))
  blocks, scale = quantise(ct, narrow, block=(SCALE_BLOCK, SCALE_BLOCK))
  anew, anew_scale = quantise(
      _transposed(dequantise(lhs, lhs_scale)), lhs.dtype, block=(1, SCALE_BLOCK)
  )
  if rhs_scale.shape[-1] not in (1, num_blocks(rhs.shape[-1])):
    # One of each column, along which this product sums: by blocks, too.
    rhs, rhs_scale = quantise(
        dequantise(rhs, rhs_scale), rhs.dtype, block=(SCALE_BLOCK, SCALE_BLOCK)
    )
  other, other_scale = _transposed(rhs), _transposed(rhs_scale)
  if other_scale.shape[-2] == 1 and other.shape[-2] > SCALE_BLOCK:
    other_scale = jnp.repeat(other_scale, num_blocks(other.shape[-2]), axis=-2)
  return (
      _multiply(by_rows, other, rows, other_scale, options).reshape(shape),
      _multiply(anew, blocks, anew_scale, scale, of_rhs),
  )


# -- From values to a kernel -------------------------------------------------------


def _multiply(lhs, rhs, lhs_scale, rhs_scale, options: _Options) -> jax.Array:
  """The product of 8-bit values, whatever their batch."""
  *batch, m, k = lhs.shape
  n = rhs.shape[-1]
  rows = per_row(jnp.broadcast_to(lhs_scale, (*batch, *lhs_scale.shape[-2:])), m)
  if rhs.ndim == 2:  # One rhs for all: the batch joins the rows.
    lhs, rhs, rows, cols = (
        _as_matrix(x)[None] for x in (lhs, rhs, rows, rhs_scale)
    )
  else:
    cols = jnp.broadcast_to(rhs_scale, (*batch, *rhs_scale.shape[-2:]))
    lhs, rhs, rows, cols = (
        x.reshape(math.prod(batch), *x.shape[-2:]) for x in (lhs, rhs, rows, cols)
    )
  scaling, rows, cols = factors(rows, cols, n)
  shared = (False, False)
  if scaling == "rows":  # No pass makes many of one.
    shared = lhs_scale.size == 1, rhs_scale.size == 1
    rows, cols = (
        jnp.broadcast_to(scale.reshape(()), lhs.shape[:1]) if one else several
        for scale, several, one in zip(
            (lhs_scale, rhs_scale), (rows, cols), shared, strict=True
        )
    )
  facts = Scaled(
      scaling, options.out_dtype, options.implementation, options.config,
      options.batch_invariant, options.target, shared,
  )
  out = scaled_product(lhs, rhs, rows, cols, facts)
  return out.reshape(*batch, m, n)


def factors(
    rows: jax.Array, cols: jax.Array, n: int
) -> tuple[Literal["rows", "blocks"], jax.Array, jax.Array]:
  """What has factors, and these as the kernel takes them.

  Args:
    rows: [batch, m, blocks of k, or 1].
    cols: [batch, blocks of k, or 1, .], with 1, n or one for every 128 of n.
  Returns: "rows" with [batch, m] and [batch, n], or "blocks" with [batch, blocks, m] and
    [batch, blocks, .].
  """
  k_blocks = max(rows.shape[-1], cols.shape[-2])
  if k_blocks == 1:
    cols = jnp.broadcast_to(expand(cols, (1, 1, n)), (*cols.shape[:1], 1, n))[:, 0]
    return "rows", rows[..., 0], cols
  rows = jnp.broadcast_to(rows, (*rows.shape[:2], k_blocks)).swapaxes(1, 2)
  cols = jnp.broadcast_to(cols, (cols.shape[0], k_blocks, cols.shape[2]))
  if cols.shape[2] == 1:
    cols = jnp.repeat(cols, num_blocks(n), axis=2)
  return "blocks", rows, cols


def _as_matrix(x: jax.Array) -> jax.Array:
  """x with all dimensions but the last as one."""
  return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def per_row(scale: jax.Array, m: int) -> jax.Array:
  """A scale of blocks of rows as one of rows."""
  if scale.shape[-2] == 1:
    return jnp.repeat(scale, m, axis=-2)
  return expand(scale, (m, scale.shape[-1]))


def _transposed(x: jax.Array) -> jax.Array:
  return jnp.swapaxes(x, -1, -2)
