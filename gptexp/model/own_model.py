"""A model of the user's own, in the place of `GPT`: `own_module.py` builds it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gptexp.config.parts import TARGET
from gptexp.config.schema import ModelConfig
from gptexp.model.attention import LayerCache
from gptexp.model.gpt import GPT
from gptexp.model.loss import cross_entropy
from gptexp.model.own_module import own_module
from gptexp.process.errors import ConfigError

SAME = 1e-3  # relative difference of logits that rounding may cause
MOST_NAMED = 3


class OwnModel(nn.Module):
    """The module that `model._target_` names, with the loss and with what evaluation and sampling call.

    There is no cache: each token is computed from all tokens before it.
    """

    def __init__(self, cfg: ModelConfig, z_loss: float = 0.0) -> None:
        """Raises `ConfigError` if the target is no module that gptexp can save."""
        super().__init__()
        self.cfg, self.z_loss = cfg, z_loss
        self.own = own_module(cfg)
        weights = {name for name, _ in self.own.named_parameters(remove_duplicate=False)}
        if not weights:
            raise ConfigError(f"model._target_={getattr(cfg, TARGET)}: has no parameters to train", "wrong-contract")
        if buffers := sorted(self.own.state_dict().keys() - weights):
            rule = "a checkpoint keeps parameters only; register it with persistent=False"
            raise ConfigError(f"model._target_={getattr(cfg, TARGET)}: buffer {buffers[0]}: {rule}", "wrong-contract")

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """Mean cross-entropy of the targets `y` (B, T), a scalar in nats; without `y`, the logits (B, T, V)."""
        found: Any = self.own(x)
        if not isinstance(found, Tensor):
            rule = f"gives a {type(found).__name__}; must give the logits, a tensor"
            raise ConfigError(f"model._target_={getattr(self.cfg, TARGET)}: {rule}", "wrong-contract")
        logits = found
        if logits.shape != (*x.shape, self.cfg.resolved_vocab_size):
            expected = (*x.shape, self.cfg.resolved_vocab_size)
            rule = f"gives {tuple(logits.shape)} for ids {tuple(x.shape)}; must give logits {expected}"
            raise ConfigError(f"model._target_={getattr(self.cfg, TARGET)}: {rule}", "wrong-contract")
        return logits if y is None else cross_entropy(logits.flatten(0, 1), y.flatten(), self.z_loss)

    def refuse_wrong_dependence(self, ranks: int) -> None:
        """Raise `ConfigError` if a token's logits depend on later tokens; of several `ranks`, if a parameter is unused.

        DDP waits for the gradient of every parameter. What the model raises itself, the first step will report.
        """
        device, half = device_of(self), self.cfg.block_size // 2
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            x, other = torch.randint(self.cfg.resolved_vocab_size, (2, 1, self.cfg.block_size), device=device)
            later = torch.cat([x[:, :half], other[:, half:]], dim=1)
            try:
                with torch.no_grad():
                    before, after = (self.eval()(ids)[:, :half].float() for ids in (x, later))
                self.train()(x, x).backward()
            except Exception:
                return
            finally:
                self.train()
                unused = [name for name, p in self.own.named_parameters() if p.grad is None and p.requires_grad]
                self.zero_grad()
        target, largest = f"model._target_={getattr(self.cfg, TARGET)}", before.abs().max().item() if half else 0.0
        if half and not torch.allclose(before, after, rtol=SAME, atol=SAME * largest):
            rule = "the logits of a token change with later tokens; let each depend on the tokens up to it"
            raise ConfigError(f"{target}: {rule}", "wrong-contract")
        if ranks > 1 and unused:
            rule = f"the loss does not depend on {', '.join(unused[:MOST_NAMED])}, for which other ranks would wait"
            raise ConfigError(f"{target}: {rule}; leave it out, or train on one rank", "wrong-contract")

    def hidden(self, x: Tensor) -> Tensor:
        """What `head` takes: here the logits themselves."""
        return self(x)  # type: ignore[no-any-return]

    def head(self, h: Tensor) -> Tensor:
        return h

    def logits(self, x: Tensor, _: Sequence[LayerCache] | None = None) -> Tensor:
        """Logits (B, V) of the token that follows `x` (B, T)."""
        return self.hidden(x)[:, -1]

    def empty_cache(self, _rows: int, _capacity: int) -> list[LayerCache]:
        return []


Model = GPT | OwnModel


def device_of(model: Model) -> torch.device:
    """The device that has the model's weights."""
    return next(model.parameters()).device
