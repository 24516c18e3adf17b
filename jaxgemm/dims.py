"""How the dimensions of two operands form a product: groups, layouts, folding.

Every dimension belongs to one of four groups:

  b  batch   in both operands, or in one that the other is shared by
  m  rows    of the result, from lhs
  n  columns of the result, from rhs
  k  summed

An operand is foldable if the dimensions of each group lie side by side, those of b
first: then each group reshapes to one dimension without a copy, and the operand is
a matrix (or a batch of them) in one of two layouts. `Dims` describes a foldable
product; `fold` finds, for any dimension numbers, the foldable product that copies
least.
"""

from __future__ import annotations

from collections.abc import Iterable
import dataclasses
import functools
import itertools
import math
from typing import Any

Axes = tuple[str, ...]
Shape = tuple[int, ...]
DimensionNumbers = tuple[tuple[Shape, Shape], tuple[Shape, Shape]]


@dataclasses.dataclass(frozen=True)
class Dims:
  """A foldable product; the result is [*b, *m, *n].

  Attributes:
    lhs: groups of lhs as stored: "bmk" (k-major), "bkm" (m-major), or without "b"
      where lhs is shared by the whole batch.
    rhs: groups of rhs as stored: "bkn" (n-major), "bnk" (k-major), or without "b".
    b, m, n, k: number of dimensions in each group.
  """

  lhs: str = "bmk"
  rhs: str = "bkn"
  b: int = 0
  m: int = 1
  n: int = 1
  k: int = 1

  @property
  def out(self) -> str:
    return "bmn"

  @property
  def has_batch(self) -> bool:
    """Whether both operands have batch dimensions, as lax.dot_general's have."""
    return self.b > 0 and "b" in self.lhs and "b" in self.rhs

  def names(self, groups: str) -> list[str]:
    """One name a dimension: names("bmk") is ["b0", "m0", "m1", "k0"] for two m."""
    return [f"{g}{i}" for g in groups for i in range(getattr(self, g))]

  def split(self, groups: str, shape: Shape) -> dict[str, Shape]:
    """The sizes (or whatever `shape` lists) of each group."""
    parts, start = {}, 0
    for group in groups:
      stop = start + getattr(self, group)
      parts[group] = tuple(shape[start:stop])
      start = stop
    return parts

  def sizes(self, lhs_shape: Shape, rhs_shape: Shape) -> dict[str, Shape]:
    """The sizes of all four groups; those of an operand without b are not lost."""
    parts = self.split(self.rhs, rhs_shape) | self.split(self.lhs, lhs_shape)
    return {group: parts.get(group, ()) for group in "bmnk"}

  def folded_sizes(self, lhs_shape: Shape, rhs_shape: Shape) -> dict[str, int]:
    """The size of each group, its dimensions multiplied together."""
    return {g: math.prod(s) for g, s in self.sizes(lhs_shape, rhs_shape).items()}

  def out_shape(self, lhs_shape: Shape, rhs_shape: Shape) -> Shape:
    sizes = self.sizes(lhs_shape, rhs_shape)
    return sizes["b"] + sizes["m"] + sizes["n"]

  @functools.cached_property
  def dimension_numbers(self) -> DimensionNumbers:
    """As lax.dot_general wants them, whose result is ordered as `lax_out`."""
    lhs, rhs = self.names(self.lhs), self.names(self.rhs)
    batch = self.names("b") if self.shared is None else []
    contract = self.names("k")
    return (
        (tuple(map(lhs.index, contract)), tuple(map(rhs.index, contract))),
        (tuple(map(lhs.index, batch)), tuple(map(rhs.index, batch))),
    )

  @property
  def lax_out(self) -> str:
    """Groups of lax.dot_general's result: a shared lhs puts m before b."""
    return "mbn" if self.shared == "lhs" else "bmn"

  @property
  def shared(self) -> str | None:
    """The operand that serves the whole batch: "lhs", "rhs" or None."""
    if not self.b or ("b" in self.lhs and "b" in self.rhs):
      return None
    return "rhs" if "b" in self.lhs else "lhs"

  def lhs_gradient(self) -> tuple[Dims, bool]:
    """The product that gives d lhs, stored as lhs, from the cotangent of the result.

    Returns: its dims, and whether the cotangent is its rhs rather than its lhs. The
      other operand is rhs, as stored. Where lhs is shared, the result has the batch
      of the other operands in front and is to be summed over it.
    """
    if self.lhs.endswith("mk"):  # [m, k] = ct[m, n] @ rhs^T[n, k]
      rename = {"b": "b", "m": "m", "n": "k", "k": "n"}
      return self._renamed(self.out, self.rhs, rename), False
    # [k, m] = rhs[k, n] @ ct^T[n, m]
    rename = {"b": "b", "m": "n", "n": "k", "k": "m"}
    return self._renamed(self.rhs, self.out, rename), True

  def rhs_gradient(self) -> tuple[Dims, bool]:
    """As `lhs_gradient`, for d rhs and the other operand lhs."""
    if self.rhs.endswith("kn"):  # [k, n] = lhs^T[k, m] @ ct[m, n]
      rename = {"b": "b", "m": "k", "n": "n", "k": "m"}
      return self._renamed(self.lhs, self.out, rename), True
    # [n, k] = ct^T[n, m] @ lhs[m, k]
    rename = {"b": "b", "m": "k", "n": "m", "k": "n"}
    return self._renamed(self.out, self.lhs, rename), False

  def _renamed(self, lhs: str, rhs: str, rename: dict[str, str]) -> Dims:
    counts = {new: getattr(self, old) for old, new in rename.items()}
    lhs, rhs = (groups.translate(str.maketrans(rename)) for groups in (lhs, rhs))
    return Dims(lhs, rhs, **counts)


@dataclasses.dataclass(frozen=True)
class Folding:
  """How to make a product foldable: transpose operands, multiply, transpose back.

  Attributes:
    dims: the foldable product.
    lhs_perm, rhs_perm, out_perm: for lax.transpose, or None where nothing moves.
    moved: number of elements that the transpositions move.
    exchanged: whether the operands change places first: lhs is then the given rhs.
  """

  dims: Dims
  lhs_perm: Shape | None
  rhs_perm: Shape | None
  out_perm: Shape | None
  moved: int
  exchanged: bool = False

  @property
  def c_perm(self) -> Shape | None:
    """For an operand that is ordered as the wanted result: undoes out_perm."""
    if self.out_perm is None:
      return None
    return tuple(self.out_perm.index(i) for i in range(len(self.out_perm)))


@functools.lru_cache(maxsize=4096)
def fold(
    lhs: Axes, rhs: Axes, out: Axes, lhs_shape: Shape, rhs_shape: Shape, *,
    may_exchange: bool = False,
) -> Folding:
  """The foldable form of an einsum of two operands that moves the fewest elements.

  Of those that move as many, one without an operand that a whole batch shares, as that
  is one product and not many: of ("m", "k"), ("b", "k") -> ("b", "m") the exchanged one.

  Args:
    lhs, rhs, out: a label for each axis of the operands and of the result. A label
      in both operands is of the batch if the result has it, else it is summed.
    lhs_shape, rhs_shape: shapes of the operands.
    may_exchange: whether the operands may change places.
  Returns: dims, and the transpositions of operands and result that they need.
  Example: fold(("m", "k"), ("k", "n"), ("m", "n"), (4, 8), (8, 2)).dims == Dims()
  """
  size = label_sizes(lhs, rhs, lhs_shape, rhs_shape)
  known = are_known(size.values())  # Else they do not compare, and operands count.

  def moved_by(have: Axes, want: Axes) -> int:
    if known:  # Where an axis of size 1 stands makes no difference in memory.
      have, want = (tuple(a for a in axes if size[a] != 1) for axes in (have, want))
    if have == want:
      return 0
    return math.prod(size[axis] for axis in have) if known else 1

  def cost(folding: Folding) -> tuple[int, bool, int]:
    perms = folding.lhs_perm, folding.rhs_perm, folding.out_perm
    return folding.moved, folding.dims.shared is not None, 3 - perms.count(None)

  best: Folding | None = None
  for exchanged in (False, True)[: 1 + may_exchange]:
    left, right = (rhs, lhs) if exchanged else (lhs, rhs)
    batch = [axis for axis in out if axis in left and axis in right]
    rows = [axis for axis in out if axis in left and axis not in right]
    cols = [axis for axis in out if axis in right and axis not in left]
    summed = [axis for axis in left if axis in right and axis not in out]
    for b, m, n, k in itertools.product(
        _orders(batch, left, right), _orders(rows, left), _orders(cols, right),
        _orders(summed, right),
    ):
      for dims, *wanted in _forms(b, m, n, k, left, right):
        want_left, want_right, have_out = map(tuple, wanted)
        moves = (left, want_left), (right, want_right), (have_out, out)
        found = Folding(
            dims, *itertools.starmap(_perm, moves),
            sum(itertools.starmap(moved_by, moves)), exchanged,
        )
        if best is None or cost(found) < cost(best):
          best = found
        if cost(best) == (0, False, 0):
          return best
  assert best is not None
  return best


def are_known(sizes: Iterable[Any]) -> bool:
  """Whether none of the sizes is symbolic, as jax.export's may be."""
  return all(isinstance(size, int) for size in sizes)


def label_axes(
    lhs_rank: int, rhs_rank: int, dimension_numbers: DimensionNumbers
) -> tuple[Axes, Axes, Axes]:
  """The labels of lhs, rhs and result that lax.dot_general's numbers stand for."""
  (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
  lhs = [f"l{i}" for i in range(lhs_rank)]
  rhs = [f"r{i}" for i in range(rhs_rank)]
  for i, j in zip(lhs_contract + lhs_batch, rhs_contract + rhs_batch, strict=True):
    rhs[j] = lhs[i]
  out = [lhs[i] for i in lhs_batch]
  out += [lhs[i] for i in range(lhs_rank) if i not in {*lhs_contract, *lhs_batch}]
  out += [rhs[i] for i in range(rhs_rank) if i not in {*rhs_contract, *rhs_batch}]
  return tuple(lhs), tuple(rhs), tuple(out)


def label_sizes(
    lhs: Axes, rhs: Axes, lhs_shape: Shape, rhs_shape: Shape
) -> dict[str, int]:
  """The size of each label."""
  return dict(zip(lhs + rhs, lhs_shape + rhs_shape, strict=True))


def _orders(axes: list[str], *references: Axes) -> list[list[str]]:
  """The orders of `axes` worth a trial: as given, and as each reference has them."""
  orders = [axes]
  for reference in references:
    order = sorted(axes, key=reference.index)
    if order not in orders:
      orders.append(order)
  return orders


def _forms(b, m, n, k, lhs_axes, rhs_axes):
  """Yields (dims, lhs, rhs, out): each foldable form and its axes in their order."""
  axes = {"b": b, "m": m, "n": n, "k": k}
  counts = {group: len(members) for group, members in axes.items()}
  for lhs, rhs in itertools.product(("bmk", "bkm"), ("bkn", "bnk")):
    yield (
        Dims(lhs, rhs, **counts),
        [axis for group in lhs for axis in axes[group]],
        [axis for group in rhs for axis in axes[group]],
        b + m + n,
    )
  if b:
    return
  # Without a batch, what precedes k in one operand can become the batch of a
  # product that shares the other operand.
  lead = list(itertools.takewhile(lambda axis: axis not in k, lhs_axes))
  rest = [axis for axis in m if axis not in lead]
  if lead and rest:
    for rhs in ("kn", "nk"):
      yield (
          Dims("bkm", rhs, b=len(lead), m=len(rest), n=len(n), k=len(k)),
          lead + k + rest,
          k + n if rhs == "kn" else n + k,
          lead + rest + n,
      )
  lead = list(itertools.takewhile(lambda axis: axis not in k, rhs_axes))
  for split in range(1, len(lead) + 1):
    shared, cols = lead[:split], [axis for axis in n if axis not in lead[:split]]
    for lhs, rhs in itertools.product(("mk", "km"), ("bkn", "bnk")):
      yield (
          Dims(lhs, rhs, b=len(shared), m=len(m), n=len(cols), k=len(k)),
          m + k if lhs == "mk" else k + m,
          shared + (k + cols if rhs == "bkn" else cols + k),
          shared + m + cols,
      )


def _perm(have: Axes, want: Axes) -> Shape | None:
  return None if have == want else tuple(have.index(axis) for axis in want)
