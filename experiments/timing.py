"""GPU kernel times, as jaxgemm.autotune takes them: see jaxgemm/autotune/timing.py."""

from jaxgemm.autotune import profile as profile
from jaxgemm.autotune.timing import by_kernel as by_kernel
from jaxgemm.autotune.timing import interleaved as interleaved
from jaxgemm.autotune.timing import num_input_sets as num_input_sets
from jaxgemm.autotune.timing import spread as spread
