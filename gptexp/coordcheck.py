"""`gptexp coordcheck [overrides]`: whether a model's activations keep their size when it gets wider."""

import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from gptexp.command.arguments import Parser
from gptexp.command.hydra_main import register_from_init
from gptexp.config.compose import composition, hydra_engine, to_config
from gptexp.config.describe import answer_help
from gptexp.config.rules import problems
from gptexp.config.schema import Config, ModelConfig
from gptexp.optim import optimizers_that
from gptexp.process.errors import ConfigError
from gptexp.process.fields import parse_count
from gptexp.process.imports import permanent
from gptexp.process.terminal import run_verb
from gptexp.process.words import shown

LR = 1e-2  # large for Adam, so that a few steps show how updates grow with the width
SEEDS = 8  # different initial weights; after one step mean |logit| may vary by half among seeds
WIDTHS = "64,128,256,512"
READ = ("model", "optim", "batch", "data", "experiment", "train.seed", "train.device")  # groups and keys


def main(argv: list[str] | None = None) -> int:
    """Check that activations keep their size when the model gets wider (muP's coordinate check).

    Trains it for five steps at several widths, with heads of one size, and prints how mean |activation| grows with the
    width. With model.parametrisation=mup or completep the base is the narrowest, unless model.base_n_embd is given.
    Exit code 0: it does not; 1: it does.
    """
    if answer_help(sys.argv[1:] if argv is None else argv):
        return 0
    parser = Parser("coordcheck", main.__doc__)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for gptexp train")
    parser.add_argument("--widths", default=WIDTHS, metavar="N,N,…", help=f"values of model.n_embd (default: {WIDTHS})")
    parser.add_argument(
        "--seeds", type=int, default=SEEDS, metavar="N", help=f"initial weights at each width (default: {SEEDS})"
    )
    parser.add_argument("--lr", type=float, default=LR, metavar="LR", help=f"learning rate (default: {LR:g})")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: outputs/coordcheck/<date and time>")
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")
    parser.add_argument("--config-dir", "-cd", metavar="DIR", help="your own YAML files")
    parser.add_argument("--config-name", "-cn", metavar="NAME", help="DIR/NAME.yaml, a config that includes gptexp's")
    args = parser.parse_intermixed_args(argv)
    if args.seeds < 1:
        raise ConfigError(f"--seeds={args.seeds}: must be 1 or above")
    for text in args.overrides:
        key = text.lstrip("+").partition("=")[0]
        if key == "optim.lr" or not any(key == read or key.startswith(f"{read}.") for read in READ):
            instead = "give --lr in its place" if key == "optim.lr" else "leave it out"
            raise ConfigError(f"{shown(text)}: the coordinate check does not read {key}; {instead}")

    register_from_init()
    overrides = [*args.overrides, f"optim.lr={args.lr!r}", "schedule=constant"]
    config = _composed(overrides, args.config_dir, args.config_name)
    if not config.optim.is_like_adam:
        raise ConfigError(
            f"optim={config.optim.name}: the limits are for updates like Adam's; use {optimizers_that('is_like_adam')}"
        )
    if config.optim.gradient_noise or config.optim.gradient_noise_like_batch is not None:
        raise ConfigError("optim.gradient_noise: the coordinate check adds no noise to gradients; leave it out")
    models = _models(config, args.widths)
    out: Path = args.out or Path("outputs/coordcheck") / datetime.now().strftime("%Y-%m-%d-%H-%M-%S")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out {out}: exists and is not an empty directory; give a new one")

    with permanent():
        from gptexp.run.coordcheck import coordcheck

    return coordcheck(config, models, args.seeds, out, args.json)


def _composed(overrides: list[str], config_dir: str | None, config_name: str | None) -> Config:
    """The checked config. It may lack the base width, which `_models` then sets."""
    with hydra_engine(config_dir) as engine:
        cfg = composition(engine, overrides, config_dir, multirun=False, config_name=config_name)
        lacks_base = cfg.model.parametrisation != "standard" and cfg.model.base_n_embd is None
        if lacks_base:
            cfg.model.base_n_embd = cfg.model.n_embd  # any width that passes the checks
        config = to_config(cfg, cfg.hydra.overrides.task)
    if lacks_base:
        config.model.base_n_embd = None
    return config


def _models(config: Config, widths: str) -> list[ModelConfig]:
    """The model of `config` at each width, narrowest first. Raises `ConfigError` for an impossible one."""
    model = config.model
    head_size = model.n_embd // model.n_head  # numbers of the residual stream for each head
    try:
        sizes = sorted({parse_count(text) for text in widths.split(",")})
    except ValueError:
        raise ConfigError(f"--widths={shown(widths)}: must be whole numbers, separated by commas") from None
    if len(sizes) < 2 or sizes[0] < 1:
        raise ConfigError(f"--widths={shown(widths)}: must be two or more different widths above 0")
    if wrong := [size for size in sizes if size % head_size]:
        raise ConfigError(f"--widths={shown(widths)}: {wrong[0]} is not a multiple of the head size {head_size}")
    if model.parametrisation != "standard":
        base = model.base_n_embd or sizes[0]
        if model.head_dim is None and model.base_n_head is None and base % head_size:
            raise ConfigError(
                f"model.base_n_embd={base}: not a multiple of the head size {head_size}; give model.base_n_head too"
            )
        heads = (model.base_n_head or base // head_size) if model.head_dim is None else None
        model = replace(model, base_n_embd=base, base_n_head=heads)
    models = [_resized(model, size, size // head_size) for size in sizes]
    for resized in models:
        if found := problems(replace(config, model=resized), 1):
            raise ConfigError(found)
    return models


def _resized(model: ModelConfig, n_embd: int, n_head: int) -> ModelConfig:
    """`model` with this width, heads of keys and the width of the MLP in proportion. Raises `ConfigError`."""
    if n_head * model.kv_heads % model.n_head:
        rule = (
            f"its {n_head} heads are no multiple of {model.n_head // model.kv_heads}, as many as share a head of keys"
        )
        raise ConfigError(f"--widths: {n_embd} is impossible: {rule}")
    kv_heads, ratio = n_head * model.kv_heads // model.n_head, model.mlp_size / model.n_embd
    return replace(model, n_embd=n_embd, n_head=n_head, n_kv_head=kv_heads, mlp_ratio=ratio, n_mlp=None)


if __name__ == "__main__":
    run_verb(main)
