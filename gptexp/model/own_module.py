"""The module that `model._target_` stands for: a whole model, or blocks between GPT-2's embeddings and head."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptexp.config.parts import bound, is_block
from gptexp.config.schema import ModelConfig

INIT_STD = 0.02  # of the embeddings, as in GPT-2


def own_module(cfg: ModelConfig) -> nn.Module:
    """Build the module, whose parameters are all that a run trains. Raises `ConfigError`."""
    part = bound("model", cfg)
    module: nn.Module = part(cfg.resolved_vocab_size, cfg.block_size) if not is_block(part.func) else Blocks(cfg, part)
    return module


class Blocks(nn.Module):
    """`model.n_layer` blocks of the user's own between GPT-2's embeddings and its last norm and head."""

    def __init__(self, cfg: ModelConfig, block: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.wte = nn.Embedding(cfg.resolved_vocab_size, cfg.n_embd)
        self.wpe = nn.Embedding(cfg.block_size, cfg.n_embd)
        self.h = nn.ModuleList(block(cfg.n_embd, cfg.block_size) for _ in range(cfg.n_layer))
        self.ln_f = nn.LayerNorm(cfg.n_embd)
        for embedding in (self.wte, self.wpe):
            nn.init.normal_(embedding.weight, std=INIT_STD)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, T, V) of the ids `x` (B, T)."""
        h = self.wte(x) + self.wpe(torch.arange(x.shape[1], device=x.device))  # (B, T, C)
        for block in self.h:
            h = block(h)
        return F.linear(self.ln_f(h), self.wte.weight)
