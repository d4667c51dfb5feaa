"""Text generation by top-k sampling, one token at a time."""

from dataclasses import dataclass

import torch

from gptexp.data.tokenizer import Tokenizer, document_start
from gptexp.model.gpt import GPT


@dataclass(frozen=True)
class Sampling:
    """How to choose the next tokens."""

    max_new_tokens: int
    temperature: float = 1.0  # 0: always the most likely token
    top_k: int = 50  # number of most likely tokens to sample from; 0: all
    seed: int = 0


def generate(model: GPT, tokens: torch.Tensor, n_vocab: int, how: Sampling) -> torch.Tensor:
    """Append tokens to `tokens` (B, T). Returns (B, T + max_new_tokens).

    The model's input is the last block_size tokens. Ids from `n_vocab` up are padding of the vocabulary and are never
    sampled.
    """
    # A separate generator, so that sampling does not change the random numbers of training.
    generator = torch.Generator().manual_seed(how.seed)
    with torch.no_grad():
        for _ in range(how.max_new_tokens):
            logits = model.logits(tokens[:, -model.cfg.block_size :])[:, :n_vocab].float()  # (B, n_vocab)
            if how.temperature == 0:
                token = logits.argmax(-1, keepdim=True)
            else:
                if how.top_k:
                    kth = logits.topk(min(how.top_k, n_vocab)).values[:, -1:]
                    logits = logits.masked_fill(logits < kth, -torch.inf)
                probabilities = (logits / how.temperature).softmax(-1)
                token = torch.multinomial(probabilities.cpu(), 1, generator=generator).to(tokens.device)
            tokens = torch.cat([tokens, token], dim=1)
    return tokens


def complete(model: GPT, tokenizer: Tokenizer, prompt: str, num_samples: int, how: Sampling) -> list[str]:
    """Return `num_samples` continuations of `prompt`, each with the prompt. An empty prompt starts a document."""
    ids = tokenizer.encode_ordinary(prompt) or [document_start(tokenizer)]
    tokens = torch.tensor([ids] * num_samples, device=model.wte.weight.device)
    was_training = model.training
    model.eval()
    out = generate(model, tokens, tokenizer.n_vocab, how)
    model.train(was_training)
    return [prompt + tokenizer.decode(row[len(ids) :]) for row in out.tolist()]
