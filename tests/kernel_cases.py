"""Operands, truth and baseline of a Problem: what tests of kernels share."""

from __future__ import annotations

import operator
import re
import types

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgemm import RMSNorm, reference
from pallas_kernels import KERNELS, TILE_KERNELS, compat
from pallas_kernels.configs import (
  BlockedConfig,
  DirectConfig,
  PersistentConfig,
  PipelinedConfig,
  SplitKConfig,
  TritonConfig,
)
from pallas_kernels.problem import ALGORITHMS, Problem

LAYOUTS = {
    "NN": dict(lhs_layout="k-major", rhs_layout="n-major"),
    "NT": dict(lhs_layout="k-major", rhs_layout="k-major"),
    "TN": dict(lhs_layout="m-major", rhs_layout="n-major"),
    "TT": dict(lhs_layout="m-major", rhs_layout="k-major"),
}

# Of lhs that comes skewed: its configs, and (layouts, swap).
SKEWED_FIELDS = dict(tile_m=64, tile_n=64, consumers=1, num_stages=4, misaligned="skewed")
SKEWED = [(layouts, swap) for swap in (False, True) for layouts in LAYOUTS]

# Of lhs that comes in runs of whole rows: their configs.
RUN_FIELDS = dict(tile_m=64, tile_n=64, consumers=1, num_stages=4, misaligned="runs")

KERNELS_AND_DTYPES = [
    (kernel, dtype)
    for kernel in TILE_KERNELS
    for dtype in ("bfloat16", "float16", "float32")
    if (kernel, dtype) != ("direct", "float32")  # It has no loads of 32 bits.
]


def make_problem(m, n, k, layouts="NN", dtype="bfloat16", **fields) -> Problem:
  fields.setdefault("out_dtype", dtype)
  first = next(name for name, operands in ALGORITHMS.items() if operands == dtype)
  fields.setdefault("algorithm", first)
  return Problem(m, n, k, dtype=dtype, **LAYOUTS[layouts], **fields)


def small_config(kernel: str, dtype="bfloat16", **fields):
  """A config with which a few hundred rows and columns are several tiles."""
  tile_k = 128 // jnp.dtype(dtype).itemsize
  config = {
      "blocked": BlockedConfig(128, 128, tile_k),
      "direct": DirectConfig(64, 64, tile_k),
      "pipelined": PipelinedConfig(128, 128, tile_k, num_stages=3),
      "persistent": PersistentConfig(128, 128, tile_k, num_stages=3),
      "split_k": SplitKConfig(128, 128, tile_k, num_stages=3, splits=2),
      "triton": TritonConfig(64, 64, tile_k, num_stages=3, num_warps=4),
  }[kernel]
  return type(config)(**{**vars(config), **fields})


def mostly_slow(values, short: int = 1) -> list:
  """Parameters of which the first `short` are in the short set of tests, and `make test`.

  `make test-all` has all.
  """
  return [value if i < short else more(value) for i, value in enumerate(values)]


def mostly_more(values, kept: int = 1) -> list:
  """Parameters, or tuples of several, of which only the first `kept` are in `make test`.
  """
  return [
      value if i < kept else more(*value) if isinstance(value, tuple) else more(value)
      for i, value in enumerate(values)
  ]


def more(*values):
  """Those that only `make test-all` has: of a kind of which `make test` has some."""
  return pytest.param(*values, marks=(pytest.mark.slow, pytest.mark.more))


# Tiles of configs whose producers load through registers.
LOADING_TILES = ((64, 64), (128, 64), (64, 128))

# (fields of a config, columns of a problem): tiles of more columns than one wgmma
# multiplies, and tiles of three consumers.
WIDE_TILES = (
    (dict(tile_m=128, tile_n=384, consumers=2, num_stages=3), 500),
    (dict(tile_m=128, tile_n=320, consumers=2, num_stages=2, cluster_m=2), 700),
    (dict(tile_m=64, tile_n=320, consumers=1), 320),
    (dict(tile_m=64, tile_n=320, consumers=2, wg_dim="tile"), 901),
    (dict(tile_m=192, tile_n=192, consumers=3, num_stages=3), 200),
    (dict(tile_m=192, tile_n=128, consumers=3, num_stages=4, cluster_n=2), 520),
)


# Shares of a warpgroup of more than one chunk of 64 rows or columns.
CHUNKED_TILES = (
    dict(tile_m=256, tile_n=128),
    dict(tile_m=128, tile_n=256, wg_dim="n"),
    dict(tile_m=192, tile_n=128, wg_dim="tile"),
    dict(tile_m=64, tile_n=320, consumers=1),
    dict(tile_m=128, tile_n=128, cluster_n=4),
)


# (kernel, fields): columns that are no multiple of a block of an n-major rhs.
N_MAJOR_TILES = (
    ("persistent", dict(tile_m=128, tile_n=144)),
    ("persistent", dict(tile_m=128, tile_n=288, num_stages=3, cluster_m=2)),
    more("persistent", dict(tile_m=192, tile_n=80, consumers=3, cluster_n=2)),
    ("persistent", dict(tile_m=128, tile_n=112, wg_dim="tile")),
    ("persistent", dict(tile_m=64, tile_n=16, consumers=1, promote=2)),
    ("split_k", dict(tile_m=64, tile_n=48, consumers=1, cluster_k=2)),
    ("pipelined", dict(tile_m=64, tile_n=32)),
    ("blocked", dict(tile_m=128, tile_n=96)),
    ("direct", dict(tile_m=64, tile_n=32)),
    more("direct", dict(tile_m=128, tile_n=16)),
    more("persistent", dict(tile_m=256, tile_n=136, num_stages=3)),
    more("persistent", dict(tile_m=128, tile_n=88, wg_dim="tile", promote=2)),
    more("persistent", dict(tile_m=64, tile_n=328, consumers=1, num_stages=3)),
    more("split_k", dict(tile_m=64, tile_n=40, consumers=1, cluster_k=2)),
    more("pipelined", dict(tile_m=64, tile_n=24)),
    more("blocked", dict(tile_m=128, tile_n=104)),
)


# (fields of a config that multiplies transposed, m, n)
SWAPPED_TILES = (
    (dict(tile_m=128, tile_n=144), 288, 328),
    (dict(tile_m=64, tile_n=16, consumers=1, num_stages=6), 9, 136),
    (dict(tile_m=128, tile_n=80, wg_dim="tile"), 130, 520),
    more(dict(tile_m=192, tile_n=96, consumers=3, cluster_m=2), 70, 776),
    # Pairs of CTAs share 64 rows of 72; of the last tile, of which 56 are left, 48.
    (dict(tile_m=128, tile_n=72, wg_dim="tile", cluster_m=2), 200, 312),
    more(dict(tile_m=64, tile_n=320, consumers=1), 305, 200),
    (dict(tile_m=128, tile_n=64, wg_dim="m", cluster_n=4), 200, 72),
    more(dict(tile_m=256, tile_n=136, num_stages=3), 272, 520),
    (dict(tile_m=64, tile_n=24, consumers=1), 23, 200),
)


def compute_in_integers(monkeypatch, *modules) -> None:
  """What modules of kernels compute in MLIR is computed, of Python's integers."""
  names = dict(
      addi="add", subi="sub", muli="mul", andi="and_", xori="xor", shli="lshift",
      shrui="rshift", divui="floordiv", remui="mod",
  )
  computed = {name: getattr(operator, does) for name, does in names.items()}
  computed |= dict(
      minsi=min, maxsi=max, minui=min, trunci=lambda _, x: x,
      select=lambda p, x, y: x if p else y,
  )
  of_integers = dict(
      arith=types.SimpleNamespace(**computed), i32=int, i64=int, const64=int,
      i32_type=lambda: None, less=operator.lt,
  )
  for module in modules:
    for name in of_integers.keys() & vars(module).keys():
      monkeypatch.setattr(module, name, of_integers[name])


def operand_types(problem: Problem) -> list[tuple[tuple[int, ...], str]]:
  """Shape and dtype of each operand as it is stored: lhs, rhs, maybe c, bias, a norm's.
  """
  epilogue = problem.epilogue
  shapes = problem.lhs_shape, problem.rhs_shape
  found = list(zip(shapes, problem.stored_dtypes, strict=True))
  if epilogue.has_c:
    found.append((problem.out_shape, epilogue.c_dtype))
  if epilogue.has_bias:
    found.append(((problem.n,), problem.out_dtype))
  if problem.norm_eps is not None:
    found.append(((problem.k,), problem.dtype))
  return found


def random_operands(problem: Problem, seed: int = 0) -> tuple[jax.Array, ...]:
  """Fresh normal operands."""
  rng = np.random.default_rng(seed)

  def draw(shape, dtype):
    if dtype == "int8":
      return rng.integers(-128, 128, shape)
    return rng.standard_normal(shape)

  types = operand_types(problem)
  return tuple(jnp.asarray(draw(*each), each[1]) for each in types)


def as_multiplied(problem: Problem, operands, dtype=np.float64) -> list[np.ndarray]:
  """lhs [batch, m, k], rhs [batch, k, n] and the others, in another dtype."""
  lhs, rhs, *others = (np.asarray(x).astype(dtype) for x in operands)
  if problem.lhs_layout == "m-major":
    lhs = lhs.swapaxes(1, 2)
  if problem.rhs_layout == "k-major":
    rhs = rhs.swapaxes(1, 2)
  return [lhs, rhs, *others]


def truth(problem: Problem, operands) -> np.ndarray:
  """The float64 result of the operands as they are, c and bias added."""
  lhs, rhs, *others = as_multiplied(problem, operands)
  epilogue = problem.epilogue
  assert epilogue.activation == "none", epilogue
  if problem.norm_eps is not None:
    *others, weights = others
    mean = np.mean(np.square(lhs), -1, keepdims=True)
    lhs = lhs / np.sqrt(mean + problem.norm_eps) * weights
  c = others[:1] if epilogue.has_c else []
  out = reference.matmul(lhs, rhs, *c, alpha=epilogue.alpha, beta=epilogue.beta)
  return out + others[-1] if epilogue.has_bias else out


def baseline_error(problem: Problem, operands) -> float:
  """Error of XLA's own result, for the dtypes and precision of the problem.

  On a CPU XLA multiplies float32 exactly; a TF32 baseline rounds the operands as
  the tensor cores would.
  """
  lhs, rhs, *others = operands
  epilogue = problem.epilogue
  if problem.norm_eps is not None:
    *others, weights = others
    lhs = RMSNorm(weights, problem.norm_eps)(lhs)
  if problem.converts:
    lhs, rhs = (x.astype(problem.dtype) for x in (lhs, rhs))
  if problem.dtype == "float32" and jax.default_backend() == "cpu":
    lhs, rhs = (lax.reduce_precision(x, 8, 10) for x in (lhs, rhs))
  lhs_k = 2 if problem.lhs_layout == "k-major" else 1
  rhs_k = 1 if problem.rhs_layout == "n-major" else 2
  if not problem.lhs_batched:
    lhs = jnp.broadcast_to(lhs, (problem.batch, *lhs.shape[1:]))
  if not problem.rhs_batched:
    rhs = jnp.broadcast_to(rhs, (problem.batch, *rhs.shape[1:]))
  out = lax.dot_general(
      lhs, rhs, (((lhs_k,), (rhs_k,)), ((0,), (0,))), preferred_element_type=jnp.float32
  )
  out = epilogue.alpha * out
  if epilogue.has_c:
    out = out + epilogue.beta * others[0].astype(jnp.float32)
  if epilogue.has_bias:
    out = out + others[-1].astype(jnp.float32)
  return reference.relative_error(
      out.astype(problem.out_dtype), truth(problem, operands)
  )


def emulate(
    kernel: str, problem: Problem, config, operands, *, num_sms=4, **options
) -> jax.Array:
  """The kernel's result in GPU interpret mode; raises if it raced."""
  module = KERNELS[kernel]
  assert module.supports(problem, config) is None
  return compat.run_interpreted(
      lambda params: module.launch(
          operands, problem, config, num_sms=num_sms, interpret=params, **options
      )
  )


def check(kernel: str, problem: Problem, config, *, seed=0, num_sms=4) -> None:
  """Asserts that the emulated kernel is as accurate as twice XLA's error."""
  operands = random_operands(problem, seed)
  result = emulate(kernel, problem, config, operands, num_sms=num_sms)
  assert result.shape == problem.out_shape
  assert result.dtype == problem.out_dtype
  error = reference.relative_error(result, truth(problem, operands))
  assert error <= 2 * baseline_error(problem, operands), (problem, config)


def abstract_operands(problem: Problem) -> list[jax.ShapeDtypeStruct]:
  """Shapes and dtypes of what the kernels take, of a gated product one rhs."""
  return [
      jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
      for shape, dtype in operand_types(problem)
  ]


def lowered(kernel: str, problem, config) -> str:
  """The module text of the kernel for CUDA."""
  operands = abstract_operands(problem)
  if problem.epilogue.gated:
    operands[1] = operands[1], operands[1]
    operands += operands[-1:] if problem.epilogue.has_bias else []
  operands += operands[2:] * (problem.epilogue.slopes == 2)
  launch = lambda *x: KERNELS[kernel].launch(x, problem, config, num_sms=132)
  return jax.export.export(jax.jit(launch), platforms=["cuda"])(*operands).mlir_module()


def copies(kernel: str, fields: dict, problem: Problem) -> list[tuple[bool, int, int]]:
  """(whether only if it is wanted, rows, columns) of the copies into shared memory."""
  config = small_config(kernel, **fields)
  text = str(jax.make_jaxpr(
      lambda *x: KERNELS[kernel].launch(x, problem, config, num_sms=132)
  )(*abstract_operands(problem)))
  copy = r"copy_gmem_to_smem(\[.*\])? \w+\[0,\w+:\w+\+(\d+),\w+:\w+\+(\d+)\] ->"
  return [
      ("predicate" in options, int(rows), int(cols))
      for options, rows, cols in re.findall(copy, text)
  ]
