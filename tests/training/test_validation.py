"""The validation loss against a loop over single windows, without the package's batching."""

from contextlib import nullcontext

import pytest
import torch

from gptexp.config.compose import compose
from gptexp.data.loader import build_dataset
from gptexp.distributed.ranks import Rank
from gptexp.model.gpt import GPT
from gptexp.training.evaluation import validation_loss


@pytest.mark.parametrize("batch_size", [1, 2, 7, 16])
def test_the_validation_loss_is_the_mean_over_all_targets_without_dropout(tiny: list[str], batch_size: int) -> None:
    """At every batch size. The last batch is short at 2 and 16, which do not divide the seven windows."""
    config = compose([*tiny, "model.dropout=0.5", "model.vocab_size=50304"])
    dataset = build_dataset(config)
    torch.manual_seed(0)
    model = GPT(config.model)
    loss = validation_loss(model, dataset, batch_size, Rank(), torch.device("cpu"), nullcontext)
    assert model.training  # as it was before

    model.eval()
    losses = []
    for row in dataset.rows(dataset.val, dataset.val_starts):
        ids = torch.from_numpy(row.astype("int64"))
        logits = model.lm_head(model.hidden(ids[None, :-1]))[0]
        losses.append(torch.nn.functional.cross_entropy(logits, ids[1:]).item())
    assert loss == pytest.approx(sum(losses) / 7, rel=1e-6)


def test_ranks_share_the_windows_and_none_reads_one_twice(tiny: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine ranks share seven windows: two ranks read nothing and still take part in the reduction."""
    config = compose([*tiny, "model.vocab_size=50304"])
    dataset = build_dataset(config)
    model = GPT(config.model)
    sums: list[torch.Tensor] = []
    monkeypatch.setattr(
        "gptexp.training.evaluation.all_reduce_sum", lambda total: sums.append(total) or total.clamp(min=1)
    )
    for rank in range(9):
        validation_loss(model, dataset, 2, Rank(rank, 9), torch.device("cpu"), nullcontext)
    monkeypatch.undo()
    loss, tokens = torch.stack(sums).sum(0).tolist()
    assert tokens == 7 * 16
    whole = validation_loss(model, dataset, 2, Rank(), torch.device("cpu"), nullcontext)
    assert loss / tokens == pytest.approx(whole, rel=1e-6)
