"""Policies for jax.checkpoint that save products, ours and XLA's alike.

jax.checkpoint_policies.dots_saveable knows lax.dot_general alone, and would compute
our products twice. So where a product is differentiated, its result is named:
`PRODUCT`, and also `PRODUCT_WITH_NO_BATCH` if it has no batch dimension. The names
serve in policies of one's own as well, such as jax's
save_and_offload_only_these_names. Those of scaled_matmul, which has a rule of its own,
are computed again.

Example:
  jax.checkpoint(layer, policy=jaxgemm.checkpoint_policies.products_saveable)
"""

from __future__ import annotations

import jax
from jax.ad_checkpoint import checkpoint_name

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
