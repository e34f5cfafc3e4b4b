import logging
from pathlib import Path

import pytest

from lab.study.served import serve

MODEL = "smalltalk-chat-gatt"


def test_responses_are_in_the_order_of_the_requests(chats: Path) -> None:
    texts = [f"User: {'Hello! ' * number}\nBot:" for number in (9, 1, 5)]
    with serve(chats / "bundles") as served:
        bodies = [{"model": MODEL, "inputs": text, "parameters": {"max_new_tokens": 2}} for text in texts]
        found = [response["usage"]["input_tokens"] for response in served.post("/v1/generate", *bodies)]
        assert found == [len(response["outputs"][0]) for response in served.post("/v1/tokenize", *tokenized(texts))]
    assert found[1] < found[2] < found[0]


def tokenized(texts: list[str]) -> list[dict[str, object]]:
    return [{"model": MODEL, "inputs": text, "add_special_tokens": True} for text in texts]


def test_the_error_of_a_failed_call_has_the_services_message(chats: Path) -> None:
    with serve(chats / "bundles") as served, pytest.raises(ValueError, match=r"failed with 422: .*at most 512"):
        served.post("/v1/generate", {"model": MODEL, "inputs": "Hello! " * 600})


def test_a_service_that_cannot_start_fails_immediately(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="cannot be served"), serve(tmp_path):
        pass
    assert [one.levelno for one in caplog.records] == [logging.ERROR]
