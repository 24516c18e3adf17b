"""Trains a small language model with XLA's products, jaxgemm's, or both in turn.

The model (experiments/transformer.py) learns the source text of Python's standard
library byte by byte. Both implementations start from the same parameters and see
the same batches, so that their losses must agree; which kernels ran is counted in
the compiled step. The exit status is 1 if a loss is not finite, if the final losses
differ by more than 1%, or if jaxgemm ran none of its kernels on a GPU that they
support. The figures go to train_lm.json, the loss curves to train_lm.png.

  python -m experiments.train_lm --steps=20
  python -m experiments.train_lm --implementation=jaxgemm --vocabulary=50257
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import json
import math
import pathlib
import sys
import time

from absl import app, flags, logging
import jax
from matplotlib.figure import Figure
import numpy as np
import optax

from experiments import common_flags, corpus, progress, provenance, transformer
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
_IMPLEMENTATION = flags.DEFINE_enum(
    "implementation", "both", ["xla", "jaxgemm", "both"], "Whose products to train on."
)

DOT_GENERALS: dict[str, transformer.DotGeneral] = {
    "xla": jax.lax.dot_general,
    "jaxgemm": jaxgemm.dot_general,
}
MAX_DIFFERENCE = 0.01
_FINAL_STEPS = 10  # A single step's loss depends on its batch more than on the run.
_UNTIMED_STEPS = 2


@dataclasses.dataclass(frozen=True)
class Run:
  """What training with one implementation gave.

  Attributes:
    implementation: a key of DOT_GENERALS.
    losses: one for each step, in nats a token.
    tokens_per_second: after the first steps, compilation not included; None if
      the run was too short to tell.
    compile_s: seconds to trace, lower and compile the step.
    gemms: the GEMM kernels in the compiled step.
  """

  implementation: str
  losses: list[float]
  tokens_per_second: float | None
  compile_s: float
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


def train(
    implementation: str,
    config: transformer.Config,
    training: Training,
    text: np.ndarray,
) -> Run:
  """Trains from scratch and returns what came of it.

  Args:
    implementation: a key of DOT_GENERALS.
    config: sizes of the model.
    training: how long, on what batches, and from which seed.
    text: [length] uint8.
  """
  dot_general = DOT_GENERALS[implementation]
  optimizer = optax.adam(
      optax.linear_schedule(
          0.0, training.learning_rate, max(1, training.steps // 10)
      )
  )

  def update(state, tokens):
    params, optimizer_state = state
    loss, gradients = jax.value_and_grad(transformer.loss)(
        params, tokens, config, dot_general
    )
    updates, optimizer_state = optimizer.update(gradients, optimizer_state)
    return (optax.apply_updates(params, updates), optimizer_state), loss

  params = transformer.init(config, jax.random.key(training.seed))
  state = (params, optimizer.init(params))
  batches = corpus.batches(
      text,
      steps=training.steps,
      batch=training.batch,
      sequence=config.sequence,
      seed=training.seed,
  )
  tokens = jax.ShapeDtypeStruct((training.batch, config.sequence + 1), np.int32)
  start = time.perf_counter()
  step = jax.jit(update, donate_argnums=0).lower(state, tokens).compile()
  compile_s = time.perf_counter() - start

  losses: list[jax.Array] = []
  shown = progress.bar(
      batches, total=training.steps, desc=implementation, unit="step"
  )
  for i, tokens in enumerate(shown):
    if i == _UNTIMED_STEPS:
      jax.block_until_ready(state)
      start = time.perf_counter()
    state, loss = step(state, tokens)
    losses.append(loss)
    if i:  # One step behind, so that the device always has the next one.
      shown.set_postfix_str(f"loss {float(losses[-2]):.3f}", refresh=False)
  jax.block_until_ready(state)
  seconds = time.perf_counter() - start
  timed_tokens = (
      (training.steps - _UNTIMED_STEPS) * training.batch * config.sequence
  )
  return Run(
      implementation,
      [float(loss) for loss in losses],
      timed_tokens / seconds if timed_tokens > 0 else None,
      compile_s,
      count_gemms(step.as_text()),
  )


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
    if on_hopper and run.implementation == "jaxgemm" and not run.gemms.num_jaxgemm:
      found.append("jaxgemm: none of its kernels is in the compiled step")
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
  )
  device = jax.devices()[0].device_kind
  implementations = (
      list(DOT_GENERALS) if _IMPLEMENTATION.value == "both" else [_IMPLEMENTATION.value]
  )
  if not on_hopper and "jaxgemm" in implementations:
    print(
        f"No Hopper GPU ({device}): jaxgemm lowers to XLA's dot here. This run checks"
        " the model and jaxgemm's derivatives, not its kernels."
    )

  text = corpus.load()
  runs = [train(name, config, training, text) for name in implementations]
  difference = relative_difference(runs)

  output = pathlib.Path(common_flags.OUTPUT.value)
  output.mkdir(parents=True, exist_ok=True)
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
              "tokens_per_second": _json(run.tokens_per_second),
              "compile_s": run.compile_s,
              "jaxgemm_gemms": run.gemms.jaxgemm,
              "xla_gemms": run.gemms.xla,
          }
          for run in runs
      ],
      "final_loss_difference": None if difference is None else _json(difference),
      "device": device,
      "jax": jax.__version__,
      "commit": provenance.commit(),
      "date": provenance.date(),
      "command": provenance.command("experiments.train_lm"),
  }
  path = output / "train_lm.json"
  path.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")

  for run in runs:
    speed = run.tokens_per_second
    print(
        f"{run.implementation}: loss {run.losses[0]:.4f} -> {run.final_loss:.4f},"
        f" {'too short to time' if speed is None else f'{speed:,.0f} tokens/s'},"
        f" compiled in {run.compile_s:.1f} s\n  GEMM kernels in the step: {run.gemms}"
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
