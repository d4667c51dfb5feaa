"""`gptexp verify`: check gptexp's promises on this machine."""

from gptexp.command.arguments import Parser
from gptexp.process.errors import ConfigError
from gptexp.process.imports import permanent
from gptexp.process.terminal import run_verb

WORLD_SIZES = (1, 2, 4, 8)


def main(argv: list[str] | None = None) -> int:
    """Check on this machine that gradients do not depend on how a step is split, and that resuming is exact."""
    parser = Parser("verify", main.__doc__)
    parser.add_argument("--world-size", type=int, metavar="N", help="1, 2, 4 or 8 ranks (one per GPU; 2 on a CPU)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    args = parser.parse_args(argv)
    if args.world_size not in (None, *WORLD_SIZES):
        raise ConfigError(f"--world-size={args.world_size}: must divide the 8 sequences of a step; use 1, 2, 4 or 8")

    with permanent():
        from gptexp.run.verification import verify

    return verify(args.device, args.world_size)


if __name__ == "__main__":
    run_verb(main)
