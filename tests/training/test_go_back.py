"""`TrainState.go_back`: the counters that a rollback restores, and the data that the run then reads."""

from dataclasses import fields, replace

import numpy as np

from gptexp.data.order import Order
from gptexp.storage.checkpoint import TrainState
from gptexp.storage.divergence import LossTrend

KEPT = {"seconds", "steps_passed_over", "tokens_passed_over"}  # these describe the attempt, not the checkpoint

SAVED = TrainState(
    step=40, tokens=400, fingerprint=4, val_loss=4.0, val_loss_ema=4.1, best_val_loss=3.9, best_tokens=300,
    evaluated_tokens=400, seconds=8.0, skipped_updates=1, trend=LossTrend(steps_above=2), regular=True,
)  # fmt: skip
NOW = TrainState(
    step=53, tokens=530, fingerprint=5, val_loss=3.0, val_loss_ema=3.1, best_val_loss=2.9, best_tokens=500,
    evaluated_tokens=500, seconds=11.5, skipped_updates=6, trend=LossTrend(steps_above=7), regular=False,
)  # fmt: skip


def test_the_example_differs_in_every_counter_that_is_restored() -> None:
    """Otherwise the next test could miss a counter. The noise scale is tested in whole runs."""
    taken_over = {f.name for f in fields(TrainState)} - KEPT - {"noise_scale"}
    assert all(getattr(SAVED, name) != getattr(NOW, name) for name in taken_over)


def test_a_rollback_restores_the_counters_and_keeps_the_time_spent() -> None:
    state = replace(NOW)
    state.go_back(SAVED, 54, 546)
    assert state == replace(SAVED, seconds=11.5, steps_passed_over=14, tokens_passed_over=146)


def test_steps_passed_over_add_up_over_several_rollbacks() -> None:
    """The state has more passed-over steps than the checkpoint, which was saved before."""
    state = replace(NOW, steps_passed_over=5, tokens_passed_over=50)
    state.go_back(replace(SAVED, steps_passed_over=2, tokens_passed_over=20), 54, 546)
    assert (state.steps_passed_over, state.tokens_passed_over) == (19, 196)


def test_training_continues_on_the_data_after_the_failed_step() -> None:
    """A step reads what follows tokens + tokens_passed_over. No window is read twice after the checkpoint."""
    order = Order(1000, 0, seed=3, shuffled=True)

    def windows(tokens: int, sequences: int, state: TrainState) -> list[int]:
        """Of a step that starts after `tokens`, with sequences of 10 tokens."""
        first = (tokens + state.tokens_passed_over) // 10
        return order.train_windows(np.arange(first, first + sequences)).tolist()

    state = TrainState()
    read = {i for sequence in range(55) for i in windows(10 * sequence, 1, state)}
    state.go_back(SAVED, 53, 550)  # the last of 53 steps failed
    assert windows(state.tokens, 4, state) == windows(550, 4, TrainState())
    read |= {i for sequence in range(40, 48) for i in windows(10 * sequence, 1, state)}
    state.go_back(SAVED, 47, 480)  # the last of eight steps since
    assert windows(state.tokens, 4, state) == windows(630, 4, TrainState())
    assert not read & set(windows(state.tokens, 4, state))


def test_a_rollback_does_not_change_the_state_of_the_checkpoint() -> None:
    saved = replace(SAVED)
    replace(NOW).go_back(saved, 54, 546)
    assert saved == SAVED
