"""ragged_dot: rows in groups, each with a matrix of its own, as experts have tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxgemm.arguments import as_array, common_dtype
from jaxgemm.contexts import current_target, is_batch_invariant
from jaxgemm.contraction import named_kernel, out_dtype_of
from jaxgemm.dims import are_known
from jaxgemm.ragged_product import Ragged, bind, plan_of
from pallas_kernels import compat
from pallas_kernels.configs import Config

_KERNEL = "grouped_m"


def ragged_dot(
    lhs, rhs, group_sizes, *, transposed: bool = False, precision=None,
    preferred_element_type=None, out_sharding=None, implementation: str | None = None,
    config: Config | None = None,
) -> jax.Array:
  """Returns each row of lhs times the matrix of its group, as jax.lax.ragged_dot does.

  A group's rows lie side by side, in the order of the groups. Rows behind those of the
  last group become zeros, and groups beyond the last row are cut off. XLA multiplies all
  rows by the matrices of all groups, and adds zeros up; the kernel multiplies each row by
  its own, reads the matrices of groups that have rows, and no others. Sizes are data:
  nothing is compiled anew for others.

  Gradients are products of the same kind, at any order, in both modes: of lhs with the
  matrices as they are stored, of rhs sums over the rows of each group. Under jax.vmap
  there is one product after the other, each on all devices of a mesh.

  Args:
    lhs: [m, k], sorted by group; bfloat16 or float16; float8 with results in bfloat16 or
      float16, or int8 with results in int32, as preferred_element_type says. Others are
      left to XLA, as jaxgemm.explain says of a function.
    rhs: [groups, k, n], of the same dtype, or else both are promoted, as the dtypes say
      (jnp.promote_types). One that has just been converted from 8 bits, as by
      `w.astype(x.dtype)`, the kernel may read as it was, and convert where it is used;
      the plan says so.
    group_sizes: [groups], integers: the rows of each.
    transposed: whether rhs is [groups, n, k]. One that the caller transposes, as in
      `w.swapaxes(1, 2)`, is read as it lies, too. In 8 bits the tensor cores read
      [groups, n, k]; a pass transposes the other.
    precision, preferred_element_type: as for jax.lax.ragged_dot. Sums are float32.
    out_sharding: sharding of the result on a mesh with explicit axes.
    implementation: None (the plan chooses), "grouped_m" or "xla". A kernel that is named
      must serve.
    config: a pallas_kernels.configs.PersistentConfig for grouped_m.
  Returns: [m, n].
  Raises:
    TypeError: a shape or a dtype is none of these; the message names the argument.
    ValueError: the dtypes promote to none, the named kernel cannot serve, or none that is
      batch invariant.
  Example:
    order = jnp.argsort(expert)           # [tokens], one each.
    sizes = jnp.bincount(expert, length=len(w))
    y = jaxgemm.ragged_dot(x[order], w, sizes)
  Source: "MegaBlocks: efficient sparse training with mixture-of-experts" (2022).
  """
  lhs, rhs, group_sizes = (
      as_array("ragged_dot", name, x)
      for name, x in (("lhs", lhs), ("rhs", rhs), ("group_sizes", group_sizes))
  )
  check_shapes("ragged_dot", lhs, rhs, group_sizes, transposed)
  if lhs.dtype != rhs.dtype:
    dtype = common_dtype("ragged_dot", lhs=lhs.dtype, rhs=rhs.dtype)
    lhs, rhs = lhs.astype(dtype), rhs.astype(dtype)
  implementation = kernel_of_groups("ragged_dot", implementation, config)
  facts = Ragged(
      sums=False, transposed=transposed,
      out_dtype=out_dtype_of(lhs.dtype, preferred_element_type).name,
      precision=compat.canonicalize_precision(precision),
      implementation=implementation, config=config, must_serve=True,
      batch_invariant=is_batch_invariant(), target=current_target(),
      out_sharding=compat.canonicalize_out_sharding(out_sharding, "ragged_dot"),
  )
  if implementation == _KERNEL or facts.batch_invariant:
    if are_known((*lhs.shape, *rhs.shape)):
      # Raises here, where the user's call is.
      plan_of(lhs, rhs, group_sizes, facts=facts)
  return bind(lhs, rhs, group_sizes, facts)


def kernel_of_groups(
    function: str, implementation: str | None, config: Config | None
) -> str | None:
  """The implementation that is named, or has the config; raises ValueError if unfit."""
  if config is not None:
    implementation = implementation or _KERNEL
  implementation = named_kernel(implementation, config)
  if implementation not in (None, _KERNEL, "xla"):
    raise ValueError(
        f"implementation {implementation!r} cannot serve: {function} takes None,"
        f" {_KERNEL!r} or 'xla'"
    )
  return implementation


def check_shapes(function: str, lhs, rhs, group_sizes, transposed: bool) -> None:
  """Raises TypeError unless the shapes are those of groups of rows."""
  for name, x, ndim, wanted in (
      ("lhs", lhs, 2, "[m, k]"),
      ("rhs", rhs, 3, "[groups, n, k]" if transposed else "[groups, k, n]"),
      ("group_sizes", group_sizes, 1, "[groups]"),
  ):
    if x.ndim != ndim:
      raise TypeError(f"{function}: {name} has shape {x.shape}; it must be {wanted}")
  if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
    raise TypeError(
        f"{function}: group_sizes is of dtype {group_sizes.dtype}; it must be of integers"
    )
  k_axis = 2 if transposed else 1
  if lhs.shape[1] != rhs.shape[k_axis]:
    raise TypeError(
        f"{function}: lhs has shape {lhs.shape} and rhs {rhs.shape}; k, the last"
        f" dimension of lhs and dimension {k_axis} of rhs, must be the same"
    )
  if group_sizes.shape[0] != rhs.shape[0]:
    raise TypeError(
        f"{function}: group_sizes has shape {group_sizes.shape} and rhs {rhs.shape};"
        " rhs must have a matrix for each group"
    )
