"""gemm_p, the primitive behind every product: its rules, then their registrations.

  out[*b, *m, *n] = alpha * sum_k lhs * rhs + beta * c

The operands are lhs, rhs and, where beta is not 0, c; `product` says the rest. Where
it says that one is `attached`, the last operand is the array that lhs or rhs is a
conversion of, for kernels that convert it themselves: the result does not depend on it,
and no derivative has it. A product is linear in each other operand, so that all
derivatives are products again, of the operands as they are stored, each with its own
plan.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxgemm import precision as precisions
from jaxgemm.checkpoint_policies import name_product
from jaxgemm.dims import Dims, are_known, fold
from jaxgemm.lowering import (
  epilogue,
  halves,
  lax_out_sharding,
  local_plan,
  local_product,
  permuted,
  xla_product,
)
from jaxgemm.lowering_rules import (
  can_partition,
  check_invariant,
  check_shards,
  lower_local,
  register,
)
from jaxgemm.partitioning import partitioned_product
from jaxgemm.product import Product
from jaxgemm.recording import record_partitioned
from pallas_kernels import compat
from pallas_kernels.problem import ALGORITHMS

gemm_p = Primitive("jaxgemm")
linear_p = Primitive("jaxgemm_linear")  # Its other rules: `jaxgemm.fused`.
linear_p.multiple_results = True


def bind(*operands, product: Product):
  """Binds the primitive of the product to lhs, rhs and what else there is.

  The operands need not yet vary over the same mesh axes. linear_p has a list of results.
  """
  return _bind(*compat.vary_alike(*operands), product=product)


def _bind(*operands, product: Product):
  return (linear_p if product.is_fused else gemm_p).bind(*operands, product=product)


# Without it: "Abstract evaluation for 'jaxgemm' not implemented", under any tracer.
def _abstract_eval(*operands, product: Product):
  """The type that lax.dot_general gives, errors included; c must have it too."""
  lhs, (rhs,), c, _, _ = product.named(operands)
  if product.attached:
    operand = lhs if product.attached == "lhs" else rhs
    if operands[-1].shape != operand.shape:
      raise TypeError(f"{product.attached}, {operand}, is not {operands[-1]} converted")
  aval = result_type(lhs, rhs, product)
  if c is not None and c.shape != aval.shape:
    raise TypeError(f"c has shape {c.shape}, the product {aval.shape}")
  return aval


def result_type(lhs, rhs, product: Product):
  """The abstract value of the result of operands of these."""
  meshes = (lhs.sharding.mesh, rhs.sharding.mesh, jax.sharding.get_abstract_mesh())
  no_mesh = all(mesh.empty for mesh in meshes)
  return (_type_without_mesh if no_mesh else _type)(lhs, rhs, product)


def _type(lhs, rhs, product: Product):
  dims = product.dims
  aval, _ = lax.dot_general_p.abstract_eval(
      lhs, rhs,
      dimension_numbers=dims.dimension_numbers,
      precision=None,
      preferred_element_type=jnp.dtype(product.out_dtype),
      out_sharding=lax_out_sharding(product),
  )
  if dims.lax_out != dims.out:
    have, want = dims.names(dims.lax_out), dims.names(dims.out)
    shape = tuple(aval.shape[have.index(name)] for name in want)
    sharding = aval.sharding
    if not sharding.mesh.empty:
      sharding = permuted(sharding, have, want)
    aval = aval.update(shape=shape, sharding=sharding)
  return aval


# Without a mesh the type depends on the arguments alone.
_type_without_mesh = functools.lru_cache(maxsize=4096)(_type)


def _lower_xla(
    ctx, *operands, product: Product, where: str = "on this platform",
    cuda: bool = False,
):
  """Where no kernel can run, which `where` says."""
  check_invariant(ctx, product.batch_invariant, where)
  function = functools.partial(xla_product, product, cuda=cuda)
  return mlir.lower_fun(function, multiple_results=product.is_fused)(ctx, *operands)


def _lower_kernels(ctx, *operands, product: Product):
  """For CUDA (or emulated): the planned kernel, on each device's shards."""
  num_devices, _, is_manual = compat.lowering_mesh(ctx)
  xla = functools.partial(_lower_xla, ctx, *operands, product=product, cuda=True)
  if not are_known(size for aval in ctx.avals_in for size in aval.shape):
    return xla(where="symbolic sizes")
  if num_devices == 1:
    if is_manual:
      product = product.replace(beside_collectives=True)
    function = functools.partial(local_product, product)
  elif product.implementation == "xla":  # Its partitioner knows its own product.
    return xla(where="over several devices")
  elif can_partition(ctx):
    check_shards(ctx, product.target, product.batch_invariant)
    record_partitioned()
    function = functools.partial(_partitioned, product)
  else:
    # No mesh by whose axes to name the shards; XLA partitions its own dot anyhow.
    return xla(where="over devices without a mesh")
  return lower_local(ctx, function, operands, multiple_results=product.is_fused)


def _partitioned(product: Product, *operands):
  # Shares of two rhs in one array are not shares of each.
  product, operands = product.unpacked(operands, halves)
  return partitioned_product(product, len(operands), _bind)(*operands)


# Without it: "Differentiation rule for 'jaxgemm' not implemented".
def _jvp(primals, tangents, *, product: Product):
  lhs, rhs, *_ = primals
  lhs_dot, (rhs_dot,), c_dot, _, _ = product.named(tangents)
  linear = product.linear
  terms = []
  if type(lhs_dot) is not ad.Zero:
    terms.append(gemm_p.bind(lhs_dot, rhs, product=linear))
  if type(rhs_dot) is not ad.Zero:
    terms.append(gemm_p.bind(lhs, rhs_dot, product=linear))
  if c_dot is not None and type(c_dot) is not ad.Zero:
    c_dot = as_sharded(c_dot, result_type(jax.typeof(lhs), jax.typeof(rhs), product))
    terms.append(scaled(c_dot, product.beta, product.out_dtype))
  # Named here and not where it is first bound: a name has no transpose, but what
  # policies choose to save has always been through this rule.
  out = gemm_p.bind(*primals, product=product)
  out = name_product(out, has_batch=product.dims.has_batch)
  return out, functools.reduce(ad.add_jaxvals, terms)


def as_sharded(x, aval):
  """x with the sharding of `aval` over the explicit axes of a mesh, if it has one.

  c may lie in another way than the result; its tangent may not.
  """
  sharding = explicit(aval.sharding)
  if sharding is None or jax.typeof(x).sharding == sharding:
    return x
  return jax.sharding.reshard(x, sharding)


def scaled(x, factor: float, dtype: str):
  """factor * x in float32, cast to dtype."""
  if factor != 1.0:
    x = lax.convert_element_type(x, jnp.float32)
    x = lax.mul(x, jnp.full_like(x, factor))
  return lax.convert_element_type(x, jnp.dtype(dtype))


# Without it: "Transpose rule (for reverse-mode differentiation) for 'jaxgemm' not
# implemented".
def _transpose(ct, lhs, rhs, *others, product: Product):
  """The gradients: products of their own dims, stored as the operand they are of."""
  is_zero = type(ct) is ad.Zero
  grads = [None] * (2 + len(others))
  for index, operand in enumerate((lhs, rhs, *others)):
    if not ad.is_undefined_primal(operand):
      continue
    aval = operand.aval
    if is_zero or (product.attached and index == 2):  # No result depends on it.
      grads[index] = ad.Zero(aval.to_ct_aval())
    elif index == 2:
      grads[index] = as_sharded(scaled(ct, product.beta, aval.dtype.name), aval)
    else:
      grads[index] = gradient(ct, (rhs, lhs)[index], aval, index, product)
  return grads


def gradient(ct, other, aval, index: int, product: Product, plus=None):
  """The gradient of operand `index`, of type `aval`, a product of ct and the other.

  `plus` is what it is added to, of its type, where shapes are known and on one device.
  """
  dims = product.dims
  grad_dims, ct_is_rhs = dims.rhs_gradient() if index else dims.lhs_gradient()
  stored = dims.rhs if index else dims.lhs
  sums_batch = bool(dims.b) and "b" not in stored
  out_sharding = explicit(aval.sharding)
  if index:  # A sum over all rows.
    product = product.replace(batch_invariant=False)
  if sums_batch:
    joined = _gradient_of_shared(ct, other, aval, index, product)
    if joined is not None:
      return joined
    if out_sharding is not None:
      out_sharding = _with_batch(out_sharding, jax.typeof(ct).sharding.spec[: dims.b])
  operands = (other, ct) if ct_is_rhs else (ct, other)
  out = _any_product(
      operands, grad_dims, "float32" if sums_batch else aval.dtype.name, out_sharding,
      product, plus,
  )
  if sums_batch:
    out = lax.reduce_sum(out, axes=tuple(range(dims.b)))
    out = lax.convert_element_type(out, aval.dtype)
  return out


def _gradient_of_shared(ct, other, aval, index: int, product: Product):
  """The gradient of an operand that a batch shares, as one product that sums over it.

  For which ct and the other operand may have to be transposed. None if that would move
  more bytes than gradients of each product of the batch, in float32, have.
  """
  dims = product.dims
  groups = dims.out, dims.lhs if index else dims.rhs, dims.rhs if index else dims.lhs
  folding = fold(
      *(tuple(dims.names(each)) for each in groups), ct.shape, other.shape,
      may_exchange=product.may_exchange,
  )
  if are_known((*ct.shape, *other.shape)):
    products = math.prod(ct.shape[: dims.b]) * math.prod(aval.shape)
    moved = folding.moved * max(ct.dtype.itemsize, other.dtype.itemsize)
    if moved > 4 * products:
      return None
  operands = (other, ct) if folding.exchanged else (ct, other)
  perms = folding.lhs_perm, folding.rhs_perm
  out_sharding, axes = explicit(aval.sharding), dims.names(groups[2])
  if out_sharding is not None:
    out_sharding = permuted(out_sharding, axes, _transposed_names(axes, folding.c_perm))
  out = _any_product(
      tuple(map(transposed, operands, perms)), folding.dims, aval.dtype.name,
      out_sharding, product, None,
  )
  return transposed(out, folding.out_perm)


def _any_product(
    operands, dims: Dims, out_dtype: str, out_sharding, product: Product, plus
):
  """A product of operands whose dtypes may differ: a gradient often has such.

  XLA would convert both to the wider dtype and multiply at the user's precision;
  so do we, where an algorithm of ours is that precise, and else leave it to XLA.
  """
  lhs, rhs = operands
  dtype, found = product_of_gradient(
      lhs.dtype, rhs.dtype, dims, out_dtype, out_sharding, product
  )
  operands = [lax.convert_element_type(x, dtype) for x in operands]
  if found is None:
    if product.batch_invariant:
      raise ValueError(
          f"batch_invariant: the gradient of {lhs.dtype.name} and {rhs.dtype.name} is"
          " XLA's product, which is not"
      )
    xla = Product(dims, out_dtype, "xla", product.precision, product.alpha)
    xla = xla.replace(out_sharding=out_sharding)
    out = xla_product(xla, *operands, cuda=True)
    return out if plus is None else ad.add_jaxvals(plus, out)
  if plus is None:
    return gemm_p.bind(*operands, product=found)
  adding = found.replace(beta=1.0)
  if local_plan(adding, *operands, plus).kernel == "xla":  # Which would add in float32.
    return ad.add_jaxvals(plus, gemm_p.bind(*operands, product=found))
  return gemm_p.bind(*operands, plus, product=adding)


def product_of_gradient(
    lhs_dtype, rhs_dtype, dims: Dims, out_dtype: str, out_sharding, product: Product
) -> tuple[Any, Product | None]:
  """(the dtype that both operands of a gradient take, what product it is; None: XLA's).
  """
  precision = product.precision
  if isinstance(precision, (lax.DotAlgorithm, lax.DotAlgorithmPreset)):
    # The user said to what the operands are rounded, which holds for a cotangent.
    dtype = jnp.dtype(ALGORITHMS[product.algorithm])
  elif min(lhs_dtype.itemsize, rhs_dtype.itemsize) == 1:  # Which JAX does not promote.
    dtype = max(lhs_dtype, rhs_dtype, key=lambda dtype: dtype.itemsize)
  else:
    dtype = jnp.promote_types(lhs_dtype, rhs_dtype)
  algorithm, _ = precisions.choose_algorithm(
      dtype.name, dtype.name, out_dtype, precision
  )
  if algorithm is None:
    return dtype, None
  return dtype, product.replace(
      dims=dims, out_dtype=out_dtype, algorithm=algorithm, config=None,
      must_serve=False, beta=0.0, out_sharding=out_sharding, converted=("", ""),
      attached="",
  )


def explicit(sharding):
  """The sharding if its mesh has explicit axes, else None."""
  mesh = sharding.mesh
  if mesh.empty or mesh.are_all_axes_auto or mesh.are_all_axes_manual:
    return None
  return sharding


def _with_batch(sharding, batch):
  """The sharding with dimensions in front that lie as `batch` says, if they can."""
  used = {axis for axes in sharding.spec for axis in _tuple(axes)}
  batch = [None if used & {*_tuple(axes)} else axes for axes in batch]
  return NamedSharding(sharding.mesh, PartitionSpec(*batch, *sharding.spec))


def _tuple(axes) -> tuple[str, ...]:
  return () if axes is None else axes if isinstance(axes, tuple) else (axes,)


# Without it: "Batching rule for 'jaxgemm' not implemented".
def _batch(operands, axes, *, product: Product):
  """A batch of one operand joins m or n where its storage allows, else the batch."""
  source, at = None, int(product.attached == "rhs")
  if product.attached:
    *operands, source = operands
    *axes, source_axis = axes
    if axes[at] is not None and source_axis is not None:
      source = jnp.moveaxis(source, source_axis, axes[at])
    elif axes[at] != source_axis:
      source, product = None, product.detached
  lhs, rhs, *c = operands
  lhs_axis, rhs_axis, *c_axis = axes
  if lhs_axis is None and rhs_axis is None:
    return _batch_of_c(lhs, rhs, c[0], c_axis[0], product)
  dims = product.dims
  lhs_names = _inserted(dims.names(dims.lhs), lhs_axis)
  rhs_names = _inserted(dims.names(dims.rhs), rhs_axis)
  out_names = dims.names(dims.out)
  # Where in the result the new dimension lies is ours to choose.
  foldings = [
      (
          fold(
              lhs_names, rhs_names, _inserted(out_names, i), lhs.shape, rhs.shape,
              may_exchange=product.may_exchange,
          ),
          i,
      )
      for i in range(len(out_names) + 1)
  ]
  folding, out_axis = min(foldings, key=lambda choice: choice[0].moved)
  wanted = _inserted(out_names, out_axis)
  if c:
    c = [_with_axis(c[0], c_axis[0], out_axis, _axis_size(operands, axes))]
    c = [transposed(c[0], folding.c_perm)]
  out_sharding = product.out_sharding
  if out_sharding is not None:
    axis, x = (lhs_axis, lhs) if lhs_axis is not None else (rhs_axis, rhs)
    spec = list(out_sharding.spec) + [None] * (len(out_names) - len(out_sharding.spec))
    spec.insert(out_axis, jax.typeof(x).sharding.spec[axis])
    out_sharding = permuted(
        out_sharding.update(spec=PartitionSpec(*spec)),
        wanted, _transposed_names(wanted, folding.c_perm),
    )
  perms = folding.lhs_perm, folding.rhs_perm
  attached = [] if source is None else [transposed(source, perms[at ^ folding.exchanged])]
  if folding.exchanged:
    lhs, rhs, product = rhs, lhs, product.exchanged
  out = bind(
      *map(transposed, (lhs, rhs), perms), *c, *attached,
      product=product.replace(dims=folding.dims, out_sharding=out_sharding),
  )
  return transposed(out, folding.out_perm), out_axis


def _batch_of_c(lhs, rhs, c, axis, product: Product):
  """One product serves all c."""
  out = gemm_p.bind(
      lhs, rhs, product=product.replace(alpha=1.0, beta=0.0, out_dtype="float32")
  )
  c = _with_axis(c, axis, 0, None)
  out = lax.broadcast(out, (c.shape[0],))
  return epilogue(product, [out], c, ()), 0


def _inserted(names, axis: int | None) -> tuple[str, ...]:
  names = list(names)
  if axis is not None:
    names.insert(axis, "vmap")
  return tuple(names)


def _with_axis(x, axis: int | None, new_axis: int, size: int | None):
  """x with its mapped axis at new_axis, broadcast if it has none."""
  if axis is None:
    return lax.broadcast_in_dim(
        x, (*x.shape[:new_axis], size, *x.shape[new_axis:]),
        [i + (i >= new_axis) for i in range(x.ndim)],
    )
  perm = [i for i in range(x.ndim) if i != axis]
  perm.insert(new_axis, axis)
  return lax.transpose(x, perm) if perm != list(range(x.ndim)) else x


def _axis_size(operands, axes) -> int:
  return next(x.shape[a] for x, a in zip(operands, axes, strict=True) if a is not None)


def transposed(x, perm):
  """lax.transpose, of which None is the permutation that moves nothing."""
  return x if perm is None else lax.transpose(x, perm)


def _transposed_names(names, perm):
  return names if perm is None else tuple(names[i] for i in perm)


# -- Registrations -----------------------------------------------------------------

gemm_p.def_abstract_eval(_abstract_eval)
for primitive in (gemm_p, linear_p):
  register(primitive, _lower_xla, _lower_kernels, lambda product: product.target)
ad.primitive_jvps[gemm_p] = _jvp
ad.primitive_transposes[gemm_p] = _transpose
batching.primitive_batchers[gemm_p] = _batch
# Else JAX's persistent cache would miss programs that have not changed.
compat.keep_dump_names_stable()
