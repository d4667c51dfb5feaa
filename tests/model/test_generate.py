"""Generation: tokens are those without a cache, draws follow the softmax, samples end, text comes in characters.

The judges are whole forward passes, one for each token, and numpy.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import events
from real_runs import train_here
from scipy import stats
from torch.utils._python_dispatch import TorchDispatchMode

from gptexp.config.compose import compose
from gptexp.config.schema import ModelConfig
from gptexp.machine.device import has_native_bfloat16
from gptexp.model import generate as module
from gptexp.model.generate import Sampling, complete, for_inference, generate, matmul_precision, sample, stream
from gptexp.model.gpt import GPT, LayerCache
from gptexp.process.errors import UserError
from gptexp.run.load import load_for_inference
from gptexp.storage import run_dir

N_VOCAB, BLOCK = 20, 16
NEVER = -1  # an id that ends no sample
PRECISION = "highest"


def spread_model(seed: int = 0, bias: bool = True) -> GPT:
    """A model whose distributions are far from uniform. Ids 20 to 23 are padding."""
    torch.manual_seed(seed)
    model = GPT(ModelConfig(n_layer=2, n_head=2, n_embd=16, block_size=BLOCK, vocab_size=24, bias=bias))
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.4)
        model.ln_f.weight.mul_(5)
    return model.eval()


@pytest.fixture
def model() -> GPT:
    return spread_model()


class Bytes:
    """A tokenizer whose ids are bytes, and 256 for the end of a text."""

    n_vocab, eot_token = 257, 256

    def encode_ordinary(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_ordinary_batch(self, text: list[str]) -> list[list[int]]:
        return [self.encode_ordinary(one) for one in text]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    def decode_tokens_bytes(self, tokens: Sequence[int]) -> list[bytes]:
        return [bytes([token]) for token in tokens]


def autocast(dtype: str) -> AbstractContextManager[object]:
    return torch.autocast("cpu", torch.bfloat16) if dtype == "bfloat16" else nullcontext()


def rms(errors: torch.Tensor) -> float:
    return float(errors.pow(2).mean().sqrt())


# A cache that fills up at once, soon, exactly at the end or never, and prompts that fill or exceed a block.
@pytest.mark.parametrize(("length", "new"), [(1, 1), (1, 16), (1, 15), (3, 30), (15, 5), (16, 3), (20, 3)])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("num_samples", [1, 3])
@pytest.mark.parametrize("converted", [False, True])
def test_greedy_tokens_are_those_of_whole_passes(
    length: int, new: int, bias: bool, num_samples: int, converted: bool
) -> None:
    for seed in range(3):
        model = spread_model(seed, bias)
        prompt = torch.randint(N_VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
        wanted = list(prompt)
        for _ in range(new):
            wanted.append(int(model(torch.tensor([wanted[-BLOCK:]]))[0, -1, :N_VOCAB].argmax()))
        used = for_inference(model, torch.float32, PRECISION) if converted else model
        columns = list(generate(used, prompt, N_VOCAB, NEVER, num_samples, Sampling(new, temperature=0)))
        assert columns == [[token] * num_samples for token in wanted[length:]]
        assert len({*wanted[length:]}) > 1 or new < 10  # a constant would prove little


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.2)])
def test_logits_with_a_cache_are_those_without(bias: bool, dtype: str, tolerance: float) -> None:
    """Every position, after prompts of each length, of several texts at once. Logits of up to 7."""
    model = spread_model(bias=bias)
    texts = torch.randint(24, (4, BLOCK), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), autocast(dtype):
        for length in range(1, BLOCK + 1):
            cache = model.empty_cache(len(texts), BLOCK)
            cached = [model.logits(texts[:, :length], cache)]
            cached += [model.logits(texts[:, end : end + 1], cache) for end in range(length, BLOCK)]
            whole = model(texts)[:, length - 1 :]
            assert whole.abs().max() > 4
            torch.testing.assert_close(torch.stack(cached, dim=1), whole, rtol=0, atol=tolerance)
            assert {layer.keys.dtype for layer in cache} == {torch.float32}


def test_autocast_converts_no_cached_keys() -> None:
    """The attention's kernel gets them in float32, as they are; without a cache it gets bfloat16."""
    seen: list[torch.dtype] = []

    class Types(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "scaled_dot_product" in func.name():
                seen.extend(tensor.dtype for tensor in args[:3])
            return func(*args, **(kwargs or {}))

    model, text = spread_model(), torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad(), autocast("bfloat16"), Types():
        cache = model.empty_cache(1, BLOCK)
        model.logits(text[:, :3], cache)
        model.logits(text[:, 3:], cache)
        assert seen == [torch.float32] * 3 * 2 * 2  # two layers, two passes
        seen.clear()
        model.logits(text)
        assert seen == [torch.bfloat16] * 3 * 2


PACKED = pytest.param(True, marks=pytest.mark.skipif(not module._packs(), reason="oneDNN packs no weights here"))


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("packs", [False, PACKED], ids=["plain", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_for_inference_has_the_logits_of_training(
    monkeypatch: pytest.MonkeyPatch, bias: bool, packs: bool, dtype: torch.dtype
) -> None:
    """Of a whole pass in bfloat16 every bit, or with packed weights up to the rounding of the largest logit.

    With a cache, they are as near to float32's as those of training are.
    """
    monkeypatch.setattr(module, "_packs", lambda: packs)
    model = spread_model(bias=bias)
    texts = torch.randint(24, (4, BLOCK), generator=torch.Generator().manual_seed(1))
    used = for_inference(model, dtype, PRECISION)
    assert used.lm_head.weight.is_mkldnn == (packs and dtype == torch.bfloat16)
    with torch.no_grad():
        exact = model(texts)
        with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
            whole = model(texts)
        rounding = float(whole.abs().max()) * torch.finfo(torch.bfloat16).eps if packs else 0.0
        torch.testing.assert_close(used(texts), whole, rtol=0, atol=1e-4 if dtype == torch.float32 else rounding)
        error = max(1e-5, rms(whole - exact))
        for length in range(1, BLOCK + 1):
            cache = used.empty_cache(len(texts), BLOCK)
            cached = [used.logits(texts[:, :length], cache)]
            cached += [used.logits(texts[:, end : end + 1], cache) for end in range(length, BLOCK)]
            assert rms(torch.stack(cached, dim=1) - exact[:, length - 1 :]) < 1.2 * error
            assert {logits.dtype for logits in cached} == {dtype}


def test_weights_are_packed_only_if_torch_may_and_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its operations for packing are not documented: another version of torch may lack one."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.mkldnn, "enabled", False)
        assert not module._packs()
    operations = {name: lambda: True for name in ("_is_mkldnn_bf16_supported", "_reorder_linear_weight")}
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    for complete_set in (False, True):
        more = {"_linear_pointwise": None} if complete_set else {}
        monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace(**operations, **more))
        assert module._packs() is complete_set


@pytest.mark.parametrize("length", [1, 5, BLOCK + 4])
def test_the_first_of_several_texts_is_that_of_one(length: int) -> None:
    model, how = for_inference(spread_model(), torch.float32, PRECISION), Sampling(14, seed=3)
    several, [first] = (list(zip(*generate(model, [7] * length, N_VOCAB, NEVER, n, how), strict=True)) for n in (4, 1))
    assert several[0] == first
    assert len({*several}) == 4


def test_linear_layers_alone_have_the_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after Ctrl-C in one of them."""
    before, seen = torch.get_float32_matmul_precision(), []
    linear, attention = F.linear, F.scaled_dot_product_attention

    def recorded_linear(*args: torch.Tensor) -> torch.Tensor:
        seen.append(torch.get_float32_matmul_precision())
        if len(seen) == 8:
            raise KeyboardInterrupt
        return linear(*args)

    def recorded_attention(*args: torch.Tensor, **more: Any) -> torch.Tensor:
        seen.append(torch.get_float32_matmul_precision())
        return attention(*args, **more)

    monkeypatch.setattr(F, "linear", recorded_linear)
    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded_attention)
    model = for_inference(spread_model(), torch.float32, "high")
    with pytest.raises(KeyboardInterrupt):
        model.logits(torch.zeros(1, 3, dtype=torch.long))
    assert seen == ["high", before, "high", "high", "high", "high", before, "high"]
    assert torch.get_float32_matmul_precision() == before


def test_a_model_for_inference_leaves_its_model_as_it_was() -> None:
    model = spread_model().train()
    before = {name: p.clone() for name, p in model.named_parameters()}
    used = for_inference(model, torch.bfloat16, PRECISION)
    assert not used.training
    assert used.wte.weight is model.wte.weight
    list(generate(used, [1], N_VOCAB, NEVER, 1, Sampling(3)))
    assert model.training
    assert {type(m.weight) for m in model.modules() if isinstance(m, torch.nn.Linear)} == {torch.nn.Parameter}
    assert all(torch.equal(p, before[name]) and p.requires_grad for name, p in model.named_parameters())
    model(torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 4, dtype=torch.long)).backward()


def test_greedy_tokens_in_bfloat16_are_the_most_likely_up_to_rounding() -> None:
    """Rounding may exchange ids whose logits differ by less than a bfloat16 can show."""
    for seed in range(5):
        model = spread_model(seed)
        with torch.no_grad(), autocast("bfloat16"):
            columns = list(generate(model, [1, 2, 3], N_VOCAB, NEVER, 2, Sampling(30, temperature=0)))
            text = [1, 2, 3]
            for first, second in columns:
                assert first == second
                assert first is not None
                logits = model(torch.tensor([text[-BLOCK:]]))[0, -1, :N_VOCAB]
                assert logits[first] > logits.max() - 0.1
                text.append(first)


def test_all_samples_share_one_pass_over_the_prompt(model: GPT, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []
    hidden = GPT.hidden

    def recorded(self: GPT, x: torch.Tensor, *cache: object) -> torch.Tensor:
        shapes.append(tuple(x.shape))
        return hidden(self, x, *cache)  # type: ignore[arg-type]

    monkeypatch.setattr(GPT, "hidden", recorded)
    list(generate(model, [1] * (BLOCK - 2), N_VOCAB, NEVER, 3, Sampling(5)))
    # 14 tokens, two that fit into the cache, and then whole blocks.
    assert shapes == [(1, BLOCK - 2), (3, 1), (3, 1), (3, BLOCK), (3, BLOCK)]


def test_a_cache_takes_one_token_at_a_time_after_the_prompt_and_no_more_than_a_block(model: GPT) -> None:
    cache = model.empty_cache(1, BLOCK)
    model.logits(torch.zeros(1, BLOCK - 1, dtype=torch.long), cache)
    with pytest.raises(ValueError, match=r"17 tokens: the model has model\.block_size=16"):
        model.logits(torch.zeros(1, 2, dtype=torch.long), cache)
    short = model.empty_cache(1, BLOCK)
    model.logits(torch.zeros(1, 3, dtype=torch.long), short)
    with pytest.raises(ValueError, match="2 tokens after 3 in the cache: add one at a time"):
        model.logits(torch.zeros(1, 2, dtype=torch.long), short)


def expected(logits: np.ndarray, how: Sampling) -> np.ndarray:
    """Probabilities after temperature, top-k and top-p, by their definitions."""
    weights = np.exp(logits.astype(np.float64) / how.temperature)
    order = sorted(range(len(logits)), key=lambda i: -weights[i])
    kept = order[: how.top_k] if how.top_k else order
    nucleus, mass = [], 0.0
    for i in kept:
        nucleus.append(i)
        mass += weights[i] / weights[kept].sum()
        if mass >= how.top_p:
            break
    probabilities = np.zeros(len(logits))
    probabilities[nucleus] = weights[nucleus] / weights[nucleus].sum()
    return probabilities


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [0, 1, 5, 100])
@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.7, 0.95, 1.0])
def test_evenly_spaced_draws_give_each_id_its_probability(temperature: float, top_k: int, top_p: float) -> None:
    """numpy computes the probabilities. So many draws, each in the middle of its interval, count to within one."""
    how = Sampling(1, temperature, top_k, top_p)
    n = 4000
    draws = (torch.arange(n, dtype=torch.float64)[:, None] + 0.5) / n
    for seed in range(3):
        logits = 2 * torch.randn(1, N_VOCAB, generator=torch.Generator().manual_seed(seed))
        counts = torch.bincount(sample(logits.expand(n, -1), draws, how)[:, 0], minlength=N_VOCAB).numpy()
        wanted = expected(logits[0].numpy(), how)
        assert np.abs(counts - n * wanted).max() <= 1
        assert counts[wanted == 0].sum() == 0


@pytest.mark.parametrize("draw", [0.0, 1 - 2**-53])
@pytest.mark.parametrize("top_p", [0.5, 1.0])
@pytest.mark.parametrize("top_k", [0, 2])
def test_the_ends_of_the_range_of_a_draw_choose_a_possible_id(draw: float, top_p: float, top_k: int) -> None:
    logits = torch.tensor([[-200.0, 0.0, -1.0, -200.0, -200.0]])
    chosen = sample(logits, torch.tensor([[draw]], dtype=torch.float64), Sampling(1, 0.1, top_k, top_p))
    assert chosen in (1, 2)


@pytest.mark.e2e
@pytest.mark.parametrize(
    "how", [Sampling(1, 1.0, 0), Sampling(1, 0.7, 0), Sampling(1, 2.0, 3), Sampling(1, 1.0, 9, 0.8)]
)
def test_first_tokens_of_many_samples_follow_their_probabilities(model: GPT, how: Sampling) -> None:
    prompt, n = [3, 1, 4], 20_000
    wanted = expected(model.logits(torch.tensor([prompt]))[0, :N_VOCAB].detach().numpy(), how)
    [column] = generate(model, prompt, N_VOCAB, NEVER, n, how)
    counts = np.bincount(np.array(column, dtype=np.int64), minlength=24)
    assert counts[N_VOCAB:].sum() == 0
    counts = counts[:N_VOCAB]
    assert counts[wanted == 0].sum() == 0
    drawn = wanted > 1e-4
    assert stats.chisquare(counts[drawn], wanted[drawn] / wanted[drawn].sum() * counts[drawn].sum()).pvalue > 0.001


@pytest.mark.parametrize("how", [Sampling(4), Sampling(4, temperature=0), Sampling(4, top_k=0), Sampling(4, top_p=0.9)])
def test_padded_ids_are_not_drawn_even_if_most_probable(model: GPT, how: Sampling) -> None:
    with torch.no_grad():
        model.wte.weight[N_VOCAB:] = model.hidden(torch.tensor([[3]]))[0, -1] * 100
    assert model.logits(torch.tensor([[3]])).argmax() >= N_VOCAB
    columns = list(generate(model, [3], N_VOCAB, NEVER, 200, how))
    assert max(token for column in columns for token in column if token is not None) < N_VOCAB


def test_a_sample_depends_on_the_seed_and_its_number_alone(model: GPT) -> None:
    how = Sampling(30, seed=7)
    rows = [list(zip(*generate(model, [1, 2], N_VOCAB, NEVER, n, how), strict=True)) for n in (1, 2, 5)]
    assert rows[0] == rows[1][:1]
    assert rows[1] == rows[2][:2]
    assert len({*rows[2]}) == 5
    longer = list(generate(model, [1, 2], N_VOCAB, NEVER, 1, Sampling(40, seed=7)))
    assert [token for [token] in longer[:30]] == list(rows[0][0])
    # Samples of the next seed are not those of this one in another order.
    other = list(zip(*generate(model, [1, 2], N_VOCAB, NEVER, 5, Sampling(30, seed=8)), strict=True))
    assert not {*rows[2]} & {*other}


def test_a_sample_ends_at_its_end_of_text_and_all_stop_with_the_last(model: GPT) -> None:
    how, end = Sampling(200, temperature=2), 5
    whole = list(zip(*generate(model, [1, 2], N_VOCAB, NEVER, 4, how), strict=True))
    lengths = [row.index(end) for row in whole]
    assert len({*lengths}) > 2
    columns = list(generate(model, [1, 2], N_VOCAB, end, 4, how))
    assert len(columns) == max(lengths)
    for row, length, ended in zip(whole, lengths, zip(*columns, strict=True), strict=True):
        assert ended == (*row[:length], *[None] * (len(columns) - length))


def scripted(monkeypatch: pytest.MonkeyPatch, *rows: bytes) -> None:
    """Have the model sample these texts, each with an end of text after it."""
    longest = max(map(len, rows)) + 1
    columns = iter(torch.tensor([[*row, *[Bytes.eot_token] * (longest - len(row))] for row in rows]).T[:, :, None])
    monkeypatch.setattr(module, "sample", lambda *_: next(columns))


def byte_model() -> GPT:
    return GPT(ModelConfig(n_layer=1, n_head=1, n_embd=8, block_size=64, vocab_size=320)).eval()


def test_a_character_of_several_tokens_is_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "naïve – 日本語, 👩\u200d🔬!"
    scripted(monkeypatch, text.encode())
    pieces = [piece for _, piece in stream(byte_model(), Bytes(), "", 1, Sampling(99))]
    assert [piece for piece in pieces if piece] == list(text)
    assert "\ufffd" not in "".join(pieces)


@pytest.mark.parametrize("raw", [b"a\xff\xfeb", b"\xe6\x97", b"\xe6\x97x\xa5", b"\xf0\x9f\x91", b"\xc3\xa9\xc3"])
def test_only_bytes_that_are_no_character_become_replacements(monkeypatch: pytest.MonkeyPatch, raw: bytes) -> None:
    scripted(monkeypatch, raw)
    assert complete(byte_model(), Bytes(), "prompt ", 1, Sampling(99)) == ["prompt " + raw.decode(errors="replace")]


def test_a_text_that_is_cut_within_a_character_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, "aé".encode())
    assert complete(byte_model(), Bytes(), "", 1, Sampling(2)) == ["a\ufffd"]


def test_samples_come_one_after_the_other_as_soon_as_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, b"ab", b"", b"cdef", b"g")
    pieces: Iterator[tuple[int, str]] = stream(byte_model(), Bytes(), "x", 4, Sampling(99))
    assert [(number, piece) for number, piece in pieces if piece or number == 1] == [
        (0, "a"), (0, "b"),  # as they are generated
        (1, ""),  # has ended at once
        (2, "cde"),  # what there is at the step in which the first one ends
        (2, "f"),
        (3, "g"),
    ]  # fmt: skip


def test_logits_that_are_not_finite_are_refused(model: GPT) -> None:
    with torch.no_grad():
        model.ln_f.weight[0] = torch.nan
    for temperature in (0, 1):
        with pytest.raises(UserError, match="the model's logits are not finite"):
            list(generate(model, [1], N_VOCAB, NEVER, 1, Sampling(1, temperature=temperature)))


def test_sampling_changes_neither_the_random_state_nor_the_mode_of_the_model() -> None:
    model = byte_model().train()
    torch.manual_seed(0)
    before = torch.get_rng_state()
    [text] = complete(model, Bytes(), "", 1, Sampling(4))
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training
    assert text
    model(torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 4, dtype=torch.long)).backward()  # it can still train


def test_the_caller_of_a_stream_may_compute_gradients_between_its_pieces() -> None:
    model = byte_model()
    for _ in stream(model, Bytes(), "a", 1, Sampling(2)):
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_sample_of_a_run_is_that_of_its_checkpoint(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """`gptexp sample` keeps torch's precision of products, "highest", for attention. So does the run, whatever its own.

    On an AMD CPU, products at "medium" have other bits.
    """
    if dtype == "bfloat16" and not has_native_bfloat16(torch.device("cpu")):
        pytest.skip("without native bfloat16 `gptexp sample` computes in float32")
    attention, seen = LayerCache.attend, []

    def recorded(*args: Any) -> torch.Tensor:
        seen.append(torch.get_float32_matmul_precision())
        return attention(*args)

    monkeypatch.setattr(LayerCache, "attend", recorded)
    own = [f"train.dtype={dtype}", "train.matmul_precision=medium", "log.sample_tokens=15", "optim.lr=0.1"]
    config = compose([*tiny, *own])
    run_dir.save_config(tmp_path, config)
    with matmul_precision("highest"):
        assert train_here([*tiny, *own], tmp_path) == 0
        assert torch.get_float32_matmul_precision() == "medium"
    assert {*seen} == {"highest"}
    [sampled] = events(tmp_path, "sample")
    how = Sampling(15, seed=config.train.seed)
    with matmul_precision("highest"):
        assert complete(*load_for_inference(tmp_path, False, None), "", 1, how) == [sampled["text"]]
