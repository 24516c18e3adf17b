"""Products whose operands are sharded over several devices under jit.

XLA cannot look into a kernel: it would gather the operands and run the whole
product on every device. `partitioned_product` tells it how the shards of a product
are products themselves, and that a sharded k leaves partial sums to be added.
`partitioned_gradients` does so for the gradients of a layer, which are several.
"""

from __future__ import annotations

from collections.abc import Callable
import functools
import inspect

import jax
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, use_abstract_mesh

from jaxgemm.contexts import emulates
from jaxgemm.layouts import Parts, Reduction, ShardedArray, choose_layout
from jaxgemm.lowering import epilogue, xla_product
from jaxgemm.product import Gradients, Product


@functools.lru_cache(maxsize=4096)
def partitioned_product(product: Product, num_operands: int, bind):
  """A function of the operands that XLA's partitioner knows how to shard.

  Args:
    product: the product of the whole operands; its shards' have the same dims.
    num_operands: of the product.
    bind: bind(*operands, product=product) computes the product of one shard.
  """
  dims = product.dims
  num_rhs = 1 + product.gated
  biases = ("n",) * (num_rhs * product.has_bias)
  attached = {"": (), "lhs": (dims.lhs,), "rhs": (dims.rhs,)}[product.attached]
  num_c = num_operands - 1 - num_rhs - len(biases) - len(attached)  # Or slopes' z.
  groups = (dims.lhs,) + (dims.rhs,) * num_rhs + (dims.out,) * num_c + biases + attached

  # Only the types of its results count: `_partition` has the rest.
  def whole(*operands):
    return xla_product(product, *operands, cuda=True)

  function = custom_partitioning(with_arity(whole, num_operands))
  operands = ", ".join(" ".join(dims.names(g)) for g in groups)
  results = ", ".join([" ".join(dims.names(dims.out))] * product.num_results)
  function.def_partition(
      functools.partial(_partition, product, groups, bind),
      sharding_rule=f"{operands} -> {results}",
      reduction_factors=tuple(dims.names("k")),
  )
  return function


def with_arity[T](function: Callable[..., T], count: int) -> Callable[..., T]:
  """The function, with a signature of `count` operands by name.

  custom_partitioning binds its arguments by the signature, which may not be *operands.
  """
  parameters = [
      inspect.Parameter(f"operand{i}", inspect.Parameter.POSITIONAL_OR_KEYWORD)
      for i in range(count)
  ]
  function.__signature__ = inspect.Signature(parameters)
  return function


def _partition(product: Product, groups, bind, mesh, operands, result):
  """What each device computes, and how operands and result lie over the mesh."""
  dims = product.dims
  arrays = [
      ShardedArray.of(dims.names(group), operand)
      for group, operand in zip(groups, operands, strict=True)
  ]
  first = result[0] if product.is_fused else result
  out = ShardedArray.of(dims.names(dims.out), first)
  # The second rhs of a gated product lies as the first, and moves with it.
  num, end = 2 + product.gated, len(arrays) - bool(product.attached)
  layout = choose_layout(arrays[:2], [out], dict(mesh.shape), arrays[num:end])
  (reduction,) = layout.reductions
  product = of_shards(product)

  def compute(*operands):
    if not reduction:
      return bind(*operands, product=product)
    lhs, factors, c, biases, entering = product.named(operands)
    # As XLA's dot does, the partial sums travel in the result's dtype: float32 ones would
    # be as exact as one device's, and take twice the time of what is between devices.
    partial = product.linear.replace(
        alpha=1.0, converted=product.converted, attached=product.attached
    )
    source = operands[end:]
    products = [
        added(bind(lhs, rhs, *source, product=partial), out, reduction)
        for rhs in factors
    ]
    if product.alpha == 1.0 and c is None and not product.is_fused:
      return products[0]
    wide = [lax.convert_element_type(x, "float32") for x in products]
    return epilogue(product, wide, c, biases, entering)

  # What an operand is a conversion of lies as it does.
  shardings = [sharding(mesh, array, layout.parts) for array in arrays]
  # c and bias are added after the reduction, as the result lies then.
  parts = layout.result_parts(0)
  shardings[num:end] = [sharding(mesh, array, parts) for array in arrays[num:end]]
  results = [sharding(mesh, out, parts)] * product.num_results
  results = results if product.is_fused else results[0]
  return mesh, of_one_device(compute), results, tuple(shardings)


@functools.lru_cache(maxsize=4096)
def partitioned_gradients(gradients: Gradients, compute):
  """A function of the operands of `gradients`, to all of them, that XLA can shard.

  Args:
    gradients: of the whole operands.
    compute: compute(*operands, gradients=gradients) are those of one shard.
  """
  dims, count = gradients.product.dims, gradients.count
  groups = [dims.lhs, *[dims.rhs] * count, *[dims.out] * count]
  operands, results = (
      ", ".join(" ".join(dims.names(group)) for group in each)
      for each in (groups, groups[: 1 + count])
  )

  def whole(*operands):  # Only the types of its results count.
    return list(operands[: 1 + count])

  function = custom_partitioning(with_arity(whole, len(groups)))
  function.def_partition(
      functools.partial(_partition_gradients, gradients, compute),
      sharding_rule=f"{operands} -> {results}",
  )
  return function


def _partition_gradients(gradients: Gradients, compute, mesh, operands, results):
  """As `_partition`; the sum of lhs's gradient travels beside the other products."""
  dims, count = gradients.product.dims, gradients.count
  # All rhs lie as the first, and so do all cotangents; what they give lies as they do.
  lhs, rhs, ct = (
      ShardedArray.of(dims.names(group), x) for group, x in
      ((dims.lhs, operands[0]), (dims.rhs, operands[1]), (dims.out, operands[-1]))
  )
  wanted = [
      ShardedArray.of(dims.names(group), x)
      for group, x in ((dims.lhs, results[0]), (dims.rhs, results[1]))
  ]
  layout = choose_layout([lhs, rhs, ct], wanted, dict(mesh.shape))
  of_lhs, of_rhs = layout.reductions
  local = gradients.replace(product=of_shards(gradients.product))

  def shard(*operands):
    first, *others = compute(*operands, gradients=local)
    first = added(first, wanted[0], of_lhs)
    if of_lhs:
      # XLA's scheduler puts what may wait beside the last sum of a program, and leaves
      # those before it bare: so what waits for this one waits for all products here.
      first, *others = lax.optimization_barrier((first, *others))
    return [first, *(added(x, wanted[1], of_rhs) for x in others)]

  own = [sharding(mesh, x, layout.parts) for x in (lhs, rhs, ct)]
  found = [sharding(mesh, x, layout.result_parts(i)) for i, x in enumerate(wanted)]
  shardings = (own[0], *own[1:2] * count, *own[2:] * count)
  return mesh, of_one_device(shard), [found[0], *found[1:] * count], shardings


def of_shards(product: Product) -> Product:
  """The product, as a device computes it of its shards."""
  if emulates(product.target):
    # JAX loses the host callbacks of a partition, so XLA's dot computes the shards.
    product = product.replace(target=None, implementation=None, config=None)
  return product.replace(out_sharding=None, beside_collectives=True)


def of_one_device[**P, T](compute: Callable[P, T]) -> Callable[P, T]:
  """The function, where a mesh with explicit axes in context would annotate what is
  local by now.
  """

  def shard(*operands):
    with use_abstract_mesh(AbstractMesh((), ())):
      return compute(*operands)

  return shard


def added(x: jax.Array, result: ShardedArray, reduction: Reduction) -> jax.Array:
  """The sum of every device's x, partial sums of the result."""
  names = list(result.sizes)
  for name, axes in reduction.scattered.items():
    x = lax.psum_scatter(x, axes, scatter_dimension=names.index(name), tiled=True)
  return lax.psum(x, reduction.summed) if reduction.summed else x


def sharding(mesh, array: ShardedArray, parts: Parts) -> NamedSharding:
  return NamedSharding(mesh, PartitionSpec(*(parts.get(n) for n in array.sizes)))
