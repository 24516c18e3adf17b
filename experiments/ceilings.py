r"""Ceilings: the most that this GPU multiplies and moves, whatever the kernel.

  tensor cores  wgmma on operands that lie in shared memory (see `ceilings_kernels`), of
                tiles of 128 rows; on normal data, and on zeros, which need less power
  products      of normal bfloat16, XLA's and jaxgemm's: 8192 x 8192 x 8192 NN, or those
                of --shapes
  memory        XLA's kernels that read, write or copy 1 GiB. A write leaves what the L2
                holds to be written after its end, up to 6% of it in a burst

The tensor cores and the products take turns in one measurement, so that both find the
same chip; memory has another one. Each is measured twice:

  burst      in turns of a call, on a cool chip: all share their clocks
  sustained  after --burn_in seconds of the same load, in turns of 0.4 s: each has the
             clocks that the power limit leaves it

Launch, the first loads and the store are in a kernel's time: an estimated 3 of the
tensor cores' 300 us, a smaller share with more --k_tiles. Before anything is timed the
kernel is held against float64 at a few steps. ceilings.jsonl has a line for each check
and each time. Without a GPU one tile is checked in emulation, and nothing is timed.

  python -m experiments.ceilings
  python -m experiments.ceilings --burn_in=0 --k_tiles=1728 --shapes=8192,14336,4096
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import functools
import json
import math
import statistics
from typing import Any

from absl import app, flags
import jax
import jax.numpy as jnp
import numpy as np
import tabulate

from experiments import ceilings_kernels as kernels
from experiments import (
  cli,
  common_flags,
  products,
  report,
  resident_tiles,
  runner,
  suites,
  timing,
)
from jaxgemm import device as device_lib
from jaxgemm import reference
from pallas_kernels import compat

flags.adopt_module_key_flags(cli)
_BURN_IN = flags.DEFINE_float(
    "burn_in", 30.0, "Seconds of load before the sustained times; 0: none are taken.",
    lower_bound=0.0,
)
_K_TILES = flags.DEFINE_integer(
    "k_tiles", 432,
    "K tiles that a CTA multiplies of a tile of 128x256; of others as many operations.",
    lower_bound=kernels.NUM_SLOTS,
)

TILES = (256, 192, 128)  # Columns.
SHAPES = ("8192,8192,8192",)  # Of the products.
MEMORY_BYTES = 1 << 30
MAX_ERROR = 1e-5  # In Frobenius norms; wgmma truncates its float32 sums.
_CHECKED_STEPS = 9  # Two rounds of the slots, and one that not all have.
_EMULATED_TILE, _EMULATED_CTAS = 128, 2
_CALLS, _TURNS = 20, 5

Operands = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class Variant:
  """Something to time.

  Attributes:
    operands: their name in an input set.
    run: a function of them.
    flops, num_bytes: operations of a call, and bytes that it reads and writes.
  """

  operands: str
  run: Callable[..., jax.Array]
  flops: int = 0
  num_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Mode:
  """How to time: a name, and arguments of `timing.interleaved`."""

  name: str
  repeats: int
  burn_in_s: float = 0.0
  turn_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Row:
  """What was found; None where there is no figure.

  Attributes:
    name: what ran.
    mode: "burst" or "sustained", or "check" where nothing was timed.
    error: of a check, in Frobenius norms relative to float64; None if not finite, too.
    time_us, spread_us: median, and half the distance between the quartiles.
    tflops, tbps: operations, or bytes read and written, over the time.
    of_tensor_cores: a product's operations over those that the tensor cores alone
      reach in the same mode, with their fastest tile on normal data.
    provenance: where, with what, when and how it ran.
  """

  name: str
  mode: str
  provenance: report.Provenance
  error: float | None = None
  time_us: float | None = None
  spread_us: float | None = None
  tflops: float | None = None
  tbps: float | None = None
  of_tensor_cores: float | None = None

  @property
  def failed(self) -> bool:
    """Whether it is a check that found something wrong."""
    return self.mode == "check" and (self.error is None or self.error > MAX_ERROR)

  def to_json(self) -> str:
    """Returns the row as one line of JSON."""
    fields = dataclasses.asdict(self)
    return json.dumps(fields | fields.pop("provenance"), allow_nan=False)


def tile_name(tile_n: int) -> str:
  return f"tensor cores {resident_tiles.TILE_M}x{tile_n}"


def check(
    tile_n: int, num_ctas: int, provenance: report.Provenance, *, emulated: bool = False
) -> Row:
  """Returns the row of a check: the largest error of a CTA's sums."""
  key = jax.random.fold_in(jax.random.key(common_flags.SEED.value), tile_n)
  operands = _normal(key, kernels.operand_shapes(tile_n))
  run = functools.partial(kernels.launch, steps=_CHECKED_STEPS, num_ctas=num_ctas)
  if emulated:
    found = compat.run_interpreted(lambda params: run(*operands, interpret=params))
  else:
    found = jax.jit(run)(*operands)
  found = np.asarray(found)
  truth = kernels.truth(*operands, _CHECKED_STEPS)
  error = max(reference.relative_error(sums, truth) for sums in found)
  return Row(
      tile_name(tile_n), "check", provenance, error if math.isfinite(error) else None
  )


def matrix_variants(
    device: device_lib.Device, k_tiles: int, cases: Sequence[suites.Case]
) -> dict[str, Variant]:
  """Returns the tensor cores alone and the products of the cases."""
  found = {}
  for tile_n in TILES:
    steps = round(k_tiles * TILES[0] / tile_n)
    run = functools.partial(kernels.launch, steps=steps, num_ctas=device.num_sms)
    flops = kernels.flops(tile_n, steps, device.num_sms)
    found[tile_name(tile_n)] = Variant(tile_name(tile_n), run, flops)
    if tile_n == TILES[0]:
      found[f"{tile_name(tile_n)}, zeros"] = Variant("zeros", run, flops)
  for case in cases:
    for name, implementation in (("XLA", "xla"), ("jaxgemm", "auto")):
      run = products.make_candidate(
          case.problem, implementation, device, emulated=False
      ).product
      found[f"{name} {case.name}"] = Variant(case.name, run, case.problem.flops)
  return found


def draw_matrices(cases: Sequence[suites.Case], key: jax.Array) -> dict[str, Operands]:
  """Returns an input set for `matrix_variants`."""
  shapes = {tile_name(tile_n): kernels.operand_shapes(tile_n) for tile_n in TILES}
  shapes |= {case.name: products.stored_shapes(case.problem) for case in cases}
  keys = jax.random.split(key, len(shapes))
  found = {
      name: _normal(key, of_name)
      for key, (name, of_name) in zip(keys, shapes.items(), strict=True)
  }
  zeros = (jnp.zeros(s, jnp.bfloat16) for s in kernels.operand_shapes(TILES[0]))
  return found | {"zeros": tuple(zeros)}


def _cases() -> list[suites.Case]:
  """Returns the products that --shapes ask for."""
  found = cli.shapes(SHAPES)
  if others := {case.problem.dtype for case in found} - {"bfloat16"}:
    raise app.UsageError(f"--dtypes: products of bfloat16, not of {', '.join(others)}")
  return found


def _operand_bytes(case: suites.Case) -> int:
  return sum(2 * math.prod(shape) for shape in products.stored_shapes(case.problem))


def memory_variants(num_bytes: int) -> dict[str, Variant]:
  """Returns what reads, writes and copies `num_bytes`."""
  count = num_bytes // 4
  return {
      "memory, read": Variant("array", jnp.max, num_bytes=num_bytes),
      "memory, write": Variant(
          "value", lambda value: jnp.full(count, value), num_bytes=num_bytes
      ),
      "memory, copy": Variant("array", lambda x: x + 1, num_bytes=2 * num_bytes),
  }


def draw_memory(num_bytes: int, key: jax.Array) -> dict[str, Operands]:
  """Returns an input set for `memory_variants`."""
  bits = jax.random.bits(key, num_bytes // 4, jnp.uint32)
  return {"array": (bits,), "value": (bits[0],)}


def _normal(key: jax.Array, shapes: Sequence[tuple[int, ...]]) -> Operands:
  keys = jax.random.split(key, len(shapes))
  return tuple(
      jax.random.normal(key, shape).astype(jnp.bfloat16)
      for key, shape in zip(keys, shapes, strict=True)
  )


def measure(
    variants: Mapping[str, Variant], sets: Sequence[tuple[dict[str, Operands]]],
    mode: Mode, provenance: report.Provenance,
) -> list[Row]:
  """Returns the rows of variants that take turns."""
  runs = {name: jax.jit(_of_set(variant)) for name, variant in variants.items()}
  times_us = timing.interleaved(
      runs, sets, mode.repeats, burn_in_s=mode.burn_in_s, turn_s=mode.turn_s
  )
  rows = []
  for name, variant in variants.items():
    time_us = statistics.median(times_us[name])
    rows.append(
        Row(
            name, mode.name, provenance, time_us=time_us,
            spread_us=timing.spread(times_us[name]),
            tflops=variant.flops / time_us / 1e6 if variant.flops else None,
            tbps=variant.num_bytes / time_us / 1e6 if variant.num_bytes else None,
        )
    )
  return with_shares(rows)


def _of_set(variant: Variant) -> Callable[[dict[str, Operands]], Any]:
  return lambda values: variant.run(*values[variant.operands])


def with_shares(rows: Sequence[Row]) -> list[Row]:
  """Returns rows of one mode, the products' with their shares of the tensor cores."""
  alone = set(map(tile_name, TILES))
  most = max((row.tflops for row in rows if row.name in alone), default=None)
  return [
      dataclasses.replace(row, of_tensor_cores=row.tflops / most)
      if most and row.tflops and not row.name.startswith("tensor cores") else row
      for row in rows
  ]


def modes(platform: cli.Platform) -> list[Mode]:
  """Returns those that the flags ask for; none where nothing is timed."""
  if not cli.repeats(platform, 1):
    return []
  found = [Mode("burst", cli.repeats(platform, _CALLS))]
  if _BURN_IN.value:
    turns = cli.repeats(platform, _TURNS)
    found.append(Mode("sustained", turns, _BURN_IN.value, runner.TURN_S))
  return found


def stages(
    platform: cli.Platform, wanted: Sequence[Mode], provenance: report.Provenance
) -> Iterator[list[Row]]:
  """Yields the rows of the checks, and those of each measurement if none has failed."""
  device, cases = platform.device, _cases()
  if not platform.on_gpu:
    yield [check(_EMULATED_TILE, _EMULATED_CTAS, provenance, emulated=True)]
    return
  checks = [check(tile_n, device.num_sms, provenance) for tile_n in TILES]
  yield checks
  if any(row.failed for row in checks):
    return
  key = jax.random.key(common_flags.SEED.value)
  for mode in wanted:
    for variants, draw, set_bytes in (
        (matrix_variants(device, _K_TILES.value, cases),
         functools.partial(draw_matrices, cases), min(map(_operand_bytes, cases))),
        (memory_variants(MEMORY_BYTES),
         functools.partial(draw_memory, MEMORY_BYTES), MEMORY_BYTES),
    ):
      num_sets = timing.num_input_sets(set_bytes, device.l2_bytes)
      sets = [(draw(jax.random.fold_in(key, i)),) for i in range(num_sets)]
      yield measure(variants, sets, mode, provenance)


def table(rows: Sequence[Row]) -> str:
  """Returns the rows as text."""
  lines = [
      (row.name, row.mode, report.figure(row.time_us, ".1f"),
       report.figure(row.spread_us, ".1f"), report.figure(row.tflops, ".1f"),
       report.figure(row.of_tensor_cores, ".3f"), report.figure(row.tbps, ".2f"),
       report.figure(row.error, ".1e"), "FAILED" if row.failed else "")
      for row in rows
  ]
  headers = ["", "", "us", "+-", "TFLOP/s", "of tensor cores", "TB/s", "error", ""]
  return tabulate.tabulate(lines, headers, disable_numparse=True)


def main(argv: Sequence[str]) -> None:
  platform = cli.start(argv, "one tile is checked in emulation, and nothing is timed")
  if not device_lib.supported(platform.device):
    raise app.UsageError(f"{platform.name} has no wgmma: this is for Hopper GPUs")
  wanted = modes(platform)
  provenance = cli.row_provenance("ceilings", platform, "experiments.ceilings")
  path = cli.output_path("ceilings").with_suffix(".jsonl")
  rows = cli.record(stages(platform, wanted, provenance), 1 + 2 * len(wanted), path)
  cli.conclude(rows, table(rows), path)


if __name__ == "__main__":
  app.run(main)
