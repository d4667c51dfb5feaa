"""What a run measures of its weights between steps: the form of all evaluations, and the validation loss."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from gptexp.data.loader import Dataset, val_batches
from gptexp.distributed.group import all_reduce_sum
from gptexp.distributed.ranks import Rank
from gptexp.machine.effective import ForwardContext
from gptexp.model.gpt import GPT
from gptexp.model.loss import IGNORED
from gptexp.storage.checkpoint import TrainState


@dataclass(frozen=True)
class Evaluation:
    """A measurement at a cadence, and after the last step. run/evaluations.py has the list of all."""

    name: str
    every_tokens: int  # 0: only after the last step
    # Returns metrics; or None if the run is to stop, and the measurement has ended before it had any. *Collective.*
    measure: Callable[[TrainState], Mapping[str, float | None] | None]
    ends_early: bool = False  # if the run is to stop: a limit of time needs to leave no time for it
    # Measures the checkpoint of the step, which is saved for it. Its metrics are an event `name` of their own. A run
    # that is resumed at a checkpoint that lacks them measures first.
    of_checkpoint: bool = False


def validation_loss(
    model: GPT, dataset: Dataset, batch_size: int, rank: Rank, device: torch.device, forward_context: ForwardContext
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
            loss = model(x, y)  # also of no window: the ranks of a split model compute together
            total[0] += loss * tokens if tokens else 0.0
            total[1] += tokens
    model.train(was_training)
    loss, tokens = all_reduce_sum(total).tolist()
    return float(loss / tokens)
