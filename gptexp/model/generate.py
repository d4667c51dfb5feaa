"""Text generation: the prompt's keys and values are computed once; then each step adds a token to every sample."""

import codecs
import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptexp.data.tokenizer import Tokenizer, document_start
from gptexp.model.attention import LayerCache
from gptexp.model.own_model import Model, device_of
from gptexp.process.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """How to choose the next tokens."""

    max_new_tokens: int
    temperature: float = 1.0  # 0: always the most likely token
    top_k: int = 50  # number of most likely tokens to sample from; 0: all
    top_p: float = 1.0  # of those, only the most likely that together have this share of their probability; 1: all
    seed: int = 0


@contextmanager
def matmul_precision(name: str) -> Iterator[None]:
    """Within, torch computes products in float32 with the precision that it calls `name`."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:  # Ctrl-C ends a continuation, but not the program
        torch.set_float32_matmul_precision(before)


class InferenceLinear(nn.Module):
    """A linear layer in `dtype`, with weights that are converted once, where autocast converts them every time.

    On a CPU, products of few rows in float32 take up to half the time with a weight that is in memory as (in, out), and
    in bfloat16 with one that oneDNN has packed (the operations with which Inductor does so are not documented).

    In float32 this layer has the matmul `precision`, whatever the caller's is. So the caller can keep "highest" for
    attention: on an AMD CPU, "medium" takes a third of the time for this layer, but for attention of a query with 256
    keys 0.3 ms in place of 0.03 (torch 2.13).
    """

    def __init__(self, layer: nn.Linear, dtype: torch.dtype, precision: str) -> None:
        super().__init__()
        weight = layer.weight.detach().to(dtype)  # (out, in)
        if weight.is_cpu and dtype == torch.float32:
            weight = weight.t().contiguous().t()
        elif weight.is_cpu and dtype == torch.bfloat16 and _packs():
            weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        self.weight = weight
        self.bias = None if layer.bias is None else layer.bias.detach().to(dtype)
        self.precision = precision

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.weight.dtype)
        if self.weight.is_mkldnn:
            y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
            return y
        with matmul_precision(self.precision):
            return F.linear(x, self.weight, self.bias)


def _packs() -> bool:
    """Whether torch may use oneDNN, and this packs weights in bfloat16 on this CPU."""
    needed = ("_is_mkldnn_bf16_supported", "_reorder_linear_weight", "_linear_pointwise")
    may = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
    can = all(hasattr(torch.ops.mkldnn, name) for name in needed)
    return bool(may and can and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def for_inference(model: Model, dtype: torch.dtype, precision: str) -> Model:
    """Return a copy of `model`, in eval mode, with which tokens are generated faster. It has no loss.

    Its logits are those of `model` under autocast to `dtype`, up to rounding. In float32 the linear layers have torch's
    matmul `precision`; generate text with it within `matmul_precision("highest")`. The linear layers have weights of
    their own, so the output layer is no longer tied to the embedding; all other weights are shared. `model` must not be
    split over ranks.
    """
    copied = copy.deepcopy(model, {id(p): p for p in model.parameters()}).eval()
    for parent in list(copied.modules()):
        for name, layer in parent.named_children():
            if isinstance(layer, nn.Linear):
                setattr(parent, name, InferenceLinear(layer, dtype, precision))
    return copied


def complete(model: Model, tokenizer: Tokenizer, prompt: str, num_samples: int, how: Sampling) -> list[str]:
    """Return `num_samples` continuations of `prompt`, each with the prompt. An empty prompt starts a document."""
    was_training = model.training
    model.eval()
    texts = [prompt] * num_samples
    for number, piece in stream(model, tokenizer, prompt, num_samples, how):
        texts[number] += piece
    model.train(was_training)
    return texts


def stream(
    model: Model, tokenizer: Tokenizer, prompt: str, num_samples: int, how: Sampling
) -> Iterator[tuple[int, str]]:
    """Yield the continuations of `prompt` in pieces, as (number of the sample, text), one sample after the other.

    All samples are generated together, because one step for several takes less time than a step for each. The first
    that has not ended is yielded as it grows; when it ends, the next one follows with its text so far. Every sample
    yields a piece, which may be empty. A piece has whole characters: bytes that may still become a character wait for
    the next token, other bytes become U+FFFD. The model must be in eval mode.
    """
    ids = tokenizer.encode_ordinary(prompt) or [document_start(tokenizer)]
    decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in range(num_samples)]
    pieces = [""] * num_samples  # text that is not yielded yet
    current = 0
    for tokens in generate(model, ids, tokenizer.n_vocab, tokenizer.eot_token, num_samples, how):
        for number, token in enumerate(tokens):
            if token is not None:
                pieces[number] += decoders[number].decode(tokenizer.decode_tokens_bytes([token])[0])
        while tokens[current] is None:  # not all of them are
            yield current, pieces[current] + decoders[current].decode(b"", final=True)
            current += 1
        yield current, pieces[current]
        pieces[current] = ""
    for number in range(current, num_samples):
        yield number, pieces[number] + decoders[number].decode(b"", final=True)


@torch.inference_mode()
def generate(
    model: Model, prompt: Sequence[int], n_vocab: int, end: int | None, num_samples: int, how: Sampling
) -> Iterator[list[int | None]]:
    """Yield the next token of every sample, up to `max_new_tokens` times, and stop when all samples have ended.

    A sample ends at the id `end`, if there is one: that and all its later tokens are None. The model's input is the
    last block_size tokens. Ids from `n_vocab` up are padding of the vocabulary and are never sampled. A sample's random
    numbers depend on the seed and on its own number, not on how many samples there are. The model must be in eval mode.
    """
    # These generators are not torch's, so sampling does not change the random numbers of training.
    generators = [np.random.default_rng((how.seed, number)) for number in range(num_samples)]
    text = torch.tensor([prompt], device=device_of(model)).expand(num_samples, -1)  # (N, T)
    cache = model.empty_cache(num_samples, min(model.cfg.block_size, len(prompt) + how.max_new_tokens))
    ended = [False] * num_samples
    for step in range(how.max_new_tokens):
        logits = decode_one_token(model, text, cache) if step else prefill(model, text, cache)  # (N, V)
        draws = torch.tensor([[generator.random()] for generator in generators], dtype=torch.float64)
        token = sample(logits[:, :n_vocab].float().cpu(), draws, how)  # (N, 1)
        ids = token[:, 0].tolist()
        ended = [before or i == end for before, i in zip(ended, ids, strict=True)]
        if all(ended):
            return
        yield [None if over else i for over, i in zip(ended, ids, strict=True)]
        text = torch.cat([text, token.to(text.device)], dim=1)


def prefill(model: Model, text: Tensor, cache: list[LayerCache]) -> Tensor:
    """Fill the empty cache with the end of the prompt, which is every row of `text` (N, T). Returns logits (N, V)."""
    return model.logits(text[:1, -model.cfg.block_size :], cache).expand(len(text), -1)


def decode_one_token(model: Model, text: Tensor, cache: list[LayerCache]) -> Tensor:
    """Logits (N, V) of the token after `text` (N, T). The cache holds all of these tokens but the last one."""
    if text.shape[1] > model.cfg.block_size or not cache:
        # Every token moves by one position, and keys and values depend on positions: the cache is of no more use.
        return model.logits(text[:, -model.cfg.block_size :])
    return model.logits(text[:, -1:], cache)


def sample(logits: Tensor, draws: Tensor, how: Sampling) -> Tensor:
    """Choose an id for each row of `logits` (N, V), float32 on the CPU. Returns (N, 1).

    `draws` (N, 1) are uniform in [0, 1). The chosen id is the first whose cumulative probability exceeds the draw.
    top_p is applied after top_k, as the share of what top_k leaves (Holtzman et al., arXiv 1904.09751). Raises
    `UserError` if a logit is NaN, or the largest one infinite.
    """
    if not logits.amax(-1).isfinite().all():  # false for a NaN too; checking every logit takes 2 ms
        raise UserError("the model's logits are not finite: its weights are damaged, or its training diverged")
    if how.temperature == 0:
        return logits.argmax(-1, keepdim=True)
    n = logits.shape[1]
    if how.top_k or how.top_p < 1:
        logits, ids = logits.topk(min(how.top_k or n, n))  # the most likely first
    else:
        ids = torch.arange(n).expand_as(logits)
    cumulative = (logits.double() / how.temperature).softmax(-1).cumsum(-1)
    last = (cumulative < how.top_p).sum(-1, keepdim=True).clamp(max=logits.shape[1] - 1)
    chosen = torch.searchsorted(cumulative, draws * cumulative.gather(1, last), right=True)
    return ids.gather(1, chosen)  # never after `last`: a draw is below 1, so its product is below the sum
