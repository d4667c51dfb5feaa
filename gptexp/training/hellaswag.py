"""Scores of a model on HellaSwag, as llm.c computes them: the ending with the lowest loss is the model's answer."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from gptexp.config.metrics import Metric
from gptexp.data.hellaswag import Example
from gptexp.distributed.group import all_reduce_sum
from gptexp.distributed.ranks import Rank
from gptexp.machine.effective import ForwardContext
from gptexp.model.own_model import Model

BATCH_TOKENS = 4096  # tokens of one forward pass, padding included


def score(
    model: Model, examples: Sequence[Example], rank: Rank, device: torch.device, forward_context: ForwardContext
) -> dict[str, float]:
    """Return the shares of right answers as metrics. *Collective.*

    The model's answer is the ending with the lowest sum (`hellaswag/acc`) or mean (`hellaswag/acc_norm`) of its tokens'
    losses. Texts longer than the context lose their beginning; `hellaswag/cut` is the share of such examples.
    """
    mine = sorted(examples[rank.rank :: rank.world_size], key=_length)  # similar lengths need less padding
    was_training = model.training
    model.eval()
    right = torch.zeros(3, dtype=torch.int64)
    with torch.no_grad(), forward_context():
        while mine:
            width = min(_length(mine[-1]), model.cfg.block_size)
            count = max(1, BATCH_TOKENS // (width * len(mine[-1].endings)))
            mine, batch = mine[:-count], mine[-count:]
            losses = _losses(model, [_ids(model, each, end) for each in batch for end in each.endings], device).cpu()
            for example in batch:
                number = len(example.endings)
                sums, losses = losses[:number], losses[number:]
                tokens = torch.tensor([min(len(end), model.cfg.block_size) for end in example.endings])
                is_cut = _length(example) > model.cfg.block_size
                answers = (int(sums.argmin()), int((sums / tokens).argmin()))
                right += torch.tensor([*(answer == example.label for answer in answers), is_cut])
    model.train(was_training)
    shares = [count / len(examples) for count in all_reduce_sum(right.to(device)).tolist()]
    return dict(zip((Metric.HELLASWAG_ACC, Metric.HELLASWAG_ACC_NORM, Metric.HELLASWAG_CUT), shares, strict=True))


def _length(example: Example) -> int:
    """The number of input tokens for the longest ending; its last token is only a target."""
    return len(example.context) + max(map(len, example.endings)) - 1


def _ids(model: Model, example: Example, ending: list[int]) -> tuple[list[int], int]:
    """The last ids that fit: a full context of inputs, and one final target. Also how many of them are targets."""
    ids = [*example.context, *ending][-model.cfg.block_size - 1 :]
    return ids, min(len(ending), len(ids) - 1)


def _losses(model: Model, rows: Sequence[tuple[list[int], int]], device: torch.device) -> Tensor:
    """The sum of the losses of each row's targets (rows), in nats. Logits are computed only for targets."""
    width = max(len(ids) for ids, _ in rows) - 1
    x = torch.zeros(len(rows), width, dtype=torch.int64)
    is_target = torch.zeros(len(rows), width, dtype=torch.bool)
    targets = []
    for row, (ids, count) in enumerate(rows):  # padding comes last, so no token of the text sees it
        x[row, : len(ids) - 1] = torch.tensor(ids[:-1])
        is_target[row, len(ids) - 1 - count : len(ids) - 1] = True
        targets += ids[-count:]
    h = model.hidden(x.to(device))[is_target.to(device)]  # (targets, C)
    losses = F.cross_entropy(model.head(h).float(), torch.tensor(targets, device=device), reduction="none")
    row_of = torch.arange(len(rows)).repeat_interleave(is_target.sum(1)).to(device)
    return losses.new_zeros(len(rows)).index_add_(0, row_of, losses)
