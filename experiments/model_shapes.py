"""The products of published models: sizes by model and product, and which are run.

A dense layer of a model is x @ w with x [tokens, inputs] and w [inputs, outputs];
training adds two products for each:

  direction  product                      m        n        k        layouts
  fwd        x @ w                        tokens   outputs  inputs   NN
  dx         dy @ w^T                     tokens   inputs   outputs  NT
  dw         x^T @ dy                     inputs   outputs  tokens   TN

A tied layer is the token embedding used once more, stored [outputs, inputs]: its
fwd is NT, its dx NN, and its dw is dy^T @ x, an [outputs, inputs] product, TN.

The sizes are those of the models' published configurations. Fused are what
inference engines fuse: q, k and v; and, where the product is called gate_up, the two
halves of a gated MLP. This module knows no suite and no class: see
experiments/suites.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import dataclasses
from typing import Literal

Direction = Literal["fwd", "dx", "dw"]
TOKENS = tuple(2**i for i in range(14))  # 1 to 8192.


@dataclasses.dataclass(frozen=True)
class Shape:
  """One named product: `batch` times [m, k] @ [k, n], stored as `layouts` say."""

  name: str
  m: int
  n: int
  k: int
  layouts: str = "NN"
  dtype: str = "bfloat16"
  batch: int = 1


@dataclasses.dataclass(frozen=True)
class Dense:
  """A dense layer; `experts` of them make one batched product, each with its tokens."""

  inputs: int
  outputs: int
  tied: bool = False
  experts: int = 1


@dataclasses.dataclass(frozen=True)
class Heads:
  """Attention of `batch` query heads (times sequences), each `width` wide.

  The queries of one head are `queries` tokens, its keys `keys`. Its products are
  `scores` (q @ k^T, NT) and `values` (p @ v, NN), of which the gradients of the keys
  and the values are TN.
  """

  batch: int
  queries: int
  keys: int
  width: int


@dataclasses.dataclass(frozen=True)
class Model:
  """The layers of a model, and what is run of them.

  Attributes:
    dense: dense layers by name.
    runs: (name of a layer, direction, numbers of tokens).
    heads: attention, each under a name that tells its tokens.
    dtype: of all its products.
  """

  dense: Mapping[str, Dense]
  runs: tuple[tuple[str, Direction, tuple[int, ...]], ...]
  heads: Mapping[str, Heads] = dataclasses.field(default_factory=dict)
  dtype: str = "bfloat16"


MODELS = {
    "llama3-8b": Model(
        dense={
            "qkv": Dense(4096, 6144),
            "o": Dense(4096, 4096),
            "gate_up": Dense(4096, 28672),
            "down": Dense(14336, 4096),
            "head": Dense(4096, 128256),
        },
        runs=(
            ("qkv", "fwd", TOKENS),
            ("qkv", "dx", (512, 8192)),
            ("qkv", "dw", (8192,)),
            ("o", "fwd", (1, 16, 64, 128, 256, 512, 2048)),
            ("gate_up", "fwd", (16, 128, 512, 8192)),
            ("gate_up", "dx", (4096,)),
            ("gate_up", "dw", (8192,)),
            ("down", "fwd", (1, 16, 64, 128, 256, 512, 2048, 8192)),
            ("down", "dx", (1024,)),
            ("down", "dw", (4096,)),
            ("head", "fwd", (16, 256)),
        ),
        # Four sequences of 32 query heads.
        heads={"t1024": Heads(128, 1024, 1024, 128)},
    ),
    "llama3-70b": Model(
        dense={
            "qkv": Dense(8192, 10240),
            "o": Dense(8192, 8192),
            "up": Dense(8192, 28672),
            "down": Dense(28672, 8192),
        },
        runs=(
            ("qkv", "fwd", (1, 32, 128, 256, 2048)),
            ("o", "fwd", (64, 512, 8192)),
            ("o", "dw", (4096,)),
            ("up", "fwd", (4, 128, 8192)),
            ("up", "dx", (4096,)),
            ("up", "dw", (8192,)),
            ("down", "fwd", (2, 16, 256, 4096)),
            ("down", "dx", (2048,)),
        ),
    ),
    "mixtral": Model(
        dense={
            "router": Dense(4096, 8),
            "up": Dense(4096, 14336),
            "experts_up": Dense(4096, 14336, experts=8),
        },
        runs=(
            ("router", "fwd", (512, 8192)),
            ("up", "fwd", (256, 2048)),
            ("up", "dw", (2048,)),
            ("experts_up", "fwd", (64, 512)),
            ("experts_up", "dx", (512,)),
            ("experts_up", "dw", (512,)),
        ),
    ),
    "deepseek-v3": Model(
        dense={
            "q_a": Dense(7168, 1536),
            "q_b": Dense(1536, 24576),
            "kv_a": Dense(7168, 576),
            "kv_b": Dense(512, 32768),
            "o": Dense(16384, 7168),
            "router": Dense(7168, 256),
            "expert_gate_up": Dense(7168, 4096),
            "expert_down": Dense(2048, 7168),
        },
        runs=(
            ("q_a", "fwd", (16, 128, 1024, 8192)),
            ("q_b", "fwd", (64, 256, 4096)),
            ("kv_a", "fwd", (8, 128, 512)),
            ("kv_a", "dw", (8192,)),
            ("kv_b", "fwd", (128,)),
            ("o", "fwd", (1, 64, 128, 2048)),
            ("router", "fwd", (256,)),
            ("expert_gate_up", "fwd", (32, 128)),
            ("expert_down", "fwd", (64, 4096)),
            ("expert_down", "dx", (512,)),
        ),
    ),
    "gemma-7b": Model(
        dense={
            "qkv": Dense(3072, 12288),
            "up": Dense(3072, 24576),
            "down": Dense(24576, 3072),
            "head": Dense(3072, 256000, tied=True),
        },
        runs=(
            ("qkv", "fwd", (1, 128, 4096)),
            ("qkv", "dw", (4096,)),
            ("up", "fwd", (16, 256)),
            ("up", "dx", (512,)),
            ("down", "fwd", (64, 512, 2048)),
            ("head", "fwd", (8,)),
        ),
    ),
    "gpt2": Model(
        dense={
            "qkv": Dense(768, 2304),
            "proj": Dense(768, 768),
            "up": Dense(768, 3072),
            "down": Dense(3072, 768),
            "head": Dense(768, 50257, tied=True),
        },
        runs=(
            ("qkv", "fwd", (1024, 8192)),
            ("qkv", "dx", (8192,)),
            ("proj", "fwd", (512, 8192)),
            ("proj", "dw", (8192,)),
            ("up", "fwd", (8192,)),
            ("up", "dw", (8192,)),
            ("down", "fwd", (256, 8192)),
            ("head", "fwd", (1, 128, 8192)),
            ("head", "dx", (8192,)),
            ("head", "dw", (8192,)),
        ),
        # Eight sequences of 12 heads.
        heads={"t1024": Heads(96, 1024, 1024, 64)},
    ),
    # Images of 224 x 224 in patches of 16 x 16: 196 and one token for the class.
    "vit-l": Model(
        dense={
            "patches": Dense(768, 1024),
            "qkv": Dense(1024, 3072),
            "up": Dense(1024, 4096),
            "down": Dense(4096, 1024),
            "head": Dense(1024, 1000),
        },
        runs=(
            ("patches", "fwd", (32 * 196,)),
            ("qkv", "fwd", (197, 32 * 197)),
            ("up", "fwd", (32 * 197,)),
            ("up", "dw", (32 * 197,)),
            ("down", "fwd", (32 * 197,)),
            ("head", "fwd", (32,)),
        ),
        heads={"t197": Heads(32 * 16, 197, 197, 64)},
        dtype="float16",
    ),
    # One token of each of 8 sequences, against what was said before.
    "decode": Model(dense={}, runs=(), heads={"t4096": Heads(8 * 32, 1, 4096, 128)}),
}


def shapes() -> Iterator[Shape]:
  """Yields the products of all models, in the order above."""
  for model, entry in MODELS.items():
    for layer, direction, all_tokens in entry.runs:
      for tokens in all_tokens:
        yield _dense(model, layer, entry.dense[layer], direction, tokens, entry.dtype)
    for tokens_name, heads in entry.heads.items():
      yield from _attention(model, tokens_name, heads, entry.dtype)


def _dense(
    model: str, layer: str, dense: Dense, direction: Direction, tokens: int, dtype: str
) -> Shape:
  inputs, outputs = dense.inputs, dense.outputs
  if direction == "dw":
    rows, columns = (outputs, inputs) if dense.tied else (inputs, outputs)
    sizes, layouts = (rows, columns, tokens), "TN"
  else:
    forward = direction == "fwd"
    sizes = (tokens, outputs, inputs) if forward else (tokens, inputs, outputs)
    layouts = "NN" if forward != dense.tied else "NT"
  name = f"{model}.{layer}.t{tokens}.{direction}"
  return Shape(name, *sizes, layouts, dtype, dense.experts)


def _attention(model: str, tokens: str, heads: Heads, dtype: str) -> Iterator[Shape]:
  queries, keys, width = heads.queries, heads.keys, heads.width
  products = [
      ("scores", "fwd", (queries, keys, width), "NT"),
      ("values", "fwd", (queries, width, keys), "NN"),
  ]
  if queries > 1:  # Nothing is trained one token at a time.
    products.append(("values", "dv", (keys, width, queries), "TN"))
  for product, direction, sizes, layouts in products:
    name = f"{model}.{product}.{tokens}.{direction}"
    yield Shape(name, *sizes, layouts, dtype, heads.batch)
