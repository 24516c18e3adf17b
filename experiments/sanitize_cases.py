"""One small problem of each kernel and class of configs: see experiments/sanitize.py.

  python -m experiments.sanitize_cases [NAME ...]

Runs these cases, or all, each once, on the GPU, and prints the name of each as it begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxgemm.device import current_device, supported
from pallas_kernels import (
  GROUPED_KERNELS,
  KERNELS,
  cotangents,
  losses,
  norm_gradients,
  triton,
)
from pallas_kernels.configs import (
  BlockedConfig,
  Config,
  DirectConfig,
  GemvConfig,
  PersistentConfig,
  PipelinedConfig,
  SplitKConfig,
  TritonConfig,
)
from pallas_kernels.problem import ALGORITHM_OF_DTYPE, SCALE_BLOCK, Epilogue, Problem
from pallas_kernels.tiles import cdiv

CASE, DONE = "case: ", "all cases ran"
# A few CTAs, so that each works on several tiles, and every slot is used again.
NUM_SMS = 8


@dataclasses.dataclass(frozen=True)
class Case:
  """One launch.

  Attributes:
    kernel: of which the launch is.
    types: shape and dtype of each operand; a tuple of them for the rhs of a gated
      product.
    launch: a function of the operands.
    reason: why the kernel does not serve, or None.
  """

  kernel: str
  types: tuple[Any, ...]
  launch: Callable[..., Any]
  reason: str | None


def product(kernel: str, problem: Problem, config: Config, *, packed=False) -> Case:
  """A product; `packed`: both rhs of a gated one in one array."""
  epilogue, of = problem.epilogue, jax.ShapeDtypeStruct
  batch, rows, cols = problem.rhs_shape
  lhs_dtype, rhs_dtype = problem.stored_dtypes
  lhs: Any = of(problem.lhs_shape, lhs_dtype)
  rhs: Any = of((batch, rows, cols), rhs_dtype)
  if epilogue.gated:
    rhs = (of((batch, rows, 2 * cols), rhs_dtype),) if packed else (rhs, rhs)
  if problem.terms > 1:
    lhs = (of(problem.term.lhs_shape, lhs_dtype),) * problem.terms
    rhs = (of(problem.term.rhs_shape, rhs_dtype),) * problem.terms
  found = [lhs, rhs]
  found += [of(problem.out_shape, epilogue.c_dtype) for _ in range(epilogue.num_c)]
  if epilogue.has_bias:
    found += [of((problem.n,), problem.out_dtype)] * (1 + epilogue.gated)
  if epilogue.scaling == "rows":
    found += [of((problem.batch, size), "float32") for size in (problem.m, problem.n)]
  elif epilogue.scaling == "blocks":
    blocks = cdiv(problem.k, SCALE_BLOCK)
    found += [
        of((problem.batch, blocks, size), "float32")
        for size in (problem.m, cdiv(problem.n, SCALE_BLOCK))
    ]

  if problem.norm_eps is not None:
    found.append(of((problem.k,), problem.dtype))

  def launch(*operands):
    return KERNELS[kernel].launch(operands, problem, config, num_sms=NUM_SMS)

  return Case(kernel, tuple(found), launch, KERNELS[kernel].supports(problem, config))


def _grouped(config: PersistentConfig, **fields) -> Case:
  """A product in five groups of rows, of which some are in none."""
  problem = dataclasses.replace(PLAIN, batch=5, lhs_batched=False, **fields)
  kernel = GROUPED_KERNELS[f"grouped_{problem.grouped}"]
  blocks = cdiv(problem.k, SCALE_BLOCK)
  scales = [(1, blocks, problem.m), (problem.batch, blocks, cdiv(problem.n, SCALE_BLOCK))]
  types = (
      jax.ShapeDtypeStruct(problem.lhs_shape, problem.dtype),
      jax.ShapeDtypeStruct(problem.rhs_shape, problem.stored_dtypes[1]),
      *(
          jax.ShapeDtypeStruct(shape, "float32") for shape in scales
          if problem.epilogue.scaling == "blocks"
      ),
      jax.ShapeDtypeStruct((problem.batch,), "int32"),
  )
  return Case(
      kernel.NAME, types,
      lambda *x: kernel.launch(x, problem, config, num_sms=NUM_SMS),
      kernel.supports(problem, config),
  )


def _cotangents(**fields) -> Case:
  facts = cotangents.Cotangents(
      **dict(rows=700, cols=200, dtype="bfloat16", activation="gelu") | fields
  )
  x = jax.ShapeDtypeStruct((facts.rows, facts.cols), facts.dtype)
  return Case(
      "cotangents", (x,) * (facts.num_entering + 1),
      lambda *x: cotangents.launch(x, facts, num_sms=NUM_SMS), None,
  )


def _norm_gradients(rows: int, cols: int) -> Case:
  facts = norm_gradients.NormGradients(rows, cols, "bfloat16", 1e-5)
  x = jax.ShapeDtypeStruct((rows, cols), facts.dtype)
  weights = jax.ShapeDtypeStruct((cols,), "float32")
  return Case(
      "norm_gradients", (x, weights, x, x),
      lambda *x: norm_gradients.launch(x, facts, num_sms=NUM_SMS), None,
  )


def _losses(rows: int, cols: int, num_classes: int) -> Case:
  facts = losses.Losses(rows, cols, num_classes, "bfloat16")
  types = (
      jax.ShapeDtypeStruct((rows, cols), facts.dtype),
      jax.ShapeDtypeStruct((rows,), "int32"),
  )
  launch = functools.partial(losses.launch, facts=facts)
  return Case("losses", types, lambda *x: launch(*x), None)


PLAIN = Problem(300, 328, 328)
ODD = Problem(301, 333, 327)  # Rows that begin at addresses which TMA does not take.
# Such rows where registers load or pad them: in aligned pieces of 16 bytes. Each operand,
# eight products, ends with its last piece; what lay behind it would be read, though not
# used, and initcheck would report it.
ODD_PIECES = Problem(141, 101, 327, batch=8)
FUSED = dataclasses.replace(
    PLAIN, epilogue=Epilogue(
        alpha=0.5, beta=1.0, c_dtype="bfloat16", has_bias=True, activation="gelu",
        saves=True,
    )
)
GATED = dataclasses.replace(
    PLAIN, epilogue=Epilogue(has_bias=True, activation="silu", gated=True, saves=True)
)
SLOPES = dataclasses.replace(
    PLAIN, epilogue=Epilogue(activation="silu", slopes=2, c_dtype="bfloat16")
)
LAYOUTS = {
    "nn": ("k-major", "n-major"), "nt": ("k-major", "k-major"),
    "tn": ("m-major", "n-major"), "tt": ("m-major", "k-major"),
}


def _of(problem: Problem, dtype: str, algorithm: str | None = None, **fields) -> Problem:
  algorithm = algorithm or ALGORITHM_OF_DTYPE[dtype]
  fields = dict(dtype=dtype, out_dtype=dtype, algorithm=algorithm) | fields
  return dataclasses.replace(problem, **fields)


def _laid_out(problem: Problem, layouts: str) -> Problem:
  lhs, rhs = LAYOUTS[layouts]
  return dataclasses.replace(problem, lhs_layout=lhs, rhs_layout=rhs)


_blocked = functools.partial(product, "blocked")
_persistent = functools.partial(product, "persistent")
_split_k = functools.partial(product, "split_k")
_TILE = dict(tile_m=128, tile_n=64, tile_k=64, num_stages=2)
_config = functools.partial(PersistentConfig, **_TILE)
_splits = functools.partial(SplitKConfig, **_TILE)
_one_consumer = functools.partial(_config, tile_m=64, num_stages=6, consumers=1)
_narrow = functools.partial(
    _config, tile_m=64, tile_n=32, tile_k=32, num_stages=4, consumers=1, promote=1,
    split_lhs=True,
)
X3, X6, X9 = (_of(PLAIN, "float32", f"bf16_x{n}") for n in (3, 6, 9))
E4M3 = _of(
    _laid_out(PLAIN, "nt"), "float8_e4m3fn", "e4m3_f32", out_dtype="bfloat16"
)
MIXED = dataclasses.replace(E4M3, algorithm="e4m3_e5m2_f32")
INT8 = _of(_laid_out(PLAIN, "nt"), "int8", "i8_i32", out_dtype="int32")
_eight_bits = functools.partial(_config, tile_k=128)


def _with(problem: Problem, **fields) -> Problem:
  return dataclasses.replace(problem, **fields)


def _scaled(scaling) -> Problem:
  return _with(E4M3, epilogue=Epilogue(scaling=scaling))


CASES: dict[str, Case] = {
    "blocked": _blocked(PLAIN, BlockedConfig(64, 64)),
    "blocked fused": _blocked(FUSED, BlockedConfig(64, 64)),
    "blocked tf32": _blocked(
        _of(PLAIN, "float32"), BlockedConfig(64, 64, 32, promote=1)),
    "blocked odd": _blocked(ODD_PIECES, BlockedConfig(64, 64)),
    "pipelined": product("pipelined", PLAIN, PipelinedConfig(64, 64, num_stages=3)),
    "pipelined fused": product("pipelined", FUSED, PipelinedConfig(64, 64, num_stages=3)),
    "direct": product("direct", PLAIN, DirectConfig(64, 64)),
    "direct cluster": product("direct", ODD_PIECES, DirectConfig(64, 64, splits=2)),
    "direct odd": product("direct", ODD_PIECES, DirectConfig(128, 64)),
    "direct fused": product("direct", FUSED, DirectConfig(64, 128)),
    "direct overlap": product("direct", ODD_PIECES, DirectConfig(64, 64, overlap=True)),
    "gemv": product("gemv", _with(_of(PLAIN, "float32"), m=2), GemvConfig(3)),
    "gemv column": product(
        "gemv", Problem(513, 3, 100, batch=2, lhs_layout="m-major", dtype="float32",
                        out_dtype="float32", algorithm="tf32_f32"), GemvConfig(2)),
    **{
        f"persistent {layouts}": _persistent(_laid_out(PLAIN, layouts), _config())
        for layouts in LAYOUTS
    },
    "persistent n": _persistent(PLAIN, _config(tile_n=128, wg_dim="n")),
    "persistent turns": _persistent(PLAIN, _config(tile_m=64, wg_dim="tile")),
    "persistent batch": _persistent(_with(PLAIN, batch=3, rhs_batched=False), _config()),
    "persistent cluster m": _persistent(PLAIN, _config(cluster_m=2)),
    "persistent cluster n": _persistent(PLAIN, _config(cluster_n=4)),
    "persistent turns in a cluster": _persistent(
        PLAIN, _config(wg_dim="tile", cluster_m=2)),
    "persistent shares and a rest": _persistent(  # That each CTA of two loads for itself.
        _laid_out(_with(PLAIN, n=344), "nt"), _config(tile_n=88, cluster_m=2)),
    "persistent three consumers": _persistent(PLAIN, _config(tile_m=192, consumers=3)),
    "persistent one consumer": _persistent(PLAIN, _one_consumer()),
    "persistent chunks": _persistent(_laid_out(PLAIN, "tn"), _config(tile_m=256)),
    "persistent chunks of columns": _persistent(PLAIN, _config(tile_n=256, wg_dim="n")),
    "persistent wide": _persistent(PLAIN, _config(tile_n=384)),
    "persistent padded": _persistent(ODD_PIECES, _one_consumer()),
    "persistent registers": _persistent(ODD_PIECES, _one_consumer(misaligned="loads")),
    "persistent registers tt": _persistent(
        _laid_out(ODD_PIECES, "tt"), _one_consumer(misaligned="loads")),
    "persistent skewed": _persistent(_with(PLAIN, k=327), _config(misaligned="skewed")),
    "persistent skewed swap": _persistent(
        _laid_out(_with(PLAIN, m=304, n=333), "tn"),
        _config(misaligned="skewed", swap=True)),
    "persistent converted": _persistent(
        _with(PLAIN, k=336, lhs_source="int8"), _config()),
    "split_k converted": _split_k(
        _with(PLAIN, n=336, rhs_source="float8_e4m3fn"), _splits(swap=True, cluster_k=2)),
    "persistent norm": _persistent(
        _with(PLAIN, m=140, norm_eps=1e-5), _one_consumer()),
    "persistent norm by two": _persistent(
        _with(PLAIN, m=13, n=1000, norm_eps=1e-5),
        _one_consumer(tile_n=64, num_stages=8, consumers=2, wg_dim="k")),
    "persistent norm gated": _persistent(
        _with(PLAIN, m=64, norm_eps=1e-5,
              epilogue=Epilogue(activation="silu", gated=True)),
        _one_consumer(tile_n=128, num_stages=4)),
    "persistent terms": _persistent(_with(PLAIN, k=256, terms=2), _config()),
    "persistent runs": _persistent(
        _with(PLAIN, m=197, k=205), _config(misaligned="runs")),
    "persistent runs of columns": _persistent(
        _laid_out(_with(PLAIN, m=99), "tn"), _config(misaligned="runs")),
    "persistent swap": _persistent(
        _with(PLAIN, m=24), _config(tile_m=64, tile_n=32, consumers=1, swap=True)),
    "persistent swap turns": _persistent(
        PLAIN, _config(tile_n=80, wg_dim="tile", swap=True)),
    "persistent promote": _persistent(
        _with(PLAIN, out_dtype="float32"), _config(promote=1)),
    "persistent float16": _persistent(_of(PLAIN, "float16"), _config()),
    "persistent tf32": _persistent(_of(PLAIN, "float32"), _config(tile_k=32)),
    "persistent fused": _persistent(FUSED, _config()),
    "persistent fused swap": _persistent(
        _with(PLAIN, epilogue=Epilogue(has_bias=True, activation="silu")),
        _config(tile_n=80, swap=True)),
    "persistent slopes": _persistent(SLOPES, _config()),
    "persistent slopes swap": _persistent(
        SLOPES, _config(tile_n=80, wg_dim="tile", swap=True)),
    "persistent gated": _persistent(GATED, _config(tile_n=128, num_stages=3)),
    "persistent gated swap": _persistent(
        GATED, _config(tile_n=80, wg_dim="tile", swap=True)),
    "persistent packed": _persistent(
        _with(GATED, n=320), _config(tile_n=128, num_stages=3), packed=True),
    "split_k": _split_k(PLAIN, _splits(splits=2)),
    "split_k cluster": _split_k(PLAIN, _splits(splits=2, cluster_k=2)),
    "split_k clusters": _split_k(PLAIN, _splits(splits=4, cluster_k=2)),
    "split_k fused": _split_k(FUSED, _splits(splits=2)),
    "split_k cluster fused": _split_k(FUSED, _splits(splits=2, cluster_k=2)),
    "split_k registers": _split_k(
        ODD_PIECES, _splits(tile_m=64, num_stages=6, consumers=1, misaligned="loads",
                            splits=2, cluster_k=2)),
    "split_k skewed": _split_k(
        _with(PLAIN, n=333),
        _splits(misaligned="skewed", swap=True, splits=2, cluster_k=2)),
    "split_k swap": _split_k(
        _with(PLAIN, m=24), _splits(tile_m=64, tile_n=32, consumers=1, swap=True,
                                    splits=2, cluster_k=2)),
    "x3": _persistent(X3, _config(promote=1)),
    "x6": _persistent(X6, _config(promote=1)),
    "x9": _persistent(X9, _config(promote=1)),
    "x6 turns": _persistent(X6, _config(promote=1, wg_dim="tile")),
    "x6 cluster": _persistent(X6, _config(promote=1, cluster_m=2)),
    "x6 split_k": _split_k(X6, _splits(promote=1, splits=2)),
    "halves": _persistent(X6, _config(promote=1, float16_parts=True)),
    "halves made by kernels": _persistent(
        _with(X6, m=136, n=256, k=384), _config(promote=1, float16_parts=True)),
    "halves split_k": _split_k(
        X6, _splits(promote=1, float16_parts=True, splits=2, cluster_k=2)),
    "split_lhs": _persistent(_with(X6, n=24), _narrow()),
    "split_lhs swap": _persistent(_with(X6, m=24), _narrow(swap=True)),
    "split_lhs split_k": _split_k(
        _with(X6, n=24), SplitKConfig(**vars(_narrow()), splits=2, cluster_k=2)),
    "float8": _persistent(E4M3, _eight_bits(promote=1)),
    "float8 mixed": _persistent(MIXED, _eight_bits(promote=1)),
    "int8": _persistent(INT8, _eight_bits()),
    "scaled rows": _persistent(_scaled("rows"), _eight_bits(promote=1)),
    "scaled blocks": _persistent(_scaled("blocks"), _eight_bits(promote=1)),
    "grouped_m": _grouped(_config(), grouped="m"),
    "grouped_m swap": _grouped(
        _config(tile_m=64, tile_n=32, consumers=1, swap=True), grouped="m"),
    "grouped_m converted": _grouped(
        _config(tile_n=32, swap=True), grouped="m", n=336, rhs_source="int8"),
    "grouped_m scaled": _grouped(
        _eight_bits(promote=1), grouped="m", rhs_layout="k-major", k=336,
        dtype="float8_e4m3fn", algorithm="e4m3_f32",
        epilogue=Epilogue(scaling="blocks")),
    "grouped_m cluster": _grouped(_config(tile_m=256, cluster_n=2), grouped="m"),
    "grouped_k": _grouped(
        _config(tile_n=128), grouped="k", lhs_layout="m-major", rhs_batched=False),
    "grouped_k turns": _grouped(
        _config(wg_dim="tile"), grouped="k", lhs_layout="m-major", rhs_batched=False),
    "cotangents": _cotangents(),
    "cotangents gated": _cotangents(activation="silu", gated=True),
    "cotangents of a bias": _cotangents(activation="none"),
    "norm_gradients": _norm_gradients(137, 1024),
    "norm_gradients of long rows": _norm_gradients(37, 5120),
    "losses": _losses(5, 4096, 4090),
    "losses of long rows": _losses(2, 57408, 57400),
}
if triton.missing_package() is None:
  CASES |= {
      "triton blocked": product("triton", PLAIN, TritonConfig(64, 64, 32, num_stages=1)),
      "triton pipelined": product("triton", ODD, TritonConfig(64, 64, 32)),
      "triton split_k": product("triton", PLAIN, TritonConfig(64, 64, 32, splits=2)),
  }


def operands(case: Case) -> list[Any]:
  """Operands of a case, copied from the host: no kernel has written them."""
  rng = np.random.default_rng(0)

  def draw(x):
    if jnp.issubdtype(x.dtype, jnp.integer):
      return jax.device_put(rng.integers(0, 100, x.shape).astype(x.dtype))
    return jax.device_put(rng.standard_normal(x.shape).astype(x.dtype))

  return [jax.tree.map(draw, x) for x in case.types]


def main(names: Sequence[str]) -> None:
  if not supported(current_device()):
    sys.exit("the kernels need an NVIDIA GPU of compute capability 9.0 (Hopper)")
  for name in names or CASES:
    case = CASES[name]
    # What a tool says of a case comes before its result, and so before the next name.
    print(f"{CASE}{name}", flush=True)
    jax.block_until_ready(jax.jit(case.launch)(*operands(case)))
  print(DONE, flush=True)


if __name__ == "__main__":
  main(sys.argv[1:])
