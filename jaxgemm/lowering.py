"""How one device computes a product: by XLA, by a kernel, or by a kernel emulated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxgemm import forms
from jaxgemm import plan as plans
from jaxgemm.contexts import device_of, emulates
from jaxgemm.device import Device
from jaxgemm.launch import run
from jaxgemm.precision import for_xla
from jaxgemm.product import Product
from jaxgemm.recording import record, record_plan
from pallas_kernels import activations, compat
from pallas_kernels.problem import Problem


def xla_product(product: Product, *operands, cuda: bool):
  """The product by lax.dot_general, from the operands as they are stored.

  Of a fused product the list of its results.
  """
  product, operands = product.unpacked(operands, halves)
  dims, out_dtype = product.dims, jnp.dtype(product.out_dtype)
  lhs, factors, c, biases, entering = product.named(operands)
  # XLA rounds to the operands' dtype or to float32 (int32) by itself; any other result,
  # and an epilogue, starts from float32. A layer's starts from the result's dtype, as
  # layers do without us: float32 arrays between XLA's kernels would take twice the time.
  wide = jnp.float32
  dtypes = (lhs.dtype, jnp.int32 if lhs.dtype == jnp.int8 else wide)
  plain = product.alpha == 1.0 and c is None and not product.is_fused
  narrow = (plain or product.is_fused) and out_dtype in dtypes

  def multiply(rhs):
    if _is_inner(product, lhs, rhs):
      return _inner_products(product, lhs, rhs).astype(out_dtype if narrow else wide)
    out = lax.dot_general(
        lhs, rhs, dims.dimension_numbers,
        precision=(for_xla if cuda else _portable)(product.precision),
        preferred_element_type=out_dtype if narrow else wide,
        out_sharding=lax_out_sharding(product),
    )
    if dims.lax_out != dims.out:
      names = dims.names(dims.lax_out)
      out = lax.transpose(out, [names.index(name) for name in dims.names(dims.out)])
    return out

  products = [multiply(rhs) for rhs in factors]
  if plain and narrow:
    return products[0]
  return epilogue(product, products, c, biases, entering)


def _is_inner(product: Product, lhs, rhs) -> bool:
  """Whether each product of a batch is of one row and one column."""
  sizes = product.dims.sizes(lhs.shape, rhs.shape)
  return {*sizes["m"], *sizes["n"]} <= {1} and lax_out_sharding(product) is None


def _inner_products(product: Product, lhs, rhs) -> jax.Array:
  """Sums of products in float32, or int32: a reduction, one kernel of XLA's.

  It makes one of its dot, too, but rounds each product of 16 bits (4M normal elements:
  an error of 1.6e-2, by bfloat16's rounding of the sum 1.7e-3).
  """
  dims, wide = product.dims, jnp.int32 if lhs.dtype == jnp.int8 else jnp.float32
  sizes = dims.sizes(lhs.shape, rhs.shape)

  def of_k(x, groups: str):
    batch = sizes["b"] if "b" in groups else (1,) * dims.b
    return lax.reshape(x, (*batch, *sizes["k"])).astype(wide)

  found = of_k(lhs, dims.lhs) * of_k(rhs, dims.rhs)
  axes = tuple(range(dims.b, found.ndim))
  return lax.reshape(jnp.sum(found, axes), dims.out_shape(lhs.shape, rhs.shape))


def halves(x, axis: int) -> list[jax.Array]:
  """The two halves of x along an axis, as arrays of their own."""
  size = x.shape[axis] // 2
  return [lax.slice_in_dim(x, i * size, (i + 1) * size, axis=axis) for i in range(2)]


def epilogue(product: Product, products, c, biases, known=()):
  """activation(alpha * product + bias) + beta * c in float32, then the cast.

  Or alpha * product times each slope, by what is `known` to enter the activation.
  `products` are those of lhs and each rhs. Of a fused product the list of results.
  """
  entering = []
  for i, out in enumerate(products):
    if product.is_fused:
      out = lax.convert_element_type(out, jnp.float32)
    if product.alpha != 1.0:
      out = lax.mul(out, jnp.full_like(out, product.alpha))
    if biases:
      out += along_columns(lax.convert_element_type(biases[i], out.dtype), out.shape)
    entering.append(out)
  out_dtype = jnp.dtype(product.out_dtype)
  if product.slopes:
    wide = [lax.convert_element_type(x, jnp.float32) for x in known]
    slopes = activations.slopes(product.activation, wide)
    return [lax.convert_element_type(entering[0] * s, out_dtype) for s in slopes]
  out = activations.apply(product.activation, entering[0])
  if product.gated:
    out = out * entering[1]
  if c is not None:
    c = lax.convert_element_type(c, out.dtype)
    if product.beta != 1.0:
      c = lax.mul(c, jnp.full_like(c, product.beta))
    out = lax.add(out, c)
  found = [out, *entering][: product.num_results]
  found = [lax.convert_element_type(x, out_dtype) for x in found]
  return found if product.is_fused else found[0]


def along_columns(bias: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """The bias, of the last dimensions, in each row of an array of that shape."""
  first = len(shape) - bias.ndim
  return lax.broadcast_in_dim(bias, shape, range(first, len(shape)))


def lax_out_sharding(product: Product) -> NamedSharding | None:
  """The explicit sharding of the result in the order that lax.dot_general has."""
  sharding, dims = product.out_sharding, product.dims
  if sharding is None or dims.lax_out == dims.out:
    return sharding
  return permuted(sharding, dims.names(dims.out), dims.names(dims.lax_out))


def permuted(sharding: NamedSharding, have, want) -> NamedSharding:
  """The sharding of the axes `have`, in the order of `want`."""
  parts = dict.fromkeys(have) | dict(zip(have, sharding.spec, strict=False))
  spec = PartitionSpec(
      *(parts[axis] for axis in want),
      unreduced=sharding.spec.unreduced, reduced=sharding.spec.reduced,
  )
  return NamedSharding(sharding.mesh, spec)


def local_plan(product: Product, *operands) -> plans.Plan:
  """The plan of a product whose operands lie whole on one device."""
  problem, device = local_problem(product, *operands), device_of(product.target)
  if product.implementation is None:
    record(forms.form(problem.unfused, device), device)
  try:
    return planned(product, problem, device)
  except ValueError:
    if product.must_serve:
      raise
    return planned(product.replace(implementation=None, config=None), problem, device)


def local_problem(product: Product, *operands) -> Problem:
  """The problem that these operands are, once folded."""
  lhs, (rhs, *_), c, _, entering = product.named(operands)
  elements = [x for x in (c, *entering) if x is not None]
  c_dtype = elements[0].dtype.name if elements else None
  return product.problem(lhs.shape, rhs.shape, lhs.dtype.name, c_dtype)


def planned(product: Product, problem: Problem, device: Device | None) -> plans.Plan:
  """The plan of a product that is this problem, in the form that is planned of it."""
  if any(product.converted) and not product.batch_invariant:
    converting = plans.converting(
        problem, product.converted, device, attached=product.attached
    )
    if converting is not None:
      return converting
  form = forms.form(problem, device) if product.plans_form else problem
  make_plan = functools.partial(
      plans.make_plan, device=device, implementation=product.implementation,
      config=product.config, batch_invariant=product.batch_invariant,
  )
  try:
    plan = make_plan(form)
  except ValueError:  # A kernel that is named may serve the problem as it is.
    if form == problem:
      raise
    return make_plan(problem)
  if form in (problem, problem.canonical) or plan.kernel == "xla":
    return plan
  moved = ", ".join(forms.transposed_bytes(problem.canonical)) or "nothing"
  why = f"{plan.reason}; one product of all {problem.batch}, for which XLA transposes"
  return dataclasses.replace(plan, reason=f"{why} {moved}")


def local_product(product: Product, *operands):
  """The product on one device: by the planned kernel, or by XLA's dot.

  Of a fused product the list of its results.
  """
  plan = local_plan(product, *operands)
  record_plan(plan)
  if plan.kernel == "xla":
    return xla_product(
        product.replace(out_sharding=None), *operands, cuda=not emulates(product.target)
    )
  lhs, factors, c, biases, entering = product.named(operands)
  problem = local_problem(product, *operands)
  if plan.problem.converts:
    source, name = operands[-1], product.attached
    lhs, factors = (source, factors) if name == "lhs" else (lhs, (source,))
    problem = dataclasses.replace(problem, **{f"{name}_source": source.dtype.name})
  elements = [x for x in (c, *entering) if x is not None]
  arrays = folded(product, problem, plan.problem, lhs, factors, elements, biases)
  found = launched(plan, arrays, product)
  found = forms.result(problem, plan.problem, found)
  shape = product.dims.out_shape(lhs.shape, product.factor_shape(factors[0].shape))
  if not product.is_fused:
    return lax.reshape(found, shape)
  found = found if product.num_results > 1 else (found,)
  return [lax.reshape(x, shape) for x in found]


def folded(
    product: Product, problem: Problem, planned: Problem, lhs, factors, elements, biases
) -> list[Any]:
  """The operands as the planned form of the problem has them: lhs, rhs (both of a gated
  product), what has an element for each of the result's, and the biases.
  """
  if product.gated:
    # A packed rhs is twice as wide as the problem's.
    shapes = [product.folded_shape(product.dims.rhs, x.shape) for x in factors]
    lhs = lax.reshape(lhs, problem.lhs_shape)
    found = [lhs, tuple(map(lax.reshape, factors, shapes))]
  else:
    found = list(forms.operands(problem, planned, lhs, *factors))
  found += [lax.reshape(x, planned.out_shape) for x in elements]
  return found + [lax.reshape(x, (x.size,)) for x in biases]


def launched(plan: plans.Plan, operands: Sequence[Any], facts: Any):
  """The results of the planned kernel, on the chip or emulated.

  `facts` has the `target` of the plan, and whether it runs `beside_collectives`.
  """
  device = device_of(facts.target)
  assert device is not None
  launch = functools.partial(
      run, plan, device=device, beside_collectives=facts.beside_collectives
  )
  if emulates(facts.target):
    return _emulated_product(plan, operands, launch)
  return launch(operands)


def in_emulator(launch: Callable[..., Any], out: Any, operands):
  """launch(operands, interpret=...), a kernel's, of the type `out`, from a callback.

  The interpreter orders its steps by effects, which checkpoint and grad refuse; a
  callback that runs the whole kernel is a pure function to JAX.
  """

  def host(arrays):
    def interpret(params):
      with jax.default_device(jax.local_devices(backend="cpu")[0]):
        return launch(jax.tree.map(jnp.asarray, arrays), interpret=params)

    return compat.run_interpreted(interpret)

  return jax.pure_callback(host, out, operands)


def _emulated_product(plan: plans.Plan, operands, launch: Callable[..., Any]):
  """The results of `launch`, which runs the plan's kernel, in interpret mode."""
  out = jax.ShapeDtypeStruct(plan.problem.out_shape, jnp.dtype(plan.problem.out_dtype))
  if num_others := plan.problem.epilogue.num_others:
    out = (out,) * (1 + num_others)
  return in_emulator(launch, out, tuple(operands))


def _portable(precision):
  """The precision for platforms that do not know an NVIDIA algorithm by its name.

  Its operands' dtype and a float32 accumulator say the same, but for TF32, of which
  every platform has more at the highest precision.
  """
  if precision == lax.DotAlgorithmPreset.TF32_TF32_F32:
    return (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
  if isinstance(precision, (lax.DotAlgorithmPreset, lax.DotAlgorithm)):
    return None
  return precision
