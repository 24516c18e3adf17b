"""The program that runs compute-sanitizer: its command lines, its runs, its rows."""

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
import pytest

from experiments import sanitize
from experiments.sanitize import Run
from experiments.sanitize_cases import CASES
from experiments.sanitize_reports import EXPLAINED, Finding
from tests.sanitizer_outputs import (
  ANOTHER,
  DROPPED,
  ENDED_EARLY,
  KERNEL,
  MEMCHECK,
  NO_SUMMARY,
  READ,
  REDUCE,
  SANITIZER,
  UNWRITTEN,
  WARNING,
  WRITE,
)

pytestmark = pytest.mark.slow  # The other JAX version need not run them too.

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
      flags.FLAGS(["program"])
      sanitize.main(["program"])
  (tmp_path / "bin").mkdir()
  pretend(tmp_path / "bin", monkeypatch)
  monkeypatch.setenv("PATH", os.devnull)
  assert sanitize.find_sanitizer() == str(tmp_path / "bin" / "compute-sanitizer")
