"""Poison and guards around all that a Mosaic kernel writes; see experiments/fuzz.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import functools
import math
from typing import Any
from unittest import mock

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import compat, tiles

_GUARD = 77  # Of every dtype of a result.
_UNWRITTEN = -1_234_567_891  # Of integers, which have no NaN.
BEYOND = -1_234_567_892  # The same for -inf.
_ZONE_ELEMENTS = 8192
_ALIGNED = 16  # Elements, of which a zone is a multiple: TMA begins at 16 bytes.


@contextlib.contextmanager
def guarded() -> Iterator[None]:
  """Within this context, what plgpu.kernel writes is poisoned and guarded."""
  with mock.patch.object(plgpu, "kernel", _guarded_kernel):
    yield


def _guarded_kernel(
    body: Callable[..., None], *, out_type,
    scratch_types: Mapping[str, Any] | None = None, compiler_params: Any = None,
    interpret: Any = None, **fields,
) -> Callable[..., Any]:
  """As plgpu.kernel; the results lie within arrays that exist."""
  name, thread_name = fields["kernel_name"], fields.get("thread_name")
  types, tree = jax.tree.flatten(out_type)
  zones = [_zone(out.shape[1:]) for out in types]

  def kernel(*gmem, **scratch):
    results = [
        ref.at[pl.ds(zone, out.shape[0])]
        for ref, zone, out in zip(gmem, zones, types, strict=False)
    ]
    body(*gmem[len(results) :], *results, **scratch)

  def call(*operands):
    def change(refs):
      with compat.without_manual_axes():
        pl.kernel(
            lambda *gmem: pl.run_scoped(
                functools.partial(kernel, *gmem),
                collective_axes=thread_name or (), **(scratch_types or {}),
            ),
            mesh=plgpu.Mesh(**fields), compiler_params=compiler_params,
            interpret=False if interpret is None else interpret, name=name,
        )(*refs, *operands)

    found = pl.run_state(change)(
        [_surrounded(out, zone) for out, zone in zip(types, zones, strict=True)]
    )
    return tree.unflatten(
        [_inside(x, zone) for x, zone in zip(found, zones, strict=True)]
    )

  return call


def _zone(shape: Sequence[int]) -> int:
  """Returns how many products of a shape make a zone."""
  size = math.prod(shape)
  aligned = _ALIGNED // math.gcd(_ALIGNED, size)
  return tiles.round_up(tiles.cdiv(_ZONE_ELEMENTS, size), aligned)


def _surrounded(out: jax.ShapeDtypeStruct, zone: int) -> jax.Array:
  whole = jnp.issubdtype(out.dtype, jnp.integer)
  inside = jnp.full(out.shape, _UNWRITTEN if whole else jnp.nan, out.dtype)
  padding = [(zone, zone, 0)] + [(0, 0, 0)] * (len(out.shape) - 1)
  return lax.pad(inside, jnp.array(_GUARD, out.dtype), padding)


def _inside(x: jax.Array, zone: int) -> jax.Array:
  beyond = BEYOND if jnp.issubdtype(x.dtype, jnp.integer) else -jnp.inf
  untouched = jnp.all(x[:zone] == _GUARD) & jnp.all(x[-zone:] == _GUARD)
  return jnp.where(untouched, x[zone:-zone], jnp.array(beyond, x.dtype))
