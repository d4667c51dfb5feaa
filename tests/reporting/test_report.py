"""`gptexp report`: the files that it writes, and run names that try to inject code."""

import csv
import json
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import psutil
import pytest
from pages import leave_out_pictures
from sweeps import report_of, write_run

from gptexp.config.scaling import scaled_optim
from gptexp.config.schema import ScalingConfig
from gptexp.optim import AdamWConfig
from gptexp.process.errors import ConfigError
from gptexp.report import main
from gptexp.reporting.charts.pictures import Drawing, bundle
from gptexp.reporting.listings.records import find_runs
from gptexp.reporting.listings.table import COLUMNS, informative, values
from gptexp.reporting.listings.terminal_table import texts_of
from gptexp.reporting.page.report import build_report
from gptexp.reporting.page.write import numbers, show, write_report
from gptexp.reporting.words.answers import table_of_answers
from gptexp.run.own_process import resume_command
from gptexp.storage import run_dir

Gptexp = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def reported(swept: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep with its report, but with empty PNGs, which cost most of the time; tests must not write into it."""
    root = shutil.copytree(swept, tmp_path_factory.mktemp("reported") / "root")
    with pytest.MonkeyPatch.context() as patch:
        leave_out_pictures(patch)
        write_report(root)
    return root


def test_report_json_equals_the_analysis(reported: Path) -> None:
    assert json.loads((reported / "report.json").read_text()) == report_of(reported)


def files_of_report(directory: Path) -> dict[str, bytes]:
    """The files of a report, by their names below `directory`."""
    found = [*directory.glob("report.*"), *directory.glob("pictures/*"), directory / "cells.csv"]
    return {str(path.relative_to(directory)): path.read_bytes() for path in found}


@pytest.mark.e2e
def test_the_same_sweep_gives_the_same_bytes(swept: Path, tmp_path: Path) -> None:
    """In the same place: the page names its directory."""
    written = []
    for _ in range(2):
        root = shutil.copytree(swept, tmp_path / "root")
        write_report(root)
        written.append(files_of_report(root))
        shutil.rmtree(root)
    assert len(written[0]) == 8 + 3
    assert written[0] == written[1]


def test_cells_csv_has_a_line_for_every_run(reported: Path) -> None:
    with (reported / "cells.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == (5 * 2 + 1) * 3
    assert [row["status"] for row in rows].count("diverged") == 3
    summary = json.loads((reported / rows[0]["run"] / "summary.json").read_text())
    assert float(rows[0]["final_val_loss"]) == summary["final_val_loss"]


class Elements(HTMLParser):
    """The names of all elements, and their attributes' names."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names += [tag, *(f"@{name}" for name, _ in attrs)]


HOSTILE = [
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(1)",
    "=cmd|' '!A0",
    "@SUM(1)",
    "a\x1b[31mred",
    "$(x)`y`",
]


@pytest.mark.usefixtures("without_pictures")
def test_a_run_name_cannot_inject_html_or_escape_sequences(
    swept: Path, reported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names that a page, a terminal, a shell or a spreadsheet may execute: the page has the same elements as before."""
    root = shutil.copytree(swept, tmp_path / "sweep <b>")
    for name, path in zip(HOSTILE, sorted(root.glob("lr=*")), strict=False):
        path.rename(root / name.replace("/", "∕"))
    (root / HOSTILE[0]).mkdir(exist_ok=True)
    main([str(root)])
    names = [Elements((directory / "report.html").read_text()).names for directory in (root, reported)]
    assert names[0] == names[1]
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.e2e
def test_a_single_run_has_its_pictures_and_a_second_report_has_the_same_bytes(
    gptexp: Gptexp, swept: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    shutil.copytree(sorted(swept.glob("lr=*"))[0], directory)
    done = gptexp("report", str(directory))
    assert done.returncode == 0, done.stderr
    written = files_of_report(directory)
    pictures = {Path(name).stem: content for name, content in written.items() if name.endswith(".png")}
    assert pictures.keys() == {
        "loss", "noise-scale", "cosine", "learning-rate", "gradient-norm",
        "clipping", "speed",
    }  # fmt: skip
    assert all(content.startswith(b"\x89PNG") for content in pictures.values())
    for name in written:
        (directory / name).unlink()
    write_report(directory)
    assert files_of_report(directory) == written


def limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (9 * 10**9, 9 * 10**9))  # V8 reserves more


@pytest.mark.e2e
def test_without_memory_for_pictures_a_report_has_all_but_them(
    start: Callable[..., subprocess.Popen[str]], swept: Path, tmp_path: Path
) -> None:
    root = shutil.copytree(swept, tmp_path / "root")
    process = start("report", "root", preexec_fn=limit_memory)
    said, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    assert len([line for line in errors.splitlines() if "vl-convert" in line]) == len(errors.splitlines()) > 0
    assert "the page: " in said
    assert not list(root.glob("pictures/*"))
    assert json.loads((root / "report.json").read_text()) == report_of(root)


def test_a_process_that_gptexp_starts_imports_nothing_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    with Drawing(at_once=1) as drawing:
        drawing.add("points", {"mark": "point", "data": {"values": []}})
        images = drawing.pngs()
    assert images["points"].startswith(b"\x89PNG")
    resumed = subprocess.run(resume_command(tmp_path), capture_output=True, text=True)
    assert "imported" not in resumed.stderr
    assert resumed.returncode == 2


def test_a_process_that_is_lost_costs_no_picture_but_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with Drawing(at_once=2) as drawing:
        drawing.add("no figure", {"mark": "no mark"})
        for number in range(3):
            drawing.add(f"{number}", {"mark": "point", "data": {"values": []}})
        assert {*drawing.pngs()} == {"0", "1", "2"}
    assert "pictures are missing: " in capsys.readouterr().err


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "ImportError"])
def test_an_error_while_figures_are_drawn_ends_the_program_and_its_processes(error: str) -> None:
    code = f"""
from gptexp.reporting.charts.pictures import Drawing
with Drawing(at_once=2) as drawing:
    drawing.add("points", {{"mark": "point", "data": {{"values": []}}}})
    print(*[process._process.pid for process in drawing._processes], flush=True)
    raise {error}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.returncode != 0
    assert error in done.stderr
    assert not any(psutil.pid_exists(int(number)) for number in done.stdout.split())


@pytest.mark.parametrize(
    ("end", "why"), [("kill -TRAP $$", "SIGTRAP"), ("echo 'no such mark' >&2; exit 1", "no such mark")]
)
def test_a_process_of_pictures_that_fails_costs_a_line(
    end: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{end}\n")
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    monkeypatch.setattr("gptexp.reporting.charts.pictures.user_cache_dir", lambda: tmp_path / "cache")
    with Drawing(at_once=2) as drawing:
        drawing.add("points", {"mark": "point"})
        assert drawing.pngs() == {}
    assert bundle() == ""
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(why in line for line in lines)
    assert not (tmp_path / "cache").exists()


def test_the_table_has_exact_values_and_the_page_rounded_ones(swept: Path) -> None:
    run = find_runs(swept)[0]
    assert values([run], ["model.n_layer"]) == [{
        "run": run.name, "status": run.status, "lr": run.lr, "total_batch_size": run.batch, "seed": run.seed,
        "steps": run.summary["steps"], "tokens": run.summary["tokens"], "tokens_per_parameter": run.summary["tokens"],
        "final_val_loss": run.loss, "final_val_loss_ema": None, "bits_per_byte": None, "tokens_per_s": 8e3,
        "mfu_palm": None, "train_h": 1 / 60, "model.n_layer": 12,
    }]  # fmt: skip
    columns = dict(texts_of(COLUMNS, [run]))
    assert "MFU" not in columns  # no peak is known of a CPU
    differing = {column.title for column in informative(find_runs(swept))}
    assert {"status", "val loss", "seed"} < differing < {*columns} - {"tokens/s"}
    assert columns["val loss"] == [f"{run.loss:.4f}"]
    run.mfu = 0.4321
    assert dict(texts_of(COLUMNS, [run]))["MFU"] == ["43.2%"]


@pytest.mark.parametrize("width", [40, 60, 80, 120, None])
def test_no_number_is_cut_on_a_narrow_terminal(
    swept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], width: int | None
) -> None:
    """Nor in a pipe, where a line has no limit."""
    report = build_report(swept)
    runs = report.analysis.runs
    for number, run in enumerate(runs):
        run.mfu = 0.4
        run.summary |= {"tokens": 123_456_789 + number, "train_s": 3600.0 * number}
    show(report, width, is_verbose=True)
    out = capsys.readouterr().out
    assert "\u2026" not in out
    for answer in report.answers:
        assert f" {answer.low:.3g} to {answer.high:.3g}" in out
    for run in runs:
        if run.loss is not None:
            assert f" {run.loss:.4f}" in out
    table, _, _ = out.partition("next: ")  # commands are not broken
    assert max(map(len, table.splitlines())) <= (width or 10_000)
    assert ("123,456,789" in out) == (width is None or width >= 80)


@pytest.mark.parametrize("width", [80, 100, None])
def test_the_answer_comes_first_and_little_after_it(
    swept: Path, capsys: pytest.CaptureFixture[str], width: int | None
) -> None:
    """The table, at most five sentences and three commands, and how to read the rest."""
    report = build_report(swept)
    show(report, width)
    table, _, rest = capsys.readouterr().out.partition("\n\n")
    rows = [line for line in table.splitlines()[1:] if re.match(r" *[0-9]+,[0-9]+ ", line)]
    titles, *_, last = table.splitlines()
    hidden = last.removeprefix("In a wider terminal: ").rstrip(".") if last.startswith("In a wider") else ""
    every = [title for title, _ in table_of_answers(report.answers)]
    assert {title for title in every if title not in titles} == set(filter(None, re.split(", | and ", hidden)))
    for row, answer in zip(rows, report.answers, strict=True):
        assert f" {answer.lr:.3g} " in row
        assert f" {answer.low:.3g} to {answer.high:.3g} " in row
        assert answer.badges[0] in row
    lines = rest.splitlines()
    assert 1 <= sum(line.startswith("- ") for line in lines) <= 5
    assert sum(line.startswith("next: ") for line in lines) <= 3
    assert "The interval of each batch size is narrow enough. Optional:" in lines
    assert lines[-1].startswith(f"gptexp report {swept} --verbose prints ")
    show(report, width, is_verbose=True)
    out = capsys.readouterr().out
    assert sum(line.startswith("- ") for line in out.splitlines()) == len(report.verdict.lines)


@pytest.mark.parametrize(("within", "is_enough"), [(0.05, False), (3.0, True)])
def test_how_narrow_an_interval_must_be_can_be_chosen(swept: Path, within: float, is_enough: bool) -> None:
    report = build_report(swept, within=within)
    assert ([answer.wanted for answer in report.answers] == ["narrow enough"] * 3) == is_enough
    assert all("wide" in answer.badges for answer in report.answers) != is_enough
    batches = {proposal.batch for proposal in report.further}
    assert (max(batches) > max(answer.total_batch_size for answer in report.answers)) == is_enough


def test_many_warnings_leave_room_for_findings(swept: Path, tmp_path: Path) -> None:
    for number, directory in enumerate(sorted(swept.glob("lr=*"))):
        shutil.copytree(directory, tmp_path / directory.name)
        if number < 6:
            file = tmp_path / directory.name / run_dir.SUMMARY
            file.write_text(file.read_text().replace('"0123"', f'"{number}"'))
    report = build_report(tmp_path)
    warnings = [line for line in report.verdict.shortest if line.startswith("Warning")]
    assert len(report.verdict.warnings) > 2
    assert len(warnings) == 1
    assert warnings[0].endswith(f"({len(report.verdict.warnings) - 1} more warnings)")


@pytest.mark.parametrize("what", ["nothing", "empty", "a file"])
def test_a_directory_without_a_run_is_refused_in_one_line(gptexp: Gptexp, tmp_path: Path, what: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "a file").touch()
    done = gptexp("report", what)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert ("is a file" in done.stderr) == (what == "a file")


@pytest.mark.usefixtures("without_pictures")
def test_the_command_writes_the_law_and_prints_how_to_use_it(
    swept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, file = tmp_path / "root", tmp_path / "mine" / "optim" / "fitted.yaml"
    shutil.copytree(swept, root)
    main([str(root), "--write-optim", str(file)])
    assert "use it with model=nano optim=fitted" in capsys.readouterr().out
    assert file.exists()


@pytest.mark.parametrize("link", ["pictures/curves.png", "pictures", "report.json"])
def test_a_report_is_not_written_through_a_link(swept: Path, tmp_path: Path, link: str) -> None:
    root, target = shutil.copytree(swept, tmp_path / "root"), tmp_path / "target"
    target.mkdir() if link == "pictures" else target.write_text("precious")
    (root / link).parent.mkdir(exist_ok=True)
    (root / link).symlink_to(target)
    with pytest.raises(ConfigError, match="a link, and gptexp writes through none"):
        write_report(root)
    assert not (root / "report.html").exists()
    assert target.is_dir() and not list(target.iterdir()) if link == "pictures" else target.read_text() == "precious"


def test_keys_that_are_scaled_with_the_batch_size_are_in_the_head_and_in_the_table(tmp_path: Path) -> None:
    """Against `config.scaling`. One arm keeps all keys; that of the learning rate is 0.02 at the reference, 8,192."""
    rules = ScalingConfig(lr="sqrt", betas="beta2_half_life", eps="sqrt", reference_tokens=8192)
    for name, scaling in (("scaled", rules), ("kept", ScalingConfig(reference_tokens=8192))):
        for batch in (2048, 8192, 32768):
            write_run(tmp_path / f"{name}-{batch}", batch, 0.02, 1, 4.0)
            config = run_dir.load_config(tmp_path / f"{name}-{batch}")
            config.scaling = scaling
            run_dir.save_config(tmp_path / f"{name}-{batch}", config)
    report = build_report(tmp_path)
    facts = dict(report.overview.facts)
    [scaled] = [arm for arm in report.analysis.arms if arm.choices["scaling.lr"] == "sqrt"]
    beta2, eps = ((0.95**0.25, 0.95**4), (2e-8, 5e-9))
    assert facts["beta2 as scaled"] == (
        f"{beta2[0]:.6g} at 2,048 tokens a step to {beta2[1]:.6g} at 32,768 ({scaled.label})"
    )
    assert facts["eps as scaled"].startswith(f"{eps[0]:.6g} at 2,048 tokens a step to {eps[1]:.6g} at 32,768 ")
    assert facts["Learning rate"] == "0.01, 0.02, 0.04"
    assert facts["Learning rate as configured"] == "0.02"
    assert {label for label in facts if "scaled" in label} == {"beta2 as scaled", "eps as scaled"}
    for row, run in zip(numbers(report)["runs"], report.analysis.runs, strict=True):
        config = run_dir.load_config(run.directory)
        used = scaled_optim(config)
        assert isinstance(used, AdamWConfig)
        assert isinstance(config.optim, AdamWConfig)
        assert (row["lr"], row["optim.lr"]) == (used.lr, config.optim.lr)
        assert (row["effective_optim.beta2"], row["optim.beta2"]) == (used.beta2, config.optim.beta2)
        assert (row["effective_optim.eps"], row["optim.eps"]) == (used.eps, config.optim.eps)
        assert "effective_optim.beta1" not in row
    alone = build_report(tmp_path / "scaled-2048")
    assert dict(alone.overview.facts)["beta2 as scaled"] == f"{beta2[0]:.6g} at 2,048 tokens a step"


def test_without_scaling_no_key_is_shown_twice(swept: Path) -> None:
    report = build_report(swept)
    assert not [label for label, _ in report.overview.facts if "scaled" in label or "configured" in label]
    assert not [key for row in numbers(report)["runs"] for key in row if key.startswith(("optim.", "effective_optim."))]
