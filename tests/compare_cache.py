"""Compares the speed of generation with and without a cache: `python tests/compare_cache.py model=gpt2`.

The arguments are overrides of the config; the weights are random. `without` computes the whole text again for each
token, samples from the top 50 and knows no end of a text. Both run in turns in this process, so a machine that slows
down slows both. The script prints the tokens per second of all samples together, and the ratio, of each round.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from gptexp.config.compose import compose
from gptexp.config.vocabulary import padded, with_vocab_size
from gptexp.distributed.ranks import Rank
from gptexp.machine.device import pick_device
from gptexp.model.generate import Sampling, generate
from gptexp.model.gpt import GPT

N_VOCAB = 50257
NEVER = -1  # an id that ends no sample


@torch.no_grad()
def without(model: GPT, prompt: list[int], num_samples: int, how: Sampling) -> None:
    text = torch.tensor([prompt] * num_samples, device=model.wte.weight.device)
    generator = torch.Generator().manual_seed(how.seed)
    for _ in range(how.max_new_tokens):
        logits = model.logits(text[:, -model.cfg.block_size :])[:, :N_VOCAB].float()
        logits = logits.masked_fill(logits < logits.topk(how.top_k).values[:, -1:], -torch.inf)
        token = torch.multinomial(logits.softmax(-1).cpu(), 1, generator=generator)
        text = torch.cat([text, token.to(text.device)], dim=1)


def with_cache(model: GPT, prompt: list[int], num_samples: int, how: Sampling) -> None:
    for _ in generate(model, prompt, N_VOCAB, NEVER, num_samples, how):
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--prompt-tokens", type=int, default=50)
    parser.add_argument("--new-tokens", type=int, default=200)
    parser.add_argument("--num-samples", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    config = with_vocab_size(compose(args.overrides), padded(N_VOCAB))
    torch.manual_seed(0)
    device = pick_device(config.train.device, Rank())
    model = GPT(config.model).to(device).eval()
    prompt = torch.randint(N_VOCAB, (args.prompt_tokens,)).tolist()
    how = Sampling(args.new_tokens)

    def tokens_per_s(generated: Callable[[GPT, list[int], int, Sampling], None]) -> float:
        start = time.perf_counter()
        generated(model, prompt, args.num_samples, how)
        return args.num_samples * args.new_tokens / (time.perf_counter() - start)

    for warm_up in (without, with_cache):
        warm_up(model, prompt, args.num_samples, Sampling(2))
    ratios = []
    for number in range(1, args.rounds + 1):
        slow, fast = tokens_per_s(without), tokens_per_s(with_cache)
        ratios.append(fast / slow)
        print(f"round {number}: {slow:.1f} tokens/s without, {fast:.1f} with a cache: {fast / slow:.2f} times as fast")
    print(f"median: {statistics.median(ratios):.2f} times as fast on {device}, {torch.get_num_threads()} threads")


if __name__ == "__main__":
    main()
