"""Named problems: which products an experiment runs, and what kind each one is.

A suite is a list of `Case`s. Sizes are m, n, k of [m, k] @ [k, n]; layouts are
in BLAS letters (NN, NT, TN, TT), the first for lhs and the second for rhs,
where T means that the operand is stored transposed: lhs as [k, m], rhs as
[n, k].
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
import dataclasses
from typing import Literal

import numpy as np

from pallas_kernels.problem import ALGORITHM_OF_DTYPE, Problem

Class = Literal["large", "medium", "skinny", "deep", "odd", "batched", "small"]
LAYOUTS = ("NN", "NT", "TN", "TT")
DTYPES = ("bfloat16", "float16", "float32")
SUITES = ("demo", "issue2", "random")


@dataclasses.dataclass(frozen=True)
class Case:
  """One problem of a suite, the name it goes by, and its class."""

  name: str
  klass: Class
  problem: Problem


def classify(problem: Problem) -> Class:
  """Returns the class of `problem`: the first of these that applies.

  batched: more than one product. odd: a size that is no multiple of 8, so that
  a row of an operand or of the result may break TMA's 16-byte rule. deep: k at
  least 8 times m and n. skinny: m or n at most 128 and a quarter of the other.
  The others go by operations: large from 64 GFLOP on, small below 4 GFLOP.
  """
  m, n, k = problem.m, problem.n, problem.k
  if problem.batch > 1:
    return "batched"
  if any(size % 8 for size in (m, n, k)):
    return "odd"
  if k >= 8 * max(m, n):
    return "deep"
  if min(m, n) <= 128 and 4 * min(m, n) <= max(m, n):
    return "skinny"
  if problem.flops >= 64e9:
    return "large"
  return "small" if problem.flops < 4e9 else "medium"


def make_case(
    m: int,
    n: int,
    k: int,
    layouts: str = "NN",
    dtype: str = "bfloat16",
    batch: int = 1,
) -> Case:
  """Returns the case of one product whose result has the operands' dtype."""
  problem = Problem(
      m=m,
      n=n,
      k=k,
      batch=batch,
      lhs_layout="k-major" if layouts[0] == "N" else "m-major",
      rhs_layout="n-major" if layouts[1] == "N" else "k-major",
      dtype=dtype,
      out_dtype=dtype,
      algorithm=ALGORITHM_OF_DTYPE[dtype],
  )
  sizes = f"{batch}x{m}x{n}x{k}" if batch > 1 else f"{m}x{n}x{k}"
  return Case(f"{sizes} {layouts} {dtype}", classify(problem), problem)


def demo_suite(on_gpu: bool) -> list[Case]:
  """Returns a first look: one or a few cases of each class.

  On a CPU the kernels are emulated at about a second for 256^3, so the sizes
  there are the smallest that still show full and partial tiles, several steps
  along k, more than one output tile, and operands that TMA cannot take as they
  are stored.
  """
  if on_gpu:
    return [
        *(make_case(4096, 4096, 4096, layouts) for layouts in LAYOUTS),
        make_case(1024, 1024, 14336),
        make_case(256, 256, 65536),
        make_case(8192, 50257, 768),
        make_case(1000, 1000, 1000),
        make_case(1001, 1000, 512),
        make_case(512, 2048, 1024, batch=128),
        make_case(16, 4096, 4096),
    ]
  return [
      make_case(384, 256, 256, "NN"),
      make_case(200, 264, 200, "NT"),
      make_case(192, 256, 256, "TN", dtype="float16"),
      make_case(64, 128, 1024, "TT"),
      make_case(129, 131, 257, "NN"),
      make_case(8, 256, 256, "NT", dtype="float32"),
      make_case(128, 128, 256, "TN", batch=2),
  ]


def issue2_suite() -> list[Case]:
  """Returns the products whose speed on an H200 the README records."""
  return [
      *(make_case(4096, 4096, 4096, layouts) for layouts in LAYOUTS),
      *(make_case(8192, 8192, 8192, layouts) for layouts in LAYOUTS),
      make_case(1024, 1024, 14336),
      make_case(256, 256, 65536),
      make_case(8192, 50257, 768),
  ]


def random_suite(count: int, seed: int, largest: int) -> list[Case]:
  """Returns `count` random problems, the same ones for the same arguments.

  Sizes are log-uniform from 16 to `largest`. Every third problem has at least
  one odd size; the sizes of the others are multiples of 8. One in eight is a
  batch of 2 to 8 products. Layouts and dtypes are uniform.

  Args:
    count: number of problems.
    seed: seed of the draw.
    largest: upper bound of m, n and k.
  """
  rng = np.random.default_rng(seed)
  cases = []
  for i in range(count):
    sizes = np.exp(rng.uniform(np.log(16), np.log(largest), size=3)).astype(int)
    sizes = np.maximum(sizes // 8 * 8, 16)
    if i % 3 == 0:
      odd = rng.random(3) < 0.5
      odd[rng.integers(3)] = True
      sizes = sizes - odd * rng.choice([1, 3, 5, 7], size=3)
    batch = int(rng.integers(2, 9)) if rng.random() < 1 / 8 else 1
    m, n, k = (int(size) for size in sizes)
    layouts, dtype = str(rng.choice(LAYOUTS)), str(rng.choice(DTYPES))
    cases.append(make_case(m, n, k, layouts, dtype, batch))
  return cases


def parse_shape(
    text: str, layouts: Sequence[str] = ("NN",), dtypes: Sequence[str] = ("bfloat16",)
) -> list[Case]:
  """Returns the cases of one `--shapes` flag.

  Args:
    text: "m,n,k" or "batch,m,n,k", with ":" and layouts joined by "+" after it
      if they should differ from `layouts`: "4096,4096,4096:NT+TN".
    layouts: layouts of a shape that names none.
    dtypes: one case for each.

  Raises:
    ValueError: the text is not of this form.
  """
  sizes_text, colon, layouts_text = text.partition(":")
  if colon:
    layouts = layouts_text.split("+")
  try:
    sizes = [int(size) for size in sizes_text.split(",")]
  except ValueError:
    sizes = []
  if (
      len(sizes) not in (3, 4)
      or min(sizes) < 1
      or not set(layouts) <= set(LAYOUTS)
  ):
    raise ValueError(
        f"shape {text!r} is not of the form [batch,]m,n,k[:LAYOUTS] with positive"
        f" sizes and layouts from {', '.join(LAYOUTS)} joined by '+'"
    )
  *batch, m, n, k = sizes
  return [
      make_case(m, n, k, layout, dtype, *batch)
      for layout in layouts
      for dtype in dtypes
  ]


def select(
    cases: Iterable[Case],
    layouts: Sequence[str] | None,
    dtypes: Sequence[str] | None,
) -> list[Case]:
  """Returns the cases with one of the layouts and dtypes; None means any."""
  return [
      case
      for case in cases
      if (not layouts or case.problem.layouts in layouts)
      and (not dtypes or case.problem.dtype in dtypes)
  ]
