"""`model.parametrisation`: a model's initial weights, multipliers and optimizer settings, given its sizes. No torch.

`standard` is GPT-2's. `mup` (Yang et al., arXiv 2203.03466, table 8) and `completep` (Dey et al., arXiv 2505.01618,
table 1 with alpha = 1) start from a base model of other sizes and correct for the ratios m = n_embd / base_n_embd and
l = n_layer / base_n_layer. The learning rate that is best for the base is then best for a wider model too; with
`completep` also for a deeper one. D is the size of a head:

| | standard | mup | completep |
|---|---|---|---|
| initial std of the blocks' matrices | s | s / sqrt(m) | s / sqrt(m) |
| the same of c_proj | s / sqrt(2 n_layer) | s / sqrt(2 n_layer m) | s / sqrt(2 base_n_layer m) |
| factor of attention's q·k | 1 / sqrt(D) | sqrt(base D) / D | sqrt(base D) / D |
| factor of what a branch adds to the residual stream | 1 | 1 | 1 / l |
| factor of the logits | 1 | 1 / m | 1 / m |
| learning rate of the blocks' matrices | lr | lr / m | lr / m |
| their weight decay, which AdamW multiplies by lr | w | w | w m |
| Adam's eps of the blocks | eps | eps | eps / (m l) |
| Adam's eps of embeddings and the final norm | eps | eps | eps / m |

The tensors of Llama's block have the row of their kind. Its matrices that write to the residual stream, o_proj and
down_proj, are c_proj; but where a norm follows a branch (`model.residual_norm=post` or `pre_post`), sqrt(2 n_layer) is
left out, as in OLMo 2 (arXiv 2501.00656, section 3.2). The norms of queries and keys are vectors of the blocks, an
untied lm_head is an embedding.

All else is equal: embeddings, LayerNorms and biases have the same initial values and learning rates. At the sizes of
the base all three are equal, bit for bit.

GPT-2 divides the initial c_proj by sqrt(2 n_layer), so that the sum of all branches does not grow with the depth. In
`completep` the factor 1 / l takes over that role, so the divisor stays that of the base: the paper's initial weights do
not depend on the depth. eps follows the size of the gradients. Those of embeddings and the final norm pass no factor
1 / l. (The authors' code, EleutherAI/nanoGPT-mup, divides their eps by m l too.)
"""

import math
from dataclasses import dataclass

from gptexp.config.schema import ModelConfig
from gptexp.model.shapes import is_block_matrix, writes_to_residual
from gptexp.optim.base import in_block

INIT_STD = 0.02


@dataclass(frozen=True)
class Factors:
    """The factors of an optimizer's settings for one parameter."""

    lr: float = 1.0
    weight_decay: float = 1.0
    eps: float = 1.0


def width_ratio(m: ModelConfig) -> float:
    """n_embd / base_n_embd; 1 for `standard`."""
    return 1.0 if m.base_n_embd is None else m.n_embd / m.base_n_embd


def depth_ratio(m: ModelConfig) -> float:
    """n_layer / base_n_layer; 1 for all but `completep`."""
    return 1.0 if m.base_n_layer is None else m.n_layer / m.base_n_layer


def base_head_size(m: ModelConfig) -> float:
    """The size of the base's heads; for `standard`, or if `head_dim` gives it, that of the model's own heads."""
    return m.head_dim or (m.base_n_embd or m.n_embd) / (m.base_n_head or m.n_head)


def initial_std(m: ModelConfig, name: str) -> float:
    """The standard deviation of the initial weights of the matrix `name`."""
    if not is_block_matrix(name):
        return INIT_STD
    std = INIT_STD
    if m.residual_norm == "pre" and writes_to_residual(name):
        std = INIT_STD / math.sqrt(2 * (m.base_n_layer or m.n_layer))
    return std / math.sqrt(width_ratio(m))


def attention_scale(m: ModelConfig) -> float | None:
    """The factor of q·k in attention; None: that of the standard, 1 / sqrt(head size)."""
    size, base = m.head_size, base_head_size(m)
    return None if size == base else math.sqrt(base) / size


def residual_factor(m: ModelConfig) -> float:
    """The factor of what a branch, attention or MLP, adds to the residual stream."""
    return 1.0 / depth_ratio(m)


def output_factor(m: ModelConfig) -> float:
    """The factor of the logits."""
    return 1.0 / width_ratio(m)


def optimizer_factors(m: ModelConfig, name: str) -> Factors:
    """The factors of the optimizer's settings for the parameter `name`."""
    width, depth = width_ratio(m), depth_ratio(m)
    lr = 1.0 / width if is_block_matrix(name) else 1.0
    if m.parametrisation != "completep":
        return Factors(lr)
    weight_decay = width if is_block_matrix(name) else 1.0
    return Factors(lr, weight_decay, 1.0 / (width * depth) if in_block(name) else 1.0 / width)


def describe(m: ModelConfig) -> str:
    """The parametrisation and its base in a few words: `mup; of the base: width 256 = 4 × 64, …`."""
    if m.parametrisation == "standard":
        return m.parametrisation
    sizes = [
        f"width {m.n_embd} = {width_ratio(m):g} × {m.base_n_embd or m.n_embd}",
        f"head size {m.head_size} = {m.head_size / base_head_size(m):g} × {base_head_size(m):g}",
    ]
    if m.parametrisation == "completep":
        sizes.append(f"depth {m.n_layer} = {depth_ratio(m):g} × {m.base_n_layer or m.n_layer}")
    return f"{m.parametrisation}; of the base: {', '.join(sizes)}"
