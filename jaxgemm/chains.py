"""What a kernel can compute of a jaxpr: a product, and the equations behind it.

  begun     dot_general, or one of our products
  followed  a factor, a bias, c, a conversion, a transposition
  activated one of our activations, however many equations that is
  gated     the product of that and of another product of the same lhs

Products in groups of rows are chains of another type: see `ragged_chains`. A chain takes
an equation only if nothing else wants what enters it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import functools
import math

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var, primitives
import jax.numpy as jnp

from jaxgemm import ragged_chains
from jaxgemm.contraction import product_of
from jaxgemm.dims import Axes, label_axes
from jaxgemm.equations import FLOATS, Users, activation, is_plain, users_of
from jaxgemm.primitive import gemm_p
from jaxgemm.product import Product
from jaxgemm.ragged_chains import RaggedChain
from pallas_kernels.problem import NONE

_Maker = Callable[[Var], JaxprEqn | None]  # Of a variable: the equation.


@dataclasses.dataclass(frozen=True)
class Chain:
  """A product and the equations behind it that its kernel can compute.

  Attributes:
    first: the index of the product's equation.
    last: that of the equation that ends it, whose result is the chain's.
    taken: the indices of all its equations.
    product, axes: what it is a product of, and the labels of the axes.
    exchanged: whether the operands change places, as the result is transposed.
    bias, c: what is added, each a variable, of which any may be absent.
    narrowed: whether a conversion has rounded what the product gave.
    up: the rhs of a second product, that the activation of the first is a factor of.
  """

  first: int
  last: int
  taken: frozenset[int]
  product: Product
  axes: tuple[Axes, Axes, Axes]
  exchanged: bool = False
  bias: Var | None = None
  c: Var | None = None
  up: Var | None = None
  narrowed: bool = False


class Fusion:
  """The chains of a jaxpr.

  Attributes:
    chains: each by the index that ends it.
    ragged: those of products in groups of rows, too.
    within: the indices of all other equations that chains compute.
  """

  def __init__(self, jaxpr: Jaxpr):
    self.chains: dict[int, Chain] = {}
    self.ragged: dict[int, RaggedChain] = {}
    self.within: set[int] = set()
    self._equations, self._users = jaxpr.eqns, users_of(jaxpr)
    self._made_at = {
        x: index for index, equation in enumerate(jaxpr.eqns) for x in equation.outvars
    }
    # From the last one on: a sum of two products is the later one's.
    for first, equation in reversed(list(enumerate(jaxpr.eqns))):
      chain = _begun(first, equation)
      if chain is None:
        self._turn(ragged_chains.begun(first, equation))
      elif all(x.aval.dtype.name in FLOATS for x in equation.invars[:2]):
        self._grow(chain)
      else:
        self.chains[first] = chain
    for last in sorted(self.chains):
      if last in self.chains:
        self._gate(last)

  def last_uses(self) -> dict[int, list[Var]]:
    """The variables that nothing needs any more, by the equation that is the last to.

    What is part of a chain is computed at its end.
    """
    chains = self.chains.values()
    end = {
        index: chain.last for chain in (*chains, *self.ragged.values())
        for index in chain.taken
    }
    # A bias is what was broadcast, of which nothing else knows that the chain wants it.
    biases: dict[Var | None, int] = {}
    for chain in chains:
      biases[chain.bias] = max(biases.get(chain.bias, 0), chain.last)
    found: dict[int, list[Var]] = {}
    for x, indices in self._users.items():
      if None not in indices:
        last = max(biases.get(x, 0), *(end.get(i, i) for i in indices))
        found.setdefault(last, []).append(x)
    return found

  def _grow(self, chain: Chain) -> None:
    """Adds the chain with all that it can take, but for widening its result at last.

    That is another kernel's, which reads half of the bytes.
    """
    best, widest = chain, jnp.dtype(chain.product.out_dtype).itemsize
    while (longer := self._longer(chain)) is not None:
      chain = longer
      if jnp.dtype(chain.product.out_dtype).itemsize <= widest:
        best = chain
    self.chains[best.last] = best
    self.within |= best.taken - {best.last}

  def _longer(self, chain: Chain) -> Chain | None:
    """The chain with what follows it, if the kernel can compute that."""
    (out,) = self._equations[chain.last].outvars
    following = self._following(chain)
    if not following or following & (self.chains.keys() | self.within):
      return None
    if chain.product.out_dtype not in FLOATS or out.aval.weak_type:
      return None
    longer = None
    if len(self._users[out]) == 1:
      (index,) = following
      longer = _followed(chain, out, index, self._equations[index], self._maker)
    return longer or _activated(chain, out, self._equations, self._users)

  def _following(self, chain: Chain | RaggedChain) -> set[int]:
    """Equations that take its result; none if more needs it, or in another context."""
    (out,) = self._equations[chain.last].outvars
    following = set(self._users.get(out, [None]))
    context = self._equations[chain.first].ctx  # Of which XLA's metadata are a part.
    if None in following:
      return set()
    same = all(self._equations[index].ctx == context for index in following)
    return following if same else set()

  def _turn(self, chain: RaggedChain | None) -> None:
    """Adds the chain, if it is one, with all that it can take."""
    longer = chain
    while longer is not None:
      chain, following = longer, self._following(longer)
      index = following.pop() if len(following) == 1 else None
      longer = None
      if index is not None:
        longer = ragged_chains.turned(chain, index, self._equations[index])
    if chain is not None:
      self.ragged[chain.last] = chain
      self.within |= chain.taken - {chain.last}

  def _gate(self, last: int) -> None:
    """Makes one chain of two, if this one's result multiplies another product of lhs."""
    chain = self.chains[last]
    out = self._equations[last].outvars[0]
    if len(self._users.get(out, ())) != 1 or self._users[out] == [None]:
      return
    (index,) = self._users[out]
    equation = self._equations[index]
    others = [x for x in equation.invars if x is not out and isinstance(x, Var)]
    if equation.primitive.name != "mul" or len(others) != 1 or index in self.within:
      return
    second = self._made_at.get(others[0])
    if second not in self.chains or self._users[others[0]] != [index]:
      return
    other = self.chains[second]
    three = [self._equations[i] for i in (chain.first, other.first, index)]
    gated = _gated(chain, other, *three, index)
    if gated is not None and all(each.ctx == three[0].ctx for each in three):
      del self.chains[last], self.chains[second]
      self._grow(gated)

  def _maker(self, x: Var) -> JaxprEqn | None:
    """The equation whose result x is."""
    index = self._made_at.get(x)
    return None if index is None else self._equations[index]


def _begun(index: int, equation: JaxprEqn) -> Chain | None:
  """The chain of a product alone; None if the equation is none, or none of ours."""
  params = equation.params
  if equation.primitive is gemm_p:
    product = params["product"].detached
    dims = product.dims
    named = product.implementation is not None or product.config is not None
    if product.beta or named or product.out_sharding is not None:
      return None
    groups = dims.lhs, dims.rhs, dims.out
    axes = tuple(tuple(dims.names(each)) for each in groups)
    return Chain(index, index, frozenset([index]), product, axes)
  if equation.primitive is not primitives.dot_general_p:
    return None
  lhs, rhs = (x.aval for x in equation.invars)
  if lhs.dtype != rhs.dtype or not all(map(is_plain, (lhs, rhs))):
    return None
  if lhs.weak_type or rhs.weak_type or params["out_sharding"] is not None:
    return None
  product, reason = product_of(
      lhs.dtype, rhs.dtype, params["precision"], params["preferred_element_type"], None,
      None,
  )
  if reason:
    return None
  axes = label_axes(lhs.ndim, rhs.ndim, params["dimension_numbers"])
  return Chain(index, index, frozenset([index]), product, axes)


def _followed(
    chain: Chain, out: Var, index: int, equation: JaxprEqn, maker: _Maker
) -> Chain | None:
  """The chain with the equation that takes its result `out`, if the kernel can."""
  product = chain.product
  name, result = equation.primitive.name, equation.outvars[0].aval
  if name == "transpose":
    return _transposed(chain, out, index, equation.params["permutation"])
  if (result.shape, result.sharding) != (out.aval.shape, out.aval.sharding):
    return None
  if result.dtype.name not in FLOATS or result.weak_type:
    return None
  narrower = result.dtype.itemsize < jnp.dtype(product.out_dtype).itemsize
  if chain.narrowed and result.dtype.itemsize > jnp.dtype(product.out_dtype).itemsize:
    return None  # What was rounded on the way stays so.
  product = product.replace(out_dtype=result.dtype.name)
  changed = functools.partial(
      dataclasses.replace, chain, last=index, taken=chain.taken | {index},
      narrowed=chain.narrowed or narrower,
  )
  if name == "convert_element_type":
    return changed(product=product)
  others = [x for x in equation.invars if x is not out]
  is_first = not (product.has_bias or chain.c or product.activation != NONE)
  if name in ("mul", "div") and is_first and len(others) == 1:
    number = _number(others[0])
    if number is None or name == "div" and equation.invars[0] is not out:
      return None
    factor = number if name == "mul" else 1 / number if number else math.nan
    if not math.isfinite(factor):
      return None
    return changed(product=product.replace(alpha=product.alpha * factor))
  if name in ("add", "add_any") and len(others) == 1 and isinstance(others[0], Var):
    (other,) = others
    if other.aval.dtype.name not in FLOATS or other.aval.weak_type:
      return None
    free = chain.bias is None and product.activation == NONE
    bias = _bias(other, chain, out.aval.shape, maker) if free else None
    if bias is not None:
      return changed(product=product.replace(has_bias=True), bias=bias)
    if other.aval.shape == out.aval.shape and chain.c is None:
      return changed(product=product.replace(beta=1.0), c=other)
  return None


def _transposed(
    chain: Chain, result: Var, index: int, perm: tuple[int, ...]
) -> Chain | None:
  """The chain whose result lies in another way, as gradients of weights do."""
  product, (lhs, rhs, out) = chain.product, chain.axes
  if product.has_bias or product.activation != NONE or chain.c is not None:
    return None
  if not is_plain(result.aval):
    return None
  out, exchanged = tuple(out[i] for i in perm), chain.exchanged
  if out and out[0] in rhs and out[0] not in lhs:  # Columns first: they are rows.
    lhs, rhs, product, exchanged = rhs, lhs, product.exchanged, not exchanged
  return dataclasses.replace(
      chain, last=index, taken=chain.taken | {index}, product=product,
      axes=(lhs, rhs, out), exchanged=exchanged,
  )


def _gated(
    chain: Chain, other: Chain, gate: JaxprEqn, up: JaxprEqn, product: JaxprEqn,
    last: int,
) -> Chain | None:
  """The chain of activation(x @ gate) * (x @ up), whose equations these are."""
  facts, result = chain.product, product.outvars[0].aval
  plain = facts.replace(activation=NONE, out_dtype=other.product.out_dtype)
  if facts.activation == NONE or plain != other.product or chain.axes != other.axes:
    return None
  alone = not (facts.has_bias or facts.gated or chain.c) and facts.alpha == 1.0
  same_lhs = gate.invars[0] is up.invars[0] and not (chain.exchanged or other.exchanged)
  if not alone or not same_lhs or gate.invars[1].aval.shape != up.invars[1].aval.shape:
    return None
  if result.dtype.name not in FLOATS or result.weak_type:
    return None
  facts = facts.replace(gated=True, out_dtype=result.dtype.name)
  taken = chain.taken | other.taken | {last}
  return dataclasses.replace(
      chain, last=last, taken=taken, product=facts, up=up.invars[1]
  )


def _activated(
    chain: Chain, out: Var, equations: Sequence[JaxprEqn], users: Users
) -> Chain | None:
  """The chain with an activation of its result."""
  product = chain.product
  if product.activation != NONE or chain.c is not None or not _is_matrix(chain.axes):
    return None
  found = activation(out, equations, users)
  if found is None:
    return None
  name, indices = found
  product = product.replace(activation=name)
  return dataclasses.replace(
      chain, last=indices[-1], taken=chain.taken.union(indices), product=product
  )


def _number(x) -> float | None:
  """The number that a variable or literal of no dimensions stands for, if it is known."""
  return float(x.val) if isinstance(x, Literal) and not x.aval.shape else None


def _is_matrix(axes: tuple[Axes, Axes, Axes]) -> bool:
  """Whether rows, columns and what is summed lie side by side as they are, no batch."""
  lhs, rhs, out = axes
  summed = tuple(axis for axis in lhs if axis not in out)
  rows = tuple(axis for axis in lhs if axis in out)
  cols = tuple(axis for axis in rhs if axis in out)
  return (
      out == rows + cols
      and lhs in (rows + summed, summed + rows)
      and rhs in (summed + cols, cols + summed)
  )


def _bias(x: Var, chain: Chain, shape: tuple[int, ...], maker: _Maker) -> Var | None:
  """What is the same in each row of x, which is added to a result of that shape."""
  lhs, rhs, _ = chain.axes
  rank = len([axis for axis in rhs if axis not in lhs])
  if not _is_matrix(chain.axes) or not 0 < rank < len(shape):
    return None
  rows, cols = len(shape) - rank, shape[len(shape) - rank :]
  along_cols = [i for i in range(rows, len(shape)) if shape[i] != 1]
  while x.aval.ndim == len(shape) and x.aval.shape[rows:] == cols:
    if math.prod(x.aval.shape[:rows]) == 1 < math.prod(shape[:rows]):
      return x
    equation = maker(x)
    if equation is None or equation.primitive.name != "broadcast_in_dim":
      return None
    before, mapped = equation.invars[0], equation.params["broadcast_dimensions"]
    kept = [i for i, size in zip(mapped, before.aval.shape, strict=True) if size != 1]
    if kept != along_cols or not isinstance(before, Var):
      return None
    x = before
    if math.prod(x.aval.shape) == math.prod(cols):
      return x
  return None
