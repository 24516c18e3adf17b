"""Normalised rows, and the rows themselves for a residual that passes the layers by.

  y, x = norm(x), x

Their cotangents meet where x's is made of both: in one pass, which a kernel computes of
one Hopper GPU's 16-bit rows (`pallas_kernels.norm_gradients`), and XLA elsewhere. As two
uses of x that know nothing of each other XLA adds them in the second of two passes.

Derivatives of all orders and both modes follow: the tangent is an operation of its own,
linear in the tangents of x and of the weights.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
import jax.numpy as jnp

from jaxgemm import passes
from jaxgemm.contexts import Target, current_target, emulates
from jaxgemm.dims import Axes
from jaxgemm.layouts import ShardedArray
from jaxgemm.partitioning import of_one_device, sharding
from jaxgemm.rms_norm import RMSNorm, normalised
from pallas_kernels import compat
from pallas_kernels import norm_gradients as kernel


@dataclasses.dataclass(frozen=True)
class Facts:
  """The parameters of both primitives: of the norm, and what is lowered for."""

  eps: float
  target: Target | None


def norm_and_rows(norm: RMSNorm, x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns norm(x), and x [..., k] for the residual of the layers behind it."""
  operands = compat.vary_alike(x, jnp.asarray(norm.weights))
  return _norm_and_rows(Facts(float(norm.eps), current_target()), *operands)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _norm_and_rows(facts: Facts, x, weights):
  return RMSNorm(weights, facts.eps)(x), x


@_norm_and_rows.defjvp
def _jvp(facts: Facts, primals, tangents):
  dots = tangent_p.bind(*primals, *tangents, facts=facts)
  return _norm_and_rows(facts, *primals), tuple(dots)


def _tangent(x, weights, x_dot, weights_dot, *, facts: Facts) -> list[jax.Array]:
  """What tangent_p computes: the tangents of y and of x."""
  norm = functools.partial(normalised, eps=facts.eps)
  _, y_dot = jax.jvp(norm, (x, weights), (x_dot, weights_dot))
  return [y_dot, x_dot]


def _tangent_jvp(primals, tangents, *, facts: Facts):
  tangents = tuple(map(ad.instantiate_zeros, tangents))
  return jax.jvp(functools.partial(_tangent, facts=facts), tuple(primals), tangents)


def _tangent_batch(operands, axes, *, facts: Facts):
  """What x has more are further rows, if the weights have not more."""
  if {axes[1], axes[3]} != {None}:
    found = jax.vmap(functools.partial(_tangent, facts=facts), tuple(axes))(*operands)
    return found, [0, 0]
  x, weights, x_dot, weights_dot = operands
  size = next(v.shape[i] for v, i in zip(operands, axes, strict=True) if i is not None)
  x, x_dot = (
      batching.bdim_at_front(v, i, size) for v, i in ((x, axes[0]), (x_dot, axes[2]))
  )
  return tangent_p.bind(x, weights, x_dot, weights_dot, facts=facts), [0, 0]


def _transpose(cts, x, weights, *dots, facts: Facts):
  """The gradients of x and of the weights, as far as they are wanted."""
  dy, passing = cts
  if type(dy) is ad.Zero:
    found = passing, ad.Zero(jax.typeof(weights).to_ct_aval())
  elif type(passing) is ad.Zero or not ad.is_undefined_primal(dots[0]):
    found = _gradients(x, weights, dy, facts)
  else:
    operands = compat.vary_alike(x, weights, dy, passing)
    dx, dw = norm_gradients_p.bind(*operands, facts=facts)
    found = dx, dw.astype(weights.dtype)
  wanted = [g if ad.is_undefined_primal(dot) else None
            for g, dot in zip(found, dots, strict=True)]
  return [None, None, *wanted]


def _by_xla(x, weights, dy, passing, *, facts: Facts) -> list[jax.Array]:
  dx, dw = _gradients(x, weights, dy, facts)
  return [dx + passing, dw.astype(_wide(x))]


def _wide(x):
  """The dtype in which a pass computes: float32, of float64 that."""
  return jnp.promote_types(x.dtype, jnp.float32)


def _gradients(x, weights, dy, facts: Facts) -> tuple[jax.Array, jax.Array]:
  """Of x, but for what passes by, and of the weights."""
  # As for jax.checkpoint: else XLA saves the factors of rows for these, and makes two
  # passes of the norm.
  x, weights = lax.optimization_barrier((x, weights))
  return jax.vjp(functools.partial(normalised, eps=facts.eps), x, weights)[1](dy)


def _by_kernel(*operands, facts: Facts) -> list[jax.Array]:
  x, weights, *others = operands
  cols = x.shape[-1]
  its = kernel.NormGradients(
      math.prod(x.shape[:-1]), cols, x.dtype.name, facts.eps
  )
  device = passes.serving_device(facts.target)
  if device is None or kernel.supports(its) is not None:
    return _by_xla(*operands, facts=facts)
  flat = [lax.reshape(v, (its.rows, cols)) for v in (x, *others)]
  launch = functools.partial(kernel.launch, facts=its, num_sms=device.num_sms)
  dx, dw = passes.run(launch, [flat[0], weights, *flat[1:]], facts.target)
  return [lax.reshape(dx, x.shape), dw]


def _over_devices(*operands, facts: Facts) -> list[jax.Array]:
  return _partitioned(facts, operands[0].ndim)(*operands)


@functools.lru_cache(maxsize=256)
def _partitioned(facts: Facts, rank: int):
  """A function of the operands that XLA's partitioner knows how to shard."""

  def whole(x, weights, dy, passing):  # Only the types of its results count.
    return [x, weights.astype(_wide(x))]

  function = custom_partitioning(whole)
  names = *(f"m{i}" for i in range(rank - 1)), "k"
  x = " ".join(names)
  function.def_partition(
      functools.partial(_partition, facts, names),
      sharding_rule=f"{x}, k, {x}, {x} -> {x}, k",
  )
  return function


def _partition(facts: Facts, names: Axes, mesh, operands, _):
  """What each device computes of its rows, all lying as x does."""
  x, weights = (
      ShardedArray.of(axes, operand)
      for axes, operand in zip((names, names[-1:]), operands, strict=False)
  )
  parts = x.even_parts(mesh.shape)
  of_k = parts.get("k", ())
  of_rows = tuple(axis for name in names[:-1] for axis in parts.get(name, ()))
  if emulates(facts.target):  # JAX loses the callbacks of a partition.
    facts = dataclasses.replace(facts, target=None)

  def shard(*operands):
    if of_k:
      cols = x.sizes["k"]
      dx, dw = _of_parts_of_rows(*operands, facts=facts, axes=of_k, cols=cols)
    else:
      dx, dw = norm_gradients_p.bind(*operands, facts=facts)
    return [dx, lax.psum(dw, of_rows) if of_rows else dw]

  as_x, as_weights = (sharding(mesh, array, parts) for array in (x, weights))
  return mesh, of_one_device(shard), [as_x, as_weights], (as_x, as_weights, as_x, as_x)


def _of_parts_of_rows(x, weights, dy, passing, *, facts: Facts, axes, cols: int):
  """Of rows that lie in parts along mesh axes."""
  its, wide_weights, d_its = (v.astype(_wide(x)) for v in (x, weights, dy))

  def mean(values):
    return lax.psum(jnp.sum(values, -1, keepdims=True), axes) / cols

  r = lax.rsqrt(mean(jnp.square(its)) + facts.eps)
  rows, weighted = its * r, d_its * wide_weights
  dx = (weighted - rows * mean(weighted * rows)) * r
  dw = jnp.sum(d_its * rows, tuple(range(x.ndim - 1)))
  return (dx + passing.astype(dx.dtype)).astype(x.dtype), dw


def _abstract_eval(x, weights, dy, passing, *, facts: Facts):
  del weights, passing, facts
  total, _ = lax.reduce_sum_p.abstract_eval(
      dy.update(dtype=_wide(x)), axes=tuple(range(dy.ndim - 1)),
      out_sharding=None,
  )
  return [x, total]


norm_gradients_p = passes.define(
    "jaxgemm_norm_gradients", _by_xla, _by_kernel, _abstract_eval, _over_devices
)
tangent_p = Primitive("jaxgemm_norm_tangent")
tangent_p.multiple_results = True
compat.computes_by_lowering(tangent_p)
tangent_p.def_abstract_eval(lambda x, *_, facts: [x, x])
mlir.register_lowering(tangent_p, mlir.lower_fun(_tangent, multiple_results=True))
ad.primitive_jvps[tangent_p] = _tangent_jvp
ad.primitive_transposes[tangent_p] = _transpose
batching.primitive_batchers[tangent_p] = _tangent_batch
