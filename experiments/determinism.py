r"""Whether products give the same bits on every call, in every process, under load.

Of a suite, those problems run whose plan splits k among several CTAs: elsewhere each
sum has one CTA and one order. With --kernels all run, in each kernel that takes
them. Each is called on the same inputs, by default 100 times, and buffers of NaN are
freed before each call, where its result and its partial sums will most likely lie. Every
result is compared bit by bit with the first; with --against also with that of an earlier
process. With --load another process multiplies on the same GPU meanwhile. The exit
status is 1 if any result differs, or is not finite. NAME.jsonl has a line for each
problem and kernel.

  python -m experiments.determinism --suite=full
  python -m experiments.determinism --shapes=256,256,65536:NN+TN --calls=1000 \
      --kernels=blocked,pipelined,persistent,split_k --output=one
  python -m experiments.determinism --shapes=256,256,65536:NN+TN --load \
      --kernels=blocked,pipelined,persistent,split_k \
      --against=one/determinism_shapes.jsonl
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import multiprocessing
import os
import pathlib
import sys
from unittest import mock

from absl import app, flags
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from experiments import cli, common_flags, products, report
from experiments.suites import Case
from jaxgemm.device import Device
from jaxgemm.plan import make_plan
from pallas_kernels import KERNELS

flags.adopt_module_key_flags(cli)
_CALLS = flags.DEFINE_integer("calls", 100, "Calls of each problem.", lower_bound=2)
_KERNELS = flags.DEFINE_list(
    "kernels", None, "Kernels that each problem runs in; else split plans alone."
)
_AGAINST = flags.DEFINE_string(
    "against", None, "JSON lines of an earlier run, whose results must be the same."
)
_LOAD = flags.DEFINE_boolean(
    "load", False, "Whether another process multiplies on the GPU meanwhile."
)
flags.register_validator(
    "kernels",
    lambda names: names is None or cli.member_check(tuple(KERNELS))(names),
    f"must be among {', '.join(KERNELS)}",
)

_MAX_THREADS = 16
_LOAD_SIZE = 4096
Key = tuple[str, str]  # Of a row: the problem's name, and the plan in words.


@dataclasses.dataclass(frozen=True)
class Repeats:
  """What repeated calls of one problem gave.

  Attributes:
    name, plan: the problem, and what ran.
    calls: how many there were.
    different: calls whose result differs from the first one's in some bit.
    finite: whether the first result is finite; if not, equal bits mean nothing.
    digest: of the first result's bits.
    earlier: that of an earlier process, or None.
    provenance: where, with what, when and how it ran.
  """

  name: str
  plan: str
  calls: int
  different: int
  finite: bool
  digest: str
  earlier: str | None
  provenance: report.Provenance

  @property
  def failed(self) -> bool:
    return self.different > 0 or not self.finite or self._has_changed

  @property
  def _has_changed(self) -> bool:
    return self.earlier not in (None, self.digest)

  def to_json(self) -> str:
    """Returns the row as one line of JSON."""
    fields = dataclasses.asdict(self)
    return json.dumps(fields | fields.pop("provenance"))

  def __str__(self) -> str:
    if not self.finite:
      verdict = "FAILED: not finite"
    elif self.different:
      verdict = f"FAILED: {self.different} of {self.calls} calls differ from the first"
    elif self._has_changed:
      verdict = "FAILED: other bits than in the earlier process"
    else:
      verdict = f"{self.calls} calls, the same bits"
      verdict += " as in the earlier process" * (self.earlier is not None)
    return f"{self.name}: {verdict} ({self.plan})"


def num_splits(case: Case, device: Device) -> int:
  """Returns among how many CTAs the plan of a case splits k."""
  return getattr(make_plan(case.problem.canonical, device).config, "splits", 1)


def repeat(
    case: Case,
    product: products.Product,
    *,
    plan: str,
    splits: int,
    calls: int,
    seed: int,
    provenance: report.Provenance,
    earlier: Mapping[Key, str] | None = None,
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
    earlier: digests of an earlier process, by problem and plan.
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
  digest = hashlib.sha256(np.asarray(first).tobytes()).hexdigest()
  return Repeats(
      case.name, plan, calls, different, finite, digest,
      (earlier or {}).get((case.name, plan)), provenance,
  )


@jax.jit
def _differ(one: jax.Array, other: jax.Array) -> jax.Array:
  """Returns whether any bit differs; NaNs of the same bits are the same."""
  bits = jnp.dtype(f"uint{8 * one.dtype.itemsize}")
  one, other = (lax.bitcast_convert_type(x, bits) for x in (one, other))
  return (one != other).any()


def digests(path: pathlib.Path) -> dict[Key, str]:
  """Returns the digests of an earlier run's rows."""
  rows = map(json.loads, path.read_text().splitlines())
  return {(row["name"], row["plan"]): row["digest"] for row in rows}


def _multiply_on() -> None:
  """Multiplies for ever, what another process is disturbed by."""
  x = jnp.ones((_LOAD_SIZE, _LOAD_SIZE), jnp.bfloat16)
  product = jax.jit(lambda x: x @ x / _LOAD_SIZE)
  while True:
    x = jax.block_until_ready(product(x))


@contextlib.contextmanager
def load(enabled: bool) -> Iterator[None]:
  """Within this context another process multiplies on the same device."""
  if not enabled:
    yield
    return
  # It takes what memory this process has left.
  with mock.patch.dict(os.environ, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}):
    process = multiprocessing.get_context("spawn").Process(target=_multiply_on)
    process.start()
  try:
    yield
    if process.exitcode is not None:
      raise RuntimeError(f"the load ended by itself, with status {process.exitcode}")
  finally:
    process.kill()
    process.join()


def _rows(
    work: Sequence[tuple[Case, str]],
    device: Device,
    prepare: Callable[[Case, str], products.Candidate],
    provenance: report.Provenance,
    earlier: Mapping[Key, str],
) -> Iterator[list[Repeats]]:
  """Yields the row of each case, in a list; programs compile ahead in threads.

  A kernel that does not take a case has no row.
  """
  num_threads = min(_MAX_THREADS, os.cpu_count() or 1)
  with concurrent.futures.ThreadPoolExecutor(num_threads) as pool:
    candidates = pool.map(lambda pair: prepare(*pair), work)
    for (case, _), candidate in zip(work, candidates, strict=True):
      if candidate.product is None:
        yield []
        continue
      yield [
          repeat(
              case,
              candidate.product,
              plan=candidate.plan,
              splits=num_splits(case, device),
              calls=_CALLS.value,
              seed=common_flags.SEED.value,
              provenance=provenance,
              earlier=earlier,
          )
      ]


def main(argv: Sequence[str]) -> None:
  platform = cli.start(argv)
  device = platform.device
  if device is None:
    raise app.UsageError(f"the heuristics know no {platform.name}")
  suite, cases = cli.cases(platform)
  if _KERNELS.value:
    work = [(case, name) for case in cases for name in _KERNELS.value]
  else:
    work = [(case, "auto") for case in cases if num_splits(case, device) > 1]

  def prepare(case: Case, implementation: str) -> products.Candidate:
    candidate = products.make_candidate(
        case.problem, implementation, device, emulated=not platform.on_gpu
    )
    if candidate.product is None or not platform.on_gpu:
      return candidate
    return products.compiled(candidate, case.problem)

  path = cli.output_path(f"determinism_{suite}").with_suffix(".jsonl")
  provenance = cli.row_provenance(suite, platform, "experiments.determinism")
  earlier = digests(pathlib.Path(_AGAINST.value)) if _AGAINST.value else {}
  with platform.context(), load(_LOAD.value):
    rows = cli.record(_rows(work, device, prepare, provenance, earlier), len(work), path)
  for row in rows:
    print(row)
  failed = sum(row.failed for row in rows)
  what = "products" if _KERNELS.value else f"of {len(cases)} problems split k"
  print(f"{len(rows)} {what}; {failed} of them failed: {path}")
  if failed:
    sys.exit(1)


if __name__ == "__main__":
  app.run(main)
