"""Text from a model: softmax over the top k, one token at a time."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from gptexp.config import LIMIT
from gptexp.errors import ConfigError

if TYPE_CHECKING:
    import tiktoken
    import torch

    from gptexp.model import GPT


def generate(
    model: "GPT",
    tokens: "torch.Tensor",
    max_new_tokens: int,
    n_vocab: int,
    temperature: float = 1.0,
    top_k: int = 50,
    generator: "torch.Generator | None" = None,
) -> "torch.Tensor":
    """Continue `tokens` (B, T) by `max_new_tokens`; (B, T + max_new_tokens).

    The model sees at most its block_size last tokens. Ids from `n_vocab` up only pad the vocabulary and are never
    drawn. `temperature` 0 takes the likeliest token; `top_k` 0 draws from all.
    """
    import torch

    with torch.no_grad():
        for _ in range(max_new_tokens):
            logits = model.logits(tokens[:, -model.cfg.block_size :])[:, :n_vocab].float()  # (B, n_vocab)
            if temperature == 0:
                token = logits.argmax(-1, keepdim=True)
            else:
                if top_k:
                    kth = logits.topk(min(top_k, n_vocab)).values[:, -1:]
                    logits = logits.masked_fill(logits < kth, -torch.inf)
                probabilities = (logits / temperature).softmax(-1)
                token = torch.multinomial(probabilities.cpu(), 1, generator=generator).to(tokens.device)
            tokens = torch.cat([tokens, token], dim=1)
    return tokens


def complete(
    model: "GPT",
    tokenizer: "tiktoken.Encoding",
    prompt: str,
    num_samples: int,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int = 50,
    seed: int = 0,
) -> list[str]:
    """`num_samples` continuations of `prompt`, each with the prompt; an empty prompt starts a document."""
    import torch

    ids = tokenizer.encode_ordinary(prompt) or [tokenizer.eot_token]
    device = model.wte.weight.device
    tokens = torch.tensor([ids] * num_samples, device=device)
    # A generator of its own: sampling never draws from the stream that training would.
    generator = torch.Generator().manual_seed(seed)
    was_training = model.training
    model.eval()
    out = generate(model, tokens, max_new_tokens, tokenizer.n_vocab, temperature, top_k, generator)
    model.train(was_training)
    return [prompt + tokenizer.decode(row[len(ids) :]) for row in out.tolist()]


def main(argv: list[str] | None = None) -> None:
    """`gptexp sample RUN_DIR`: text from the newest checkpoint of a run."""
    parser = argparse.ArgumentParser(prog="gptexp sample", description=main.__doc__)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument("--prompt", default="", help="text to continue (default: the start of a document)")
    parser.add_argument("--num-samples", type=int, default=3, metavar="N")
    parser.add_argument("--max-new-tokens", type=int, default=100, metavar="N")
    parser.add_argument("--top-k", type=int, default=50, metavar="K", help="draw from the K likeliest; 0: from all")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help="0: always the likeliest token")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    for name, lowest in (("num_samples", 1), ("max_new_tokens", 1), ("top_k", 0), ("temperature", 0)):
        value = getattr(args, name)
        if not lowest <= value < float("inf"):
            raise ConfigError(f"--{name.replace('_', '-')}={value}: must be {lowest} or above")
    if 0 < args.temperature < 1e-6:
        raise ConfigError(f"--temperature={args.temperature}: must be 0 or at least 0.000001")
    if not 0 <= args.seed < LIMIT:
        raise ConfigError(f"--seed={args.seed}: must lie in [0, 2^63)")

    from gptexp.load import load_run

    model, tokenizer, _ = load_run(args.run_dir)
    samples = complete(
        model,
        tokenizer,
        args.prompt,
        args.num_samples,
        args.max_new_tokens,
        args.temperature,
        args.top_k,
        args.seed,
    )
    print(*samples, sep="\n---\n")


if __name__ == "__main__":
    from gptexp.cli import run_verb

    run_verb(main)
