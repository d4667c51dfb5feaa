"""The live page: Chromium beside a real run, and directories that change, are deleted or are damaged."""

import http.client
import json
import os
import random
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

from gptexp.process.words import size_shown
from gptexp.reporting.listings import records
from gptexp.reporting.page.live import Watched, build_server
from gptexp.storage import run_dir
from gptexp.storage.inventory import bytes_on_disk

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

Start = Callable[..., subprocess.Popen[str]]

LOSS = "views.get('plot-loss').view"
POINTS = "unpacked(PAGE.figures.find(figure => figure.key === 'loss')?.spec.data.values)"
LAST = f"Math.max(...({POINTS} ?? []).map(point => point.tokens))"
SETTLED = "drawn.then(() => null)"


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


def watched(directory: Path) -> Watched:
    return Watched(directory, "")


def shown(page: Watched) -> str:
    """What a page shows."""
    return page.html()[0].decode().partition("<main>")[2].partition("</main>")[0]


def opened(browser: "Browser", address: str) -> "tuple[Page, list[str]]":
    """The page, and a list of what it logs and of its requests to other addresses."""
    page, messages = browser.new_page(), list[str]()
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.on("request", lambda r: None if r.url.startswith(address) else messages.append(r.url))
    page.goto(address)
    return page, messages


def zoom_in(page: "Page") -> None:
    page.locator("#plot-loss svg.marks").hover()
    page.keyboard.down("Shift")
    page.mouse.wheel(0, -200)
    page.keyboard.up("Shift")


def says(page: "Page", part: str, text: str) -> None:
    """Wait until a part of the page says something."""
    page.wait_for_function(f"document.getElementById('{part}')?.innerText.includes({json.dumps(text)})")


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
    before, line = page.evaluate(LAST), "document.querySelector('#plot-loss .mark-line path')?.getAttribute('d')"
    drawn = page.evaluate(line)
    page.wait_for_function(f"old => {LAST} > old", arg=before)
    page.wait_for_function(f"old => ({line} ?? old) !== old", arg=drawn)
    assert page.title().split()[0].endswith("%")
    assert page.inner_text("#state").startswith("updated ")
    zoom_in(page)
    zoom = "JSON.stringify(views.get('plot-loss').view.scale('x').domain())"
    zoomed, before = page.evaluate(zoom), page.evaluate(LAST)
    page.wait_for_function(f"old => {LAST} > old", arg=before)
    page.evaluate(SETTLED)
    assert page.evaluate(zoom) == zoomed
    assert violations(page) == []
    os.kill(training.pid, signal.SIGTERM)
    training.wait(60)
    says(page, "tiles", "after a restart")
    assert "gptexp resume" in page.inner_text("#next")
    says(page, "notes", "has not reached its peak")  # it was interrupted within the warm-up
    (out / "config.yaml").write_text("train: [\n")
    says(page, "verdict", "config.yaml")
    shutil.rmtree(out)
    says(page, "verdict", "does not exist yet")
    write_run(out, 4096, 0.02, 1, 4.0)  # another run in its place
    page.wait_for_function(f"{LAST} === {2**18} && views.size")
    assert messages == []
    watching.send_signal(signal.SIGINT)
    assert watching.wait(60) == 0
    says(page, "state", "gptexp watch does not answer")
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
    read: list[str] = []
    plain = records.read_run

    def counted(directory: Path) -> records.Run:
        read.append(directory.name)
        return plain(directory)

    monkeypatch.setattr("gptexp.reporting.page.live.read_run", counted)
    with served(root) as address:
        page, messages = opened(browser, address)
        page.wait_for_selector("#plot-heatmap svg.marks")
        page.evaluate(SETTLED)
        assert page.locator("#runs tbody").count() == 42
        assert sorted(read) == [run.name for run in runs]  # once each
        read.clear()
        page.evaluate("window.before = new Map(views); null")
        page.evaluate("""window.longest = 0; window.blank = 0; new PerformanceObserver(list => {
            for (const task of list.getEntries()) longest = Math.max(longest, task.duration);
        }).observe({type: "longtask", buffered: false});
        const look = () => { blank += !document.querySelector("#plot-loss svg"); requestAnimationFrame(look); };
        look();""")
        lines = (runs[7] / "metrics.jsonl").read_text().splitlines()
        event = {**json.loads([line for line in lines if '"eval"' in line][-1]), "val/loss": 3.25}
        with (runs[7] / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(event) + "\n")
        page.wait_for_function(f"{POINTS}.some(point => point.loss === 3.25)")
        page.evaluate(SETTLED)
        assert set(read) == {runs[7].name}
        changed = "[...views].filter(([id, {view}]) => view !== before.get(id).view).map(([id]) => id)"
        assert page.evaluate(changed) == ["plot-loss"]
        assert page.evaluate("blank") == 0  # it does not flicker
        assert page.locator("#runs tbody tr:first-child td").count() == 42 * page.locator("#runs th").count()
        print("the longest task of an update of 42 cells:", page.evaluate("longest"), "ms")
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
        with run_dir.held(run):
            page.wait_for_function("document.querySelector('.status.running') !== null")
            assert page.evaluate("document.activeElement.closest('tbody').id") == f"run-{run.name}"
            assert page.evaluate("document.querySelector('#runs .scroll').scrollLeft") == 40
            assert row.locator(".more").is_visible()
            assert page.locator("th[aria-sort=ascending]").inner_text().startswith("val loss")
        assert messages == []
        shutil.rmtree(root)
        says(page, "verdict", "does not exist yet")
        page.close()


@pytest.mark.e2e
@needs_chromium
def test_a_row_that_is_no_longer_the_best_is_not_marked(browser: "Browser", tmp_path: Path) -> None:
    root = write_sweep(tmp_path / "sweep", batches=(4096,), seeds=1)
    with served(root) as address:
        page, messages = opened(browser, address)
        page.wait_for_selector("tbody.best")
        write_run(root / "new", 4096, 0.021, 1, 3.5)
        page.wait_for_selector("tbody.best[id='run-new']")
        assert page.locator("tbody.best").count() == page.locator(".badge.best").count() == 1
        assert messages == []
        page.close()


@pytest.mark.e2e
@needs_chromium
def test_charts_keep_their_height_zoom_switches_and_isolated_lines_when_cells_end(
    browser: "Browser", tmp_path: Path
) -> None:
    """Also when one with a new learning rate does, for which the legends change."""
    root = write_sweep(tmp_path / "sweep", batches=(4096, 8192), seeds=1)
    heights = """[...document.querySelectorAll("#charts .plot, #charts .plot > details > summary")].map(
        element => element.getBoundingClientRect().height)"""
    zoom = f"JSON.stringify(['x', 'y'].map(axis => {LOSS}.scale(axis).domain()))"
    faint = "document.querySelectorAll('#plot-loss .mark-line path[opacity=\"0.1\"]').length"
    with served(root) as address:
        page, messages = opened(browser, address)
        page.wait_for_selector("#plot-heatmap svg.marks")
        page.get_by_role("radio", name="log", exact=True).check()
        page.evaluate(SETTLED)
        before, whole = page.evaluate(heights), page.evaluate(zoom)
        page.locator("#plot-loss .role-legend-label text").first.click()
        zoom_in(page)
        page.wait_for_function(f"{zoom} !== {json.dumps(whole)} && {faint} > 0")
        zoomed, isolated = page.evaluate(zoom), page.evaluate(faint)
        write_run(root / "again", 4096, 0.02, 2, 4.0)
        page.wait_for_function("document.querySelectorAll('#runs tbody').length === 13")
        (root / "again/summary.json").unlink()
        says(page, "charts", "1 run without a final")
        page.evaluate(SETTLED)
        assert page.evaluate(heights) == before
        write_run(root / "new", 4096, 0.03, 1, 4.0)
        page.wait_for_function(f"{POINTS}.some(point => point.rate === '0.03')")
        page.evaluate(SETTLED)
        assert page.evaluate(zoom) == zoomed
        assert page.evaluate(faint) == isolated + 2  # the line of the new run, and that of its mean
        assert page.evaluate(f"{LOSS}.scale('y').type") == "log"
        assert messages == []
        page.close()


def test_a_slow_page_is_computed_again_only_after_ten_times_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gptexp.reporting.page.live.SHARE", 10)
    write_run(tmp_path / "run", 4096, 0.02, 1, 4.0)
    page, now = watched(tmp_path / "run"), [0.0]

    def clock() -> float:
        now[0] += 0.5  # twice in each computation, which takes half a second
        return now[0]

    monkeypatch.setattr("gptexp.reporting.page.live.time.monotonic", clock)
    first = page.html()
    (tmp_path / "run/summary.json").unlink()
    assert page.html() == first
    now[0] += 10
    assert page.html() != first


def test_an_unchanged_page_is_not_sent_again(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 4096, 0.02, 1, 4.0)
    with served(tmp_path / "run") as address:
        _, html, version = request(address, "GET", "/")
        assert request(address, "GET", "/", version=version) == (304, b"", version)
        with (tmp_path / "run/metrics.jsonl").open("a") as file:
            file.write(json.dumps({"event": "alert", "step": 3, "tokens": 1, "text": "look <b>out</b>"}) + "\n")
        status, changed, newer = request(address, "GET", "/", version=version)
        assert (status, newer == version) == (200, False)
        assert b"look &lt;b&gt;out&lt;/b&gt;" in changed
        assert b"look &lt;b" not in html


def request(address: str, method: str, path: str, host: str | None = None, version: str = "") -> tuple[int, bytes, str]:
    """Status, body and ETag of an answer."""
    place = address.removeprefix("http://").rstrip("/")
    connection = http.client.HTTPConnection(place, timeout=10)
    connection.request(method, path, headers={"Host": host or place, "If-None-Match": version})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body, answer.headers.get("ETag", "")


def status(address: str, path: str, method: str = "GET", host: str | None = None) -> int:
    return request(address, method, path, host)[0]


def test_the_server_answers_reads_of_the_page_from_this_machine_only(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 4096, 0.02, 1, 4.0)
    with served(tmp_path / "run") as address:
        assert status(address, "/") == 200
        assert request(address, "HEAD", "/")[:2] == (200, b"")
        for host in ("localhost:80", "localhost", "127.0.0.1"):  # a browser leaves out port 80
            assert status(address, "/", host=host) == 200
        assert status(address, "/", host="evil.example:80") == 403  # DNS rebinding
        assert status(address, "/", host="[") == 400
        assert status(address, "/" + "a/" * 20_000) == status(address, f"/{'a' * 20_000}/") == 404
        for path in ("/config.yaml", "/../../etc/passwd", "//etc/passwd", "/config.yaml/", "/%2e%2e/"):
            assert status(address, path) == 404
        for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
            assert status(address, "/", method) == 501
        port = int(address.rstrip("/").rpartition(":")[2])
        own = [i[4][0] for i in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
        for outside in (ip for ip in own if not str(ip).startswith("127.")):
            with socket.socket() as knock:
                knock.settimeout(2)
                assert knock.connect_ex((outside, port)) != 0


@pytest.mark.e2e
def test_watching_writes_no_file(tmp_path: Path) -> None:
    root = write_sweep(tmp_path / "sweep", batches=(4096, 8192))

    def listing() -> dict[str, tuple[int, int]]:
        return {str(p): (p.stat().st_size, p.stat().st_mtime_ns) for p in root.rglob("*") if p.is_file()}

    before = listing()
    watched(root).html()
    assert listing() == before


@pytest.mark.e2e
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
        index = request(address, "GET", "/")[1].decode()
        assert "sweep &lt;b&gt;" in index
        assert 'href="2026-11-23/12-00-00-nano/"' in index
        assert "<title>1 sweep and 2 runs · gptexp</title>" in index
        pages = {f"/sweep%20%3Cb%3E/{cell}/": "../", "/sweep%20%3Cb%3E/": "../", "/2026-11-23/12-00-00-nano/": "../../",
                 "/%FF%20odd/": "../"}  # fmt: skip
        for path, up in pages.items():
            code, html, _ = request(address, "GET", path)
            assert (code, f'<a href="{up}">' in html.decode()) == (200, True)
            assert "learning rate" in html.decode().partition("</title>")[0]
        for path in ("/notes/", "/2026-11-23/", "/.hidden/run/", "/../outputs/", "/nothing/", f"/sweep/{cell}/x.json"):
            assert status(address, path) == 404, path


def test_a_directory_that_does_not_exist_is_waited_for(tmp_path: Path) -> None:
    page = watched(tmp_path / "outputs/run")
    assert "does not exist yet" in shown(page)
    (tmp_path / "outputs/run").mkdir(parents=True)
    assert "<h1>No runs yet</h1>" in shown(page)
    write_run(tmp_path / "outputs/run", 4096, 0.02, 1, 4.0)
    assert "learning rate 0.02" in shown(page)
    assert "4.0000" in shown(watched(tmp_path / "outputs"))


@pytest.mark.e2e
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
    page = watched(root)
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
        assert "<div id=" in shown(page)


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
    page = watched(tmp_path / "run")
    assert "gptexp sample" in shown(page)
    with run_dir.held(tmp_path / "run"):
        assert "gptexp sample" not in shown(page)


def test_the_index_shows_the_new_size_of_a_run_whose_checkpoint_is_removed(tmp_path: Path) -> None:
    write_run(tmp_path / "outputs/run", 4096, 0.02, 1, 4.0)
    step = tmp_path / "outputs/run/checkpoints/step-00000008"
    step.mkdir(parents=True)
    (step / "model.safetensors").write_bytes(bytes(1 << 20))
    page, size = watched(tmp_path / "outputs"), size_shown(bytes_on_disk(tmp_path / "outputs/run"))
    assert f">{size}<" in shown(page)
    shutil.rmtree(step)
    assert f">{size}<" not in shown(page)
