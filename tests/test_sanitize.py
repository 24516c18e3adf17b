"""The program that runs compute-sanitizer: its cases, its command lines, its parser."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
from pathlib import Path
import stat
import sys
import threading
import time

from absl import flags
from absl.testing import flagsaver
import jax
import pytest

from experiments import sanitize, sanitize_cases
from experiments.sanitize import Run
from experiments.sanitize_cases import CASES
from experiments.sanitize_reports import EXPLAINED, Finding, explain, parse
from pallas_kernels import KERNELS, triton

pytestmark = pytest.mark.slow  # The other JAX version need not run them too.

KERNEL = "jaxgemm_persistent_mosaic_gpu_kernel"

# -- Cases -------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_cases_lower_to_their_kernels(name):
  case = CASES[name]
  assert case.reason is None
  if case.kernel == triton.NAME:
    return  # jax-triton compiles for a GPU that is there.
  launch = jax.jit(lambda *x: case.launch(*x))
  module = jax.export.export(launch, platforms=["cuda"])(*case.types).mlir_module()
  assert f"jaxgemm_{case.kernel}" in module


def test_every_kernel_has_cases():
  wanted = {*KERNELS, "cotangents", "losses"}
  if triton.missing_package() is not None:
    wanted.remove(triton.NAME)
  assert {case.kernel for case in CASES.values()} == wanted


@pytest.mark.parametrize(
    "name", [name for name in CASES if "registers" in name or name == "direct odd"]
)
def test_register_loads_end_with_their_arrays(name):
  """Though their rows begin anywhere; else initcheck reports what lies behind."""
  for x in CASES[name].types:
    assert x.dtype.itemsize * x.shape[-1] % 16
    assert x.dtype.itemsize * x.size % 16 == 0


def test_operands_are_those_of_the_case():
  for name in ("persistent packed", "scaled blocks", "losses", "int8"):
    found = sanitize_cases.operands(CASES[name])
    wanted = jax.tree.leaves(CASES[name].types)
    for x, y in zip(jax.tree.leaves(found), wanted, strict=True):
      assert (x.shape, x.dtype) == (y.shape, y.dtype)


def test_without_a_gpu_there_is_nothing_to_watch():
  if jax.default_backend() == "gpu":
    pytest.skip("there is one")
  with pytest.raises(SystemExit, match="Hopper"):
    sanitize_cases.main([])


# -- Reports -----------------------------------------------------------------------

SANITIZER = "========= COMPUTE-SANITIZER"
CLEAN = """========= COMPUTE-SANITIZER
case: blocked
case: pipelined
all cases ran
========= ERROR SUMMARY: 0 errors
"""
MEMCHECK = f"""========= COMPUTE-SANITIZER
case: blocked
case: persistent nn
========= Invalid __global__ write of size 4 bytes
=========     at {KERNEL}+0x50
=========     by thread (0,0,0) in block (0,0,0)
=========     Address 0x710fdca00001 is misaligned
=========     and is inside the nearest allocation at 0x710fdca00000 of size 4 bytes
=========
========= Invalid __global__ write of size 4 bytes
=========     at {KERNEL}+0x90
=========     by thread (1,0,0) in block (0,0,0)
=========     Address 0x87654320 is out of bounds
=========
case: halves
========= Invalid __shared__ read of size 16 bytes
=========     at helper(int *, int *)+0xb0 in kernel.cu:39
=========     by thread (0,0,0) in block (0,0,0)
=========         Device Frame: {KERNEL}+0x30 in kernel.cu:44
all cases ran
========= ERROR SUMMARY: 3 errors
"""
RACECHECK = f"""========= COMPUTE-SANITIZER
case: split_k
========= Error: Race reported between Write access at {KERNEL}+0x90 in kernel.cu:41
=========     and Read access at {KERNEL}+0x100 in kernel.cu:51 [508 hazards]
=========
all cases ran
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
SYNCCHECK = f"""========= COMPUTE-SANITIZER
case: direct
========= Barrier error detected. Divergent thread(s) in warp
=========     at {KERNEL}+0xf0
=========     by thread (37,0,0) in block (0,0,0)
========= Warning: Detected overflow of tracked cuda::barrier structures.
all cases ran
========= ERROR SUMMARY: 1 error
"""
INITCHECK = f"""========= COMPUTE-SANITIZER
case: x6
========= Uninitialized __global__ memory read of size 4 bytes
=========     at loop_convert_fusion+0x70
=========     by thread (31,0,0) in block (1,0,0)
========= Uninitialized __global__ memory read of size 4 bytes
=========     at {KERNEL}+0x70
=========     by thread (31,0,0) in block (1,0,0)
all cases ran
========= ERROR SUMMARY: 2 errors
"""
CRASHED = """========= COMPUTE-SANITIZER
case: blocked
========= Error: process didn't terminate successfully
=========     The application may have hit an error.
========= Target application returned an error
"""
REDUCE = "loop_add_fusion"  # XLA's, of what split_k wrote.
UNWRITTEN = f"""========= Uninitialized __global__ memory read of size 8 bytes
=========     at {REDUCE}+0x2e0
=========     by thread (0,0,0) in block (22,0,0)
=========     Address 0x7f4a71400280
"""
WARNING = (
    "Warning: Error buffer overflow has been detected. Some records have been dropped"
)
DROPPED = f"========= {WARNING}\n"
TRANSPOSE = "wrapped_transpose"
READ_BY_XLA = f"""========= Uninitialized __global__ memory read of size 4 bytes
=========     at {TRANSPOSE}+0x190
=========     by thread (96,0,0) in block (10,0,0)
=========     Address 0x7f86b5278620
"""
ANOTHER = f"""========= Uninitialized __global__ memory read of size 16 bytes
=========     at {KERNEL}+0x70
=========     by thread (31,0,0) in block (1,0,0)
"""
WRITE = "Invalid __global__ write of size 4 bytes"
READ = "Uninitialized __global__ memory read of size 8 bytes"
READ_4 = READ.replace("8 bytes", "4 bytes")
NO_SUMMARY, ENDED_EARLY = "the tool gave no summary", "the cases ended early"
SKIPPED = "224768 errors were skipped (error buffer overflow)."
NOT_PRINTED = (
    "ERROR SUMMARY: 24 errors were not printed. Use --print-limit option to adjust the"
    " number of printed errors"
)


def ended(output: str, case: str, said: str) -> str:
  """The output with what was said of a case, and at the end that errors were skipped."""
  return output.replace(f"case: {case}\n", f"case: {case}\n{said}") + (
      f"========= {SKIPPED}\n")


@pytest.mark.parametrize(
    ("tool", "output", "findings"),
    [
        ("memcheck", CLEAN, []),
        ("memcheck", MEMCHECK, [
            Finding("persistent nn", KERNEL, WRITE, 2),
            Finding("halves", KERNEL, "Invalid __shared__ read of size 16 bytes"),
        ]),
        ("racecheck", RACECHECK, [Finding(
            "split_k", KERNEL,
            "Error: Race reported between Write access and Read access", 508,
        )]),
        ("synccheck", SYNCCHECK, [
            Finding(
                "direct", KERNEL, "Barrier error detected. Divergent thread(s) in warp"),
            Finding(
                "direct", None,
                "Warning: Detected overflow of tracked cuda::barrier structures."),
        ]),
        ("initcheck", INITCHECK, [
            Finding("x6", "loop_convert_fusion", READ_4), Finding("x6", KERNEL, READ_4),
        ]),
        ("memcheck", INITCHECK, [Finding("x6", KERNEL, READ_4)]),  # Of our kernel alone.
        ("memcheck", CRASHED, [
            Finding("blocked", None, "Error: process didn't terminate successfully"),
            Finding("blocked", None, "Target application returned an error"),
            Finding("blocked", None, NO_SUMMARY), Finding("blocked", None, ENDED_EARLY),
        ]),
        ("memcheck", "", [
            Finding(None, None, NO_SUMMARY), Finding(None, None, ENDED_EARLY),
        ]),
        # In a form that is not known.
        ("memcheck", CLEAN.replace("0 errors", "7 errors"), [
            Finding(None, None, "a summary of 7, and no report of any"),
        ]),
        ("memcheck", CLEAN + f"========= {NOT_PRINTED}\n", [
            Finding(None, None, NOT_PRINTED),
        ]),
        ("initcheck", ended(CLEAN, "blocked", DROPPED), [
            Finding("blocked", None, WARNING), Finding("blocked", None, SKIPPED),
        ]),
        ("initcheck", ended(INITCHECK, "x6", f"{DROPPED}case: x9\n{DROPPED}case: x3\n"), [
            Finding("x6", None, WARNING), Finding("x9", None, WARNING),
            Finding("x3", "loop_convert_fusion", READ_4), Finding("x3", KERNEL, READ_4),
            Finding("x9", None, SKIPPED),
        ]),
        ("initcheck", ended(CLEAN, "blocked", ""), [Finding(None, None, SKIPPED)]),
    ],
    ids=["clean", "memcheck", "racecheck", "synccheck", "initcheck", "of ours alone",
         "crashed", "nothing", "unknown", "not printed", "skipped", "skipped twice",
         "skipped nowhere"],
)
def test_reports_become_findings(tool, output, findings):
  assert parse(tool, output) == findings


def test_rows_and_their_table():
  rows = sanitize.rows_of(
      "memcheck", ["persistent nn", "halves", "blocked", "x3"],
      parse("memcheck", MEMCHECK), MEMCHECK,
  )
  assert [len(row.findings) for row in rows] == [1, 1, 0, 0]
  assert [row.ran for row in rows] == [True, True, True, False]
  rows += sanitize.rows_of("racecheck", ["blocked"], parse("racecheck", ""), "")
  lines = [line.split() for line in sanitize.table(rows).splitlines()]
  assert lines[0] == ["case", "memcheck", "racecheck"]
  assert lines[2:] == [
      ["persistent", "nn", "2", "-"], ["halves", "1", "-"], ["blocked", "0", "-"],
      ["x3", "-", "-"], ["(none)", "-", "2"],
  ]
  line = json.loads(rows[0].to_json({"commit": "abc"}))
  assert line["commit"] == "abc" and line["findings"][0]["what"] == WRITE


def reasons(tool: str, *findings: Finding) -> list[bool]:
  return [finding.reason is not None for finding in explain(tool, findings)]


def test_what_xla_reads_of_ours_is_explained():
  case = "split_lhs swap"
  for what in (READ, READ_4, READ.replace("8 bytes", "16 bytes")):
    assert reasons("initcheck", Finding(case, TRANSPOSE, what)) == [True]
    # Of ours, wherever that stands in the name; or of nobody known.
    for kernel in (f"the_{KERNEL}", KERNEL, None):
      assert reasons("initcheck", Finding(case, kernel, what)) == [False]
    for tool in set(sanitize.TOOLS) - {"initcheck"}:
      assert reasons(tool, Finding(case, TRANSPOSE, what)) == [False]
  assert reasons("initcheck", Finding(case, TRANSPOSE, WRITE)) == [False]


@pytest.mark.parametrize("overflow", [WARNING, SKIPPED])
def test_an_overflow_is_explained_where_others_are(overflow):
  explained = Finding("split_k", REDUCE, READ)
  for finding, wanted in (
      (Finding("split_k", None, overflow), True),
      (Finding("split_k fused", None, overflow), False),
      (Finding("split_k", None, "Warning: something else"), False),
  ):
    assert reasons("initcheck", finding, explained) == [wanted, True]
  finding = Finding("split_k", None, overflow)
  assert reasons("initcheck", finding) == [False]
  assert reasons("racecheck", finding, explained) == [False, False]
  # That the case ended early, and why that is no matter, says nothing of an overflow.
  early = Finding("split_k", None, ENDED_EARLY, reason="it ran once more")
  assert reasons("initcheck", finding, early) == [False, True]
  nowhere = [Finding(None, None, overflow), dataclasses.replace(explained, case=None)]
  assert reasons("initcheck", *nowhere) == [False, True]


def test_an_overflow_fails_no_later_case():
  """As one of 256 reports of XLA's kernel did, and its count at the end."""
  said = 256 * READ_BY_XLA + DROPPED
  output = ended(CLEAN.replace("case: b", "case: split_lhs swap\ncase: b"),
                 "split_lhs swap", said)
  names = ["split_lhs swap", "blocked", "pipelined"]
  rows = sanitize.rows_of("initcheck", names, parse("initcheck", output), output)
  assert sanitize.failures(rows) == []
  assert [sum(finding.count for finding in row.findings) for row in rows] == [258, 0, 0]
  assert "0 (258 explained)" in sanitize.table(rows)


def test_the_table_shows_apart_what_is_explained():
  case = "split_k"
  found = [Finding(case, REDUCE, READ, 256), Finding(case, None, WARNING)]
  for extra, cell in (
      ([], "0 (257 explained)"), ([Finding(case, KERNEL, READ, 3)], "3 (257 explained)"),
  ):
    rows = sanitize.rows_of("initcheck", [case], found + extra, f"case: {case}\n")
    assert cell in sanitize.table(rows)
    assert len(sanitize.failures(rows)) == len(extra)


# -- Command lines and runs --------------------------------------------------------

NEW = """
  --check-tensor-ops arg (=no)          Enables checks of cp.async.bulk.tensor
  --destroy-on-device-error arg (=context)
  --kernel-name arg                     key1=val1,key2=val2,...
  --print-limit arg (=100)
  --show-backtrace arg (=yes)
  --report-api-errors arg (=extended)
  --initcheck-track-filtered-global-memory arg (=yes)
"""
OLD = """
  --kernel-regex arg                    key1=val1,key2=val2,...
  --print-limit arg (=100)
"""


@pytest.mark.parametrize(
    ("usage", "tool", "given", "not_given"),
    [
        (NEW, "memcheck", ["--check-tensor-ops yes", "--report-api-errors no",
                           "--kernel-name kernel_substring=jaxgemm"], ["regex"]),
        (NEW, "initcheck", ["--kernel-name kernel_substring=jaxgemm",
                            "--destroy-on-device-error kernel"], ["tensor-ops"]),
        (OLD, "racecheck", ["--kernel-regex kernel_substring=jaxgemm"], ["backtrace"]),
        (OLD, "initcheck", ["--print-limit 100000"], ["kernel_substring"]),
    ],
)
def test_a_command_line_has_what_the_version_knows(usage, tool, given, not_given):
  line = " ".join(sanitize.command("the-sanitizer", usage, tool, ["blocked", "x6"]))
  assert line.startswith(f"the-sanitizer --tool {tool} ")
  assert line.endswith(f"{sys.executable} -m experiments.sanitize_cases blocked x6")
  assert all(x in line for x in given) and not any(x in line for x in not_given)


HANGS, SLOW, DIES, DIES_IN_COMPANY = "hangs", "slow", "dies", "dies in company"


def pretend(folder: Path, monkeypatch, says: dict[str, str] | None = None) -> None:
  """Puts a compute-sanitizer on PATH, and what it says, or does, in each case."""
  path = folder / "compute-sanitizer"
  path.write_text(f"""#!{sys.executable} -SE
import fcntl, os, sys, time
if "--help" in sys.argv:
  print({NEW!r})
  sys.exit()
print("========= COMPUTE-SANITIZER")
for case in sys.argv[sys.argv.index("experiments.sanitize_cases") + 1:]:
  print("case:", case, flush=True)
  said = {says or {}!r}.get(case, "")
  if said == {DIES!r}:
    sys.exit(1)
  if said == {DIES_IN_COMPANY!r}:
    if len(sys.argv) > sys.argv.index("experiments.sanitize_cases") + 2:
      sys.exit(1)
    said = ""
  if said == {HANGS!r}:
    if os.fork():  # The process that is watched hangs, too.
      time.sleep(60)
    fcntl.flock(os.open({str(folder / "lock")!r}, os.O_CREAT | os.O_RDWR), fcntl.LOCK_EX)
    print("the lock is held", flush=True)
    time.sleep(60)
  if said == {SLOW!r}:
    time.sleep(0.3)
    said = ""
  print(said, end="")
print("all cases ran")
print("========= ERROR SUMMARY: 0 errors")
""")
  path.chmod(path.stat().st_mode | stat.S_IXUSR)
  monkeypatch.setenv("PATH", str(folder))


def run(folder: Path, *arguments: str) -> list[dict]:
  with flagsaver.flagsaver():
    flags.FLAGS(["program", f"--output={folder}", *arguments])
    sanitize.main(["program"])
  return rows_in(folder)


def rows_in(folder: Path) -> list[dict]:
  rows = (folder / "sanitize.jsonl").read_text().splitlines()
  return [json.loads(row) for row in rows]


def names_with(part: str) -> list[str]:
  return [name for name in CASES if part in name]


@pytest.mark.parametrize("count", [1, 5, 6, 7, 13, 67])
def test_cases_are_dealt_in_turn(count):
  names = [str(i) for i in range(count)]
  runs = sanitize.deal(names)
  assert sorted(name for cases in runs for name in cases) == sorted(names)
  sizes = [len(cases) for cases in runs]
  assert max(sizes) - min(sizes) <= 1 and max(sizes) <= sanitize.CASES_OF_RUN
  assert len(runs) == -(-count // sanitize.CASES_OF_RUN)
  for first in range(count - len(runs) + 1):  # Neighbours are in several runs.
    neighbours = set(names[first : first + len(runs)])
    assert all(len(neighbours & set(cases)) == 1 for cases in runs)
  for cases in runs:
    assert list(cases) == sorted(cases, key=int)


def test_a_run_without_findings(tmp_path, monkeypatch, capsys):
  pretend(tmp_path, monkeypatch)
  rows = run(tmp_path, "--cases=pipelined")
  names = names_with("pipelined")
  assert [(row["tool"], row["case"]) for row in rows] == [
      (tool, name) for tool in sanitize.TOOLS for name in names
  ]
  assert not any(row["findings"] for row in rows) and all(row["ran"] for row in rows)
  assert all(row["command"] and row["commit"] and row["date"] for row in rows)
  out = capsys.readouterr().out
  assert "pipelined" in out and "explained" not in out
  for tool in sanitize.TOOLS:
    log = (tmp_path / f"sanitize_{tool}.log").read_text()
    assert all(f"case: {name}\n" in log for name in names)


def test_rows_and_logs_are_in_order_whichever_run_is_over_first(tmp_path, monkeypatch):
  names = names_with("persistent")
  runs = sanitize.deal(names)
  assert len(runs) > 3
  pretend(tmp_path, monkeypatch, {runs[0][0]: SLOW, runs[2][0]: SLOW})
  rows = run(tmp_path, "--tools=memcheck", "--cases=persistent", f"--at_once={len(runs)}")
  assert [row["case"] for row in rows] == names
  log = (tmp_path / "sanitize_memcheck.log").read_text().splitlines()
  assert [line.removeprefix("case: ") for line in log if line.startswith("case: ")] == [
      name for cases in runs for name in cases
  ]


@pytest.mark.parametrize(("arguments", "cores"), [(["--at_once=2"], 4), ([], 2)])
def test_so_many_runs_at_once_the_slowest_first(arguments, cores, tmp_path, monkeypatch):
  pretend(tmp_path, monkeypatch)
  monkeypatch.setattr(os, "cpu_count", lambda: cores)
  lock, pairs = threading.Lock(), threading.Barrier(2, timeout=10)
  tools, now, most = [], 0, 0

  def watch(tool, line, minutes, stop):
    nonlocal now, most
    with lock:
      assert line[line.index("--tool") + 1] == tool
      tools.append(tool)
      now += 1
      most = max(most, now)
    pairs.wait()  # Until there are two.
    time.sleep(0.02)  # In which a third could begin.
    with lock:
      now -= 1
    cases = line[line.index("experiments.sanitize_cases") + 1 :]
    return [], "".join(f"case: {case}\n" for case in cases)

  monkeypatch.setattr(sanitize, "watch", watch)
  assert len(sanitize.deal(names_with("blocked"))) == 1
  given = sanitize.SLOWEST_FIRST[::-1]
  rows = run(tmp_path, "--cases=blocked", f"--tools={','.join(given)}", *arguments)
  assert most == 2
  assert set(tools[:2]) == {"racecheck", "memcheck"}
  assert sorted(tools) == sorted(given) == sorted(sanitize.TOOLS)
  assert list(dict.fromkeys(row["tool"] for row in rows)) == list(given)


def test_what_is_over_is_written_while_others_run(tmp_path):
  first, second = (Run("memcheck", cases) for cases in (("blocked", "x6"), ("direct",)))
  said = {first: None, second: ([], "case: direct")}
  assert [row.case for row in sanitize.write(tmp_path, said, {})] == ["direct"]
  assert [row["case"] for row in rows_in(tmp_path)] == ["direct"]
  said[first] = ([], "case: blocked\ncase: x")  # Ended in the middle of a line.
  rows = sanitize.write(tmp_path, said, {})
  assert [row["case"] for row in rows_in(tmp_path)] == ["blocked", "direct", "x6"]
  assert [row.case for row in rows if row.ran] == ["blocked", "direct"]
  log = (tmp_path / "sanitize_memcheck.log").read_text()
  assert log == "case: blocked\ncase: x\ncase: direct\n"


def test_a_run_with_findings_fails(tmp_path, monkeypatch, capsys):
  said = "".join(MEMCHECK.splitlines(keepends=True)[3:12])
  pretend(tmp_path, monkeypatch, {"persistent nn": said})
  with pytest.raises(SystemExit) as exit_info:
    run(tmp_path, "--tools=memcheck", "--cases=persistent n")
  assert exit_info.value.code == 1
  assert capsys.readouterr().err.endswith(
      f"memcheck, persistent nn: 2 x {WRITE} ({KERNEL})\n")
  assert [row["case"] for row in rows_in(tmp_path) if row["findings"]] == [
      "persistent nn"]


def test_explained_findings_do_not_fail(tmp_path, monkeypatch, capsys):
  pretend(tmp_path, monkeypatch, {"split_k": 2 * UNWRITTEN + DROPPED})
  rows = run(tmp_path, "--tools=initcheck", "--cases=split_k")
  found = [finding for row in rows for finding in row["findings"]]
  assert [(x["case"], x["count"]) for x in found] == [("split_k", 2), ("split_k", 1)]
  explanation = EXPLAINED[0]
  assert found[0]["reason"] == explanation.reason and found[1]["reason"]
  out = capsys.readouterr().out
  assert "0 (3 explained)" in out and f"explained: {explanation.reason}\n" in out


@pytest.mark.parametrize(
    ("tool", "said", "complaint"),
    [
        ("initcheck", {"split_k": UNWRITTEN + ANOTHER},
         f"initcheck, split_k: 1 x {READ.replace('8', '16')} ({KERNEL})"),
        ("memcheck", {"split_k": UNWRITTEN.replace(REDUCE, KERNEL)},
         f"memcheck, split_k: 1 x {READ} ({KERNEL})"),
        ("initcheck", {"split_k": UNWRITTEN, "split_k swap": DROPPED},
         f"initcheck, split_k swap: 1 x {WARNING} (the run)"),
    ],
    ids=["another", "another tool", "dropped elsewhere"],
)
def test_unexplained_findings_beside_explained_ones_fail(
    tool, said, complaint, tmp_path, monkeypatch, capsys
):
  pretend(tmp_path, monkeypatch, said)
  with pytest.raises(SystemExit) as exit_info:
    run(tmp_path, f"--tools={tool}", "--cases=split_k")
  assert exit_info.value.code == 1
  assert capsys.readouterr().err.splitlines()[-1:] == [complaint]


def test_what_a_run_lost_runs_once_more(tmp_path, monkeypatch, capsys):
  names = names_with("persistent")
  runs = sanitize.deal(names)
  before, dying, *behind = runs[1]
  assert len(behind) > 1
  pretend(tmp_path, monkeypatch, {dying: DIES_IN_COMPANY})
  bars, bar = [], sanitize.progress.bar
  monkeypatch.setattr(
      sanitize.progress, "bar", lambda **given: bars.append(bar(**given)) or bars[-1])
  rows = run(tmp_path, "--tools=racecheck", "--cases=persistent")
  assert [row["case"] for row in rows] == names and all(row["ran"] for row in rows)
  assert [row["case"] for row in rows if row["findings"]] == [dying]
  found = rows[names.index(dying)]["findings"]
  assert [x["what"] for x in found] == [NO_SUMMARY, ENDED_EARLY]
  assert all("second" in x["reason"] for x in found)
  out, err = capsys.readouterr()
  cells = {line[:30].strip(): line[30:].strip() for line in out.splitlines()}
  assert cells[dying] == "0 (2 explained)"
  assert all(cells[name] == "0" for name in set(names) - {dying})
  assert f"explained: {found[0]['reason']}\n" in out
  # The log: all first runs, then those of what one of them has lost, each by itself.
  outputs = (tmp_path / "sanitize_racecheck.log").read_text().split(f"{SANITIZER}\n")[1:]
  cases = [tuple(sanitize._begun(output)) for output in outputs]
  assert cases == [
      runs[0], (before, dying), *runs[2:], (dying,), *((name,) for name in behind)]
  assert bars[0].n == bars[0].total == len(runs) + 1 + len(behind)


def test_a_tool_that_dies_again_fails(tmp_path, monkeypatch, capsys):
  names = names_with("persistent")
  runs = sanitize.deal(names)
  dying = runs[1][0]
  pretend(tmp_path, monkeypatch, {dying: DIES})
  with pytest.raises(SystemExit) as exit_info:
    run(tmp_path, "--tools=racecheck", "--cases=persistent")
  assert exit_info.value.code == 1
  out, err = capsys.readouterr()
  assert err.splitlines()[-2:] == [
      f"racecheck, {dying}: 1 x {NO_SUMMARY} (the run)",
      f"racecheck, {dying}: 1 x {ENDED_EARLY} (the run)",
  ]
  rows = rows_in(tmp_path)
  assert [row["case"] for row in rows] == names and all(row["ran"] for row in rows)
  cells = {line[:30].strip(): line[30:].split() for line in out.splitlines()}
  assert cells[dying] == ["2"]
  assert all(cells[name] == ["0"] for name in set(names) - {dying})
  log = (tmp_path / "sanitize_racecheck.log").read_text()
  assert log.splitlines().count(f"case: {dying}") == 2  # And not once more.


@pytest.mark.parametrize(("at_once", "wanted"), [(8, 2), (3, 1)])
def test_a_quarter_as_many_second_runs_at_once(at_once, wanted, tmp_path, monkeypatch):
  pretend(tmp_path, monkeypatch)
  names = names_with("blocked")
  lock, together = threading.Lock(), threading.Barrier(wanted, timeout=10)
  second, now, most = [], 0, 0

  def watch(tool, line, minutes, stop):
    nonlocal now, most
    case, *others = line[line.index("experiments.sanitize_cases") + 1 :]
    said = f"case: {case}\n"
    if others:
      time.sleep(0.02)  # In which a second run could begin.
      assert not second
      return [Finding(case, None, ENDED_EARLY)], said
    with lock:
      second.append((tool, case))
      now += 1
      most = max(most, now)
    together.wait()
    time.sleep(0.01)  # In which more could begin.
    with lock:
      now -= 1
    return [], said

  monkeypatch.setattr(sanitize, "watch", watch)
  assert len(sanitize.deal(names)) == 1
  run(tmp_path, "--cases=blocked", "--tools=memcheck,initcheck", f"--at_once={at_once}")
  assert most == wanted
  assert sorted(second) == sorted(
      (tool, name) for tool in ("memcheck", "initcheck") for name in names)


def early(case: str | None, *findings: Finding) -> sanitize.Said:
  """What comes of a run that ended early in a case, where it was watched from "x3" on."""
  begun = ["x3", *([case] if case != "x3" else [])] if case else []
  return (
      [*findings, Finding(case, None, NO_SUMMARY), Finding(case, None, ENDED_EARLY)],
      "".join(f"case: {name}\n" for name in begun),
  )


def test_second_runs_begin_with_the_case_that_was_running():
  run = Run("memcheck", ("x3", "x6", "x9"))
  for case, lost in (("x3", ["x3", "x6", "x9"]), ("x6", ["x6", "x9"])):
    runs = sanitize.second_runs({run: early(case)})
    assert runs == [Run("memcheck", (name,), run) for name in lost]
  assert sanitize.second_runs({run: ([Finding("x6", KERNEL, WRITE)], "case: x3\n")}) == []
  slow = [Finding("x3", None, "not over in 4 min")]
  assert len(sanitize.second_runs({run: (slow, "case: x3\n")})) == 3
  other = Run("memcheck", ("x3",))
  (second,) = sanitize.second_runs({other: early("x3")})
  assert second != other and second.cases == other.cases
  # A tool under which no case began has no second runs; what it began elsewhere, three.
  assert sanitize.second_runs({run: early(None)}) == []
  assert len(sanitize.second_runs({run: early(None), other: ([], "case: x3\n")})) == 3
  elsewhere = dataclasses.replace(other, tool="racecheck")
  assert sanitize.second_runs({run: early(None), elsewhere: ([], "case: x3\n")}) == []


def test_an_early_end_is_explained_by_a_second_run_that_ended_well():
  run = Run("racecheck", ("x3", "x6", "x9"))
  second, behind = (Run("racecheck", (name,), run) for name in ("x6", "x9"))
  hazard, other = Finding("x6", KERNEL, "a hazard", 3), Finding("x6", KERNEL, "another")
  ends = Finding("x6", None, "Target application returned an error")
  before = Finding("x3", KERNEL, "a hazard")
  over = {run: early("x6", before, hazard, other, ends)}
  assert sanitize.settle(over) == over[run][0]
  # What the second says again counts once; what only the first said remains.
  for again in (hazard, dataclasses.replace(hazard, count=5)):
    over |= {behind: early("x9"), second: ([again], "case: x6\n")}
    found = sanitize.settle(over)
    assert found[:3] == [before, other, ends] and found[-1] == again
    assert [x.what for x in found if x.reason] == [NO_SUMMARY, ENDED_EARLY]
    assert [x.case for x in found if x.reason] == ["x6", "x6"]
    assert found[5:-1] == early("x9")[0]  # Not explained.
  # A second run that ended early in its case, before it, or at its very end.
  for again in (early("x6"), early(None), ([Finding("x6", None, NO_SUMMARY)], "")):
    found = sanitize.settle(over | {second: again})
    assert not any(x.reason for x in found)
    assert [x.what for x in found if x.case == "x6"].count(ENDED_EARLY) == 1


def test_an_early_end_before_the_first_case_is_explained_by_its_second_run():
  run = Run("racecheck", ("x3", "x6"))
  over = {run: early(None), Run("racecheck", ("x6",), run): ([], "case: x6\n")}
  assert not any(x.reason for x in sanitize.settle(over))
  over[Run("racecheck", ("x3",), run)] = ([], "case: x3\n")
  assert len(sanitize.settle(over)) == 2 and all(x.reason for x in sanitize.settle(over))
  rows = sanitize.rows_of("racecheck", run.cases, sanitize.settle(over), "")
  assert [row.case for row in rows if row.findings] == [None]
  assert all(x.reason for x in rows[-1].findings)


def test_cases_that_never_began_fail_by_themselves():
  rows = sanitize.rows_of("initcheck", ["x3", "x6", "x9"], [], "case: x6\n")
  rows += sanitize.rows_of("memcheck", ["x6", "x9"], [], "case: x6\n")
  assert sanitize.failures(rows) == [
      "initcheck, never began: x3, x9", "memcheck, never began: x9"]


def test_a_run_that_is_never_over_fails(tmp_path, monkeypatch, capsys):
  case = "blocked fused"
  assert names_with(case) == [case]
  pretend(tmp_path, monkeypatch, {case: HANGS})
  monkeypatch.setattr(sanitize, "_MINUTES", type("flag", (), {"value": 0.01}))
  with pytest.raises(SystemExit):
    run(tmp_path, "--tools=synccheck", f"--cases={case}")
  err = capsys.readouterr().err
  assert f"synccheck, {case}: 1 x not over in 0.01 min (the run)" in err
  log = (tmp_path / "sanitize_synccheck.log").read_text()
  assert log.count("the lock is held") == 2  # A second run of one case is another run.
  with (tmp_path / "lock").open() as file:
    await_lock(file)  # What the tool had started is gone, too.


def test_an_interrupted_program_waits_for_no_run(tmp_path, monkeypatch):
  pretend(tmp_path, monkeypatch, {"blocked": HANGS})

  def interrupted(jobs):
    while not (tmp_path / "lock").exists():
      time.sleep(0.01)
    raise KeyboardInterrupt

  monkeypatch.setattr(sanitize.concurrent.futures, "as_completed", interrupted)
  watch, begun = sanitize.watch, []
  monkeypatch.setattr(sanitize, "watch", lambda *x: (begun.append(x), watch(*x))[1])
  start = time.monotonic()
  with pytest.raises(KeyboardInterrupt):
    run(tmp_path, "--cases=blocked", "--at_once=1", "--tools=memcheck,initcheck")
  assert time.monotonic() - start < 30
  assert len(begun) == 1  # The other does not begin.
  with (tmp_path / "lock").open() as file:
    await_lock(file)


def await_lock(file) -> None:
  """Returns when nobody holds the lock of a file; fails if that takes too long."""
  for _ in range(500):
    try:
      return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      time.sleep(0.01)
  raise AssertionError("a process of the tool is still there")


def test_without_the_sanitizer(tmp_path, monkeypatch):
  monkeypatch.setenv("PATH", str(tmp_path))
  monkeypatch.setenv("CUDA_HOME", str(tmp_path))
  monkeypatch.setattr(sanitize, "_DEFAULT_ROOT", str(tmp_path))
  with pytest.raises(SystemExit, match="neither on PATH nor under the CUDA toolkit"):
    with flagsaver.flagsaver():
      sanitize.main(["program"])
  (tmp_path / "bin").mkdir()
  pretend(tmp_path / "bin", monkeypatch)
  monkeypatch.setenv("PATH", os.devnull)
  assert sanitize.find_sanitizer() == str(tmp_path / "bin" / "compute-sanitizer")
