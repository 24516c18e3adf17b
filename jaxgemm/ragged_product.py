"""ragged_p: products in groups of rows, and sums over groups of rows.

  rows   out[i] = lhs[i] @ rhs[group of i], zeros for rows that no group has
  sums   out[g] = lhs[rows of g]^T @ rhs[rows of g]

scaled_ragged_p is the first of these, of 8-bit values, with the factors of scaled_p: of
rows and of each group's columns, or of blocks of k. It has no derivatives.

The rows are sorted by group, and the sizes of the groups are data. Each is linear in both
operands, and the derivatives of one are products of either form: so all are of this
primitive. A fourth operand of the first form is the array in 8 bits that rhs is a
conversion of, for a kernel that converts it itself (see `converted`): no result depends
on it, and no derivative has it. Planned where it is lowered, for one device or for its
shards, as gemm_p is.

Source: jax.lax.ragged_dot_general, whose modes 1 and 2 they are.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
from jax import lax
from jax.interpreters import ad
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxgemm import plan as plans
from jaxgemm import planned
from jaxgemm import precision as precisions
from jaxgemm.checkpoint_policies import name_product
from jaxgemm.contexts import Target, device_of
from jaxgemm.converted import array_of
from jaxgemm.dims import Dims
from jaxgemm.lowering import launched
from jaxgemm.primitive import explicit, result_type
from jaxgemm.product import Product
from jaxgemm.quantisation import dequantise
from jaxgemm.recording import record, record_plan
from jaxgemm.scaled_product import ALGORITHMS, why_not_scales
from jaxgemm.stored import as_stored
from pallas_kernels import compat
from pallas_kernels.configs import Config
from pallas_kernels.problem import ALGORITHM_OF_DTYPE, Epilogue, Problem


@dataclasses.dataclass(frozen=True)
class Ragged:
  """The parameters of ragged_p, whose operands are lhs, rhs, the groups' sizes.

  Attributes:
    sums: which of the two forms.
    scaling: what has factors: "rows" and columns, "blocks" of k, or "none".
    transposed: of rows whether rhs is [groups, n, k], not [groups, k, n].
    out_dtype: dtype of the result, by name.
    precision: what the user asked of XLA, for where XLA computes the product.
    implementation, config: as in jaxgemm.matmul.
    must_serve: whether the named implementation must serve or is only preferred, as for
      a gradient.
    batch_invariant: whether a row's result must not depend on other rows: not of sums.
    target: the device to plan for; None for the device that runs it.
    out_sharding: sharding of the result on an explicit mesh, or None.
    beside_collectives: whether those of other devices may run at the same time.
  """

  sums: bool
  transposed: bool
  out_dtype: str
  precision: Any
  implementation: str | None
  config: Config | None
  must_serve: bool
  batch_invariant: bool
  target: Target | None
  out_sharding: NamedSharding | None = None
  scaling: Literal["none", "rows", "blocks"] = "none"
  beside_collectives: bool = False

  whole = "rg"  # Which rows a group has is data.

  def replace(self, **changes) -> Ragged:
    return dataclasses.replace(self, **changes)

  @property
  def result(self) -> str:
    """The dimensions of the result: r are rows, g groups."""
    return "gmn" if self.sums else "rn"

  def operands(self, count: int) -> tuple[str, ...]:
    """The dimensions of as many operands: q are blocks of k, p those of n."""
    lhs = "rm" if self.sums else "rk"
    rhs = "rn" if self.sums else "gnk" if self.transposed else "gkn"
    others = {"none": (rhs,), "rows": ("r", "gn"), "blocks": ("qr", "gqp")}
    return (lhs, rhs, "g", *others[self.scaling])[:count]


def bind(lhs, rhs, group_sizes, facts: Ragged) -> jax.Array:
  """Binds the primitive, to matrices as they lie: see `stored`.

  The operands need not yet vary over the same mesh axes.
  """
  attached = []
  if not facts.sums:
    if facts.implementation is None and not facts.batch_invariant:
      attached = [x for x in [array_of(rhs)] if x is not None]
    axes = tuple(facts.operands(2)[1])
    (stored,), found = as_stored([rhs], axes)
    if found[0] == "g":
      rhs, facts = stored, facts.replace(transposed=found[1] == "n")
      attached = [lax.transpose(x, tuple(map(axes.index, found))) for x in attached]
  operands = compat.vary_alike(lhs, rhs, _widened(group_sizes), *attached)
  return ragged_p.bind(*operands, facts=facts)


def bind_scaled(lhs, rhs, group_sizes, rows, cols, facts: Ragged) -> jax.Array:
  """Binds the primitive of scaled values, to matrices as they lie.

  Args:
    rows, cols: the factors, [m] and [groups, n], or of blocks of k [blocks, m] and
      [groups, blocks, .], with one for every 128 of n.
  """
  axes = tuple(facts.operands(2)[1])
  (stored,), found = as_stored([rhs], axes)
  if found[0] == "g":
    rhs, facts = stored, facts.replace(transposed=found[1] == "n")
  operands = compat.vary_alike(lhs, rhs, _widened(group_sizes), rows, cols)
  return scaled_ragged_p.bind(*operands, facts=facts)


def _widened(group_sizes: jax.Array) -> jax.Array:
  """The sizes in at least 32 bits: XLA's products add them up in their own dtype."""
  if group_sizes.dtype.itemsize < 4:
    return group_sizes.astype(jnp.int32)
  return group_sizes


def plan_of(lhs, rhs, group_sizes, *others, facts: Ragged) -> plans.Plan:
  """The plan of operands (arrays, or types alone) that lie whole on one device.

  Raises:
    ValueError: the named kernel, or one that is batch invariant, cannot serve.
  """
  of_lhs, of_rhs = facts.operands(2)
  sizes = dict(zip(of_lhs, lhs.shape, strict=True)) | dict(
      zip(of_rhs, rhs.shape, strict=True)
  )
  algorithm, reason = algorithm_of(lhs, rhs, *others, n=sizes["n"], facts=facts)
  m, k = (sizes["m"], sizes["r"]) if facts.sums else (sizes["r"], sizes["k"])
  problem = Problem(
      m, sizes["n"], k, group_sizes.shape[0], lhs_batched=False,
      rhs_batched=not facts.sums, lhs_layout="m-major" if facts.sums else "k-major",
      rhs_layout="k-major" if facts.transposed else "n-major", dtype=lhs.dtype.name,
      out_dtype=facts.out_dtype, grouped="k" if facts.sums else "m",
      algorithm=algorithm or ALGORITHM_OF_DTYPE.get(lhs.dtype.name, "bf16_f32"),
      epilogue=Epilogue(scaling=facts.scaling),
  )
  if reason:
    named = facts.must_serve and facts.implementation not in (None, "xla")
    if named or facts.batch_invariant:
      what = f"implementation {facts.implementation!r}" if named else "batch_invariant"
      raise ValueError(f"{what}: no kernel serves {problem}: {reason}")
    return plans.Plan("xla", None, "fallback", reason, problem)
  if others and facts.scaling == "none":
    sources = "", others[0].dtype.name
    found = plans.converting(problem, sources, device_of(facts.target), attached="rhs")
    if found is not None:
      return found
  make_plan = functools.partial(
      plans.make_plan, problem, device_of(facts.target),
      batch_invariant=facts.batch_invariant,
  )
  try:
    return make_plan(implementation=facts.implementation, config=facts.config)
  except ValueError:
    if facts.must_serve:
      raise
    return make_plan()


def algorithm_of(lhs, rhs, *others, n: int, facts: Ragged) -> tuple[str | None, str]:
  """How it is multiplied, and why no kernel can of these dtypes and scales, or ""."""
  if facts.scaling == "none":
    algorithm, reason = precisions.choose_algorithm(
        lhs.dtype.name, rhs.dtype.name, facts.out_dtype, facts.precision
    )
    if algorithm in ALGORITHMS.values() and facts.out_dtype == "float32":
      reason = "XLA's sums of float8 in groups are float32, the tensor cores' of 14 bits"
    return algorithm, reason
  reason = why_not_scales(facts.scaling, others[1].shape[2:], n)
  return ALGORITHMS[lhs.dtype.name, rhs.dtype.name], reason


def _on_one_device(*operands, facts: Ragged) -> jax.Array:
  """By the planned kernel, or XLA."""
  plan = plan_of(*operands, facts=facts)
  record_plan(plan)
  if facts.implementation is None and not plan.problem.converts:
    record(plan.problem, device_of(facts.target))
  if plan.kernel == "xla":
    return _by_xla(*operands, facts=facts)
  lhs, rhs, group_sizes, *others = operands
  scales = ()
  if plan.problem.converts:
    (rhs,) = others
  elif facts.scaling != "none":
    scales = others[0][None], others[1]
  arrays = lhs[None], rhs[None] if facts.sums else rhs, *scales, group_sizes
  found = launched(plan, arrays, facts)
  return found if facts.sums else found[0]


def _by_xla(lhs, rhs, group_sizes, *others, facts: Ragged) -> jax.Array:
  if facts.scaling != "none":
    return _scaled_by_xla(lhs, rhs, group_sizes, *others, facts=facts)
  numbers = {
      (False, False): (((1,), (1,)), (0,), (0,)),
      (False, True): (((1,), (2,)), (0,), (0,)),
      (True, False): (((0,), (0,)), (0,), ()),
  }
  contracted, ragged, group = numbers[facts.sums, facts.transposed]
  return lax.ragged_dot_general(
      lhs, rhs, group_sizes,
      lax.RaggedDotDimensionNumbers((contracted, ((), ())), ragged, group),
      precision=facts.precision,
      preferred_element_type=jnp.dtype(facts.out_dtype),
  )


def _scaled_by_xla(lhs, rhs, group_sizes, rows, cols, *, facts: Ragged) -> jax.Array:
  plain = facts.replace(scaling="none", out_dtype="float32")
  if facts.scaling == "rows":
    out = _by_xla(lhs, rhs, group_sizes, facts=plain)
    if not cols.shape[0]:  # No groups: zeros.
      return out.astype(facts.out_dtype)
    total = jnp.clip(group_sizes, 0, lhs.shape[0]).sum()
    cols = jnp.repeat(cols, group_sizes, 0, total_repeat_length=lhs.shape[0])
    # Rows that no group has are zeros, whatever their factors.
    used = (jnp.arange(lhs.shape[0]) < total)[:, None]
    out = jnp.where(used, out * rows[:, None] * cols, 0.0)
  else:
    cols = cols.swapaxes(1, 2) if facts.transposed else cols
    out = _by_xla(
        dequantise(lhs, rows.T), dequantise(rhs, cols), group_sizes,
        facts=plain.replace(precision=lax.Precision.HIGHEST),
    )
  return out.astype(facts.out_dtype)


# -- Rules and registrations -------------------------------------------------------


def _abstract_eval(lhs, rhs, group_sizes, *others, facts: Ragged):
  """The type of the product of one group, of all rows; of sums one for each group."""
  if facts.scaling == "none" and any(x.shape != rhs.shape for x in others):
    raise TypeError(f"rhs, {rhs}, is not {others[0]} converted")
  wanted = facts.out_sharding
  of_groups = None  # How the dimension of the groups lies over the mesh.
  if facts.sums and wanted is not None:
    of_groups, *spec = tuple(wanted.spec) or (None,)
    wanted = NamedSharding(wanted.mesh, PartitionSpec(*spec))
  one = Product(Dims(), facts.out_dtype, "xla", out_sharding=wanted)
  if facts.sums:
    aval = result_type(lhs, rhs, one.replace(dims=Dims(lhs="bkm", rhs="bkn")))
    shape = group_sizes.shape[0], *aval.shape
    return _with_dims(aval, shape, (of_groups, *_spec(aval)))
  of_one = _with_dims(rhs, rhs.shape[1:], _spec(rhs)[1:])
  if facts.transposed:
    one = one.replace(dims=Dims(rhs="bnk"))
  return result_type(lhs, of_one, one)


def _spec(aval):
  return tuple(aval.sharding.spec)


def _with_dims(aval, shape, spec):
  if not aval.sharding.mesh.empty:
    mesh = aval.sharding.mesh
    return aval.update(
        shape=shape, sharding=NamedSharding(mesh, PartitionSpec(*spec))
    )
  return aval.update(
      shape=shape, sharding=aval.sharding.update(spec=PartitionSpec(*[None] * len(shape)))
  )


def _jvp(primals, tangents, *, facts: Ragged):
  lhs, rhs, group_sizes, *_ = primals
  terms = []
  for index, tangent in enumerate(tangents[:2]):
    if type(tangent) is not ad.Zero:
      operands = [lhs, rhs]
      operands[index] = tangent
      terms.append(ragged_p.bind(*operands, group_sizes, facts=facts))
  out = name_product(ragged_p.bind(*primals, facts=facts), has_batch=facts.sums)
  if not terms:
    return out, ad.Zero.from_primal_value(out)
  return out, functools.reduce(ad.add_jaxvals, terms)


def _transpose(ct, lhs, rhs, group_sizes, *attached, facts: Ragged):
  """The cotangent of the operand that is undefined: a product of the other and `ct`."""
  index = 0 if ad.is_undefined_primal(lhs) else 1
  aval = (lhs, rhs)[index].aval
  grads = [None, None, None, *(_no_gradient(x) for x in attached)]
  if type(ct) is ad.Zero:
    grads[index] = ad.Zero(aval.to_ct_aval())
    return grads
  if facts.sums:
    rows = functools.partial(_gradient, group_sizes, aval, facts)
    grads[index] = rows(rhs, ct, transposed=True) if index == 0 else rows(lhs, ct)
  else:
    other = (rhs, lhs)[index]
    grads[index] = _of_operand(index, ct, other, group_sizes, aval, facts)
  return grads


def gradients(
    ct, lhs, rhs, group_sizes, facts: Ragged
) -> tuple[jax.Array, jax.Array]:
  """Those of lhs and rhs of their product of rows, whose cotangent is `ct`."""
  avals = jax.typeof(lhs), jax.typeof(rhs)
  ct, lhs, rhs, sizes = compat.vary_alike(ct, lhs, rhs, _widened(group_sizes))
  return (
      _of_operand(0, ct, rhs, sizes, avals[0], facts),
      _of_operand(1, ct, lhs, sizes, avals[1], facts),
  )


def _of_operand(index: int, ct, other, group_sizes, aval, facts: Ragged) -> jax.Array:
  """The cotangent of one operand of a product of rows, of type `aval`."""
  if index == 0:
    transposed = not facts.transposed
    return _gradient(group_sizes, aval, facts, ct, other, transposed=transposed)
  operands = (ct, other) if facts.transposed else (other, ct)
  return _gradient(group_sizes, aval, facts, *operands, sums=True)


def _no_gradient(x) -> ad.Zero | None:
  """Of an operand on which no result depends."""
  return ad.Zero(x.aval.to_ct_aval()) if ad.is_undefined_primal(x) else None


def _gradient(
    group_sizes, aval, facts: Ragged, lhs, rhs, *, transposed: bool = False,
    sums: bool = False,
) -> jax.Array:
  """The product of two arrays whose dtypes may differ, of the dtype of `aval`."""
  if min(lhs.dtype.itemsize, rhs.dtype.itemsize) == 1:  # Which JAX does not promote.
    dtype = max(lhs.dtype, rhs.dtype, key=lambda dtype: dtype.itemsize)
  else:
    dtype = jnp.promote_types(lhs.dtype, rhs.dtype)
  lhs, rhs = (lax.convert_element_type(x, dtype) for x in (lhs, rhs))
  found = facts.replace(
      sums=sums, transposed=transposed, out_dtype=aval.dtype.name, config=None,
      must_serve=False,
      implementation="xla" if facts.implementation == "xla" else None,
      batch_invariant=facts.batch_invariant and not sums,
      out_sharding=explicit(aval.sharding),
  )
  return ragged_p.bind(lhs, rhs, group_sizes, facts=found)


def _batch(operands, axes, *, facts: Ragged):
  """One product after the other: each has groups of its own, where they begin."""
  for x, axis in zip(operands, axes, strict=True):
    if axis is not None and (over := _spec(jax.typeof(x))[axis]) is not None:
      raise ValueError(
          f"products in groups of rows run one after the other under jax.vmap, so what"
          f" it maps, {jax.typeof(x)}, cannot lie over mesh axes {over!r}: map over the"
          " devices with jax.shard_map"
      )
  mapped = [
      jnp.moveaxis(x, axis, 0)
      for x, axis in zip(operands, axes, strict=True) if axis is not None
  ]

  def one(mapped):
    found = iter(mapped)
    each = [
        x if axis is None else next(found) for x, axis in zip(operands, axes, strict=True)
    ]
    primitive = ragged_p if facts.scaling == "none" else scaled_ragged_p
    return primitive.bind(*each, facts=facts)

  return lax.map(one, mapped), 0


_define = functools.partial(
    planned.define, by_xla=_by_xla, on_one_device=_on_one_device,
    abstract_eval=_abstract_eval, batch=_batch,
)
ragged_p = _define("jaxgemm_ragged")
scaled_ragged_p = _define("jaxgemm_scaled_ragged")
# Without it: "Differentiation rule for 'jaxgemm_ragged' not implemented".
ad.primitive_jvps[ragged_p] = _jvp
# Without it: "Transpose rule (for reverse-mode differentiation) for 'jaxgemm_ragged' not
# implemented".
ad.primitive_transposes[ragged_p] = _transpose
