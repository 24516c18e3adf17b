"""Fits the constants of the heuristics' cost model to measured times.

The times are those of experiments/sweep.py. A seeded random search moves the
logarithms of the constants of jaxgemm.cost_constants.Model. What it makes small is,
on average over the problems,

  the error of log(estimate / time), where the fastest candidates weigh most (of those
    that ran in turns without what energy costs, which they shared),
  the regret: how much slower the chosen candidate is than the fastest. The choice
    is softened to a distribution, so that near ties count as such,
  and, a little, the distance from the present constants, which holds still what
    the times say nothing about.

  python -m experiments.fit_heuristics results/sweep_random.jsonl
  python -m experiments.fit_heuristics --check results/sweep_*.jsonl
  python -m experiments.fit_heuristics --constants=reduce,part results/sweep_*.jsonl

It prints the fitted constants, ready to paste, and the regret of each problem
before and after; with --check only the regret of the present constants.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
import dataclasses
import inspect
import json
import pathlib
import re
from typing import Any

from absl import app, flags, logging
import numpy as np
import tabulate

from experiments import common_flags, products, progress, suites
from experiments.report import geometric_mean
from experiments.sweep import xla_estimate_us
from jaxgemm import cost_model, heuristics
from jaxgemm.cost_constants import MODEL, Model
from jaxgemm.device import Device, known_device
from pallas_kernels import KERNELS, tiles
from pallas_kernels.configs import Config, PersistentConfig
from pallas_kernels.problem import Problem

flags.declare_key_flag(common_flags.SEED.name)
_CHECK = flags.DEFINE_boolean(
    "check", False, "Whether to evaluate the present constants and fit none."
)
_ITERATIONS = flags.DEFINE_integer(
    "iterations",
    None,
    "Steps of the search; by default as many as take about half a minute, at most"
    " 700.",
    lower_bound=1,
)

_CONSTANTS = flags.DEFINE_list(
    "constants", None, "The constants to fit, the others held still; by default all."
)
_NAMES = [field.name for field in dataclasses.fields(Model)]
flags.register_validator(
    _CONSTANTS.name, lambda names: names is None or names and set(names) <= set(_NAMES),
    f"must be among {', '.join(_NAMES)}",
)

_MAX_ITERATIONS = 700
_MAX_ESTIMATES = 2_500_000  # Of the default search; each takes some microseconds.
_CHANGED = (0.04, 0.12, 0.35)  # Shares of the constants that a step changes.
_STEP = 0.25  # Standard deviation of a step, of the logarithms.
_COOLING = 0.7  # What the step is multiplied by, four times in a search.
_SLOWNESS = 2.0  # A candidate twice as slow as the best weighs exp(-2) as much.
_SHARPNESS = 25.0  # Estimates 4% apart share the choice e to 1.
_REGRET_WEIGHT = 6.0
_PULL = 0.01


@dataclasses.dataclass(frozen=True)
class Measured:
  """A candidate of a problem, its time, and whether the heuristics list it still."""

  kernel: str
  config: Config | None
  time_us: float
  listed: bool

  def __str__(self) -> str:
    return products.describe_config(self.kernel, self.config, brief=True)


@dataclasses.dataclass(frozen=True)
class Group:
  """One problem of one sweep with all candidates that have a time.

  Attributes:
    name, problem, device: which problem, and where it was measured.
    sustained: whether each candidate ran alone, at the clocks that it leaves itself;
      else they ran in turns, and shared their clocks.
    measured: the candidates.
    xla_us: XLA's time, or None.
    xla_estimate_us: its estimate where it is a candidate; no constant is in it.
  """

  name: str
  problem: Problem
  device: Device
  sustained: bool
  measured: tuple[Measured, ...]
  xla_us: float | None
  xla_estimate_us: float | None

  def estimates_us(self, model: Model) -> np.ndarray:
    """Returns the estimate of each candidate under `model`."""
    return np.array([self._estimate_us(one, model) for one in self.measured])

  def _estimate_us(self, one: Measured, model: Model) -> float | None:
    if one.config is None:
      return self.xla_estimate_us
    return cost_model.estimate(
        self.problem, one.kernel, one.config, self.device, model
    ).time_us

  def expected_us(self, model: Model) -> tuple[np.ndarray, float]:
    """Returns the time of each candidate as it was measured, and its tolerance.

    In turns no candidate pays for the energy that it takes, but all of them for what all
    take: by up to the tolerance, a factor, more than is expected.
    """
    if self.sustained:
      return self.estimates_us(model), 1.0
    free = self.estimates_us(dataclasses.replace(model, energy=0.0))
    best = self.measured[int(free.argmin())]
    return free, self._estimate_us(best, model) / free.min()

  def times_us(self) -> np.ndarray:
    return np.array([one.time_us for one in self.measured])

  def choice(self, model: Model) -> Measured:
    """Returns the listed candidate of the shortest estimate."""
    order = self.estimates_us(model).argsort(kind="stable")
    return next(self.measured[i] for i in order if self.measured[i].listed)

  def best(self) -> Measured:
    """Returns the fastest of all that were measured."""
    return min(self.measured, key=lambda one: one.time_us)

  def regret(self, model: Model) -> float:
    return self.choice(model).time_us / self.best().time_us


def read(paths: Iterable[pathlib.Path]) -> list[Group]:
  """Returns the problems of some sweeps, those that leave the heuristics a choice.

  Raises:
    ValueError: a row is not of experiments/sweep.py; the message names it.
  """
  rows: dict[tuple[pathlib.Path, str, str | None, str], list[dict[str, Any]]] = {}
  for path in paths:
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
      row = json.loads(line)
      if not {"config", "estimate_us"} <= row.keys():
        raise ValueError(f"{path}, line {number}: not a row of experiments.sweep")
      run = path, row["device"], row.get("commit"), row["name"]
      rows.setdefault(run, []).append(row)
  groups = [_group(group) for group in rows.values()]
  return [
      group for group in groups if sum(one.listed for one in group.measured) > 1
  ]


def _group(rows: Sequence[dict[str, Any]]) -> Group:
  first = rows[0]
  sizes = ("batch", "m", "n", "k", "lhs_layout", "rhs_layout", "dtype", "out_dtype")
  problem = Problem(
      **{name: first[name] for name in sizes},
      algorithm=suites.algorithm(first["dtype"], first.get("precision", "default")),
      rhs_source=first.get("rhs_source", ""),
  )
  device = known_device(first["device"])
  xla_estimate = xla_estimate_us(problem, device)
  # The list, and what a kernel supports, may have changed since the sweep.
  listed = {_numbers(c.kernel, c.config) for c in heuristics.candidates(problem, device)}
  measured, xla_us = [], None
  for row in rows:
    kernel, time_us = row["implementation"], row["time_us"]
    if time_us is None:
      continue
    if kernel == "xla":
      xla_us, config = time_us, None
      usable = xla_estimate is not None
    else:
      config = KERNELS[kernel].Config(**row["config"])
      usable = KERNELS[kernel].supports(problem, config) is None
    if usable:
      known = _numbers(kernel, config) in listed
      measured.append(Measured(kernel, config, time_us, known))
  return Group(
      first["name"], problem, device, first.get("sustained", False), tuple(measured),
      xla_us, xla_estimate,
  )


def _numbers(kernel: str, config: Config | None) -> tuple[str, Config | None]:
  """The kernel and what it may be told, but for what follows from the problem.

  Slots do, and the order of tiles.
  """
  if hasattr(config, "num_stages"):
    config = dataclasses.replace(config, num_stages=0)
  if isinstance(config, PersistentConfig):
    config = dataclasses.replace(config, grid_minor="m", grid_width=tiles.GRID_WIDTH)
  return kernel, config


def loss(groups: Sequence[Group], model: Model) -> float:
  """Returns how far `model` is from the times; see the module's docstring."""
  total = 0.0
  for group in groups:
    times_us, (estimates_us, tolerance) = group.times_us(), group.expected_us(model)
    slowness = times_us / times_us.min()
    weights = np.exp(-_SLOWNESS * (slowness - 1))
    errors = np.log(estimates_us / times_us)
    common = np.clip(np.average(errors, weights=weights), -np.log(tolerance), 0.0)
    error = np.sqrt(np.average((errors - common) ** 2, weights=weights))
    listed = np.array([one.listed for one in group.measured])
    choice = listed * (estimates_us / estimates_us[listed].min()) ** -_SHARPNESS
    regret = np.average(np.log(slowness), weights=choice)
    total += float(error + _REGRET_WEIGHT * regret)
  return total / len(groups)


def fit(
    groups: Sequence[Group],
    start: Model = MODEL,
    *,
    iterations: int,
    seed: int,
    names: Collection[str] = tuple(_NAMES),
) -> Model:
  """Returns the model that a random search from `start` finds best.

  The search moves the constants of those names, which have three significant digits.
  """
  rng = np.random.default_rng(seed)
  origin = np.log(dataclasses.astuple(start))

  def evaluated(logs: np.ndarray) -> tuple[float, Model]:
    model = Model(*(float(f"{value:.3g}") for value in np.exp(logs)))
    pull = _PULL * np.mean((logs - origin) ** 2)
    return loss(groups, model) + float(pull), model

  moved = np.array([name in names for name in _NAMES])
  best = origin
  best_loss, best_model = evaluated(origin)
  step = _STEP
  shown = progress.bar(range(iterations), desc="fit", unit="step")
  for iteration in shown:
    changed = moved & (rng.random(len(best)) < rng.choice(_CHANGED))
    changed[rng.choice(np.flatnonzero(moved))] = True
    logs = best + changed * rng.normal(0.0, step, len(best))
    if (found := evaluated(logs))[0] < best_loss:
      best, (best_loss, best_model) = logs, found
      shown.set_postfix_str(f"loss {best_loss:.4f}", refresh=False)
    if (iteration + 1) % max(1, iterations // 5) == 0:
      step *= _COOLING
  return best_model


def table(groups: Sequence[Group], models: dict[str, Model]) -> str:
  """Returns the best candidate of each problem, and each model's choice."""
  lines = []
  for group in groups:
    best = group.best()
    line = {
        "problem": group.name,
        "XLA (us)": "" if group.xla_us is None else f"{group.xla_us:.1f}",
        "best": str(best),
        "(us)": f"{best.time_us:.1f}",
    }
    for name, model in models.items():
      choice = group.choice(model)
      line |= {
          f"choice {name}": "the best" if choice is best else str(choice),
          f"regret {name}": f"{group.regret(model):.3f}",
      }
    lines.append(line)
  return tabulate.tabulate(
      lines,
      headers="keys",
      colalign=("left", "right", "left", "right") + ("left", "right") * len(models),
      disable_numparse=True,
  )


def summary(groups: Sequence[Group], name: str, model: Model) -> str:
  """Returns what `table` says of one model, in a line."""
  found = [group.regret(model) for group in groups]
  worst = groups[int(np.argmax(found))].name
  return (
      f"{name}: loss {loss(groups, model):.4f}, regret {geometric_mean(found):.3f}"
      f" (geometric mean of {len(found)}), {max(found):.3f} at worst ({worst})"
  )


def source(model: Model) -> str:
  """Returns the definition of cost_constants.Model with the constants of `model`."""

  def replaced(match: re.Match[str]) -> str:
    return match["start"] + _literal(getattr(model, match["name"]))

  return re.sub(
      r"(?m)^(?P<start> +(?P<name>\w+): float = )[\d.e+-]+",
      replaced,
      inspect.getsource(Model),
  ).rstrip()


def _literal(value: float) -> str:
  """Returns three significant digits, in thousands or millions if it is large."""
  value = float(f"{value:.3g}")
  for exponent in (6, 3):
    if value >= 10**exponent:
      return f"{value / 10**exponent:g}e{exponent}"
  return f"{value:g}"


def main(argv: Sequence[str]) -> None:
  if len(argv) < 2:
    raise app.UsageError("name one or more files that experiments.sweep has written")
  if flags.FLAGS.verbosity == logging.INFO:  # app.run's default.
    logging.set_verbosity(logging.WARNING)
  try:
    groups = read(map(pathlib.Path, argv[1:]))
  except (OSError, ValueError) as error:
    raise app.UsageError(str(error)) from error
  if not groups:
    raise app.UsageError("no problem has two timed candidates")
  models = {"now": MODEL}
  if not _CHECK.value:
    num_estimates = sum(len(group.measured) for group in groups)
    affordable = max(1, _MAX_ESTIMATES // num_estimates)
    models["fitted"] = fit(
        groups,
        iterations=_ITERATIONS.value or min(_MAX_ITERATIONS, affordable),
        seed=common_flags.SEED.value,
        names=_CONSTANTS.value or _NAMES,
    )
  print(table(groups, models))
  for name, model in models.items():
    print(summary(groups, name, model))
  if "fitted" in models:
    print(f"\n{source(models['fitted'])}")


if __name__ == "__main__":
  app.run(main)
