"""`gptexp plan [device=GPU] [overrides]`: describes a run, or with -m each cell of a sweep, without training it.

`gptexp train … --dry-run` is the same.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

from gptexp.command.arguments import Parser
from gptexp.command.hydra_main import register_from_init, spelled_out, state_of
from gptexp.config.compose import compose, composition, hydra_engine, is_multirun, is_sweep, to_config
from gptexp.config.describe import answer_help
from gptexp.config.paths import folders, options
from gptexp.config.schema import Config
from gptexp.config.vocabulary import VOCAB_SIZES, padded, with_vocab_size
from gptexp.data.epoch import count_epoch
from gptexp.distributed.ranks import launcher_world_size
from gptexp.model.gpus import GPUS, GPUS_PER_NODE, NETWORKS, Gpu
from gptexp.process.errors import ConfigError
from gptexp.process.fields import AUTO
from gptexp.process.imports import permanent
from gptexp.process.terminal import run_verb, warn
from gptexp.process.words import shown
from gptexp.storage import branch
from gptexp.storage.init_from import with_step
from gptexp.storage.inventory import refuse_sweep_in

MICRO_BATCH = "batch.micro_batch_size"
DEVICE = "device="  # no config key (that is train.device); plans the run for another machine


def main(argv: list[str] | None = None) -> None:
    """Describe a run or a sweep without training it: length, batch, memory, the value of every `auto`."""
    if answer_help(sys.argv[1:] if argv is None else argv):
        return
    args = _parser().parse_intermixed_args(spelled_out(sys.argv[1:] if argv is None else argv))
    overrides = [text for text in args.overrides if not text.startswith(DEVICE)]
    gpu = _gpu([text.removeprefix(DEVICE) for text in args.overrides if text.startswith(DEVICE)])
    flag = "--network" if args.network else "--ranks-per-node" if args.ranks_per_node is not None else None
    if gpu is not None and args.time:
        raise ConfigError("--time: times a few steps on this machine; leave it out, device=GPU estimates the duration")
    if args.ranks_per_node is not None and args.ranks_per_node < 1:
        raise ConfigError(f"--ranks-per-node={args.ranks_per_node}: must be 1 or above")
    if flag is not None and gpu is None and not args.time:
        raise ConfigError(f"{flag}: only device=GPU and --time predict how long ranks wait; give one of them")

    register_from_init()
    if args.models:
        _print_models(overrides, args.config_dir, args.config_name, gpu or GPUS["h100"], args.json)
        return
    with hydra_engine(args.config_dir) as engine:
        multirun = args.multirun or is_multirun(overrides)
        composed = composition(engine, overrides, args.config_dir, multirun, args.config_name)
        if not is_sweep(composed):
            config = _config(composed, overrides, gpu)
            state_of(Path(composed.hydra.run.dir), config)
        else:
            from gptexp.sweep.grid import compose_cells  # imports numpy, which a refusal does not need

            if args.critical is not None:
                raise ConfigError("--critical: is for the plan of one run; leave it out, or plan one cell")
            if flag is not None and gpu is None:
                raise ConfigError(
                    f"{flag}: of a sweep only device=GPU predicts how long ranks wait; give it, or plan one cell"
                )
            grid = compose_cells(engine, composed)
            refuse_sweep_in(Path(composed.hydra.sweep.dir))

    with permanent():
        from gptexp.command.planning import Request, print_plan  # imports torch

    request = Request(gpu, args.network, args.ranks_per_node, args.critical, args.time, args.json)
    if not is_sweep(composed):
        print_plan(config, request)
    elif grid.sweeper.is_search and gpu is None and not args.json:
        with permanent():
            from gptexp.command.search_planning import show_search

        show_search(grid)
    else:
        with permanent():
            from gptexp.command.sweep_planning import print_sweep

        print_sweep(grid, request)


def _parser() -> Parser:
    parser = Parser("plan", main.__doc__)
    what = f"as for gptexp train; device=GPU plans for a GPU that need not be here: {', '.join(GPUS)}"
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=what)
    parser.add_argument("-m", "--multirun", action="store_true", help="plan every cell of a sweep")
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")
    what = "print which models fit the GPU of device=GPU (h100 if it is left out), at which number of ranks"
    parser.add_argument("--models", action="store_true", help=what)
    parser.add_argument("--time", action="store_true", help="also train a few steps, and estimate the duration")
    what = "of the nodes; default: as measured, or that of NVIDIA's nodes with the GPU"
    parser.add_argument("--network", choices=NETWORKS, help=what)
    what = f"default: as measured, or the GPUs of this machine, or {GPUS_PER_NODE}"
    parser.add_argument("--ranks-per-node", type=int, metavar="N", help=what)
    what = "a run or a sweep that has measured its noise scale or critical batch size: does the batch pass it?"
    parser.add_argument("--critical", type=Path, metavar="DIR", help=what)
    parser.add_argument("--config-dir", "-cd", metavar="DIR", help="your own YAML files")
    parser.add_argument("--config-name", "-cn", metavar="NAME", help="DIR/NAME.yaml, a config that includes gptexp's")
    return parser


def _print_models(
    overrides: list[str], config_dir: str | None, config_name: str | None, gpu: Gpu, as_json: bool
) -> None:
    with permanent():
        from gptexp.command.fitting import print_fitting

    models = {}
    for name in options(folders(config_dir))["model"]:
        if name != "from_init":  # its sizes are those of the weights of init_from
            config = compose(
                [f"model={name}", f"{MICRO_BATCH}={AUTO}", *overrides], config_dir, config_name=config_name
            )
            ids = VOCAB_SIZES.get(config.data.tokenizer, VOCAB_SIZES["gpt2"])
            models[name] = with_vocab_size(config, padded(ids)) if config.model.vocab_size == AUTO else config
    print_fitting(models, gpu, as_json)


def _config(composed: Any, overrides: list[str], gpu: Gpu | None) -> Config:
    """The config of one run. If `gpu` is given and a file's micro-batch size is refused, auto replaces that size."""

    def checked() -> Config:
        parent = branch.find(composed)
        given, count = composed.hydra.overrides.task, partial(count_epoch, tokenise=False)
        return with_step(to_config(composed, given, launcher_world_size(), parent, count))

    try:
        return checked()
    except ConfigError as error:
        if gpu is None or any(text.startswith(f"{MICRO_BATCH}=") for text in overrides):
            raise
        size, composed.batch.micro_batch_size = composed.batch.micro_batch_size, AUTO
        config = checked()
        warn(f"warning: {MICRO_BATCH}={size}, from a file, is refused; this plan needs {MICRO_BATCH}={AUTO}: {error}")
        return config


def _gpu(names: list[str]) -> Gpu | None:
    """The GPU that the last `device=` names. Raises `ConfigError` if its figures are unknown."""
    if not names:
        return None
    if names[-1] not in GPUS:
        raise ConfigError(f"{DEVICE}{shown(names[-1])}: unknown; use one of {', '.join(GPUS)}, or leave it out")
    return GPUS[names[-1]]


if __name__ == "__main__":
    run_verb(main)
