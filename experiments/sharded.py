r"""A Llama block over several devices: XLA's layers and jaxgemm's in turn.

  tensor   columns of qkv, gate and up, and rows of out and down, are shared out
  data     sequences are shared out

A step is the loss and all gradients of the block of experiments/blocks.py under jit, with
its parameters sharded by NamedSharding and the rest left to XLA. The compiled step must
have no collectives but XLA's; losses and gradients are compared; wall times are taken in
turns. sharded.jsonl has a line for each mode. On a CPU nothing is timed, and the kernels'
products are XLA's: JAX loses the callbacks of emulation in a partition.

  python -m experiments.sharded
  XLA_FLAGS=--xla_force_host_platform_device_count=4 python -m experiments.sharded

With one process a GPU, in a shell each, with ID from 0 on (a process takes the GPU of
its number, or what CUDA_VISIBLE_DEVICES leaves it):

  python -m experiments.sharded --coordinator=HOST:PORT --processes=N --process=ID
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
import dataclasses
import functools
import json
import os
import re
import statistics
import sys
import time

from absl import app, flags
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import tabulate

from experiments import blocks, cli, collectives, common_flags, report

flags.adopt_module_key_flags(cli)

_REPLICATED = dict.fromkeys(("attention_norm", "mlp_norm"), P())
SPECS = {
    "tensor": _REPLICATED | {
        "x": P(), "ct": P(), "qkv": P(None, "d"), "out": P("d"), "gate": P(None, "d"),
        "up": P(None, "d"), "down": P("d"),
    },
    "data": _REPLICATED | {
        "x": P("d"), "ct": P("d"), "qkv": P(), "out": P(), "gate": P(), "up": P(),
        "down": P(),
    },
}
MAX_DIFFERENCE = 0.02  # Of a gradient, in Frobenius norms; of the loss 1e-3.
_ROUNDS, _STEPS = 40, 5

_MODES = flags.DEFINE_list("modes", list(SPECS), "What is shared out; see the docstring.")
_COORDINATOR = flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0.")
_PROCESSES = flags.DEFINE_integer("processes", 1, "Processes.", lower_bound=1)
_PROCESS = flags.DEFINE_integer("process", 0, "This one's number.", lower_bound=0)
flags.register_validator(
    "modes", cli.member_check(tuple(SPECS)), f"must be among {', '.join(SPECS)}"
)

Step = Callable[[blocks.Params], tuple[jax.Array, blocks.Params]]


@dataclasses.dataclass(frozen=True)
class Row:
  """What was found of one mode.

  Attributes:
    name: of the block, the mode and the devices.
    loss, xla_loss: of the first step.
    difference: the largest of a gradient, in Frobenius norms, relative to XLA's.
    collectives, xla_collectives: how often each kind has a result of which dtype and
      sizes.
    step_us, xla_step_us: medians of wall times; None where nothing was timed.
    memory_bytes, xla_memory_bytes: that a device needs beside operands and results.
    provenance: where, with what, when and how it ran.
  """

  name: str
  loss: float
  xla_loss: float
  difference: float
  collectives: dict[str, int]
  xla_collectives: dict[str, int]
  step_us: float | None
  xla_step_us: float | None
  memory_bytes: int
  xla_memory_bytes: int
  provenance: report.Provenance

  @property
  def failures(self) -> list[str]:
    """What is wrong, in words."""
    found = []
    if not abs(self.loss - self.xla_loss) <= 1e-3 * abs(self.xla_loss) + 1e-6:
      found.append(f"the losses are {self.loss} and XLA's {self.xla_loss}")
    if not self.difference <= MAX_DIFFERENCE:
      found.append(f"a gradient differs by {self.difference:.1%}")
    if more := Counter(self.collectives) - Counter(self.xla_collectives):
      found.append(f"{dict(more)} more collectives than XLA's {self.xla_collectives}")
    return found

  @property
  def ratio_to_xla(self) -> float | None:
    """XLA's time over ours."""
    return self.step_us and self.xla_step_us and self.xla_step_us / self.step_us

  def to_json(self) -> str:
    """Returns the row as one line of JSON."""
    fields = dataclasses.asdict(self) | {"ratio_to_xla": self.ratio_to_xla}
    return json.dumps(fields | fields.pop("provenance"), allow_nan=False)


def make_step(block: blocks.Block, layers: blocks.Layers) -> Step:
  """A function of parameters, x and ct: the mean square of the result less ct, which
  stands for a target, and the gradients of the others.
  """

  def loss(values: blocks.Params, target: jax.Array) -> jax.Array:
    out = block.run(values, layers)
    return jnp.mean(jnp.square(out.astype(jnp.float32) - target.astype(jnp.float32)))

  def step(values: blocks.Params):
    operands = {name: x for name, x in values.items() if name != "ct"}
    return jax.value_and_grad(loss)(operands, values["ct"])

  return step


def compiled(
    block: blocks.Block, layers: blocks.Layers, mesh: Mesh, mode: str, values
) -> jax.stages.Compiled:
  """The step on the mesh; gradients lie as their parameters."""
  shardings = {
      name: NamedSharding(mesh, spec) for name, spec in SPECS[mode].items()
      if name != "ct"
  }
  step = jax.jit(
      make_step(block, layers), out_shardings=(NamedSharding(mesh, P()), shardings)
  )
  return step.lower(values).compile()


def placed(block: blocks.Block, mesh: Mesh, mode: str, seed: int) -> blocks.Params:
  """Fresh values; each process makes the shards of its own devices."""
  shardings = {name: NamedSharding(mesh, spec) for name, spec in SPECS[mode].items()}
  draw = functools.partial(blocks.draw, block)
  return jax.jit(draw, static_argnums=0, out_shardings=shardings)(seed)


def _difference(found: blocks.Params, theirs: blocks.Params) -> jax.Array:
  return jnp.max(jnp.asarray([
      jnp.linalg.norm((found[k] - theirs[k]).astype(jnp.float32))
      / jnp.linalg.norm(theirs[k].astype(jnp.float32))
      for k in theirs
  ]))


def step_times(steps: dict[str, jax.stages.Compiled], values) -> dict[str, float]:
  """The median wall time of a step in us, of blocks of steps that take turns."""
  times: dict[str, list[float]] = {name: [] for name in steps}
  for _ in range(_ROUNDS):
    for name, step in steps.items():
      jax.block_until_ready(step(values))  # Ready for the next ones, whatever ran.
      start = time.perf_counter()
      for _ in range(_STEPS):
        found = step(values)
      jax.block_until_ready(found)
      times[name].append((time.perf_counter() - start) / _STEPS * 1e6)
  return {name: statistics.median(found) for name, found in times.items()}


def measure(
    mode: str, block: blocks.Block, mesh: Mesh, *, timed: bool,
    provenance: report.Provenance,
) -> Row:
  """Returns the row of one mode."""
  values = placed(block, mesh, mode, common_flags.SEED.value)
  steps = {
      name: compiled(block, layers, mesh, mode, values)
      for name, layers in blocks.LAYERS.items()
  }
  (xla_loss, theirs), (loss, ours) = (steps[name](values) for name in blocks.LAYERS)
  difference = jax.jit(_difference, out_shardings=NamedSharding(mesh, P()))(ours, theirs)
  counts = {
      name: {
          f"{kind} {'x'.join(map(str, sizes))}": count for (kind, sizes), count
          in sorted(collectives.collectives(step.as_text(), dtypes=True).items())
      }
      for name, step in steps.items()
  }
  times = step_times(steps, values) if timed else {}
  memory = {k: s.memory_analysis().temp_size_in_bytes for k, s in steps.items()}
  return Row(
      f"llama {mode} {mesh.size}", float(loss), float(xla_loss), float(difference),
      counts["jaxgemm"], counts["xla"], times.get("jaxgemm"), times.get("xla"),
      memory["jaxgemm"], memory["xla"], provenance,
  )


def main(argv: Sequence[str]) -> None:
  if _PROCESS.value >= _PROCESSES.value:
    raise app.UsageError(
        f"--process={_PROCESS.value} is not below --processes={_PROCESSES.value}"
    )
  if _COORDINATOR.value is not None:
    if not re.fullmatch(r".+:\d+", _COORDINATOR.value):
      raise app.UsageError(f"--coordinator={_COORDINATOR.value} is not HOST:PORT")
    jax.distributed.initialize(
        _COORDINATOR.value, _PROCESSES.value, _PROCESS.value,
        local_device_ids=(
            None if "CUDA_VISIBLE_DEVICES" in os.environ else [_PROCESS.value]
        ),
    )
  platform = cli.start(argv)
  mesh = Mesh(np.array(jax.devices()), ("d",))
  if mesh.size == 1:
    raise app.UsageError("one device: nothing can be shared out")
  block = blocks.llama(4, 2048)
  if not platform.on_gpu:
    block = blocks.llama(4, 8, 64, 96, 8, 4)
  provenance = cli.row_provenance("sharded", platform, "experiments.sharded")
  rows = []
  with platform.context():
    for mode in _MODES.value:
      rows.append(
          measure(mode, block, mesh, timed=platform.on_gpu, provenance=provenance)
      )
  if jax.process_index() == 0:
    path = cli.output_path("sharded").with_suffix(".jsonl")
    path.write_text("".join(row.to_json() + "\n" for row in rows))
    print(table(rows))
    print(f"rows: {path}")
  if failures := [f"{row.name}: {what}" for row in rows for what in row.failures]:
    print("\n".join(failures), file=sys.stderr)
    sys.exit(1)


def table(rows: Sequence[Row]) -> str:
  """Returns the rows as text."""
  lines = [
      (row.name, report.figure(row.xla_step_us, ".0f"), report.figure(row.step_us, ".0f"),
       report.figure(row.ratio_to_xla, ".3f"), f"{row.difference:.1e}",
       f"{row.memory_bytes / 1e6:.0f}", f"{row.xla_memory_bytes / 1e6:.0f}",
       sum(row.collectives.values()), sum(row.xla_collectives.values()))
      for row in rows
  ]
  headers = ["", "XLA (us)", "jaxgemm (us)", "x XLA", "difference", "MB", "XLA's",
             "collectives", "XLA's"]
  return tabulate.tabulate(lines, headers, disable_numparse=True)


if __name__ == "__main__":
  app.run(main)
