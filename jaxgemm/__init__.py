"""Fast matrix products (GEMM) for JAX on NVIDIA Hopper GPUs."""

from jaxgemm import checkpoint_policies as checkpoint_policies
from jaxgemm.api import dot_general as dot_general
from jaxgemm.api import explain as explain
from jaxgemm.api import gemm as gemm
from jaxgemm.api import matmul as matmul
from jaxgemm.autotune import autotune as autotune
from jaxgemm.contexts import batch_invariant as batch_invariant
from jaxgemm.contexts import emulate as emulate
from jaxgemm.contexts import target as target
from jaxgemm.einsums import einsum as einsum
from jaxgemm.layers import gated_linear as gated_linear
from jaxgemm.layers import linear as linear
from jaxgemm.losses import linear_cross_entropy as linear_cross_entropy
from jaxgemm.mlp import gated_mlp as gated_mlp
from jaxgemm.mlp import mlp as mlp
from jaxgemm.plan import Plan as Plan
from jaxgemm.quantisation import dequantise as dequantise
from jaxgemm.quantisation import quantise as quantise
from jaxgemm.ragged import ragged_dot as ragged_dot
from jaxgemm.rewriting import accelerate as accelerate
from jaxgemm.rms_norm import RMSNorm as RMSNorm
from jaxgemm.scaled import scaled_matmul as scaled_matmul
from jaxgemm.scaled_ragged import scaled_ragged_dot as scaled_ragged_dot
from jaxgemm.user_table import TableWarning as TableWarning

__version__ = "0.1.0"
