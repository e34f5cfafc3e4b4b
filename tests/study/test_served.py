import logging
from pathlib import Path

import pytest

from study.served import serve


def test_calls_are_answered_in_their_order(chats: Path) -> None:
    texts = [f"User: {'Hello! ' * number}\nBot:" for number in (9, 1, 5)]
    with serve(chats / "bundles") as served:
        bodies = [{"inputs": text, "parameters": {"max_new_tokens": 2}} for text in texts]
        found = [answer["usage"]["input_tokens"] for answer in served.post("/v1/generate", *bodies)]
        assert found == [len(answer["outputs"][0]) for answer in served.post("/v1/tokenize", *tokenized(texts))]
    assert found[1] < found[2] < found[0]


def tokenized(texts: list[str]) -> list[dict[str, object]]:
    return [{"inputs": text, "add_special_tokens": True} for text in texts]


def test_a_refused_call_says_why(chats: Path) -> None:
    with serve(chats / "bundles") as served, pytest.raises(ValueError, match=r"refused: .*at most 512"):
        served.post("/v1/generate", {"inputs": "Hello! " * 600})


def test_what_cannot_be_served_is_not_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="cannot be served"), serve(tmp_path):
        pass
    assert [one.levelno for one in caplog.records] == [logging.ERROR]
