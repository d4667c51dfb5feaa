"""The metrics of a run: the names in metrics.jsonl, in wandb and in reports, each with its unit and its meaning.

A metric that is missing here cannot be named elsewhere: `Metric.TRAIN_LOS` is an error for mypy and at the import.
Not in this table are `val/NAME/loss` and `val/NAME/bpb` of data.validation, `eval/NAME` and `own/NAME` of the user's
own metrics, and the results of lm_eval's tasks, which are called `TASK/FIGURE` in lm_eval's own names.
"""

from enum import StrEnum


class Metric(StrEnum):
    """A string: the metric's name in metrics.jsonl. `val/loss` is the member `VAL_LOSS`, and `optim/lr` is `LR`."""

    unit: str  # empty for a number without one
    meaning: str

    def __new__(cls, name: str, unit: str, meaning: str) -> "Metric":
        metric = str.__new__(cls, name)
        metric._value_, metric.unit, metric.meaning = name, unit, meaning
        return metric

    # fmt: off
    TIME = "time", "s", "Unix time of the event"
    STEP = "step", "steps", "index of the optimizer update, from 0; text for people counts from 1"
    TOKENS = "tokens", "tokens", "training tokens consumed, this step's included; the x axis"
    FLOPS = "flops", "FLOPs", "training FLOPs done, as perf/mfu_palm counts them"
    EPOCH = "epoch", "epochs", "passes over the training windows"
    BATCH_TOKENS = (
        "batch/tokens", "tokens", "tokens of the step, over all ranks; a ramp makes it grow (batch.ramp_tokens)",
    )
    TRAIN_LOSS = "train/loss", "nats/token", "mean over all micro-steps of all ranks, before the update"
    VAL_LOSS = "val/loss", "nats/token", "mean over the fixed validation windows, after the update"
    VAL_LOSS_EMA = "val/loss_ema", "nats/token", "val/loss of the averaged weights (train.ema_half_life_tokens)"
    VAL_PPL = "val/ppl", "", "exp(val/loss)"
    VAL_BPB = "val/bpb", "bits/byte", "val/loss in bits over the bytes of text that a target stands for, on average"
    HELLASWAG_ACC = (
        "hellaswag/acc", "", "share of HellaSwag's examples whose right ending has the lowest loss (train.eval_tasks)",
    )
    HELLASWAG_ACC_NORM = "hellaswag/acc_norm", "", "the same by the loss per token of an ending"
    HELLASWAG_CUT = (
        "hellaswag/cut", "", "share of the examples that are longer than the model's context, and lose their beginning",
    )
    LR = "optim/lr", "", "learning rate of the step, without the factors of a parametrisation"
    GRAD_NORM = "optim/grad_norm", "", "global gradient norm before clipping"
    CLIP_FRACTION = "optim/clip_fraction", "", "share of the steps since the last log that were clipped"
    GRADIENT_NOISE = (
        "optim/gradient_noise", "", "norm of the noise on the gradient over the gradient's (optim.gradient_noise)",
    )
    TOKENS_PER_S = "perf/tokens_per_s", "tokens/s", "over all ranks, without evaluation and checkpoints"
    STEP_MS = "perf/step_ms", "ms", "wall time of the step"
    DATA_MS = "perf/data_ms", "ms", "rank 0: waiting for the step's micro-batches"
    FORWARD_MS = "perf/forward_ms", "ms", "rank 0: forward passes, the loss included"
    BACKWARD_MS = "perf/backward_ms", "ms", "rank 0: backward passes, perf/reduce_ms included"
    REDUCE_MS = (
        "perf/reduce_ms", "ms",
        "rank 0: waiting for the reduction, as DDP last measured it; null if world.sharding=full",
    )
    CLIP_MS = "perf/clip_ms", "ms", "rank 0: gradient norm, clipping, and the sums of the step's values over all ranks"
    OPTIMIZER_MS = "perf/optimizer_ms", "ms", "rank 0: the update"
    PEAK_MEM_GIB = "perf/peak_mem_gib", "GiB", "rank 0: most memory allocated on the GPU; resident memory on a CPU"
    MFU_PALM = (
        "perf/mfu_palm", "", "FLOPs done per second over the device's peak, full attention scores (PaLM appendix B)",
    )
    MFU_CAUSAL = "perf/mfu_causal", "", "the same with the causal half of the attention scores"
    STRAGGLER_RATIO = (
        "perf/straggler_ratio", "", "data and forward passes of the slowest rank over the mean of the others'",
    )
    SLOWEST_RANK = "perf/slowest_rank", "", "the slowest rank; both are measured in the logged step before"
    GNS_SMALL_SQ_NORM = (
        "gns/small_sq_norm", "", "squared norm of one micro-batch's gradient: mean over the first two of each rank",
    )
    GNS_BIG_SQ_NORM = "gns/big_sq_norm", "", "squared norm of the step's gradient, before clipping"
    GNS_SMALL_SEQUENCES = "gns/small_sequences", "sequences", "sequences of that micro-batch"
    GNS_GRAD_SQ = "gns/grad_sq", "", "running estimate of the true gradient's squared norm"
    GNS_NOISE_TRACE = "gns/noise_trace", "", "running estimate of the trace of one sequence's gradient covariance"
    GNS_SEQUENCES = "gns/sequences", "sequences", "gradient noise scale: gns/noise_trace over gns/grad_sq"
    GNS_TOKENS = "gns/tokens", "tokens", "the same in tokens: compare with the batch size"
    GNS_COS = (
        "gns/cos", "",
        "cosine of two micro-batches' gradients in this step; null if world.sharding=full accumulates gradients",
    )
    SHARPNESS_HESSIAN = (
        "sharpness/hessian", "", "largest eigenvalue of the Hessian of the loss on 64 sequences of training text",
    )
    SHARPNESS_PRECONDITIONED = (
        "sharpness/preconditioned", "", "that of the Hessian between two P^(-1/2) of AdamW's preconditioner P",
    )
    SHARPNESS_THRESHOLD = (
        "sharpness/threshold", "",
        "of sharpness/preconditioned: above it AdamW is unstable at the step's learning rate",
    )
    SHARPNESS_SAM = "sharpness/sam", "nats/token", "rise of that loss over a distance of 0.05 along its gradient"
    DATA_FINGERPRINT = "data/fingerprint", "", "sum of the hashes of all windows consumed, modulo 2^64, 16 hex digits"
    # fmt: on


def of_text(metric: Metric, name: str) -> str:
    """The name of a validation metric for one text of data.validation: `val/NAME/loss`."""
    return metric.replace("/", f"/{name}/", 1)


def is_loss(name: str) -> bool:
    """Whether `name` is a validation loss: `val/loss`, `val/loss_ema` or `val/NAME/loss`."""
    return name in (Metric.VAL_LOSS, Metric.VAL_LOSS_EMA) or (name.startswith("val/") and name.endswith("/loss"))


def bits_metric(loss: str) -> str:
    """The name of the bits per byte that belong to the validation loss `loss`: `val/NAME/bpb` to `val/NAME/loss`."""
    return "/bpb".join(loss.rsplit("/loss", 1))


SHARPNESS = tuple(metric for metric in Metric if metric.startswith("sharpness/"))
