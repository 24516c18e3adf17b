r"""Asks the laboratory's questions on the GPU at hand, and makes a page of the answers.

Each question's rows go to lab_NAME.jsonl as they are measured, and after each question
lab.html and lab.md are made anew from all such files in the folder: a run that is
stopped keeps what it has, and runs with --only join on one page. On a CPU the questions
run tiny problems in emulation, and nothing is timed. The exit status is 1 if a result
failed the gate, or a question could not be asked to its end.

  python -m experiments.lab
  python -m experiments.lab --quick
  python -m experiments.lab --only=ladder,splits --output=experiments/results/h200
  python -m experiments.lab --only=        # The page alone.
"""

from __future__ import annotations

from collections.abc import Sequence
import pathlib
import sys
import time

from absl import app, flags, logging

from experiments import cli, common_flags, progress
from experiments.lab import markdown, page
from experiments.lab.questions import QUESTIONS
from experiments.lab.rows import Row, read
from experiments.lab.variants import Lab

flags.adopt_module_key_flags(common_flags)
_ONLY = flags.DEFINE_list(
    "only", list(QUESTIONS), "The questions to ask; the page has all that have rows."
)
_QUICK = flags.DEFINE_boolean("quick", False, "Fewer problems, variants and calls.")
flags.register_validator(
    _ONLY.name, lambda names: set(names) <= set(QUESTIONS),  # None of them, too.
    f"must be among {', '.join(QUESTIONS)}",
)
_REPEATS, _QUICK_REPEATS = 20, 10
# They ask another profiler than the one that times, whose way it should not get into.
_LAST = ("ladder", "occupancy")


def ask(lab: Lab, name: str, path: pathlib.Path) -> list[Row]:
  """Returns the rows of a question; writes each as it is measured."""
  rows = []
  with (
      path.open("w", encoding="utf-8") as file,
      progress.bar(unit="row", desc=name) as shown,
  ):
    for row in QUESTIONS[name].measure(lab):
      rows.append(row)
      file.write(row.to_json() + "\n")
      file.flush()  # A run that is cut short keeps what it measured.
      shown.update()
  return rows


def publish(folder: pathlib.Path) -> dict[str, list[Row]]:
  """Makes the page of all rows in a folder, and returns them by question."""
  answers = {
      name: rows
      for name in QUESTIONS
      if (path := data_path(folder, name)).exists() and (rows := read(path))
  }
  (folder / "lab.html").write_text(page.render(answers), encoding="utf-8")
  (folder / "lab.md").write_text(markdown.render(answers), encoding="utf-8")
  return answers


def data_path(folder: pathlib.Path, name: str) -> pathlib.Path:
  return folder / f"lab_{name}.jsonl"


def main(argv: Sequence[str]) -> None:
  platform = cli.start(argv)
  if platform.device is None:
    raise app.UsageError(f"the heuristics know no {platform.name}")
  folder = pathlib.Path(common_flags.OUTPUT.value)
  folder.mkdir(parents=True, exist_ok=True)
  repeats = _QUICK_REPEATS if _QUICK.value else _REPEATS
  lab = Lab(
      platform, _QUICK.value, common_flags.SEED.value,
      repeats if platform.on_gpu else 0,
      cli.row_provenance("lab", platform, "experiments.lab"),
  )
  failed = []
  with platform.context():
    for name in sorted(_ONLY.value, key=_LAST.__contains__):
      start = time.monotonic()
      try:
        rows = ask(lab, name, data_path(folder, name))
      except Exception as error:  # The others are asked all the same.
        logging.exception("question %s", name)
        failed.append(f"{name}: {type(error).__name__}: {error}")
        continue
      failed += [
          f"{name}: {row.name} as {row.variant}: {row.status}" for row in rows
          if row.failed
      ]
      print(f"{name} ({time.monotonic() - start:.0f} s):"
            f" {QUESTIONS[name].finding(rows)}")
      publish(folder)
  publish(folder)
  print(f"page: {folder / 'lab.html'}, {folder / 'lab.md'}")
  if failed:
    print("\n".join(["failed:", *failed]), file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
  app.run(main)
