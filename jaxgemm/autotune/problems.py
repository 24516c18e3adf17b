"""Problems by name: those of a --shapes flag, and the suites of a checkout."""

from __future__ import annotations

from collections.abc import Sequence
import re

from pallas_kernels.problem import ALGORITHM_OF_DTYPE, Problem

# What suites that draw or adapt their problems are called with.
_SUITE_ARGUMENTS = {"demo": (True,), "random": (20, 0, 8192)}


def parse_shape(text: str, dtypes: Sequence[str]) -> list[Problem]:
  """The problems of one --shapes flag, in each of the dtypes.

  Raises:
    ValueError: the text is not of the flag's form.
  """
  layout = "[NT][NT]"
  match = re.fullmatch(rf"((?:\d+,){{2,3}}\d+)(?::({layout}(?:\+{layout})*))?", text)
  sizes = [int(size) for size in match[1].split(",")] if match else [0]
  if match is None or 0 in sizes:
    raise ValueError(
        f"shape {text!r} is not of the form [batch,]m,n,k[:LAYOUTS] with positive"
        " sizes and layouts from NN, NT, TN, TT joined by '+'"
    )
  *batch, m, n, k = sizes
  return [
      Problem(
          m, n, k, *batch,
          lhs_layout="k-major" if lhs == "N" else "m-major",
          rhs_layout="n-major" if rhs == "N" else "k-major",
          dtype=dtype, out_dtype=dtype, algorithm=ALGORITHM_OF_DTYPE[dtype],
      )
      for lhs, rhs in (match[2] or "NN").split("+")
      for dtype in dtypes
  ]


def suite(name: str) -> list[Problem]:
  """The problems of a suite of the experiments.

  Raises:
    ValueError: it is unknown, or the experiments are not at hand.
  """
  try:
    from experiments import suites  # Here alone: a checkout has them, a wheel has not.
  except ImportError as error:
    raise ValueError(
        "--suite names problems of the repository's experiments, which cannot be"
        f" imported ({error}): run it from the root of a checkout, or give --shapes"
    ) from error
  if name not in suites.SUITES:
    raise ValueError(f"suite {name!r} is none of {', '.join(suites.SUITES)}")
  cases = getattr(suites, f"{name}_suite")(*_SUITE_ARGUMENTS.get(name, ()))
  return [case.problem for case in cases]
