"""Compares the speed of generation with transformers': `python tests/compare_transformers.py model=gpt2`.

The arguments are overrides of the config; the weights are random, and the same in both. Each program computes in the
dtype of the run, transformers with all weights in it, and draws from the top 50. transformers runs at torch's default
precision of products in float32 and at that of the run, and its better median counts. All run in turns in this process,
so a machine that slows down slows all. The script prints the tokens per second of all texts together of each round, and
the medians.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from gptexp.config.compose import compose
from gptexp.config.vocabulary import padded, with_vocab_size
from gptexp.distributed.ranks import Rank
from gptexp.machine.device import pick_device
from gptexp.machine.resolve import resolve
from gptexp.model.generate import Sampling, for_inference, generate, matmul_precision
from gptexp.model.gpt import GPT
from gptexp.model.huggingface import to_transformers

N_VOCAB = 50257
NEVER = -1  # an id that ends no text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--prompt-tokens", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--texts", type=int, nargs="+", default=[1, 4], help="numbers of texts (default: 1 4)")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    config = with_vocab_size(compose(args.overrides), padded(N_VOCAB))
    device, m = pick_device(config.train.device, Rank()), config.model
    effective = resolve(config, device, Rank())
    dtype = getattr(torch, effective.dtype.value)
    torch.manual_seed(0)
    model = GPT(m).to(device).eval()
    shape = {"n_layer": m.n_layer, "n_head": m.n_head, "n_embd": m.n_embd, "n_positions": m.block_size}
    peer = GPT2LMHeadModel(GPT2Config(vocab_size=N_VOCAB, eos_token_id=None, pad_token_id=0, **shape))
    peer.load_state_dict(to_transformers(model.state_dict(), m, N_VOCAB), strict=False)  # lm_head is tied to wte
    peer = peer.to(device, dtype).eval()
    prompt = torch.randint(N_VOCAB, (args.prompt_tokens,)).tolist()
    precisions = list(dict.fromkeys(["highest", effective.matmul_precision.value]))
    model = for_inference(model, dtype, precisions[-1])

    def ours(texts: int, new_tokens: int) -> None:
        for _ in generate(model, prompt, N_VOCAB, NEVER, texts, Sampling(new_tokens)):
            pass

    def theirs(precision: str, texts: int, new_tokens: int) -> None:
        ids = torch.tensor([prompt] * texts, device=device)
        with matmul_precision(precision):
            out = peer.generate(ids, attention_mask=ids >= 0, do_sample=True, top_k=50, max_new_tokens=new_tokens)
        assert out.shape == (texts, len(prompt) + new_tokens)

    def tokens_per_s(generated: Callable[[int, int], None], texts: int) -> float:
        start = time.perf_counter()
        generated(texts, args.new_tokens)
        return texts * args.new_tokens / (time.perf_counter() - start)

    peers = [partial(theirs, precision) for precision in precisions]
    names = "|".join(["gptexp", *(f"transformers at {precision}" for precision in precisions)])
    print(f"{effective.dtype.value} on {effective.device_name}, {torch.get_num_threads()} threads, {names}")
    for texts in args.texts:
        for program in (ours, *peers):
            program(texts, 3)  # a warm-up
        rounds = [[tokens_per_s(program, texts) for program in (ours, *peers)] for _ in range(args.rounds)]
        print(f"{texts} texts: {', '.join('|'.join(f'{speed:.0f}' for speed in row) for row in rounds)} tokens/s")
        mine, *theirs_at = zip(*rounds, strict=True)
        other = max(theirs_at, key=statistics.median)
        ratio = statistics.median(a / b for a, b in zip(mine, other, strict=True))
        medians = f"{statistics.median(mine):.1f} tokens/s, transformers {statistics.median(other):.1f}"
        print(f"{texts} texts, medians: {medians}: {ratio:.2f} times as fast")


if __name__ == "__main__":
    main()
