"""The live page: Chromium beside a real run, and directories that change, are deleted or are damaged."""

import http.client
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from conftest import wait_for
from pages import needs_chromium, violations
from sweeps import write_run, write_sweep

from gptexp.reporting.listings import records
from gptexp.reporting.page.live import Watched, build_server
from gptexp.reporting.page.page import SECTIONS
from gptexp.storage import run_dir

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

Start = Callable[..., subprocess.Popen[str]]

LOSS = "views.get('plot-loss').view"


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change shows at the next question, however long the last answer took."""
    monkeypatch.setattr("gptexp.reporting.page.live.SHARE", 0)


@contextmanager
def served(directory: Path) -> Iterator[str]:
    """The address of a server in this process."""
    server = build_server(directory, 0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()


def state_of(watched: Watched) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(watched.state("") or b"")
    return state


def opened(browser: "Browser", address: str) -> "tuple[Page, list[str]]":
    """The page, and a list of what it logs and of its requests to other addresses."""
    page, messages = browser.new_page(), list[str]()
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.on("request", lambda r: None if r.url.startswith(address) else messages.append(r.url))
    page.goto(address)
    return page, messages


def last_tokens(page: "Page") -> int:
    return int(page.evaluate(f"Math.max(...{LOSS}.data('data0').map(point => point.tokens))"))


@pytest.mark.e2e
@needs_chromium
def test_the_page_follows_a_run_whose_directory_changes_is_damaged_and_vanishes(
    browser: "Browser",
    start: Start,
    long_run: list[str],
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    training = start("train", *long_run, "train.eval_every=50")
    wait_for(lambda: (out / "metrics.jsonl").exists() and '"eval"' in (out / "metrics.jsonl").read_text(), training)
    watching = start("watch", "out", "--port=0")
    assert watching.stdout is not None
    address = watching.stdout.readline().split()[2]
    page, messages = opened(browser, address)
    page.wait_for_selector("#plot-loss svg.marks")
    page.evaluate(f"window.unchanged = {LOSS}; null")
    before = last_tokens(page)
    for _ in range(2):  # twice, because the first change may belong to the first drawing
        page.wait_for_function(f"Math.max(...{LOSS}.data('data0').map(p => p.tokens)) > {before}")
        drawn = page.locator("#plot-loss .mark-line path").first.get_attribute("d")
        before = last_tokens(page)
    page.wait_for_function(
        "old => document.querySelector('#plot-loss .mark-line path').getAttribute('d') !== old", arg=drawn
    )
    assert page.evaluate(f"window.unchanged === {LOSS}")  # new data in the same view, so a zoom is kept
    assert page.title().split()[0].endswith("%")
    assert page.inner_text("#state").startswith("updated ")
    zoom = "JSON.stringify(views.get('plot-loss').view.scale('x').domain())"
    page.locator("#plot-loss svg.marks").hover()
    page.keyboard.down("Shift")
    page.mouse.wheel(0, -200)
    page.keyboard.up("Shift")
    zoomed = page.evaluate(zoom)
    before = last_tokens(page)
    page.wait_for_function(f"Math.max(...{LOSS}.data('data0').map(p => p.tokens)) > {before}")
    assert page.evaluate(zoom) == zoomed
    assert violations(page) == []
    os.kill(training.pid, signal.SIGTERM)
    training.wait(60)
    page.wait_for_function("document.getElementById('tiles').innerText.includes('after a restart')")
    assert "gptexp resume" in page.inner_text("#next")
    # The run was interrupted within the warm-up; the page shows its warning.
    page.wait_for_function("document.getElementById('notes').innerText.includes('has not reached its peak')")
    (out / "config.yaml").write_text("train: [\n")
    page.wait_for_function("document.getElementById('verdict').innerText.includes('config.yaml')")
    shutil.rmtree(out)
    page.wait_for_function("document.getElementById('verdict').innerText.includes('does not exist yet')")
    write_run(out, 4096, 0.02, 1, 4.0)  # another run in its place
    page.wait_for_function(f"views.size && Math.max(...{LOSS}.data('data0').map(p => p.tokens)) === {2**18}")
    assert messages == []
    watching.send_signal(signal.SIGINT)
    assert watching.wait(60) == 0
    page.wait_for_function("document.getElementById('state').innerText.startsWith('gptexp watch does not answer')")
    page.close()


@pytest.mark.e2e
@needs_chromium
def test_only_a_changed_cell_is_read_and_drawn_again(
    browser: "Browser",
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = write_sweep(tmp_path / "sweep", batches=[2048 * 2**i for i in range(7)], seeds=1)
    runs = sorted(root.glob("lr=*"))
    assert len(runs) == 42
    read: list[str] = []
    plain = records.read_run

    def counted(directory: Path) -> records.Run:
        read.append(directory.name)
        return plain(directory)

    monkeypatch.setattr("gptexp.reporting.page.live.read_run", counted)
    with served(root) as address:
        page, messages = opened(browser, address)
        page.wait_for_selector("#plot-heatmap svg.marks")
        page.evaluate("drawn.then(() => null)")
        assert page.locator("#runs tbody").count() == 42
        assert sorted(read) == [run.name for run in runs]  # once each
        read.clear()
        page.evaluate(f"window.unchanged = {LOSS}; null")
        page.evaluate("""window.drawnAgain = []; for (const [id, {view}] of views) {
            const run = view.runAsync.bind(view);
            view.runAsync = () => { drawnAgain.push(id); return run(); };
        } null""")
        page.evaluate("""window.longest = 0; new PerformanceObserver(list => {
            for (const task of list.getEntries()) longest = Math.max(longest, task.duration);
        }).observe({type: "longtask", buffered: false})""")
        lines = (runs[7] / "metrics.jsonl").read_text().splitlines()
        event = {**json.loads([line for line in lines if '"eval"' in line][-1]), "val/loss": 3.25}
        with (runs[7] / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(event) + "\n")
        page.wait_for_function(f"{LOSS}.data('data0').some(point => point.loss === 3.25)")
        assert set(read) == {runs[7].name}
        assert page.evaluate(f"window.unchanged === {LOSS}")
        page.evaluate("drawn.then(() => null)")
        assert page.evaluate("drawnAgain") == ["plot-loss"]
        assert page.locator("#runs tbody tr:first-child td").count() == 42 * page.locator("#runs th").count()
        print("the longest task of an update of 50 cells:", page.evaluate("longest"), "ms")
        assert messages == []
        page.close()


@pytest.mark.e2e
@needs_chromium
def test_an_update_leaves_focus_scrolling_order_and_open_rows_alone(browser: "Browser", tmp_path: Path) -> None:
    root = write_sweep(tmp_path / "sweep", batches=(4096, 8192), seeds=1)
    run = root / "lr=0.02,total_batch_size=4096,seed=1337"
    with served(root) as address:
        page, messages = opened(browser, address)
        page.set_viewport_size({"width": 320, "height": 844})
        page.wait_for_selector("#plot-curves svg.marks")
        page.get_by_role("button", name="val loss").click()
        row = page.locator(f"tbody[id='run-{run.name}']")
        row.locator(".opens").press("Enter")
        row.locator(".opens").focus()
        page.evaluate("document.querySelector('#runs .scroll').scrollLeft = 40")
        page.evaluate(f"window.unchanged = {LOSS}; null")
        with run_dir.held(run):
            page.wait_for_function("document.querySelector('.status.running') !== null")
            assert page.evaluate("document.activeElement.closest('tbody').id") == f"run-{run.name}"
            assert page.evaluate("document.querySelector('#runs .scroll').scrollLeft") == 40
            assert row.locator(".more").is_visible()
            assert page.locator("th[aria-sort=ascending]").inner_text().startswith("val loss")
            page.evaluate("drawn.then(() => null)")
            assert page.evaluate(f"window.unchanged === {LOSS}")
        assert messages == []
        shutil.rmtree(root)
        page.wait_for_function("document.getElementById('verdict').innerText.includes('does not exist yet')")
        page.close()


@pytest.mark.e2e
@needs_chromium
def test_charts_keep_their_height_zoom_and_isolated_lines_when_cells_end(browser: "Browser", tmp_path: Path) -> None:
    """Also when one with a new learning rate does, for which the charts are drawn anew."""
    root = write_sweep(tmp_path / "sweep", batches=(4096, 8192), seeds=1)
    heights = """[...document.querySelectorAll("#charts .plot, #charts .plot > details > summary")].map(
        element => element.getBoundingClientRect().height)"""
    zoom = f"JSON.stringify(['x', 'y'].map(axis => {LOSS}.scale(axis).domain()))"
    faint = "document.querySelectorAll('#plot-loss .mark-line path[opacity=\"0.1\"]').length"
    with served(root) as address:
        page, messages = opened(browser, address)
        page.wait_for_selector("#plot-heatmap svg.marks")
        page.evaluate("drawn.then(() => null)")
        before, whole = page.evaluate(heights), page.evaluate(zoom)
        page.locator("#plot-loss .role-legend-label text").first.click()
        page.locator("#plot-loss svg.marks").hover()
        page.keyboard.down("Shift")
        page.mouse.wheel(0, -200)
        page.keyboard.up("Shift")
        page.wait_for_function(f"{zoom} !== {json.dumps(whole)} && {faint} > 0")
        zoomed, isolated = page.evaluate(zoom), page.evaluate(faint)
        write_run(root / "again", 4096, 0.02, 2, 4.0)
        page.wait_for_function("document.querySelectorAll('#runs tbody').length === 13")
        (root / "again/summary.json").unlink()
        page.wait_for_function("document.getElementById('charts').innerText.includes('1 run without a final')")
        page.evaluate("drawn.then(() => null)")
        assert page.evaluate(heights) == before
        page.evaluate(f"window.unchanged = {LOSS}; null")
        write_run(root / "new", 4096, 0.03, 1, 4.0)
        page.wait_for_function(f"window.unchanged !== {LOSS}")
        page.evaluate("drawn.then(() => null)")
        assert page.evaluate(zoom) == zoomed
        assert page.evaluate(faint) == isolated + 2  # the line of the new run, and that of its mean
        assert messages == []
        page.close()


def test_a_slow_page_is_computed_again_only_after_ten_times_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gptexp.reporting.page.live.SHARE", 10)
    write_run(tmp_path / "run", 4096, 0.02, 1, 4.0)
    watched, now = Watched(tmp_path / "run"), [0.0]

    def clock() -> float:
        now[0] += 0.5  # twice in each computation, which takes half a second
        return now[0]

    monkeypatch.setattr("gptexp.reporting.page.live.time.monotonic", clock)
    state_of(watched)
    (tmp_path / "run/summary.json").unlink()
    shown = state_of(watched)["sections"]["tiles"]
    assert "completed" in shown
    now[0] += 10
    assert "completed" not in state_of(watched)["sections"]["tiles"]


def test_an_unchanged_state_is_not_sent_again(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 4096, 0.02, 1, 4.0)
    watched = Watched(tmp_path / "run")
    version = state_of(watched)["version"]
    assert watched.state(version) is None
    with (tmp_path / "run/metrics.jsonl").open("a") as file:
        file.write(json.dumps({"event": "alert", "step": 3, "tokens": 1, "text": "look <b>out</b>"}) + "\n")
    changed = state_of(watched)
    assert changed["version"] != version
    assert "look &lt;b&gt;out&lt;/b&gt;" in changed["sections"]["notes"]


def test_a_page_gets_only_what_differs_from_what_it_has(tmp_path: Path) -> None:
    root = write_sweep(tmp_path / "sweep", batches=(4096, 8192), seeds=1)
    run = root / "lr=0.02,total_batch_size=4096,seed=1337"
    with served(root) as address:

        def state(have: str = "") -> dict[str, Any]:
            status, body = request(address, "GET", f"/state.json?have={have}")
            assert status == 200
            answer: dict[str, Any] = json.loads(body)
            return answer

        whole = state()
        assert whole["sections"].keys() == set(SECTIONS)
        assert all("spec" in figure for figure in whole["figures"])
        assert request(address, "GET", f"/state.json?have={whole['version']}") == (204, b"")
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"event": "alert", "step": 3, "tokens": 1, "text": "a spike"}) + "\n")
        news = state(whole["version"])
        assert news["sections"].keys() == {"runs"}
        changed, unchanged = (re.findall(rf'<tbody id="([^"]*)" {mark}', news["sections"]["runs"]) for mark in
                              ("class", "data-unchanged"))  # fmt: skip
        assert (changed, len(unchanged)) == ([f"run-{run.name}"], 11)
        assert "a spike" in news["sections"]["runs"]
        assert news["figures"] == [{"key": figure["key"]} for figure in whole["figures"]]
        lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
        lines = [line for line in lines if '"eval"' not in line or '"step": 7,' not in line]
        assert len(lines) == 72
        (run / "metrics.jsonl").write_text("".join(lines))
        newer = state(news["version"])
        assert [figure["key"] for figure in newer["figures"] if "spec" in figure] == ["loss"]
        for figure in newer["figures"]:  # a page that has missed one version gets what either has changed
            assert figure in state(whole["version"])["figures"]
        fresh = state()
        for unknown in ("", "0123456789abcdef", whole["version"][:-1]):
            assert state(unknown) == fresh
        for figure, before in zip(fresh["figures"], whole["figures"], strict=True):
            assert (figure == before) == (figure["key"] != "loss")


def request(address: str, method: str, path: str, host: str | None = None) -> tuple[int, bytes]:
    place = address.removeprefix("http://").rstrip("/")
    connection = http.client.HTTPConnection(place, timeout=10)
    connection.request(method, path, headers={"Host": host or place})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body


def test_the_server_answers_reads_of_the_page_from_this_machine_only(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 4096, 0.02, 1, 4.0)
    with served(tmp_path / "run") as address:
        assert request(address, "GET", "/")[0] == 200
        assert request(address, "HEAD", "/") == (200, b"")
        for host in ("localhost:80", "localhost", "127.0.0.1"):  # a browser leaves out port 80
            assert request(address, "GET", "/", host)[0] == 200
        assert request(address, "GET", "/state.json", "evil.example:80")[0] == 403  # DNS rebinding
        for path in ("/config.yaml", "/../../etc/passwd", "//etc/passwd", "/state.json/", "/%2e%2e/"):
            assert request(address, "GET", path)[0] == 404
        for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
            assert request(address, method, "/state.json")[0] == 501
        port = int(address.rstrip("/").rpartition(":")[2])
        own = [i[4][0] for i in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
        for outside in (ip for ip in own if not str(ip).startswith("127.")):
            with socket.socket() as knock:
                knock.settimeout(2)
                assert knock.connect_ex((outside, port)) != 0


def test_watching_writes_no_file(tmp_path: Path) -> None:
    root = write_sweep(tmp_path / "sweep", batches=(4096, 8192))

    def listing() -> dict[str, tuple[int, int]]:
        return {str(p): (p.stat().st_size, p.stat().st_mtime_ns) for p in root.rglob("*") if p.is_file()}

    before = listing()
    state_of(Watched(root))
    assert listing() == before


def test_every_run_below_the_directory_has_a_page_and_no_other_path_has_one(tmp_path: Path) -> None:
    root = tmp_path / "outputs"
    write_sweep(root / "sweep <b>", batches=(4096,), seeds=1)
    odd = Path(os.fsdecode(os.fsencode(root) + b"/\xff odd"))  # not UTF-8
    write_run(odd, 4096, 0.02, 1, 4.0)
    cell = next((root / "sweep <b>").glob("lr=*")).name
    write_run(root / "2026-11-23/12-00-00-nano", 4096, 0.02, 1, 4.0)
    (root / "notes").mkdir()
    (root / ".hidden").mkdir()
    write_run(root / ".hidden/run", 4096, 0.02, 1, 4.0)
    with served(root) as address:
        listed = json.loads(request(address, "GET", "/state.json")[1])
        assert "sweep &lt;b&gt;" in listed["sections"]["runs"]
        assert 'href="2026-11-23/12-00-00-nano/"' in listed["sections"]["runs"]
        assert listed["title"] == "1 sweep and 2 runs · gptexp"
        pages = {f"/sweep%20%3Cb%3E/{cell}/": "../", "/sweep%20%3Cb%3E/": "../", "/2026-11-23/12-00-00-nano/": "../../",
                 "/%FF%20odd/": "../"}  # fmt: skip
        for path, up in pages.items():
            status, html = request(address, "GET", path)
            assert (status, f'<a href="{up}">' in html.decode()) == (200, True)
            state = json.loads(request(address, "GET", f"{path}state.json")[1])
            assert "learning rate" in state["title"]
        for path in ("/notes/", "/2026-11-23/", "/.hidden/run/", "/../outputs/", "/nothing/", f"/sweep/{cell}/x.json"):
            assert request(address, "GET", path)[0] == 404, path


def test_a_directory_that_does_not_exist_is_waited_for(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "outputs/run")
    assert "does not exist yet" in state_of(watched)["sections"]["verdict"]
    (tmp_path / "outputs/run").mkdir(parents=True)
    assert state_of(watched)["title"] == "No runs yet · gptexp"
    write_run(tmp_path / "outputs/run", 4096, 0.02, 1, 4.0)
    assert "learning rate 0.02" in state_of(watched)["title"]
    above = Watched(tmp_path / "outputs")
    assert "4.0000" in state_of(above)["sections"]["runs"]


@needs_chromium
def test_the_index_filters_and_opens_a_sweep_and_a_sweep_its_cell(browser: "Browser", tmp_path: Path) -> None:
    write_sweep(tmp_path / "outputs/sweep", batches=(4096,), seeds=1)
    write_run(tmp_path / "outputs/a run", 4096, 0.02, 1, 3.9)
    with served(tmp_path / "outputs") as address:
        page, messages = opened(browser, address)
        page.wait_for_selector("table.index")
        assert violations(page) == []
        page.get_by_role("button", name="val loss").click()
        assert page.locator("tbody a").all_inner_texts() == ["a run", "sweep"]
        page.get_by_label("Filter").fill("SWEE completed")
        assert page.locator("tbody a:visible").all_inner_texts() == ["sweep"]
        page.get_by_label("Filter").fill("RUN completed")
        for _ in range(2):  # also after a reload
            page.wait_for_selector("table.index")
            assert page.locator("tbody a:visible").all_inner_texts() == ["a run"]
            assert page.inner_text("#filtered") == "1 of 2 shown"
            assert page.get_by_label("Filter").input_value() == "RUN completed"
            page.reload()
        write_run(tmp_path / "outputs/third", 4096, 0.02, 1, 3.9)
        write_run(tmp_path / "outputs/fourth run", 4096, 0.02, 1, 3.9)
        page.wait_for_function("document.getElementById('filtered')?.textContent === '2 of 4 shown'")
        assert set(page.locator("tbody a:visible").all_inner_texts()) == {"a run", "fourth run"}
        page.get_by_label("Filter").fill("")
        assert page.locator("tbody a:visible").count() == 4
        assert page.url == address
        page.get_by_role("link", name="sweep").click()
        page.wait_for_selector("#plot-curves svg.marks")
        page.locator(".opens").first.click()
        page.get_by_role("link", name="open its page").first.click()
        page.wait_for_selector("#plot-loss svg.marks")
        assert page.inner_text("h1").endswith("learning rate 0.005")
        page.get_by_role("link", name="back").click()
        page.wait_for_selector("#plot-curves svg.marks")
        page.get_by_role("link", name="back").click()
        page.wait_for_selector("table.index")
        assert messages == []
        page.close()


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.e2e) for seed in range(2, 8))])
def test_the_server_answers_despite_damaged_files(tmp_path: Path, seed: int) -> None:
    """Between two answers, bytes are changed, cut off or inserted, and files are replaced by directories or deleted."""
    root = write_sweep(tmp_path / "sweep", batches=(4096, 8192), seeds=1)
    watched = Watched(root)
    state_of(watched)
    draw = random.Random(seed)
    for _ in range(12):
        path = draw.choice([p for p in root.rglob("*") if p.is_file()])
        content = bytearray(path.read_bytes())
        kind = draw.randrange(6)
        if kind == 0 and content:
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
            path.write_bytes(content)
        elif kind == 1:
            path.write_bytes(content[: draw.randrange(len(content) + 1)])
        elif kind == 2:
            at = draw.randrange(len(content) + 1)
            path.write_bytes(content[:at] + draw.randbytes(9) + content[at:])
        elif kind == 3:
            path.unlink()
            path.mkdir()
        elif kind == 4:
            shutil.rmtree(path.parent, ignore_errors=True) if path.parent != root else path.unlink()
        else:
            path.write_text(draw.choice(["null", "[]", '{"status": 3}', '{"cells": {"a": 1}}', "\x00"]))
        state = state_of(watched)
        assert state.keys() == {"version", "title", "sections", "figures", "changed"}


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["a file"], "a file: not a directory; give that of a run, of a sweep, or of many"),
        ([".", "--port=1000000"], "--port=1000000: cannot be used"),
    ],
)
def test_an_invalid_directory_or_port_is_refused_in_one_line(
    gptexp: Any, tmp_path: Path, argv: list[str], line: str
) -> None:
    (tmp_path / "a file").touch()
    refused = gptexp("watch", *argv)
    assert refused.returncode == 2
    assert line in refused.stderr
    assert len(refused.stderr.splitlines()) == 1


def test_a_requested_port_that_is_in_use_is_refused(start: Start, gptexp: Any, tmp_path: Path) -> None:
    write_run(tmp_path / "run", 4096, 0.02, 1, 4.0)
    first = start("watch", "run", "--port=0")
    assert first.stdout is not None
    port = first.stdout.readline().split()[2].rstrip("/").rpartition(":")[2]
    refused = gptexp("watch", "run", f"--port={port}")
    assert refused.returncode == 2
    assert f"--port={port}: cannot be used (" in refused.stderr


def test_a_run_whose_lock_is_held_is_shown_as_running(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 4096, 0.02, 1, 4.0)
    watched = Watched(tmp_path / "run")
    assert "completed" in state_of(watched)["sections"]["tiles"]
    with run_dir.held(tmp_path / "run"):
        assert "gptexp sample" not in state_of(watched)["sections"]["next"]
