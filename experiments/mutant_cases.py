"""Runs small problems through every kernel, without one call: see experiments/mutants.py.

  python -m experiments.mutant_cases [MODULE:LINE:COLUMN]

Prints the name of each case as it begins, and at last a line of JSON.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.abc
import importlib.machinery
import json
import sys
from types import ModuleType

# The cases that run what a module has; of others, which many kernels share, all do.
CASES_OF = {
    "blocked": ("blocked",), "cotangents": ("cotangents",), "direct": ("direct",),
    "exchange": ("exchange", "exchange_again"), "lhs_registers": ("split_lhs",),
    "grouped_k": ("sums_of_groups",), "losses": ("losses", "losses_of_long_rows"),
    "norms": ("norm",), "pipelined": ("pipelined",),
}
REACHED = "_mutant_reached"
_BOUND = 8e-3  # Relative to float64; what is wrong is far from it.


class _Remover(ast.NodeTransformer):
  """Replaces the statement at a place by a note that it was reached."""

  def __init__(self, line: int, column: int):
    self._place = line, column

  def visit_Expr(self, node: ast.Expr) -> ast.AST:
    if (node.lineno, node.col_offset) != self._place:
      return self.generic_visit(node)
    note = ast.parse(f"__import__('sys').{REACHED} = True").body[0]
    return ast.fix_missing_locations(ast.copy_location(note, node))


class _Loader(importlib.machinery.SourceFileLoader):
  """Loads a module without the call."""

  place: tuple[int, int]

  def get_code(self, fullname: str):
    source = self.get_data(self.path)
    tree = _Remover(*self.place).visit(ast.parse(source))
    return compile(tree, self.path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
  """Finds the one module that is mutated."""

  def __init__(self, name: str, place: tuple[int, int]):
    self._name, self._place = name, place

  def find_spec(self, fullname: str, path, target: ModuleType | None = None):
    if fullname != self._name:
      return None
    spec = importlib.machinery.PathFinder.find_spec(fullname, path)
    spec.loader = _Loader(spec.loader.name, spec.loader.path)
    spec.loader.place = self._place
    return spec


def mutate(text: str) -> None:
  """Makes the import of a module leave out the call at MODULE:LINE:COLUMN."""
  module, line, column = text.split(":")
  place = int(line), int(column)
  sys.meta_path.insert(0, _Finder(f"pallas_kernels.{module}", place))


def cases() -> dict:
  """Each case: a function that gives results and the truth, by name."""
  # Not before the mutated module can be found.
  from pallas_kernels.configs import (
    BlockedConfig,
    DirectConfig,
    PersistentConfig,
    PipelinedConfig,
    SplitKConfig,
  )
  from pallas_kernels.problem import Epilogue, Problem

  epilogue = Epilogue(beta=1.0, c_dtype="bfloat16", has_bias=True, activation="relu",
                      saves=True)
  gated = Epilogue(activation="silu", gated=True, saves=True)
  plain = Problem(130, 200, 328)
  fused = dataclasses.replace(plain, epilogue=epilogue)
  wide = dataclasses.replace(plain, dtype="float32", out_dtype="float32")
  x6 = dataclasses.replace(wide, algorithm="bf16_x6")
  small = PersistentConfig(128, 64, 64, num_stages=2)
  change = dataclasses.replace
  split = SplitKConfig(128, 64, 64, num_stages=2, splits=2)
  listed = {
      "blocked": ("blocked", fused, BlockedConfig(64, 64)),
      "pipelined": ("pipelined", fused, PipelinedConfig(64, 64, num_stages=3)),
      "direct": ("direct", fused, DirectConfig(64, 64)),
      "persistent": ("persistent", change(fused, m=300, n=328), small),
      "turns": ("persistent", change(fused, m=300, n=328),
                change(small, tile_m=64, wg_dim="tile", num_stages=3)),
      "cluster": ("persistent", change(plain, m=300, n=264), change(small, cluster_n=2)),
      "gated": ("persistent", change(plain, epilogue=gated),
                change(small, tile_n=128, num_stages=3)),
      "swap": ("persistent", change(plain, m=24, n=200), change(
          small, tile_m=64, tile_n=32, consumers=1, swap=True)),
      "exchange": ("split_k", fused, change(split, cluster_k=2)),
      "exchange_again": ("split_k", change(plain, m=300), change(
          split, cluster_k=2, tile_m=64, consumers=1)),
      "reduce": ("split_k", plain, split),
      "x6": ("persistent", x6, change(small, promote=1, consumers=2)),
      "halves": ("persistent", x6, change(small, promote=1, float16_parts=True)),
      "split_lhs": ("persistent", change(x6, n=24), change(
          small, tile_m=64, tile_n=32, tile_k=32, consumers=1, promote=1, num_stages=4,
          split_lhs=True)),
      "blocks": ("persistent", change(
          plain, m=300, k=460, dtype="float8_e4m3fn", algorithm="e4m3_f32",
          epilogue=Epilogue(scaling="blocks")), change(small, tile_k=128, promote=1)),
      "x3": ("persistent", change(wide, algorithm="bf16_x3"), change(small, promote=0)),
      "norm": ("persistent", change(plain, norm_eps=1e-5), change(
          small, tile_m=64, tile_n=64, num_stages=4, consumers=2, wg_dim="k")),
  }
  return {name: _product(*case) for name, case in listed.items()} | {
      "cotangents": _cotangents,
      "sums_of_groups": lambda: _sums_of_groups((3, 0, 129, 1, 64, 0, 61)),
      "losses": lambda: _losses(3, 8256, 8200),
      "losses_of_long_rows": lambda: _losses(2, 61440, 61400),
  }


def _product(kernel: str, problem, config):
  def run():
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxgemm import dequantise
    from jaxgemm.rms_norm import normalised
    from pallas_kernels import KERNELS, activations, compat
    from pallas_kernels.problem import SCALE_BLOCK
    from pallas_kernels.tiles import cdiv

    reason = KERNELS[kernel].supports(problem, config)
    assert reason is None, reason
    rng, epilogue = np.random.default_rng(0), problem.epilogue
    draw = lambda shape, dtype: jnp.asarray(rng.standard_normal(shape), dtype)
    lhs = draw(problem.lhs_shape, problem.dtype)
    factors = [draw(problem.rhs_shape, problem.dtype) for _ in range(1 + epilogue.gated)]
    others = [draw(problem.out_shape, epilogue.c_dtype)] if epilogue.has_c else []
    others += [draw((problem.n,), problem.out_dtype)] if epilogue.has_bias else []
    rhs = tuple(factors) if epilogue.gated else factors[0]
    if epilogue.scaling == "blocks":
      blocks = cdiv(problem.k, SCALE_BLOCK)
      others = [
          jnp.asarray(rng.uniform(0.5, 2, (1, blocks, size)), "float32")
          for size in (problem.m, cdiv(problem.n, SCALE_BLOCK))
      ]
    if problem.norm_eps is not None:
      others.append(draw((problem.k,), problem.dtype))
    found = compat.run_interpreted(
        lambda params: KERNELS[kernel].launch(
            (lhs, rhs, *others), problem, config, num_sms=4, interpret=params
        )
    )
    with jax.enable_x64(True):
      wide = lambda x: x.astype("float64")
      if problem.norm_eps is not None:
        lhs = normalised(wide(lhs), wide(others[-1]), problem.norm_eps)
      entering = [wide(lhs) @ wide(x) for x in factors]
      if epilogue.scaling == "blocks":
        rows, cols = map(wide, others)
        lhs, rhs = dequantise(lhs, rows.mT, "float64"), dequantise(rhs, cols, "float64")
        entering = [lhs @ rhs]
      if epilogue.has_bias:
        entering = [x + wide(others[-1]) for x in entering]
      out = activations.apply(epilogue.activation, entering[0])
      out = out * entering[1] if epilogue.gated else out
      out = out + wide(others[0]) if epilogue.has_c else out
    truth = [out, *entering] if epilogue.saves else [out]
    return found if epilogue.saves else [found], truth

  return run


def _sums_of_groups(sizes: tuple[int, ...]):
  """Of groups that begin anywhere, the last rows in none, in pairs of CTAs."""
  import jax
  import jax.numpy as jnp
  import numpy as np

  from pallas_kernels import GROUPED_KERNELS, compat
  from pallas_kernels.configs import PersistentConfig
  from pallas_kernels.problem import Problem

  kernel = GROUPED_KERNELS["grouped_k"]
  rows, groups = sum(sizes) + 3, len(sizes)
  problem = Problem(
      140, 136, rows, groups, lhs_layout="m-major", lhs_batched=False, rhs_batched=False,
      grouped="k",
  )
  config = PersistentConfig(128, 128, 64, num_stages=2, cluster_n=2)
  assert (reason := kernel.supports(problem, config)) is None, reason
  rng = np.random.default_rng(0)
  lhs, rhs = (
      jnp.asarray(rng.standard_normal((1, rows, size)), problem.dtype)
      for size in (problem.m, problem.n)
  )
  found = compat.run_interpreted(
      lambda params: kernel.launch(
          (lhs, rhs, jnp.asarray(sizes, jnp.int32)), problem, config, num_sms=4,
          interpret=params,
      )
  )
  ends = np.cumsum(sizes)
  with jax.enable_x64(True):
    lhs, rhs = (x[0].astype("float64") for x in (lhs, rhs))
    truth = [
        lhs[end - size : end].T @ rhs[end - size : end]
        for size, end in zip(sizes, ends, strict=True)
    ]
    return [found], [jnp.stack(truth)]


def _cotangents():
  import jax
  import jax.numpy as jnp
  import numpy as np

  from pallas_kernels import compat
  from pallas_kernels import cotangents as kernel

  facts = kernel.Cotangents(700, 200, "bfloat16", "silu", gated=True)
  rng = np.random.default_rng(0)
  operands = [
      jnp.asarray(rng.standard_normal((facts.rows, facts.cols)), facts.dtype)
      for _ in range(3)
  ]
  found, sums = compat.run_interpreted(
      lambda params: kernel.launch(operands, facts, num_sms=1, interpret=params)
  )
  with jax.enable_x64(True):
    wide = [x.astype("float64") for x in operands]
    truth = kernel.derivatives(facts, wide[:-1], wide[-1])
    return [*found, *sums], [*truth, *(x.sum(0) for x in truth)]


def _losses(rows: int, cols: int, num_classes: int):
  import jax
  import jax.numpy as jnp
  import numpy as np

  from pallas_kernels import compat
  from pallas_kernels import losses as kernel

  facts = kernel.Losses(rows, cols, num_classes, "bfloat16")
  rng = np.random.default_rng(0)
  logits = jnp.asarray(4 * rng.standard_normal((rows, cols)), facts.dtype)
  labels = jnp.asarray(rng.integers(0, num_classes, rows), jnp.int32)
  found = compat.run_interpreted(
      lambda params: kernel.launch(logits, labels, facts, interpret=params)
  )
  with jax.enable_x64(True):
    wide = logits.astype("float64").at[:, num_classes:].set(-np.inf)
    log_sum = jax.nn.logsumexp(wide, 1)
    slopes = jnp.exp(wide - log_sum[:, None])
    slopes = slopes.at[jnp.arange(rows), labels].add(-1.0)
    return found, [log_sum, wide[jnp.arange(rows), labels], slopes]


def run(module: str | None) -> dict:
  """Runs a module's cases until one fails; what `mutants.Verdict` wants but the name."""
  from jaxgemm import reference

  for name, case in cases().items():
    if name not in CASES_OF.get(module, (name,)):
      continue
    print(name, flush=True)
    killed = None
    try:
      found, truth = case()
    except RuntimeError as error:
      killed = "race" if "raced" in str(error) else "error"
    except Exception:  # Whatever the emulator makes of a mutant.
      killed = "error"
    else:
      for ours, its in zip(found, truth, strict=True):
        if not reference.relative_error(ours, its) < _BOUND:
          killed = "wrong"
    if killed:
      return dict(killed=killed, reached=hasattr(sys, REACHED), case=name)
  return dict(killed=None, reached=hasattr(sys, REACHED), case=None)


if __name__ == "__main__":
  for argument in sys.argv[1:]:
    mutate(argument)
  mutated = sys.argv[1].split(":")[0] if len(sys.argv) > 1 else None
  print(json.dumps(run(mutated)), flush=True)
