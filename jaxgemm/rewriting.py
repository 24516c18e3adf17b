"""accelerate: a function that exists, its products ours and fused with what follows.

A product that is a call of its own leaves to XLA what comes behind it: a bias, an
activation, a factor, another term, a cast. XLA fuses those with its own products, or some
of them, and cannot with ours. Where a model's code is not to be changed, its jaxpr is:

  d = dot_general a b
  e = add d bias                ->  f = jaxgemm_linear a b bias; activation=relu
  f = max e 0

What follows is taken into the kernel as long as nothing else wants what is between. The
sums and what follows are then float32, and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import functools
import math
from typing import Any

import jax
from jax import lax
from jax.extend import core
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, primitives
import jax.numpy as jnp

from jaxgemm.api import contract, product_of
from jaxgemm.dims import Axes, label_axes
from jaxgemm.primitive import gemm_p
from jaxgemm.product import Product
from pallas_kernels import compat
from pallas_kernels.problem import NONE

_FLOATS = "float16", "bfloat16", "float32"  # Of operands, and of what is fused.
_Users = dict[Var, list[int | None]]  # Of a variable: equations, None for the results.
# Those whose own jaxprs are rewritten, and by which parameter they have them.
_OUTER = {
    primitives.jit_p: "jaxpr",
    primitives.scan_p: "jaxpr",
    primitives.remat_p: "jaxpr",
    primitives.while_p: "body_jaxpr",
    primitives.cond_p: "branches",
}


def accelerate[**P, R](fun: Callable[P, R]) -> Callable[P, R]:
  """Returns `fun` with each lax.dot_general, jnp.matmul, einsum and so on ours.

  And with what follows a product in its kernel: a number that multiplies it, a bias, an
  activation (relu, silu, gelu, sigmoid, tanh), a sum with another array, a conversion,
  as far as nothing else needs the product without. Best of a whole step of training,
  gradients included, or of a model that is served. What `fun` does otherwise, its loops,
  checkpoints and inner jits, stays as it is. So do products inside of jax.shard_map, of
  functions with derivatives of their own (jax.custom_vjp) that are still to be derived,
  and those that no kernel of ours serves.

  Args:
    fun: of arrays, and trees of them, to such. What is static must be bound before, as
      by functools.partial.
  Returns: a function of the same arguments that gives the same to rounding: to be jitted,
    differentiated and mapped as `fun` is.
  Raises: whatever `fun` does, when it is traced.
  Example: step = jax.jit(jaxgemm.accelerate(step))
  """

  @functools.wraps(fun)
  def accelerated(*args: P.args, **kwargs: P.kwargs) -> R:
    closed, out = jax.make_jaxpr(fun, return_shape=True)(*args, **kwargs)
    found = _Rewriter().run(closed.jaxpr, closed.consts, jax.tree.leaves((args, kwargs)))
    return jax.tree.unflatten(jax.tree.structure(out), found)

  return accelerated


@dataclasses.dataclass
class _Chain:
  """A product and the equations behind it that its kernel can compute.

  Attributes:
    last: the index of the equation that ends it, whose result is the chain's.
    product, axes: what it is a product of, and the labels of the axes.
    exchanged: whether the operands change places, as the result is transposed.
    bias, term: what is added, each a variable, of which any may be absent.
  """

  last: int
  product: Product
  axes: tuple[Axes, Axes, Axes]
  exchanged: bool = False
  bias: Var | None = None
  term: Var | None = None


class _Rewriter:
  """Runs jaxprs, and remembers those that it has rewritten."""

  def __init__(self):
    self._found: dict[int, tuple[Any, Any]] = {}  # Each with what keeps its id its own.

  def run(self, jaxpr: Jaxpr, consts: Sequence, args: Sequence) -> list:
    """What the jaxpr computes."""
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    read = lambda x: x.val if isinstance(x, Literal) else env[x]
    chains, within = _chains(jaxpr)
    for index, equation in enumerate(jaxpr.eqns):
      if index in within:
        continue
      if index in chains:
        first, chain = chains[index]
        results = [_computed(jaxpr.eqns[first], chain, equation.outvars[0].aval, read)]
      else:
        values = map(read, equation.invars)
        results = compat.rebind(equation, self._params(equation), *values)
      env.update(zip(equation.outvars, results, strict=True))
    return list(map(read, jaxpr.outvars))

  def _params(self, equation: JaxprEqn) -> dict[str, Any]:
    """Its parameters, the products of jaxprs among them ours."""
    name = _OUTER.get(equation.primitive)
    if name is None:
      return equation.params
    inner = equation.params[name]
    if isinstance(inner, tuple):
      return equation.params | {name: tuple(map(self._rewritten, inner))}
    return equation.params | {name: self._rewritten(inner)}

  def _rewritten[T: (Jaxpr, ClosedJaxpr)](self, inner: T) -> T:
    if id(inner) not in self._found:
      self._found[id(inner)] = inner, self._made(inner)
    return self._found[id(inner)][1]

  def _made(self, inner):
    """The same jaxpr with our products; it itself where there are none, or none fits."""
    closed = inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, ())
    avals = [x.aval for x in closed.jaxpr.invars]
    if not _has_products(closed.jaxpr) or not all(map(_is_plain, avals)):
      return inner
    types = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in avals
    ]
    made = jax.make_jaxpr(lambda *args: self.run(closed.jaxpr, closed.consts, args))(
        *types
    )
    same = all(map(_alike, closed.out_avals, made.out_avals))
    if made.consts or not same or made.effects != closed.effects:
      return inner
    return made if isinstance(inner, ClosedJaxpr) else made.jaxpr


def _is_plain(aval) -> bool:
  """Whether it is an array, and not one of an explicit mesh, nor a reference."""
  return isinstance(aval, jax.core.ShapedArray) and aval.sharding.mesh.empty


def _alike(a, b) -> bool:
  return (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, b.weak_type)


def _has_products(jaxpr: Jaxpr) -> bool:
  return any(
      equation.primitive in (primitives.dot_general_p, gemm_p)
      or any(map(_has_products, core.jaxprs_in_params(equation.params)))
      for equation in jaxpr.eqns
  )


# -- What a product takes with it --------------------------------------------------


def _chains(jaxpr: Jaxpr) -> tuple[dict[int, tuple[int, _Chain]], set[int]]:
  """The chains by the index that ends them, with that of the product; what is within."""
  users: _Users = {}
  for index, equation in enumerate(jaxpr.eqns):
    for x in equation.invars:
      if isinstance(x, Var):
        users.setdefault(x, []).append(index)
  for x in jaxpr.outvars:
    if isinstance(x, Var):
      users.setdefault(x, []).append(None)
  made_by = {x: equation for equation in jaxpr.eqns for x in equation.outvars}
  chains: dict[int, tuple[int, _Chain]] = {}
  within: set[int] = set()
  # From the last one on: a sum of two products is the later one's.
  for first, equation in reversed(list(enumerate(jaxpr.eqns))):
    chain = _begun(first, equation)
    while chain is not None:
      (out,) = jaxpr.eqns[chain.last].outvars
      following = set(users.get(out, [None]))
      if None in following or following & (chains.keys() | within):
        break
      if len(users[out]) == 1:
        (index,) = following
        longer, taken = _longer(chain, out, index, jaxpr.eqns[index], made_by), {index}
      else:
        longer, taken = None, set()
      if longer is None:
        longer, taken = _activated(chain, out, jaxpr.eqns, users)
      if longer is None:
        break
      within |= {chain.last, *taken} - {longer.last}
      chain = longer
    if chain is not None:
      chains[chain.last] = first, chain
  return chains, within


def _begun(index: int, equation: JaxprEqn) -> _Chain | None:
  """The chain of a product alone; None if the equation is none, or none of ours."""
  params = equation.params
  if equation.primitive is gemm_p:
    product, dims = params["product"], params["product"].dims
    named = product.implementation is not None or product.config is not None
    if product.beta or named or product.out_sharding is not None:
      return None
    groups = dims.lhs, dims.rhs, dims.out
    return _Chain(index, product, tuple(tuple(dims.names(each)) for each in groups))
  if equation.primitive is not primitives.dot_general_p:
    return None
  lhs, rhs = (x.aval for x in equation.invars)
  if lhs.dtype != rhs.dtype or not all(map(_is_plain, (lhs, rhs))):
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
  return _Chain(index, product, axes)


def _longer(
    chain: _Chain, out: Var, index: int, equation: JaxprEqn, made_by
) -> _Chain | None:
  """The chain with the equation that takes its result `out`, if the kernel can."""
  product = chain.product
  if product.out_dtype not in _FLOATS or out.aval.weak_type:
    return None
  name, result = equation.primitive.name, equation.outvars[0].aval
  if name == "transpose":
    return _transposed(chain, index, equation.params["permutation"])
  if result.shape != out.aval.shape or result.dtype.name not in _FLOATS:
    return None
  product = product.replace(out_dtype=result.dtype.name)
  changed = functools.partial(dataclasses.replace, chain, last=index)
  if name == "convert_element_type":
    return changed(product=product)
  others = [x for x in equation.invars if x is not out]
  is_first = not (product.has_bias or chain.term or product.activation != NONE)
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
    if other.aval.dtype.name not in _FLOATS or other.aval.weak_type:
      return None
    free = chain.bias is None and product.activation == NONE
    bias = _bias(other, chain, out.aval.shape, made_by) if free else None
    if bias is not None:
      return changed(product=product.replace(has_bias=True), bias=bias)
    if other.aval.shape == out.aval.shape and chain.term is None:
      return changed(product=product.replace(beta=1.0), term=other)
    return None
  return None


def _transposed(chain: _Chain, index: int, perm: tuple[int, ...]) -> _Chain | None:
  """The chain whose result lies in another way, as gradients of weights do."""
  product, (lhs, rhs, out) = chain.product, chain.axes
  if product.has_bias or product.activation != NONE or chain.term is not None:
    return None
  out, exchanged = tuple(out[i] for i in perm), chain.exchanged
  if out and out[0] in rhs and out[0] not in lhs:  # Columns first: they are rows.
    lhs, rhs, product, exchanged = rhs, lhs, product.exchanged, not exchanged
  return dataclasses.replace(
      chain, last=index, product=product, axes=(lhs, rhs, out), exchanged=exchanged
  )


def _activated(
    chain: _Chain, out: Var, equations: Sequence[JaxprEqn], users: _Users
) -> tuple[_Chain | None, set[int]]:
  """The chain with an activation of its result, and the equations that compute that."""
  product = chain.product
  fits = product.out_dtype in _FLOATS and not out.aval.weak_type
  if product.activation != NONE or chain.term is not None or not fits:
    return None, set()
  found = _activation(out, equations, users) if _is_matrix(chain.axes) else None
  if found is None:
    return None, set()
  name, indices = found
  product = product.replace(activation=name)
  return dataclasses.replace(chain, last=indices[-1], product=product), set(indices)


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


def _bias(x: Var, chain: _Chain, shape: tuple[int, ...], made_by) -> Var | None:
  """What is the same in each row of x, which is added to a result of that shape."""
  lhs, rhs, _ = chain.axes
  rank = len([axis for axis in rhs if axis not in lhs])
  if not _is_matrix(chain.axes) or not 0 < rank < len(shape):
    return None
  cols, rows = shape[len(shape) - rank :], len(shape) - rank
  wanted = (*(1,) * rows, *cols)
  while True:
    if x.aval.shape in (cols, wanted) and x.aval.shape != shape:
      return x
    equation = made_by.get(x)
    if equation is None or equation.primitive.name != "broadcast_in_dim":
      return None
    (before, *_), mapped = equation.invars, equation.params["broadcast_dimensions"]
    # Columns of the result are those of what was broadcast, and its rows all one.
    kept = [i for i, size in zip(mapped, before.aval.shape, strict=True) if size != 1]
    needed = [i for i in range(rows, len(shape)) if shape[i] != 1]
    if x.aval.shape[-rank:] != cols or kept != needed or not isinstance(before, Var):
      return None
    if len(x.aval.shape) != len(shape):
      return None
    x = before
    if math.prod(x.aval.shape) == math.prod(cols):
      return x


# Activations as they are written, of ours by the same names.
_WRITTEN = (
    ("squared_relu", lambda x: jnp.square(jax.nn.relu(x))),
    ("relu", jax.nn.relu),
    ("relu", lambda x: jnp.maximum(x, 0)),
    ("silu", jax.nn.silu),
    ("silu", lambda x: x * jax.nn.sigmoid(x)),
    ("gelu", functools.partial(jax.nn.gelu, approximate=True)),
    ("gelu_exact", functools.partial(jax.nn.gelu, approximate=False)),
    ("sigmoid", jax.nn.sigmoid),
    ("tanh", jnp.tanh),
)


@functools.lru_cache(maxsize=1024)
def _written(shape: tuple[int, ...], dtype) -> tuple[tuple[str, Jaxpr], ...]:
  x = jax.ShapeDtypeStruct(shape, dtype)
  return tuple((name, jax.make_jaxpr(fun)(x).jaxpr) for name, fun in _WRITTEN)


def _activation(
    out: Var, equations: Sequence[JaxprEqn], users: _Users
) -> tuple[str, list[int]] | None:
  """The activation that all users of `out` compute together, and which these are."""
  for name, pattern in _written(out.aval.shape, out.aval.dtype):
    if found := _matched(pattern, out, equations, users):
      return name, found
  return None


def _matched(
    pattern: Jaxpr, out: Var, equations: Sequence[JaxprEqn], users: _Users
) -> list[int]:
  """The indices of the equations that are those of the pattern, of `out`; [] if none."""
  (argument,), (result,) = pattern.invars, pattern.outvars
  of, indices = {argument: out}, []
  for wanted in pattern.eqns:
    inputs = [x if isinstance(x, Literal) else of[x] for x in wanted.invars]
    source = next(x for x in inputs if isinstance(x, Var))
    for index in users.get(source, ()):
      if index is not None and index not in indices:
        if _same(wanted, equations[index], inputs):
          break
    else:
      return []
    indices.append(index)
    of[wanted.outvars[0]] = equations[index].outvars[0]
  # Nothing else may need what is between, nor what enters.
  between = [x for x in of if x is not result]
  alone = all(set(users.get(of[x], ())) <= set(indices) for x in between)
  return sorted(indices) if alone else []


def _same(wanted: JaxprEqn, equation: JaxprEqn, inputs: Sequence[Var | Literal]) -> bool:
  """Whether an equation is the one that a pattern has, of these inputs."""
  if wanted.primitive is not equation.primitive:
    return False
  if len(inputs) != len(equation.invars):
    return False
  for a, b in zip(inputs, equation.invars, strict=True):
    if isinstance(a, Literal) != isinstance(b, Literal):
      return False
    if a.val != b.val if isinstance(a, Literal) else a is not b:
      return False
  inner = [core.jaxprs_in_params(x.params) for x in (wanted, equation)]
  if any(inner):
    return [*map(str, inner[0])] == [*map(str, inner[1])]
  return wanted.params == equation.params


# -- A chain's result ---------------------------------------------------------------


def _computed(equation: JaxprEqn, chain: _Chain, aval, read) -> jax.Array:
  lhs, rhs = map(read, equation.invars)
  if chain.exchanged:
    lhs, rhs = rhs, lhs
  others = []
  if chain.term is not None:
    others.append(read(chain.term))
  if chain.bias is not None:
    cols = [axis for axis in chain.axes[1] if axis not in chain.axes[0]]
    shape = aval.shape[aval.ndim - len(cols) :]
    others.append(lax.reshape(read(chain.bias), shape))
  others = [jnp.asarray(x) for x in others]
  return contract("accelerate", lhs, rhs, chain.axes, chain.product, others=others)
