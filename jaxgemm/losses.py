"""Cross-entropy of logits that are a product: of long rows, in one pass.

The rows of logits of an odd number of columns begin at addresses that neither TMA nor
wide loads can take: each pass over them is slow, and so is each product of their
cotangent. So the columns are filled up to a multiple of 64, which the loss leaves out.
Logits keep the dtype of the product; the loss is float32.

The loss and its slopes come from one pass over the logits (`pallas_kernels.losses` on a
Hopper GPU), which leaves the slopes in their place. What the backward pass scales them by
are the rows of smaller arrays.

Source: Liger Kernel and Wijmans et al., "Cut your losses in large-vocabulary language
models" (2024), for gradients that are formed with the loss.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
from jax import lax
from jax.custom_derivatives import SymbolicZero
import jax.numpy as jnp

from jaxgemm import passes
from jaxgemm.arguments import as_array, as_dtype, at_least_float32
from jaxgemm.checkpoint_policies import name_product
from jaxgemm.contexts import Target, current_target
from jaxgemm.dims import are_known
from jaxgemm.layers import as_bias, columns, linear, scaled
from jaxgemm.stored import as_stored
from pallas_kernels import compat
from pallas_kernels import losses as kernel
from pallas_kernels.configs import Config

_COLUMNS = 64  # A line of 128 bytes, of 16-bit elements.


def linear_cross_entropy(
    x, w, labels, bias=None, *, scale=1, precision=None, preferred_element_type=None,
    transposed: bool = False, implementation: str | None = None,
    config: Config | None = None,
) -> jax.Array:
  """Returns -log(softmax(scale * x @ w + bias)[label]) of each row of x, in nats.

  Args:
    x: [*batch, k].
    w: [k, n], or [n, k] if `transposed`, as an embedding is.
    labels: [*batch], integers. A row whose label is not within 0 .. n - 1 does not
      count: its loss is 0, and it has no gradient.
    bias: None, or [n].
    preferred_element_type: dtype of the logits; that of x @ w, if not given.
    scale, precision, implementation, config: as for jaxgemm.linear.
  Returns: [*batch] float32 (float64 of float64 logits).
  Raises:
    TypeError: labels are no integers, their shape is not that of x without its last
      dimension, or the logits are not floating point; or as jaxgemm.linear.
    ValueError: as jaxgemm.linear.
  Example:
    losses = jaxgemm.linear_cross_entropy(x, embedding, labels, transposed=True)
  """
  name = "linear_cross_entropy"
  x, w = as_array(name, "x", x), as_array(name, "w", w)
  labels = as_array(name, "labels", labels)
  if not jnp.issubdtype(labels.dtype, jnp.integer):
    raise TypeError(f"{name}: labels are {labels.dtype.name}; they must be integers")
  if x.ndim and labels.shape != x.shape[:-1]:
    raise TypeError(
        f"{name}: labels have shape {labels.shape} and x {x.shape}: each row of x has one"
    )
  if labels.dtype.itemsize < 4:  # Where n may not fit.
    labels = lax.convert_element_type(labels, jnp.int32)
  n = columns(name, x, "w", w, transposed)
  (w,), (first, _) = as_stored([w], ("n", "k") if transposed else ("k", "n"))
  transposed = first == "n"
  axis = 0 if transposed else 1
  x, scale = scaled(name, x, scale)
  if bias is not None:
    bias = _filled_up(as_bias(name, "bias", bias, n), 0)
  dtype = jnp.result_type(x, w)
  if preferred_element_type is not None:
    dtype = as_dtype("preferred_element_type", preferred_element_type)
  if not jnp.issubdtype(dtype, jnp.floating):
    raise TypeError(f"{name}: the logits are {dtype.name}; they must be floating point")
  options = dict(
      precision=precision, preferred_element_type=preferred_element_type,
      implementation=implementation, config=config,
  )
  facts = Facts(n, implementation == "xla", current_target())
  run = _Product(transposed, scale, tuple(options.items()))
  return _losses(run, facts, x, _filled_up(w, axis), bias, labels)


def _filled_up(x: jax.Array, axis: int) -> jax.Array:
  if not are_known(x.shape) or x.shape[axis] < _COLUMNS:
    return x
  padding = [(0, 0, 0)] * x.ndim
  padding[axis] = (0, -x.shape[axis] % _COLUMNS, 0)
  return lax.pad(x, jnp.zeros((), x.dtype), padding)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _losses(run, facts: Facts, x, w, bias, labels):
  """The loss of each row of run(x, w, bias), the logits."""
  log_sum, label, _ = _of_logits(run, facts, x, w, bias, labels)
  return jnp.where(_counts(labels, facts), log_sum - label, 0.0)


def _of_logits(run, facts: Facts, x, w, bias, labels) -> list[jax.Array]:
  """The results of losses_p, all of which vary over mesh axes as labels do, too."""
  return losses_p.bind(*compat.vary_alike(run(x, w, bias), labels), facts=facts)


@functools.partial(_losses.defjvp, symbolic_zeros=True)
def _losses_jvp(run, facts: Facts, primals, tangents):
  """By the logits' slopes: the tangents of logits are never formed, nor cotangents.

  The tangent of a loss is slopes . (x' @ w + x @ w') = x' . (slopes @ w^T)
  + x . (slopes @ w'^T), which two small arrays can be multiplied for. Transposed, the
  cotangents of the losses are factors of rows of these: the slopes stay as they are.
  """
  x, w, bias, labels = primals
  of_x, of_w, of_bias, _ = tangents
  found = _of_logits(run, facts, x, w, bias, labels)
  # What a policy saves of these, the backward pass need not form again.
  log_sum, label, slopes = (name_product(z, has_batch=False) for z in found)
  counts, wide = _counts(labels, facts), log_sum.dtype

  def dot(a, b):
    return jnp.sum(a.astype(wide) * b.astype(wide), -1)

  tangent = jnp.zeros_like(log_sum)
  if _moves(of_x):
    tangent += dot(of_x, run.back(slopes, w))
  if _moves(of_w):
    tangent += dot(x, run.back(slopes, of_w))
  if bias is not None and _moves(of_bias):
    dtype = slopes.dtype if slopes.dtype == of_bias.dtype else wide
    tangent += jnp.matmul(
        slopes.astype(dtype), of_bias.astype(dtype), precision=run.precision,
        preferred_element_type=wide,
    )
  loss = jnp.where(counts, log_sum - label, 0.0)
  return loss, jnp.where(counts, tangent, 0.0)


def _moves(tangent) -> bool:
  return tangent is not None and not isinstance(tangent, SymbolicZero)


def _counts(labels, facts: Facts):
  return (labels >= 0) & (labels < facts.num_classes)


@dataclasses.dataclass(frozen=True)
class _Product:
  """The logits as a function of x, w and bias."""

  transposed: bool
  scale: float
  options: tuple[tuple[str, Any], ...]

  @property
  def precision(self):
    return dict(self.options)["precision"]

  def __call__(self, x, w, bias):
    return linear(
        x, w, bias, transposed=self.transposed, scale=self.scale, **dict(self.options)
    )

  def back(self, slopes, w):
    """Slopes of the logits to those of x.

    A kernel that is named for the logits need not serve these.
    """
    options = dict(self.options)
    if options["implementation"] != "xla":
      options |= {"implementation": None, "config": None}
    return linear(
        slopes, w, transposed=not self.transposed, scale=self.scale, **options
    )


@dataclasses.dataclass(frozen=True)
class Facts:
  """The parameters of losses_p.

  Its operands are logits [*batch, columns], of which `num_classes` count, and labels
  [*batch]. Its results are the log of each row's sum of exponentials and the logit of
  its label, float32, and the slopes of their difference, in the logits' dtype.
  """

  num_classes: int
  by_xla: bool
  target: Target | None


def _by_xla(logits, labels, *, facts: Facts) -> list[jax.Array]:
  wide = logits.astype(at_least_float32(logits.dtype))
  columns = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
  if logits.shape[-1] != facts.num_classes:
    wide = jnp.where(columns < facts.num_classes, wide, -jnp.inf)
  log_sum = jax.nn.logsumexp(wide, -1)
  at = jnp.clip(labels, 0, facts.num_classes - 1)[..., None]
  label = jnp.take_along_axis(wide, at, -1)[..., 0]
  is_label = (columns == labels[..., None]).astype(wide.dtype)
  slopes = jnp.exp(wide - log_sum[..., None]) - is_label
  return [log_sum, label, slopes.astype(logits.dtype)]


def _by_kernel(logits, labels, *, facts: Facts) -> list[jax.Array]:
  cols = logits.shape[-1]
  its = kernel.Losses(
      labels.size, cols, facts.num_classes, jnp.dtype(logits.dtype).name
  )
  device = passes.serving_device(facts.target)
  if facts.by_xla or device is None or kernel.supports(its) is not None:
    return _by_xla(logits, labels, facts=facts)
  flat = [logits.reshape(its.rows, cols), labels.reshape(its.rows).astype(jnp.int32)]
  launch = lambda operands, **how: kernel.launch(*operands, its, **how)
  log_sum, label, slopes = passes.run(launch, flat, facts.target)
  return [
      log_sum.reshape(labels.shape), label.reshape(labels.shape),
      slopes.reshape(logits.shape),
  ]


def _abstract_eval(logits, labels, *, facts: Facts):
  del facts
  wide = at_least_float32(logits.dtype)
  row, _ = lax.reduce_sum_p.abstract_eval(
      logits.update(dtype=wide), axes=(logits.ndim - 1,), out_sharding=None
  )
  return [row, row, logits]


losses_p = passes.define("jaxgemm_losses", _by_xla, _by_kernel, _abstract_eval)
