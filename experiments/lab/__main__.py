r"""Asks the laboratory's questions on the GPU at hand, and makes a page of the answers.

Each question's rows go to lab_NAME.jsonl as they are measured, and after each question
lab.html and lab.md are made anew from all such files in the folder: a run that is
stopped keeps what it has, and runs with --only join on one page. On a CPU the questions
run tiny problems in emulation, and nothing is timed. The exit status is 1 if a result
failed the gate, or a question could not be asked to its end.

Several questions are asked one after the other, each by a process of its own: what ends
one process leaves the others alone. This one, which starts them and makes the page,
leaves the GPU to them: JAX takes most of its memory as soon as it sees it. On a machine
of several GPUs, --gpus of them are asked at once, another question each.

  python -m experiments.lab
  python -m experiments.lab --quick
  python -m experiments.lab --gpus=4
  python -m experiments.lab --only=ladder,splits --output=experiments/results/h200
  python -m experiments.lab --only=        # The page alone.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
import concurrent.futures
import os
import pathlib
import queue
import signal
import subprocess
import sys
import threading
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
_GPUS = flags.DEFINE_integer(
    "gpus", 1, "GPUs that are asked at once, another question each.", lower_bound=1
)
flags.register_validator(
    _ONLY.name, lambda names: set(names) <= set(QUESTIONS),  # None of them, too.
    f"must be among {', '.join(QUESTIONS)}",
)
_REPEATS, _QUICK_REPEATS = 20, 10


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


def publish(
    folder: pathlib.Path, under_way: Collection[str] = ()
) -> dict[str, list[Row]]:
  """Makes the page of all rows in a folder, and returns them by question.

  But not those of questions under way, whose last line may not be whole.
  """
  answers = {
      name: rows
      for name in QUESTIONS
      if name not in under_way
      and (path := data_path(folder, name)).exists() and (rows := read(path))
  }
  (folder / "lab.html").write_text(page.render(answers), encoding="utf-8")
  (folder / "lab.md").write_text(markdown.render(answers), encoding="utf-8")
  return answers


def data_path(folder: pathlib.Path, name: str) -> pathlib.Path:
  return folder / f"lab_{name}.jsonl"


def _ask_here(argv: Sequence[str], name: str, folder: pathlib.Path) -> list[str]:
  """Asks a question in this process, and prints its finding; returns what failed."""
  platform = cli.start(argv)
  if platform.device is None:
    raise app.UsageError(f"the heuristics know no {platform.name}")
  repeats = _QUICK_REPEATS if _QUICK.value else _REPEATS
  lab = Lab(
      platform, _QUICK.value, common_flags.SEED.value,
      repeats if platform.on_gpu else 0,
      cli.row_provenance("lab", platform, "experiments.lab"),
  )
  start = time.monotonic()
  try:
    with platform.context():
      rows = ask(lab, name, data_path(folder, name))
    finding = QUESTIONS[name].finding(rows)
  except Exception as error:  # What was measured is on the page all the same.
    logging.exception("question %s", name)
    return [f"{name}: {type(error).__name__}: {error}"]
  print(f"{name} ({time.monotonic() - start:.0f} s): {finding}")
  return [
      f"{name}: {row.name} as {row.variant}: {row.status}" for row in rows if row.failed
  ]


def _ask_apart(names: Sequence[str], folder: pathlib.Path) -> list[str]:
  """Asks each question in a process of its own, --gpus of them at once.

  Returns what failed, in the order of the questions. The processes print the rest.
  """
  free: queue.SimpleQueue[str] = queue.SimpleQueue()
  visible = os.environ.get("CUDA_VISIBLE_DEVICES")
  count = _GPUS.value
  gpus = visible.split(",") if visible else list(map(str, range(count)))
  if len(gpus) < count:
    raise app.UsageError(f"--gpus={count}, and CUDA_VISIBLE_DEVICES={visible}")
  for gpu in gpus[:count]:
    free.put(gpu)
  under_way: set[str] = set()
  publishing = threading.Lock()

  def ask_one(name: str) -> list[str]:
    gpu = free.get()
    under_way.add(name)
    chosen = {"CUDA_VISIBLE_DEVICES": gpu} if count > 1 else {}
    status = subprocess.run(
        _command(name), check=False, env=os.environ | chosen
    ).returncode
    free.put(gpu)
    with publishing:
      under_way.remove(name)
      failed = _try_to_publish(folder, tuple(under_way))
    if status:
      died = f" ({signal.strsignal(-status)})" if status < 0 else ""
      failed.insert(0, f"{name}: exit status {status}{died}")
    return failed

  pool = concurrent.futures.ThreadPoolExecutor(count)
  try:
    return [line for failed in pool.map(ask_one, names) for line in failed]
  finally:
    pool.shutdown(cancel_futures=True)


def _command(name: str) -> list[str]:
  """Returns the command that asks one question, with the other flags that were given."""
  given = {
      flag.name: flag.serialize() for flag in map(flags.FLAGS.__getitem__, flags.FLAGS)
      if flag.present and flag.name not in (_ONLY.name, _GPUS.name)
  }
  # A flag that was given several times has several lines.
  others = [line for text in given.values() for line in text.splitlines()]
  return [sys.executable, "-m", "experiments.lab", *others, f"--{_ONLY.name}={name}"]


def _try_to_publish(
    folder: pathlib.Path, under_way: Collection[str] = ()
) -> list[str]:
  """Makes the page; returns why not, as rows that a process left may break it."""
  try:
    publish(folder, under_way)
  except Exception as error:  # The other questions are asked all the same.
    logging.exception("the page")
    return [f"page: {type(error).__name__}: {error}"]
  return []


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments: {argv[1:]}")
  folder = common_flags.output_folder()
  names = _ONLY.value
  if len(names) > 1:
    failed = _ask_apart(names, folder)
  else:
    failed = [line for name in names for line in _ask_here(argv, name, folder)]
    failed += _try_to_publish(folder)
  print(f"page: {folder / 'lab.html'}, {folder / 'lab.md'}")
  if failed:
    print("\n".join(["failed:", *dict.fromkeys(failed)]), file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
  app.run(main)
