"""What all optimizers have: their keys, and what the rest of the program asks of them. No torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from gptexp.process.fields import below_one, not_negative, positive, ruled, tokens_of_1024

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer as Optimizer  # the optimizers take it from here
else:
    Optimizer = Any  # torch's, which the config must not import

PYTORCH_OPTIMIZER = "pytorch_optimizer"  # the package that the extra gptexp[optim] installs
Shape = tuple[int, ...]
Groups = list[dict[str, Any]]  # parameter groups, as torch's optimizers take them
Named = Mapping[str, "nn.Parameter"]


def in_block(name: str) -> bool:
    """Whether a parameter of this name belongs to a block of the model: GPT-2's h, Llama's layers."""
    return name.startswith(("h.", "layers."))


def optimizer_name(name: str) -> Any:
    """The key `name` of an optimizer, whose only legal value is this name."""
    return ruled(name, lambda v: v == name, "optim=NAME chooses the optimizer and its keys", "optimizer-name")


@dataclass
class OptimConfig:
    """Algorithm of the updates, which optim=NAME chooses, and its keys.

    These are the keys of every optimizer; the classes in `OPTIMIZERS` add the others. Hydra replaces this class, whose
    key `name` has no value, by one of them.

    The class variables say what the program may do with the optimizer. Their values here hold for an optimizer of which
    nothing is known: they allow nothing.
    """

    needs: ClassVar[str | None] = None  # the package that implements it, if that is not torch
    is_like_adam: ClassVar[bool] = False  # each element of an update has about the size lr, which muP assumes
    may_split_rows: ClassVar[bool] = False  # an update of a number depends on that number's gradient, weight and state
    # alone, so that world.sharding=full may give each rank some rows of a matrix
    may_split_parameters: ClassVar[bool] = False  # one algorithm updates each parameter by itself, so that
    # world.sharding=optimizer may give each rank some parameters
    has_timescale: ClassVar[bool] = False  # weight decay averages over batch size / (lr * weight_decay) tokens
    averages_weights: ClassVar[bool] = False  # in place of a decay of the learning rate
    takes_nonfinite: ClassVar[bool] = False  # an update by a gradient that is not finite raises no error, so the host
    # need not wait for a GPU to know; it spoils weights and state
    decay_rates: ClassVar[Sequence[str]] = ()  # keys with the decay rate, per step, of a moment that is an average. If
    # the moment is a sum, its rate is also a factor 1 / (1 - momentum) of the updates, and scaling it would scale them
    step_dependence: ClassVar[str] = "it may count steps"  # why updates differ between batch sizes that have read
    # the same tokens; empty if they do not

    name: str = optimizer_name("???")  # algorithm of the updates
    lr: float = positive(6e-4)  # peak learning rate; each model file sets its own
    weight_decay: float = not_negative(0.1)  # only for tensors of two or more dimensions
    grad_clip: float = not_negative(1.0)  # maximum of the global gradient norm; 0: no clipping
    gradient_noise: float = not_negative(0.0)  # noise added to the clipped gradient: its norm in the first step, as a
    # multiple of the gradient's norm; 0: none; arXiv 1511.06807
    gradient_noise_decay: float = not_negative(0.55)  # step t, from 0: noise times (1 + t)**(-gradient_noise_decay / 2)
    gradient_noise_decay_tokens: int | None = positive(None)  # tokens in which t grows by 1; null: t counts steps.
    # Without gradient_noise neither key is used, so that one sweep can have runs with noise and without
    gradient_noise_like_batch: int | None = tokens_of_1024(None)  # tokens: adds noise until the gradient is as noisy as
    # that of a batch of this size, by the noise scale that the run measures; null: none

    def build(self, groups: Groups, named: Named, fused: bool) -> Optimizer:
        """Build the optimizer of `groups`, which have the learning rates and weight decays of their parameters.

        `named` has the parameters by name. `fused` asks for a fused kernel. Gradients are clipped before an update, so
        the optimizer must not clip them.
        """
        raise NotImplementedError(f"no optimizer for {type(self).__name__}")

    def least_warmup_steps(self) -> int:
        """The shortest warm-up, in steps, after which a second moment is an average over enough gradients."""
        return 0

    def scratch_numbers(self, shapes: Sequence[tuple[Shape, int]]) -> int:
        """How many numbers an update needs as temporary memory, beside gradients and state.

        `shapes` holds (shape, number of parameters with this shape). Most optimizers compute the update of all
        parameters at once.
        """
        return sum(math.prod(shape) * count for shape, count in shapes)


@dataclass
class TwoMomentsConfig(OptimConfig):
    """The keys of optimizers with decay rates beta1 and beta2."""

    beta1: float = below_one(0.9)  # decay rate of the first moment
    beta2: float = below_one(0.95)  # decay rate of the second moment
    beta2_half_life_tokens: int | None = positive(None)  # tokens over which beta2 halves a gradient's weight, at any
    # batch size (with a ramp: at the final one); takes precedence over beta2

    def least_warmup_steps(self) -> int:
        """2 / (1 - beta2): Ma and Yarats 2019, arXiv 1910.04209, section 5.

        Before that many steps, the second moment is an average over few gradients. beta2 must be scaled already.
        """
        return math.ceil(2 / (1 - self.beta2) - 1e-6)  # 2 / 0.05 is a little more than 40 in floats
