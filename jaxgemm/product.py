"""What the primitive carries beside its operands: the static facts of a product."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import math
from typing import Any, NamedTuple

from jaxgemm import precision as precisions
from jaxgemm.contexts import Target
from jaxgemm.dims import Dims, Shape
from pallas_kernels.configs import Config
from pallas_kernels.problem import NONE, Activation, Epilogue, Problem


class Operands[T](NamedTuple):
  """The operands of a product.

  Attributes:
    lhs: lhs.
    rhs: one, or of a gated product two, or both in one.
    c: c, or None.
    biases: one for each rhs, or none.
    entering: what slopes depend on: one or two arrays, or none.
  """

  lhs: T
  rhs: tuple[T, ...]
  c: T | None
  biases: tuple[T, ...]
  entering: tuple[T, ...] = ()


@dataclasses.dataclass(frozen=True)
class Product:
  """The parameters of gemm_p and of linear_p:

    activation(alpha * lhs @ rhs + bias) + beta * c

  or, gated, activation(alpha * lhs @ gate + bias) * (alpha * lhs @ up + other_bias)
  + beta * c. The operands are lhs, rhs (gate, up), c and the biases, in this order, as
  far as there are any. Or

    alpha * lhs @ rhs * slope

  of each argument of activation(z), or of activation(z0) * z1: the operands are lhs, rhs
  and each z, and there are as many results. The last of all, if it is `attached`, is the
  array that lhs or rhs is a conversion of, for a kernel that converts it itself: nothing
  but time depends on it.

  Attributes:
    dims: how the dimensions of the operands pair up.
    out_dtype: dtype of the result, by name.
    algorithm: a key of pallas_kernels.problem.ALGORITHMS.
    precision: what the user asked of XLA, for where XLA computes the product.
    alpha, beta: factors of the product and of the operand c, which is absent where
      beta is 0.
    has_bias: whether there is a bias (of a gated product two), of the dimensions n.
    activation: see `pallas_kernels.activations`.
    saves: whether what enters the activation is a second result.
    gated: whether rhs is two operands.
    packed: whether these are one array, the gate's columns before the other's.
    slopes: how many results are the product times a slope of the activation; 0: none.
    recomputes: whether what enters the activation is computed again for derivatives,
      rather than saved.
    implementation, config: as in jaxgemm.matmul.
    must_serve: whether the named implementation must serve or is only preferred, as
      for a gradient, whose problem the user did not choose it for.
    batch_invariant: whether a row's result must not depend on other rows.
    converted: dtypes of the arguments that lhs and rhs are, converted just before, by
      name; "" for what is none.
    attached: "lhs" or "rhs" if the array that it is a conversion of is an operand; "".
    beside_collectives: whether those of other devices may run at the same time.
    target: the device to plan for; None for the device that runs it.
    out_sharding: sharding of the result on an explicit mesh, or None.
  """

  dims: Dims
  out_dtype: str
  algorithm: str
  precision: Any = None
  alpha: float = 1.0
  beta: float = 0.0
  has_bias: bool = False
  activation: Activation = NONE
  saves: bool = False
  gated: bool = False
  packed: bool = False
  slopes: int = 0
  recomputes: bool = False
  implementation: str | None = None
  config: Config | None = None
  must_serve: bool = True
  batch_invariant: bool = False
  converted: tuple[str, str] = ("", "")
  attached: str = ""
  beside_collectives: bool = False
  target: Target | None = None
  out_sharding: Any = None

  def __repr__(self) -> str:
    """What a jaxpr shows: the dimensions, and what is not the default."""
    dims = self.dims
    lhs, rhs, out = (" ".join(dims.names(g)) for g in (dims.lhs, dims.rhs, dims.out))
    parts = [f"{lhs}, {rhs} -> {out}", self.algorithm, self.out_dtype]
    for field in dataclasses.fields(self)[3:]:
      value = getattr(self, field.name)
      if value != field.default:
        parts.append(f"{field.name}={value}")
    return "; ".join(parts)

  def replace(self, **changes) -> Product:
    return dataclasses.replace(self, **changes)

  @property
  def is_fused(self) -> bool:
    """Whether it is linear_p's, not gemm_p's."""
    fused = self.has_bias or self.activation != NONE or self.saves or self.gated
    return fused or self.slopes > 0

  @property
  def num_results(self) -> int:
    return max(1 + self.saves * (1 + self.gated), self.slopes)

  @property
  def plans_form(self) -> bool:
    """Whether another form of the problem may be planned: see `forms`.

    A config that is given is of the dimensions as they are, and the bits of a row must
    not depend on whether it is the only one.
    """
    return self.config is None and not self.batch_invariant

  @property
  def may_exchange(self) -> bool:
    """Whether lhs and rhs may change places.

    A bias, and both rhs of a gated product, lie along columns; and the rows whose bits
    are to be the same are those of lhs.
    """
    return not self.is_fused and not self.batch_invariant

  @property
  def exchanged(self) -> Product:
    """The same for operands that have changed places; its dims are still to be set."""
    return self.replace(
        precision=precisions.exchanged(self.precision), converted=self.converted[::-1],
        attached={"": "", "lhs": "rhs", "rhs": "lhs"}[self.attached],
    )

  @property
  def detached(self) -> Product:
    """The same without the operand that lhs or rhs is a conversion of."""
    return self.replace(attached="")

  @property
  def linear(self) -> Product:
    """alpha * lhs @ rhs alone."""
    return self.replace(
        beta=0.0, has_bias=False, activation=NONE, saves=False, gated=False,
        packed=False, slopes=0, recomputes=False, converted=("", ""), attached="",
    )

  @property
  def num_rhs(self) -> int:
    """Operands that rhs is."""
    return 1 + (self.gated and not self.packed)

  def factor_shape(self, rhs_shape: Shape) -> Shape:
    """The shape of one rhs: of a packed one half of the first dimension n."""
    if not self.packed:
      return rhs_shape
    axis = self.dims.names(self.dims.rhs).index(self.dims.names("n")[0])
    return (*rhs_shape[:axis], rhs_shape[axis] // 2, *rhs_shape[axis + 1 :])

  def named[T](self, operands: Sequence[T]) -> Operands[T]:
    """The operands, or what belongs to each of them, by what they are.

    But for the array that lhs or rhs is a conversion of.
    """
    lhs, *rest = operands[:-1] if self.attached else operands
    if self.slopes:
      return Operands(lhs, (rest[0],), None, (), tuple(rest[1:]))
    count = self.num_rhs
    num_biases = (1 + self.gated) * self.has_bias
    rhs, rest = tuple(rest[:count]), rest[count:]
    biases = tuple(rest[len(rest) - num_biases :])
    return Operands(lhs, rhs, rest[0] if len(rest) > num_biases else None, biases)

  def unpacked(self, operands, halves) -> tuple[Product, tuple[Any, ...]]:
    """The product of two rhs apart, and its operands.

    `halves(rhs, axis)` are the two of a packed rhs.
    """
    if not self.packed:
      return self, tuple(operands)
    lhs, rhs, *others = operands
    axis = self.dims.names(self.dims.rhs).index(self.dims.names("n")[0])
    return self.replace(packed=False), (lhs, *halves(rhs, axis), *others)

  def problem(
      self, lhs_shape: Shape, rhs_shape: Shape, dtype: str, c_dtype: str | None = None
  ) -> Problem:
    """The problem that these operands are once every group is folded."""
    dims = self.dims
    sizes = dims.folded_sizes(lhs_shape, self.factor_shape(rhs_shape))
    return Problem(
        m=sizes["m"],
        n=sizes["n"],
        k=sizes["k"],
        batch=sizes["b"],
        lhs_batched="b" in dims.lhs,
        rhs_batched="b" in dims.rhs,
        lhs_layout="k-major" if dims.lhs.endswith("k") else "m-major",
        rhs_layout="k-major" if dims.rhs.endswith("k") else "n-major",
        dtype=dtype,
        out_dtype=self.out_dtype,
        algorithm=self.algorithm,
        epilogue=Epilogue(
            self.alpha, self.beta, c_dtype, self.has_bias, self.activation, self.saves,
            self.gated, self.slopes,
        ),
    )

  def folded_shape(self, groups: str, shape: Shape) -> Shape:
    """`shape` with each group folded; a missing batch becomes 1."""
    parts = self.dims.split(groups, shape)
    return tuple(
        math.prod(parts.get(group, ())) for group in "b" + groups.removeprefix("b")
    )


@dataclasses.dataclass(frozen=True)
class Gradients:
  """The parameters of gradients_p: of lhs and of each rhs of `count` products

    alpha * lhs @ rhs_i

  The operands are lhs, each rhs, and the cotangent of each product. All have one dtype,
  as have the results, and no dimension is of the batch.

  Attributes:
    product: alpha * lhs @ rhs, for each rhs.
    count: rhs.
  """

  product: Product
  count: int

  def replace(self, **changes) -> Gradients:
    return dataclasses.replace(self, **changes)
