"""`train.attention=flex`: FlexAttention computes what attention in chunks computes.

Torch's compiled FlexAttention has no backward pass on a CPU. So these tests run the graph that the compiler gets by the
backend `aot_eager`, which needs no kernel. A test in test_gpu.py compares the kernels of a GPU.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.nn.attention import flex_attention

from gptexp.config.schema import Config, ModelConfig
from gptexp.distributed.ranks import Rank
from gptexp.machine.ceilings import mask_ms
from gptexp.machine.resolve import resolve
from gptexp.model.attention import Masks, build_block_mask, build_masks, causal_attention
from gptexp.model.gpt import GPT
from gptexp.model.gpus import UNKNOWN_GPU
from gptexp.process.errors import ConfigError

END = 3  # the id with which a document begins


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounterWithBackend]:
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)  # it refuses gradients on a CPU
    torch.compiler.reset()
    yield CompileCounterWithBackend("aot_eager")
    torch.compiler.reset()


def documents(rows: int, t: int, seed: int) -> Tensor:
    return (torch.rand(rows, t, generator=torch.Generator().manual_seed(seed)) < 0.02).cumsum(1)


@pytest.mark.parametrize(("window", "documented"), [(70, False), (None, True), (70, True)])
def test_scores_and_gradients_are_those_of_chunks(
    compiler: CompileCounterWithBackend, window: int | None, documented: bool
) -> None:
    t = 300  # not a multiple of the blocks' 128
    given = documents(2, t, 0) if documented else None

    def attention(q: Tensor, k: Tensor, v: Tensor, masks: Masks | None = None) -> Tensor:
        masks = masks or build_block_mask(t, window, given, q)
        return causal_attention(q, k, v, 0.3, masks=masks)

    q, k, v = (torch.randn(2, heads, t, 16, requires_grad=True) for heads in (4, 2, 2))
    found = torch.compile(attention, fullgraph=True, backend=compiler)(q, k, v)
    expected = attention(q, k, v, build_masks(t, window, given, q))
    torch.testing.assert_close(found, expected)
    pairs = (torch.autograd.grad(y.square().sum(), (q, k, v)) for y in (found, expected))
    for f, e in zip(*pairs, strict=True):
        torch.testing.assert_close(f, e, rtol=1e-4, atol=1e-5)


def test_a_mask_that_hides_nothing_is_none() -> None:
    like = torch.zeros(0)
    assert build_block_mask(30, None, None, like) is None
    assert build_block_mask(30, 30, None, like) is None


@pytest.mark.e2e
@pytest.mark.parametrize("recomputed", [0, 1])
@pytest.mark.parametrize("part", ["model", "blocks"])  # of a split model the blocks are compiled
def test_a_model_trains_as_with_chunks_and_is_compiled_once(
    compiler: CompileCounterWithBackend, part: str, recomputed: int
) -> None:
    cfg = ModelConfig(n_layer=3, n_head=4, n_kv_head=2, n_embd=64, block_size=140, vocab_size=50, bias=False,
                      norm="rmsnorm", position="rope", mlp="swiglu", window=20, window_every=3)  # fmt: skip
    build = partial(GPT, cfg, activation_checkpointing=recomputed, document_start=END)
    flex, chunks = build(flex=True), build()
    chunks.load_state_dict(flex.state_dict())
    compile_it = partial(torch.compile, fullgraph=True, dynamic=False, backend=compiler)
    if part == "model":
        step = compile_it(flex)
    else:
        step = flex
        for block in flex.blocks:
            block.forward = compile_it(block.forward)
    for seed in range(3):
        x, y = torch.randint(cfg.resolved_vocab_size, (2, 2, 140), generator=torch.Generator().manual_seed(seed))
        losses = [model(x, y) for model in (step, chunks)]
        torch.testing.assert_close(*losses)
        for loss in losses:
            loss.backward()
    # A block has a graph for a window and one for none.
    assert compiler.frame_count <= (1 if part == "model" else 3)
    assert not counters["graph_break"]
    for (name, f), e in zip(flex.named_parameters(), chunks.parameters(), strict=True):
        torch.testing.assert_close(f.grad, e.grad, rtol=1e-3, atol=1e-5, msg=name)


def test_the_cost_is_that_of_the_compiled_attention(
    compiler: CompileCounterWithBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=compiler))
    monkeypatch.setattr("gptexp.machine.ceilings.median_s", lambda call: call() or 0.002)
    assert mask_ms(ModelConfig(), 1, 64, torch.device("cpu"), torch.float32, flex=True) == (2, 2)
    assert compiler.frame_count == 2


@pytest.mark.parametrize(
    ("change", "fix"),
    [
        (lambda c: replace(c, train=replace(c.train, compile="off")), "use train.compile=on"),
        (lambda c: replace(c, model=replace(c.model, window=None)), "set model.window or data.document_mask=true"),
        (lambda c: replace(c, model=replace(c.model, dropout=0.1)), "use model.dropout=0"),
        (lambda c: replace(c, world=replace(c.world, sharding="full")), "use world.sharding=optimizer"),
    ],
)
def test_flex_is_refused_where_it_does_not_serve(change: Callable[[Config], Config], fix: str) -> None:
    cfg = Config()
    cfg.model.window, cfg.train.attention, cfg.train.compile, cfg.train.dtype = 64, "flex", "on", "float32"
    assert resolve(cfg, UNKNOWN_GPU, Rank()).attention.value == "flex"
    with pytest.raises(ConfigError, match=f"train.attention=flex: .*; {fix}, or train.attention=auto"):
        resolve(change(cfg), UNKNOWN_GPU, Rank())
