r"""Mutants: each wait, arrival and commit of the kernels removed in turn, and emulated.

A kernel that is right only by luck survives the loss of a barrier. Each mutant runs some
small problems in Pallas's GPU interpret mode with race detection, in a process of its own
(experiments/mutant_cases.py), and is killed by

  race     the emulator saw one
  wrong    a result that is not within the bound
  error    the emulator refused
  hang     nothing was heard of it for --patience seconds

Those that survive must be among SURVIVORS, each with the reason; anything else fails.
mutants.jsonl has a line for each.

  python -m experiments.mutants
  python -m experiments.mutants --sites=ring
"""

from __future__ import annotations

import ast
import collections
from collections.abc import Sequence
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import queue
import subprocess
import sys
import tempfile
import threading
from typing import IO

from absl import app, flags
import tabulate

from experiments import common_flags, progress, provenance

flags.adopt_module_key_flags(common_flags)
_SITES = flags.DEFINE_string("sites", "", "Part of the names of the sites to mutate.")
_PATIENCE = flags.DEFINE_float(
    "patience", 40.0, "Seconds without news that are a hang.", lower_bound=1.0
)

KERNELS = pathlib.Path(__file__).parent.parent / "pallas_kernels"
CALLS = (
    "barrier_wait", "barrier_arrive", "commit_smem", "wait_smem_to_gmem", "wgmma_wait",
)
_WGMMA = "the emulator multiplies at once: only the chip leaves wgmma in flight"
_REGISTERS = "register loads run on the chip alone"
_SKEWED = "lhs comes skewed, or in runs, on the chip alone"
SURVIVORS = dict.fromkeys(
    (
        "blocked.launch._kernel._multiply.step.wgmma_wait",
        "direct.launch._kernel._multiply_slots.wgmma_wait",
        "grouped_k._sum.multiply.wgmma_wait", "grouped_k._sum.wgmma_wait",
        "lhs_registers.load.wgmma_wait",
        "pipelined.launch._kernel._multiply.wgmma_wait",
        "ring_reads.begin.wgmma_wait",
        "ring_reads.consume.multiply.wgmma_wait", "ring_reads.consume_step.wgmma_wait",
        "ring_reads.finish.wgmma_wait", "ring_reads.consume_parts.wgmma_wait",
        "ring_reads._consume_normalised.multiply.wgmma_wait",
    ),
    _WGMMA,
) | dict.fromkeys(
    (
        "direct.launch._kernel._load.commit_smem",
        "direct.launch._kernel._multiply.group.commit_smem",
        "ring.Ring.fill.commit_smem", "ring.Ring.fill.barrier_arrive",
    ),
    _REGISTERS,
) | dict.fromkeys(
    (
        "ring_reads._consume_fragments.load.barrier_wait",
        "ring_reads._consume_fragments.multiply.wgmma_wait",
        "ring_reads._consume_fragments.multiply.barrier_arrive",
    ),
    _SKEWED,
) | {
    "direct.launch._kernel._load.barrier_wait":
        "of the emulator alone, which sees no race with a copy of the reader's own",
}


@dataclasses.dataclass(frozen=True)
class Site:
  """A call that a mutant lacks.

  Attributes:
    module: of pallas_kernels.
    name: module, function and call, with a number where a function has several.
    line, column: of the call's statement.
  """

  module: str
  name: str
  line: int
  column: int


@dataclasses.dataclass(frozen=True)
class Verdict:
  """What became of a mutant.

  Attributes:
    name: of its site.
    killed: "race", "wrong", "error", "hang", or None.
    reached: whether a problem came to the site at all.
    case: that killed it.
  """

  name: str
  killed: str | None
  reached: bool
  case: str | None

  @property
  def outcome(self) -> str:
    if self.killed:
      return f"killed by {self.case}: {self.killed}"
    return "survives" if self.reached else "not run in emulation"


def sites() -> list[Site]:
  """Every site, in the order of the files."""
  found = []
  for path in sorted(KERNELS.glob("*.py")):
    finder = _Finder(path.stem)
    finder.visit(ast.parse(path.read_text(encoding="utf-8")))
    found += finder.found
  return found


class _Finder(ast.NodeVisitor):
  """Collects the statements that are calls of CALLS."""

  def __init__(self, module: str):
    self.found: list[Site] = []
    self._module = module
    self._scope: list[str] = []
    self._counts: collections.Counter[str] = collections.Counter()

  def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
    self._scope.append(node.name)
    self.generic_visit(node)
    self._scope.pop()

  visit_ClassDef = visit_FunctionDef

  def visit_Expr(self, node: ast.Expr) -> None:
    if (name := called(node)) in CALLS:
      name = ".".join((self._module, *self._scope, name))
      self._counts[name] += 1
      if self._counts[name] > 1:
        name = f"{name}#{self._counts[name]}"
      self.found.append(Site(self._module, name, node.lineno, node.col_offset))
    self.generic_visit(node)


def called(node: ast.Expr) -> str | None:
  """The name of the method that the statement calls, or None."""
  call = node.value
  if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
    return call.func.attr
  return None


def judge(site: Site | None, patience_s: float) -> Verdict:
  """Runs the cases in a process, without the call at the site.

  A case hangs if nothing is heard of its process for `patience_s`.
  """
  environment = dict(os.environ, JAX_PLATFORMS="cpu", JAXGEMM_CACHE_DIR="")
  name = "none"
  command = [sys.executable, "-m", "experiments.mutant_cases"]
  if site is not None:
    name = site.name
    command.append(f"{site.module}:{site.line}:{site.column}")
  with tempfile.TemporaryFile("w+") as errors:
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True,
        cwd=KERNELS.parent,
    ) as process:
      heard: queue.Queue[str | None] = queue.Queue()
      threading.Thread(target=_listen, args=(process.stdout, heard), daemon=True).start()
      lines = []
      try:
        while (line := heard.get(timeout=patience_s)) is not None:
          lines.append(line)
      except queue.Empty:
        process.kill()
        return Verdict(name, "hang", True, lines[-1] if lines else None)
    errors.seek(0)
    try:
      return Verdict(name, **json.loads(lines[-1]))
    except (IndexError, json.JSONDecodeError):
      raise RuntimeError(f"{name}: {errors.read()[-2000:]}") from None


def _listen(stream: IO[str], heard: queue.Queue[str | None]) -> None:
  """Hands on the lines of a stream, and None at its end."""
  for line in stream:
    if line.strip():
      heard.put(line.strip())
  heard.put(None)


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments: {argv[1:]}")
  chosen = [site for site in sites() if _SITES.value in site.name]
  if not chosen:
    raise app.UsageError(f"--sites={_SITES.value} is part of no site's name")
  if (whole := judge(None, _PATIENCE.value)).killed:
    print(f"the kernels as they are: {whole.outcome}", file=sys.stderr)
    sys.exit(1)
  workers = max(1, os.cpu_count() or 1)
  verdicts = []
  with (
      concurrent.futures.ThreadPoolExecutor(workers) as pool,
      progress.bar(total=len(chosen), unit="mutant") as shown,
  ):
    for verdict in pool.map(lambda site: judge(site, _PATIENCE.value), chosen):
      verdicts.append(verdict)
      shown.update()
  folder = common_flags.output_folder()
  facts = dict(
      commit=provenance.commit(), date=provenance.date(),
      command=provenance.command("experiments.mutants"),
  )
  path = folder / "mutants.jsonl"
  path.write_text("".join(
      json.dumps(
          dataclasses.asdict(v) | {"reason": SURVIVORS.get(v.name)} | facts
      ) + "\n"
      for v in verdicts
  ))
  print(tabulate.tabulate(
      [(v.name, v.outcome, "" if v.killed else SURVIVORS.get(v.name, "UNEXPLAINED"))
       for v in verdicts],
      ["mutant", "", "why it may"],
  ))
  killed = sum(v.killed is not None for v in verdicts)
  print(f"{killed} of {len(verdicts)} killed; rows: {path}")
  if failed := unexplained(verdicts):
    print("\n".join(failed), file=sys.stderr)
    sys.exit(1)


def unexplained(verdicts: Sequence[Verdict]) -> list[str]:
  """What survives without a reason, or is killed in spite of one."""
  found = []
  for verdict in verdicts:
    if (verdict.name in SURVIVORS) == (verdict.killed is not None):
      found.append(f"{verdict.name}: {verdict.outcome}")
  return found


if __name__ == "__main__":
  app.run(main)
