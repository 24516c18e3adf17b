"""Listening to the plans that JAX asks for while it lowers a function.

Only the lowering knows which problems a function comes to: after differentiation,
batching and folding, and of the shards that one device computes.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import dataclasses

import jax

from jaxgemm.device import Device
from pallas_kernels.problem import Problem


@dataclasses.dataclass
class Recording:
  """What was asked for.

  Attributes:
    problems: each with its device (None: one that the kernels do not know), once, in
      the order of the first request. Products with an `implementation` are not among
      them: their kernel is not ours to choose.
    partitioned: whether a product is left to XLA's partitioner, which asks for the
      plans of its shards as it compiles.
  """

  problems: dict[tuple[Problem, Device | None], None] = dataclasses.field(
      default_factory=dict
  )
  partitioned: bool = False


# Not per thread: XLA may call the partitioner from a thread of its own.
_active: list[Recording] = []
_fresh = jax.make_user_context(default_value=None)


@contextlib.contextmanager
def recording() -> Iterator[Recording]:
  """Within this context, JAX traces and lowers anew, and what it asks for is kept."""
  found = Recording()
  _active.append(found)
  try:
    with _fresh(object()):  # Unlike any before: no cached trace skips our lowering.
      yield found
  finally:
    # By identity: another thread may have begun an equal recording meanwhile.
    _active[:] = [active for active in _active if active is not found]


def record(problem: Problem, device: Device | None) -> None:
  """Notes that the plan of a problem is asked for."""
  for active in _active:
    active.problems.setdefault((problem, device))


def record_partitioned() -> None:
  """Notes that a product's shards will ask for their plans at compilation."""
  for active in _active:
    active.partitioned = True
