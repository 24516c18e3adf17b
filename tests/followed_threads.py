"""Device code that MLIR's words describe, followed on a CPU thread by thread.

`in_integers` has `arith` of a kernel's module compute with Python's numbers; `Memory`
does what its PTX says.
"""

from __future__ import annotations

import operator
import re
import types

import numpy as np

NONE = types.SimpleNamespace(get_signless=lambda _: None)


def arithmetic() -> types.SimpleNamespace:
  """What the modules use of `arith`."""
  names = dict(
      addi="add", subi="sub", muli="mul", andi="and_", ori="or_", shli="lshift",
      shrui="rshift", divui="floordiv",
  )
  computed = {name: getattr(operator, does) for name, does in names.items()}
  computed |= dict(
      maxsi=max, minsi=min, select=lambda which, one, other: one if which else other,
      extui=lambda _, x: x, trunci=lambda _, x: x, bitcast=lambda _, x: x,
  )
  return types.SimpleNamespace(**computed)


def in_integers(monkeypatch, module, *others) -> None:
  """Has `module`, and helpers of other modules, compute."""
  for each in (module, *others):
    monkeypatch.setattr(each, "arith", arithmetic())
    for name in ("i32", "i64_of_unsigned", "const64"):
      monkeypatch.setattr(each, name, int, raising=False)
    monkeypatch.setattr(each, "i32_type", lambda: None, raising=False)
    monkeypatch.setattr(each, "less", operator.lt, raising=False)
    monkeypatch.setattr(each, "ir", types.SimpleNamespace(IntegerType=NONE))
  monkeypatch.setattr(module, "_behind", operator.add)
  pick = lambda pair, static_position, **_: pair[static_position[0]]
  monkeypatch.setattr(module, "vector", types.SimpleNamespace(extract=pick))


class Memory:
  """Shared memory and GMEM in elements, as instructions in PTX see them."""

  def __init__(self, elements: int, itemsize: int = 2):
    self.slot = np.zeros(elements)
    self.gmem: dict[int, float] = {}
    self.itemsize = itemsize
    self.requests: list[list[int]] = []  # What each instruction stored of a thread.

  def run(self, ptx: str, *args, result_types=(), **_):
    if "st.shared" in ptx:
      return self._write(ptx, *args)
    if "cp.async.bulk" in ptx:
      return self._copy(*args)
    if "ld.shared" in ptx and "st.global" in ptx:
      target, source, wanted = args
      return self._store(target, [source] if wanted else [])
    if "ld.shared" in ptx:
      return self._load(ptx, *args, len(result_types))
    target, wanted, *words = args
    size = _bytes(ptx)
    assert not wanted or target % size == 0
    if isinstance(words[0], range):  # Where they come from.
      return self._store(target, words[0] if wanted else [])
    values = [
        one for word in words for one in (word if isinstance(word, tuple) else (word,))
    ]
    assert size == len(values) * self.itemsize
    for i, value in enumerate(values if wanted else []):
      assert target + i * self.itemsize not in self.gmem
      self.gmem[target + i * self.itemsize] = float(value)

  def _write(self, ptx: str, address, value, wanted=True) -> None:
    offset = int(ptx.split("[$0 + ")[1].split("]")[0])
    values = value if isinstance(value, tuple) else (value,)
    size = _bytes(ptx)
    assert size == len(values) * self.itemsize
    if wanted:
      assert (address + offset) % size == 0
      for i, one in enumerate(values):
        self._at(address + offset + i * self.itemsize)[...] = one

  def _copy(self, target, source, num_bytes, wanted) -> None:
    if wanted:
      assert target % 16 == source % 16 == num_bytes % 16 == 0 < num_bytes
      self._store(target, range(source, source + num_bytes, self.itemsize))

  def _load(self, ptx: str, source, words: int) -> list:
    """Where the words come from, in place of what they hold."""
    size = _bytes(ptx)
    assert source % size == 0
    return [range(source, source + size, self.itemsize), *[None] * (words - 1)]

  def _at(self, address: int):
    assert address % self.itemsize == 0 <= address < self.itemsize * self.slot.size
    return self.slot[address // self.itemsize :][:1]

  def _store(self, target: int, sources) -> None:
    for i, source in enumerate(sources):
      place = target + i * self.itemsize
      assert place not in self.gmem  # Each element once.
      self.gmem[place] = float(self._at(source)[0])
    self.requests.append([target + i * self.itemsize for i in range(len(sources))])


def _bytes(ptx: str) -> int:
  """That an instruction moves."""
  found = re.search(r"(?:ld|st)\.(?:shared|global)\.(?:v(\d)\.)?b(\d+)", ptx)
  count, bits = found.groups()
  return int(count or 1) * int(bits) // 8


def fragment(piece, warp: int, group: int, lane: int) -> list[tuple]:
  """The pairs that a thread has of a wgmma fragment [64, cols]."""
  return [
      tuple(piece[16 * warp + 8 * half + group, 8 * block + 2 * lane :][:2])
      for block in range(piece.shape[1] // 8) for half in range(2)
  ]


def threads():
  """(warp, group, lane) of the fragment's threads, in their order."""
  return [(t // 32, t % 32 // 4, t % 4) for t in range(128)]
