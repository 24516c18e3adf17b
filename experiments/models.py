r"""Blocks of models, with XLA's layers and with jaxgemm's: errors, times and memory.

  llama      a block of Llama-3-8B's sizes, 8192 tokens, forward and backward
  llama_tN   the same decoding N sequences, each with 1024 tokens already seen
  vit        a block of ViT-L's, 32 images, forward and backward
  mixtral    a block of Mixtral 8x7B's, 4096 tokens, each with two of eight experts
  mixtral_t8 the same decoding 8 sequences

Parameters and activations are bfloat16, attention is cuDNN's on a GPU. Each result and
gradient is compared with the same block in float64. models.jsonl has a line for each.

  python -m experiments.models
  python -m experiments.models --blocks=vit
"""

from __future__ import annotations

from collections.abc import Sequence
import functools

from absl import app, flags

from experiments import blocks, cli, two_ways

flags.adopt_module_key_flags(cli)
flags.declare_key_flag(two_ways.ACCELERATE.name)

BLOCKS = {
    "llama": lambda: blocks.llama(4, 2048),
    **{f"llama_t{n}": functools.partial(blocks.llama, n, 1, cached=1024)
       for n in (1, 8, 64)},
    "vit": lambda: blocks.vit(32),
    "mixtral": lambda: blocks.mixtral(2, 2048),
    "mixtral_t8": lambda: blocks.mixtral(8, 1, cached=1024),
}
# On a CPU, where the kernels are emulated.
SMALL = {
    "llama": lambda: blocks.llama(2, 16, 64, 96, 4, 2),
    **{f"llama_t{n}": functools.partial(blocks.llama, n, 1, 64, 96, 4, 2, cached=8)
       for n in (1, 8, 64)},
    "vit": lambda: blocks.vit(2, 16, 64, 4),
    "mixtral": lambda: blocks.mixtral(2, 16, 64, 96, 4, 2, 4),
    "mixtral_t8": lambda: blocks.mixtral(8, 1, 64, 96, 4, 2, 4, cached=8),
}
_BLOCKS = flags.DEFINE_list("blocks", list(BLOCKS), "Blocks; see experiments/models.py.")
flags.register_validator(
    _BLOCKS.name, cli.member_check(tuple(BLOCKS)), f"must be among {', '.join(BLOCKS)}"
)


def make_case(name: str, block: blocks.Block) -> two_ways.Case:
  """Returns the block as a case, with a backward pass if it trains."""
  theirs, ours = (
      functools.partial(block.run, layers=blocks.LAYERS[which])
      for which in ("xla", "jaxgemm")
  )
  direction = "both" if block.trains else "forward"
  return two_ways.Case(
      name, direction, functools.partial(blocks.draw, block), theirs, ours
  )


def main(argv: Sequence[str]) -> None:
  platform = cli.start(argv)
  known = BLOCKS if platform.on_gpu else SMALL
  cases = [make_case(name, known[name]()) for name in _BLOCKS.value]
  two_ways.run(cases, platform, "models")


if __name__ == "__main__":
  app.run(main)
