r"""What a product costs before it runs: tracing, planning, lowering, compiling.

  trace    from a Python function to a jaxpr, as jax.jit does it: under jnp.matmul and
           under jaxgemm.matmul
  plan     which kernel and config: jaxgemm alone, as a product is lowered
  lower    from the jaxpr to the program that is compiled; it holds the plan, and
           the trace of the kernel itself
  compile  of one 4096 x 4096 x 4096 product under each kernel; XLA's tries its
           alternatives on the GPU. Only with a GPU.

A fresh problem has sizes that the process has not seen; a known one has been traced,
planned and lowered before, in another function. The figures are medians, and go to
overhead.json. Without a GPU everything is planned and lowered for an H200.

  python -m experiments.overhead
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
import functools
import itertools
import json
import statistics
import time

from absl import app, flags
import jax
import jax.numpy as jnp
import tabulate

from experiments import cli, common_flags, provenance, report
import jaxgemm
from jaxgemm.device import Device
from jaxgemm.plan import IMPLEMENTATIONS, make_plan
from pallas_kernels.problem import Problem

flags.adopt_module_key_flags(common_flags)
_PROBLEMS = flags.DEFINE_integer(
    "problems", 100, "Fresh problems to trace and plan; a tenth of them is lowered.",
    lower_bound=1,
)

Matmul = Callable[[jax.Array, jax.Array], jax.Array]
_COMPILED_SIZE = 4096
# A plan depends on sizes in many ways: rows of few and of many tokens, of which the
# columns are new each time.
_ROWS = (16, 64, 256, 1024, 8192)


@dataclasses.dataclass(frozen=True)
class Cost:
  """Medians in milliseconds of one stage; None where there is none.

  Attributes:
    stage: "trace", "plan" or "lower", then "fresh" or "known".
    baseline_ms: jnp.matmul's.
    ms: jaxgemm.matmul's.
  """

  stage: str
  baseline_ms: float | None
  ms: float

  @property
  def ratio(self) -> float | None:
    return None if self.baseline_ms is None else self.ms / self.baseline_ms


def fresh_sizes() -> Iterator[tuple[int, int, int]]:
  """Yields m, n, k of problems, no two alike; n and k are multiples of 8."""
  for i, m in enumerate(itertools.cycle(_ROWS)):
    yield m, 1024 + 8 * i, 2048 + 8 * (i % 97)


def trace_and_lower_ms(
    matmul: Matmul, sizes: tuple[int, int, int], *, lower: bool
) -> tuple[float, float]:
  """Returns the times in ms to trace and, if told to, to lower one product."""
  m, n, k = sizes
  lhs, rhs = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((m, k), (k, n)))
  function = jax.jit(lambda a, b: matmul(a, b))  # A function that no cache knows.
  start = time.perf_counter()
  traced = function.trace(lhs, rhs)
  middle = time.perf_counter()
  if lower:
    traced.lower(lowering_platforms=("cuda",))
  return 1e3 * (middle - start), 1e3 * (time.perf_counter() - middle)


def plan_ms(sizes: tuple[int, int, int], device: Device) -> float:
  """Returns the time in ms to plan one product."""
  problem = Problem(*sizes)
  start = time.perf_counter()
  make_plan(problem, device)
  return 1e3 * (time.perf_counter() - start)


def costs(device: Device, num_problems: int) -> list[Cost]:
  """Returns what each stage costs, on problems that it is the first to see."""
  sizes = fresh_sizes()

  def draw(count: int) -> list[tuple[int, int, int]]:
    return list(itertools.islice(sizes, count))

  # What is imported or built at the first use of all is nobody's cost.
  for matmul in (jnp.matmul, jaxgemm.matmul):
    trace_and_lower_ms(matmul, draw(1)[0], lower=True)
  traced, lowered = draw(num_problems), draw(max(1, num_problems // 10))
  planned = draw(num_problems)
  found = {}
  for age in ("fresh", "known"):
    for matmul in (jnp.matmul, jaxgemm.matmul):
      ours = matmul is jaxgemm.matmul
      found[f"trace, {age}", ours] = statistics.median(
          trace_and_lower_ms(matmul, one, lower=False)[0] for one in traced
      )
      found[f"lower, {age}", ours] = statistics.median(
          trace_and_lower_ms(matmul, one, lower=True)[1] for one in lowered
      )
    found[f"plan, {age}", True] = statistics.median(
        plan_ms(one, device) for one in planned
    )
  return [
      Cost(
          f"{stage}, {age}",
          found.get((f"{stage}, {age}", False)),
          found[f"{stage}, {age}", True],
      )
      for stage in ("trace", "plan", "lower")
      for age in ("fresh", "known")
  ]


def compile_seconds() -> dict[str, float]:
  """Returns the seconds to compile one product by each implementation on this GPU.

  One that cannot serve here, as what it needs is not installed, is left out.
  """
  shape = jax.ShapeDtypeStruct((_COMPILED_SIZE, _COMPILED_SIZE), jnp.bfloat16)
  found = {}
  for name in IMPLEMENTATIONS:
    matmul = functools.partial(jaxgemm.matmul, implementation=name)
    try:
      lowered = jax.jit(matmul).lower(shape, shape)
    except (ImportError, ValueError) as error:
      print(f"not compiled: {name}: {error}")
      continue
    start = time.perf_counter()
    lowered.compile()
    found[name] = time.perf_counter() - start
  return found


def table(found: Sequence[Cost]) -> str:
  """Returns a line for each stage."""
  lines = [
      {
          "stage": cost.stage,
          "jnp.matmul (ms)": report.figure(cost.baseline_ms, ".3f"),
          "jaxgemm.matmul (ms)": report.figure(cost.ms, ".3f"),
          "ratio": report.figure(cost.ratio, ".2f"),
      }
      for cost in found
  ]
  return tabulate.tabulate(
      lines,
      headers="keys",
      colalign=("left", "right", "right", "right"),
      disable_numparse=True,
  )


def main(argv: Sequence[str]) -> None:
  platform = cli.start(argv, "products are lowered and none is compiled")
  device = platform.device
  if device is None:
    raise app.UsageError(f"the heuristics know no {platform.name}")
  context = contextlib.nullcontext() if platform.on_gpu else jaxgemm.target(device.kind)
  with context:
    found = costs(device, _PROBLEMS.value)
  compiled = compile_seconds() if platform.on_gpu else {}
  result = {
      "costs": [dataclasses.asdict(cost) | {"ratio": cost.ratio} for cost in found],
      "compile_s": compiled,
      "device": platform.name,
      "jax": jax.__version__,
      "commit": provenance.commit(),
      "date": provenance.date(),
      "command": provenance.command("experiments.overhead"),
  }
  path = cli.output_path("overhead").with_suffix(".json")
  path.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
  print(table(found))
  for name, seconds in compiled.items():
    print(f"compile, {name}: {seconds:.2f} s")
  print(path)


if __name__ == "__main__":
  app.run(main)
