"""GPT-2 (Radford et al. 2019): pre-norm, GELU(tanh), learned positions, wte tied to lm_head.

Parameters have GPT-2's names, so that its published weights map by name. B batch, T time, C n_embd, H n_head,
D head size, V vocabulary.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gptexp.config.schema import ModelConfig
from gptexp.model.loss import plain_cross_entropy
from gptexp.model.parametrisation import attention_scale, initial_std, output_factor, residual_factor

# (hidden (N, C), head weight (V, C), targets (N,)) -> mean loss
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


class LayerCache:
    """Keys and values of all tokens so far in one attention layer, for generation.

    It has room for `capacity` tokens of each of `rows` texts. The first tokens, the prompt, come at once and may be one
    text that all rows share; each later call adds one token a row.

    On a CPU they are kept in float32: torch's attention of one query with 256 keys takes 0.03 ms, and 0.25 in bfloat16;
    with 1,000 keys 0.13 and 1.1. So a token after 1,000 others takes four texts 39 ms and not 75, one text 24 and not
    32 (GPT-2 124M with weights in bfloat16, one core of an AMD EPYC, torch 2.13).
    """

    def __init__(self, rows: int, capacity: int) -> None:
        self.rows, self.capacity, self.length = rows, capacity, 0

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add the keys and values (B, H, T, D) of T tokens. Returns those of all tokens so far, (B, H, length, D)."""
        b, h, t, d = k.shape
        if self.length and t > 1:
            raise ValueError(f"{t} tokens after {self.length} in the cache: add one at a time, or use a new cache")
        if not self.length:  # autocast decides the type of the keys, so the memory is allocated here
            dtype = torch.float32 if k.is_cpu else k.dtype
            self.keys, self.values = (z.new_empty(self.rows, h, self.capacity, d, dtype=dtype) for z in (k, v))
        start, self.length = self.length, self.length + t
        self.keys[:, :, start : self.length] = k  # one shared text fills all rows
        self.values[:, :, start : self.length] = v
        return self.keys[:b, :, : self.length], self.values[:b, :, : self.length]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        """Add keys and values of T tokens, and attend to all so far with their queries `q`; all of them (B, H, T, D).

        The scale None is torch's default.
        """
        causal = self.length == 0  # a causal mask would hide all keys but the first from a single query
        keys, values = self.append(k, v)
        with torch.autocast(q.device.type, enabled=False):  # it would convert all keys and values for each token
            return F.scaled_dot_product_attention(q.to(keys.dtype), keys, values, is_causal=causal, scale=scale)


class Linear(nn.Linear):
    """`nn.Linear`, but a compiled model on a CPU adds the bias in an operation of its own.

    The compiler makes this addition part of the next pass over the result, whereas a product with a bias would first
    fill its result with the bias. (If `x` had two dimensions, the compiler would merge product and addition again.) On
    a GPU the compiler itself chooses between the two.
    """

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None or not x.is_cpu or not torch.compiler.is_compiling():
            return super().forward(x)
        y = F.linear(x, self.weight)
        return y + self.bias.to(y.dtype)  # autocast does not convert the operands of an addition


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` in the type of its input. The weights of a split model may have another type."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), bias, self.eps)


class CausalSelfAttention(nn.Module):
    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.n_head = cfg.n_head
        self.scale = attention_scale(cfg)
        self.dropout = cfg.dropout
        self.c_attn = Linear(cfg.n_embd, 3 * cfg.n_embd, bias=cfg.bias)
        self.c_proj = Linear(cfg.n_embd, cfg.n_embd, bias=cfg.bias)

    def forward(self, x: Tensor, cache: LayerCache | None = None) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.c_attn(x).split(c, dim=2)  # 3 × (B, T, C)
        q, k, v = (z.view(b, t, self.n_head, c // self.n_head).transpose(1, 2) for z in (q, k, v))  # (B, H, T, D)
        p = self.dropout if self.training else 0.0
        if cache is None:
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True, scale=self.scale)
        else:
            y = cache.attend(q, k, v, self.scale)
        y = y.transpose(1, 2).reshape(b, t, c)  # (B, T, C)
        return F.dropout(self.c_proj(y), self.dropout, self.training)


def gelu(x: Tensor) -> Tensor:
    """GELU with tanh. A compiler gets it as x·σ(2u): tanh(u) = 2σ(2u) - 1, and σ takes a CPU half the time of tanh."""
    if not torch.compiler.is_compiling():
        return F.gelu(x, approximate="tanh")
    return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))


class MLP(nn.Module):
    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.dropout = cfg.dropout
        self.c_fc = Linear(cfg.n_embd, 4 * cfg.n_embd, bias=cfg.bias)
        self.c_proj = Linear(4 * cfg.n_embd, cfg.n_embd, bias=cfg.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = gelu(self.c_fc(x))  # (B, T, 4C)
        return F.dropout(self.c_proj(x), self.dropout, self.training)


class Block(nn.Module):
    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(cfg.n_embd, bias=cfg.bias)
        self.attn = CausalSelfAttention(cfg)
        self.ln_2 = LayerNorm(cfg.n_embd, bias=cfg.bias)
        self.mlp = MLP(cfg)
        self.residual_factor = residual_factor(cfg)

    def forward(self, x: Tensor, cache: LayerCache | None = None) -> Tensor:
        # x + y is the same operation with alpha=1.
        x = torch.add(x, self.attn(self.ln_1(x), cache), alpha=self.residual_factor)
        return torch.add(x, self.mlp(self.ln_2(x)), alpha=self.residual_factor)


class GPT(nn.Module):
    """The model. `forward` returns the training loss or all logits, `logits` only those of the next token."""

    def __init__(
        self,
        cfg: ModelConfig,
        loss: Loss = plain_cross_entropy,
        activation_checkpointing: int = 0,
    ) -> None:
        """`activation_checkpointing=n`: every n-th block keeps only its input and is recomputed; 0: none."""
        super().__init__()
        self.cfg = cfg
        self.loss = loss
        self.activation_checkpointing = activation_checkpointing
        self.wte = nn.Embedding(cfg.resolved_vocab_size, cfg.n_embd)
        self.wpe = nn.Embedding(cfg.block_size, cfg.n_embd)
        self.h = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layer))
        self.ln_f = LayerNorm(cfg.n_embd, bias=cfg.bias)
        self.output_factor = output_factor(cfg)
        self.lm_head = nn.Linear(cfg.n_embd, cfg.resolved_vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight
        self._init_weights()

    @torch.no_grad()
    def _init_weights(self) -> None:
        """Normal(0, 0.02), and 0.02/√(2·n_layer) for the projections that write to the residual stream.

        These are the standard deviations of the standard parametrisation.
        """
        for name, p in self.named_parameters():
            self._init_weight(name, p)

    def _init_weight(self, name: str, p: Tensor) -> None:
        if p.dim() >= 2:
            nn.init.normal_(p, std=initial_std(self.cfg, name))
        elif name.endswith("bias"):
            nn.init.zeros_(p)

    @torch.no_grad()
    def initial_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights, on the CPU, that a new model of this config would have.

        Takes the memory of a block or of wte, and the time of drawing two numbers for each parameter on one core.
        """
        cfg = self.cfg
        parts: list[Callable[[], nn.Module]] = [
            lambda: nn.Embedding(cfg.resolved_vocab_size, cfg.n_embd),
            lambda: nn.Embedding(cfg.block_size, cfg.n_embd),
            *[lambda: Block(cfg)] * cfg.n_layer,
            lambda: nn.Linear(cfg.n_embd, cfg.resolved_vocab_size, bias=False),
        ]
        for build in parts:  # draws the random numbers that a new model draws before `_init_weights`
            build()
        for name, p in self.named_parameters():
            weight = torch.ones(p.shape)
            self._init_weight(name, weight)
            yield name, weight

    def empty_cache(self, rows: int, capacity: int) -> list[LayerCache]:
        """A cache of every layer, for `rows` texts of up to `capacity` tokens."""
        return [LayerCache(rows, capacity) for _ in self.h]

    def hidden(self, x: Tensor, cache: Sequence[LayerCache] | None = None) -> Tensor:
        """Hidden states (B, T, C) of the tokens `x` (B, T), after the final LayerNorm.

        They are already multiplied by the parametrisation's factor of the logits.

        With a cache, `x` follows the cached tokens: first it is the whole prompt, then always a single token. Cached
        tokens and `x` together are at most block_size tokens.
        """
        before = cache[0].length if cache else 0
        if before + x.shape[1] > self.cfg.block_size:
            raise ValueError(f"{before + x.shape[1]} tokens: the model has model.block_size={self.cfg.block_size}")
        positions = torch.arange(x.shape[1], device=x.device)
        if before:
            positions += before
        h = (self.wte(x) + self.wpe(positions)).float()  # (B, T, C)
        h = F.dropout(h, self.cfg.dropout, self.training)
        layers: Sequence[LayerCache | None] = cache or [None] * len(self.h)
        for number, (block, layer) in enumerate(zip(self.h, layers, strict=True)):
            every = self.activation_checkpointing
            if every and number % every == 0 and torch.is_grad_enabled():
                h = checkpoint(block, h, use_reentrant=False, preserve_rng_state=self.cfg.dropout > 0)
            else:
                h = block(h, layer)
        out: Tensor = self.ln_f(h)
        return out if self.output_factor == 1 else out * self.output_factor

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

    def logits(self, x: Tensor, cache: Sequence[LayerCache] | None = None) -> Tensor:
        """Logits (B, V) of the token that follows the tokens of `cache` and then `x` (B, T)."""
        logits: Tensor = self.lm_head(self.hidden(x, cache)[:, -1])
        return logits
