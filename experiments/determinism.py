r"""Whether products whose k is split give the same bits on every call.

Of a suite, those problems run whose plan splits k among several CTAs: elsewhere each
sum has one CTA and one order. Each is called on the same inputs, by default 100 times,
and buffers of NaN are freed before each call, where its result and its partial sums
will most likely lie. Every result is compared bit by bit with the first. The exit
status is 1 if any differs, or is not finite. NAME.jsonl has a line for each problem.

  python -m experiments.determinism --suite=full
  python -m experiments.determinism --shapes=256,256,65536:NN+TN --calls=1000
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import concurrent.futures
import dataclasses
import json
import os
import sys

from absl import app, flags
import jax
from jax import lax
import jax.numpy as jnp

from experiments import cli, common_flags, products, report
from experiments.suites import Case
from jaxgemm.device import Device
from jaxgemm.plan import make_plan

flags.adopt_module_key_flags(cli)
_CALLS = flags.DEFINE_integer("calls", 100, "Calls of each problem.", lower_bound=2)

_MAX_THREADS = 16


@dataclasses.dataclass(frozen=True)
class Repeats:
  """What repeated calls of one problem gave.

  Attributes:
    name, plan: the problem, and what ran.
    calls: how many there were.
    different: calls whose result differs from the first one's in some bit.
    finite: whether the first result is finite; if not, equal bits mean nothing.
    provenance: where, with what, when and how it ran.
  """

  name: str
  plan: str
  calls: int
  different: int
  finite: bool
  provenance: report.Provenance

  @property
  def failed(self) -> bool:
    return self.different > 0 or not self.finite

  def to_json(self) -> str:
    """Returns the row as one line of JSON."""
    fields = dataclasses.asdict(self)
    return json.dumps(fields | fields.pop("provenance"))

  def __str__(self) -> str:
    if not self.finite:
      verdict = "FAILED: not finite"
    elif self.different:
      verdict = f"FAILED: {self.different} of {self.calls} calls differ from the first"
    else:
      verdict = f"{self.calls} calls, the same bits"
    return f"{self.name}: {verdict} ({self.plan})"


def num_splits(case: Case, device: Device) -> int:
  """Returns among how many CTAs the plan of a case splits k."""
  return getattr(make_plan(case.problem, device).config, "splits", 1)


def repeat(
    case: Case,
    product: products.Product,
    *,
    plan: str,
    splits: int,
    calls: int,
    seed: int,
    provenance: report.Provenance,
) -> Repeats:
  """Calls `product` on the same inputs and compares what it gives.

  Args:
    case: the problem.
    product: (lhs, rhs) -> out.
    plan: what runs, in words.
    splits: among how many CTAs k is split: partial sums take so many results.
    calls: how often to call it.
    seed: seed of the inputs.
    provenance: what all rows share.
  """
  inputs = products.make_inputs(case.problem)(jax.random.key(seed))
  # A result's size first, then the sums': each may take the place of its like.
  shapes = [
      (case.problem.out_shape, case.problem.out_dtype),
      ((splits, *case.problem.out_shape), "float32"),
  ]
  poison = jax.jit(lambda: [jnp.full(shape, jnp.nan, dtype) for shape, dtype in shapes])

  def call() -> jax.Array:
    buffers = jax.block_until_ready(poison())
    for buffer in buffers:
      buffer.delete()
    return product(*inputs)

  first = call()
  different = sum(bool(_differ(first, call())) for _ in range(calls - 1))
  finite = bool(jnp.isfinite(first).all())
  return Repeats(case.name, plan, calls, different, finite, provenance)


@jax.jit
def _differ(one: jax.Array, other: jax.Array) -> jax.Array:
  """Returns whether any bit differs; NaNs of the same bits are the same."""
  bits = jnp.dtype(f"uint{8 * one.dtype.itemsize}")
  one, other = (lax.bitcast_convert_type(x, bits) for x in (one, other))
  return (one != other).any()


def _rows(
    cases: Sequence[Case],
    device: Device,
    prepare: Callable[[Case], products.Candidate],
    provenance: report.Provenance,
) -> Iterator[list[Repeats]]:
  """Yields the row of each case, in a list; programs compile ahead in threads."""
  num_threads = min(_MAX_THREADS, os.cpu_count() or 1)
  with concurrent.futures.ThreadPoolExecutor(num_threads) as pool:
    for case, candidate in zip(cases, pool.map(prepare, cases), strict=True):
      assert candidate.product is not None
      yield [
          repeat(
              case,
              candidate.product,
              plan=candidate.plan,
              splits=num_splits(case, device),
              calls=_CALLS.value,
              seed=common_flags.SEED.value,
              provenance=provenance,
          )
      ]


def main(argv: Sequence[str]) -> None:
  platform = cli.start(argv)
  device = platform.device
  if device is None:
    raise app.UsageError(f"the heuristics know no {platform.name}")
  suite, cases = cli.cases(platform)
  split = [case for case in cases if num_splits(case, device) > 1]

  def prepare(case: Case) -> products.Candidate:
    candidate = products.make_candidate(
        case.problem, "auto", device, emulated=not platform.on_gpu
    )
    return products.compiled(candidate, case.problem) if platform.on_gpu else candidate

  path = cli.output_path(f"determinism_{suite}").with_suffix(".jsonl")
  provenance = cli.row_provenance(suite, platform, "experiments.determinism")
  with platform.context():
    rows = cli.record(_rows(split, device, prepare, provenance), len(split), path)
  for row in rows:
    print(row)
  failed = sum(row.failed for row in rows)
  print(
      f"{len(split)} of {len(cases)} problems split k; {failed} of them failed: {path}"
  )
  if failed:
    sys.exit(1)


if __name__ == "__main__":
  app.run(main)
