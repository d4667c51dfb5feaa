"""GPT-2 (Radford et al. 2019): pre-norm, GELU(tanh), learned positions, wte tied to lm_head.

Parameters have GPT-2's names, so that its published weights map by name. B batch, T time, C n_embd, H n_head,
D head size, V vocabulary.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gptexp.config.schema import ModelConfig
from gptexp.model.loss import plain_cross_entropy

INIT_STD = 0.02

# (hidden (N, C), head weight (V, C), targets (N,)) -> mean loss
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


class CausalSelfAttention(nn.Module):
    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.n_head = cfg.n_head
        self.dropout = cfg.dropout
        self.c_attn = nn.Linear(cfg.n_embd, 3 * cfg.n_embd, bias=cfg.bias)
        self.c_proj = nn.Linear(cfg.n_embd, cfg.n_embd, bias=cfg.bias)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.c_attn(x).split(c, dim=2)  # 3 × (B, T, C)
        q, k, v = (z.view(b, t, self.n_head, c // self.n_head).transpose(1, 2) for z in (q, k, v))  # (B, H, T, D)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        y = y.transpose(1, 2).reshape(b, t, c)  # (B, T, C)
        return F.dropout(self.c_proj(y), self.dropout, self.training)


class MLP(nn.Module):
    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.dropout = cfg.dropout
        self.c_fc = nn.Linear(cfg.n_embd, 4 * cfg.n_embd, bias=cfg.bias)
        self.c_proj = nn.Linear(4 * cfg.n_embd, cfg.n_embd, bias=cfg.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.c_fc(x), approximate="tanh")  # (B, T, 4C)
        return F.dropout(self.c_proj(x), self.dropout, self.training)


class Block(nn.Module):
    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(cfg.n_embd, bias=cfg.bias)
        self.attn = CausalSelfAttention(cfg)
        self.ln_2 = nn.LayerNorm(cfg.n_embd, bias=cfg.bias)
        self.mlp = MLP(cfg)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class GPT(nn.Module):
    """The model. `forward` returns the training loss or all logits, `logits` those of the next token alone."""

    def __init__(
        self, cfg: ModelConfig, loss: Loss = plain_cross_entropy, activation_checkpointing: bool = False
    ) -> None:
        super().__init__()
        self.cfg = cfg
        self.loss = loss
        self.activation_checkpointing = activation_checkpointing
        self.wte = nn.Embedding(cfg.resolved_vocab_size, cfg.n_embd)
        self.wpe = nn.Embedding(cfg.block_size, cfg.n_embd)
        self.h = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layer))
        self.ln_f = nn.LayerNorm(cfg.n_embd, bias=cfg.bias)
        self.lm_head = nn.Linear(cfg.n_embd, cfg.resolved_vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight
        self._init_weights()

    @torch.no_grad()
    def _init_weights(self) -> None:
        """Normal(0, 0.02), and 0.02/√(2·n_layer) for the projections that write to the residual stream."""
        for name, p in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(p, std=INIT_STD / math.sqrt(2 * self.cfg.n_layer))
            elif p.dim() >= 2:
                nn.init.normal_(p, std=INIT_STD)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def hidden(self, x: Tensor) -> Tensor:
        """Hidden states (B, T, C) after the final LayerNorm, of the tokens `x` (B, T). T is at most block_size."""
        if x.shape[1] > self.cfg.block_size:
            raise ValueError(f"{x.shape[1]} tokens: the model has model.block_size={self.cfg.block_size}")
        positions = torch.arange(x.shape[1], device=x.device)
        h = self.wte(x) + self.wpe(positions)  # (B, T, C)
        h = F.dropout(h, self.cfg.dropout, self.training)
        for block in self.h:
            if self.activation_checkpointing and torch.is_grad_enabled():
                h = checkpoint(block, h, use_reentrant=False, preserve_rng_state=self.cfg.dropout > 0)
            else:
                h = block(h)
        out: Tensor = self.ln_f(h)
        return out

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Mean cross-entropy of the targets `y` (B, T) given the inputs `x` (B, T), a scalar in nats.

        The loss is part of the forward pass, so that DDP and torch.compile process one graph that returns no logits.
        Without `y`, returns the logits (B, T, V). V is model.vocab_size: the ids from the tokenizer's n_vocab up are
        padding, which no text contains.
        """
        h = self.hidden(x)
        if y is None:
            logits: Tensor = self.lm_head(h)
            return logits
        return self.loss(h.flatten(0, 1), self.lm_head.weight, y.flatten())

    def logits(self, x: Tensor) -> Tensor:
        """Logits (B, V) of the token that follows `x` (B, T)."""
        logits: Tensor = self.lm_head(self.hidden(x)[:, -1])
        return logits
