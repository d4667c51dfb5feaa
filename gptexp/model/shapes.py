"""The parameters of a model: names, shapes, and what each is for. No torch.

Names are those of the model that transformers has for the block: GPT-2's, or else Llama's, with the norms of OLMo 2 and
Gemma 2 and the position embedding of OPT, which Llama lacks.
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from gptexp.config.parts import is_part
from gptexp.config.schema import ModelConfig
from gptexp.optim.base import Shape, in_block
from gptexp.process.imports import permanent


class Names(NamedTuple):
    """The names of a model's parts. Its head is always `lm_head`."""

    tokens: str  # the embedding of tokens
    positions: str  # the embedding of positions
    blocks: str
    norm: str  # after the last block


GPT2 = Names("wte", "wpe", "h", "ln_f")
LLAMA = Names("embed_tokens", "embed_positions", "layers", "norm")

# The norms of Llama's block, by `model.residual_norm`: before attention and after it, before the MLP and after it.
BLOCK_NORMS = {
    "pre": ("input_layernorm", None, "post_attention_layernorm", None),
    "post": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "pre_post": (
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
    ),
}  # fmt: skip

_OUTPUT = re.compile(r"(c_proj|o_proj|down_proj)\.weight")


def names_of(m: ModelConfig) -> Names:
    """The names of the parts of `m`."""
    return GPT2 if m.is_gpt2 else LLAMA


def is_block_matrix(name: str) -> bool:
    """Whether a parameter of this name is a matrix of a block, and so no norm's weight and no bias."""
    return in_block(name) and name.endswith(".weight") and (".c_" in name or "_proj" in name)


def writes_to_residual(name: str) -> bool:
    """Whether a parameter of this name is the matrix of a branch that writes to the residual stream."""
    return in_block(name) and _OUTPUT.search(name) is not None


def parameter_shapes(m: ModelConfig) -> Iterator[tuple[str, Shape, int]]:
    """Yield (name, shape, number of such parameters) for all parameters, those of the blocks under the first one's.

    In the order in which a `GPT` has them.
    """
    if is_part(m):
        yield from _of_part(m)
        return
    names, c, vocab = names_of(m), m.n_embd, m.resolved_vocab_size
    norm = _norm(m)
    yield f"{names.tokens}.weight", (vocab, c), 1
    if m.position == "learned":
        yield f"{names.positions}.weight", (m.block_size, c), 1
    for layer, shape, kinds in _block(m):
        for kind in kinds:
            yield f"{names.blocks}.0.{layer}.{kind}", shape if kind == "weight" else shape[:1], m.n_layer
    for kind in norm:
        yield f"{names.norm}.{kind}", (c,), 1
    if not m.tied:
        yield "lm_head.weight", (vocab, c), 1


_OF_PARTS: dict[str, list[tuple[str, Shape, int]]] = {}


def _of_part(m: ModelConfig) -> list[tuple[str, Shape, int]]:
    """The parameters of a model of the user's own, which is built without memory."""
    if repr(m) not in _OF_PARTS:
        with permanent():
            import torch

            from gptexp.model.own_module import own_module

        with torch.device("meta"):
            own = own_module(m)
        _OF_PARTS[repr(m)] = [(f"own.{name}", tuple(p.shape), 1) for name, p in own.named_parameters()]
    return _OF_PARTS[repr(m)]


def every_parameter(m: ModelConfig) -> Iterator[tuple[str, Shape]]:
    """Yield (name, shape) for each parameter."""
    for name, shape, count in parameter_shapes(m):
        yield from ((name.replace(".0.", f".{number}.", 1), shape) for number in range(count))


def linear_layers(m: ModelConfig) -> dict[str, tuple[int, int, int]]:
    """The products with weights in a forward pass: name -> (inputs, outputs, number of such layers)."""
    blocks = {layer: (shape[1], shape[0], m.n_layer) for layer, shape, kinds in _block(m) if kinds and len(shape) == 2}
    return {**blocks, "lm_head": (m.n_embd, m.resolved_vocab_size, 1)}


def count_parameters(m: ModelConfig) -> int:
    """Number of all parameters; a tied embedding and lm_head count once."""
    return sum(math.prod(shape) * count for _, shape, count in parameter_shapes(m))


def matrix_parameters(m: ModelConfig) -> int:
    """Number of the parameters of all blocks' matrices: the N of laws that do not count embeddings."""
    return m.n_layer * sum(math.prod(shape) for _, shape, _ in _block(m) if len(shape) == 2)


def block_parameters(m: ModelConfig) -> int:
    """Number of the parameters of one block."""
    return sum(math.prod(shape) for name, shape, _ in parameter_shapes(m) if in_block(name))


def _norm(m: ModelConfig) -> tuple[str, ...]:
    """The kinds of parameters that a norm has."""
    if not m.norm_weight:
        return ()
    return ("weight", "bias") if m.bias and m.norm == "layernorm" else ("weight",)


def _block(m: ModelConfig) -> Iterator[tuple[str, Shape, tuple[str, ...]]]:
    """Yield the layers of a block: (name, shape of the weight, kinds of its parameters)."""
    c, hidden, norm = m.n_embd, m.mlp_size, _norm(m)
    linear: tuple[str, ...] = ("weight", "bias") if m.bias else ("weight",)
    if m.is_gpt2:
        yield "ln_1", (c,), norm
        yield "attn.c_attn", (3 * c, c), linear
        yield "attn.c_proj", (c, c), linear
        yield "ln_2", (c,), norm
        yield "mlp.c_fc", (hidden, c), linear
        yield "mlp.c_proj", (c, hidden), linear
        return
    queries, keys, norms = m.n_head * m.head_size, m.kv_heads * m.head_size, BLOCK_NORMS[m.residual_norm]
    yield from ((name, (c,), norm) for name in norms if name)
    yield "self_attn.q_proj", (queries, c), linear
    yield "self_attn.k_proj", (keys, c), linear
    yield "self_attn.v_proj", (keys, c), linear
    yield "self_attn.o_proj", (c, queries), linear
    if m.qk_norm != "none":
        sizes = (m.head_size, m.head_size) if m.qk_norm == "head" else (queries, keys)
        yield from ((f"self_attn.{name}_norm", (size,), norm) for name, size in zip("qk", sizes, strict=True))
    if m.has_gate:
        yield "mlp.gate_proj", (hidden, c), linear
    yield "mlp.up_proj", (hidden, c), linear
    yield "mlp.down_proj", (c, hidden), linear
