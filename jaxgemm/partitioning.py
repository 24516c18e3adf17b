"""Products whose operands are sharded over several devices under jit.

XLA cannot look into a kernel: it would gather the operands and run the whole
product on every device. `partitioned_product` tells it how the shards of a product
are products themselves, and that a sharded k leaves partial sums to be added.
"""

from __future__ import annotations

import functools
import math

from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from jaxgemm.lowering import epilogue, xla_product
from jaxgemm.product import Product


@functools.lru_cache(maxsize=4096)
def partitioned_product(product: Product, has_c: bool, bind):
  """A function of the operands that XLA's partitioner knows how to shard.

  Args:
    product: the product of the whole operands; its shards' have the same dims.
    has_c: whether there is an operand c.
    bind: bind(*operands, product=product) computes the product of one shard.
  """
  dims = product.dims
  groups = [dims.lhs, dims.rhs] + [dims.out] * has_c

  def whole(*operands):
    # Only the types of this function's results count: see `_partition`.
    return xla_product(product, *operands, cuda=True)

  partition = functools.partial(_partition, product, tuple(groups), bind)
  function = custom_partitioning(
      # custom_partitioning reads the signature: it takes no *operands.
      (lambda lhs, rhs, c: whole(lhs, rhs, c)) if has_c
      else (lambda lhs, rhs: whole(lhs, rhs))
  )
  operands = ", ".join(" ".join(dims.names(g)) for g in groups)
  function.def_partition(
      partition,
      sharding_rule=f"{operands} -> {' '.join(dims.names(dims.out))}",
      reduction_factors=tuple(dims.names("k")),
  )
  return function


def _partition(product: Product, groups, bind, mesh, operands, result):
  """What each device computes, and how operands and result lie over the mesh."""
  dims = product.dims
  if product.target is not None and product.target.emulate:
    # JAX loses the host callbacks of a partition, so XLA's dot computes the shards.
    product = product.replace(target=None, implementation=None, config=None)
  names = [dims.names(g) for g in groups]
  out_names = dims.names(dims.out)
  axes = _assign_axes(
      [_parts(n, x) for n, x in zip(names, operands)], _parts(out_names, result),
      _sizes(names, operands), mesh.shape,
  )
  summed = tuple(axis for name in dims.names("k") for axis in axes.get(name, ()))

  def shard(*operands):
    if not summed:
      return bind(*operands, product=product.replace(out_sharding=None))
    lhs, rhs, *c = operands
    # As XLA's dot does, the partial sums travel in the result's dtype, unless there
    # is more to be done with them.
    plain = product.alpha == 1.0 and not c
    partial = product.replace(
        out_sharding=None, alpha=1.0, beta=0.0,
        out_dtype=product.out_dtype if plain else "float32",
    )
    out = lax.psum(bind(lhs, rhs, product=partial), summed)
    return out if plain else epilogue(product, out, *(c or [None]))

  def sharding(names):
    return NamedSharding(mesh, PartitionSpec(*(axes.get(name) for name in names)))

  return mesh, shard, sharding(out_names), tuple(map(sharding, names))


def _assign_axes(operands, result, sizes, mesh_shape):
  """The mesh axes of every dimension, each axis used once.

  What the operands say comes first, so that none is gathered; where both want the
  same axis, k goes first (partial sums are cheaper than operands), then what the
  result agrees with. A k that the axes do not divide stays whole: the padding of
  its last shard would enter the sums.
  """
  wishes = []
  for parts in operands:
    for name, axes in parts.items():
      agrees = result.get(name) == axes
      wishes.append((0 if name[0] == "k" else 1 if agrees else 2, name, axes))
  wishes += [(3, name, axes) for name, axes in result.items()]
  assigned, used = {}, set()
  for _, name, axes in sorted(wishes, key=lambda wish: wish[0]):
    num_shards = math.prod(mesh_shape[axis] for axis in axes)
    if name[0] == "k" and sizes[name] % num_shards:
      continue
    if axes and name not in assigned and used.isdisjoint(axes):
      assigned[name] = axes
      used.update(axes)
  return assigned


def _parts(names, x) -> dict[str, tuple[str, ...]]:
  """The mesh axes of each dimension of an array or of its shape."""
  spec = tuple(x.sharding.spec) + (None,) * len(names)
  return {
      name: () if axes is None else axes if isinstance(axes, tuple) else (axes,)
      for name, axes in zip(names, spec)
  }


def _sizes(names, operands) -> dict[str, int]:
  return {n: s for ns, x in zip(names, operands) for n, s in zip(ns, x.shape)}
