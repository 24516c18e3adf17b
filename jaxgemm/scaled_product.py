"""scaled_p: the product of 8-bit values with the factors of rows, columns or blocks of k.

  out[b, m, n] = sum_k lhs * rhs, times rows[b, m] * cols[b, n]
  out[b, m, n] = sum over blocks q of k of their sum * rows[b, q, m] * cols[b, q, n / 128]

Planned where it is lowered, for one device or for its shards, as gemm_p is. It has no
derivatives: `scaled` gives those of the values.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
from jax import lax
import jax.numpy as jnp

from jaxgemm import plan as plans
from jaxgemm import planned
from jaxgemm.contexts import Target, device_of
from jaxgemm.dims import Dims, are_known
from jaxgemm.lowering import launched
from jaxgemm.primitive import result_type
from jaxgemm.product import Product
from jaxgemm.quantisation import dequantise, num_blocks
from jaxgemm.recording import record, record_plan
from pallas_kernels.configs import Config
from pallas_kernels.problem import SCALE_BLOCK, Epilogue, Problem

ALGORITHMS = {
    ("float8_e4m3fn", "float8_e4m3fn"): "e4m3_f32",
    ("float8_e5m2", "float8_e5m2"): "e5m2_f32",
    ("float8_e4m3fn", "float8_e5m2"): "e4m3_e5m2_f32",
    ("float8_e5m2", "float8_e4m3fn"): "e5m2_e4m3_f32",
}


@dataclasses.dataclass(frozen=True)
class Scaled:
  """The parameters of scaled_p, whose operands are lhs, rhs, rows and cols.

  Attributes:
    scaling: what has factors: "rows" and columns, or "blocks" of k.
    shared: whether all rows have one factor, and all columns: rows or cols then lack
      that dimension.
    out_dtype: dtype of the result, by name.
    implementation, config: as in jaxgemm.matmul.
    batch_invariant: whether a row's result must not depend on other rows.
    target: the device to plan for; None for the device that runs it.
    beside_collectives: whether those of other devices may run at the same time.
  """

  scaling: Literal["rows", "blocks"]
  out_dtype: str
  implementation: str | None
  config: Config | None
  batch_invariant: bool
  target: Target | None
  shared: tuple[bool, bool] = (False, False)
  beside_collectives: bool = False

  whole = ""
  result = "bmn"

  def operands(self, count: int) -> tuple[str, ...]:
    """The dimensions of the operands: q are blocks of k, p those of n."""
    factors = {"rows": ("bm", "bn"), "blocks": ("bqm", "bqp")}[self.scaling]
    rows, cols = (
        "b" if shared else dims
        for shared, dims in zip(self.shared, factors, strict=True)
    )
    return ("bmk", "bkn", rows, cols)[:count]


def scaled_product(lhs, rhs, rows, cols, facts: Scaled) -> jax.Array:
  """The product of lhs [b, m, k] and rhs [b, k, n], by its factors.

  Raises:
    ValueError: the named kernel, or one that is batch invariant, cannot serve.
  """
  operands = lhs, rhs, rows, cols
  if facts.implementation is not None or facts.batch_invariant:
    if are_known(size for x in operands for size in x.shape):
      _plan(facts, *operands)  # Raises here, where the user's call is.
  return scaled_p.bind(*operands, facts=facts)


def _plan(facts: Scaled, lhs, rhs, rows, cols) -> plans.Plan:
  del rows
  (batch, m, k), n = lhs.shape, rhs.shape[2]
  problem = Problem(
      m, n, k, batch, dtype=lhs.dtype.name, out_dtype=facts.out_dtype,
      algorithm=ALGORITHMS[lhs.dtype.name, rhs.dtype.name],
      epilogue=Epilogue(scaling=facts.scaling),
  )
  reason = why_not_scales(facts.scaling, cols.shape[2:], n)
  if reason:
    if facts.batch_invariant:
      raise ValueError(f"batch_invariant: no kernel serves: {reason}")
    if facts.implementation not in (None, "xla"):
      raise ValueError(
          f"implementation {facts.implementation!r} cannot serve: {reason}"
      )
    return plans.Plan("xla", None, "fallback", reason, problem)
  return plans.make_plan(
      problem, device_of(facts.target), implementation=facts.implementation,
      config=facts.config, batch_invariant=facts.batch_invariant,
  )


def why_not_scales(scaling: str, columns: tuple[int, ...], n: int) -> str:
  """Why no kernel takes scales of rhs with so many columns, or ""."""
  if scaling != "blocks" or columns == (num_blocks(n),):
    return ""
  return (
      f"rhs_scale has blocks of k, and {columns[0]} columns where the kernel wants one"
      f" for every {SCALE_BLOCK}"
  )


def _on_one_device(*operands, facts: Scaled) -> jax.Array:
  """By the planned kernel, or XLA's products."""
  plan = _plan(facts, *operands)
  record_plan(plan)
  if facts.implementation is None:
    record(plan.problem, device_of(facts.target))
  if plan.kernel == "xla":
    return _by_xla(*operands, facts=facts)
  return launched(plan, operands, facts)


def _by_xla(lhs, rhs, rows, cols, *, facts: Scaled) -> jax.Array:
  """The same from XLA's products."""
  numbers = (((2,), (1,)), ((0,), (0,)))
  if facts.scaling == "rows":
    out = lax.dot_general(lhs, rhs, numbers, preferred_element_type=jnp.float32)
    out = out * rows.reshape(rows.shape[0], -1, 1) * cols.reshape(cols.shape[0], 1, -1)
  else:
    out = lax.dot_general(
        dequantise(lhs, rows.swapaxes(1, 2)), dequantise(rhs, cols), numbers,
        precision=lax.Precision.HIGHEST,
    )
  return out.astype(facts.out_dtype)


def _abstract_eval(lhs, rhs, rows, cols, *, facts: Scaled):
  del rows, cols
  return result_type(lhs, rhs, Product(Dims(b=1), facts.out_dtype, "xla"))


def _batch(operands, axes, *, facts: Scaled):
  """The new batch joins the rows where it has one rhs, else the batch that there is."""
  size = next(
      x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None
  )
  operands = _unshared(operands, axes, facts.shared)
  facts = dataclasses.replace(facts, shared=(False, False))
  lhs, rhs, rows, cols = operands
  if axes[1] is None and axes[3] is None:
    lhs = _mapped_at(-3, lhs, axes[0], size)  # In front of m.
    rows = _mapped_at(-2, rows, axes[2], size)
    m = lhs.shape[2]
    lhs = lhs.reshape(lhs.shape[0], size * m, lhs.shape[3])
    rows = rows.reshape(*rows.shape[:-2], size * m)
    out = scaled_p.bind(lhs, rhs, rows, cols, facts=facts)
    return out.reshape(out.shape[0], size, m, out.shape[2]), 1
  operands = [
      _mapped_at(0, x, axis, size) for x, axis in zip(operands, axes, strict=True)
  ]
  batch = operands[0].shape[1]
  joined = (x.reshape(size * batch, *x.shape[2:]) for x in operands)
  out = scaled_p.bind(*joined, facts=facts)
  return out.reshape(size, batch, *out.shape[1:]), 0


def _unshared(operands, axes, shared: tuple[bool, bool]):
  """The operands with a factor for each row and column: a new batch may join these."""
  lhs, rhs, *factors = operands
  for i, (x, axis, dim) in enumerate(((lhs, axes[0], 1), (rhs, axes[1], 2))):
    if shared[i]:
      sizes = [size for place, size in enumerate(x.shape) if place != axis]
      factors[i] = jnp.repeat(factors[i][..., None], sizes[dim], -1)
  return lhs, rhs, *factors


def _mapped_at(place: int, x, axis: int | None, size: int):
  """x with its mapped axis at `place`; broadcast if it has none."""
  if axis is None:
    x, axis = jnp.broadcast_to(x, (size, *x.shape)), 0
  return jnp.moveaxis(x, axis, place)


scaled_p = planned.define(
    "jaxgemm_scaled", _by_xla, _on_one_device, _abstract_eval, _batch
)
