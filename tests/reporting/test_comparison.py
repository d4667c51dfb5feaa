"""`gptexp compare`: what differs between runs, the test of their losses, its output, its page, and what it refuses."""

import json
import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pages import needs_chromium, violations
from scipy import stats
from sweeps import TOKENS, write_run

from gptexp.compare import main
from gptexp.process.errors import CheckpointError, ConfigError
from gptexp.process.words import shown
from gptexp.reporting.listings.records import Run
from gptexp.reporting.page.cells_table import results_table
from gptexp.reporting.page.comparison import cells_of, compare, pairs_of, show
from gptexp.reporting.statistics.noise import LARGEST_SPREAD
from gptexp.storage import run_dir

if TYPE_CHECKING:
    from playwright.sync_api import Browser

BATCH = 2**14  # 16 steps: a run is written quickly


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(name: str, lr: float = 0.01, seed: int = 1, loss: float | None = 4.0, **summary: Any) -> str:
    write_run(Path(name), BATCH, lr, seed, loss, **summary)
    return name


def told(capsys: pytest.CaptureFixture[str], *names: str) -> dict[str, Any]:
    """What `gptexp compare … --json` says of the runs in the directories `names`."""
    capsys.readouterr()
    main([*names, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def edit(path: str, text: str, other: str) -> None:
    assert text in Path(path).read_text()
    Path(path).write_text(Path(path).read_text().replace(text, other))


# --- What differs


def test_the_keys_that_differ_are_shown_by_what_they_mean(capsys: pytest.CaptureFixture[str]) -> None:
    write("a", 0.01, 1, 4.0, device="cpu", world_size=1, git_commit="0" * 40, versions={"torch": "2.6", "numpy": "2.1"})
    write("b", 0.02, 1, 4.1, device="cpu", world_size=2, git_commit="1" * 40 + "-dirty", versions={"torch": "2.7"})
    edit("b/config.yaml", "micro_batch_size: 8", "micro_batch_size: 4")
    edit("b/config.yaml", "note: null", "note: mine")
    for name, dtype in (("a", "float32"), ("b", "bfloat16")):
        run_dir.write_json(Path(name) / "effective.json", {"dtype": dtype, "loss": "plain", "reasons": {"dtype": name}})
    assert told(capsys, "a", "b")["differences"] == [
        {"key": "optim.lr", "kind": "config", "values": {"A": 0.01, "B": 0.02}},
        {"key": "batch.micro_batch_size", "kind": "config, without effect on the weights", "values": {"A": 8, "B": 4}},
        {"key": "world_size", "kind": "recorded by the runs", "values": {"A": 1, "B": 2}},
        {"key": "git_commit", "kind": "recorded by the runs", "values": {"A": "0" * 40, "B": "1" * 40 + "-dirty"}},
        {"key": "versions.torch", "kind": "recorded by the runs", "values": {"A": "2.6", "B": "2.7"}},
        {"key": "versions.numpy", "kind": "recorded by the runs", "values": {"A": "2.1", "B": None}},
        {"key": "effective.dtype", "kind": "recorded by the runs", "values": {"A": "float32", "B": "bfloat16"}},
    ]
    main(["a", "b"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[lines.index("Config:") + 2 :][:1]] == [["optim.lr", "0.01", "0.02"]]
    assert ["git_commit", "0000000000", "1111111111", "with", "changes"] in [line.split() for line in lines]
    assert ["versions.numpy", "2.1", "unknown"] in [line.split() for line in lines]


def test_runs_have_labels_by_what_differs_and_their_results(capsys: pytest.CaptureFixture[str]) -> None:
    write("a", 0.01, 1, 4.0)
    write("b", 0.01, 2, 4.1)
    edit("b/config.yaml", "dropout: 0.0", "dropout: 0.1")
    edit("b/metrics.jsonl", '"val/loss": 4.1}', '"val/loss": 4.1}\n' + json.dumps(
        {"event": "eval", "time": 2e9, "step": 15, "tokens": TOKENS, "val/loss": 3.9}
    ))  # fmt: skip
    found = told(capsys, "a", "b")
    assert [run["label"] for run in found["runs"]] == ["A: dropout=0.0, seed=1", "B: dropout=0.1, seed=2"]
    assert [run["final_val_loss"] for run in found["runs"]] == [4.0, 4.1]
    assert [run["best_val_loss"] for run in found["runs"]] == [4.0, 3.9]
    assert [(run["tokens"], run["tokens_per_s"], run["directory"]) for run in found["runs"]] == [
        (TOKENS, 8e3, "a"), (TOKENS, 8e3, "b")
    ]  # fmt: skip


def test_a_metric_that_is_zero_has_a_column(capsys: pytest.CaptureFixture[str]) -> None:
    for seed, name in enumerate("ab"):
        write(name, seed=seed)
        event = {"event": "eval", "time": 2e9, "step": 15, "tokens": TOKENS, "val/loss": 4.0, "eval/wrong": 0.0}
        with Path(name, "metrics.jsonl").open("a") as file:
            file.write(json.dumps(event) + "\n")
    table = results_table(compare([Path("a"), Path("b")]).runs)
    assert "eval/wrong" in [column.key for column in table.columns]


def test_a_value_that_does_not_fit_into_a_label_is_left_out_whole(capsys: pytest.CaptureFixture[str]) -> None:
    for number, name in enumerate("ab"):
        write(name, 0.0123456789 + number, number + 1, 4.0)
        edit(f"{name}/config.yaml", "beta1: 0.9", f"beta1: 0.{number}123456789")
        edit(f"{name}/config.yaml", "beta2: 0.95", f"beta2: 0.{number}123456789")
    labels = [run["label"] for run in told(capsys, "a", "b")["runs"]]
    assert labels == ["A: lr=0.0123456789, beta1=0.0123456789", "B: lr=1.0123456789, beta1=0.1123456789"]


def test_a_narrow_terminal_gets_several_tables_and_every_number(capsys: pytest.CaptureFixture[str]) -> None:
    rates = [0.01 + 0.001 * i for i in range(9)]
    show(compare([Path(write(f"r{i}", lr, loss=4 + lr)) for i, lr in enumerate(rates)]), width=40)
    tables = capsys.readouterr().out.partition("Config:")[2]
    assert max(map(len, tables.splitlines())) <= 40
    for lr in rates:
        assert shown(lr) in tables.split()
        assert f"{4 + lr:.4f}" in tables.split()


# --- Whether the losses differ


def drawn(losses: dict[float, list[float]]) -> list[Run]:
    """Runs at these learning rates with these final losses, in memory."""
    found = [(lr, seed, loss) for lr, of_seeds in losses.items() for seed, loss in enumerate(of_seeds)]
    return [
        Run(
            f"{lr}-{seed}",
            Path(),
            "completed",
            {"optim.lr": lr, "train.seed": seed, "model.vocab_size": 50304},
            seed=seed,
            loss=loss,
        )
        for lr, seed, loss in found
    ]


def test_runs_of_one_config_are_one_cell_and_the_lowest_is_compared_with_each() -> None:
    pairs = pairs_of(cells_of(drawn({0.02: [4.0, 4.01, 4.02], 0.01: [3.0, 3.01, 3.02], 0.03: [4.5]})))
    assert [pair.lower.mean for pair in pairs] == pytest.approx([3.01, 3.01])
    assert [pair.higher.mean for pair in pairs] == pytest.approx([4.01, 4.5])
    assert [pair.is_tie for pair in pairs] == [False, False]
    assert [pair.higher.sigma for pair in pairs] == [pytest.approx(0.01), None]


def test_without_a_second_seed_nothing_is_tested() -> None:
    [pair] = pairs_of(cells_of(drawn({0.01: [4.0], 0.02: [5.0]})))
    assert (pair.contrast, pair.is_tie, pair.difference) == (None, None, 1.0)


def test_the_verdict_of_a_significant_difference_and_of_a_tie(capsys: pytest.CaptureFixture[str]) -> None:
    names = [write(f"{lr}-{seed}", lr, seed, 4 + lr + 0.001 * seed) for lr in (0.01, 0.011, 0.1) for seed in (1, 2)]
    found = told(capsys, *names)
    close, far = found["pairs"]
    assert [close["lower"]["runs"], close["higher"]["runs"]] == [["A", "B"], ["C", "D"]]
    assert [far["lower"]["runs"], far["higher"]["runs"]] == [["A", "B"], ["E", "F"]]
    assert (close["significant"], far["significant"]) == (False, True)
    assert close["difference"] == pytest.approx(0.001)
    assert close["seeds_needed"] > 2
    assert close["p"] > 0.05 >= far["p"]
    tie, better = found["verdict"]
    assert tie.startswith("A and B have a lower loss than C and D, by 0.0010 nats, which seeds alone can cause. By ")
    assert "corrected for choosing the lowest of 3 configs" in tie
    assert "The losses of A and B have a standard deviation of 0.0007 nats over seeds." in tie
    assert f"To show this difference takes {close['seeds_needed']} seeds of each config (power 0.8)." in tie
    assert better.startswith("A and B have a lower loss than E and F, by 0.0900 nats, more than seeds cause. By ")


def test_without_seeds_the_noise_is_unknown_and_a_command_measures_it(capsys: pytest.CaptureFixture[str]) -> None:
    write("a", 0.01, 7, 4.0, wall_s=90.0)
    write("b", 0.02, 7, 4.2)
    hydra = {
        "runtime": {"choices": {}, "config_sources": [{"provider": "command-line", "path": "my conf"}]},
        "job": {"config_name": "config"},
        "overrides": {"hydra": ["hydra.run.dir=a"], "task": ["sweep=seeds", "optim.lr=0.01", "++train.seed=7"]},
    }
    (Path("a") / ".hydra").mkdir()
    run_dir.write_json(Path("a/.hydra/hydra.yaml"), {"hydra": hydra})
    found = told(capsys, "a", "b")
    [pair], [line], [proposal] = found["pairs"], found["verdict"], found["next"]
    assert (pair["significant"], pair["seeds_needed"], pair["usual_spread"]) == (None, None, LARGEST_SPREAD)
    assert line == (
        "A has a lower loss than B, by 0.2000 nats; noise unknown. Runs of this size and length have had a standard "
        f"deviation of {LARGEST_SPREAD:.2g} nats over seeds. If these have about the same, a difference is clear from "
        f"{math.sqrt(2) * stats.t(3).ppf(0.975) * LARGEST_SPREAD:.2g} nats on; this one is not clear. Two more seeds "
        "of one config measure the noise."
    )
    assert proposal["command"] == "gptexp train -m --config-dir 'my conf' optim.lr=0.01 train.seed=8,9"
    assert (proposal["runs"], proposal["minutes"]) == (2, 3.0)
    assert proposal["why"] == "measures the noise of A, as no two of the compared runs differ in the seed alone"
    edit("a/.hydra/hydra.yaml", '"my conf"', "7")  # as somebody has edited it
    assert "--config-dir 7" in told(capsys, "a", "b")["next"][0]["command"]
    write("c", 0.01, 9, 4.1)
    Path("sweep.json").write_text("{}")  # now a and b are cells of a sweep, which has trained seed 9 too
    assert told(capsys, "a", "b")["next"][0]["command"].endswith("train.seed=10,11")


def test_runs_of_one_seed_and_config_are_not_taken_for_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    """The same experiments with two versions of the code, and one of them twice."""
    of = {"old": [(1, 4.0), (2, 4.01)], "new": [(1, 4.1), (2, 4.12)]}
    names = [write(f"{code}-{seed}", 0.01, seed, loss, git_commit=code) for code in of for seed, loss in of[code]]
    [pair] = told(capsys, *names)["pairs"]
    assert (pair["lower"]["runs"], pair["higher"]["runs"]) == (["A", "B"], ["C", "D"])
    [pair] = told(capsys, "old-1", write("again", 0.01, 1, 4.3, git_commit="old"))["pairs"]
    assert (pair["difference"], pair["significant"]) == (pytest.approx(0.3), None)
    found = told(capsys, "old-1", "old-2")
    assert found["pairs"] == []
    assert found["verdict"][0].startswith("A and B differ in their seed alone; their losses have a standard deviation")


def test_runs_that_diverged_or_have_not_ended_are_not_compared(capsys: pytest.CaptureFixture[str]) -> None:
    names = [write("a", 0.01), write("b", 0.02, loss=None), write("c", 0.03, status="interrupted", steps=4)]
    lines = Path("c/metrics.jsonl").read_text().splitlines(keepends=True)
    Path("c/metrics.jsonl").write_text("".join(line for line in lines if json.loads(line)["step"] < 4))
    found = told(capsys, *names)
    assert found["pairs"] == []
    assert found["verdict"] == [
        "Nothing can be said yet: only A has a final loss that counts.",
        "B has diverged.",
        "C has no final loss: it is interrupted, after 25% of its tokens.",
    ]


def test_losses_on_other_data_are_not_compared(capsys: pytest.CaptureFixture[str]) -> None:
    write("a")
    found = told(capsys, "a", write("other text", 0.02, data_hash="4567"))
    assert found["pairs"] == []
    assert found["verdict"] == [
        "The losses of A and B cannot be compared. They were trained on "
        "different text: the hash of its tokens is 0123 for A and 4567 for B."
    ]
    write("other order", 0.02)
    edit("other order/metrics.jsonl", '"data/fingerprint": "0', '"data/fingerprint": "1')
    found = told(capsys, "a", "other order")
    assert found["pairs"] == []
    [line] = found["verdict"]
    assert "cannot be compared" in line
    assert "read other data in its first 16,384 tokens than other runs of its seed" in line
    write("held out", 0.02)
    edit("held out/config.yaml", "val_tokens: 8192", "val_tokens: 4096")
    warning, _ = told(capsys, "a", "held out")["verdict"]
    assert "may have been validated on different text, because of data.val_tokens." in warning


# --- What it takes, refuses and writes


def test_a_sweep_stands_for_all_runs_of_its_best_cell(capsys: pytest.CaptureFixture[str]) -> None:
    """Not for its luckiest seed: here the first sweep has the lowest single loss, and the second the lower mean."""
    for sweep, losses in (("one", (4.26, 4.20, 4.23)), ("two", (4.22, 4.225, 4.227))):
        for seed, loss in enumerate(losses):
            write(f"{sweep}/{seed}", 0.01, seed, loss)
            write(f"{sweep}/worse-{seed}", 0.02, seed, loss + 0.1)
    for seed in range(3):
        edit(f"two/{seed}/config.yaml", "dropout: 0.0", "dropout: 0.1")
    shutil.copytree("two/0", "two/-again")  # a cell that ran under two names counts once
    found = told(capsys, "one", "two")
    assert [run["directory"] for run in found["runs"]] == ["one/1", "one/2", "one/0", "two/0", "two/1", "two/2"]
    [pair] = found["pairs"]
    assert pair["lower"]["runs"] == ["D", "E", "F"]
    assert pair["lower"]["mean_loss"] == pytest.approx(4.224)
    assert pair["significant"] is False
    assert found["next"] == []
    main(["one", "two", "--json"])
    assert capsys.readouterr().err.splitlines() == [
        "gptexp: one: its best cell is compared, with 3 runs: 1, 2, 0",
        "gptexp: two: its best cell is compared, with 3 runs: 0, 1, 2",
    ]


def test_a_run_that_is_given_twice_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    write("sweep/x", 0.01, loss=4.1)
    write("sweep/y", 0.02, loss=4.0)
    write("other", 0.03)
    assert [run["directory"] for run in told(capsys, "sweep", "other")["runs"]] == ["sweep/y", "other"]
    with pytest.raises(ConfigError, match="sweep/y: stands for sweep/y, which is given twice"):
        main(["sweep", "sweep/y"])


def test_what_cannot_be_compared_is_refused_in_one_line() -> None:
    write("a")
    write("b", 0.02)
    Path("no run").mkdir()
    write("diverged/x", loss=None)
    for argv, said in (
        (["a"], "a: a single run; give two or more to compare"),
        (["a", "nosuch"], "nosuch: no such directory; give a run or a sweep"),
        (["a", "no run"], "no run: contains no run; give the directory of a run or a sweep"),
        (["a", "b", "./a"], "a: stands for a, which is given twice; leave it out"),
        (["a", "b", "--output", "nosuch/x.html"], "--output nosuch/x.html: nosuch is no directory; create it first"),
    ):
        with pytest.raises(ConfigError) as refusal:
            main(argv)
        assert str(refusal.value) == said
    with pytest.raises(CheckpointError, match="diverged: of its 1 run, none has completed"):
        main(["a", "diverged"])
    assert not Path("compare.html").exists()


@pytest.mark.parametrize("name", ["config.yaml", "summary.json", "effective.json"])
@pytest.mark.parametrize("content", [b"", b"\xff\x00", b"[" * 100_000, b'{"a": NaN}', b"[1]"])
def test_a_damaged_run_is_refused_in_one_line_that_names_the_file(name: str, content: bytes) -> None:
    write("a")
    write("b", 0.02)
    (Path("b") / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"b/{name}: ") as refusal:
        main(["a", "b"])
    assert len(str(refusal.value).splitlines()) == 1
    assert not Path("compare.html").exists()


def test_damaged_metrics_and_odd_versions_are_named_or_shown(capsys: pytest.CaptureFixture[str]) -> None:
    write("a", versions=["torch"])
    write("b", 0.02, versions={"torch\x1b[31m": {"x": [1]}})
    edit("b/metrics.jsonl", '"val/loss": 4.0', '"val/loss": "x"')
    main(["a", "b"])
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert "{'x': [1]}" in said
    assert "is not a valid event" in said


def test_it_replaces_its_own_page_and_no_other_file(capsys: pytest.CaptureFixture[str]) -> None:
    write("a")
    write("b", 0.02)
    main(["a", "b"])
    assert capsys.readouterr().out.endswith("\nthe page: compare.html\n")
    Path("compare.html").write_text(Path("compare.html").read_text()[:1000])
    main(["a", "b"])
    assert len(Path("compare.html").read_text()) > 1000
    Path("mine.html").write_text("<!DOCTYPE html>")
    Path("link.html").symlink_to("compare.html")
    Path("folder.html").mkdir()
    for name in ("mine.html", "link.html", "folder.html"):
        with pytest.raises(ConfigError, match=f"--output {name}: "):
            main(["a", "b", "--output", name])
    assert Path("mine.html").read_text() == "<!DOCTYPE html>"
    Path("compare.html").unlink()
    told(capsys, "a", "b")
    assert not Path("compare.html").exists()


@pytest.mark.e2e
@needs_chromium
def test_the_page_overlays_the_runs(browser: "Browser") -> None:
    """At two widths and in both colour schemes; texts of a run are shown, and not executed as HTML."""
    hostile = "<img src=x onerror=window.owned=1>"
    main([write(hostile, 0.01, 1, 4.0), write("b", 0.01, 2, 4.01), write("c", 0.02, 1, 4.2, git_commit=hostile)])
    context = browser.new_context(viewport={"width": 1280, "height": 844})
    page = context.new_page()
    errors: list[str] = []
    page.on("console", lambda message: errors.append(message.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(Path("compare.html").resolve().as_uri())
    page.locator("#diagnostics > summary").click()
    page.wait_for_function("views.size === PAGE.figures.length")
    assert page.inner_text("h1") == "3 runs compared: optim.lr, train.seed"
    labels = ["A: lr=0.01, seed=1", "B: lr=0.01, seed=2", "C: lr=0.02, seed=1"]
    for key in ("loss", "training-loss", "gradient-norm"):
        assert page.locator(f"#plot-{key} .role-legend-label text").all_text_contents() == labels
        assert page.locator(f"#plot-{key} .mark-line path").count() == 3
    assert {"A 4.000", "B 4.010", "C 4.200"} <= {*page.locator("#plot-loss text").all_text_contents()}
    answer = page.locator(".answers li")
    assert answer.locator(".badge").inner_text() == "tied"
    assert answer.locator(".finding").inner_text() == (
        "A and B have a lower loss than C, by 0.1950 nats, which seeds alone can cause."
    )
    answer.locator("summary").click()
    assert "Welch's test" in answer.locator("details p").inner_text()
    rows = [row.inner_text().split() for row in page.locator(".differences tr").all()]
    assert rows == [["key", "A", "B", "C"], ["Config"], ["optim.lr", "0.01", "0.01", "0.02"],
                    ["train.seed", "1", "2", "1"], ["Recorded", "by", "the", "runs"],
                    ["git_commit", "unknown", "unknown", "<img", "src=x"]]  # fmt: skip
    for _ in range(2):  # a row of the table of runs would open and close
        page.locator(".differences tbody tr").first.click()
    assert page.locator(".differences tbody tr").nth(1).is_visible()
    page.locator("[data-key=training-loss]").get_by_role("radio", name="as logged", exact=True).check()
    page.locator("[data-key=loss]").get_by_role("radio", name="steps", exact=True).check()
    page.wait_for_selector("[data-key=loss] .role-axis-title text:has-text('steps')")
    assert violations(page) == []
    page.set_viewport_size({"width": 390, "height": 844})
    page.emulate_media(color_scheme="dark")
    page.evaluate("redraw().then(() => null)")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert violations(page) == []
    assert page.locator("img").count() == 0
    assert page.evaluate("window.owned === undefined")
    assert errors == []
    context.close()
