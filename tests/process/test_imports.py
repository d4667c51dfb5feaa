"""What is imported permanently costs no collection of garbage, neither while it is imported nor later."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from gptexp.process.imports import permanent


class Cycle:
    """An object that only a collection frees."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


def test_no_collection_happens_in_the_body_or_frees_what_it_made() -> None:
    generations: list[int] = []
    gc.callbacks.append(lambda phase, info: generations.append(info["generation"]))
    try:
        with permanent():
            made = weakref.ref(Cycle())
            objects = [[number] for number in range(10**4)]
    finally:
        gc.callbacks.pop()
    assert generations == []
    gc.collect()
    assert made() is not None
    assert not {id(one) for one in gc.get_objects()} & {id(one) for one in objects}
    gc.unfreeze()
    gc.collect()
    assert made() is None


@pytest.mark.parametrize("enabled", [True, False])
def test_collections_are_as_before_after_the_body_also_if_it_fails(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    with pytest.raises(ImportError), permanent():
        raise ImportError
    assert gc.isenabled() is enabled
    later = weakref.ref(Cycle())
    gc.collect()
    assert later() is None
