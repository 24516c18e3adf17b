"""Cross-entropy of logits that are a product: of long rows, in few passes.

The rows of logits of an odd number of columns begin at addresses that neither TMA nor
wide loads can take: each pass over them is slow, and so is each product of their
cotangent. So the columns are filled up to a multiple of 64, which the loss leaves out.
Logits stay in the dtype of the product; the loss is float32. The cotangent of the logits
is computed from them in one pass, in which the label's entry is found by comparison (the
gradient of an indexing is a scatter into float32 zeros).
"""

from __future__ import annotations

import functools

import jax
from jax import lax
import jax.numpy as jnp

from jaxgemm.api import as_array
from jaxgemm.layers import linear
from pallas_kernels.problem import Config

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
    TypeError: labels are no integers, or their shape is not that of x without its last
      dimension; or as jaxgemm.linear.
    ValueError: as jaxgemm.linear.
  Example:
    losses = jaxgemm.linear_cross_entropy(x, embedding, labels, transposed=True)
  """
  name = "linear_cross_entropy"
  x, w, labels = as_array(name, x), as_array(name, w), as_array(name, labels)
  if not jnp.issubdtype(labels.dtype, jnp.integer):
    raise TypeError(f"{name}: labels are {labels.dtype.name}; they must be integers")
  if x.ndim and labels.shape != x.shape[:-1]:
    raise TypeError(
        f"{name}: labels have shape {labels.shape} and x {x.shape}: each row of x has one"
    )
  n = None
  if w.ndim == 2:  # Else linear says what is wrong.
    axis = 0 if transposed else 1
    n = w.shape[axis]
    if bias is not None and (bias := as_array(name, bias)).shape == (n,):
      bias = _filled_up(bias, 0)
    w = _filled_up(w, axis)
  logits = linear(
      x, w, bias, scale=scale, precision=precision, transposed=transposed,
      preferred_element_type=preferred_element_type, implementation=implementation,
      config=config,
  )
  return _losses(logits, labels, n)


def _filled_up(x: jax.Array, axis: int) -> jax.Array:
  if x.shape[axis] < _COLUMNS:
    return x
  padding = [(0, 0, 0)] * x.ndim
  padding[axis] = (0, -x.shape[axis] % _COLUMNS, 0)
  return lax.pad(x, jnp.zeros((), x.dtype), padding)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _losses(logits, labels, n: int):
  """The loss of each row of logits [*batch, columns], of whose columns n count."""
  return _of_label(logits, labels, _log_sum(logits, n), n)


@_losses.defjvp
def _losses_jvp(n: int, primals, tangents):
  logits, labels = primals
  log_sum = _log_sum(logits, n)
  # Of the logits alone, again, in the backward pass: slopes of its own would be float32.
  push = jax.checkpoint(functools.partial(_push, n=n), prevent_cse=False)
  tangent = push(logits, labels, log_sum, tangents[0])
  return _of_label(logits, labels, log_sum, n), tangent


def _push(logits, labels, log_sum, tangent, *, n: int):
  """The tangent of each loss: the softmax less one at the label, times that of logits."""
  wide, columns = _counting(logits, n)
  slopes = jnp.exp(wide - log_sum[..., None]) - (columns == labels[..., None])
  slopes = jnp.where(_counts(labels, n)[..., None], slopes, 0.0)
  return jnp.sum(slopes * tangent.astype(wide.dtype), -1)


def _log_sum(logits, n: int):
  wide, _ = _counting(logits, n)
  return jax.nn.logsumexp(wide, -1)


def _of_label(logits, labels, log_sum, n: int):
  at = jnp.clip(labels, 0, n - 1)[..., None]
  label = jnp.take_along_axis(logits, at, -1)[..., 0].astype(log_sum.dtype)
  return jnp.where(_counts(labels, n), log_sum - label, 0.0)


def _counts(labels, n: int):
  return (labels >= 0) & (labels < n)


def _counting(logits, n: int):
  """Logits, at least float32, -inf in columns that do not count; and their columns."""
  wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
  columns = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
  if logits.shape[-1] != n:
    wide = jnp.where(columns < n, wide, -jnp.inf)
  return wide, columns
