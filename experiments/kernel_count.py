"""Counts the GEMM kernels of a compiled program: jaxgemm's own and XLA's.

The input is the optimised HLO text of a compiled function,
`jax.jit(f).lower(...).compile().as_text()`. Each instruction that stands for a
product counts once, however often a loop around it runs, and in the first branch of a
conditional only:

- jaxgemm's: a custom call to Mosaic or Triton whose line holds the name of one of our
  kernels, as each of them is called jaxgemm_<kernel>. Those that make a pass
  (jaxgemm_cotangents) are no products and do not count.
- XLA's: a custom call to cuBLAS, cuBLASLt or oneDNN, a fusion whose body holds a
  dot (__triton_gemm, __triton_nested_gemm_fusion, __cudnn$fusion), and a dot of
  its own.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping
import dataclasses
import re

from pallas_kernels import KERNELS

_COMPUTATION = re.compile(r"^(?:ENTRY\s+)?%?([\w.\-]+)\s.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT\s+)?%?[\w.\-]+\s+=\s+(.*)$", re.DOTALL)
_OPCODE = re.compile(r"\s([a-z][a-z0-9\-]*)\(")
_CALLS = re.compile(r"\bcalls=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_SECOND = re.compile(r"\bfalse_computation=%?([\w.\-]+)")
_NAME = re.compile(r"[\w.\-]+")
_FUSION_KIND = re.compile(r'"kind":\s*"([^"]+)"')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_OWN_NAME = re.compile(r"jaxgemm_([a-z_]*[a-z])")
_OWN_TARGETS = ("mosaic_gpu", "triton_kernel_call")
_XLA_TARGETS = ("__cublas$", "__onednn$matmul")


@dataclasses.dataclass(frozen=True)
class GemmCount:
  """GEMM kernels of one program, by jaxgemm kernel and by XLA's kind."""

  jaxgemm: Mapping[str, int]
  xla: Mapping[str, int]

  @property
  def num_jaxgemm(self) -> int:
    return sum(self.jaxgemm.values())

  @property
  def num_xla(self) -> int:
    return sum(self.xla.values())

  def __str__(self) -> str:
    def listed(counts: Mapping[str, int]) -> str:
      parts = [f"{count} {name}" for name, count in sorted(counts.items())]
      return f" ({', '.join(parts)})" if parts else ""

    return (
        f"{self.num_jaxgemm} of jaxgemm{listed(self.jaxgemm)},"
        f" {self.num_xla} of XLA{listed(self.xla)}"
    )


def count_gemms(hlo_text: str) -> GemmCount:
  """Returns the GEMM kernels in the optimised HLO text of a compiled function."""
  computations = _computations(hlo_text)
  fused = {
      name
      for instructions in computations.values()
      for opcode, line in instructions
      if opcode == "fusion"
      for name in _CALLS.findall(line)
  }
  others = set(_later_branches(computations))
  own: collections.Counter[str] = collections.Counter()
  xla: collections.Counter[str] = collections.Counter()
  for computation, instructions in computations.items():
    if computation in fused or computation in others:
      continue  # Counted with the fusion that calls it, or not at all.
    for opcode, line in instructions:
      if opcode == "dot":
        xla["dot"] += 1
      elif opcode == "fusion" and (dots := _dots(line, computations)):
        kind = _FUSION_KIND.search(line)
        xla[kind.group(1) if kind else "fusion"] += dots
      elif opcode == "custom-call" and (target := _TARGET.search(line)):
        if target.group(1).startswith(_XLA_TARGETS):
          xla[target.group(1)] += 1
        elif target.group(1).startswith(_OWN_TARGETS) and (name := _own_name(line)):
          own[name] += 1
  return GemmCount(dict(own), dict(xla))


def _computations(hlo_text: str) -> dict[str, list[tuple[str, str]]]:
  """Returns the (opcode, line) pairs of each computation, by its name."""
  computations: dict[str, list[tuple[str, str]]] = {}
  instructions: list[tuple[str, str]] = []
  for line in hlo_text.split("\n"):
    if (instruction := _INSTRUCTION.match(line)) is not None:
      if opcode := _OPCODE.search(instruction.group(1)):
        instructions.append((opcode.group(1), line))
    elif (header := _COMPUTATION.match(line)) is not None:
      instructions = computations.setdefault(header.group(1), [])
  return computations


def _later_branches(
    computations: Mapping[str, list[tuple[str, str]]]
) -> Iterator[str]:
  """Yields the branches of conditionals but the first of each."""
  for instructions in computations.values():
    for opcode, line in instructions:
      if opcode == "conditional":
        if (branches := _BRANCHES.search(line)) is not None:
          yield from _NAME.findall(branches.group(1))[1:]
        elif (second := _SECOND.search(line)) is not None:
          yield second.group(1)


def _dots(
    line: str, computations: Mapping[str, list[tuple[str, str]]]
) -> int:
  """Returns how many dots the computations that `line` calls hold, all the way."""
  return sum(
      1 if opcode == "dot" else _dots(inner, computations)
      for name in _CALLS.findall(line)
      for opcode, inner in computations.get(name, ())
  )


def _own_name(line: str) -> str | None:
  """Returns the jaxgemm kernel that a custom call runs, if any."""
  return next(_kernel_names(line), None)


def _kernel_names(line: str) -> Iterator[str]:
  for match in _OWN_NAME.finditer(line):
    # In the kernel's serialised module the name carries this suffix.
    name = match.group(1).removesuffix("_mosaic_gpu")
    if name in KERNELS:
      yield name
