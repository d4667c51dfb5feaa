"""The law of a sweep as a config: `optim=fitted` then sets the learning rate for whatever batch size is asked for."""

from pathlib import Path

from gptexp.errors import ConfigError
from gptexp.report.analysis import Analysis
from gptexp.report.law import Law

MARK = "# Fitted by gptexp report"


def write_optim(path: Path, analysis: Analysis) -> None:
    """Write the law of `analysis` to `path`; raises `ConfigError` where there is none, or the place is not for it.

    It belongs below a folder named `optim`, of the checkout's conf/ or of one given with --config-dir.
    """
    given = f"--write-optim {path}"
    laws = [arm.law for arm in analysis.arms if arm.law is not None]
    if len(laws) != 1:
        raise ConfigError(
            f"{given}: {analysis.name} has {len(laws)} fitted laws, not one; "
            + ("report a sweep of one arm" if laws else "two batch sizes at least need a bracketed optimum")
        )
    if path.parent.name != "optim" or path.suffix != ".yaml":
        raise ConfigError(f"{given}: a choice of the group optim is a file optim/NAME.yaml; give such a path")
    if "site-packages" in path.resolve().parts:
        raise ConfigError(f"{given}: lies in an installed package, and would be gone with it; use a folder of your own")
    if path.exists() and not path.read_text(errors="replace").startswith(MARK):
        raise ConfigError(f"{given}: is there, and not from gptexp report; give another name")
    from gptexp.run_dir import storage, write_atomically

    with storage(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, _text(analysis, laws[0]))


def _text(analysis: Analysis, law: Law) -> str:
    sizes = ", ".join(f"{size:,}" for size in law.sizes)
    warning = "# The optima bend in log-log: between these sizes only.\n" if law.bends else ""
    return (
        f"{MARK} from {analysis.name}: optima at {sizes} tokens a step.\n"
        f"# lr = {law.lr:.6g} * (batch.total_batch_size / {law.tokens:.6g}) ** {law.exponent:.4f}; 95% interval of the "
        f"exponent: {law.low:.3f} to {law.high:.3f}.\n{warning}"
        "defaults:\n  - adamw\n"
        f"lr: ${{power_law:${{batch.total_batch_size}},{law.lr:.6g},{law.tokens:.6g},{law.exponent:.4f}}}\n"
    )
