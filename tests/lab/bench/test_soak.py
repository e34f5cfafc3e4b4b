import contextlib
import itertools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from lab.bench import soak
from lab.bench.options import Options
from lab.bench.record import Row
from sightline.base.bundle_files import read_manifest
from sightline.base.text.tokenizer import read_tokenizer
from sightline.service.app import create_app
from sightline.service.settings import Settings
from tests.support.tables import read_table

CARDS = read_table(__file__)


def test_every_operation_of_the_service_is_called() -> None:
    paths = create_app(Settings(), lambda *_: pytest.fail("no bundle must be loaded")).openapi()["paths"]
    # Glossaries are stored only if a setting allows it.
    operations = {(method, path) for path, methods in paths.items() for method in methods if "glossar" not in path}
    called = set()
    for call in itertools.islice(soak.all_calls(CARDS, itertools.cycle(["One.", "Two."])), 400):
        method = "get" if call.body is None else "post"
        path = call.path.split("?")[0]
        called |= {
            one for one in operations if one[0] == method and re.fullmatch(re.sub(r"\{\w+\}", r"[^/]+", one[1]), path)
        }
    assert operations - called == set()


def test_texts_are_different_and_fit_every_model(bundle: Path) -> None:
    tokenizer, most = read_tokenizer(bundle / "tokenizer.json"), read_manifest(bundle).limits.max_source_tokens
    sentences = ["short", "two words", "ÄÖÜ" * 1000, "three more words"]
    texts = list(itertools.islice(soak.texts_of(sentences, bundle.parent), 300))
    assert len(set(texts)) > 80
    assert most / 3 < max(len(tokenizer.encode(text)) for text in texts) <= most


def rows_of(*sizes: tuple[float, int, int]) -> list[Row]:
    return [{soak.RESIDENT: mb, "descriptors": fds, "threads": threads} for mb, fds, threads in sizes]


@pytest.fixture
def load_and_read(monkeypatch: pytest.MonkeyPatch, bundle: Path) -> Callable[..., None]:
    """Replace the load by given readings and failures."""

    def replaced(rows: Sequence[Row], failed: Counter[str]) -> None:
        async def load_and_read(*_: object) -> tuple[Sequence[Row], Counter[str], dict[str, float]]:
            return rows, failed, {"prefixes": 30.0, "working": 20.0}

        monkeypatch.setattr(soak, "READINGS", len(rows) - 1)
        monkeypatch.setattr(soak, "_load_and_read", load_and_read)
        monkeypatch.setattr(soak, "serving", lambda *_, **settings: contextlib.nullcontext())

    return replaced


@pytest.mark.parametrize(
    ("grown", "failures"),
    [
        ((10, 0, 0), []),
        ((-5, -1, -1), []),
        ((10.1, 0, 0), ["growth of resident memory in the second half of it by 10.1 MB"]),
        ((0, 1, 0), ["growth of descriptors by 1 "]),
        ((0, 0, 1), ["growth of threads by 1 "]),
    ],
)
def test_growth_above_a_limit_and_failed_calls_are_failures(
    grown: tuple[float, int, int], failures: list[str], short: Options, load_and_read: Callable[..., None]
) -> None:
    load_and_read(rows_of(*[(0, 0, 0)] * 16, *[grown] * 5), Counter())
    assert soak.run(short).failures == failures
    load_and_read(rows_of(*[(0, 0, 0)] * 16, *[grown] * 5), Counter({"/v1/generate: 500": 2}))
    assert soak.run(short).failures == ["2 x /v1/generate: 500", *failures]


@pytest.mark.parametrize("start", [110, 109])
def test_growth_counts_from_before_the_load_and_beyond_the_bounds(
    start: float, short: Options, load_and_read: Callable[..., None]
) -> None:
    filling: list[tuple[float, int, int]] = [(start, 9, 4), *[(140, 9, 4)] * 10]
    half: list[tuple[float, int, int]] = [(155, 12, 6), (165, 12, 6), *[(160, 12, 6)] * 3]
    load_and_read(rows_of(*filling, *half, *[(160, 11, 6)] * 5), Counter())
    result = soak.run(short)
    assert len(result.failures) == 110 - start
    assert all(failure.endswith(", less all bounds by 1 MB") for failure in result.failures)
    assert {name: figure.value for name, figure in result.figures.items()} == {
        "soak.resident_mb": 0,
        "soak.descriptors": -1,
        "soak.threads": 0,
        "soak.growth_mb": 160 - start,
        "soak.bound.prefixes": 30,
        "soak.bound.working": 20,
        "soak.beyond_mb": 110 - start,
    }
