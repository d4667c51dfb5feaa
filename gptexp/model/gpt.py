"""The model, and GPT-2's block (Radford et al. 2019): pre-norm, GELU(tanh), learned positions. llama.py has the others.

Parameters have the names of GPT-2 or Llama, so that published weights map by name. B batch, T time, C n_embd,
H n_head, D head size, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gptexp.config.schema import ModelConfig
from gptexp.model.attention import Context, LayerCache, Masks, attend, build_block_mask, build_masks
from gptexp.model.layers import Linear, build_norm, gelu, lowered, widened
from gptexp.model.llama import LlamaBlock, rotation
from gptexp.model.loss import plain_cross_entropy, softcapped
from gptexp.model.parametrisation import attention_scale, initial_std, output_factor, residual_factor
from gptexp.model.shapes import names_of

# (hidden (N, C), head weight (V, C), targets (N,), softcap of the logits) -> mean loss
Loss = Callable[[Tensor, Tensor, Tensor, float | None], Tensor]


class CausalSelfAttention(nn.Module):
    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.n_head = cfg.n_head
        self.scale = attention_scale(cfg)
        self.dropout = cfg.dropout
        self.c_attn = Linear(cfg.n_embd, 3 * cfg.n_embd, bias=cfg.bias)
        self.c_proj = Linear(cfg.n_embd, cfg.n_embd, bias=cfg.bias)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.c_attn(x).split(c, dim=2)  # 3 × (B, T, C)
        q, k, v = (z.view(b, t, self.n_head, c // self.n_head).transpose(1, 2) for z in (q, k, v))  # (B, H, T, D)
        y = attend(q, k, v, context, self.scale, self.dropout if self.training else 0.0)  # (B, T, C)
        return F.dropout(self.c_proj(y), self.dropout, self.training)


class MLP(nn.Module):
    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.dropout = cfg.dropout
        self.c_fc = Linear(cfg.n_embd, cfg.mlp_size, bias=cfg.bias)
        self.c_proj = Linear(cfg.mlp_size, cfg.n_embd, bias=cfg.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = gelu(self.c_fc(x))  # (B, T, mlp_size)
        return F.dropout(self.c_proj(x), self.dropout, self.training)


class Block(nn.Module):
    def __init__(self, cfg: ModelConfig, _number: int) -> None:
        super().__init__()
        self.ln_1 = build_norm(cfg, cfg.n_embd)
        self.attn = CausalSelfAttention(cfg)
        self.ln_2 = build_norm(cfg, cfg.n_embd)
        self.mlp = MLP(cfg)
        self.residual_factor = residual_factor(cfg)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        # x + y is the same operation with alpha=1.
        x = torch.add(x, self.attn(self.ln_1(x), context), alpha=self.residual_factor)
        return torch.add(x, self.mlp(self.ln_2(x)), alpha=self.residual_factor)


class GPT(nn.Module):
    """The model. `forward` returns the training loss or all logits, `logits` only those of the next token."""

    rotation: Tensor | None  # of RoPE

    def __init__(
        self,
        cfg: ModelConfig,
        loss: Loss = plain_cross_entropy,
        activation_checkpointing: int = 0,
        document_start: int | None = None,
        flex: bool = False,
    ) -> None:
        """`activation_checkpointing=n`: every n-th block keeps only its input and is recomputed; 0: none.

        `document_start` is the id with which a document begins, if attention must not leave it; None: it may.
        `flex`: masks are those of FlexAttention, which only a compiled model computes fast.
        """
        super().__init__()
        self.cfg = cfg
        self.loss = loss
        self.activation_checkpointing = activation_checkpointing
        self.document_start = document_start
        self.build_masks = build_block_mask if flex else build_masks
        self.windows = {cfg.window_of(number) for number in range(cfg.n_layer)}
        self.names, block = names_of(cfg), Block if cfg.is_gpt2 else LlamaBlock
        self.add_module(self.names.tokens, nn.Embedding(cfg.resolved_vocab_size, cfg.n_embd))
        if cfg.position == "learned":
            self.add_module(self.names.positions, nn.Embedding(cfg.block_size, cfg.n_embd))
        self.add_module(self.names.blocks, nn.ModuleList(block(cfg, number) for number in range(cfg.n_layer)))
        self.add_module(self.names.norm, build_norm(cfg, cfg.n_embd))
        self.output_factor = output_factor(cfg)
        self.lm_head = nn.Linear(cfg.n_embd, cfg.resolved_vocab_size, bias=False)
        if cfg.tied:
            self.lm_head.weight = self.tokens.weight
        self.register_buffer("rotation", rotation(cfg) if cfg.position == "rope" else None, persistent=False)
        self._init_weights()

    @property
    def tokens(self) -> nn.Embedding:
        """The embedding of tokens."""
        return self.get_submodule(self.names.tokens)  # type: ignore[return-value]

    @property
    def blocks(self) -> nn.ModuleList:
        return self.get_submodule(self.names.blocks)  # type: ignore[return-value]

    @torch.no_grad()
    def _init_weights(self) -> None:
        """Normal(0, 0.02), and 0.02/√(2·n_layer) for the projections that write to the residual stream without a norm.

        These are the standard deviations of the standard parametrisation. Norms start with the weight 1.
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
        for layer in self.modules():  # draws the random numbers that a new model draws before `_init_weights`
            if isinstance(layer, nn.Embedding):
                nn.Embedding(layer.num_embeddings, layer.embedding_dim)
            elif isinstance(layer, nn.Linear):
                nn.Linear(layer.in_features, layer.out_features, layer.bias is not None)
        for name, p in self.named_parameters():
            weight = torch.ones(p.shape)
            self._init_weight(name, weight)
            yield name, weight

    def empty_cache(self, rows: int, capacity: int) -> list[LayerCache]:
        """A cache of every layer, for `rows` texts of up to `capacity` tokens."""
        return [LayerCache(rows, capacity) for _ in self.blocks]

    def hidden(self, x: Tensor, cache: Sequence[LayerCache] | None = None) -> Tensor:
        """Hidden states (B, T, C) of the tokens `x` (B, T), after the final norm.

        They are already multiplied by the parametrisation's factor of the logits.

        With a cache, `x` follows the cached tokens: first it is the whole prompt, then always a single token. Cached
        tokens and `x` together are at most block_size tokens.
        """
        before = cache[0].length if cache else 0
        start = self.document_start if cache and x.shape[1] > 1 else None  # one token: no wait for the device
        if start is not None and bool((x[:, 1:] == start).any()):
            raise ValueError("an end of text within a text: the cache is for one document")
        if before + x.shape[1] > self.cfg.block_size:
            raise ValueError(f"{before + x.shape[1]} tokens: the model has model.block_size={self.cfg.block_size}")
        now = slice(before, before + x.shape[1])  # positions
        h = self.tokens(x)  # (B, T, C)
        if self.cfg.position == "learned":
            h = h + self.get_submodule(self.names.positions)(torch.arange(now.start, now.stop, device=x.device))
        h = F.dropout(widened(h), self.cfg.dropout, self.training)
        turn = None if self.rotation is None else self.rotation[:, now]
        # A single token after others needs none, and the first tokens in a cache are not compiled.
        masks = {} if before else self._masks(x, h, build_masks if cache else self.build_masks)
        for number, block in enumerate(self.blocks):
            context = Context(turn, masks, cache[number] if cache else None)
            every = self.activation_checkpointing
            if every and number % every == 0 and torch.is_grad_enabled():
                draws = self.cfg.dropout > 0
                h = checkpoint(block, h, context, use_reentrant=False, preserve_rng_state=draws)
            else:
                h = block(h, context)
        out: Tensor = self.get_submodule(self.names.norm)(h)
        return out if self.output_factor == 1 else out * self.output_factor

    def _masks(self, x: Tensor, h: Tensor, build: Callable[..., Masks | None]) -> dict[int | None, Masks | None]:
        """The masks of each kind of window for the tokens `x` (B, T), whose residual stream is `h`."""
        documents = None if self.document_start is None else (x == self.document_start).cumsum(1)
        like = lowered(h[:0])  # no numbers: only their type and device are needed
        return {window: build(x.shape[1], window, documents, like) for window in self.windows}

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Mean cross-entropy of the targets `y` (B, T) given the inputs `x` (B, T), a scalar in nats.

        The loss is part of the forward pass, so that DDP and torch.compile process one graph that returns no logits.
        Without `y`, returns the logits (B, T, V). V is model.vocab_size: the ids from the tokenizer's n_vocab up are
        padding, which no text contains.
        """
        h = self.hidden(x)
        if y is None:
            return self.head(h)
        return self.loss(h.flatten(0, 1), self.lm_head.weight, y.flatten(), self.cfg.logit_softcap)

    def logits(self, x: Tensor, cache: Sequence[LayerCache] | None = None) -> Tensor:
        """Logits (B, V) of the token that follows the tokens of `cache` and then `x` (B, T)."""
        return self.head(self.hidden(x, cache)[:, -1])

    def head(self, h: Tensor) -> Tensor:
        """The logits (…, V) of the hidden states `h` (…, C)."""
        return softcapped(self.lm_head(h), self.cfg.logit_softcap)
