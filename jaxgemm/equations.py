"""What rewriting asks of a jaxpr's equations: who uses what, and which are an activation.

Activations are found by the equations that they are written as, whatever stands between.
"""

from __future__ import annotations

from collections.abc import Sequence
import functools

import jax
from jax.extend import core
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
import jax.numpy as jnp

FLOATS = "float16", "bfloat16", "float32"  # Of operands, and of what is fused.
Users = dict[Var, list[int | None]]  # Of a variable: equations, None for the results.


def is_plain(aval) -> bool:
  """Whether it is an array in the device's memory, of no explicit mesh."""
  if not isinstance(aval, jax.core.ShapedArray) or not aval.sharding.mesh.empty:
    return False
  return aval.memory_space == jax.memory.Space.Device


def users_of(jaxpr: Jaxpr) -> Users:
  """The equations that take each variable, by their indices."""
  found: Users = {}
  for index, equation in enumerate(jaxpr.eqns):
    for x in equation.invars:
      if isinstance(x, Var):
        found.setdefault(x, []).append(index)
  for x in jaxpr.outvars:
    if isinstance(x, Var):
      found.setdefault(x, []).append(None)
  return found


# Activations as they are written, of ours by the same names.
_WRITTEN = (
    ("squared_relu", lambda x: jnp.square(jax.nn.relu(x))),
    ("relu", jax.nn.relu),
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
  with jax.disable_jit(False):
    return tuple((name, jax.make_jaxpr(fun)(x).jaxpr) for name, fun in _WRITTEN)


def activation(
    out: Var, equations: Sequence[JaxprEqn], users: Users
) -> tuple[str, list[int]] | None:
  """The activation that all users of `out` compute together, and which these are."""
  for name, pattern in _written(out.aval.shape, out.aval.dtype):
    if found := _matched(pattern, out, equations, users):
      return name, found
  return None


def _matched(
    pattern: Jaxpr, out: Var, equations: Sequence[JaxprEqn], users: Users
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
  orders = [equation.invars]
  if wanted.primitive.name in ("mul", "add"):
    orders.append(equation.invars[::-1])
  if not any(
      len(order) == len(inputs) and all(map(_equal, inputs, order)) for order in orders
  ):
    return False
  inner = [core.jaxprs_in_params(x.params) for x in (wanted, equation)]
  if not any(inner):
    return wanted.params == equation.params
  # Where it is defined says which derivative it has, which is no part of the text.
  text = lambda jaxpr: (str(jaxpr), jaxpr.debug_info.func_src_info)
  return [*map(text, inner[0])] == [*map(text, inner[1])]


def _equal(a: Var | Literal, b: Var | Literal) -> bool:
  if isinstance(a, Literal) and isinstance(b, Literal):
    return bool(a.val == b.val)
  return a is b
