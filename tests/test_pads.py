"""The kernel that pads operands whose strides TMA does not take."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import integers, padding, pads

# What is padded together: (shape, way) of each array.
OPERANDS = (
    (((1, 1, 1), "flat"),),
    (((1, 7, 9), "flat"), ((1, 3, 65), "tiled")),
    (((1, 1001, 1005), "flat"), ((1, 1005, 1003), "tiled")),
    (((1, 512, 4095), "flat"), ((1, 4096, 4095), "flat")),
    (((3, 197, 197), "tiled"), ((1, 64, 197), "flat"), ((5, 9, 333), "tiled")),
    (((2, 1, 50257), "tiled"),),
    (((1, 70001, 6), "flat"),),
    (((7, 1029, 1000), "tiled"),),  # Its rows alone.
)


def _operands(shapes, dtype):
  keys = jax.random.split(jax.random.key(0), len(shapes))
  return [
      jax.random.normal(key, shape).astype(dtype)
      for key, shape in zip(keys, shapes, strict=True)
  ]


@pytest.mark.parametrize("operands", OPERANDS, ids=str)
def test_shapes(operands):
  """Rows that TMA strides over, and no more than a line longer."""
  for (batch, rows, cols), way in operands:
    shape = padding.padded_shape((batch, rows, cols), "bfloat16", way)
    assert not padding.needs_padding(*shape[1:], "bfloat16", way)
    assert shape[0] == batch
    assert rows <= shape[1] < rows + 8 and cols <= shape[2] < cols + 64


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("operands", OPERANDS, ids=str)
def test_one_kernel_pads_all(operands, dtype):
  types = [jax.ShapeDtypeStruct(shape, dtype) for shape, _ in operands]
  shapes = [padding.padded_shape(x, dtype, way) for x, way in operands]
  pad = jax.jit(lambda *x: pads.pad(x, shapes))
  text = jax.export.export(pad, platforms=["cuda"])(*types).mlir_module()
  assert text.count("custom_call @mosaic_gpu") == 1


def test_pieces_are_counted_without_a_sign():
  """From 32 GiB on they are 2^31 and more; more than 64 GiB are too many."""
  shape, padded = (1, 131073, 131073), (1, 131073, 131136)
  assert pads.serves(padded, 2) and not pads.serves((2, *padded[1:]), 2)
  assert not pads.serves((1, 8, 64), 1)  # Elements of 8 bits.
  pad = jax.jit(lambda x: pads.pad([x], [padded]))
  x = jax.ShapeDtypeStruct(shape, "bfloat16")
  text = jax.export.export(pad, platforms=["cuda"])(x).mlir_module()
  assert text.count("custom_call @mosaic_gpu") == 1
  with pytest.raises(AssertionError):
    integers.i32(2**31)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("operands", OPERANDS, ids=str)
def test_gpu_same_bits_as_xla(operands, dtype):
  arrays = _operands([shape for shape, _ in operands], dtype)
  shapes = [padding.padded_shape(x, dtype, way) for x, way in operands]
  found = jax.jit(lambda *x: pads.pad(x, shapes))(*arrays)
  for x, (_, way), out in zip(arrays, operands, found, strict=True):
    wanted = padding.pad_for_tma(x, dtype, way)
    bits = (np.asarray(y).view(f"int{8 * x.dtype.itemsize}") for y in (out, wanted))
    np.testing.assert_array_equal(*bits)


@pytest.mark.gpu
def test_gpu_inf_and_nan_stay_where_they_are():
  x = jnp.full((1, 33, 65), jnp.nan, "bfloat16").at[0, 3].set(jnp.inf)
  (out,) = jax.jit(lambda x: pads.pad([x], [(1, 40, 128)]))(x)
  assert jnp.isnan(out[0, :33, :65]).sum() == 32 * 65
  assert jnp.isinf(out[0, 3, :65]).all()
  assert (out[0, :, 65:] == 0).all() and (out[0, 33:] == 0).all()
