"""The workloads of `gptexp bench`. No torch."""

from dataclasses import dataclass

NANO = ("model=nano",)
SMALL = (
    *NANO, "model.n_layer=4", "model.n_head=4", "model.n_embd=128", "model.block_size=256",
    "batch.micro_batch_size=8", "batch.total_batch_size=2048", "optim.lr=6e-4",
)  # fmt: skip

# nanoGPT's own example for a laptop (its README: train_shakespeare_char.py on a CPU), on bytes.
CHAR = (
    *NANO, "data.tokenizer=bytes", "model.n_layer=4", "model.n_head=4", "model.n_embd=128", "model.block_size=64",
    "batch.micro_batch_size=12", "batch.total_batch_size=768", "optim.lr=1e-3",
)  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """A run to measure: its description, its overrides, and the number of measured steps."""

    meaning: str
    overrides: tuple[str, ...]
    steps: int


def _gpt2(model: str, micro_batch: int) -> tuple[str, ...]:
    tokens = micro_batch * 1024
    return f"model={model}", f"batch.micro_batch_size={micro_batch}", f"batch.total_batch_size={tokens}"


CPU_WORKLOADS = {
    "nano": Workload("model=nano", (*NANO, "train.compile=off"), 20),
    "nano_ddp2": Workload(
        "the same on two ranks", (*NANO, "train.compile=off", "world=ddp2", "batch.micro_batch_size=4"), 20
    ),
    "char": Workload("4 layers, width 128, T=64, bytes", CHAR, 100),
    "small": Workload("4 layers, width 128, GPT-2's vocabulary", (*SMALL, "train.compile=off"), 30),
    "small_compiled": Workload("the same, compiled", (*SMALL, "train.compile=on"), 30),
    "gpt2": Workload("GPT-2 124M at T=1024", (*_gpt2("gpt2", 4), "train.compile=off"), 5),
    "gpt2_compiled": Workload("the same, compiled", (*_gpt2("gpt2", 4), "train.compile=on"), 5),
}
GPU_WORKLOADS = {
    "nano": Workload("model=nano", NANO, 50),
    "small": Workload("4 layers, width 128, GPT-2's vocabulary", SMALL, 50),
    **{
        f"gpt2_b{b}": Workload(f"GPT-2 124M at T=1024, micro-batch {b}", _gpt2("gpt2", b), 30)
        for b in (16, 32, 64, 128)
    },
    "llama_124m_b64": Workload(
        "Llama 124M at T=512, micro-batch 64",
        ("model=llama_124m", "batch.micro_batch_size=64", "batch.total_batch_size=32768"),
        30,
    ),
    "gpt2_xl": Workload("GPT-2 1.5B at T=1024, micro-batch 12", _gpt2("gpt2_xl", 12), 10),
}
