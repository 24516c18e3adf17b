"""The program that runs compute-sanitizer: its cases, its command lines, its parser."""

from __future__ import annotations

import json
import os
from pathlib import Path
import stat
import sys

from absl import flags
from absl.testing import flagsaver
import jax
import pytest

from experiments import sanitize, sanitize_cases
from experiments.sanitize import Finding
from experiments.sanitize_cases import CASES
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
WRITE = "Invalid __global__ write of size 4 bytes"


@pytest.mark.parametrize(
    ("output", "findings"),
    [
        (CLEAN, []),
        (MEMCHECK, [
            Finding("persistent nn", KERNEL, WRITE, 2),
            Finding("halves", KERNEL, "Invalid __shared__ read of size 16 bytes"),
        ]),
        (RACECHECK, [Finding(
            "split_k", KERNEL,
            "Error: Race reported between Write access and Read access", 508,
        )]),
        (SYNCCHECK, [
            Finding(
                "direct", KERNEL, "Barrier error detected. Divergent thread(s) in warp"),
            Finding(
                "direct", None,
                "Warning: Detected overflow of tracked cuda::barrier structures."),
        ]),
        (INITCHECK, [  # Of our kernel alone.
            Finding("x6", KERNEL, "Uninitialized __global__ memory read of size 4 bytes"),
        ]),
        (CRASHED, [
            Finding("blocked", None, "Error: process didn't terminate successfully"),
            Finding("blocked", None, "Target application returned an error"),
            Finding("blocked", None, "the tool gave no summary"),
            Finding("blocked", None, "the cases ended early"),
        ]),
        ("", [
            Finding(None, None, "the tool gave no summary"),
            Finding(None, None, "the cases ended early"),
        ]),
        (CLEAN.replace("0 errors", "7 errors"), [  # In a form that is not known.
            Finding(None, None, "a summary of 7, and no report of any"),
        ]),
    ],
    ids=["clean", "memcheck", "racecheck", "synccheck", "initcheck", "crashed", "nothing",
         "unknown"],
)
def test_reports_become_findings(output, findings):
  assert sanitize.parse(output) == findings


def test_rows_and_their_table():
  rows = sanitize.rows_of(
      "memcheck", ["persistent nn", "halves", "blocked", "x3"],
      sanitize.parse(MEMCHECK), MEMCHECK,
  )
  assert [len(row.findings) for row in rows] == [1, 1, 0, 0]
  assert [row.ran for row in rows] == [True, True, True, False]
  rows += sanitize.rows_of("racecheck", ["blocked"], sanitize.parse(""), "")
  lines = [line.split() for line in sanitize.table(rows).splitlines()]
  assert lines[0] == ["case", "memcheck", "racecheck"]
  assert lines[2:] == [
      ["persistent", "nn", "2", "-"], ["halves", "1", "-"], ["blocked", "0", "-"],
      ["x3", "-", "-"], ["(none)", "-", "2"],
  ]
  line = json.loads(rows[0].to_json({"commit": "abc"}))
  assert line["commit"] == "abc" and line["findings"][0]["what"] == WRITE


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
        (OLD, "initcheck", ["--print-limit 1000"], ["kernel_substring"]),
    ],
)
def test_a_command_line_has_what_the_version_knows(usage, tool, given, not_given):
  line = " ".join(sanitize.command("the-sanitizer", usage, tool, ["blocked", "x6"]))
  assert line.startswith(f"the-sanitizer --tool {tool} ")
  assert line.endswith(f"{sys.executable} -m experiments.sanitize_cases blocked x6")
  assert all(x in line for x in given) and not any(x in line for x in not_given)


def pretend(folder: Path, monkeypatch, output: str) -> None:
  """Puts a compute-sanitizer on PATH that prints this, and hangs if it is empty."""
  path = folder / "compute-sanitizer"
  path.write_text(f"""#!{sys.executable}
import sys, time
if "--help" in sys.argv:
  print({NEW!r})
elif not {output!r}:
  time.sleep(60)
print({output!r}, end="")
""")
  path.chmod(path.stat().st_mode | stat.S_IXUSR)
  monkeypatch.setenv("PATH", str(folder))


def run(folder: Path, *arguments: str) -> list[dict]:
  with flagsaver.flagsaver():
    flags.FLAGS(["program", f"--output={folder}", *arguments])
    try:
      sanitize.main(["program"])
    finally:
      rows = (folder / "sanitize.jsonl").read_text().splitlines()
  return [json.loads(row) for row in rows]


def test_a_run_without_findings(tmp_path, monkeypatch, capsys):
  pretend(tmp_path, monkeypatch, CLEAN)
  rows = run(tmp_path, "--cases=pipelined")
  assert {row["tool"] for row in rows} == set(sanitize.TOOLS)
  assert {row["case"] for row in rows} == {name for name in CASES if "pipelined" in name}
  assert not any(row["findings"] for row in rows)
  assert all(row["command"] and row["commit"] and row["date"] for row in rows)
  assert "pipelined" in capsys.readouterr().out
  assert (tmp_path / "sanitize_initcheck.log").read_text() == CLEAN


def test_a_run_with_findings_fails(tmp_path, monkeypatch, capsys):
  pretend(tmp_path, monkeypatch, MEMCHECK)
  with pytest.raises(SystemExit) as exit_info:
    run(tmp_path, "--tools=memcheck", "--cases=persistent nn")
  assert exit_info.value.code == 1
  assert f"memcheck, persistent nn: 2 x {WRITE} ({KERNEL})" in capsys.readouterr().err


def test_a_run_that_is_never_over_fails(tmp_path, monkeypatch, capsys):
  pretend(tmp_path, monkeypatch, "")
  monkeypatch.setattr(sanitize, "_MINUTES", type("flag", (), {"value": 0.01}))
  with pytest.raises(SystemExit):
    run(tmp_path, "--tools=synccheck", "--cases=blocked")
  assert "not over in 0.01 min" in capsys.readouterr().err


def test_without_the_sanitizer(tmp_path, monkeypatch):
  monkeypatch.setenv("PATH", str(tmp_path))
  monkeypatch.setenv("CUDA_HOME", str(tmp_path))
  monkeypatch.setattr(sanitize, "_DEFAULT_ROOT", str(tmp_path))
  with pytest.raises(SystemExit, match="neither on PATH nor under the CUDA toolkit"):
    with flagsaver.flagsaver():
      sanitize.main(["program"])
  (tmp_path / "bin").mkdir()
  pretend(tmp_path / "bin", monkeypatch, CLEAN)
  monkeypatch.setenv("PATH", os.devnull)
  assert sanitize.find_sanitizer() == str(tmp_path / "bin" / "compute-sanitizer")
