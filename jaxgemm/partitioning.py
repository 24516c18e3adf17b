"""Products whose operands are sharded over several devices under jit.

XLA cannot look into a kernel: it would gather the operands and run the whole
product on every device. `partitioned_product` tells it how the shards of a product
are products themselves, and that a sharded k leaves partial sums to be added.

Operands are not gathered: m, n and the batch need no communication, k one reduction
of the result. Only where one mesh axis cuts two dimensions that cannot both have it
must one operand move: each choice is tried, and the cheapest is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import functools
import inspect
import itertools
import math

from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, use_abstract_mesh

from jaxgemm.lowering import epilogue, xla_product
from jaxgemm.product import Product

# Rough rates of one device; only their ratio matters, and it need not be exact.
_FLOPS_PER_SECOND = 5e14
_BYTES_PER_SECOND = 2e11

Parts = dict[str, tuple[str, ...]]  # The mesh axes of each dimension, by its name.


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
  num_c = num_operands - 1 - num_rhs - len(biases)  # Or of what slopes depend on.
  groups = (dims.lhs,) + (dims.rhs,) * num_rhs + (dims.out,) * num_c + biases

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
  if product.target is not None and product.target.emulate:
    # JAX loses the host callbacks of a partition, so XLA's dot computes the shards.
    product = product.replace(target=None, implementation=None, config=None)
  product = product.replace(out_sharding=None, beside_collectives=True)
  arrays = [
      ShardedArray.of(dims.names(group), operand)
      for group, operand in zip(groups, operands, strict=True)
  ]
  first = result[0] if product.is_fused else result
  out = ShardedArray.of(dims.names(dims.out), first)
  # The second rhs of a gated product lies as the first, and moves with it.
  layout = choose_layout(arrays[:2] + arrays[2 + product.gated :], out, dict(mesh.shape))

  def shard(*operands):
    # A mesh with explicit axes in context would annotate what is local by now.
    with use_abstract_mesh(AbstractMesh((), ())):
      return compute(*operands)

  def compute(*operands):
    if not (layout.summed or layout.scattered):
      return bind(*operands, product=product)
    lhs, factors, c, biases, entering = product.named(operands)
    # As XLA's dot does, the partial sums travel in the result's dtype: float32 ones would
    # be as exact as one device's, and take twice the time of what is between devices.
    partial = product.linear.replace(alpha=1.0)
    products = [added(bind(lhs, rhs, product=partial)) for rhs in factors]
    if product.alpha == 1.0 and c is None and not product.is_fused:
      return products[0]
    wide = [lax.convert_element_type(x, "float32") for x in products]
    return epilogue(product, wide, c, biases, entering)

  def added(out):
    """The sum of the shards of k."""
    for name, axes in layout.scattered.items():
      out = lax.psum_scatter(
          out, axes, scatter_dimension=dims.names(dims.out).index(name), tiled=True
      )
    return lax.psum(out, layout.summed) if layout.summed else out

  def sharding(array, parts):
    return NamedSharding(mesh, PartitionSpec(*(parts.get(n) for n in array.sizes)))

  shardings = [sharding(array, layout.parts) for array in arrays]
  out_parts = layout.parts | layout.scattered
  # c and bias are added after the reduction, as the result lies then.
  num = 2 + product.gated
  shardings[num:] = [sharding(array, out_parts) for array in arrays[num:]]
  results = [sharding(out, out_parts)] * product.num_results
  return mesh, shard, results if product.is_fused else results[0], tuple(shardings)


@dataclasses.dataclass(frozen=True)
class ShardedArray:
  """The sizes of an array's dimensions by name, their mesh axes, bytes an element."""

  sizes: dict[str, int]
  parts: Parts
  itemsize: int

  @classmethod
  def of(cls, names, x) -> ShardedArray:
    parts = {
        name: axes if isinstance(axes, tuple) else (axes,)
        for name, axes in zip(names, x.sharding.spec, strict=False) if axes is not None
    }
    return cls(dict(zip(names, x.shape, strict=True)), parts, x.dtype.itemsize)

  def local_bytes(self, parts: Parts, mesh_shape: Mapping[str, int]) -> float:
    """Bytes of one shard if it lies as `parts` says."""
    axes = [axis for name in self.sizes for axis in parts.get(name, ())]
    shards = math.prod(mesh_shape[axis] for axis in axes)
    return math.prod(self.sizes.values()) * self.itemsize / shards

  def is_cut_from(self, have: Parts, want: Parts) -> bool:
    """Whether each device finds its shard of `want` within its own of `have`."""
    return all(
        want.get(name, ())[: len(have.get(name, ()))] == have.get(name, ())
        for name in self.sizes
    )


@dataclasses.dataclass(frozen=True)
class Layout:
  """How a product is shared out.

  Attributes:
    parts: the mesh axes of each dimension of the shards' products.
    scattered: mesh axes of k over which the sum is left scattered along a dimension
      of the result.
    summed: mesh axes of k over which every device gets the sum.
  """

  parts: Parts
  scattered: Parts
  summed: tuple[str, ...]


def choose_layout(
    operands: list[ShardedArray], out: ShardedArray, mesh_shape: Mapping[str, int]
) -> Layout:
  """The layout that gathers no operand, or where they conflict, costs least.

  A mesh axis serves the dimension that it cuts in the operands, or if it cuts none,
  in the result. Only an axis that cuts two dimensions in the operands has a choice.
  """
  sizes = {name: n for array in (*operands, out) for name, n in array.sizes.items()}
  wishes: dict[str, list[str]] = {}
  for arrays in (operands[:2], operands[2:] + [out]):
    taken = set(wishes)
    for array in arrays:
      for name, axes in array.parts.items():
        for axis in axes:
          if axis not in taken and name not in wishes.setdefault(axis, []):
            wishes[axis].append(name)
  best, least = None, math.inf
  for names in itertools.product(*wishes.values()):
    name_of_axis = dict(zip(wishes, names, strict=True))
    layout = _layout([*operands, out], sizes, out, name_of_axis, mesh_shape)
    cost = _cost(layout, operands, sizes, out, mesh_shape)
    if cost < least:
      best, least = layout, cost
  assert best is not None
  return best


def _layout(
    arrays, sizes, out: ShardedArray, name_of_axis: dict[str, str],
    mesh_shape: Mapping[str, int],
) -> Layout:
  """The layout that gives each mesh axis to the dimension of that name."""
  parts: Parts = {}
  for name in sizes:
    axes = [axis for axis, wanted in name_of_axis.items() if wanted == name]
    # In the order in which an array has them already, if one does.
    for array in arrays:
      if set(axes) == set(array.parts.get(name, ())):
        axes = array.parts.get(name, ())
        break
    # An uneven share of k would sum what pads the last shard: k stays whole then.
    shards = math.prod(mesh_shape[axis] for axis in axes)
    if axes and not (name[0] == "k" and sizes[name] % shards):
      parts[name] = tuple(axes)
  summed = [axis for name in parts if name[0] == "k" for axis in parts[name]]
  scattered: Parts = {}
  for name, axes in out.parts.items():
    shards = math.prod(mesh_shape[axis] for axis in axes)
    if name not in parts and set(axes) <= set(summed) and not sizes[name] % shards:
      scattered[name] = axes
      summed = [axis for axis in summed if axis not in axes]
  return Layout(parts, scattered, tuple(summed))


def _cost(layout: Layout, operands, sizes, out: ShardedArray, mesh_shape) -> float:
  """Seconds that a layout takes, roughly: arithmetic and what each device receives."""
  shards = math.prod(mesh_shape[a] for axes in layout.parts.values() for a in axes)
  cost = 2 * math.prod(sizes.values()) / shards / _FLOPS_PER_SECOND
  received = 0.0
  out_parts = layout.parts | layout.scattered
  for index, array in enumerate(operands):
    want = out_parts if index >= 2 else layout.parts
    if not array.is_cut_from(array.parts, want):
      received += array.local_bytes(want, mesh_shape)
  partial_bytes = out.local_bytes(layout.parts, mesh_shape)
  if layout.scattered:
    received += partial_bytes
  if layout.summed:
    received += 2 * out.local_bytes(out_parts, mesh_shape)
  if not out.is_cut_from(out_parts, out.parts):
    received += out.local_bytes(out.parts, mesh_shape)
  return cost + received / _BYTES_PER_SECOND
