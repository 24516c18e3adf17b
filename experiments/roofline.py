r"""The roofline, measured: each problem's bytes and operations, nothing in between.

For each problem of a suite a kernel (see `roofline_kernel`) reads as many bytes as its
operands have, through TMA into shared memory, writes as many as its result, and meanwhile
multiplies as often as the problem has operations for each SM, on tiles that it has: no
product waits for a load, none is of a tile that is not full, and every SM has as much to
do. The L2 is full of other data before each call, as in experiments/run.py. Two orders of
the bytes are tried: the faster one counts. Before anything is timed, what is written is
compared with what was read, and the sums with float64.

roofline.jsonl has a line for each problem; experiments/summary.py takes it beside the
rows of a run, and says how much faster than XLA kernels could be. Without a GPU two CTAs
are emulated, and nothing is timed.

  python -m experiments.roofline --suite=full
  python -m experiments.summary results/full.jsonl results/roofline.jsonl
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import concurrent.futures
import dataclasses
import functools
import json
import os
import statistics
from typing import Any, Self

from absl import app, flags
import jax
import jax.numpy as jnp
import numpy as np
import tabulate

from experiments import cli, common_flags, report, timing
from experiments import roofline_kernel as kernel
from experiments.suites import Case
from jaxgemm import device as device_lib
from jaxgemm import reference
from pallas_kernels import compat
from pallas_kernels.problem import Problem

flags.adopt_module_key_flags(cli)

_REPEATS = 20
_EMULATED_CTAS = 2
_CHUNK = 64  # Problems that are compiled before the first of them is timed.
# In Frobenius norms: wgmma truncates its float32 sums once for every 16 of k.
_ERROR_OF_K_TILE = 4 * 2.0**-23
ORDERS = {"apart": False, "side by side": True}

Operands = tuple[jax.Array, jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class Row:
  """What was found of a problem; None where nothing was timed.

  Attributes:
    klass ("class" in JSON), name: of the problem.
    read_bytes, written_bytes: of its operands and its result.
    flops: operations of all CTAs, at most those of the problem.
    correct: whether every byte arrived and the sums are right, in both orders.
    order: the faster one.
    roofline_us, spread_us: its median, and half the distance between the quartiles.
    tbps, tflops: bytes and operations over the time.
    provenance: where, with what, when and how it ran.
  """

  klass: str
  name: str
  read_bytes: int
  written_bytes: int
  flops: int
  correct: bool
  order: str | None
  roofline_us: float | None
  spread_us: float | None
  tbps: float | None
  tflops: float | None
  provenance: report.Provenance

  @property
  def failed(self) -> bool:
    return not self.correct

  def to_json(self) -> str:
    """Returns the row as one line of JSON."""
    fields = dataclasses.asdict(self)
    fields = {"class": fields.pop("klass")} | fields
    return json.dumps(fields | fields.pop("provenance"), allow_nan=False)

  @classmethod
  def from_json(cls, line: str) -> Self:
    """Returns the row that `to_json` wrote.

    Raises:
      ValueError: it is no JSON, or of another kind of row.
    """
    fields = json.loads(line)
    try:
      klass = fields.pop("class")
      shared = [field.name for field in dataclasses.fields(report.Provenance)]
      provenance = report.Provenance(**{name: fields.pop(name) for name in shared})
      return cls(klass=klass, provenance=provenance, **fields)
    except (AttributeError, KeyError, TypeError) as error:
      raise ValueError(f"not a row of a roofline: {line[:80]!r}") from error


def bytes_of(problem: Problem) -> tuple[int, int]:
  """Returns the bytes of both operands, and of the result."""
  written = problem.batch * problem.m * problem.n * problem.out_itemsize
  return problem.num_bytes - written, written


def shares_of(problem: Problem, num_ctas: int) -> kernel.Shares:
  """Returns what each CTA has to do."""
  return kernel.Shares.of(*bytes_of(problem), problem.flops, num_ctas)


@dataclasses.dataclass(frozen=True)
class _Prepared:
  case: Case
  shares: kernel.Shares
  runs: dict[str, Callable[..., tuple[jax.Array, ...]]]


def operand_types(shares: kernel.Shares) -> tuple[jax.ShapeDtypeStruct, ...]:
  """Returns shape and dtype of each operand of the kernel."""
  tiles = kernel.RESIDENT.operand_shapes
  return (
      jax.ShapeDtypeStruct(shares.read_shape, jnp.uint32),
      *(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in tiles),
  )


def _prepare(case: Case, num_ctas: int) -> _Prepared:
  shares, runs = shares_of(case.problem, num_ctas), {}
  for order, spread in ORDERS.items():
    run = functools.partial(kernel.launch, shares=shares, spread=spread)
    runs[order] = jax.jit(run).lower(*operand_types(shares)).compile()
  return _Prepared(case, shares, runs)


def draw(shares: kernel.Shares, key: jax.Array) -> Operands:
  """Returns random bits to move, and normal tiles to multiply."""
  bits, *normal = operand_types(shares)
  of_bits, *of_normal = jax.random.split(key, 3)
  tiles = (
      jax.random.normal(key, x.shape, x.dtype)
      for key, x in zip(of_normal, normal, strict=True)
  )
  return jax.random.bits(of_bits, bits.shape, bits.dtype), *tiles


def is_correct(
    found: tuple[jax.Array, ...], operands: Operands, shares: kernel.Shares, *,
    spread: bool,
) -> bool:
  """Returns whether results are what the operands say."""
  values, *tiles = operands
  written, *sums = found
  moved = jnp.array_equal(written, values[kernel.sources(shares, spread=spread)])
  if not sums:
    return bool(moved)
  truth = kernel.truth(*tiles, shares)
  errors = [reference.relative_error(of_cta, truth) for of_cta in np.asarray(sums[0])]
  most = 1e-6 + _ERROR_OF_K_TILE * shares.k_tiles
  return bool(moved) and all(error <= most for error in errors)


def _emulated(case: Case, provenance: report.Provenance, key: jax.Array) -> Row:
  """Returns the row of a check of few CTAs."""
  shares = shares_of(case.problem, _EMULATED_CTAS)
  operands, correct = draw(shares, key), True
  for spread in ORDERS.values():
    run = functools.partial(kernel.launch, *operands, shares, spread=spread)
    found = compat.run_interpreted(lambda params, run=run: run(interpret=params))
    correct &= is_correct(found, operands, shares, spread=spread)
  return _row(case, shares, provenance, correct, {})


def _measured(
    one: _Prepared, provenance: report.Provenance, key: jax.Array, repeats: int,
    l2_bytes: int,
) -> Row:
  operands = draw(one.shares, key)
  correct = all(
      is_correct(run(*operands), operands, one.shares, spread=ORDERS[order])
      for order, run in one.runs.items()
  )
  times_us = {}
  if correct and repeats:
    num_sets = timing.num_input_sets(operands[0].nbytes, l2_bytes)
    sets = [operands] + [
        draw(one.shares, jax.random.fold_in(key, i))
        for i in range(1, min(num_sets, 2 * repeats))
    ]
    times_us = timing.interleaved(one.runs, sets, repeats)
  return _row(one.case, one.shares, provenance, correct, times_us)


def _row(
    case: Case, shares: kernel.Shares, provenance: report.Provenance, correct: bool,
    times_us: dict[str, list[float]],
) -> Row:
  read, written = bytes_of(case.problem)
  medians = {order: statistics.median(times) for order, times in times_us.items()}
  best = min(medians, key=medians.__getitem__, default=None)
  timed: dict[str, Any] = dict.fromkeys(
      ("order", "roofline_us", "spread_us", "tbps", "tflops")
  )
  if best is not None:
    timed = dict(
        order=best, roofline_us=medians[best], spread_us=timing.spread(times_us[best]),
        tbps=(read + written) / medians[best] / 1e6,
        tflops=shares.flops / medians[best] / 1e6,
    )
  return Row(
      case.klass, case.name, read, written, shares.flops, correct,
      provenance=provenance, **timed,
  )


def rows_of(
    cases: Sequence[Case], platform: cli.Platform, provenance: report.Provenance,
    repeats: int,
) -> Iterator[list[Row]]:
  """Yields the row of each problem; `repeats` = 0 times nothing."""
  key = jax.random.key(common_flags.SEED.value)
  if not platform.on_gpu:
    for case in cases:
      yield [_emulated(case, provenance, key)]
    return
  device = platform.device
  prepare = functools.partial(_prepare, num_ctas=device.num_sms)
  for first in range(0, len(cases), _CHUNK):
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
      prepared = list(pool.map(prepare, cases[first : first + _CHUNK]))
    for one in prepared:
      yield [_measured(one, provenance, key, repeats, device.l2_bytes)]


def table(rows: Sequence[Row]) -> str:
  """Returns a line for each problem."""
  lines = [
      {
          "problem": row.name,
          "read (MB)": f"{row.read_bytes / 1e6:.1f}",
          "written (MB)": f"{row.written_bytes / 1e6:.1f}",
          "us": report.figure(row.roofline_us, ".1f", "FAILED" if row.failed else "ok"),
          "+-": report.figure(row.spread_us, ".1f"),
          "TB/s": report.figure(row.tbps, ".2f"),
          "TFLOP/s": report.figure(row.tflops, ".0f"),
          "order": row.order or "",
      }
      for row in rows
  ]
  align = ("left", *("right",) * 6, "left")
  return tabulate.tabulate(lines, headers="keys", colalign=align, disable_numparse=True)


def main(argv: Sequence[str]) -> None:
  platform = cli.start(argv, "two CTAs are emulated, and nothing is timed")
  if not device_lib.supported(platform.device):
    raise app.UsageError(f"{platform.name} has no TMA: this is for Hopper GPUs")
  suite, cases = cli.cases(platform)
  provenance = cli.row_provenance(suite, platform, "experiments.roofline")
  path = cli.output_path("roofline").with_suffix(".jsonl")
  found = rows_of(cases, platform, provenance, cli.repeats(platform, _REPEATS))
  rows = cli.record(found, len(cases), path)
  cli.conclude(rows, table(rows), path)


if __name__ == "__main__":
  app.run(main)
