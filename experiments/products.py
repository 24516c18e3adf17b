"""One problem as arrays and as compiled programs, one for each implementation."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses

import jax
from jax import lax
import jax.numpy as jnp

from experiments.kernel_count import count_gemms
import jaxgemm
from jaxgemm.autotune.operands import Inputs as Inputs
from jaxgemm.autotune.operands import make_inputs as make_inputs
from jaxgemm.autotune.operands import operand_types
from jaxgemm.autotune.operands import stored_shapes as stored_shapes
from jaxgemm.device import Device
from jaxgemm.plan import Plan, make_plan
from jaxgemm.precision import asked_for
from pallas_kernels.configs import Config
from pallas_kernels.problem import Problem

# "xla" is lax.dot_general itself, the baseline; "auto" lets jaxgemm choose, "invariant"
# among what is batch invariant.
IMPLEMENTATIONS = (
    "xla", "auto", "blocked", "direct", "pipelined", "persistent", "split_k", "gemv",
    "triton", "invariant",
)

Product = Callable[[jax.Array, jax.Array], jax.Array]


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


def dimension_numbers(problem: Problem) -> lax.DotDimensionNumbers:
  """Returns what lax.dot_general must contract, given the stored operands."""
  batch = (0,) if problem.batch > 1 else ()
  lhs_k = len(batch) + (problem.lhs_layout == "k-major")
  rhs_k = len(batch) + (problem.rhs_layout == "k-major")
  return ((lhs_k,), (rhs_k,)), (batch, batch)


def describe(plan: Plan) -> str:
  """Returns a plan in one line: kernel, config, where it came from, and why."""
  source = plan.source
  if source != "override":  # Else the reason is that the implementation was named.
    source += f": {plan.reason}"
  return f"{describe_config(plan.kernel, plan.config)} [{source}]"


def describe_config(kernel: str, config: Config | None, *, brief: bool = False) -> str:
  """Returns a kernel and its config in words.

  Fields that belong together share a word: tile=128x256x64. Of the rarer ones,
  `brief` leaves out those that have their default.
  """
  if config is None:
    return kernel
  words = _config_words(config)
  if brief:
    usual = _config_words(type(config)())
    words = {
        name: value
        for name, value in words.items()
        if value != usual[name] or name in ("tile", "num_stages", "splits")
    }
  return " ".join([kernel, *(f"{name}={value}" for name, value in words.items())])


def _config_words(config: Config) -> dict[str, str]:
  words: dict[str, str] = {}
  for name, value in dataclasses.asdict(config).items():
    stem, _, dimension = name.rpartition("_")
    if dimension in ("m", "n", "k") and stem in ("tile", "cluster"):
      words[stem] = f"{words[stem]}x{value}" if stem in words else str(value)
    else:
      words[name] = str(value)
  return words


def make_candidate(
    problem: Problem,
    implementation: str,
    device: Device | None,
    *,
    emulated: bool,
    config: Config | None = None,
) -> Candidate:
  """Returns `problem` under `implementation`, planned for `device`.

  The program is jitted, neither traced nor compiled yet. An implementation that
  cannot serve the problem comes back without a product, never as another one.

  Args:
    problem, implementation: what to compute, and a member of IMPLEMENTATIONS.
    device: the device to plan for; None if the kernels do not know it.
    emulated: whether a CPU stands in for the device. Its XLA reads all bits of
      float32 operands, the device's only those of TF32 or of two bfloat16 parts, so
      that the baseline then rounds them first: kernels are held to the error of their
      own arithmetic.
    config: the config of the named kernel; None lets jaxgemm choose.
  """
  numbers = dimension_numbers(problem)
  out_dtype = jnp.dtype(problem.out_dtype)
  precision = asked_for(problem.algorithm)
  if emulated and problem.algorithm == "bf16_x3":
    precision = "high"  # A CPU does not know the preset.

  if implementation == "xla":

    @jax.jit
    def xla_product(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
      def dot(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return lax.dot_general(
            lhs, rhs, numbers, precision=precision, preferred_element_type=out_dtype
        )

      if emulated and problem.algorithm == "tf32_f32":
        lhs, rhs = (lax.reduce_precision(x, 8, 10) for x in (lhs, rhs))
      if emulated and problem.algorithm == "bf16_x3":
        (high, low), (rhs_high, rhs_low) = _halves(lhs), _halves(rhs)
        return dot(high, rhs_low) + dot(low, rhs_high) + dot(high, rhs_high)
      return dot(lhs, rhs)

    return Candidate(implementation, "xla", "xla", xla_product)

  name = None if implementation in ("auto", "invariant") else implementation
  invariant = implementation == "invariant"
  try:
    plan = make_plan(
        problem if config is not None or invariant else problem.canonical, device,
        implementation=name, config=config, batch_invariant=invariant,
    )
  except ValueError as error:
    return Candidate(implementation, f"n/a: {error}", implementation, None)

  @jax.jit
  def product(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    with jaxgemm.batch_invariant(invariant):
      return jaxgemm.dot_general(
          lhs, rhs, numbers, precision=precision, preferred_element_type=out_dtype,
          implementation=name, config=config,
      )

  return Candidate(implementation, describe(plan), plan.kernel, product)


def _halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns x rounded to bfloat16, and what is left of it, rounded as well."""
  high = lax.reduce_precision(x, 8, 7)
  return high, lax.reduce_precision(x - high, 8, 7)


def compiled(candidate: Candidate, problem: Problem) -> Candidate:
  """Returns `candidate` with its product compiled ahead of its first call.

  Raises:
    RuntimeError: the compiled program does not run the kernel of the plan.
  """
  if candidate.product is None:
    return candidate
  product = candidate.product.lower(*operand_types(problem)).compile()
  if candidate.kernel != "xla":
    gemms = count_gemms(product.as_text())
    if dict(gemms.jaxgemm) != {candidate.kernel: 1} or gemms.xla:
      raise RuntimeError(f"planned {candidate.kernel}, compiled {gemms}")
  return dataclasses.replace(candidate, product=product)
