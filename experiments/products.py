"""One problem as arrays and as compiled programs, one for each implementation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

import jaxgemm
from jaxgemm.device import Device
from jaxgemm.plan import Plan, make_plan
from pallas_kernels.problem import Problem

# "xla" is lax.dot_general itself, the baseline; "auto" lets jaxgemm choose.
IMPLEMENTATIONS = ("xla", "auto", "blocked", "pipelined", "persistent", "split_k")

Product = Callable[[jax.Array, jax.Array], jax.Array]
Inputs = tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class Candidate:
  """One implementation of one problem.

  Attributes:
    implementation: a member of IMPLEMENTATIONS.
    plan: what runs, in words; with `product` None, "n/a: " and the reason.
    kernel: name of the kernel that runs, "xla" if it is XLA's own.
    product: (lhs, rhs) -> out, or None where it cannot serve the problem.
  """

  implementation: str
  plan: str
  kernel: str
  product: Product | None


def stored_shapes(problem: Problem) -> tuple[tuple[int, ...], tuple[int, ...]]:
  """Returns the shapes of lhs and rhs as stored, without a batch of one."""
  shapes = problem.lhs_shape, problem.rhs_shape
  return shapes if problem.batch > 1 else tuple(shape[1:] for shape in shapes)


def dimension_numbers(problem: Problem) -> lax.DotDimensionNumbers:
  """Returns what lax.dot_general must contract, given the stored operands."""
  batch = (0,) if problem.batch > 1 else ()
  lhs_k = len(batch) + (problem.lhs_layout == "k-major")
  rhs_k = len(batch) + (problem.rhs_layout == "k-major")
  return ((lhs_k,), (rhs_k,)), (batch, batch)


def make_inputs(problem: Problem) -> Callable[[jax.Array], Inputs]:
  """Returns a jitted function of a PRNG key: normal operands, made on the device."""
  lhs_shape, rhs_shape = stored_shapes(problem)

  @jax.jit
  def inputs(key: jax.Array) -> Inputs:
    lhs_key, rhs_key = jax.random.split(key)
    lhs = jax.random.normal(lhs_key, lhs_shape, problem.dtype)
    return lhs, jax.random.normal(rhs_key, rhs_shape, problem.dtype)

  return inputs


def describe(plan: Plan) -> str:
  """Returns a plan in one line: kernel, config and source, or why it is XLA's.

  Of the config, fields that belong together share a word: tile=128x256x64.
  """
  if plan.config is None:
    return f"{plan.kernel} [{plan.source}: {plan.reason}]"
  words: dict[str, str] = {}
  for name, value in dataclasses.asdict(plan.config).items():
    stem, _, dimension = name.rpartition("_")
    if dimension in ("m", "n", "k") and stem in ("tile", "cluster"):
      words[stem] = f"{words[stem]}x{value}" if stem in words else str(value)
    else:
      words[name] = str(value)
  config = " ".join(f"{name}={value}" for name, value in words.items())
  return f"{plan.kernel} {config} [{plan.source}]"


def make_candidate(
    problem: Problem, implementation: str, device: Device | None
) -> Candidate:
  """Returns `problem` under `implementation`, planned for `device`.

  The program is jitted, neither traced nor compiled yet. An implementation that
  cannot serve the problem comes back without a product, never as another one.
  """
  numbers = dimension_numbers(problem)
  out_dtype = jnp.dtype(problem.out_dtype)

  if implementation == "xla":

    @jax.jit
    def xla_product(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
      return lax.dot_general(lhs, rhs, numbers, preferred_element_type=out_dtype)

    return Candidate(implementation, "xla", "xla", xla_product)

  name = None if implementation == "auto" else implementation
  try:
    plan = make_plan(problem, device, implementation=name)
  except ValueError as error:
    return Candidate(implementation, f"n/a: {error}", implementation, None)

  @jax.jit
  def product(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return jaxgemm.dot_general(
        lhs,
        rhs,
        numbers,
        preferred_element_type=out_dtype,
        implementation=name,
    )

  return Candidate(implementation, describe(plan), plan.kernel, product)


def compiled(candidate: Candidate, problem: Problem) -> Candidate:
  """Returns `candidate` with its product compiled ahead of its first call."""
  if candidate.product is None:
    return candidate
  arguments = [
      jax.ShapeDtypeStruct(shape, problem.dtype) for shape in stored_shapes(problem)
  ]
  product = candidate.product.lower(*arguments).compile()
  return dataclasses.replace(candidate, product=product)
