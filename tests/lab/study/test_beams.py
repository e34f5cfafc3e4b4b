from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from lab.study import beams
from lab.study.beams import PENALTIES, WIDTHS, measure, tables
from sightline.model.evaluation.bleu import moses_lines

SENTENCES = ("A dog runs.", "A man sleeps.", "Two girls play.")
GREEDY = ("Ein Hund rennt im Gras.", "Ein Mann schläft dort.", "Zwei Mädchen spielen heute.")


class Fake:
    """A service whose beam search shortens the translation of the last sentence."""

    def outputs(self, path: str, body: Mapping[str, Any], inputs: Sequence[str]) -> list[Any]:
        assert path == "/v1/generate" and list(inputs) == list(SENTENCES)
        texts = list(GREEDY)
        if "num_beams" in body["parameters"]:
            texts[-1] = "Zwei Mädchen."
        return [{"text": text, "tokens": [{"logprob": -0.5}] * len(text.split())} for text in texts]


def test_settings_are_compared_with_greedy_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"en": SENTENCES, "de": GREEDY, "lc.norm.tok.de": moses_lines(list(GREEDY), "de")}
    for ending, lines in files.items():
        text = "".join(f"{line}\n" for line in lines)
        (tmp_path / f"test_2016_flickr.{ending}").write_text(text, encoding="utf-8")

    class Context:
        def __enter__(self) -> Fake:
            return Fake()

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(beams, "serve", lambda bundles: Context())
    result = measure(Namespace(bundles=tmp_path, data=tmp_path, sentences=None))
    greedy, *others = result.rows
    assert len(others) == len(WIDTHS) * len(PENALTIES)
    assert greedy["bleu"] == [100, 100, 100] and greedy["same_text"] == 3 and greedy["gain"] == [0, 0, 0]
    for row in others:
        assert row["same_text"] == 2
        assert row["gain"][0] < 0 and row["gain"][1] <= row["gain"][0] <= row["gain"][2]
        assert row["nats_gained"] == pytest.approx(1 / 3, abs=1e-4)  # two tokens fewer, at half a nat each
        assert row["length_ratio"][0] < 1
    lines = tables(result)["beams"].splitlines()
    assert len(lines[2].split("|")) == 2 + 1 + 2 * len(WIDTHS)
    assert lines[2].startswith("| 0 | -") and lines[2].endswith(" | 0.88 | 0.88 | 0.88 |")
    assert lines[-1].startswith("Greedy decoding: 100.0 ± 0.0 tok-lc BLEU, length 1.00 of the reference's.")
    assert lines[-1].endswith(" higher by 0.33, 0.33, 0.33 nats on average.")
