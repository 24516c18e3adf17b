"""Named problems: which products an experiment runs, and what kind each one is.

A suite is a list of `Case`s. Sizes are m, n, k of [m, k] @ [k, n]; layouts are
in BLAS letters (NN, NT, TN, TT), the first for lhs and the second for rhs,
where T means that the operand is stored transposed: lhs as [k, m], rhs as
[n, k].
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
import dataclasses
from typing import Literal, get_args

import numpy as np

from experiments import model_shapes
from pallas_kernels.problem import ALGORITHM_OF_DTYPE, ALGORITHM_OF_EIGHT_BITS, Problem

Class = Literal["large", "medium", "skinny", "deep", "odd", "batched", "small"]
CLASSES: tuple[Class, ...] = get_args(Class)
LAYOUTS = ("NN", "NT", "TN", "TT")
_ALGORITHM_OF = ALGORITHM_OF_DTYPE | ALGORITHM_OF_EIGHT_BITS
DTYPES = tuple(_ALGORITHM_OF)
SUITES = ("demo", "issue2", "full", "float32", "neighbours", "random")
_NUM_FLOAT32 = 40
_ALGORITHMS = {"high": "bf16_x3", "highest": "bf16_x6"}  # Of float32 operands.

# What is not small: it takes some 10 us, of which its launch is a small part.
_LARGE_FLOPS = 8e9
_LARGE_BYTES = 32e6


@dataclasses.dataclass(frozen=True)
class Case:
  """One problem of a suite, the name it goes by, and its class."""

  name: str
  klass: Class
  problem: Problem


def classify(problem: Problem) -> Class:
  """Returns the class of `problem`: the first of these that applies.

  batched: more than one product.
  odd: a row of an operand or of the result is no multiple of 8 elements, which
    breaks TMA's rule of 16 bytes (in float32, may break it), or a size above 8 is no
    multiple of 8. One, two or four tokens alone make nothing odd.
  small: no size above 1024.
  deep: k at least 10 times m and n, and too few elements of the result, at most
    2^21, to give each SM a tile of 128 x 128.
  skinny: m or n below 128.
  medium: m or n at most 512.
  large: from 8 GFLOP or 32 MB on; what is less, about 1600^3, is small.
  """
  m, n, k = problem.m, problem.n, problem.k
  if problem.batch > 1:
    return "batched"
  rows = (problem.lhs_shape[-1], problem.rhs_shape[-1], n)
  if any(size % 8 for size in (*rows, *(size for size in (m, n, k) if size > 8))):
    return "odd"
  if max(m, n, k) <= 1024:
    return "small"
  if k >= 10 * max(m, n) and m * n <= 1 << 21:
    return "deep"
  if min(m, n) < 128:
    return "skinny"
  if min(m, n) <= 512:
    return "medium"
  large = problem.flops >= _LARGE_FLOPS or problem.num_bytes >= _LARGE_BYTES
  return "large" if large else "small"


def make_case(
    m: int,
    n: int,
    k: int,
    layouts: str = "NN",
    dtype: str = "bfloat16",
    batch: int = 1,
    name: str | None = None,
) -> Case:
  """Returns the case of one product whose result has the operands' dtype.

  That of int8 operands is int32, of 8-bit floating-point ones bfloat16.
  Its name is `name`, or tells the sizes, the layouts and the dtype.
  """
  problem = Problem(
      m=m,
      n=n,
      k=k,
      batch=batch,
      lhs_layout="k-major" if layouts[0] == "N" else "m-major",
      rhs_layout="n-major" if layouts[1] == "N" else "k-major",
      dtype=dtype,
      out_dtype=_out_dtype(dtype),
      algorithm=_ALGORITHM_OF[dtype],
  )
  if name is None:
    sizes = f"{batch}x{m}x{n}x{k}" if batch > 1 else f"{m}x{n}x{k}"
    name = f"{sizes} {layouts} {dtype}"
  return Case(name, classify(problem), problem)


def _out_dtype(dtype: str) -> str:
  if dtype in ALGORITHM_OF_DTYPE:
    return dtype
  return "int32" if dtype == "int8" else "bfloat16"


def algorithm(dtype: str, precision: str = "default") -> str:
  """Returns the algorithm of operands of a dtype at a precision.

  Raises:
    ValueError: no suite has such operands.
  """
  if dtype == "float32" and precision in _ALGORITHMS:
    return _ALGORITHMS[precision]
  if dtype not in _ALGORITHM_OF:
    raise ValueError(f"dtype {dtype!r} is none of {', '.join(_ALGORITHM_OF)}")
  return _ALGORITHM_OF[dtype]


def at_precision(case: Case, precision: str) -> Case:
  """Returns the case at a precision: it says something of float32 operands only."""
  if case.problem.dtype != "float32" or precision == "default":
    return case
  problem = dataclasses.replace(
      case.problem, algorithm=algorithm("float32", precision)
  )
  return dataclasses.replace(case, name=f"{case.name} {precision}", problem=problem)


def precision_of(problem: Problem) -> str:
  """Returns the precision at which a problem is, as `at_precision` takes it."""
  for precision, name in _ALGORITHMS.items():
    if problem.algorithm == name:
      return precision
  return "default"


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
      make_case(192, 128, 192, "NN"),
      make_case(136, 72, 200, "NT"),
      make_case(128, 128, 128, "TN", dtype="float16"),
      make_case(64, 64, 1024, "TT"),
      make_case(65, 67, 129, "NN"),
      make_case(8, 128, 192, "NT", dtype="float32"),
      make_case(64, 64, 128, "TN", batch=2),
  ]


def issue2_suite() -> list[Case]:
  """Returns the products of eleven problems, for every kernel."""
  return [
      *(make_case(4096, 4096, 4096, layouts) for layouts in LAYOUTS),
      *(make_case(8192, 8192, 8192, layouts) for layouts in LAYOUTS),
      make_case(1024, 1024, 14336),
      make_case(256, 256, 65536),
      make_case(8192, 50257, 768),
  ]


# Beside the models: (m, n, k, layouts), bfloat16 unless a dtype follows.
_DEEP = (
    (256, 256, 65536, "NN"),
    (256, 256, 262144, "TN"),
    (768, 16, 400000, "NN"),
    (768, 768, 65536, "TN"),
    (1024, 1024, 14336, "NN"),
    (128, 128, 131072, "NT"),
    (64, 64, 100000, "TN", "float16"),
    (512, 2048, 32768, "TN"),
)
_SMALL_K = (
    (4096, 4096, 64, "NN"),
    (8192, 8192, 32, "NT"),
    (16384, 1024, 64, "TN"),
)
_ODD = (
    (4097, 4096, 4096, "NN"),
    (4096, 4097, 4096, "NN"),
    (4096, 4096, 4097, "NN"),
    (4095, 4096, 4096, "TN"),
    (512, 4096, 4095, "NT"),
    (1001, 1003, 1005, "NN", "float16"),
    (257, 4097, 1025, "TN"),
    (129, 8191, 2047, "NT"),
    (2047, 2049, 511, "TT"),
    (1, 4097, 4097, "NN"),
    (333, 777, 22223, "TN"),
)
_SMALL = (
    (1, 128, 128, "NN"),
    (8, 256, 512, "NT"),
    (16, 512, 512, "NN"),
    (64, 64, 64, "TN"),
    (128, 128, 128, "NN", "float16"),
    (256, 256, 256, "NT"),
    (512, 512, 512, "TN"),
    (96, 960, 480, "TT"),
    (1000, 1000, 1000, "NN"),
    (1024, 1024, 1024, "NN", "float16"),
)
_EQUAL_BATCHES = (
    (512, 2048, 1024, "NN", "bfloat16", 128),
    (1024, 1024, 1024, "NT", "bfloat16", 16),
    (256, 256, 256, "NN", "float16", 64),
    (2048, 2048, 2048, "TN", "bfloat16", 8),
)


def full_suite() -> list[Case]:
  """Returns what jaxgemm's speed is judged by: models' products and hard shapes.

  The products of seven models, forward and backward (experiments/model_shapes.py),
  go by MODEL.LAYER.tTOKENS.DIRECTION; large k, small k, odd sizes, tiny products and
  batches of equal ones by their sizes.
  """
  cases = [
      make_case(
          shape.m, shape.n, shape.k, shape.layouts, shape.dtype, shape.batch, shape.name
      )
      for shape in model_shapes.shapes()
  ]
  for shapes in (_DEEP, _SMALL_K, _ODD, _SMALL, _EQUAL_BATCHES):
    cases += [make_case(*shape) for shape in shapes]
  return cases


def neighbours_suite() -> list[Case]:
  """Returns the odd problems of the full suite, and an aligned one behind each.

  Its sizes are the nearest multiples of 64: how much longer the odd one takes is what
  odd sizes cost.
  """
  cases = []
  for case in select(full_suite(), classes=["odd"]):
    problem = case.problem
    sizes = {name: _near(getattr(problem, name)) for name in ("m", "n", "k")}
    near = dataclasses.replace(problem, **sizes)
    cases += [case, Case(f"{case.name} aligned", classify(near), near)]
  return cases


def _near(size: int) -> int:
  return size if size == 1 else max(64, round(size / 64) * 64)


def float32_suite() -> list[Case]:
  """Returns 40 products of the full suite at equal distances, in float32.

  They are the judge of products as exact as float32 (--precision=highest).
  """
  full = full_suite()
  picked = (full[i * len(full) // _NUM_FLOAT32] for i in range(_NUM_FLOAT32))
  return [
      dataclasses.replace(
          case, name=f"{case.name.removesuffix(' ' + case.problem.dtype)} float32",
          problem=dataclasses.replace(
              case.problem, dtype="float32", out_dtype="float32",
              algorithm=ALGORITHM_OF_DTYPE["float32"],
          ),
      )
      for case in picked
  ]


def random_suite(
    count: int,
    seed: int,
    largest: int,
    layouts: Sequence[str] = LAYOUTS,
    dtypes: Sequence[str] = tuple(ALGORITHM_OF_DTYPE),
) -> list[Case]:
  """Returns `count` random problems, the same ones for the same arguments.

  Sizes are log-uniform from 16 to `largest`. Every third problem has at least
  one odd size; the sizes of the others are multiples of 8. One in eight is a
  batch of 2 to 8 products. Layouts and dtypes are uniform.

  Args:
    count: number of problems.
    seed: seed of the draw.
    largest: upper bound of m, n and k.
    layouts, dtypes: what to draw from.
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
    layout, dtype = str(rng.choice(layouts)), str(rng.choice(dtypes))
    cases.append(make_case(m, n, k, layout, dtype, batch))
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
    layouts: Sequence[str] | None = None,
    dtypes: Sequence[str] | None = None,
    classes: Sequence[str] | None = None,
) -> list[Case]:
  """Returns the cases with one of the layouts, dtypes and classes; None means any."""
  return [
      case
      for case in cases
      if (not layouts or case.problem.layouts in layouts)
      and (not dtypes or case.problem.dtype in dtypes)
      and (not classes or case.klass in classes)
  ]
