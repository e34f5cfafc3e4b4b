import itertools
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from bench import soak
from bench.record import Figure, Result, Row
from bench.report import END, mark
from bench.server import serving
from service.app import create_app
from service.bundle import read_manifest
from service.settings import Settings
from service.text.tokenizer import read_tokenizer

CARDS = [
    {
        "id": "a",
        "tasks": ["generate", "encode", "attention", "similar"],
        "chat": True,
        "alignment": {"layer": 1},
        "languages": {"source": "en"},
    },
    {"id": "b", "tasks": ["encode", "classify"], "chat": False, "languages": None},
    {"id": "c", "tasks": ["encode", "rerank", "tag"], "chat": False, "languages": None},
]


def test_every_operation_of_the_service_is_called() -> None:
    paths = create_app(Settings(), lambda *_: pytest.fail("no bundle must be loaded")).openapi()["paths"]
    operations = {(method, path) for path, methods in paths.items() for method in methods}
    called = set()
    for call in itertools.islice(soak.all_calls(CARDS, ["One.", "Two."]), 400):
        method = "get" if call.body is None else "post"
        path = call.path.split("?")[0]
        called |= {
            one for one in operations if one[0] == method and re.fullmatch(re.sub(r"\{\w+\}", r"[^/]+", one[1]), path)
        }
    assert operations - called == set()


def test_a_soak_reads_memory_descriptors_and_threads(bundle: Path) -> None:
    with serving(bundle.parent, threads=1) as server:
        result, failed = soak.run(server, ["A man sleeps.", "Two girls."], seconds=2.0, readings=2, clients=4)
    assert failed == Counter()
    first, last = result.rows
    assert 0 < first["calls"] < last["calls"]
    assert last["left"] > 0
    assert first["descriptors"] == last["descriptors"] > 3
    assert result.figures["soak.resident_mb"].value == pytest.approx(
        last["resident_mb"] - first["resident_mb"], abs=0.1
    )


def test_texts_fit_every_model_and_the_longest_come_first(bundle: Path) -> None:
    tokenizer, most = read_tokenizer(bundle / "tokenizer.json"), read_manifest(bundle).limits.max_source_tokens
    texts = soak.texts_of(["short", "two words", "ÄÖÜ" * 1000, "three more words"], bundle.parent)
    assert len(texts) == 4
    assert [len(text) for text in texts] == sorted(map(len, texts), reverse=True)
    assert most / 3 < max(len(tokenizer.encode(text)) for text in texts) <= most


def rows_of(*sizes: tuple[float, int, int]) -> list[Row]:
    return [
        {
            "minutes": n,
            "calls": 1000 * n,
            "refused": 0,
            "left": n,
            "resident_mb": mb,
            "descriptors": fds,
            "threads": threads,
        }
        for n, (mb, fds, threads) in enumerate(sizes, 1)
    ]


def result_of(resident_mb: float, descriptors: float, threads: float) -> Result:
    grown = {"resident_mb": resident_mb, "descriptors": descriptors, "threads": threads}
    return Result({f"soak.{name}": Figure.of([value]) for name, value in grown.items()}, rows_of((1, 2, 3)))


@pytest.mark.parametrize(
    ("grown", "is_flat"),
    [((10, 0, 0), True), ((-5, -1, -1), True), ((10.1, 0, 0), False), ((0, 1, 0), False), ((0, 0, 1), False)],
)
def test_growth_above_a_limit_is_reported(grown: tuple[float, float, float], is_flat: bool) -> None:
    result = result_of(*grown)
    assert soak.is_flat(result) is is_flat
    assert ("**no**" in soak.report(result)) is not is_flat


def test_growth_counts_from_the_first_reading_after_a_fifth(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of((100, 9, 4), (150, 12, 5), *[(160, 12, 6)] * 7, (163, 11, 6))

    async def load_and_read(*_: object) -> tuple[list[Row], Counter[str]]:
        return rows, Counter()

    monkeypatch.setattr(soak, "_load_and_read", load_and_read)
    result, _ = soak.run(None, [], 1.0, len(rows), 1)  # type: ignore[arg-type]
    assert {name: figure.value for name, figure in result.figures.items()} == {
        "soak.resident_mb": 3,
        "soak.descriptors": -1,
        "soak.threads": 0,
    }


def test_the_command_writes_its_table_and_fails_if_a_call_failed(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    document = tmp_path / "reliability.md"
    document.write_text(f"Before.\n{mark('soak', soak.WRITER)}\n\nOld.\n\n{END}\nAfter.\n", encoding="utf-8")
    failed = Counter[str]()
    monkeypatch.setattr(soak, "run", lambda *_: (result_of(1, 0, 0), failed))
    arguments = [
        "--bundles",
        str(bundle.parent),
        "--results",
        str(tmp_path),
        "--document",
        str(document),
        "--allow-dirty",
    ]
    assert soak.main(arguments) == 0
    text = document.read_text(encoding="utf-8")
    assert "| resident memory, MB | +1 | <= 10 | yes |" in text and "Old." not in text
    assert text.startswith("Before.") and text.endswith("After.\n")
    assert json.loads((tmp_path / "soak.json").read_text())["rows"][0]["calls"] == 1000
    failed["/v1/generate: 500"] = 2
    assert soak.main(arguments) == 1
    assert "error: 2 x /v1/generate: 500" in capsys.readouterr().err
