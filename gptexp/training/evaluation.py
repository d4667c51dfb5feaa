"""The evaluations of a run, which measure its weights between steps, and the validation loss."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gptexp.config.metrics import Metric
from gptexp.config.run_plan import RunPlan
from gptexp.data.loader import Dataset, val_batches
from gptexp.distributed.group import all_reduce_sum
from gptexp.distributed.ranks import Rank
from gptexp.machine.effective import ForwardContext
from gptexp.model.loss import IGNORED
from gptexp.model.own_model import Model
from gptexp.storage.checkpoint import TrainState


@dataclass(frozen=True)
class Evaluation:
    """A measurement every `every_tokens` tokens and after the last step. run/evaluations.py lists all of them."""

    name: str
    every_tokens: int  # 0: only after the last step
    # Returns metrics, or None if the run must stop and the measurement was given up for that. *Collective.*
    measure: Callable[[TrainState], Mapping[str, float | None] | None]
    ends_early: bool = False  # when the run must stop; so train.max_minutes reserves no time for it
    # Measures not the weights in memory but the step's checkpoint, which is saved for this. Its metrics are logged as a
    # separate event `name`. If they are missing for the checkpoint from which a run resumes, the run measures it first.
    of_checkpoint: bool = False


class Evaluations:
    """The evaluations of a run. Those of the weights come before those of checkpoints; validation is the very first."""

    def __init__(self, plan: RunPlan, evaluations: Sequence[Evaluation], validated_sequences: int) -> None:
        """`validated_sequences`: sequences of all forward passes of one validation."""
        self._plan, self._all, self._validated_sequences = plan, evaluations, validated_sequences
        self._of_weights = [each for each in evaluations if not each.of_checkpoint]
        self._seconds: dict[str, float] = {}  # name -> duration of its previous evaluation

    def due(self, state: TrainState, last: bool) -> tuple[list[Evaluation], list[Evaluation]]:
        """Return the evaluations due after the newest step: those of the weights, and those of the checkpoint.

        After the `last` step all are.

        If any evaluation of the weights is due, so are the validation and all others with its cadence.
        """
        due = [each for each in self._all if last or self._plan.is_due(each.every_tokens, state.step)]
        weight_evals = [each for each in due if not each.of_checkpoint]
        if weight_evals:
            cadence = self._of_weights[0].every_tokens
            weight_evals = [each for each in self._of_weights if each in due or each.every_tokens == cadence]
        return weight_evals, [each for each in due if each.of_checkpoint]

    def measure(self, due: Sequence[Evaluation], state: TrainState) -> dict[str, Any]:
        """Return the metrics of the weights, or only the validation loss if it is non-finite. *Collective.*"""
        metrics: dict[str, Any] = {}
        for each in due:
            started = time.perf_counter()
            metrics |= each.measure(state) or {}
            if not each.ends_early:
                self._seconds[each.name] = time.perf_counter() - started
            if not math.isfinite(metrics.get(Metric.VAL_LOSS, 0.0)):
                break
        return metrics

    def reserve_s(self, sequence_s: float) -> float:
        """Estimate the seconds of the next evaluation, if a training step takes `sequence_s` seconds per sequence."""
        if self._seconds:
            return sum(self._seconds.values())
        return sequence_s * self._validated_sequences / 3  # a forward pass is a third of a step


def validation_loss(
    model: Model, dataset: Dataset, batch_size: int, rank: Rank, device: torch.device, forward_context: ForwardContext
) -> float:
    """Return the mean loss over every target of the fixed validation windows, in nats per token. *Collective.*

    Losses are summed over windows and ranks before one division. So the result depends neither on the batches into
    which the windows are grouped nor on the number of ranks. Every forward pass has the same shape, so the model
    compiles once: the last batch is padded with ignored targets.
    """
    was_training = model.training
    model.eval()
    # MPS has no float64.
    total = torch.zeros(2, device=device, dtype=torch.float32 if device.type == "mps" else torch.float64)
    with torch.no_grad(), forward_context():
        for x, y in val_batches(dataset, batch_size, rank.rank, rank.world_size, device):
            tokens = y.numel()
            if missing := batch_size - len(x):
                x = torch.cat([x, x.new_zeros(missing, dataset.seq_len)])
                y = torch.cat([y, y.new_full((missing, dataset.seq_len), IGNORED)])
            loss = model(x, y)  # even without windows: the ranks of a split model must compute together
            total[0] += loss * tokens if tokens else 0.0
            total[1] += tokens
    model.train(was_training)
    loss, tokens = all_reduce_sum(total).tolist()
    return float(loss / tokens)
