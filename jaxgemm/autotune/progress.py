"""Progress bars, for a terminal and for a log."""

from __future__ import annotations

from collections.abc import Iterable
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from tqdm import tqdm

_LOG_INTERVAL_S = 10.0


def bar(iterable: Iterable[Any] | None = None, **options: Any) -> tqdm:
  """Returns a tqdm bar: lively on a terminal, a line now and then in a log.

  Set its postfix with `refresh=False`, or it is drawn whatever the interval.
  """
  from tqdm import tqdm  # An extra brings it; `import jaxgemm` must not need it.

  terminal = sys.stderr.isatty()
  interval_s = 0.1 if terminal else _LOG_INTERVAL_S
  return tqdm(
      iterable,
      dynamic_ncols=terminal,
      mininterval=interval_s,
      maxinterval=_LOG_INTERVAL_S,
      miniters=1,
      **options,
  )
