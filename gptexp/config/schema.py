"""Every configuration key: its type, its default and its legal values.

All defaults are defined here and, for the optimizers, in their files (gptexp/optim). Files under conf/ override them. A
rule that concerns a single key is on that key's line and is checked by `field_problems`. Rules that concern several
keys are in rules.py.

Most lengths have two keys, one in tokens and one in steps (`warmup_tokens`, `warmup_steps`). The key in steps is null
by default, because the meaning of a length in steps depends on the batch size. If it is set, it takes precedence.
"""

import codecs
import dataclasses
import fnmatch
import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache
from operator import attrgetter
from types import SimpleNamespace, UnionType
from typing import Any, get_args, get_origin

from gptexp.config.batch import StepSizes
from gptexp.config.metrics import Metric
from gptexp.config.parts import (
    EVALUATIONS,
    METRICS,
    SOURCE,
    TARGET,
    is_part,
    keys_class,
    loaded,
    saved_class,
    target_in,
)
from gptexp.config.paths import Groups, is_path_list
from gptexp.optim import OPTIMIZERS
from gptexp.optim.adamw import AdamWConfig
from gptexp.optim.base import OptimConfig
from gptexp.process.errors import ConfigError, Problem
from gptexp.process.fields import (
    AUTO,
    LIMIT,
    MOST_LAYERS,
    MOST_RANKS,
    MOST_ROWS,
    below_one,
    choice,
    choice_or_null,
    count_or_auto,
    directory_name,
    encoding_name,
    not_negative,
    one_line,
    parse_count,
    positive,
    ratio,
    ruled,
    size,
    tokens_of_1024,
    unit_of,
    up_to,
)
from gptexp.process.words import shown

HELLASWAG = "hellaswag"  # a value of train.eval_tasks

SHARDINGS = ("none", "optimizer", "full")  # values of world.sharding

MOST_AUTO_TOKENS = 10_000_000  # of train.max_tokens=auto

GATE_MULTIPLE = 64  # the default width of a gated MLP, 8/3 of n_embd, is rounded up to a multiple of this

NUMBER = re.compile(r"(?<![\w.])[+-]?\.?[0-9](?:[eE][+-]|[\w.])*")  # a word that begins as a number does

# The kernels of attention, each with the devices that have it.
ATTENTION_DEVICES = {
    "cudnn": ("cuda",), "flash": ("cuda", "cpu"), "efficient": ("cuda",), "math": ("cuda", "cpu", "mps"),
    "flex": ("cuda",),
}  # fmt: skip


# The rule for lists of tags. wandb accepts tags of this length.
_TAGS = {
    "rule": (
        lambda tags: all(isinstance(tag, str) and 0 < len(tag) <= 64 for tag in tags),
        "each tag must have 1 to 64 characters",
        "not-a-tag",
    )
}

# The rule for train.evaluations and log.metrics.
_ENTRIES = {
    "rule": (
        lambda entries: all(
            isinstance(entry, Mapping) and all(isinstance(key, str) for key in entry) for entry in entries
        ),
        "each must be a mapping with _target_",
        "not-a-target",
    )
}

# The rule for log.wandb.init. gptexp sets the other arguments, most of them from keys of its own.
_FOR_INIT = (
    "allow_val_change", "anonymous", "config_exclude_keys", "config_include_keys", "force", "fork_from", "job_type",
    "monitor_gym", "resume", "resume_from", "save_code", "sync_tensorboard", "tensorboard",
)  # fmt: skip
_OF_INIT = {
    "rule": (
        lambda arguments: {*arguments} <= {*_FOR_INIT},
        f"its keys must be of {', '.join(_FOR_INIT)}; the others are keys of log.wandb, or gptexp's",
        "not-for-wandb",
    )
}

# The rule for data.validation: its names become those of metrics.
_TEXTS = {
    "rule": (
        lambda texts: all(
            isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9_.-]+", name) and is_path_list(path)
            for name, path in texts.items()
        ),
        "must map names of letters, digits, _, . and - to a file, a glob or a list of them: {python: a.txt}",
        "not-texts",
    )
}

# The rule for train.eval_tasks. Before a run starts, lm_eval is asked whether it has the tasks.
_TASKS = {
    "rule": (
        lambda tasks: all(isinstance(task, str) and re.fullmatch(r"[^\s,]+", task) for task in tasks),
        "each must be hellaswag, or the name of a task of lm_eval",
        "not-a-task",
    )
}


@dataclass
class ModelConfig:
    """A decoder-only transformer. The defaults are GPT-2's block; the keys from `tied` on are the blocks of today.

    A model whose block is GPT-2's has GPT-2's names of parameters, every other one those of Llama (`model/llama.py`).
    """

    n_layer: int = up_to(MOST_LAYERS, 12)  # number of blocks
    n_head: int = size(12)  # number of attention heads; must divide n_embd, unless head_dim is given
    n_embd: int = size(768)  # width of the residual stream
    block_size: int = tokens_of_1024(1024, MOST_ROWS)  # tokens: maximum length of a sequence
    vocab_size: int | str = count_or_auto(AUTO, MOST_ROWS)  # V: rows of the embedding of tokens; auto: the tokenizer's
    # number of ids, rounded up to a multiple of 128 (of 64 below 1,024 ids)
    dropout: float = below_one(0.0)  # probability; 0 for pretraining, where one epoch does not overfit
    bias: bool = True  # whether linear layers and LayerNorms have biases, as in GPT-2
    tied: bool = True  # whether the head's weights are the embedding's; arXiv 1608.05859
    norm: str = choice("layernorm", "rmsnorm")  # rmsnorm divides by the root mean square (arXiv 1910.07467), and has no
    # bias
    norm_eps: float = positive(1e-5)  # added to the variance or the mean square
    norm_weight: bool = True  # whether norms multiply by a weight; false: nor do they add a bias; arXiv 2402.00838
    residual_norm: str = choice("pre", "post", "pre_post")  # where a branch has its norm: before it; after it, as in
    # OLMo 2 (arXiv 2501.00656); or both, as in Gemma 2 (arXiv 2408.00118)
    position: str = choice("learned", "rope", "none")  # how attention knows positions: an embedding; rotated
    # queries and keys (arXiv 2104.09864); by the causal mask alone (arXiv 2203.16634)
    rope_theta: float = positive(10_000.0)  # rope: its longest wave is about 2 pi rope_theta tokens
    rope_scaling: Any = None  # rope: {factor: …, low_freq_factor: …, high_freq_factor: …,
    # original_max_position_embeddings: …} of Llama 3.1, which stretch the long waves (arXiv 2407.21783); null: none
    head_dim: int | None = size(None)  # numbers of a head; null: n_embd / n_head
    n_kv_head: int | None = size(None)  # heads of keys and values, each for n_head / n_kv_head heads of queries; null:
    # n_head; arXiv 2305.13245
    qk_norm: str = choice("none", "head", "all")  # a norm of queries and keys, by the kind of `norm`: of each head by
    # itself, as in Qwen 3 (arXiv 2505.09388), or of all together, as in OLMo 2; arXiv 2302.05442
    window: int | None = tokens_of_1024(None)  # tokens that attention sees, the current one included; null: all
    # earlier ones; arXiv 2004.05150
    window_every: int | None = up_to(MOST_LAYERS, None)  # window: every n-th block sees all earlier tokens all the
    # same; null: no block does
    mlp: str = choice("gelu", "relu2", "swiglu", "geglu")  # what the MLP computes between its matrices: gelu with tanh;
    # relu squared (arXiv 2109.08668); a gate, by silu or gelu, times a third matrix (arXiv 2002.05202)
    mlp_ratio: float | None = ruled(None, lambda v: 0.01 <= v <= 1000, "must lie in [0.01, 1000]")  # width of the MLP
    # as a multiple of n_embd; null: 4, for gates 8/3 rounded up to a multiple of 64
    n_mlp: int | None = size(None)  # width of the MLP; takes precedence over mlp_ratio
    logit_softcap: float | None = positive(None)  # c: logits z become c tanh(z / c); arXiv 2408.00118; null: they stay
    parametrisation: str = choice("standard", "mup", "completep")  # how initial weights, multipliers and learning
    # rates depend on the model's size; mup: the base model's best optim.lr is the best at any width (arXiv 2203.03466);
    # completep: at any width and depth (arXiv 2505.01618)
    base_n_embd: int | None = size(None)  # mup, completep (required): width of the base, the model whose best
    # optim.lr is known
    base_n_head: int | None = size(None)  # mup, completep: number of heads of the base; null: n_head
    base_n_layer: int | None = up_to(MOST_LAYERS, None)  # completep: number of blocks of the base; null: n_layer

    @property
    def resolved_vocab_size(self) -> int:
        """vocab_size as a number. If it was auto, `vocabulary.with_vocab_size` must have replaced it."""
        assert isinstance(self.vocab_size, int), "model.vocab_size=auto must be resolved before this use"
        return self.vocab_size

    @property
    def head_size(self) -> int:
        """D: the numbers of a head."""
        return self.head_dim or self.n_embd // self.n_head

    @property
    def kv_heads(self) -> int:
        """The number of heads of keys and values."""
        return self.n_kv_head or self.n_head

    @property
    def has_gate(self) -> bool:
        """Whether the MLP multiplies by a gate."""
        return self.mlp in ("swiglu", "geglu")

    @property
    def mlp_size(self) -> int:
        """The width of the MLP."""
        if self.n_mlp is not None:
            return self.n_mlp
        if self.mlp_ratio is not None:
            return math.ceil(round(self.mlp_ratio * self.n_embd, 6))
        of_gate = math.ceil(Fraction(8, 3) * self.n_embd / GATE_MULTIPLE) * GATE_MULTIPLE
        return of_gate if self.has_gate else 4 * self.n_embd

    def spelled_out(self) -> "ModelConfig":
        """The same model with the sizes that it derives from others as values of their own keys."""
        return replace(self, head_dim=self.head_size, n_kv_head=self.kv_heads, n_mlp=self.mlp_size, mlp_ratio=None)

    @property
    def is_gpt2(self) -> bool:
        """Whether the blocks are GPT-2's, up to the MLP's width and the absence of biases."""
        chosen = (self.norm, self.norm_weight, self.residual_norm, self.position, self.qk_norm, self.window, self.mlp)
        plain = ("layernorm", True, "pre", "learned", "none", None, "gelu")
        return chosen == plain and self.kv_heads == self.n_head and self.head_size * self.n_head == self.n_embd

    def window_of(self, block: int) -> int | None:
        """The tokens that attention sees in a block, whose number counts from 0; None: all earlier ones."""
        is_full = self.window_every is not None and (block + 1) % self.window_every == 0
        return None if is_full else self.window


@dataclass
class ScheduleConfig:
    """Warm-up and decay of the learning rate."""

    name: str = choice("cosine", "linear", "wsd", "constant", "inverse_sqrt")  # shape after the warm-up
    warmup_ratio: float = ratio(0.1)  # share of the run's tokens
    warmup_tokens: int | None = not_negative(None)  # tokens; takes precedence over warmup_ratio
    warmup_steps: int | None = not_negative(None)  # steps; takes precedence over warmup_tokens
    decay_ratio: float = positive(1.0)  # end of the decay, as a share of the run's tokens
    decay_tokens: int | None = positive(None)  # tokens; takes precedence over decay_ratio
    decay_steps: int | None = positive(None)  # steps; takes precedence over decay_tokens
    min_lr_ratio: float = ratio(0.1)  # final learning rate of cosine, linear and wsd, as a share of optim.lr
    cooldown_ratio: float = ruled(0.2, lambda v: 0 < v <= 1, "must lie in (0, 1]")  # wsd: length of the decay, as a
    # share of the tokens from the start of the run to the end of the decay
    cooldown: str = choice("linear", "1-sqrt")  # shape of wsd's decay; arXiv 2405.18392
    peak_ratio: float = ruled(1.0, lambda v: 0 < v <= 1, "must lie in (0, 1]")  # learning rate at the end of the
    # warm-up, as a share of optim.lr
    begin_tokens: int = not_negative(0)  # tokens at which the schedule begins, and from which its lengths count;
    # continue_from sets it


@dataclass
class BatchConfig:
    """Tokens of one optimizer step: total_batch_size = B * T * world.size * grad_accum_steps.

    With a ramp, a step that starts after t < ramp_tokens tokens has ramp_from_tokens + (total_batch_size -
    ramp_from_tokens) * t / ramp_tokens tokens, rounded to a multiple of ramp_quantum_tokens (`StepSizes`).
    """

    total_batch_size: int = tokens_of_1024(8192)  # tokens per optimizer step, summed over all ranks
    micro_batch_size: int | str = count_or_auto(8)  # B: sequences per rank and forward pass; auto: the maximum that
    # divides each step and fits into memory
    seq_len: int | None = tokens_of_1024(None)  # T: tokens per sequence; null: model.block_size
    ramp_from_tokens: int | None = tokens_of_1024(None)  # tokens of the first step of a ramp (GPT-3: 32,768); null: no
    # ramp
    ramp_tokens: int | None = positive(None)  # tokens over which the steps grow to total_batch_size, linearly in
    # tokens (GPT-3: 4e9 to 12e9). Lengths in steps count each smaller step as one; intervals in steps are refused
    ramp_quantum_tokens: int | None = tokens_of_1024(None)  # tokens: each step is a multiple of this number, which must
    # be a multiple of B * T * world.size; null: ramp_from_tokens

    def of_one_size(self, total_batch_size: int, micro_batch_size: int) -> "BatchConfig":
        """A config with the same sequence length and these sizes, without a ramp."""
        return BatchConfig(total_batch_size, micro_batch_size, self.seq_len)

    @property
    def step_sizes(self) -> StepSizes:
        """The tokens of each step."""
        if self.ramp_from_tokens is None or self.ramp_tokens is None:
            return StepSizes.constant(self.total_batch_size)
        quantum = self.ramp_quantum_tokens or self.ramp_from_tokens
        return StepSizes(self.total_batch_size, self.ramp_from_tokens, self.ramp_tokens, quantum)

    @property
    def asked_micro_batch_size(self) -> int | None:
        """micro_batch_size if it is a number; None for auto."""
        return self.micro_batch_size if isinstance(self.micro_batch_size, int) else None


@dataclass
class ScalingConfig:
    """Rules that scale the optimizer's keys with k = batch.total_batch_size / reference_tokens.

    scaling.py has their formulas and sources.
    """

    lr: str = choice("none", "linear", "sqrt", "power", "surge")  # factor of optim.lr: k, sqrt(k) or k^exponent;
    # surge: rises as sqrt(k), peaks at noise_scale_tokens and falls
    exponent: float | None = ruled(None, math.isfinite, "must be finite")  # exponent of lr=power; the other rules
    # ignore it, so that a sweep over the rules can set it once
    noise_scale_tokens: int | None = tokens_of_1024(None)  # tokens: the batch size at which lr=surge peaks; the other
    # rules ignore it
    betas: str = choice("none", "half_life", "beta2_half_life", "sde")  # half_life: every decay rate becomes beta^k,
    # which keeps its half-life in tokens; beta2_half_life: only beta2 does; sde: 1 - k (1 - beta)
    eps: str = choice("none", "sqrt")  # sqrt: optim.eps / sqrt(k)
    weight_decay: str = choice("none", "tau")  # tau: keeps batch size / (lr * weight_decay) constant
    reference_tokens: int | None = tokens_of_1024(None)  # tokens per step at which the optimizer's keys hold as given

    @property
    def rules(self) -> dict[str, str]:
        """The rules in use: key of this section -> rule."""
        chosen = {"lr": self.lr, "betas": self.betas, "eps": self.eps, "weight_decay": self.weight_decay}
        return {key: rule for key, rule in chosen.items() if rule != "none"}


@dataclass
class WorldConfig:
    """The processes of one run."""

    size: int | None = up_to(MOST_RANKS, None)  # number of ranks; null: as started by the launcher, else 1
    backend: str = choice("auto", "nccl", "gloo")  # torch.distributed's backend; auto: nccl on GPUs, gloo on CPUs
    comm: str = choice("float32", "bfloat16")  # type in which the ranks' gradients are sent and summed
    threads_per_rank: int | None = positive(None)  # CPU threads; null: the node's cores divided by its ranks
    timeout_s: float = ruled(600.0, lambda v: 0 < v <= 1e6, "must be above 0, at most 1000000")  # seconds that a rank
    # waits for the others, in a collective or for the metrics of a step, before it fails
    max_restarts: int = not_negative(0)  # number of times that a failed run is restarted
    sharding: str = choice(*SHARDINGS)  # what is split among the ranks; none: nothing (DDP); optimizer: the
    # optimizer's state (ZeRO-1); full: also parameters and gradients (FSDP2), gathered one block at a time
    reduce_every: str = choice("auto", "step", "micro_step")  # with sharding=full, when gradients are reduced; step:
    # once a step, with whole gradients on each rank until then; micro_step: in each micro-step, with less memory and
    # grad_accum_steps times the communication; auto: step if it fits into memory, by estimate


@dataclass
class DataConfig:
    """Corpus, tokenizer, order and validation set."""

    name: str = choice("stdlib", "shakespeare", "text", "hf", "tokens")  # corpus
    path: Any = None  # data=text: a file, a glob or a list of them; data=hf: a data set of the Hugging Face hub,
    # OWNER/NAME or OWNER/NAME@REVISION; data=tokens: a folder, a file, a glob or a list of them
    format: str | None = choice_or_null("raw16", "raw32", "llmc", "npy", "megatron")  # data=tokens: format of the
    # files; null: detected from their content and names
    subset: str | None = None  # data=hf: the data set's configuration; null: its default
    split: str = "train"  # data=hf: the data set's split
    mix: Any = None  # several sources in place of path, {path: weight}; the weights are their shares of the tokens
    text_column: str = "text"  # the column with the text, for all formats but plain text
    encoding: str = encoding_name("utf-8")  # of plain text and jsonl without a byte-order mark, as Python's codecs name
    # it: gbk, latin-1, utf-16-le; at most one byte in a thousand may be no text in it
    separator: str | None = one_line(None)  # a line between the documents of a plain text, such as <|endoftext|>; null:
    # each file is one document
    workers: int | None = positive(None)  # processes that tokenise; null: one for each core
    tokenizer: str = "gpt2"  # gpt2 or another encoding of tiktoken; bytes; chars: one id for each character of the
    # corpus; or the path of a tokenizer.json
    order: str = choice("shuffled", "sequential")  # shuffled: without replacement, in another order each epoch
    offset: str = choice("fixed", "per_epoch")  # per_epoch: each epoch shifts the windows anew, by fewer than seq_len
    # tokens, so that no token is always the first of its sequence
    val_tokens: int = not_negative(8192)  # tokens for validation, rounded to complete windows; 0: no validation
    document_mask: bool = False  # whether attention stays within a document; positions go on. A document begins with
    # the tokenizer's end of text
    val_ratio: float | None = ruled(None, lambda v: 0 < v < 1, "must lie in (0, 1), or be null")  # share of the
    # corpus's tokens for validation; takes precedence over val_tokens
    val_split: str = choice("spread", "tail")  # which windows of the corpus are held out; tail: the last, as in nanoGPT
    val_path: Any = None  # validation text: a file, a glob or a list of them; null: held out from the corpus
    validation: dict[str, Any] = field(default_factory=dict, metadata=_TEXTS)  # more validation texts, {NAME: file,
    # glob or list}; each is logged as val/NAME/loss, of data.val_tokens tokens
    max_tokens: int | None = positive(None)  # tokens to use from the start of the corpus; null: all; data=hf may begin
    # to read up to workers-1 files without these tokens
    cache_dir: str | None = None  # directory of token files; null: $GPTEXP_CACHE, else the user's cache directory

    @property
    def reading(self) -> tuple[str, str, str | None]:
        """How files become text: the column, the encoding by its one name, and the separator."""
        return self.text_column, codecs.lookup(self.encoding).name, self.separator

    @property
    def validates(self) -> bool:
        """Whether a run has validation windows."""
        return self.val_tokens > 0 or self.val_ratio is not None


@dataclass
class TrainConfig:
    """Length, intervals, numerics."""

    max_tokens: int | str = count_or_auto(409_600)  # tokens: the run ends with the step that reaches them; auto: one
    # epoch of the text, at most 10M tokens
    max_steps: int | None = positive(None)  # steps; takes precedence over max_tokens
    epochs: float | None = positive(None)  # passes over the training part of the text, which set max_tokens before the
    # run starts
    eval_every_tokens: int | None = not_negative(None)  # tokens; null: a tenth of the run; 0: only at the end
    eval_every: int | None = not_negative(None)  # steps; takes precedence over eval_every_tokens
    eval_tasks: list[str] = field(default_factory=list, metadata=_TASKS)  # scored during the run: hellaswag by all
    # ranks, in llm.c's style; tasks of lm_eval by a separate process, while training waits
    evaluations: list[dict[str, Any]] = field(default_factory=list, metadata=_ENTRIES)  # own metrics, each of them
    # {_target_: my_lab.metrics.accuracy, name: …, every_tokens: …} and its keys; rank 0 calls it while training waits,
    # and the run logs eval/NAME
    eval_tasks_every_tokens: int = not_negative(0)  # tokens; 0: only at the end
    save_every_tokens: int | None = not_negative(None)  # tokens; null: a tenth of the run; 0: only at the end
    save_every: int | None = not_negative(None)  # steps; takes precedence over save_every_tokens
    sharpness_every_tokens: int = not_negative(0)  # tokens between two measurements of the sharpness; one more at the
    # end. Each saves a checkpoint, which a separate process measures while training waits; 0: never
    keep_last: int = not_negative(2)  # number of newest checkpoints that are kept; 0: all
    keep_every_tokens: int = not_negative(0)  # also keeps one checkpoint per this many tokens; 0: none
    keep_every: int | None = not_negative(None)  # steps; takes precedence over keep_every_tokens
    keep_best: bool = True  # also keeps the checkpoint with the lowest validation loss
    nonfinite: str = choice("stop", "skip", "rollback")  # after a non-finite loss or gradient; stop: end as diverged;
    # skip: leave out the update; rollback: load the newest checkpoint that was due, and skip the data since then
    ema_half_life_tokens: int | None = positive(None)  # tokens; the run also keeps an exponential moving average of
    # the weights with this half-life, and evaluates it as val/loss_ema; null: none
    divergence_nats: float | None = positive(1.0)  # nats per token: the run has diverged if its smoothed loss stays
    # this far above its minimum for 1% of the run, at least 20 steps; null: no such limit
    reduction: str = choice("mean", "tree")  # combines gradients; mean: DDP, FSDP2; tree: equal bits on 1, 2, 4 … ranks
    log_every: int = positive(1)  # steps
    stop_at_loss: float | None = positive(None)  # nats per token: the run is complete once its validation loss is no
    # higher; null: no such end
    patience_tokens: int | None = positive(None)  # tokens without a new lowest validation loss after which the run is
    # complete; null: no such end
    max_minutes: float | None = positive(None)  # minutes until the run saves a checkpoint and stops; null: no limit
    seed: int = ruled(1337, lambda v: 0 <= v < LIMIT, "must lie in [0, 2^63)")  # for weights, data order and dropout
    deterministic: bool = False  # torch's deterministic algorithms: slower, but each run on GPUs gives the same bits
    dtype: str = choice("auto", "float32", "bfloat16")  # auto: bfloat16 where the hardware computes it faster
    matmul_precision: str = choice("auto", "highest", "high", "medium")  # for float32, in torch's names; high: TF32
    attention: str = choice("auto", *ATTENTION_DEVICES)  # torch's kernel; if set, no other is used in training.
    # flex: FlexAttention, which skips blocks of keys that a window or another document hides; compiled models only
    compile: str = choice("auto", "on", "off")  # torch.compile; auto: on for GPUs, and where it shortens a run on CPUs
    loss: str = choice("auto", "plain", "chunked", "fused")  # chunked: keeps no logits; fused: chunked, with compiled
    # passes over each chunk; auto: GPU: plain (chunked if compiled with world.sharding=full); CPU: plain for small
    # vocabularies, fused for compiled bfloat16, else chunked
    z_loss: float = not_negative(0.0)  # weight of the mean square of log Z in the gradient, where Z is the denominator
    # of the softmax: it keeps logits small, and no logged loss includes it (PaLM: 1e-4; arXiv 2204.02311)
    activation_checkpointing: bool = False  # keeps only each block's input and recomputes the rest: needs less memory
    activation_checkpointing_every: int = positive(1)  # n: recomputes only the first of every n blocks; 1: all blocks
    device: str = choice("auto", "cpu", "cuda", "mps")  # auto: the first available of cuda, mps and cpu
    profile: bool = False  # traces a few steps with torch's profiler and reports their time by kind of work

    @property
    def recomputed_every(self) -> int:
        """n: every n-th block keeps only its input; 0: none."""
        return self.activation_checkpointing_every if self.activation_checkpointing else 0


@dataclass
class EntryConfig:
    """What each entry of log.metrics has beside the keys of its part."""

    name: str = directory_name("own")  # of its metric; default: the last part of the target


@dataclass
class EvaluationConfig(EntryConfig):
    """What each entry of train.evaluations has beside the keys of its part."""

    every_tokens: int = not_negative(0)  # tokens; 0: only at the end


@dataclass
class WandbConfig:
    mode: str = choice("auto", "online", "offline", "disabled")  # auto: online if an API key is found, else offline
    project: str = directory_name("gptexp")  # project on wandb; default: $WANDB_PROJECT, else gptexp
    entity: str | None = None  # user or team on wandb; null: $WANDB_ENTITY, else the user's default
    group: str | None = None  # null: $WANDB_RUN_GROUP, else the sweep's name
    name: str | None = None  # null: $WANDB_NAME, except in a sweep; else model, learning rate and batch
    tags: list[str] = field(default_factory=list, metadata=_TAGS)  # in addition to log.tags; default: $WANDB_TAGS
    artifacts: bool = False  # also uploads the newest checkpoint when the run ends
    init: dict[str, Any] = field(default_factory=dict, metadata=_OF_INIT)  # more arguments of wandb.init, such as
    # {job_type: ablation, save_code: true}


@dataclass
class LogConfig:
    tags: list[str] = field(default_factory=list, metadata=_TAGS)  # for gptexp ls and wandb; short form: --tag T
    note: str | None = None  # what the run is for; short form: --note TEXT; null: $WANDB_NOTES, unless
    # wandb is disabled
    progress: str = choice("auto", "bar", "lines", "json", "off")  # auto: a bar on a terminal, else lines
    metrics: list[dict[str, Any]] = field(default_factory=list, metadata=_ENTRIES)  # own scalars, each of them
    # {_target_: my_lab.metrics.norms, name: …} and its keys; rank 0 calls it in logged steps, which then have own/NAME
    sample_tokens: int = not_negative(48)  # tokens of the sample that is printed after the run; 0: no sample
    mfu_peak: str = choice("auto", "measured")  # peak FLOP/s for MFU; auto: data sheet; measured: matrix products
    noise_scale: str = choice("auto", "on", "off")  # gradient noise scale of logged steps; auto: if measurable
    noise_half_life_tokens: int | None = positive(None)  # tokens; null: 1% of the run, at least 4 steps
    wandb: WandbConfig = field(default_factory=WandbConfig)
    tensorboard: bool = False  # also writes event files of TensorBoard into the run directory; gptexp[tensorboard]


@dataclass
class PathsConfig:
    outputs: str | None = None  # folder of runs and sweeps in place of outputs/, such as one on another disk; outputs/
    # then has a link to each, so that every command finds it; null: $GPTEXP_OUTPUTS, else outputs


@dataclass
class SweepConfig:
    name: str | None = directory_name(None)  # directory in outputs/; null: a hash of the config without swept keys
    objective: str = Metric.VAL_LOSS.value  # the loss that searches and reports minimise: val/loss, val/loss_ema, or
    # val/NAME/loss of a text of data.validation
    cells: int = positive(1)  # number of cells, set by multirun; used to estimate whether compilation saves time
    parallel: int | str = count_or_auto(AUTO)  # number of cells that run at once, each on its own GPUs; auto: as many
    # as the GPUs allow, on a CPU the fastest number


@dataclass
class FittedConfig:
    """The runs to which a learning-rate law was fitted. `gptexp report --write-optim` writes all keys but `anyway`.

    fitted.py compares a run with them. These keys are null if no law sets the learning rate.
    """

    anyway: bool = False  # whether a run may use the law with another model or optimizer
    min_batch_tokens: int | None = tokens_of_1024(None)  # tokens: smallest batch.total_batch_size of the fit
    max_batch_tokens: int | None = tokens_of_1024(None)  # tokens: largest batch.total_batch_size of the fit
    min_tokens: int | None = positive(None)  # tokens: length of the shortest run
    max_tokens: int | None = positive(None)  # tokens: length of the longest run
    data_hash: str | None = None  # hash of the text; null: the runs have not recorded it
    settings: dict[str, Any] | None = None  # dotted key -> value: model, optimizer, schedule and others


@dataclass
class Config:
    """The configuration of one run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=AdamWConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    scaling: ScalingConfig = field(default_factory=ScalingConfig)
    world: WorldConfig = field(default_factory=WorldConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    log: LogConfig = field(default_factory=LogConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    fitted: FittedConfig = field(default_factory=FittedConfig)
    paths: PathsConfig = field(default_factory=PathsConfig)
    init_from: str | None = None  # weights that the run starts from: RUN_DIR (also RUN_DIR@STEP, RUN_DIR@best), a
    # directory that transformers saved, nanoGPT's ckpt.pt, gpt2, gpt2-medium, gpt2-large or gpt2-xl, or OWNER/NAME of
    # the Hugging Face hub

    user: dict[str, Any] = field(default_factory=dict)  # keys of your own, user.team=a: saved, logged and searched, and
    # without effect on the run

    continue_from: str | None = None  # a run, also RUN_DIR@STEP, that the run continues with a schedule that begins
    # anew: it warms up to optim.lr, and decays; keys not set on the command line come from that run

    branch_from: str | None = None  # a checkpoint that the run continues with a schedule and a length of its own:
    # RUN_DIR@STEP, RUN_DIR@best, or RUN_DIR for the newest; keys not set on the command line come from that run

    @property
    def seq_len(self) -> int:
        """T: tokens per sequence."""
        return self.batch.seq_len or self.model.block_size

    @property
    def run_length(self) -> tuple[int, int]:
        """(steps, tokens) of the run. `train.max_steps` takes precedence; else the steps reach `train.max_tokens`.

        The tokens are `max_tokens`, not rounded up to whole steps: GPT-3's round lengths are not multiples of 2^19, and
        the horizon of a schedule must not depend on the size of the last step.
        """
        sizes, steps = self.batch.step_sizes, self.train.max_steps
        if steps is not None:
            return steps, sizes.tokens_after(steps)
        tokens = MOST_AUTO_TOKENS if isinstance(self.train.max_tokens, str) else self.train.max_tokens
        return sizes.steps_to(tokens), tokens


# Patterns of keys that change at most the rounding of the final weights. But the micro-batch size also changes which
# values dropout drops. Paths are here because a run compares the hash of the tokens, and `branch_from` because a branch
# has checks of its own, and ends with the same bits as a run that was never interrupted.
IRRELEVANT_TO_RESULT = (
    "world.*", "log.*", "sweep.*", "fitted.*", "paths.*", "user", "branch_from", "continue_from", "data.path",
    "data.val_path", "data.validation", "data.format", "data.subset", "data.split", "data.mix", "data.text_column",
    "data.encoding", "data.separator", "data.workers", "data.cache_dir", "batch.micro_batch_size", "train.device",
    "train.activation_checkpointing*", "train.eval_*", "train.evaluations", "train.save_*",
    "train.sharpness_every_tokens", "train.keep_*", "train.log_every", "train.max_minutes", "train.profile",
)  # fmt: skip


# Keys that match a pattern above but do change the result.
ALSO_DECIDING = ("world.comm",)

# Keys that older versions lack: their hashes must stay valid, so a key with its default is not hashed.
LATER_KEYS = (
    "world.comm", "model.tied", "model.norm", "model.norm_eps", "model.norm_weight", "model.residual_norm",
    "model.position", "model.rope_theta", "model.rope_scaling", "model.head_dim", "model.n_kv_head", "model.qk_norm",
    "model.window", "model.window_every", "model.mlp", "model.mlp_ratio", "model.n_mlp", "model.logit_softcap",
    "train.z_loss", "train.epochs", "train.stop_at_loss", "train.patience_tokens", "data.document_mask",
    "schedule.begin_tokens", "schedule.peak_ratio",
)  # fmt: skip

OF_ANY_MODEL = ("vocab_size", "block_size", "parametrisation")  # keys that a model of the user's own has too

# Keys that determine the sizes of a step's tensors.
DECIDING_MEMORY = ("model.n_layer", "model.n_head", "model.n_embd", "model.block_size", "model.vocab_size",
                   "model.dropout", "model.bias", "batch.*", "world.size", "train.dtype", "train.compile", "train.loss",
                   "train.activation_checkpointing", "train.reduction", "data.tokenizer",
                   *(key for key in LATER_KEYS if key != "world.comm"))  # fmt: skip


def fields_of(config: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:
    """Yield (dotted key, field, value) for every leaf of a config dataclass."""
    for key, f, value, _ in _leaves(config, prefix):
        yield key, f, value


def _leaves(config: Any, prefix: str) -> Iterator[tuple[str, dataclasses.Field[Any], Any, type]]:
    for name, f in _fields(type(config)).items():  # type: ignore[arg-type]  # mypy: a type has no hash
        value = getattr(config, name)
        if dataclasses.is_dataclass(value):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", f, value, type(config)


@cache
def _fields(cls: type[Any]) -> dict[str, dataclasses.Field[Any]]:
    return {f.name: f for f in dataclasses.fields(cls)}


def every_key() -> Iterator[tuple[str, dataclasses.Field[Any], Any, type]]:
    """Yield (dotted key, field, default, class that has the field) for every key, including those of all optimizers."""
    leaves = {leaf[0]: leaf for leaf in _leaves(Config(), "")}
    for optimizer in OPTIMIZERS.values():
        for leaf in _leaves(optimizer(), "optim."):
            leaves.setdefault(leaf[0], leaf)
    yield from leaves.values()


@cache
def fields_by_key() -> dict[str, dataclasses.Field[Any]]:
    """Dotted key -> field, of `every_key`."""
    return {key: f for key, f, _, _ in every_key()}


def optimizers_with(key: str) -> list[str]:
    """The optimizers that have the dotted key; for a key outside of `optim`, all optimizers."""
    section, _, name = key.rpartition(".")
    return [o for o, cls in OPTIMIZERS.items() if section != "optim" or name in cls.__dataclass_fields__]


def field_problems(config: Any, prefix: str = "") -> dict[str, Problem]:
    """Key -> the problem, for each key of a config dataclass whose value breaks the key's own rule."""
    lines = {key: field_problem(key, f, value) for key, f, value in fields_of(config, prefix)}
    return {key: line for key, line in lines.items() if line}


def field_problem(key: str, f: dataclasses.Field[Any], value: Any, typed: str | None = None) -> Problem | None:
    """The problem if `value` breaks the key's own rule, else None. `typed` is the text that the user gave.

    The type of `value` must be right already.
    """

    def assignment() -> str:  # made only if it is printed: a sweep has a million values
        return f"{key}={shown(value) if typed is None else typed}"

    if value is not None and (choices := f.metadata.get("choices")) and value not in choices:
        return not_a_choice(assignment(), choices)
    if "rule" in f.metadata and value is not None:
        holds, rule, code = f.metadata["rule"]
        if not holds(value):
            return Problem(code, f"{assignment()}: {rule}")
    return None


def not_a_choice(assignment: str, choices: Sequence[str]) -> Problem:
    """The problem that the value in `assignment`, a text KEY=VALUE, is none of `choices`."""
    return Problem("not-a-choice", f"{assignment}: must be one of {', '.join(choices)}")


PARTS = {
    ModelConfig: "model",
    OptimConfig: "optim",
    ScheduleConfig: "schedule",
    DataConfig: "data",
}  # sections that may be a part of the user's own


LISTS: dict[str, type[Any]] = {EVALUATIONS: EvaluationConfig, METRICS: EntryConfig}  # of parts


def parts_of(config: Config) -> list[tuple[str, Any]]:
    """The parts of the user's own: each with its group, or the key of its list."""
    sections = [(group, getattr(config, group)) for group in PARTS.values()]
    listed = [(key, SimpleNamespace(**entry)) for key in LISTS for entry in attrgetter(key)(config)]
    return [(group, section) for group, section in sections if is_part(section)] + listed


OwnKeys = dict[str, tuple[dataclasses.Field[Any], type]]  # key of a part -> its field, and the class that has it


def keys_of_parts(overrides: Sequence[str], groups: Groups) -> OwnKeys:
    """The keys of the user's own parts in the groups of keys that gptexp does not have.

    Imports the parts that the overrides choose, else all of these groups; of those it leaves out what is no part.
    """
    unknown = {text.partition("=")[0] for text in overrides} - {*fields_by_key(), *groups}
    own: OwnKeys = {}
    for base, group in PARTS.items():
        files = groups.get(group, {}) if any(key.startswith(f"{group}.") for key in unknown) else {}
        chosen = [name for name in files if f"{group}={name}" in overrides]
        for name in chosen or files:
            target = target_in(files[name], group)
            with nullcontext() if chosen else suppress(ConfigError):
                keys = keys_class(base, group, name, target) if target is not None else None
                of_part = {f"{group}.{f.name}": (f, keys) for f in dataclasses.fields(keys)} if keys else {}
                own = {key: value for key, value in of_part.items() if key not in fields_by_key()} | own
    return own


def with_parts(config: Config) -> Config:
    """A config that was read from a run, with its parts imported. Raises `ConfigError`."""
    typed = {group: loaded(group, section) for group, section in parts_of(config) if group not in LISTS}
    return replace(config, **typed)


def to_dict(config: Any) -> dict[str, Any]:
    """Convert a config dataclass to nested dictionaries and lists for YAML and JSON."""
    return dataclasses.asdict(config)


def from_dict(values: dict[str, Any], cls: type[Any] = Config) -> Any:
    """Rebuild a `cls` from the result of `to_dict`. Raises `ValueError` for an unknown key or a wrong type."""
    fields = _fields(cls)  # type: ignore[arg-type]
    if not isinstance(values, dict):
        raise ValueError(f"a saved {cls.__name__} must be a mapping of keys to values, not {shown(values)}")
    if unknown := sorted(values.keys() - fields.keys()):
        raise ValueError(f"unknown key '{unknown[0]}' in a saved {cls.__name__}; another version may have saved it")
    rebuilt = {}
    for name, value in values.items():
        kind = fields[name].type
        if kind in PARTS and isinstance(value, dict) and TARGET in value:
            texts = [str(value.get(key)) for key in ("name", TARGET, SOURCE)]
            kind = saved_class(kind, name, *texts, tuple(value))  # type: ignore[arg-type]  # mypy: a type has no hash
        elif kind is OptimConfig and isinstance(value, dict):
            optimizer = str(value.get("name", AdamWConfig.name))
            if optimizer not in OPTIMIZERS:
                raise ValueError(f"optim.name={optimizer} in a saved Config: no such optimizer")
            kind = OPTIMIZERS[optimizer]
        if dataclasses.is_dataclass(kind):
            rebuilt[name] = from_dict(value, kind)  # type: ignore[arg-type]
        elif fits_type(value, kind):
            rebuilt[name] = value
        else:
            fix = "; in YAML 6e-4 is text, write 6.0e-4" if isinstance(value, str) and kind is float else ""
            raise ValueError(f"{name}={shown(value)} in a saved {cls.__name__}: wrong type{fix}")
    return cls(**rebuilt)


def kinds_of(f: dataclasses.Field[Any]) -> list[Any]:
    """The types in a field's annotation, except the type of null. A field with int takes counts (`parse_count`)."""
    kinds = get_args(f.type) if isinstance(f.type, UnionType) else (f.type,)
    return [get_origin(kind) or kind for kind in kinds if kind is not type(None)]


def in_digits(key: str, value: str) -> str:
    """The text of a key's value, with all counts in digits if the key has whole numbers: range(1k,4k)."""
    f = fields_by_key().get(key)
    if f is None or int not in kinds_of(f) or "${" in value:
        return value
    unit = unit_of(f)

    def digits(word: re.Match[str]) -> str:
        try:
            return str(parse_count(word[0], unit))
        except ValueError:
            return word[0]

    return NUMBER.sub(digits, value)


def fits_type(value: Any, annotation: Any) -> bool:
    """Whether `value` has the type in a field's `annotation`. An int is accepted for a float."""
    if annotation is Any:
        return True
    kinds = _classes(annotation)
    return bool in kinds if isinstance(value, bool) else isinstance(value, kinds)


@cache
def _classes(annotation: Any) -> tuple[type, ...]:
    kinds = getattr(annotation, "__args__", ()) if isinstance(annotation, UnionType) else (annotation,)
    kinds = tuple(getattr(kind, "__origin__", kind) for kind in kinds)
    return (*kinds, int) if float in kinds else kinds


def result_deciding(config: Config) -> dict[str, Any]:
    """Dotted keys and values of all keys that determine the final weights."""
    # A rollback loads the newest checkpoint, so the steps that save one affect the weights.
    extra = [*ALSO_DECIDING]
    if config.train.nonfinite == "rollback":
        extra += ["train.save_every", "train.save_every_tokens"]
    if config.optim.gradient_noise_like_batch:
        extra.append("log.noise_half_life_tokens")
    found = {key: value for key, _, value in fields_of(config) if key in extra or not _is_in(key, IRRELEVANT_TO_RESULT)}
    if is_part(config.model):  # gptexp's other keys of a model have their defaults, and mean nothing for it
        unread = {f"model.{f.name}": f.default for f in dataclasses.fields(ModelConfig) if f.name not in OF_ANY_MODEL}
        found = {key: value for key, value in found.items() if key not in unread or value != unread[key]}
    return found


def hashed(deciding: dict[str, Any]) -> dict[str, Any]:
    """The part of a result of `result_deciding` that is hashed for the names of cells and sweeps."""
    return {key: value for key, value in deciding.items() if key not in LATER_KEYS or value != _defaults()[key]}


@cache
def _defaults() -> dict[str, Any]:
    """The default of each of `LATER_KEYS`."""
    return {key: default for key, _, default, _ in every_key() if key in LATER_KEYS}


def memory_key(config: Config) -> str:
    """A hash that is equal for runs whose steps need the same memory, so that they can share a micro-batch size."""
    deciding = hashed({key: value for key, _, value in fields_of(config) if _is_in(key, DECIDING_MEMORY)})
    # Hashes from before ramps and other optimizers must stay valid.
    deciding = {key: value for key, value in deciding.items() if value is not None or "batch.ramp_" not in key}
    if config.optim.name != AdamWConfig.name:
        deciding["optim.name"] = config.optim.name
    if not getattr(config.optim, "momentum", True):
        deciding["optim.momentum"] = 0  # without momentum some optimizers keep no state
    if config.train.ema_half_life_tokens is not None:
        deciding["average"] = True
    if config.world.sharding != "none":
        deciding["world.sharding"] = config.world.sharding
    if config.train.recomputed_every > 1:
        deciding["train.activation_checkpointing_every"] = config.train.recomputed_every
    if config.world.comm != "float32":
        deciding["world.comm"] = config.world.comm  # needs a second copy of the gradients being sent
    return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()[:16]


@cache
def _is_in(key: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)
