"""How products are shared out over a mesh: which mesh axis cuts which dimension.

Operands are not gathered: m, n and the batch need no communication, k one reduction
of the result. Only where one mesh axis cuts two dimensions that cannot both have it
must one operand move: each choice is tried, and the cheapest is taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import itertools
import math

# Rough rates of one device; only their ratio matters, and it need not be exact.
_FLOPS_PER_SECOND = 5e14
_BYTES_PER_SECOND = 2e11

Parts = dict[str, tuple[str, ...]]  # The mesh axes of each dimension, by its name.


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

  def even_parts(self, mesh_shape: Mapping[str, int]) -> Parts:
    """Its parts, but for the dimensions that are cut unevenly."""
    return {
        name: axes for name, axes in self.parts.items()
        if self.sizes[name] % math.prod(mesh_shape[axis] for axis in axes) == 0
    }

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
class Reduction:
  """How the partial sums of a result are added up.

  Attributes:
    scattered: mesh axes over which the sum is left scattered along a dimension of the
      result.
    summed: mesh axes over which every device gets the sum.
  """

  scattered: Parts
  summed: tuple[str, ...]

  def __bool__(self) -> bool:
    return bool(self.scattered or self.summed)


@dataclasses.dataclass(frozen=True)
class Layout:
  """How products are shared out.

  Attributes:
    parts: the mesh axes of each dimension of the shards' products.
    reductions: of each result.
  """

  parts: Parts
  reductions: tuple[Reduction, ...]

  def result_parts(self, index: int) -> Parts:
    """The mesh axes of each dimension once that result is added up."""
    return self.parts | self.reductions[index].scattered


def choose_layout(
    factors: Sequence[ShardedArray], results: Sequence[ShardedArray],
    mesh_shape: Mapping[str, int], others: Sequence[ShardedArray] = (),
) -> Layout:
  """The layout that gathers no operand, or where they conflict, costs least.

  A mesh axis serves the dimension that it cuts in the factors, or if it cuts none,
  in the results. Only an axis that cuts two dimensions in the factors has a choice.

  Args:
    factors: what is multiplied. A dimension that a result has not is summed there.
    results: of the products, all of the same dimensions of the factors.
    mesh_shape: devices along each mesh axis.
    others: operands that are added to the first result, of its dimensions.
  """
  arrays = [*factors, *others, *results]
  sizes = {name: n for array in arrays for name, n in array.sizes.items()}
  wishes: dict[str, list[str]] = {}
  for group in (factors, [*others, *results]):
    taken = set(wishes)
    for array in group:
      for name, axes in array.parts.items():
        for axis in axes:
          if axis not in taken and name not in wishes.setdefault(axis, []):
            wishes[axis].append(name)
  best, least = None, math.inf
  for names in itertools.product(*wishes.values()):
    name_of_axis = dict(zip(wishes, names, strict=True))
    layout = _layout(arrays, sizes, results, name_of_axis, mesh_shape)
    cost = _cost(layout, factors, others, results, sizes, mesh_shape)
    if cost < least:
      best, least = layout, cost
  assert best is not None
  return best


def _layout(
    arrays, sizes, results: Sequence[ShardedArray], name_of_axis: dict[str, str],
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
    # An uneven share would sum what pads the last shard: what is summed stays whole then.
    summed = any(name not in result.sizes for result in results)
    shards = math.prod(mesh_shape[axis] for axis in axes)
    if axes and not (summed and sizes[name] % shards):
      parts[name] = tuple(axes)
  return Layout(
      parts, tuple(_reduction(parts, sizes, each, mesh_shape) for each in results)
  )


def _reduction(
    parts: Parts, sizes, result: ShardedArray, mesh_shape: Mapping[str, int]
) -> Reduction:
  """What is left to do of a result, where it is wanted in parts left scattered."""
  summed = [axis for name in parts if name not in result.sizes for axis in parts[name]]
  scattered: Parts = {}
  for name, axes in result.parts.items():
    shards = math.prod(mesh_shape[axis] for axis in axes)
    if name not in parts and set(axes) <= set(summed) and not sizes[name] % shards:
      scattered[name] = axes
      summed = [axis for axis in summed if axis not in axes]
  return Reduction(scattered, tuple(summed))


def _cost(layout: Layout, factors, others, results, sizes, mesh_shape) -> float:
  """Seconds that a layout takes, roughly: arithmetic and what each device receives."""
  shards = math.prod(mesh_shape[a] for axes in layout.parts.values() for a in axes)
  flops = 2 * math.prod(sizes.values()) * len(results)
  received = 0.0
  for arrays, want in ((factors, layout.parts), (others, layout.result_parts(0))):
    for array in arrays:
      if not array.is_cut_from(array.parts, want):
        received += array.local_bytes(want, mesh_shape)
  for index, result in enumerate(results):
    reduction, parts = layout.reductions[index], layout.result_parts(index)
    if reduction.scattered:
      received += result.local_bytes(layout.parts, mesh_shape)
    if reduction.summed:
      received += 2 * result.local_bytes(parts, mesh_shape)
    if not result.is_cut_from(parts, result.parts):
      received += result.local_bytes(result.parts, mesh_shape)
  return flops / shards / _FLOPS_PER_SECOND + received / _BYTES_PER_SECOND
