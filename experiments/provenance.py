"""Where a result comes from: the commit, the command and the time."""

from __future__ import annotations

import datetime
import os
import pathlib
import shlex
import subprocess
import sys


def commit() -> str:
  """Returns the commit that runs: $JAXGEMM_COMMIT, else git's, else "unknown"."""
  if value := os.environ.get("JAXGEMM_COMMIT"):
    return value
  try:
    result = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=pathlib.Path(__file__).parent,
        capture_output=True,
        text=True,
        check=True,
    )
  except (OSError, subprocess.CalledProcessError):
    return "unknown"
  return result.stdout.strip()


def command(module: str) -> str:
  """Returns the command line that runs `module` with this process's arguments.

  All but --output: a path of one machine says nothing on another.
  """
  arguments = [x for x in sys.argv[1:] if not x.startswith("--output=")]
  return shlex.join(["python", "-m", module, *arguments])


def date() -> str:
  """Returns the present time in UTC, to the second."""
  return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
