"""What one matrix product is.

A `Problem` holds the static facts of

  out[b] = activation(alpha * lhs[b] @ rhs[b] + bias) + beta * c[b]

for each b of the batch, and nothing that may be tuned: see `configs`. This module is a
leaf: it imports no kernel and touches no device.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp

LhsLayout = Literal["k-major", "m-major"]
RhsLayout = Literal["n-major", "k-major"]

# How the products are formed. The accumulator is float32 but where it is int32.
#   bf16_f32, f16_f32: exact products of 16-bit operands.
#   tf32_f32: float32 operands, of which the tensor core reads 10 mantissa bits.
#   bf16_x3, bf16_x6, bf16_x9: float32 operands in bfloat16 parts: see `parts`.
#   e4m3_f32, e5m2_f32, and two of one each: exact products of 8-bit floating-point
#     operands.
#   i8_i32: exact, sums of int32 included, which wrap.
ALGORITHMS = {
    "bf16_f32": "bfloat16",
    "f16_f32": "float16",
    "tf32_f32": "float32",
    "bf16_x3": "float32",
    "bf16_x6": "float32",
    "bf16_x9": "float32",
    "e4m3_f32": "float8_e4m3fn",
    "e5m2_f32": "float8_e5m2",
    "e4m3_e5m2_f32": "float8_e4m3fn",
    "e5m2_e4m3_f32": "float8_e5m2",
    "i8_i32": "int8",
}
# The dtype of rhs, where that is not the one of lhs.
_RHS_DTYPES = {"e4m3_e5m2_f32": "float8_e5m2", "e5m2_e4m3_f32": "float8_e4m3fn"}
_MIXED = tuple(_RHS_DTYPES)
# At JAX's default precision.
ALGORITHM_OF_DTYPE = {
    "bfloat16": "bf16_f32", "float16": "f16_f32", "float32": "tf32_f32",
}
ALGORITHM_OF_EIGHT_BITS = {
    "int8": "i8_i32", "float8_e4m3fn": "e4m3_f32", "float8_e5m2": "e5m2_f32",
}
# What an epilogue applies to each element: a name of `activations`, or a callable.
Activation = str | Callable[[jax.Array], jax.Array]
NONE = "none"
SCALE_BLOCK = 128  # Of k, rows or columns, that share a factor: see `scales`.
OUT_DTYPES = ("float32", "bfloat16", "float16")  # int8 operands have int32 alone.


@dataclasses.dataclass(frozen=True)
class Epilogue:
  """What happens between the accumulator and the store.

  Attributes:
    alpha: factor of the product.
    beta: factor of `c`.
    c_dtype: dtype of `c`, or None where there is none.
    has_bias: whether there is an operand `bias` [n], added before the activation.
    activation: see `activations`.
    saves: whether what enters the activation is a second result, of the same dtype.
    gated: whether rhs is two matrices and the result activation(lhs @ gate + bias_gate)
      * (lhs @ up + bias_up). There are two biases then, and two arrays to save.
    slopes: with 1 the result is alpha * lhs @ rhs times the activation's slope at c,
      which enters it: the cotangent of the layer before. With 2 there are two c, z0 and
      z1, and two results, of the factors of activation(z0) * z1.
    scaling: what factors the product has, which are operands: "rows", of each row and
      of each column; "blocks", of each row and of each 128 columns, one for every 128
      of k; see `scales`.
  """

  alpha: float = 1.0
  beta: float = 0.0
  c_dtype: str | None = None
  has_bias: bool = False
  activation: Activation = NONE
  saves: bool = False
  gated: bool = False
  slopes: int = 0
  scaling: Literal["none", "rows", "blocks"] = "none"

  @property
  def has_c(self) -> bool:
    return self.c_dtype is not None

  @property
  def is_fused(self) -> bool:
    """Whether it is more than alpha and c."""
    fused = self.has_bias or self.activation != NONE or self.saves or self.gated
    return fused or self.slopes > 0

  @property
  def num_c(self) -> int:
    """Operands c."""
    return max(self.slopes, int(self.has_c))

  @property
  def num_others(self) -> int:
    """Results beside the first."""
    return self.saves * (1 + self.gated) + max(0, self.slopes - 1)

  def __str__(self) -> str:
    """What is fused, for messages and tables of problems."""
    parts = ["bias"] if self.has_bias else []
    if self.activation != NONE:
      name = getattr(self.activation, "__name__", str(self.activation))
      parts.append(f"slope of {name}" if self.slopes else name)
    parts += ["saved"] if self.saves else []
    parts += ["gated"] if self.gated or self.slopes == 2 else []
    parts += ["c"] if self.beta else []
    parts += [f"scales of {self.scaling}"] if self.scaling != "none" else []
    return "".join(f" + {part}" for part in parts)


@dataclasses.dataclass(frozen=True)
class Problem:
  """The static facts of one GEMM.

  Attributes:
    m, n, k: sizes of the product [m, k] @ [k, n].
    batch: number of products.
    lhs_batched, rhs_batched: False where one operand serves every product.
    lhs_layout: "k-major" is stored [m, k], "m-major" is stored [k, m].
    rhs_layout: "n-major" is stored [k, n], "k-major" is stored [n, k].
    dtype: dtype of lhs, by name, and of rhs, if the algorithm does not say otherwise.
    out_dtype: dtype of the result, by name.
    algorithm: a key of ALGORITHMS.
    epilogue: what follows the accumulation.
    lhs_source, rhs_source: dtype of the array that the kernel gets in place of this
      operand, and converts, by name; "": the operand's own.
    grouped: dimension, "m" or "k", whose rows are shared out among `batch` groups, of
      sizes that are data: each has rows of its own, and with "m" an rhs, with "k" a
      product. "": none.
    norm_eps: None; or the kernel divides each row of lhs by the root of its mean square
      and this, and multiplies it by weights of k, which are a further operand.
    terms: products that are added up before anything else happens to them. lhs and rhs
      are as many arrays each, of equal shares of k: k and the shapes below are of those
      side by side.
    gated_operand: which operand of a gated product is two matrices: lhs where the
      operands have changed places (`transposed`).
  """

  m: int
  n: int
  k: int
  batch: int = 1
  lhs_batched: bool = True
  rhs_batched: bool = True
  lhs_layout: LhsLayout = "k-major"
  rhs_layout: RhsLayout = "n-major"
  dtype: str = "bfloat16"
  out_dtype: str = "bfloat16"
  algorithm: str = "bf16_f32"
  epilogue: Epilogue = Epilogue()
  lhs_source: str = ""
  rhs_source: str = ""
  grouped: Literal["", "m", "k"] = ""
  norm_eps: float | None = None
  terms: int = 1
  gated_operand: Literal["rhs", "lhs"] = "rhs"

  @property
  def layouts(self) -> str:
    """The two layouts in BLAS letters: NN, NT, TN or TT."""
    lhs = "N" if self.lhs_layout == "k-major" else "T"
    rhs = "N" if self.rhs_layout == "n-major" else "T"
    return lhs + rhs

  @property
  def unfused(self) -> Problem:
    """The product and its c: no bias, activation or further results; of both rhs as of
    one.
    """
    if not self.epilogue.is_fused:
      return self
    epilogue = dataclasses.replace(
        self.epilogue, has_bias=False, activation=NONE, saves=False, gated=False,
        slopes=0, c_dtype=None if self.epilogue.slopes else self.epilogue.c_dtype,
    )
    return dataclasses.replace(
        self, m=self.product_m, n=self.product_n, epilogue=epilogue, gated_operand="rhs"
    )

  @property
  def alone(self) -> Problem:
    """The same without alpha, beta and c."""
    product = self.unfused
    epilogue = dataclasses.replace(product.epilogue, alpha=1.0, beta=0.0, c_dtype=None)
    return dataclasses.replace(product, epilogue=epilogue)

  @property
  def term(self) -> Problem:
    """The first of the products that are added up, by itself."""
    return dataclasses.replace(self, k=self.k // self.terms, terms=1)

  # A plan asks for these hundreds of times.

  @functools.cached_property
  def _hash(self) -> int:
    return hash(tuple(getattr(self, field.name) for field in dataclasses.fields(self)))

  def __hash__(self) -> int:
    return self._hash

  @functools.cached_property
  def itemsize(self) -> int:
    return jnp.dtype(self.dtype).itemsize

  @functools.cached_property
  def out_itemsize(self) -> int:
    return jnp.dtype(self.out_dtype).itemsize

  @property
  def lhs_shape(self) -> tuple[int, int, int]:
    """Shape of lhs as it is stored, its batch dimension first (1 if shared)."""
    rows, cols = (self.m, self.k) if self.lhs_layout == "k-major" else (self.k, self.m)
    return (self.batch if self.lhs_batched else 1, rows, cols)

  @property
  def rhs_shape(self) -> tuple[int, int, int]:
    """Shape of rhs as it is stored, its batch dimension first (1 if shared)."""
    rows, cols = (self.k, self.n) if self.rhs_layout == "n-major" else (self.n, self.k)
    return (self.batch if self.rhs_batched else 1, rows, cols)

  @property
  def out_shape(self) -> tuple[int, int, int]:
    return (1 if self.grouped == "m" else self.batch, self.m, self.n)

  def matrices_of(self, operand: Literal["lhs", "rhs"]) -> int:
    """Matrices that an operand of each product is: one, or of a gated product two."""
    return 1 + (self.epilogue.gated and self.gated_operand == operand)

  @property
  def product_m(self) -> int:
    """Rows that are multiplied: those of both lhs, if it is two matrices."""
    return self.m * self.matrices_of("lhs")

  @property
  def product_n(self) -> int:
    """Columns that are multiplied: those of both rhs, if it is two matrices."""
    return self.n * self.matrices_of("rhs")

  @property
  def rhs_dtype(self) -> str:
    """Dtype of rhs, by name."""
    return _RHS_DTYPES.get(self.algorithm, self.dtype)

  @property
  def stored_dtypes(self) -> tuple[str, str]:
    """Dtypes of lhs and rhs as they lie in memory, by name."""
    return self.lhs_source or self.dtype, self.rhs_source or self.rhs_dtype

  @functools.cached_property
  def stored_itemsizes(self) -> tuple[int, int]:
    """Bytes of an element of each."""
    lhs, rhs = (jnp.dtype(dtype).itemsize for dtype in self.stored_dtypes)
    return lhs, rhs

  @property
  def converts(self) -> bool:
    """Whether the kernel converts an operand."""
    return bool(self.lhs_source or self.rhs_source)

  @property
  def acc_dtype(self) -> str:
    """Dtype of the sums, by name."""
    return "int32" if self.dtype == "int8" else "float32"

  @functools.cached_property
  def transposed(self) -> Problem:
    """The problem of the transposed result: the operands change places."""
    return dataclasses.replace(
        self, m=self.n, n=self.m,
        lhs_layout="k-major" if self.rhs_layout == "k-major" else "m-major",
        rhs_layout="k-major" if self.lhs_layout == "k-major" else "n-major",
        lhs_batched=self.rhs_batched, rhs_batched=self.lhs_batched,
        dtype=self.rhs_dtype,
        lhs_source=self.rhs_source, rhs_source=self.lhs_source,
        gated_operand="lhs" if self.matrices_of("rhs") > 1 else "rhs",
        algorithm=(
            _MIXED[1 - _MIXED.index(self.algorithm)]
            if self.algorithm in _MIXED else self.algorithm
        ),
    )

  @functools.cached_property
  def canonical(self) -> Problem:
    """The same product of the same arrays, where one row or column leaves a choice.

    A column of the result lies in memory as a row of the transposed result does, and a
    row or column of an operand as its transpose: as a row of k it is read in whole lines,
    by TMA if k allows, where in the other layout its elements lie a stride apart.
    """
    epilogue = self.epilogue
    fixed = self.grouped or self.norm_eps is not None or self.terms > 1
    if epilogue.gated or epilogue.scaling != "none" or fixed:
      return self
    if self.n == 1 < self.m and not epilogue.is_fused:  # A bias is along n.
      return self.transposed.canonical
    return dataclasses.replace(
        self,
        lhs_layout="k-major" if self.m == 1 else self.lhs_layout,
        rhs_layout="k-major" if self.n == 1 else self.rhs_layout,
    )

  @functools.cached_property
  def merged(self) -> Problem | None:
    """One product in place of a batch that shares an operand; None if this is none.

    The batch joins the rows of lhs or the columns of rhs, whose arrays may have to be
    transposed, as may the result. A bias and c would have to be, too.
    """
    epilogue = self.epilogue
    alone = not (epilogue.is_fused or epilogue.has_c or epilogue.scaling != "none")
    if self.batch == 1 or self.lhs_batched == self.rhs_batched or not alone:
      return None
    rows, cols = (self.batch, 1) if self.lhs_batched else (1, self.batch)
    return dataclasses.replace(
        self, batch=1, m=rows * self.m, n=cols * self.n, lhs_batched=True,
        rhs_batched=True,
    )

  @property
  def flops(self) -> int:
    products = 1 if self.grouped else self.batch
    return 2 * products * self.product_m * self.product_n * self.k

  @property
  def num_bytes(self) -> int:
    """Bytes moved if every operand is read once and the result written once."""
    itemsizes = self.stored_itemsizes
    lhs = _size(self.lhs_shape) * itemsizes[0] * self.matrices_of("lhs")
    rhs = _size(self.rhs_shape) * itemsizes[1] * self.matrices_of("rhs")
    out = _size(self.out_shape) * self.out_itemsize
    c = 0
    if self.epilogue.c_dtype is not None:
      c = _size(self.out_shape) * jnp.dtype(self.epilogue.c_dtype).itemsize
    results = out * (1 + self.epilogue.num_others)
    return lhs + rhs + results + c * self.epilogue.num_c

  def __str__(self) -> str:
    batch = f"{self.batch} x " if self.batch > 1 and not self.grouped else ""
    groups = f" in {self.batch} groups of {self.grouped}" if self.grouped else ""
    return (
        f"{batch}{self.m}x{self.n}x{self.k} {self.layouts}{groups}"
        f" {self.dtype}{self._sources()}->{self.out_dtype}{self.epilogue}"
    )

  def _sources(self) -> str:
    sources = {"lhs": self.lhs_source, "rhs": self.rhs_source}
    named = [f"{name} of {source}" for name, source in sources.items() if source]
    named += [] if self.norm_eps is None else ["lhs normalised"]
    named += [f"{self.terms} terms"] if self.terms > 1 else []
    return f" ({', '.join(named)})" if named else ""


def _size(shape: tuple[int, ...]) -> int:
  size = 1
  for dim in shape:
    size *= dim
  return size
