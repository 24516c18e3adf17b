"""accelerate: a function that exists, its products ours and fused with what follows.

A product that is a call of its own leaves to XLA what comes behind it: a bias, an
activation, a factor, another term, a cast. XLA fuses those with its own products, or some
of them, and cannot with ours. Where a model's code is not to be changed, its jaxpr is:

  d = dot_general a b
  e = add d bias                ->  f = jaxgemm_linear a b bias; activation=relu
  f = relu e

What follows is taken into the kernel as long as nothing else wants what is between. The
sums and what follows are then float32, and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import functools
from typing import Any

import jax
from jax import lax
from jax.extend import core
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, primitives
import jax.numpy as jnp

from jaxgemm import ragged_product
from jaxgemm.chains import Chain, Fusion
from jaxgemm.checkpoint_policies import knowing_ours
from jaxgemm.contraction import contract
from jaxgemm.equations import is_plain
from jaxgemm.primitive import gemm_p
from jaxgemm.ragged_chains import RaggedChain
from jaxgemm.ragged_product import ragged_p
from pallas_kernels import compat

# Those whose own jaxprs are rewritten, and by which parameter they have them.
_OUTER = {
    primitives.jit_p: "jaxpr",
    primitives.scan_p: "jaxpr",
    primitives.remat_p: "jaxpr",
    primitives.while_p: "body_jaxpr",
    primitives.cond_p: "branches",
}
_PRODUCTS = primitives.dot_general_p, gemm_p, ragged_p


def accelerate[**P, R](fun: Callable[P, R]) -> Callable[P, R]:
  """Returns `fun` with each lax.dot_general, jnp.matmul, einsum and so on ours.

  And lax.ragged_dot and its gradients, of bfloat16 and float16, without a batch and with
  rhs [groups, k, n], stored so or transposed by `fun`; in checkpoints they count as
  products, which lax's do not: policies that save these save ours.

  And with what follows a product in its kernel: a number that multiplies it, a bias, an
  activation (jax.nn's relu, silu, gelu, sigmoid, tanh), a sum with another array, a
  conversion, as far as nothing else needs the product without. All that is float32, and
  rounded to the result's dtype once, whatever dtypes it has in `fun`. Best of a whole
  step of training, gradients included, or of a model that is served.

  What `fun` does otherwise, its loops, checkpoints and inner jits, stays as it is. So do
  products inside of jax.shard_map, of functions with derivatives of their own
  (jax.custom_jvp, custom_vjp) that are still to be derived, on explicit meshes, and those
  that no kernel of ours serves. Contexts, as jaxgemm.batch_invariant, count around the
  call, not within `fun`.

  Args:
    fun: of arrays, and trees of them, to such. What is static must be bound before, as
      by functools.partial.
  Returns: a function of the same arguments that gives the same to rounding: to be jitted,
    differentiated and mapped as `fun` is.
  Raises:
    TypeError: `fun` is none; and whatever `fun` raises when it is traced.
  Example: step = jax.jit(jaxgemm.accelerate(step))
  """
  if not callable(fun):
    raise TypeError(
        f"accelerate: fun is of type {type(fun).__name__}; it must be a function"
    )

  @functools.wraps(fun)
  def accelerated(*args: P.args, **kwargs: P.kwargs) -> R:
    closed, out = jax.make_jaxpr(fun, return_shape=True)(*args, **kwargs)
    found = _Rewriter().run(closed.jaxpr, closed.consts, jax.tree.leaves((args, kwargs)))
    return jax.tree.unflatten(jax.tree.structure(out), found)

  return accelerated


class _Rewriter:
  """Runs jaxprs, and remembers those that it has rewritten."""

  def __init__(self):
    self._found: dict[int, tuple[Any, Any]] = {}  # Each with what keeps its id its own.

  def run(self, jaxpr: Jaxpr, consts: Sequence, args: Sequence) -> list:
    """What the jaxpr computes."""
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    read = lambda x: x.val if isinstance(x, Literal) else env[x]
    fusion = Fusion(jaxpr)
    done = fusion.last_uses()
    for index, equation in enumerate(jaxpr.eqns):
      if index in fusion.within:
        continue
      if index in fusion.chains:
        chain = fusion.chains[index]
        product = jaxpr.eqns[chain.first]
        with compat.source_of(product):
          results = [_computed(product, chain, equation.outvars[0].aval, read)]
      elif index in fusion.ragged:
        chain = fusion.ragged[index]
        product = jaxpr.eqns[chain.first]
        with compat.source_of(product):
          results = [_ragged_computed(product, chain, read)]
      else:
        values = list(map(read, equation.invars))
        results = compat.rebind(equation, self._params(equation), values)
        del values
      env.update(zip(equation.outvars, results, strict=True))
      del results
      for x in done.get(index, ()):  # Which computed at once would take up memory.
        env.pop(x, None)
    return list(map(read, jaxpr.outvars))

  def _params(self, equation: JaxprEqn) -> dict[str, Any]:
    """Its parameters, the products of jaxprs among them ours."""
    name, params = _OUTER.get(equation.primitive), equation.params
    if name is None:
      return params
    inner = params[name]
    if isinstance(inner, tuple):
      return params | {name: tuple(map(self._rewritten, inner))}
    made = self._rewritten(inner)
    if made is not inner and params.get("policy") is not None:
      params = params | {"policy": knowing_ours(params["policy"])}
    return params | {name: made}

  def _rewritten[T: (Jaxpr, ClosedJaxpr)](self, inner: T) -> T:
    if id(inner) not in self._found:
      self._found[id(inner)] = inner, self._made(inner)
    return self._found[id(inner)][1]

  def _made(self, inner):
    """The same jaxpr with our products; it itself where there are none, or none fits."""
    closed = inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, ())
    avals = [x.aval for x in closed.jaxpr.invars]
    if not _has_products(closed.jaxpr) or not all(map(is_plain, avals)):
      return inner
    types = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in avals
    ]
    made = jax.make_jaxpr(lambda *args: self.run(closed.jaxpr, closed.consts, args))(
        *types
    )
    same = all(map(_alike, closed.out_avals, made.out_avals))
    if not same or made.effects != closed.effects:
      return inner
    if isinstance(inner, ClosedJaxpr):
      return made
    return inner if made.consts else made.jaxpr


def _alike(a, b) -> bool:
  """Whether two results are arrays of one type."""
  types = [(x.shape, x.dtype, x.weak_type) for x in (a, b)]
  return types[0] == types[1] and is_plain(a) and is_plain(b)


def _has_products(jaxpr: Jaxpr) -> bool:
  return any(
      equation.primitive in _PRODUCTS
      or equation.primitive.name == "ragged_dot_general"  # Which JAX does not export.
      or any(map(_has_products, core.jaxprs_in_params(equation.params)))
      for equation in jaxpr.eqns
  )


# -- A chain's result ---------------------------------------------------------------


def _computed(equation: JaxprEqn, chain: Chain, aval, read) -> jax.Array:
  lhs, rhs = map(read, equation.invars[:2])
  if chain.exchanged:
    lhs, rhs = rhs, lhs
  others = [] if chain.up is None else [read(chain.up)]
  if chain.c is not None:
    others.append(read(chain.c))
  if chain.bias is not None:
    cols = [axis for axis in chain.axes[1] if axis not in chain.axes[0]]
    shape = aval.shape[aval.ndim - len(cols) :]
    others.append(lax.reshape(read(chain.bias), shape))
  others = [jnp.asarray(x) for x in others]
  return contract("accelerate", lhs, rhs, chain.axes, chain.product, others=others)


def _ragged_computed(equation: JaxprEqn, chain: RaggedChain, read) -> jax.Array:
  lhs, rhs, group_sizes = (jnp.asarray(read(x)) for x in equation.invars[:3])
  if chain.exchanged:
    lhs, rhs = rhs, lhs
  return ragged_product.bind(lhs, rhs, group_sizes, chain.facts)
