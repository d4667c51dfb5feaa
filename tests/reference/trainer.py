"""An independent trainer in float64, written from the definitions. It imports nothing of gptexp.

The model is GPT-2 (Radford et al. 2019, with the layer norms of Ba et al. 2016 and the GELU of Hendrycks and Gimpel
2016), or its blocks have the parts of a `Kind`, each from its paper. The optimizer is AdamW (Loshchilov and Hutter
2019, algorithm 2), the schedule a linear warm-up and a cosine. Weights decay if they have two dimensions. The order of
the data is that of gptexp/data/README.md.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

VALIDATION_KEY = int.from_bytes(b"validate", "big")
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Kind:
    """The parts of a block that is not GPT-2's. Its weights have Llama's names."""

    norm: str = "rmsnorm"  # or layernorm
    norm_weight: bool = True
    residual_norm: str = "pre"  # or post, pre_post
    position: str = "rope"  # or learned, none
    theta: float = 10_000.0
    scaling: dict[str, float] | None = None
    n_kv_head: int = 2
    head_dim: int = 8
    qk_norm: str = "none"  # or head, all
    window: int | None = None
    window_every: int | None = None
    mlp: str = "swiglu"  # or geglu, gelu, relu2
    tied: bool = True
    softcap: float | None = None


@dataclass(frozen=True)
class Setup:
    """What a run is told on its command line. Lengths in tokens."""

    text: Path
    n_layer: int
    n_head: int
    seq_len: int
    total_batch_size: int
    micro_batch_size: int
    world_size: int
    steps: int
    val_tokens: int
    eval_every: int
    lr: float
    warmup: int
    min_lr_ratio: float
    seed: int
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip: float  # 0: none
    ramp_from: int = 0  # of a batch ramp: tokens of its first step, of which each step is a multiple; 0: no ramp
    ramp_over: int = 0
    kind: Kind | None = None  # None: GPT-2
    z_loss: float = 0.0


@dataclass(frozen=True)
class Step:
    """What a run logs of a step; `val_loss` after it, or None."""

    loss: float
    lr: float
    grad_norm: float
    small_sq_norm: float  # mean over the first two micro-batches of each rank, or the only one
    val_loss: float | None


# --- data ------------------------------------------------------------------------------------------------------------


def token_ids(text: Path, ranks: Path) -> list[int]:
    """GPT-2's ids of a text, by tiktoken; `ranks` is the published table of its byte pairs."""
    from tiktoken import Encoding
    from tiktoken.load import load_tiktoken_bpe

    pattern = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
    return Encoding("gpt2", pat_str=pattern, mergeable_ranks=load_tiktoken_bpe(str(ranks)), special_tokens={}).encode(
        text.read_text(encoding="utf-8")
    )


def splitmix64(x: int) -> int:
    """Steele, Lea and Flood 2014, figure 17, with the state `x`."""
    mask = 2**64 - 1
    z = (x + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def key_of(*values: int) -> int:
    key = 0
    for value in values:
        key = splitmix64(key ^ value)
    return key


def shuffled(n: int, key: int) -> list[int]:
    """The numbers below `n` (at most 65,535), sorted by their hashes."""
    return sorted(range(n), key=lambda i: splitmix64(i ^ key))


def windows(n: int, n_val: int, seed: int, samples: range) -> tuple[list[int], list[int]]:
    """The training windows of these samples, and the validation windows, of a text of `n` windows."""
    held_out = sorted(shuffled(n, VALIDATION_KEY)[:n_val])
    kept = [window for window in range(n) if window not in set(held_out)]
    found = []
    for sample in samples:
        epoch, position = divmod(sample, len(kept))
        found.append(kept[shuffled(len(kept), key_of(seed, epoch))[position]])
    return found, held_out


# --- model -----------------------------------------------------------------------------------------------------------


def layer_norm(x: Tensor, w: Weights, name: str) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + 1e-5)
    return scaled * w[f"{name}.weight"] + w.get(f"{name}.bias", 0)


def linear(x: Tensor, w: Weights, name: str) -> Tensor:
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def attention(x: Tensor, w: Weights, name: str, n_head: int) -> Tensor:
    b, t, c = x.shape
    q, k, v = (
        part.reshape(b, t, n_head, c // n_head).transpose(1, 2) for part in linear(x, w, f"{name}.c_attn").chunk(3, -1)
    )
    scores = q @ k.transpose(-2, -1) / math.sqrt(c // n_head)
    scores = scores.masked_fill(torch.ones(t, t).triu(1).bool(), -math.inf)
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    y = (weights / weights.sum(-1, keepdim=True)) @ v
    return linear(y.transpose(1, 2).reshape(b, t, c), w, f"{name}.c_proj")


def normed(x: Tensor, w: Weights, name: str, kind: Kind) -> Tensor:
    """Ba et al. 2016, or Zhang and Sennrich 2019, equation 4."""
    if kind.norm == "layernorm":
        x = x - x.mean(-1, keepdim=True)
    x = x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-5)
    return x * w[f"{name}.weight"] + w.get(f"{name}.bias", 0) if kind.norm_weight else x


def turned(x: Tensor, kind: Kind) -> Tensor:
    """Su et al. 2021, section 3.2.2, in complex numbers: pair i of `x` (B, H, T, D) is its numbers i and i + D/2."""
    t, d = x.shape[-2:]
    rates = [kind.theta ** (-2 * i / d) for i in range(d // 2)]
    if kind.scaling is not None:
        rates = [longer(rate, **kind.scaling) for rate in rates]
    angles = torch.arange(t, dtype=x.dtype)[:, None] * torch.tensor(rates, dtype=x.dtype)
    pairs = torch.complex(x[..., : d // 2], x[..., d // 2 :]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([pairs.real, pairs.imag], -1)


def longer(
    rate: float,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: float,
) -> float:
    """The rate of a wave in Llama 3.1, as its reference code has it."""
    wave = 2 * math.pi / rate
    if wave < original_max_position_embeddings / high_freq_factor:
        return rate
    if wave > original_max_position_embeddings / low_freq_factor:
        return rate / factor
    smooth = (original_max_position_embeddings / wave - low_freq_factor) / (high_freq_factor - low_freq_factor)
    return (1 - smooth) * rate / factor + smooth * rate


def grouped_attention(x: Tensor, w: Weights, name: str, n_head: int, kind: Kind, window: int | None) -> Tensor:
    """Ainslie et al. 2023: head h of the queries has the keys of group h // (n_head / n_kv_head)."""
    b, t, _ = x.shape
    q, k, v = (linear(x, w, f"{name}.{part}_proj") for part in "qkv")
    if kind.qk_norm == "all":
        q, k = normed(q, w, f"{name}.q_norm", kind), normed(k, w, f"{name}.k_norm", kind)
    q, k, v = (z.reshape(b, t, -1, kind.head_dim).transpose(1, 2) for z in (q, k, v))
    if kind.qk_norm == "head":
        q, k = normed(q, w, f"{name}.q_norm", kind), normed(k, w, f"{name}.k_norm", kind)
    if kind.position == "rope":
        q, k = turned(q, kind), turned(k, kind)
    heads = []
    for head in range(n_head):
        group = head // (n_head // kind.n_kv_head)
        scores = q[:, head] @ k[:, group].transpose(-2, -1) / math.sqrt(kind.head_dim)
        for query in range(t):
            for key in range(t):
                if key > query or (window is not None and query - key >= window):
                    scores[:, query, key] = -math.inf
        heads.append(torch.softmax(scores, -1) @ v[:, group])
    return linear(torch.cat(heads, -1), w, f"{name}.o_proj")


def feed_forward(x: Tensor, w: Weights, name: str, kind: Kind) -> Tensor:
    """Shazeer 2020, equations 5 and 6; So et al. 2021 for the square of ReLU."""
    up = linear(x, w, f"{name}.up_proj")
    if kind.mlp in ("swiglu", "geglu"):
        gate = linear(x, w, f"{name}.gate_proj")
        up = up * (gate / (1 + torch.exp(-gate)) if kind.mlp == "swiglu" else gelu(gate))
    else:
        up = gelu(up) if kind.mlp == "gelu" else torch.clamp(up, min=0) ** 2
    return linear(up, w, f"{name}.down_proj")


def hidden_of_kind(w: Weights, x: Tensor, s: Setup, kind: Kind) -> Tensor:
    """The states after the final norm, in a model with Llama's names of weights."""
    h = w["embed_tokens.weight"][x]
    if kind.position == "learned":
        h = h + w["embed_positions.weight"][: s.seq_len]
    for i in range(s.n_layer):
        is_full = kind.window_every is not None and (i + 1) % kind.window_every == 0
        block = f"layers.{i}"
        second = "post_attention" if kind.residual_norm == "pre" else "pre_feedforward"
        for before, after in (("input", "post_attention"), (second, "post_feedforward")):
            y = h if kind.residual_norm == "post" else normed(h, w, f"{block}.{before}_layernorm", kind)
            if before == "input":
                window = None if is_full else kind.window
                y = grouped_attention(y, w, f"{block}.self_attn", s.n_head, kind, window)
            else:
                y = feed_forward(y, w, f"{block}.mlp", kind)
            h = h + (y if kind.residual_norm == "pre" else normed(y, w, f"{block}.{after}_layernorm", kind))
    return normed(h, w, "norm", kind)


def logits_of(w: Weights, x: Tensor, s: Setup) -> Tensor:
    if s.kind is not None:
        head = w["embed_tokens.weight" if s.kind.tied else "lm_head.weight"]
        z = hidden_of_kind(w, x, s, s.kind) @ head.T
        return z if s.kind.softcap is None else s.kind.softcap * torch.tanh(z / s.kind.softcap)
    h = w["wte.weight"][x] + w["wpe.weight"][: s.seq_len]
    for block in (f"h.{i}" for i in range(s.n_layer)):
        h = h + attention(layer_norm(h, w, f"{block}.ln_1"), w, f"{block}.attn", s.n_head)
        m = layer_norm(h, w, f"{block}.ln_2")
        h = h + linear(gelu(linear(m, w, f"{block}.mlp.c_fc")), w, f"{block}.mlp.c_proj")
    return layer_norm(h, w, "ln_f") @ w["wte.weight"].T


def mean_loss(w: Weights, rows: Tensor, s: Setup, z_loss: float = 0.0) -> Tensor:
    """Mean cross-entropy of rows of T + 1 ids: each id is predicted from those before it.

    `z_loss` adds the auxiliary loss of PaLM (Chowdhery et al. 2022, section 5) with this weight.
    """
    x, y = rows[:, :-1], rows[:, 1:]
    logits = logits_of(w, x, s)
    log_z = torch.logsumexp(logits, -1)
    chosen = logits.gather(-1, y[..., None])[..., 0]
    return (log_z - chosen + z_loss * log_z**2).mean()


# --- training --------------------------------------------------------------------------------------------------------


def step_ends(s: Setup) -> list[int]:
    """The tokens before the first step, and after each step."""
    ends = [0]
    for _ in range(s.steps):
        size = s.total_batch_size
        if ends[-1] < s.ramp_over:
            linear = s.ramp_from + Fraction((size - s.ramp_from) * ends[-1], s.ramp_over)
            size = math.floor(linear / s.ramp_from + Fraction(1, 2)) * s.ramp_from
        ends.append(ends[-1] + size)
    return ends


def lr_at(before: int, after: int, end: int, s: Setup) -> float:
    if after <= s.warmup:
        return s.lr * after / s.warmup
    done = (max(before, s.warmup) - s.warmup) / (end - s.warmup)
    return s.lr * (s.min_lr_ratio + (1 - s.min_lr_ratio) * (1 + math.cos(math.pi * done)) / 2)


def train(weights: Weights, ids: list[int], s: Setup) -> Iterator[Step]:
    """Train `weights` in place and yield each step."""
    w = {name: value.double().requires_grad_() for name, value in weights.items()}
    m = {name: torch.zeros_like(value) for name, value in w.items()}
    v = {name: torch.zeros_like(value) for name, value in w.items()}
    ends = step_ends(s)
    order, held_out = windows(
        (len(ids) - 1) // s.seq_len, round(s.val_tokens / s.seq_len), s.seed, range(ends[-1] // s.seq_len)
    )

    def rows(of: list[int]) -> Tensor:
        return torch.tensor([ids[i * s.seq_len : (i + 1) * s.seq_len + 1] for i in of])

    for step, (before, after) in enumerate(pairwise(ends)):
        mine = order[before // s.seq_len : after // s.seq_len]
        sequences = len(mine)
        per_rank = sequences // s.micro_batch_size // s.world_size
        total = {name: torch.zeros_like(value) for name, value in w.items()}
        losses, small = [], []
        for number in range(sequences // s.micro_batch_size):
            batch = rows(mine[number * s.micro_batch_size : (number + 1) * s.micro_batch_size])
            loss = mean_loss(w, batch, s, s.z_loss)
            gradient = dict(zip(w, torch.autograd.grad(loss, list(w.values())), strict=True))
            losses.append(loss.item() if not s.z_loss else mean_loss(w, batch, s).item())
            if number % per_rank < 2:
                small.append(sum(float(g.square().sum()) for g in gradient.values()))
            for name, g in gradient.items():
                total[name] += g / (sequences // s.micro_batch_size)
        norm = math.sqrt(sum(float(g.square().sum()) for g in total.values()))
        factor = min(1.0, s.grad_clip / (norm + 1e-6)) if s.grad_clip else 1.0
        lr = lr_at(before, after, ends[-1], s)
        with torch.no_grad():
            for name, value in w.items():
                g = factor * total[name]
                m[name] = s.beta1 * m[name] + (1 - s.beta1) * g
                v[name] = s.beta2 * v[name] + (1 - s.beta2) * g * g
                m_hat, v_hat = m[name] / (1 - s.beta1 ** (step + 1)), v[name] / (1 - s.beta2 ** (step + 1))
                decay = s.weight_decay if value.dim() >= 2 else 0.0
                value -= lr * (m_hat / (v_hat.sqrt() + s.eps) + decay * value)
            val_loss = None
            if after // s.eval_every > before // s.eval_every or step + 1 == s.steps:
                val_loss = float(mean_loss(w, rows(held_out), s))
        yield Step(sum(losses) / len(losses), lr, norm, sum(small) / len(small), val_loss)
