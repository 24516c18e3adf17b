"""The functions that users call: they canonicalise, check, and bind the primitive.

Each gives a right answer for whatever its namesake in jax.numpy or jax.lax takes.
What no kernel serves (a dtype, a precision, a device) goes to XLA, unless the caller
names the kernel that must serve it.
"""

from __future__ import annotations

import functools
import operator

import jax
from jax import lax
import jax.numpy as jnp

from jaxgemm import explaining
from jaxgemm import plan as plans
from jaxgemm.arguments import (
  as_array,
  as_factor,
  check_broadcasts,
  check_numbers,
  check_real,
  common_dtype,
  times,
)
from jaxgemm.contexts import device_of
from jaxgemm.contraction import contract, named_kernel, out_dtype_of, product_of
from jaxgemm.dims import (
  Axes,
  DimensionNumbers,
  Shape,
  are_known,
  fold,
  label_axes,
  label_sizes,
)
from jaxgemm.lowering import planned
from pallas_kernels.configs import Config
from pallas_kernels.problem import OUT_DTYPES


def matmul(
    a, b, *, precision=None, preferred_element_type=None, out_sharding=None,
    implementation: str | None = None, config: Config | None = None,
    batch_invariant: bool = False,
) -> jax.Array:
  """Returns the matrix product of two arrays, with jnp.matmul's semantics.

  Args:
    a: [*batch, m, k], or [k].
    b: [*batch, k, n], or [k]. The batches broadcast; mixed dtypes promote. Where few rows
      meet weights of int8 or float8 that are promoted, or that the caller has converted
      just before, a kernel reads them as they are.
    precision: as for jnp.matmul; `jaxgemm.precision` says what each one computes.
    preferred_element_type: dtype of the result. Sums of floating-point operands of up to
      32 bits are float32 in any case.
    out_sharding: sharding of the result on a mesh with explicit axes.
    implementation: None (the plan chooses), "blocked", "direct", "pipelined",
      "persistent", "split_k", "gemv", "triton" or "xla". A kernel that is named must
      serve; its gradients prefer it.
    config: the config of that kernel, of a class in pallas_kernels.configs; alone, it
      also names its kernel.
    batch_invariant: whether a row of the result must have the same bits whatever m is;
      see jaxgemm.batch_invariant, which sets it for all products.
  Returns: [*batch, m, n], without m where a is [k], without n where b is [k].
  Raises:
    TypeError: k differs between the operands; the message names both shapes.
    ValueError: an operand is a scalar, the batches do not broadcast, or the named
      kernel cannot serve, or none that is batch invariant; the message names the
      operand, dimension and constraint.
  Example: jaxgemm.matmul(jnp.ones((8, 64)), jnp.ones((64, 16))).shape == (8, 16)
  """
  a, b = as_array("matmul", "a", a), as_array("matmul", "b", b)
  axes, a_squeeze, b_squeeze = _matmul_axes("matmul", a.shape, b.shape)
  implementation = named_kernel(implementation, config)
  lhs, rhs = _promoted("matmul", a, b, preferred_element_type)
  product, reason = product_of(
      lhs.dtype, rhs.dtype, precision, preferred_element_type, implementation, config,
      batch_invariant=batch_invariant,
  )
  weak = implementation is None and _gives_weak(a, b)
  # jnp.matmul alone keeps a weak type weak.
  if reason or (weak and not product.batch_invariant):
    return jnp.matmul(
        a, b, precision=precision, preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
    )
  lhs, rhs = _squeezed(lhs, a_squeeze), _squeezed(rhs, b_squeeze)
  return contract("matmul", lhs, rhs, axes, product, out_sharding)


def dot_general(
    lhs, rhs, dimension_numbers: DimensionNumbers, precision=None,
    preferred_element_type=None, *, out_sharding=None,
    implementation: str | None = None, config: Config | None = None,
) -> jax.Array:
  """Returns a contraction of two arrays, with lax.dot_general's semantics.

  Flax, Haliax and jnp.einsum take it as their `dot_general`. Dimensions that do not
  lie in groups (batch, then rows and summed ones in either order) are transposed
  first, as few elements as possible.

  Args:
    lhs, rhs: operands of one dtype; mixed ones go to XLA.
    dimension_numbers: ((lhs contracting, rhs contracting), (lhs batch, rhs batch)).
    precision, preferred_element_type, out_sharding, implementation, config: as for
      jaxgemm.matmul.
  Returns: [*batch, *free dimensions of lhs, *free dimensions of rhs].
  Raises:
    TypeError: the dimension numbers do not fit; the message names both shapes.
    ValueError: the named kernel cannot serve.
  Example: jnp.einsum("bqd,bkd->bqk", q, k, _dot_general=jaxgemm.dot_general)
  """
  lhs, rhs = as_array("dot_general", "lhs", lhs), as_array("dot_general", "rhs", rhs)
  numbers = _checked_numbers(lhs.shape, rhs.shape, dimension_numbers)
  implementation = named_kernel(implementation, config)
  axes = label_axes(lhs.ndim, rhs.ndim, numbers)
  product, reason = product_of(
      lhs.dtype, rhs.dtype, precision, preferred_element_type, implementation, config
  )
  if reason:
    return lax.dot_general(
        lhs, rhs, numbers, precision, preferred_element_type, out_sharding=out_sharding
    )
  return contract("dot_general", lhs, rhs, axes, product, out_sharding)


def gemm(
    a, b, c=None, *, alpha=1, beta=0, precision=None, preferred_element_type=None,
    implementation: str | None = None, config: Config | None = None,
) -> jax.Array:
  """Returns alpha * a @ b + beta * c, scaled and added before the one rounding.

  As in BLAS, c is not read where beta is the number 0, which is its default even where
  c is given.
  Python numbers alpha and beta are part of the kernel; arrays, which may be traced and
  differentiated, multiply its float32 result, and c even where they are 0.

  Args:
    a: [*batch, m, k].
    b: [*batch, k, n]; the batches broadcast.
    c: None, or an array that broadcasts to [*batch, m, n].
    alpha, beta: factors of the product and of c: numbers, or arrays that broadcast to
      the result.
    precision, preferred_element_type, implementation, config: as for jaxgemm.matmul.
  Returns: [*batch, m, n] in preferred_element_type, or else the dtype of a @ b.
  Raises:
    TypeError: k differs between the operands, which the message names with their
      shapes; or alpha, beta or c is no array of numbers, or complex where the result is
      not.
    ValueError: an operand is not a matrix, the batches, alpha, beta or c do not
      broadcast, beta has no c, or the named kernel cannot serve.
  Example: y = jaxgemm.gemm(x, w, y, beta=1)  # accumulates into y
  """
  a, b = as_array("gemm", "a", a), as_array("gemm", "b", b)
  if a.ndim < 2 or b.ndim < 2:
    raise ValueError(
        f"gemm: a has shape {a.shape} and b {b.shape}; both must be matrices or"
        " batches of matrices"
    )
  axes, a_squeeze, b_squeeze = _matmul_axes("gemm", a.shape, b.shape)
  lhs, rhs = _promoted("gemm", a, b)
  lhs, rhs = _squeezed(lhs, a_squeeze), _squeezed(rhs, b_squeeze)
  alpha, beta = as_factor("gemm", "alpha", alpha), as_factor("gemm", "beta", beta)
  if isinstance(beta, float) and beta == 0:
    c = None
  elif c is None:
    raise ValueError("gemm: beta is given, but c is not")
  else:
    c = as_array("gemm", "c", c)
  out_dtype = out_dtype_of(lhs.dtype, preferred_element_type)
  shape = _result_shape(axes, lhs.shape, rhs.shape)
  for name, x in (("alpha", alpha), ("beta", beta), ("c", c)):
    if isinstance(x, jax.Array):
      check_real("gemm", name, x, "the result", out_dtype)
      check_broadcasts("gemm", name, x, "the result", shape)
  c = c if c is None else jnp.broadcast_to(c, shape)
  fused = isinstance(alpha, float) and isinstance(beta, float)
  if jnp.issubdtype(out_dtype, jnp.integer):  # Which float32 sums would not be exact.
    fused = fused and alpha == 1.0 and c is None
  # What is rounded once more later on must not be rounded to 8 or 16 bits before.
  is_narrow = jnp.issubdtype(out_dtype, jnp.floating) and out_dtype.itemsize < 4
  wide_dtype = jnp.float32 if is_narrow else out_dtype
  product, reason = product_of(
      lhs.dtype, rhs.dtype, precision, out_dtype if fused else wide_dtype,
      named_kernel(implementation, config), config,
  )
  if fused and not reason:
    if c is not None and c.dtype.name not in OUT_DTYPES:
      c = lax.convert_element_type(c, jnp.float32)
    product = product.replace(alpha=alpha, beta=0.0 if c is None else beta)
    others = () if c is None else (c,)
    return contract(
        "gemm", lhs, rhs, axes, product, others=others, rounds_once=True
    )
  if reason:
    out = jnp.matmul(a, b, precision=precision, preferred_element_type=wide_dtype)
  else:
    out = contract("gemm", lhs, rhs, axes, product)
  out = times(alpha, out)
  if c is not None:
    out = out + times(beta, lax.convert_element_type(c, wide_dtype))
  return lax.convert_element_type(out, out_dtype)


def explain(
    a, *operands, precision=None, preferred_element_type=None,
    implementation: str | None = None, config: Config | None = None,
) -> plans.Plan | list[plans.Plan]:
  """Prints which kernel jaxgemm.matmul(a, b, ...) runs and why; returns the plan.

  Of a function it prints the plans of all products of jaxgemm that it comes to, those of
  layers, gradients and shards included; see `jaxgemm.explaining`. A product of one
  column is planned, and shown, as the transposed row, and a batch that shares an operand
  as one product where that is faster; see `jaxgemm.forms`.

  Args:
    a, b: arrays, or anything with a shape and a dtype (jax.ShapeDtypeStruct); or a
      function, jitted or not, and its arguments.
    precision, preferred_element_type, implementation, config: as for jaxgemm.matmul, and
      of products alone.
  Returns: the plan, of a function the list of plans, for the device in context (see
    jaxgemm.target), or else for the device that JAX computes on.
  Raises:
    TypeError, ValueError: as jaxgemm.matmul.
  Example:
    with jaxgemm.target("NVIDIA H200"):
      jaxgemm.explain(jax.ShapeDtypeStruct((4096, 4096), "bfloat16"), w)
      jaxgemm.explain(jax.grad(loss), params, batch)
  """
  if callable(a):
    options = dict(
        precision=precision, preferred_element_type=preferred_element_type,
        implementation=implementation, config=config,
    )
    if given := [name for name, value in options.items() if value is not None]:
      raise TypeError(f"explain: {given[0]} is that of a product, and a is a function")
    return explaining.explain_function(a, *operands)
  if len(operands) != 1:
    raise TypeError(f"explain: a product has two operands, not {1 + len(operands)}")
  (b,) = operands
  for name, x in (("a", a), ("b", b)):
    if not (hasattr(x, "shape") and hasattr(x, "dtype")):
      raise TypeError(
          f"explain: {name} is of type {type(x).__name__}; it must be an array, or have"
          " a shape and a dtype"
      )
    check_numbers("explain", name, x.dtype)
  axes, lhs_squeeze, rhs_squeeze = _matmul_axes("explain", a.shape, b.shape)
  implementation = named_kernel(implementation, config)
  dtypes = [_common_dtype("explain", a, b, preferred_element_type)] * 2
  if None in dtypes:
    dtypes = [a.dtype, b.dtype]
  lhs_shape = _without(a.shape, lhs_squeeze)
  rhs_shape = _without(b.shape, rhs_squeeze)
  product, reason = product_of(
      *dtypes, precision, preferred_element_type, implementation, config
  )
  folding = fold(
      *axes, lhs_shape, rhs_shape, may_exchange=product.may_exchange
  )
  if folding.exchanged:
    lhs_shape, rhs_shape = rhs_shape, lhs_shape
  problem = product.replace(dims=folding.dims).problem(
      _permuted_shape(lhs_shape, folding.lhs_perm),
      _permuted_shape(rhs_shape, folding.rhs_perm), dtypes[0].name,
  )
  device = device_of(product.target)
  if not are_known(lhs_shape + rhs_shape):
    reason = reason or "its sizes are symbolic, and no plan is for all"
  if reason:
    plan = plans.Plan("xla", None, "fallback", reason, problem)
  else:
    plan = planned(product, problem, device)
  print(plans.describe(plan, device))
  return plan


# -- Operands and axes -------------------------------------------------------------


def _promoted(name: str, a, b, preferred_element_type=None):
  """Operands of mixed dtypes in their common dtype, as jnp.matmul has it.

  Those that have none stay as they are, if it is said what the result is to be.
  """
  if a.dtype == b.dtype:
    return a, b
  dtype = _common_dtype(name, a, b, preferred_element_type)
  if dtype is None:
    return a, b
  return lax.convert_element_type(a, dtype), lax.convert_element_type(b, dtype)


def _common_dtype(name: str, a, b, preferred_element_type):
  """The dtype that JAX promotes both to; None if there is none, nor need be."""
  try:
    return common_dtype(name, ", or give preferred_element_type", a=a, b=b)
  except ValueError:
    if preferred_element_type is not None:
      return None
    raise


def _gives_weak(a, b) -> bool:
  """Whether the product has a weak type, as JAX promotes the types of its operands."""
  weak = [getattr(x, "weak_type", False) for x in (a, b)]
  if all(weak) or not any(weak):
    return all(weak)
  types = (
      jax.ShapeDtypeStruct((), x.dtype, weak_type=its)
      for x, its in zip((a, b), weak, strict=True)
  )
  try:
    return jax.eval_shape(jnp.add, *types).weak_type
  except ValueError:
    return False


def _without(shape: Shape, squeeze: Shape) -> Shape:
  return tuple(size for i, size in enumerate(shape) if i not in squeeze)


def _squeezed(x, squeeze: Shape):
  return lax.squeeze(x, squeeze) if squeeze else x


@functools.lru_cache(maxsize=4096)
def _matmul_axes(
    name: str, a_shape: Shape, b_shape: Shape
) -> tuple[tuple[Axes, Axes, Axes], Shape, Shape]:
  """The axes of matmul's operands and result.

  Returns: labels for `fold`; and the axes of a and of b, of size 1 against another
    size, that are to be squeezed and have no label.
  """
  shapes = f"a has shape {a_shape} and b {b_shape}"
  if not a_shape or not b_shape:
    raise ValueError(f"{name}: {shapes}; neither may be a scalar")
  a_k, b_k = a_shape[-1], b_shape[max(0, len(b_shape) - 2)]
  if a_k != b_k:
    raise TypeError(
        f"{name}: {shapes}; k is the last dimension of a, {a_k}, and the"
        f" {'last but one' if len(b_shape) > 1 else 'only'} of b, {b_k}"
    )
  rank = max(len(a_shape), len(b_shape), 2) - 2
  sizes = [
      (None,) * (rank - max(0, len(shape) - 2)) + shape[:-2]
      for shape in (a_shape, b_shape)
  ]
  labels, squeezes, positions = ([], []), ([], []), [0, 0]
  for i, pair in enumerate(zip(*sizes, strict=True)):
    if None not in pair and 1 not in pair and pair[0] != pair[1]:
      raise ValueError(f"{name}: {shapes}; their batches do not broadcast")
    for side, (size, other) in enumerate((pair, pair[::-1])):
      if size is None:
        continue
      if size == 1 and other not in (None, 1):
        squeezes[side].append(positions[side])
      else:
        labels[side].append(f"b{i}")
      positions[side] += 1
  batch = [f"b{i}" for i in range(rank)]
  rows = ["m"] if len(a_shape) > 1 else []
  cols = ["n"] if len(b_shape) > 1 else []
  axes = (
      (*labels[0], *rows, "k"), (*labels[1], "k", *cols), (*batch, *rows, *cols)
  )
  return axes, tuple(squeezes[0]), tuple(squeezes[1])


def _checked_numbers(lhs_shape, rhs_shape, numbers) -> DimensionNumbers:
  """Dimension numbers as tuples of int; TypeError if they do not fit the shapes."""
  try:
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = (
        tuple(tuple(map(operator.index, dims)) for dims in pair) for pair in numbers
    )
  except (TypeError, ValueError):
    raise TypeError(
        f"dot_general: dimension_numbers {numbers!r} must be ((lhs contracting, rhs"
        " contracting), (lhs batch, rhs batch)), each a sequence of integers"
    ) from None
  problem = None
  for kind, lhs_dims, rhs_dims in (
      ("contracting", lhs_contract, rhs_contract), ("batch", lhs_batch, rhs_batch)
  ):
    if len(lhs_dims) != len(rhs_dims):
      problem = f"{len(lhs_dims)} {kind} dimensions in lhs, {len(rhs_dims)} in rhs"
  for side, shape, dims in (
      ("lhs", lhs_shape, lhs_contract + lhs_batch),
      ("rhs", rhs_shape, rhs_contract + rhs_batch),
  ):
    if any(not 0 <= d < len(shape) for d in dims):
      problem = f"{side} has no such dimension as one of {dims}"
    elif len(set(dims)) < len(dims):
      problem = f"a dimension of {side} appears twice in {dims}"
  if problem is None:
    for i, j in zip(lhs_contract + lhs_batch, rhs_contract + rhs_batch, strict=True):
      if lhs_shape[i] != rhs_shape[j]:
        problem = (
            f"dimension {i} of lhs is {lhs_shape[i]}, dimension {j} of rhs"
            f" {rhs_shape[j]}"
        )
  if problem is not None:
    raise TypeError(
        f"dot_general: lhs has shape {lhs_shape} and rhs {rhs_shape} with"
        f" dimension_numbers {numbers}: {problem}"
    )
  return (lhs_contract, rhs_contract), (lhs_batch, rhs_batch)


def _result_shape(
    axes: tuple[Axes, Axes, Axes], lhs_shape: Shape, rhs_shape: Shape
) -> Shape:
  lhs, rhs, out = axes
  sizes = label_sizes(lhs, rhs, lhs_shape, rhs_shape)
  return tuple(sizes[axis] for axis in out)


def _permuted_shape(shape: Shape, perm: Shape | None) -> Shape:
  return shape if perm is None else tuple(shape[i] for i in perm)
