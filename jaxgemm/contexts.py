"""Contexts that say for which device to plan, whether to emulate it, and how exactly
rows are to repeat.

All enter the keys of JAX's tracing and compilation caches: a jitted function is
traced anew when the context around its call changes.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import dataclasses

import jax

from jaxgemm.device import Device, current_device, known_device
from pallas_kernels import compat


@dataclasses.dataclass(frozen=True)
class Target:
  """The device to plan for, and whether its kernels run in Pallas's interpreter."""

  device: Device
  emulate: bool = False

  def __str__(self) -> str:
    return f"{self.device.kind}{' (emulated)' if self.emulate else ''}"


_context = jax.make_user_context(default_value=None)
_invariant = jax.make_user_context(default_value=False)


def current_target() -> Target | None:
  """What `target` or `emulate` has set here, or None."""
  return _context.value


def device_of(target: Target | None) -> Device | None:
  """The device to plan for: the target's, or the one that runs what is traced."""
  return current_device() if target is None else target.device


def emulates(target: Target | None) -> bool:
  """Whether kernels run in the emulator."""
  return target is not None and target.emulate


def is_batch_invariant() -> bool:
  """Whether `batch_invariant` is set here."""
  return _invariant.value


def batch_invariant(enabled: bool = True) -> contextlib.AbstractContextManager[None]:
  """Within this context, a row's result does not depend on how many others there are.

  Of each product with one lhs (matmul, dot_general, gemm, einsum, scaled_matmul, the
  layers, and those of groups of rows) a row has the same bits whatever m is, and at
  whatever place it stands; so have the gradients of lhs. A gradient of rhs is a sum over
  all rows. Products that no kernel can give this for (dtypes, precisions and devices that
  are left to XLA) raise ValueError. What it costs is that k is not split: see README.md.

  Args:
    enabled: False for what a context around this one has set.
  Returns: a context manager.
  Example: `with jaxgemm.batch_invariant(): logits = model(params, tokens)`
  """
  return _invariant(enabled)


@contextlib.contextmanager
def restored(target: Target | None, invariant: bool) -> Iterator[None]:
  """What was set where something was called, for what is traced of it later."""
  with _context(target), _invariant(invariant):
    yield


def target(kind: str) -> contextlib.AbstractContextManager[None]:
  """Within this context, products are planned and lowered for the named device.

  It makes `jax.export.export(jax.jit(f), platforms=["cuda"])` work on a machine
  that has no GPU.

  Args:
    kind: the name of a device, such as "NVIDIA H200".
  Returns: a context manager.
  Raises:
    ValueError: the device is unknown; the message lists those that are known.
  Example: `with jaxgemm.target("NVIDIA H200"): jaxgemm.explain(a, b)`
  """
  return _context(Target(known_device(kind)))


def emulate(kind: str | None = None) -> contextlib.AbstractContextManager[None]:
  """Within this context, a CPU runs the kernels in Pallas's GPU interpret mode.

  The plans are those of the named device. Threads, barriers, copies and races are
  simulated, which is slow: for products of a few hundred a side. Races raise. Each CTA
  of a cluster holds a thread of XLA: on a machine of fewer cores than the CTAs of a
  cluster they may wait for ever, unless PJRT_NPROC=32 is set before JAX starts. This
  function sets it, which is in time where nothing has been computed yet. The portable
  kernel ("triton") runs in Triton's interpreter, one CTA after the other.

  Args:
    kind: the name of a device; by default the device of an enclosing `target`, or
      "NVIDIA H200".
  Returns: a context manager.
  Raises:
    ValueError: the device is unknown; the message lists those that are known.
  Example: `with jaxgemm.emulate(): jaxgemm.matmul(a, b, implementation="persistent")`
  """
  compat.give_threads()
  if kind is not None:
    device = known_device(kind)
  elif (enclosing := current_target()) is not None:
    device = enclosing.device
  else:
    device = known_device("NVIDIA H200")
  return _context(Target(device, emulate=True))
