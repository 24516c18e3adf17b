"""What JAX's versions do differently, and the private parts of JAX that we need.

Every import of `jax._src` is here, so that a new JAX version is one file's work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import functools
import os
import threading
from typing import Any, NamedTuple

import jax
from jax._src import api as _api
from jax._src import callback as _callback
from jax._src import config as _config
from jax._src import core as _core
from jax._src import dispatch as _dispatch
from jax._src import sharding_impls as _sharding_impls
from jax._src import source_info_util as _source_info
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import partial_eval as _partial_eval
from jax._src.lax import lax as _lax
from jax._src.pallas.mosaic_gpu import core as _gpu_core
from jax._src.pallas.mosaic_gpu import lowering as _lowering
from jax._src.pallas.mosaic_gpu import primitives as _primitives
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks as _interpret
from jax._src.pallas.mosaic_gpu.interpret import shared_memory as _interpret_memory
from jax._src.state import primitives as _state
from jax.experimental.mosaic.gpu import dialect as _dialect
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jaxlib.mlir.dialects import llvm
import numpy as np

# -- GPU interpret mode ------------------------------------------------------------

# The interpreter's state is global: one kernel at a time.
_interpret_lock = threading.Lock()


def interpret_params() -> plgpu.InterpretGPUParams:
  """Parameters that detect races.

  With fewer TMA threads (the default is 5) a store that is not awaited before its
  buffer is written again goes unnoticed.
  """
  return plgpu.InterpretGPUParams(detect_races=True, num_tma_threads_per_device=64)


def give_threads() -> None:
  """Has XLA's CPU client start with 32 threads, unless PJRT_NPROC says how many.

  Each emulated CTA of a cluster holds one: with one for each of two cores they wait for
  ever, now and then. Of no use once JAX has computed something.
  """
  os.environ.setdefault("PJRT_NPROC", "32")


class _ApiOfCallbacks:
  """What JAX's callbacks take from jax._src.api, with their operands left on the host.

  Emulated kernels call back thousands of times with a dozen indices each, which JAX puts
  on a device one by one and reads back: more than half of the time of an emulation.
  """

  def __getattr__(self, name: str):
    return getattr(_api, name)

  @staticmethod
  def device_put(args: tuple, device: jax.Device) -> tuple:
    del device
    return tuple(map(np.array, args))  # XLA's buffers end with the callback.


def _int_of_callbacks(x):
  """The emulator's whole numbers of indices, which with the above come as NumPy's."""
  return int(x) if isinstance(x, np.ndarray) else _to_int(x)


_to_int = _interpret_memory._to_int


@contextlib.contextmanager
def _fast_callbacks() -> Iterator[None]:
  _callback.api, _interpret_memory._to_int = _ApiOfCallbacks(), _int_of_callbacks
  try:
    yield
  finally:
    _callback.api, _interpret_memory._to_int = _api, _to_int


def run_interpreted(fun: Callable[[plgpu.InterpretGPUParams], Any]) -> Any:
  """Returns fun(params), which runs kernels in interpret mode, once it is computed.

  Raises:
    RuntimeError: the kernels raced. JAX 0.12 raises by itself; 0.11 only prints,
      and remembers the last kernel alone.
  """
  with _interpret_lock:
    make_state, states = _interpret.GPURaceDetectionState, []

    def make_and_remember(*args, **kwargs):
      states.append(make_state(*args, **kwargs))
      return states[-1]

    _interpret.GPURaceDetectionState = make_and_remember
    try:
      with _fast_callbacks():
        result = jax.block_until_ready(fun(interpret_params()))
    except BaseException:
      _interpret.reset_gpu_interpret_mode_state()
      raise
    finally:
      _interpret.GPURaceDetectionState = make_state
    if any(state.races_found for state in states):
      _interpret.reset_gpu_interpret_mode_state()
      raise RuntimeError("the kernel raced in GPU interpret mode")
    return result


# -- Registers ---------------------------------------------------------------------


def by_instruction(x, name: str):
  """A PTX instruction of one float32 operand, of each element of a FragmentedArray."""
  return x._pointwise(x._lift_fast_instr(name))


# -- Barriers ----------------------------------------------------------------------

_barrier_address_p = Primitive("barrier_address")


def barrier_address(barrier) -> jax.Array:
  """Where one of a kernel's barriers lies in shared memory: int32.

  For code inside `plgpu.inline_mgpu`, which takes no barriers, in one warp.
  """
  barrier, transforms = _state.get_ref_and_transforms(barrier, None, "barrier_address")
  flat, tree = jax.tree.flatten(transforms)
  return _barrier_address_p.bind(barrier, *flat, tree=tree)


def _lower_barrier_address(ctx, barrier, *flat, tree):
  index = _primitives._get_barrier_base_index(ctx.avals_in[0], tree.unflatten(flat))
  if index is not None:
    barrier = barrier[index]
  return llvm.ptrtoint(ir.IntegerType.get_signless(32), barrier.get_ptr())


_barrier_address_p.def_effectful_abstract_eval(
    lambda *_, tree: (jax.core.ShapedArray((), "int32"), {_gpu_core._memory_effect})
)
# The one that asks is the producer, of which a single warp works.
_lowering.register_lowering_rule(_barrier_address_p, *_gpu_core.WGxWARP_SEMANTICS)(
    _lower_barrier_address
)


# -- Primitives and sharding -------------------------------------------------------


def requires_devices(primitive) -> None:
  """Makes lowering rules of `primitive` see the devices that jit runs on."""
  _dispatch.prim_requires_devices_during_lowering.add(primitive)


def computes_by_lowering(primitive) -> None:
  """Makes `primitive` compute outside of jit what it lowers to, as JAX's own do.

  Under jax_disable_jit, too; and jax_debug_nans looks at its results.
  """
  primitive.def_impl(functools.partial(_dispatch.apply_primitive, primitive))


def vary_alike(*operands):
  """Casts operands to vary over the same manual mesh axes, as lax's functions do."""
  return _core.auto_insert_reshard(*operands)


def without_manual_axes():
  """A context in which a kernel's results need not say over which axes they vary."""
  return _config._check_vma(False)


def canonicalize_precision(precision):
  """None, a pair of lax.Precision, a DotAlgorithmPreset or a DotAlgorithm.

  None becomes what jax_default_matmul_precision says.
  """
  precision = _lax.canonicalize_precision(precision)
  return tuple(precision) if isinstance(precision, list) else precision


def canonicalize_out_sharding(out_sharding, name: str):
  """A NamedSharding on the mesh in context, or None; `name` is for messages."""
  return _sharding_impls.canonicalize_sharding(out_sharding, name)


def constrain_result(ctx, value, aval):
  """Annotates the value of a lowering rule with its aval's explicit sharding."""
  return _mlir.lower_with_sharding_in_types(ctx, value, aval)


def lowering_mesh(ctx) -> tuple[int, Any, bool]:
  """Where a lowering rule's computation will run.

  Returns: the number of devices; the mesh over them, or None if jit knows none; and
    whether a shard_map has already made some of its axes manual.
  """
  axis_context = ctx.module_context.axis_context
  if isinstance(axis_context, _sharding_impls.SPMDAxisContext):
    mesh = axis_context.mesh
    auto = [axis for axis in mesh.axis_names if axis not in axis_context.manual_axes]
    num_devices = 1
    for axis in auto:
      num_devices *= mesh.shape[axis]
    return num_devices, mesh, True
  if isinstance(axis_context, _sharding_impls.ShardingContext):
    return axis_context.num_devices, axis_context.abstract_mesh, False
  return 1, None, False


def is_exported(ctx) -> bool:
  """Whether a lowering rule's module leaves this process: jax.export's."""
  return ctx.module_context.lowering_parameters.for_export


# -- What is being traced ----------------------------------------------------------


def transposition(x) -> tuple[int, ...] | None:
  """How lax.transpose made x: its permutation, or None if x comes from elsewhere.

  Conversions behind it or in front of it, of each element, count for nothing. Only what
  is being traced says where it comes from, and only within one jit.
  """
  perm = tuple(range(np.ndim(x)))
  found = _permutation(x)
  return None if found in (None, perm) else found


class Conversion(NamedTuple):
  """What an array is a conversion of.

  Attributes:
    dtype: of the argument that it is, converted.
    source: makes that argument, transposed to the array's shape, if the array has all of
      its values: it was transposed and converted to types that have them, and to nothing
      else. A transposition is traced with each call.
  """

  dtype: np.dtype
  source: Callable[[], Any] | None


def conversion_of(x) -> Conversion | None:
  """How x is an argument, converted; None if it is none, or of its dtype.

  Transposed and multiplied by smaller factors it may be, too. An argument, as of what has
  been computed the last kernel does the conversion.
  """
  innermost = traced = _traced(x)
  dtypes, whole = [], True
  perm = () if traced is None else tuple(range(traced.ndim))
  while traced is not None and (equation := traced.parent) is not None:
    name, shape = equation.primitive.name, traced.aval.shape
    before = equation.in_tracers
    if name == "convert_element_type":
      dtypes.append(traced.dtype)
    elif name == "transpose":
      turned = equation.params["permutation"]
      perm = tuple(turned[i] for i in perm) if whole else perm
    elif name == "mul":
      before, whole = [y for y in before if y.aval.shape == shape], False
    else:
      return None
    if len(before) != 1:
      return None
    traced = _traced(before[0])
  if traced is None or traced.dtype == x.dtype:
    return None
  eight_bits = traced.dtype.itemsize == 1
  wide = all(
      _lax.dtypes.issubdtype(each, np.floating) and each.itemsize > 1 for each in dtypes
  )
  if not (whole and eight_bits and wide) or _mapped_as(x, innermost) is None:
    return Conversion(traced.dtype, None)

  def source():
    unmoved = perm == tuple(range(len(perm)))
    return _mapped_as(x, traced if unmoved else _lax.transpose(traced, perm))

  return Conversion(traced.dtype, source)


def _mapped_as(x, array):
  """The array, which x is of in the innermost trace, as x is mapped by vmap around it.

  None where vmap maps x along no axis that has a number.
  """
  if isinstance(x, (_ad.JVPTracer, _ad.LinearizeTracer)):
    return _mapped_as(x.primal, array)
  if not isinstance(x, _batching.BatchTracer):
    return array
  within = _mapped_as(x.val, array)
  if within is None or not isinstance(x.batch_dim, int):
    return None
  return _batching.BatchTracer(x._trace, within, x.batch_dim)


def _traced(x):
  """x as the innermost jit, loop or checkpoint traces it, if that is where it is from."""
  while isinstance(x, (_ad.JVPTracer, _ad.LinearizeTracer, _batching.BatchTracer)):
    x = x.val if isinstance(x, _batching.BatchTracer) else x.primal
  if not isinstance(x, _partial_eval.DynamicJaxprTracer):
    return None
  trace = _core.trace_ctx.trace
  while trace is not None and not isinstance(trace, _partial_eval.DynamicJaxprTrace):
    trace = getattr(trace, "parent_trace", None)
  return x if x._trace is trace else None


def _permutation(x) -> tuple[int, ...] | None:
  if isinstance(x, (_ad.JVPTracer, _ad.LinearizeTracer)):
    return _permutation(x.primal)
  if isinstance(x, _batching.BatchTracer):
    perm, axis = _permutation(x.val), x.batch_dim
    if perm is None or not isinstance(axis, int):
      return perm
    stored = perm[axis]  # The mapped axis, in the array that was transposed.
    return tuple(i - (i > stored) for i in perm if i != stored)
  traced = _traced(x)
  if traced is None or (equation := traced.parent) is None:
    return None
  if equation.primitive is _lax.convert_element_type_p:
    return _permutation(equation.in_tracers[0])
  if equation.primitive is not _lax.transpose_p:
    return None
  perm = tuple(equation.params["permutation"])
  before = _permutation(equation.in_tracers[0])
  return perm if before is None else tuple(before[i] for i in perm)


@contextlib.contextmanager
def source_of(equation) -> Iterator[None]:
  """What is traced within has the names, lines and context of an equation of a jaxpr."""
  source = equation.source_info
  name_stack = _source_info.current_name_stack() + source.name_stack
  with _source_info.user_context(source.traceback, name_stack=name_stack):
    with equation.ctx.manager:
      yield


def rebind(equation, params: dict[str, Any], values) -> list:
  """The results of an equation of a jaxpr, computed or traced anew with these params."""
  with source_of(equation):
    primitive = equation.primitive
    found = primitive.bind(*values, **primitive.get_bind_params(params))
  return list(found) if primitive.multiple_results else [found]


# -- Lowered modules ---------------------------------------------------------------

_DUMP_NAME = "mosaic_gpu.dump_basename"


def keep_dump_names_stable() -> None:
  """Makes one of our kernels lower to the same bytes, whatever was lowered before.

  JAX 0.11 names a kernel's debugging dumps by a count of all that the process has
  lowered, and writes the name into the module: JAX's persistent compilation cache
  then misses a program only because a tuner, or another thread, lowered something
  first, and one kernel that a program runs twice compiles twice. Here its name alone
  names it. JAX 0.12 leaves the name out.
  """
  dumping = any(name.startswith("MOSAIC_GPU_DUMP") for name in os.environ)
  if jax.__version_info__ >= (0, 12) or dumping:
    return
  get_or_set = _dialect.get_or_set_dump_options

  def with_stable_name(module: ir.Module):
    attributes = module.operation.attributes
    if "sym_name" in attributes and _DUMP_NAME not in attributes:
      name = ir.StringAttr(attributes["sym_name"]).value
      if name.startswith("jaxgemm_"):
        attributes[_DUMP_NAME] = ir.StringAttr.get(name, context=module.context)
    return get_or_set(module)

  _dialect.get_or_set_dump_options = with_stable_name
