"""`gptexp dashboard push`: the project's dashboard on wandb."""

import os

from gptexp.command.arguments import Parser
from gptexp.config.schema import WandbConfig
from gptexp.process.errors import ConfigError
from gptexp.process.terminal import run_verb

TIMEOUT_S = 10  # for one answer of wandb's server


def main(argv: list[str] | None = None) -> None:
    """Save a view of the project on wandb. A later push replaces the view of the same name."""
    parser = Parser("dashboard", main.__doc__)
    parser.add_argument("action", choices=("push",))
    project = os.environ.get("WANDB_PROJECT") or WandbConfig().project
    parser.add_argument("--entity", required=True, help="the user or team that owns the project")
    parser.add_argument("--project", default=project, help="default: %(default)s, as log.wandb.project")
    parser.add_argument("--name", default="gptexp", help="the view's name; default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print the view as JSON; needs no network and no API key")
    args = parser.parse_args(argv)
    for flag, given in (("entity", args.entity), ("project", args.project)):
        if not given or {*given} & {*"/\\#?%:"}:
            raise ConfigError(f"--{flag}={given}: must be a name without / \\ # ? % and :")

    os.environ.setdefault("WANDB_HTTP_TIMEOUT", str(TIMEOUT_S))  # wandb reads it when it is imported
    try:
        from gptexp.loggers.dashboard import as_json, push
    except ModuleNotFoundError:
        raise ConfigError("dashboard: not installed; pip install 'gptexp[dashboard]'") from None
    print((as_json if args.json else push)(args.entity, args.project, args.name))


if __name__ == "__main__":
    run_verb(main)
