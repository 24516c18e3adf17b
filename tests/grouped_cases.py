"""Products in groups of rows: problems, configs, and what their results must be."""

from __future__ import annotations

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgemm import reference
from jaxgemm.device import known_device
from pallas_kernels import GROUPED_KERNELS, compat
from pallas_kernels.configs import PersistentConfig
from pallas_kernels.problem import Problem
from tests import kernel_cases
from tests.kernel_cases import as_multiplied, make_problem, random_operands

H200 = known_device("NVIDIA H200")
SMALL = dict(tile_m=64, tile_n=64, consumers=1, num_stages=3)
# NumPy, which multiplies in the emulator, warns of what is not finite.
INFINITE = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
# Of a transposed product: one consumer of 64 columns, and few rows.
SWAP = SMALL | dict(swap=True, tile_n=16)


def of_m(m, n, k, groups, layouts="NN", dtype="bfloat16", **fields) -> Problem:
  fields |= dict(batch=groups, lhs_batched=False, grouped="m")
  return make_problem(m, n, k, layouts, dtype, **fields)


def of_k(m, n, k, groups, dtype="bfloat16", **fields) -> Problem:
  """k are the rows of all groups."""
  fields |= dict(batch=groups, lhs_batched=False, rhs_batched=False, grouped="k")
  return make_problem(m, n, k, "TN", dtype, **fields)


def bounds(sizes, rows: int) -> list[tuple[int, int]]:
  """(first, end) of each group's rows."""
  ends = np.minimum(np.cumsum(np.maximum(sizes, 0)), rows)
  return list(zip(np.append(0, ends[:-1]), ends, strict=True))


def truth(problem: Problem, operands, sizes) -> np.ndarray:
  (lhs,), rhs = as_multiplied(problem, operands)
  out = np.zeros(problem.out_shape)
  rows = problem.m if problem.grouped == "m" else problem.k
  for group, (first, end) in enumerate(bounds(sizes, rows)):
    if problem.grouped == "m":
      out[0, first:end] = lhs[first:end] @ rhs[group]
    else:
      out[group] = lhs[:, first:end] @ rhs[0, first:end]
  return out


def by_xla(problem: Problem, operands, sizes) -> jax.Array:
  lhs, rhs = operands[0][0], operands[1].astype(problem.dtype)
  if problem.grouped == "m":
    contracted = (1,), (1 if problem.rhs_layout == "n-major" else 2,)
    ragged, group = (0,), (0,)
  else:
    rhs, contracted, ragged, group = rhs[0], ((0,), (0,)), (0,), ()
  out = lax.ragged_dot_general(
      lhs, rhs, jnp.asarray(sizes, jnp.int32),
      lax.RaggedDotDimensionNumbers((contracted, ((), ())), ragged, group),
      preferred_element_type=jnp.dtype(problem.out_dtype),
  )
  return out.reshape(problem.out_shape)


def config_of(**fields) -> PersistentConfig:
  return PersistentConfig(**{**SMALL, **fields})


def emulate(problem: Problem, config, operands, sizes, *, num_sms=3) -> jax.Array:
  """The kernel's result in GPU interpret mode; raises if it raced."""
  kernel = GROUPED_KERNELS[f"grouped_{problem.grouped}"]
  assert kernel.supports(problem, config) is None
  operands = *operands, jnp.asarray(sizes, jnp.int32)
  return compat.run_interpreted(
      lambda params: kernel.launch(
          operands, problem, config, num_sms=num_sms, interpret=params
      )
  )


def check_results(problem: Problem, results, operands, sizes) -> None:
  """At most twice as far off as XLA's, and zeros where nothing is multiplied."""
  exact = truth(problem, operands, sizes)
  limit = 2 * reference.relative_error(by_xla(problem, operands, sizes), exact)
  for config, result in results:
    assert result.shape == problem.out_shape and result.dtype == problem.out_dtype
    error = reference.relative_error(result, exact)
    assert error <= max(limit, 1e-7), (problem, config, sizes)
    where, rows = np.asarray(result).astype(np.float64), exact != 0
    np.testing.assert_array_equal(where[~rows.any(-1)], 0.0)


def check(problem: Problem, config, sizes, *, seed=0, num_sms=3) -> None:
  operands = random_operands(problem, seed)
  result = emulate(problem, config, operands, sizes, num_sms=num_sms)
  check_results(problem, [(config, result)], operands, sizes)


# Of 150 rows.
SIZES = {
    "some empty": (0, 70, 0, 1, 79, 0),
    "one row each": (1, 1, 1, 1),
    "all in one": (0, 150, 0),
    "fewer": (30, 0, 67),
    "more": (90, 40, 60, 9),
    "none": (0, 0),
}


def poison(problem: Problem, operands, sizes, at, rhs_group=None):
  """Operands with NaN and inf in rows of lhs, and in a group's rhs."""
  lhs, rhs = (np.array(x) for x in operands)
  lhs[0, at[::2]], lhs[0, at[1::2]] = np.nan, np.inf
  if rhs_group is not None:
    rhs[rhs_group] = np.nan
  elif problem.grouped == "k":
    rhs[0, at[1::2]], rhs[0, at[::2]] = np.nan, -np.inf
  return jnp.asarray(lhs), jnp.asarray(rhs)


ISOLATED_ROWS = 128, 72, 100, 5
ISOLATED_SIZES = 30, 20, 0, 21, 33  # And 24 rows of nobody.


def check_rows_alone(problem, launch):
  """The last row of one group, all of another, a group without rows, nobody's rows."""
  rows = np.array([29, 50, 104, 110])
  operands = random_operands(problem)
  for group in (1, 2):
    found = launch(poison(problem, operands, ISOLATED_SIZES, rows, group))
    exact = truth(problem, operands, ISOLATED_SIZES)
    reached = np.zeros(problem.m, bool)
    reached[[29, 50]] = True
    if group == 1:
      reached[30:50] = True
    found = np.asarray(found).astype(np.float64)
    assert not np.isfinite(found[0, reached]).any()
    assert reference.relative_error(found[0, ~reached], exact[0, ~reached]) < 3e-3
    np.testing.assert_array_equal(found[0, sum(ISOLATED_SIZES):], 0.0)


ISOLATED_SUMS = 72, 136, 128, 6
# The second and the fourth have what is not finite, and nobody's 20 rows.
ISOLATED_SUM_SIZES = 30, 20, 0, 9, 13, 36


def check_sums_alone(problem, launch):
  """The rows beside other groups', in the same slots: first, last, and nobody's."""
  rows = np.array([30, 49, 50, 58, 108, 109, 127])
  operands = random_operands(problem)
  found = launch(poison(problem, operands, ISOLATED_SUM_SIZES, rows))
  found = np.asarray(found).astype(np.float64)
  exact = truth(problem, operands, ISOLATED_SUM_SIZES)
  for group in (0, 2, 4, 5):
    assert reference.relative_error(found[group], exact[group]) < 3e-3, group
  assert not np.isfinite(found[[1, 3]]).any()


def random_sizes(rng, m: int, groups: int) -> np.ndarray:
  """Often with empty groups, with all rows or too few, or too many."""
  weights = rng.random(groups) ** 3 * (rng.random(groups) < 0.7)
  total = m * rng.choice([0.3, 1.0, 1.4])
  return (weights / max(weights.sum(), 1e-9) * total).astype(np.int32)


def lowered(problem: Problem, config, *scales) -> str:
  kernel = GROUPED_KERNELS[f"grouped_{problem.grouped}"]
  operands = [
      jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
      for shape, dtype in kernel_cases.operand_types(problem)
  ]
  operands += [*scales, jax.ShapeDtypeStruct((problem.batch,), jnp.int32)]
  launch = lambda *x: kernel.launch(x, problem, config, num_sms=132)
  return jax.export.export(jax.jit(launch), platforms=["cuda"])(*operands).mlir_module()


def gpu_sizes(m: int, groups: int) -> list[np.ndarray]:
  rng = np.random.default_rng(m + groups)
  found = [random_sizes(rng, m, groups) for _ in range(4)]
  return [*found, np.zeros(groups, int), np.eye(groups, dtype=int)[groups // 2] * m,
          np.full(groups, m // groups)]
