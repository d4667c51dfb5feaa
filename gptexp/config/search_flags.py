"""The flags of `gptexp tune`. Each stands for the option of its name of the sweeper (conf/hydra/sweeper/tune.yaml)."""

import re

SWEEPER = "hydra/sweeper=tune"
PREFIX = "hydra.sweeper."  # of the options
PLAIN = re.compile(r"[\w./~:+-]+", re.ASCII)  # a value that Hydra reads without quotes
# Flag -> name of its value, help.
FLAGS = {
    "budget": ("AMOUNT", "20m, 8h, 200M tokens or 30 runs, for all commands of the search together"),
    "within": ("OCTAVES", "the 95%% interval is narrow enough with so many on each side, on average (default: 0.25)"),
    "from": ("SWEEP|FILE", "begin at the law of an earlier sweep, or of a file of optim=fitted"),
    "key": ("KEY", "the number that is searched (default: optim.lr), such as optim.weight_decay"),
    "range": ("LOW..HIGH", "the key lies there"),
    "seeds": ("N", "the most of one learning rate (default: 8)"),
}
# Flag without a value -> help.
SWITCHES = {
    "compare": "spend on the difference of the arms, each at its own best value",
    "law": "make runs at three of the batch sizes; the law through them answers for the others",
    "yes": "start without a question, also if it will take more than an hour",
    "json": "print one JSON object at the end, and all else to stderr",
}
