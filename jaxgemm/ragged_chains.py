"""What a kernel can compute of a jaxpr in groups of rows, and the equations behind it.

  begun   ragged_dot, or one of our products
  turned  a narrower result, or one transposed that lhs and rhs, exchanged, give

See `chains` for those of other products.
"""

from __future__ import annotations

import dataclasses

from jax.extend.core import JaxprEqn
import jax.numpy as jnp

from jaxgemm import precision as precisions
from jaxgemm.contexts import current_target, is_batch_invariant
from jaxgemm.equations import FLOATS, is_plain
from jaxgemm.ragged_product import Ragged, algorithm_of, ragged_p
from pallas_kernels import compat

_SUMMED = "float16", "bfloat16"  # Of operands whose sums are of groups of rows,
_GROUPED = *_SUMMED, "int8", "float8_e4m3fn", "float8_e5m2"  # and whose rows are.
# How ragged_dot_general counts dimensions: contracted, of the rows, of the groups. Of
# another order one of the operands would have to be transposed first.
_RAGGED_FORMS = {
    (((1,), (1,)), (0,), (0,)): dict(sums=False, transposed=False),
    (((1,), (2,)), (0,), (0,)): dict(sums=False, transposed=True),
    (((0,), (0,)), (0,), ()): dict(sums=True, transposed=False),
}


@dataclasses.dataclass(frozen=True)
class RaggedChain:
  """A product in groups of rows and the equations behind it that its kernel can compute.

  Attributes:
    first, last, taken, exchanged: as of a `chains.Chain`.
    facts: what it is.
  """

  first: int
  last: int
  taken: frozenset[int]
  facts: Ragged
  exchanged: bool = False


def begun(index: int, equation: JaxprEqn) -> RaggedChain | None:
  """The chain of a product in groups of rows alone; None if it is none, or not ours."""
  params = equation.params
  if equation.primitive is ragged_p:
    facts = params["facts"]
    named = facts.implementation is not None or facts.config is not None
    return None if named else RaggedChain(index, index, frozenset([index]), facts)
  if equation.primitive.name != "ragged_dot_general":
    return None
  form = _ragged_form(params["ragged_dot_dimension_numbers"])
  avals = [x.aval for x in equation.invars]
  if form is None or len(avals) != 3 or not all(map(is_plain, avals)):
    return None
  lhs, rhs, group_sizes = avals
  ranks = 2, 2 if form["sums"] else 3, 1
  if tuple(x.ndim for x in avals) != ranks or lhs.dtype != rhs.dtype:
    return None
  if lhs.weak_type or rhs.weak_type:
    return None
  if params.get("group_offset") is not None or params.get("out_sharding") is not None:
    return None
  invariant = is_batch_invariant() and not form["sums"]
  facts = Ragged(
      **form, out_dtype=equation.outvars[0].aval.dtype.name,
      precision=compat.canonicalize_precision(params["precision"]), implementation=None,
      config=None, must_serve=True, batch_invariant=invariant, target=current_target(),
  )
  n = rhs.shape[1 if form["sums"] or form["transposed"] else 2]
  _, reason = algorithm_of(lhs, rhs, n=n, facts=facts)
  if lhs.dtype.name not in (_SUMMED if form["sums"] else _GROUPED):
    reason = reason or f"no kernel multiplies groups of rows of {lhs.dtype}"
  if reason and invariant:
    raise ValueError(f"batch_invariant: XLA's product is not: {reason}")
  if reason:
    return None
  return RaggedChain(index, index, frozenset([index]), facts)


def _ragged_form(numbers) -> dict[str, bool] | None:
  """Which of ours a product in groups of rows of such dimension numbers is."""
  contracted, batch = numbers.dot_dimension_numbers
  ints = lambda dims: tuple(map(int, dims))
  if any(map(ints, batch)):
    return None
  key = (
      tuple(map(ints, contracted)), ints(numbers.lhs_ragged_dimensions),
      ints(numbers.rhs_group_dimensions),
  )
  return _RAGGED_FORMS.get(key)


def turned(chain: RaggedChain, index: int, equation: JaxprEqn) -> RaggedChain | None:
  """The chain with the equation that takes its result, if the kernel can."""
  facts, name = chain.facts, equation.primitive.name
  result, exchanged = equation.outvars[0].aval, chain.exchanged
  if not is_plain(result) or result.weak_type:
    return None
  if name == "convert_element_type":
    widened = result.dtype.itemsize >= jnp.dtype(facts.out_dtype).itemsize
    floats = {facts.out_dtype, result.dtype.name} <= set(FLOATS)
    if widened or not floats:  # Of int8 the kernel has int32 alone.
      return None
    facts = facts.replace(out_dtype=result.dtype.name)
  elif name == "transpose" and facts.sums:
    if tuple(equation.params["permutation"]) != (0, 2, 1):
      return None
    facts = facts.replace(precision=precisions.exchanged(facts.precision))
    exchanged = not exchanged
  else:
    return None
  return RaggedChain(chain.first, index, chain.taken | {index}, facts, exchanged)
