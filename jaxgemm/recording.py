"""Listening to the plans that JAX asks for while it lowers a function.

Only the lowering knows which problems a function comes to: after differentiation,
batching and folding, and of the shards that one device computes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
import contextlib
import dataclasses
from typing import Any

import jax

from jaxgemm.contexts import current_target
from jaxgemm.device import Device
from pallas_kernels.problem import Problem


@dataclasses.dataclass
class Recording:
  """What was asked for.

  Attributes:
    problems: each with its device (None: one that the kernels do not know), once, in
      the order of the first request. Products with an `implementation` are not among
      them: their kernel is not ours to choose.
    plans: each with the number of places in the lowered program that have it, in the
      order of the first.
    partitioned: whether a product is left to XLA's partitioner, which asks for the
      plans of its shards as it compiles.
  """

  problems: dict[tuple[Problem, Device | None], None] = dataclasses.field(
      default_factory=dict
  )
  plans: Counter[Any] = dataclasses.field(default_factory=Counter)
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


def recorded(fn: Callable[..., Any], *args: Any) -> Recording:
  """What is asked for while a function is traced and lowered; it does not run.

  Where jit shards products by itself, XLA compiles it, too. Its arguments may be
  jax.ShapeDtypeStructs.
  """
  target = current_target()
  abroad = target is not None and not target.emulate and jax.default_backend() != "gpu"
  jitted = fn if isinstance(fn, jax.stages.Wrapped) else jax.jit(fn)
  with recording() as found:
    lowered = jitted.trace(*args).lower(lowering_platforms=("cuda",) if abroad else None)
    if found.partitioned:
      lowered.compile()
  return found


def record_plan(plan: Any) -> None:
  """Notes a plan that is lowered."""
  for active in _active:
    active.plans[plan] += 1


def record(problem: Problem, device: Device | None) -> None:
  """Notes that the plan of a problem is asked for."""
  for active in _active:
    active.problems.setdefault((problem, device))


def record_partitioned() -> None:
  """Notes that a product's shards will ask for their plans at compilation."""
  for active in _active:
    active.partitioned = True
