"""The text of compute-sanitizer: what tests of its reports and of its runs share."""

from __future__ import annotations

KERNEL = "jaxgemm_persistent_mosaic_gpu_kernel"

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
