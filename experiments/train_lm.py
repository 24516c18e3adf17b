r"""Trains a small language model with XLA's products, jaxgemm's, or both in turn.

The model (experiments/transformer.py; with --model=nnx the same in Flax,
experiments/transformer_nnx.py; with --model=gpt2 GPT-2 of layers that are fused where
they can be, experiments/gpt2.py) learns the source text of Python's standard library byte
by byte. Both implementations start from the same parameters and see
the same batches, so that their losses must agree; which kernels ran is counted in
the compiled step. They take turns every few steps; the time of a step is the median
over these blocks, and on a GPU the time of its kernels alone is taken by CUPTI at the
end. The exit status is 1 if a loss is not finite, if the final losses
differ by more than 1%, or if jaxgemm ran none of its kernels on a GPU that they
support. The figures go to train_lm.json, the loss curves to train_lm.png.

  python -m experiments.train_lm --steps=20
  python -m experiments.train_lm --vocabulary=50257 --steps=200
  python -m experiments.train_lm --model=nnx --vocabulary=50257 --batch=16
  python -m experiments.train_lm --model=gpt2 --vocabulary=50257 --batch=16
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import importlib
import itertools
import json
import math
import pathlib
import statistics
import sys
import time
import types
from typing import Any

from absl import app, flags, logging
import jax
from matplotlib.figure import Figure
import numpy as np
import optax

from experiments import (
  blocks,
  common_flags,
  corpus,
  gpt2,
  progress,
  provenance,
  timing,
  transformer,
)
from experiments.kernel_count import GemmCount, count_gemms
import jaxgemm
from jaxgemm.device import current_device, supported

flags.adopt_module_key_flags(common_flags)
_CPU_DEFAULTS = {
    "steps": 20,
    "layers": 2,
    "width": 128,
    "heads": 4,
    "batch": 4,
    "sequence": 128,
    "learning_rate": 1e-3,
}
_GPU_DEFAULTS = {
    "steps": 300,
    "layers": 12,
    "width": 768,
    "heads": 12,
    "batch": 8,
    "sequence": 1024,
    "learning_rate": 3e-4,
}


def _default(name: str, text: str) -> str:
  return f"{text} (default {_CPU_DEFAULTS[name]} on a CPU, {_GPU_DEFAULTS[name]} else)"


def _size_flag(name: str, text: str) -> flags.FlagHolder[int | None]:
  return flags.DEFINE_integer(name, None, _default(name, text), lower_bound=1)


_STEPS = _size_flag("steps", "Training steps.")
_LAYERS = _size_flag("layers", "Blocks of the transformer.")
_WIDTH = _size_flag("width", "Width of the residual stream.")
_HEADS = _size_flag("heads", "Attention heads; they divide the width.")
_BATCH = _size_flag("batch", "Sequences in a step.")
_SEQUENCE = _size_flag("sequence", "Tokens in a sequence.")
_LEARNING_RATE = flags.DEFINE_float(
    "learning_rate",
    None,
    _default("learning_rate", "Adam's, after a linear warm-up over a tenth of the run."),
    lower_bound=0.0,
)
_VOCABULARY = flags.DEFINE_integer(
    "vocabulary",
    256,
    "Columns of the output layer; those beyond the 256 bytes occur in no text.",
    lower_bound=256,
)
_ACCELERATED = "accelerated"
_IMPLEMENTATION = flags.DEFINE_multi_enum(
    "implementation", ["xla", "jaxgemm"], ["xla", "jaxgemm", _ACCELERATED],
    "Whose products to train on, in turns; may be repeated. An accelerated step is XLA's"
    " under jaxgemm.accelerate.",
)

_MODEL = flags.DEFINE_enum(
    "model", "plain", ["plain", "nnx", "gpt2"],
    "The transformer in plain JAX, in Flax nnx, or of fused layers."
)

DOT_GENERALS: dict[str, transformer.DotGeneral] = {
    "xla": jax.lax.dot_general,
    "jaxgemm": jaxgemm.dot_general,
    _ACCELERATED: jax.lax.dot_general,
}
MAX_DIFFERENCE = 0.01
_FINAL_STEPS = 10  # A single step's loss depends on its batch more than on the run.
_BLOCK_STEPS = 10
_KERNEL_ROUNDS = 3
_KERNEL_STEPS = 4


@dataclasses.dataclass(frozen=True)
class Run:
  """What training with one implementation gave.

  Attributes:
    implementation: a key of DOT_GENERALS.
    losses: one for each step, in nats a token.
    step_ms: wall time of a step, compilation not included: the median over the blocks
      of steps; None if the run was too short to tell.
    kernel_ms: time of all kernels of a step; None where it was not taken.
    tokens_per_second: as `step_ms` has it.
    compile_s: seconds to trace, lower and compile the step.
    memory_bytes: that a step needs beside its state and batch.
    gemms: the GEMM kernels in the compiled step.
  """

  implementation: str
  losses: list[float]
  step_ms: float | None
  kernel_ms: float | None
  tokens_per_second: float | None
  compile_s: float
  memory_bytes: int
  gemms: GemmCount

  @property
  def final_loss(self) -> float:
    """The mean loss of the last steps."""
    return float(np.mean(self.losses[-_FINAL_STEPS:]))


@dataclasses.dataclass(frozen=True)
class Training:
  """How to train: what both implementations share."""

  steps: int
  batch: int
  learning_rate: float
  seed: int
  model: str = "plain"


class Trainee:
  """One implementation's compiled step, parameters and batches, and what it has done.

  Attributes:
    losses: of the steps so far.
    block_step_s: seconds a step, one figure for each block.
  """

  def __init__(
      self,
      implementation: str,
      config: transformer.Config,
      training: Training,
      text: np.ndarray,
  ):
    model, products = _model(training.model)
    optimizer = optax.adam(
        optax.linear_schedule(
            0.0, training.learning_rate, max(1, training.steps // 10)
        )
    )

    def update(state, tokens):
      params, optimizer_state = state
      loss, gradients = jax.value_and_grad(model.loss)(
          params, tokens, config, products[implementation]
      )
      updates, optimizer_state = optimizer.update(gradients, optimizer_state)
      return (optax.apply_updates(params, updates), optimizer_state), loss

    params = model.init(config, jax.random.key(training.seed))
    self._state = (params, optimizer.init(params))
    self._batches = corpus.batches(
        text,
        steps=training.steps,
        batch=training.batch,
        sequence=config.sequence,
        seed=training.seed,
    )
    tokens = jax.ShapeDtypeStruct((training.batch, config.sequence + 1), np.int32)
    start = time.perf_counter()
    if implementation == _ACCELERATED:
      update = jaxgemm.accelerate(update)
    step = jax.jit(update, donate_argnums=0).lower(self._state, tokens).compile()
    self._compile_s = time.perf_counter() - start
    self._step = step
    self._implementation = implementation
    self._tokens_per_step = training.batch * config.sequence
    self._kernel_ms: list[float] = []
    self.losses: list[jax.Array] = []
    self.block_step_s: list[float] = []

  def train(self, steps: int) -> None:
    """Trains for some steps, a block, of which the device has the next one ready."""
    start = time.perf_counter()
    for tokens in itertools.islice(self._batches, steps):
      self._state, loss = self._step(self._state, tokens)
      self.losses.append(loss)
    jax.block_until_ready(self._state)
    self.block_step_s.append((time.perf_counter() - start) / steps)

  def time_kernels(self, tokens: np.ndarray) -> None:
    """Takes the time of all kernels of a step, by CUPTI; trains on `tokens` meanwhile.

    Raises:
      RuntimeError: no kernel was seen.
    """

    def steps() -> object:
      for _ in range(_KERNEL_STEPS):
        self._state, _ = self._step(self._state, tokens)
      return self._state  # What is waited for: the loss comes before the update.

    ran = timing.profile.kernels(steps)
    if not ran:
      raise RuntimeError("CUPTI saw no kernel: nothing to time")
    self._kernel_ms.append(sum(timing.profile.exposed_us(ran)) / 1e3 / _KERNEL_STEPS)

  def run(self) -> Run:
    """Returns what came of it; the first block, which warms up, gives no time."""
    timed = self.block_step_s[1:]
    step_s = statistics.median(timed) if timed else None
    return Run(
        self._implementation,
        [float(loss) for loss in self.losses],
        None if step_s is None else 1e3 * step_s,
        statistics.median(self._kernel_ms) if self._kernel_ms else None,
        None if step_s is None else self._tokens_per_step / step_s,
        self._compile_s,
        self._step.memory_analysis().temp_size_in_bytes,
        count_gemms(self._step.as_text()),
    )


def _model(name: str) -> tuple[types.ModuleType, Mapping[str, Any]]:
  """The module of a model (`init`, `loss`), and what its products are computed by."""
  if name == "plain":
    return transformer, DOT_GENERALS
  if name == "gpt2":
    return gpt2, {**blocks.LAYERS, _ACCELERATED: blocks.LAYERS["xla"]}
  # Needs Flax.
  return importlib.import_module("experiments.transformer_nnx"), DOT_GENERALS


def train(
    implementations: Sequence[str],
    config: transformer.Config,
    training: Training,
    text: np.ndarray,
    *,
    time_kernels: bool,
) -> list[Run]:
  """Trains each implementation from scratch and returns what came of them.

  They take turns, a block of steps each, so that the clocks of the device and the
  load of the host meet them alike.

  Args:
    implementations: keys of DOT_GENERALS.
    config: sizes of the model.
    training: how long, on what batches, and from which seed.
    text: [length] uint8.
    time_kernels: whether to take the kernels' times too, after the last step.
  """
  trainees = [Trainee(name, config, training, text) for name in implementations]
  block = min(_BLOCK_STEPS, max(1, training.steps // 4))
  with progress.bar(total=training.steps, desc="train", unit="step") as shown:
    for done in range(0, training.steps, block):
      steps = min(block, training.steps - done)
      for trainee in trainees:
        trainee.train(steps)
      losses = ", ".join(f"{float(trainee.losses[-1]):.3f}" for trainee in trainees)
      shown.set_postfix_str(f"loss {losses}", refresh=False)
      shown.update(steps)
  if time_kernels:
    (tokens,) = corpus.batches(
        text, steps=1, batch=training.batch, sequence=config.sequence, seed=training.seed
    )
    for _ in range(_KERNEL_ROUNDS):
      for trainee in trainees:
        trainee.time_kernels(tokens)
  return [trainee.run() for trainee in trainees]


def ratio(runs: Sequence[Run], field: str) -> float | None:
  """Returns the first run's time over the last one's; None where one has none."""
  first, last = (getattr(run, field) for run in (runs[0], runs[-1]))
  return first / last if len(runs) > 1 and first and last else None


def relative_difference(runs: Sequence[Run]) -> float | None:
  """Returns how far the last run's final loss is from the first's; None for one."""
  if len(runs) < 2:
    return None
  first, last = runs[0].final_loss, runs[-1].final_loss
  return abs(last - first) / abs(first)


def failures(runs: Sequence[Run], on_hopper: bool) -> list[str]:
  """Returns what is wrong with the runs, in words; nothing if they are good."""
  found = [
      f"{run.implementation}: a loss is not finite"
      for run in runs
      if not all(map(math.isfinite, run.losses))
  ]
  difference = relative_difference(runs)
  if difference is not None and not difference <= MAX_DIFFERENCE:
    found.append(f"the final losses differ by {difference:.2%}")
  for run in runs:
    if on_hopper and run.implementation != "xla" and not run.gemms.num_jaxgemm:
      found.append(f"{run.implementation}: no kernel of ours is in the compiled step")
  return found


def draw(runs: Sequence[Run], path: pathlib.Path, title: str) -> None:
  """Draws the loss curves; the first is wide, so that one on it can be seen."""
  figure = Figure(figsize=(8, 4.5), layout="constrained")
  axes = figure.subplots()
  for i, run in enumerate(runs):
    steps = range(1, len(run.losses) + 1)
    axes.plot(
        steps, run.losses, linewidth=1 if i else 3, alpha=1 if i else 0.4,
        label=f"{run.implementation}: {run.final_loss:.4f} at the end",
    )
  axes.set_xlabel("step")
  axes.set_ylabel("loss (nats a byte)")
  axes.set_title(title, fontsize=9)
  axes.legend()
  figure.savefig(path, dpi=120)


def _json(value: float | None) -> float | None:
  return value if value is not None and math.isfinite(value) else None


def _times(run: Run) -> str:
  if run.step_ms is None:
    return "too short to time"
  kernels = "" if run.kernel_ms is None else f", kernels {run.kernel_ms:.2f} ms"
  return f"{run.step_ms:.2f} ms a step{kernels}, {run.tokens_per_second:,.0f} tokens/s"


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments: {argv[1:]}")
  if flags.FLAGS.verbosity == logging.INFO:  # app.run's default.
    logging.set_verbosity(logging.WARNING)  # JAX informs of each absent platform.
  on_gpu = jax.default_backend() == "gpu"
  on_hopper = supported(current_device())
  defaults = _GPU_DEFAULTS if on_gpu else _CPU_DEFAULTS

  def value(flag: flags.FlagHolder):
    return defaults[flag.name] if flag.value is None else flag.value

  try:
    config = transformer.Config(
        layers=value(_LAYERS),
        width=value(_WIDTH),
        heads=value(_HEADS),
        vocabulary=_VOCABULARY.value,
        sequence=value(_SEQUENCE),
    )
  except ValueError as error:
    raise app.UsageError(str(error)) from error
  training = Training(
      steps=value(_STEPS),
      batch=value(_BATCH),
      learning_rate=value(_LEARNING_RATE),
      seed=common_flags.SEED.value,
      model=_MODEL.value,
  )
  device = jax.devices()[0].device_kind
  implementations = list(dict.fromkeys(_IMPLEMENTATION.value))
  if not on_hopper and implementations != ["xla"]:
    print(
        f"No Hopper GPU ({device}): jaxgemm lowers to XLA's dot here. This run checks"
        " the model and jaxgemm's derivatives, not its kernels."
    )

  text = corpus.load()
  runs = train(implementations, config, training, text, time_kernels=on_gpu)
  difference = relative_difference(runs)

  output = common_flags.output_folder()
  title = f"{device}, JAX {jax.__version__}: {config.layers} layers of {config.width}"
  draw(runs, output / "train_lm.png", title)
  result = {
      "model": dataclasses.asdict(config),
      "training": dataclasses.asdict(training),
      "text_bytes": len(text),
      "runs": [
          {
              "implementation": run.implementation,
              "losses": list(map(_json, run.losses)),
              "final_loss": _json(run.final_loss),
              "step_ms": _json(run.step_ms),
              "kernel_ms": _json(run.kernel_ms),
              "tokens_per_second": _json(run.tokens_per_second),
              "compile_s": run.compile_s,
              "memory_bytes": run.memory_bytes,
              "jaxgemm_gemms": run.gemms.jaxgemm,
              "xla_gemms": run.gemms.xla,
          }
          for run in runs
      ],
      "final_loss_difference": None if difference is None else _json(difference),
      "step_time_ratio": ratio(runs, "step_ms"),
      "kernel_time_ratio": ratio(runs, "kernel_ms"),
      "device": device,
      "jax": jax.__version__,
      "commit": provenance.commit(),
      "date": provenance.date(),
      "command": provenance.command("experiments.train_lm"),
  }
  path = output / "train_lm.json"
  path.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")

  for run in runs:
    print(
        f"{run.implementation}: loss {run.losses[0]:.4f} -> {run.final_loss:.4f},"
        f" {_times(run)}, {run.memory_bytes / 1e6:,.0f} MB, compiled in"
        f" {run.compile_s:.1f} s\n"
        f"  GEMM kernels in the step: {run.gemms}"
    )
  for run in runs[1:]:
    for what, field in (("a step", "step_ms"), ("its kernels", "kernel_ms")):
      if (value := ratio([runs[0], run], field)) is not None:
        print(
            f"{runs[0].implementation}'s time over {run.implementation}'s, {what}:"
            f" {value:.3f}"
        )
  if difference is not None:
    print(f"final losses differ by {difference:.3%} (at most {MAX_DIFFERENCE:.0%})")
  print(f"{path}, {path.with_suffix('.png')}")
  if found := failures(runs, on_hopper):
    for failure in found:
      print(f"FAILED: {failure}", file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
  app.run(main)
