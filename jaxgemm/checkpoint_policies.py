"""Policies for jax.checkpoint that save products, ours and XLA's alike.

jax.checkpoint_policies.dots_saveable knows lax.dot_general alone, and would compute
our products twice. So where a product is differentiated, its result is named:
`PRODUCT`, and also `PRODUCT_WITH_NO_BATCH` if it has no batch dimension. The names
serve in policies of one's own as well, such as jax's
save_and_offload_only_these_names. Those of scaled_matmul and scaled_ragged_dot, which
have rules of their own, are computed again.

Example:
  jax.checkpoint(layer, policy=jaxgemm.checkpoint_policies.products_saveable)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import primitives

PRODUCT = "jaxgemm_out"
PRODUCT_WITH_NO_BATCH = "jaxgemm_out_no_batch"

products_saveable = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.save_only_these_names(PRODUCT),
    jax.checkpoint_policies.dots_saveable,
)
products_with_no_batch_dims_saveable = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.save_only_these_names(PRODUCT_WITH_NO_BATCH),
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
)


def name_product(out, *, has_batch: bool):
  """Names the result of a product for these policies."""
  out = checkpoint_name(out, PRODUCT)
  return out if has_batch else checkpoint_name(out, PRODUCT_WITH_NO_BATCH)


def knowing_ours(policy: Callable[..., Any]) -> Callable[..., Any]:
  """The policy, which saves our products where it would save lax.dot_general.

  Of what it asks of a product it is told whether that has a batch.
  """
  batches = {PRODUCT: ((0,), (0,)), PRODUCT_WITH_NO_BATCH: ((), ())}

  def known(primitive, *avals, **params):
    found = policy(primitive, *avals, **params)
    batch = batches.get(params.get("name")) if primitive.name == "name" else None
    if batch is None or found:
      return found
    numbers = ((1 + len(batch[0]),), (len(batch[0]),)), batch
    return policy(
        primitives.dot_general_p, *avals * 2, dimension_numbers=numbers, precision=None,
        preferred_element_type=avals[0].dtype, out_sharding=None,
    )

  return known
