"""What the nodes of one run must have in common. command/test_slurm.py has real nodes."""

import re
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from gptexp.distributed.ranks import Rank
from gptexp.process.errors import ConfigError, DataError
from gptexp.run.nodes import CLOCKS_S, Place, check_places, leave_mark, place_of, warn_of_clocks

FOUR = [Place(rank, f"node{rank // 2}", "NVIDIA H100", "abc", True, 1e9 + rank) for rank in range(4)]
OUT = Path("/runs/out")


def changed(rank: int, **values: object) -> list[Place]:
    return [replace(place, **values) if place.rank == rank else place for place in FOUR]  # type: ignore[arg-type]


def test_equal_nodes_are_accepted_without_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    check_places(FOUR, OUT)
    warn_of_clocks(FOUR)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("places", "error", "line"),
    [
        (changed(2, sees_run=False), ConfigError, "/runs/out: rank 2 on node1 does not see what rank 0 on node0 writes "
         "there; put the run directory on a file system that all nodes share"),
        (changed(3, device="NVIDIA A100"), ConfigError, "rank 3 on node1 has NVIDIA A100, and rank 0 on node0 has "
         "NVIDIA H100: the run would be as slow as the slower kind"),
        (changed(1, data_hash="def"), DataError, "rank 1 on node0: its data differs from that of rank 0 (token hash "
         "def, not abc)"),
    ],
)  # fmt: skip
def test_nodes_that_cannot_train_one_run_are_refused_by_name(
    places: list[Place], error: type[Exception], line: str
) -> None:
    with pytest.raises(error, match=re.escape(line)):
        check_places(places, OUT)


def test_clocks_that_differ_are_one_warning_with_the_largest_difference(capsys: pytest.CaptureFixture[str]) -> None:
    late = [*changed(1, clock_s=1e9 - 3600)[:3], replace(FOUR[3], clock_s=1e9 + CLOCKS_S + 1)]
    warn_of_clocks(late)
    assert capsys.readouterr().err == (
        "gptexp: warning: the clock of rank 1 on node0 is 3,600 s behind that of rank 0 on node0 (2 ranks in all): "
        "times in logs and of files are wrong; synchronise the clocks\n"
    )


def test_one_rank_of_each_node_looks_for_the_mark_of_rank_0(tmp_path: Path) -> None:
    mark = leave_mark(tmp_path)
    assert mark != leave_mark(tmp_path)
    assert place_of(Rank(2, 4, 0, 2), "cpu", "abc", mark).sees_run
    mark.unlink()
    assert not place_of(Rank(2, 4, 0, 2), "cpu", "abc", mark).sees_run
    assert place_of(Rank(3, 4, 1, 2), "cpu", "abc", mark).sees_run
    assert place_of(Rank(2, 4, 0, 2), "cpu", "abc", mark).host == socket.gethostname()
