r"""Products as people write them, by JAX and by us.

Columns, vmap, einsum, gradients, weights in 8 bits: neither the suite nor a sweep has
these, which take a canonical problem. Here a call is traced, folded, planned and perhaps
transposed as in a program. Each line of the same text runs with jnp and with jaxgemm on
the same operands in bfloat16; the errors against float64 come first, as for layers
(experiments/two_ways.py), then times in turns. spellings.jsonl has a line for each
expression and pass.

  python -m experiments.spellings
  python -m experiments.spellings --spelling=column --spelling=inner --passes=forward
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import functools
import types
from typing import Any

from absl import app, flags
import jax
import jax.numpy as jnp

from experiments import cli, two_ways
from experiments.two_ways import DIRECTIONS, Case, Values
import jaxgemm
from jaxgemm.autotune.operands import drawn

flags.adopt_module_key_flags(cli)
flags.declare_key_flag(two_ways.PASSES.name)
flags.declare_key_flag(two_ways.ACCELERATE.name)

type Library = types.ModuleType  # jnp or jaxgemm: both have matmul and einsum.
type Shapes = tuple[tuple[int, ...], tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Spelling:
  """One way to write a product.

  Attributes:
    write: write(library, a, b) is the product.
    shapes: those of a and b that are measured on a GPU.
    small: those that a CPU checks.
    passes: which of two_ways.DIRECTIONS are of use.
    rhs_dtype: of b, by name.
  """

  write: Callable[[Library, Any, Any], Any]
  shapes: tuple[Shapes, ...]
  small: Shapes
  passes: tuple[str, ...] = DIRECTIONS
  rhs_dtype: str = "bfloat16"


def _einsum(subscripts: str, *shapes: Shapes, small: Shapes) -> Spelling:
  write = lambda library, a, b: library.einsum(subscripts, a, b)
  return Spelling(write, shapes, small)


def _weights(dtype: str, shapes: tuple[Shapes, ...]) -> Spelling:
  """Weights in 8 bits, converted where they are used."""
  write = lambda library, a, b: library.matmul(a, b.astype(a.dtype))
  return Spelling(write, shapes, ((8, 64), (64, 48)), ("forward",), dtype)


_LLAMA = tuple(
    ((rows, k), (k, n))
    for rows in (1, 8, 64, 256) for k, n in ((4096, 14336), (14336, 4096))
)


SPELLINGS = {
    "int8": _weights("int8", (*_LLAMA, ((16, 4096), (4096, 4096)))),
    "float8": _weights("float8_e4m3fn", _LLAMA[2:6]),
    "int8_transposed": Spelling(
        lambda library, a, b: library.matmul(a, b.T.astype(a.dtype)),
        (((16, 4096), (14336, 4096)), ((64, 14336), (4096, 14336))),
        ((8, 64), (48, 64)), ("forward",), "int8",
    ),
    "column": Spelling(
        lambda library, a, b: library.matmul(a, b),
        (((4096, 4096), (4096,)), ((16384, 7168), (7168, 1)), ((4096, 14336), (14336,)),
         ((4096, 4097), (4097,)), ((1000, 30011), (30011,)),
         ((64, 2048, 1024), (64, 1024, 1))),
        ((40, 24), (24,)), ("forward",),
    ),
    "column_of_transposed": Spelling(
        lambda library, a, b: library.matmul(a.swapaxes(-1, -2), b),
        (((4096, 4096), (4096,)), ((7168, 16384), (7168, 1)), ((4097, 4096), (4097,)),
         ((64, 1024, 2048), (64, 1024, 1))),
        ((24, 40), (24,)), ("forward",),
    ),
    "inner": Spelling(
        lambda library, a, b: library.matmul(a, b),
        (((4_000_000,), (4_000_000,)), ((30_000_001,), (30_000_001,))),
        ((80,), (80,)), ("forward",),
    ),
    "outer": Spelling(
        lambda library, a, b: library.matmul(a[:, None], b[None]),
        (((4096,), (4096,)), ((8191,), (4097,))), ((24,), (40,)), ("forward",),
    ),
    "transposed_rhs": Spelling(
        lambda library, a, b: library.matmul(a, b.T),
        (((512, 4096), (14336, 4096)), ((2048, 768), (50257, 768))),
        ((40, 24), (56, 24)),
    ),
    "transposed_lhs": Spelling(
        lambda library, a, b: library.matmul(a.T, b),
        (((8192, 1024), (8192, 2048)),), ((24, 40), (24, 56)),
    ),
    "vmap_inner": Spelling(
        lambda library, a, b: jax.vmap(library.matmul)(a, b),
        (((4096, 1024), (4096, 1024)),), ((5, 24), (5, 24)), ("forward",),
    ),
    "vmap_vector": Spelling(
        lambda library, a, b: jax.vmap(library.matmul, (None, 0))(a, b),
        (((4096, 2048), (64, 2048)), ((4096, 2048), (512, 2048))),
        ((40, 24), (5, 24)),
    ),
    "vmap_matrix": Spelling(
        lambda library, a, b: jax.vmap(library.matmul, (None, 0))(a, b),
        (((4096, 2048), (64, 2048, 8)), ((512, 512), (256, 512, 24))),
        ((40, 24), (5, 24, 8)),
    ),
    "vmap_rows": Spelling(
        lambda library, a, b: jax.vmap(library.matmul, (0, None))(a, b),
        (((64, 8, 2048), (2048, 4096)), ((32, 197, 1024), (1024, 1024))),
        ((5, 8, 24), (24, 40)),
    ),
    "einsum oi,bi->bo": _einsum(
        "oi,bi->bo", ((4096, 2048), (64, 2048)), small=((40, 24), (5, 24))
    ),
    "einsum btkgd,bskd->bkgts": _einsum(
        "btkgd,bskd->bkgts", ((4, 512, 8, 4, 128), (4, 512, 8, 128)),
        ((1, 2048, 8, 4, 128), (1, 2048, 8, 128)),
        small=((2, 8, 2, 3, 16), (2, 24, 2, 16)),
    ),
    "einsum bkgts,bskd->btkgd": _einsum(
        "bkgts,bskd->btkgd", ((4, 8, 4, 512, 512), (4, 512, 8, 128)),
        small=((2, 2, 3, 8, 24), (2, 24, 2, 16)),
    ),
    "einsum bqhd,bkhd->bhqk": _einsum(
        "bqhd,bkhd->bhqk", ((16, 512, 12, 64), (16, 512, 12, 64)),
        small=((2, 8, 3, 16), (2, 24, 3, 16)),
    ),
    "einsum td,edf->etf": _einsum(
        "td,edf->etf", ((4096, 1024), (8, 1024, 512)), small=((24, 16), (3, 16, 40))
    ),
    "einsum etd,edf->etf": _einsum(
        "etd,edf->etf", ((8, 512, 1024), (8, 1024, 2048)),
        small=((3, 8, 16), (3, 16, 40)),
    ),
    "einsum btd,dhk->bthk": _einsum(
        "btd,dhk->bthk", ((4, 1024, 4096), (4096, 32, 128)),
        small=((2, 8, 24), (24, 3, 16)),
    ),
    "einsum bthk,hkd->btd": _einsum(
        "bthk,hkd->btd", ((4, 1024, 32, 128), (32, 128, 4096)),
        small=((2, 8, 3, 16), (3, 16, 24)),
    ),
}

_SPELLINGS = flags.DEFINE_multi_enum(
    "spelling", list(SPELLINGS), list(SPELLINGS),
    "Which; may be repeated (a subscript has commas).",
)


def draw(spelling: Spelling, shapes: Shapes, seed: int) -> Values:
  """Returns fresh operands a and b, and the cotangent of the result as "ct".

  All are normal, or, those of int8, whole numbers of all sizes.
  """
  dtypes = jnp.bfloat16, jnp.dtype(spelling.rhs_dtype)
  a, b = map(jax.ShapeDtypeStruct, shapes, dtypes)
  out = jax.eval_shape(functools.partial(spelling.write, jnp), a, b)
  keys = jax.random.split(jax.random.key(seed), 3)
  return {
      name: drawn(key, x)
      for name, key, x in zip(("a", "b", "ct"), keys, (a, b, out), strict=True)
  }


def make_case(name: str, shapes: Shapes, direction: str) -> Case:
  """Returns the case of one spelling, of operands of these shapes."""
  spelling = SPELLINGS[name]
  run = lambda library, values: spelling.write(library, values["a"], values["b"])
  sizes = " ".join("x".join(map(str, shape)) for shape in shapes)
  return Case(
      f"{name} {sizes}", direction, functools.partial(draw, spelling, shapes),
      functools.partial(run, jnp), functools.partial(run, jaxgemm),
  )


def main(argv: Sequence[str]) -> None:
  platform = cli.start(argv)
  cases = [
      make_case(name, shapes, direction)
      for name in _SPELLINGS.value
      for spelling in (SPELLINGS[name],)
      for shapes in (spelling.shapes if platform.on_gpu else (spelling.small,))
      for direction in two_ways.PASSES.value if direction in spelling.passes
  ]
  rows = two_ways.run(cases, platform, "spellings")
  print(two_ways.mean_ratios(rows, lambda row: row.direction))


if __name__ == "__main__":
  app.run(main)
