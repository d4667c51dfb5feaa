"""Optimizers. Each has a file with its keys, its flags and how it is built; a new one is imported and listed here."""

from gptexp.optim.adafactor import AdafactorConfig
from gptexp.optim.adamw import AdamWConfig
from gptexp.optim.base import OptimConfig
from gptexp.optim.lamb import LambConfig
from gptexp.optim.lars import LarsConfig
from gptexp.optim.lion import LionConfig
from gptexp.optim.muon import MuonConfig
from gptexp.optim.nadamw import NAdamWConfig
from gptexp.optim.schedulefree import ScheduleFreeConfig
from gptexp.optim.sgd import SGDConfig
from gptexp.optim.soap import SoapConfig

OPTIMIZERS: dict[str, type[OptimConfig]] = {
    cls.name: cls
    for cls in (
        AdamWConfig, SGDConfig, LionConfig, LambConfig, LarsConfig, MuonConfig, SoapConfig, ScheduleFreeConfig,
        AdafactorConfig, NAdamWConfig,
    )
}  # fmt: skip


def optimizers_that(flag: str) -> str:
    """The optimizers that have a flag, as a user chooses them: `optim=adamw or lion`."""
    return f"optim={' or '.join(name for name, cls in OPTIMIZERS.items() if getattr(cls, flag))}"
