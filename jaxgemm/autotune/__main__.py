r"""Measures problems and stores the winners in the user's table of plans.

  python -m jaxgemm.autotune --shapes=4096,4096,4096:NN+TN --shapes=8,300,20,40
  python -m jaxgemm.autotune --suite=issue2   # In a checkout: experiments/suites.py.

A problem that the table has already is not measured again, unless with --force.
"""

from __future__ import annotations

from collections.abc import Sequence
import shlex
import sys

from absl import app, flags, logging

from jaxgemm import user_table
from jaxgemm.autotune import tuner
from jaxgemm.autotune.problems import parse_shape, suite
from pallas_kernels.problem import ALGORITHM_OF_DTYPE

_SHAPES = flags.DEFINE_multi_string(
    "shapes",
    [],
    "A problem, [batch,]m,n,k[:LAYOUTS] with layouts (NN, NT, TN, TT) joined by '+',"
    " NN by default; may be repeated.",
)
_SUITE = flags.DEFINE_string(
    "suite", None, "Named problems beside --shapes; see experiments/suites.py."
)
_DTYPES = flags.DEFINE_list(
    "dtypes", ["bfloat16"], "Dtypes in which the --shapes run; a suite has its own."
)
_MAX_CANDIDATES = flags.DEFINE_integer(
    "max_candidates",
    tuner.MAX_CANDIDATES,
    "How many candidates to measure of each problem, beside XLA.",
    lower_bound=1,
)
_FORCE = flags.DEFINE_boolean(
    "force", False, "Whether to measure again what the table has already."
)
flags.register_validator(
    _DTYPES.name,
    lambda dtypes: set() < set(dtypes) <= set(ALGORITHM_OF_DTYPE),
    f"must be among {', '.join(ALGORITHM_OF_DTYPE)}",
)


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments: {argv[1:]}")
  if flags.FLAGS.verbosity == logging.INFO:  # app.run's default.
    logging.set_verbosity(logging.WARNING)  # JAX informs of each absent platform.
  try:
    problems = [p for shape in _SHAPES.value for p in parse_shape(shape, _DTYPES.value)]
    problems += suite(_SUITE.value) if _SUITE.value else []
  except ValueError as error:
    raise app.UsageError(f"--shapes or --suite: {error}") from error
  if not problems:
    raise app.UsageError("nothing to measure: give --shapes or --suite")
  try:
    device = tuner.measuring_device()
  except (ImportError, RuntimeError) as error:
    sys.exit(str(error))
  results = tuner.tune(
      problems, device, command=shlex.join(["python", "-m", __package__, *sys.argv[1:]]),
      max_candidates=_MAX_CANDIDATES.value, force=_FORCE.value,
  )
  print(results)
  print(f"table: {user_table.path(device.kind)}")
  if any(result.time_us is None for result in results):
    sys.exit("not every problem could be measured")


if __name__ == "__main__":
  app.run(main)
