"""The count of kernels in a compiled program's text."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp

from experiments import (
  kernel_count,
)

HLO = r"""HloModule jit_f, is_scheduled=true, entry_computation_layout={()->f32[8]{0}}

%inner (p: bf16[64,64]) -> bf16[64,64] {
  %p = bf16[64,64]{1,0} parameter(0)
  ROOT %dot.9 = bf16[64,64]{1,0} dot(%p, %p), lhs_contracting_dims={1}
}

%gemm_computation (a: bf16[64,64]) -> bf16[64,64] {
  %a = bf16[64,64]{1,0} parameter(0)
  ROOT %dot.1 = bf16[64,64]{1,0} dot(%a, %a), lhs_contracting_dims={1}
}

%outer (b: bf16[64,64]) -> bf16[64,64] {
  %b = bf16[64,64]{1,0} parameter(0)
  ROOT %f.1 = bf16[64,64]{1,0} fusion(%b), kind=kCustom, calls=%inner
}

%fused_add (c: f32[8]) -> f32[8] {
  %c = f32[8]{0} parameter(0)
  ROOT %add.1 = f32[8]{0} add(%c, %c)
}

%command_buffer (q: bf16[64,64]) -> bf16[64,64] {
  %q = bf16[64,64]{1,0} parameter(0)
  %cc.1 = (bf16[64,64]{1,0}, s8[4]{0}) custom-call(%q, %q), custom_call_target="__cublas$lt$matmul", metadata={op_name="jaxgemm_persistent"}
  ROOT %cc.2 = (bf16[64,64]{1,0}, s8[4]{0}) custom-call(%q, %q), custom_call_target="__cublas$gemm"
}

ENTRY %main.5 (x: bf16[64,64]) -> (bf16[64,64]) {
  %x = bf16[64,64]{1,0} parameter(0)
  %c1 = bf16[64,64]{1,0} call(%x), to_apply=%command_buffer
  %g = bf16[64,64]{1,0} fusion(%x), kind=kCustom, calls=%gemm_computation, backend_config={"fusion_backend_config":{"kind":"__triton_gemm"}}
  %o = bf16[64,64]{1,0} fusion(%x), kind=kCustom, calls=%outer, backend_config={"fusion_backend_config":{"kind":"__triton_nested_gemm_fusion"}}
  %l = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused_add
  %s = bf16[64,64]{1,0} dot(%x, %x), lhs_contracting_dims={1}
  %m1 = bf16[64,64]{1,0} custom-call(%x, %x), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(f)/jaxgemm_persistent/mpmd_map"}, backend_config={module = "\00jaxgemm_persistent\00"}
  %m2 = bf16[64,64]{1,0} custom-call(%x, %x), custom_call_target="mosaic_gpu_v2", backend_config={module = "\00jaxgemm_split_k_mosaic_gpu\00"}
  %m3 = bf16[64,64]{1,0} custom-call(%x, %x), custom_call_target="mosaic_gpu_v2", backend_config={module = "\00jaxgemm_cotangents_0\00jaxgemm_cotangents_mosaic_gpu\00"}
  %m4 = bf16[64,64]{1,0} custom-call(%x, %x), custom_call_target="mosaic_gpu_v2", backend_config={module = "other"}
  %m5 = bf16[64,64]{1,0} custom-call(%x), custom_call_target="annotation", metadata={op_name="jaxgemm_blocked"}
  ROOT %t = (bf16[64,64]{1,0}) tuple(%s)
}
"""  # noqa: E501


def test_count_of_kernels():
  count = kernel_count.count_gemms(HLO)
  assert count.jaxgemm == {"persistent": 1, "split_k": 1} and count.num_jaxgemm == 2
  assert count.xla == {
      "__cublas$lt$matmul": 1, "__cublas$gemm": 1, "__triton_gemm": 1,
      "__triton_nested_gemm_fusion": 1, "dot": 1,
  }
  assert str(count).startswith("2 of jaxgemm (1 persistent, 1 split_k), 5 of XLA (")


def test_branches_of_a_conditional_count_once():
  a = jnp.ones((32, 32))
  choose = lambda p, a: jax.lax.cond(p, lambda: a @ a, lambda: jnp.tanh(a) @ a)
  text = jax.jit(choose).lower(True, a).compile().as_text()
  assert "conditional(" in text and kernel_count.count_gemms(text).num_xla == 1
  old = text.replace("branch_computations={", "true_computation=")
  old = re.sub(r"(true_computation=[^,]*), ([^}]*)}", r"\1, false_computation=\2", old)
  assert old != text and kernel_count.count_gemms(old).num_xla == 1


def test_count_of_a_compiled_program():
  a = jnp.ones((32, 32))
  text = jax.jit(lambda a: jnp.tanh(a @ a) @ a + 1).lower(a).compile().as_text()
  count = kernel_count.count_gemms(text)
  assert (count.num_jaxgemm, count.num_xla) == (0, 2)
