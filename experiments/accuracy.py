r"""How exact products are, XLA's and jaxgemm's, on several kinds of data.

Both multiply the same operands; 64 rows of each result, spread over all, are compared
with the float64 product. Two errors are taken: that of the whole (Frobenius norm over
that of the truth) and the largest (over the largest element of the truth). NAME.jsonl
has a line for each problem and kind of data. Of a batch the first product is compared.
The exit status is 1 if a result of jaxgemm's is not finite where the truth is.

  python -m experiments.accuracy --suite=float32 --precision=highest
  python -m experiments.accuracy --shapes=2048,2048,2048:NN+TT --dtypes=float32 \
      --precision=high --draws=normal
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import json

from absl import app, flags
import jax
import jax.numpy as jnp
import numpy as np

from experiments import cli, common_flags, products, report
from experiments.suites import Case
from jaxgemm import reference
from pallas_kernels.problem import Problem

flags.adopt_module_key_flags(cli)
_ROWS = 64


def _wide(rng: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
  return rng.standard_normal(shape) * np.exp2(rng.uniform(-40, 40, shape))


# Functions of a generator and a shape.
DRAWS: dict[str, Callable[[np.random.Generator, Sequence[int]], np.ndarray]] = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "uniform": lambda rng, shape: rng.random(shape),
    "wide": _wide,
}
_DRAWS = flags.DEFINE_list("draws", list(DRAWS), "Kinds of data.")
flags.register_validator(
    _DRAWS.name, cli.member_check(tuple(DRAWS)), f"must be among {', '.join(DRAWS)}"
)


@dataclasses.dataclass(frozen=True)
class Accuracy:
  """The errors of one problem on one kind of data.

  Attributes:
    name, draw, plan: the problem, the kind of data, and what ran.
    error, max_error: jaxgemm's, of the whole and the largest; None if not finite.
    xla_error, xla_max_error: XLA's.
    provenance: where, with what, when and how it ran.
  """

  name: str
  draw: str
  plan: str
  error: float | None
  max_error: float | None
  xla_error: float | None
  xla_max_error: float | None
  provenance: report.Provenance

  @property
  def failed(self) -> bool:
    return self.error is None

  def to_json(self) -> str:
    """Returns the row as one line of JSON."""
    fields = dataclasses.asdict(self)
    return json.dumps(fields | fields.pop("provenance"), allow_nan=False)

  def __str__(self) -> str:
    if self.failed:
      return f"{self.name}, {self.draw}: FAILED: not finite ({self.plan})"
    return (
        f"{self.name}, {self.draw}: {self.error:.2e} and {self.max_error:.2e} at most,"
        f" XLA {_words(self.xla_error)} and {_words(self.xla_max_error)} ({self.plan})"
    )


def _words(error: float | None) -> str:
  return "not finite" if error is None else f"{error:.2e}"


def errors(result: np.ndarray, truth: np.ndarray) -> tuple[float, float] | None:
  """Returns the error of the whole and the largest, or None if one is not finite."""
  whole = reference.relative_error(result, truth)
  if not np.isfinite(whole):
    return None
  largest = np.abs(np.asarray(result, np.float64) - truth).max()
  return whole, float(largest / np.abs(truth).max())


def draw_operands(
    problem: Problem, draw: str, seed: int
) -> tuple[jax.Array, jax.Array]:
  """Returns lhs and rhs as stored, without a batch dimension if it is one product."""
  rng = np.random.default_rng(seed)
  lhs, rhs = (
      jnp.asarray(DRAWS[draw](rng, operand.shape), operand.dtype)
      for operand in products.operand_types(problem)[:2]
  )
  return lhs, rhs


def measure(
    case: Case, candidates: Sequence[products.Candidate], draw: str, seed: int,
    provenance: report.Provenance,
) -> Accuracy:
  """Returns the errors of two candidates, XLA's and ours."""
  problem = case.problem
  lhs, rhs = draw_operands(problem, draw, seed)
  rows = np.unique(np.linspace(0, problem.m - 1, _ROWS).astype(int))
  left = np.asarray(lhs).astype(np.float64).reshape(problem.lhs_shape)[0]
  left = left[rows] if problem.lhs_layout == "k-major" else left[:, rows].T
  right = np.asarray(rhs).astype(np.float64).reshape(problem.rhs_shape)[0]
  truth = reference.matmul(left, right if problem.rhs_layout == "n-major" else right.T)
  found = []
  for candidate in candidates:
    if candidate.product is None:
      raise RuntimeError(f"{case.name}: {candidate.plan}")
    out = candidate.product(lhs, rhs).reshape(problem.out_shape)[0]
    found.append(errors(np.asarray(out[rows]), truth) or (None, None))
  theirs, ours = found
  return Accuracy(case.name, draw, candidates[1].plan, *ours, *theirs, provenance)


def main(argv: Sequence[str]) -> None:
  platform = cli.start(argv, "the kernels run in emulation")
  suite, cases = cli.cases(platform)
  provenance = cli.row_provenance(suite, platform, "experiments.accuracy")

  def rows() -> Iterator[list[Accuracy]]:
    for case in cases:
      candidates = [
          products.make_candidate(
              case.problem, name, platform.device, emulated=not platform.on_gpu
          )
          for name in ("xla", "auto")
      ]
      yield [
          measure(case, candidates, draw, common_flags.SEED.value, provenance)
          for draw in _DRAWS.value
      ]

  path = cli.output_path(f"accuracy_{suite}").with_suffix(".jsonl")
  with platform.context():
    found = cli.record(rows(), len(cases), path)
  cli.conclude(found, "\n".join(map(str, found)), path)


if __name__ == "__main__":
  app.run(main)
