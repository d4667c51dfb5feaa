"""Compares the speed of a step with plainLM's model of the same shape: `python tests/compare_plainlm.py CHECKOUT`.

CHECKOUT is a clone of github.com/Niccolo-Ajroldi/plainLM. Further arguments are overrides of the config, for example
`model.n_layer=6`. Both models have the shape of `model=llama_124m` with an untied head, and run in one loop: forward
pass under autocast, cross-entropy, backward pass, fused AdamW. Each is compiled as a whole, gptexp's with the loss and
the options of its runs. They run in turns in this process, so a machine that slows down slows both. The script prints
the milliseconds of each round, and the ratio of the medians.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptexp.config.compose import compose
from gptexp.config.vocabulary import padded, with_vocab_size
from gptexp.distributed.ranks import Rank
from gptexp.machine.effective import step_context
from gptexp.machine.resolve import resolve
from gptexp.run.build import build_gpt

CPU = torch.device("cpu")


class Theirs(nn.Module):
    """plainLM's model with the loss that its engine computes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.model(x, None)
        return F.cross_entropy(logits.flatten(0, 1).float(), y.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", help="a clone of github.com/Niccolo-Ajroldi/plainLM")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="steps of a round (default: 4)")
    args = parser.parse_args()
    shape = ["model=llama_124m", "model.tied=false", "batch.micro_batch_size=4", "batch.total_batch_size=2048",
             "train.dtype=bfloat16", "train.compile=on"]  # fmt: skip
    config = with_vocab_size(compose([*shape, *args.overrides]), padded(50257))
    m, effective = config.model, resolve(config, CPU, Rank())
    sys.path.insert(0, args.checkout)
    from models.transformer import ModelConfig, Transformer  # type: ignore[import-not-found]

    sizes = {"dim": m.n_embd, "expand": m.mlp_size / m.n_embd, "n_layers": m.n_layer, "n_heads": m.n_head}
    peer = Theirs(Transformer(ModelConfig(m.vocab_size, config.seq_len, **sizes, mlp="glu", tie_embeddings=m.tied)))
    peer.compile(fullgraph=True, dynamic=False)
    ours = build_gpt(config, effective, CPU)
    numbers = [sum(p.numel() for p in model.parameters()) for model in (ours, peer)]
    assert numbers[0] == numbers[1], numbers
    batch = config.batch.micro_batch_size
    assert isinstance(batch, int)
    rows = torch.randint(50257, (batch, config.seq_len + 1))
    x, y = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    programs: dict[str, Callable[[], None]] = {}
    for name, model in (("gptexp", ours), ("plainLM", peer)):
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, (0.9, 0.95), weight_decay=0.1, fused=True)
        programs[name] = partial(step, model, optimizer, x, y)
    times: dict[str, list[float]] = {name: [] for name in programs}
    print(f"{numbers[0]:,} parameters, {batch} × {config.seq_len} tokens, {torch.get_num_threads()} threads")
    with step_context(effective):
        for one in programs.values():  # compiles
            one()
        for number in range(args.rounds):
            for name, one in list(programs.items())[:: -1 if number % 2 else 1]:
                start = time.perf_counter()
                for _ in range(args.steps):
                    one()
                times[name].append(1e3 * (time.perf_counter() - start) / args.steps)
            print(", ".join(f"{name} {of[-1]:,.0f} ms" for name, of in times.items()), flush=True)
    medians = {name: statistics.median(of) for name, of in times.items()}
    print(f"gptexp {medians['gptexp']:,.0f} ms, plainLM {medians['plainLM']:,.0f} ms: "
          f"gptexp is {medians['plainLM'] / medians['gptexp']:.2f} times as fast")  # fmt: skip


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    main()
