"""The flags of `gptexp tune`, and the options of its sweeper that they stand for (conf/hydra/sweeper/tune.yaml)."""

import re

SWEEPER = "hydra/sweeper=tune"
PREFIX = "hydra.sweeper."  # of the options
PLAIN = re.compile(r"[\w./~:+-]+", re.ASCII)  # a value that Hydra reads without quotes
# Flag -> option, name of its value, help.
FLAGS = {
    "budget": ("budget", "AMOUNT", "20m, 8h, 200M tokens or 30 runs, for all commands of the search together"),
    "within": ("within", "OCTAVES", "the 95%% interval is narrow enough with so many on each side (default: 0.25)"),
    "from": ("prior", "SWEEP|FILE", "begin at the law of an earlier sweep, or of a file of optim=fitted"),
    "key": ("key", "KEY", "the number that is searched (default: optim.lr), such as optim.weight_decay"),
    "range": ("range", "LOW..HIGH", "the key lies there"),
    "seeds": ("seeds", "N", "the most of one learning rate (default: 8)"),
}
# Flag -> option with its value, help.
SWITCHES = {
    "compare": ("compare=true", "spend on the difference of the arms, each at its own best value"),
    "law": ("law=true", "make runs at three of the batch sizes; the law through them answers for the others"),
    "yes": ("ask=false", "start without a question, also if it will take more than an hour"),
    "json": ("json=true", "print one JSON object at the end, and all else to stderr"),
}
