"""Functions that compute a problem as users' products do, by a choice of its kernel."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools

import jax

from jaxgemm import ragged_product
from jaxgemm.contexts import current_target
from jaxgemm.dims import Dims
from jaxgemm.precision import asked_for
from jaxgemm.primitive import bind
from jaxgemm.product import Product
from jaxgemm.ragged_product import Ragged
from jaxgemm.scaled_product import Scaled, scaled_product
from pallas_kernels.configs import Config
from pallas_kernels.problem import Problem


@dataclasses.dataclass(frozen=True)
class Choice:
  """What may compute a problem: a kernel and its config, or "xla" and None."""

  kernel: str
  config: Config | None

  def __str__(self) -> str:
    return self.kernel if self.config is None else f"{self.kernel} {self.config}"


def program(problem: Problem, choice: Choice) -> Callable[..., jax.Array]:
  """Returns a function of the problem's operands, as `operands.Inputs` has them."""
  scaling = problem.epilogue.scaling
  if problem.grouped:
    facts = Ragged(
        sums=problem.grouped == "k", transposed=problem.rhs_layout == "k-major",
        out_dtype=problem.out_dtype, precision=asked_for(problem.algorithm),
        implementation=choice.kernel, config=choice.config, must_serve=True,
        batch_invariant=False, target=current_target(), scaling=scaling,
    )
    return functools.partial(_of_groups, facts)
  if scaling != "none":
    facts = Scaled(
        scaling, problem.out_dtype, choice.kernel, choice.config, batch_invariant=False,
        target=current_target(),
    )
    return functools.partial(scaled_product, facts=facts)
  return functools.partial(bind, product=bound_product(problem, choice))


def _of_groups(facts: Ragged, lhs, rhs, *others) -> jax.Array:
  *scales, sizes = others
  if scales:
    return ragged_product.bind_scaled(lhs, rhs, sizes, *scales, facts)
  return ragged_product.bind(lhs, rhs, sizes, facts)


def bound_product(problem: Problem, choice: Choice) -> Product:
  """Returns the parameters with which gemm_p computes this problem by this choice."""
  lhs = "mk" if problem.lhs_layout == "k-major" else "km"
  rhs = "kn" if problem.rhs_layout == "n-major" else "nk"
  return Product(
      dims=Dims(
          f"b{lhs}" if problem.lhs_batched else lhs,
          f"b{rhs}" if problem.rhs_batched else rhs,
          b=int(problem.batch > 1),
      ),
      out_dtype=problem.out_dtype,
      algorithm=problem.algorithm,
      # The baseline is XLA's product as users get it, whatever the context says.
      precision=asked_for(problem.algorithm),
      alpha=problem.epilogue.alpha,
      beta=problem.epilogue.beta,
      implementation=choice.kernel,
      config=choice.config,
      target=current_target(),
  )
