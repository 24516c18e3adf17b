"""What the products of a function run on, in words.

The function is traced and lowered for the device at hand, or that of `jaxgemm.target`,
and not run. A product counts once for each place of the lowered program that has it: that
of a loop's body once, that of a function which JAX lowers once for several calls, too.
Products that jit shards by itself are those of one device, which XLA's compilation
reveals. Without a GPU and a target all are XLA's, and none is planned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxgemm.plan import Plan
from jaxgemm.recording import recorded


def explain_function(fn: Callable[..., Any], *args: Any) -> list[Plan]:
  """Prints the plans of a function's products; returns each once, in their order."""
  found = recorded(fn, *args).plans
  name = getattr(fn, "__name__", type(fn).__name__)
  ours = sum(count for plan, count in found.items() if plan.kernel != "xla")
  print(f"{name}: {ours} of {found.total()} planned products on kernels of jaxgemm")
  for plan, count in found.items():
    first, *others = str(plan).splitlines()
    print("\n".join([f"{count} x {first}", *others]))
  return list(found)
