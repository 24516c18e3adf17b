"""The correctness gate, that of jaxgemm.autotune: see jaxgemm/autotune/gate.py."""

from jaxgemm.autotune.gate import DEVIATION_FACTOR as DEVIATION_FACTOR
from jaxgemm.autotune.gate import ERROR_FACTOR as ERROR_FACTOR
from jaxgemm.autotune.gate import Gate as Gate
from jaxgemm.autotune.gate import Verdict as Verdict
