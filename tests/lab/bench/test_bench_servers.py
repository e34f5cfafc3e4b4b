import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lab.bench import peers
from lab.bench.compare import Case, compare, ratios, sightline
from lab.bench.load import GENERATE, bodies_of, measure_load, with_client
from lab.bench.models import Models, Subject
from lab.bench.options import Options
from lab.bench.peer_app import Batches, Body
from lab.bench.peers import CTRANSLATE2, FASTEMBED, INFINITY, LLAMA_CPP, MissingPeerError, Peer, Setting
from lab.bench.record import Row
from lab.bench.server import RunningServer, serving
from lab.bench.servers import prompts
from sightline.loadtest.client import Client
from sightline.loadtest.load import Load

HERE = replace(CTRANSLATE2, axes=([Setting("float32", ("--compute-type", "float32"))],))


def files_of(subject: Subject) -> dict[str, Path]:
    return {"model": subject.path("ctranslate2"), "tokenizer": subject.path("tokenizer.json")}


def ask(server: RunningServer, body: Mapping[str, Any]) -> Any:
    async def post(client: Client) -> Any:
        return await client.post(GENERATE, json.dumps(body).encode())

    response = with_client(server.url, post)
    assert response.status == 200, response.body
    return json.loads(response.body)


@pytest.mark.parametrize(
    ("name", "dtype", "parameters"),
    [
        ("shipped", "shipped", {"num_beams": 2, "early_stopping": True}),
        ("marian", "float32", {"max_new_tokens": 9, "min_new_tokens": 9}),
    ],
)
@pytest.mark.usefixtures("this_environment")
def test_the_peers_give_the_same_outputs_as_the_service(
    small_models: Models, toy_sentences: list[str], name: str, dtype: str, parameters: dict[str, Any]
) -> None:
    subject: Subject = getattr(small_models, name)
    outputs = []
    for server in (serving(subject.served(dtype), threads=1), HERE.start(files_of(subject), 1, HERE.axes[0])):
        with server as running:
            response = ask(running, {"inputs": toy_sentences[0], "parameters": parameters})
            outputs.append(([token["id"] for token in response["outputs"][0]["tokens"]], response["usage"]))
    (ours, our_usage), (theirs, their_usage) = outputs
    # The peer has no ids for names beyond the vocabulary of its tokenizer.
    assert [their or our for our, their in zip(ours, theirs, strict=True)] == ours
    assert their_usage == our_usage


def test_a_peer_whose_packages_do_not_exist_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(peers, "ENVIRONMENTS", tmp_path)
    nothing = Peer("nothing", "ctranslate2", ("--no-index", "no-such-package-1234"), ())
    with pytest.raises(MissingPeerError, match=r"nothing cannot be used here: .*no-such-package-1234"):
        nothing.python()


@pytest.mark.usefixtures("this_environment")
def test_the_fastest_settings_of_a_peer_are_found(
    small_models: Models, short: Options, toy_sentences: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Setting("unsupported", environment={"CT2_FORCE_CPU_ISA": "X"})
    axes = ([Setting("float32", ("--compute-type", "float32"))], [slow, Setting("default ISA")])
    subject = small_models.shipped
    case = Case("greedy", GENERATE, bodies_of(toy_sentences, max_new_tokens=4), (1,))
    options = replace(short, is_quick=False)
    tried = {replace(CTRANSLATE2, axes=axes): files_of(subject)}
    result = compare("shipped", [case], sightline(subject.served("shipped")), tried, options)
    assert [row["settings"] for row in result.rows] == ["default settings", "float32, default ISA"]


def test_calls_that_wait_are_answered_in_one_batch() -> None:
    sizes, is_first, may_answer = [], threading.Event(), threading.Event()

    def answer(bodies: Sequence[Body]) -> list[Body]:
        sizes.append(len(bodies))
        is_first.set()
        assert may_answer.wait(10)
        if {"fails": True} in bodies:
            raise ValueError("a text that is too long")
        return [{"echo": body} for body in bodies]

    batches = Batches(answer, threads=1, size=3, wait_s=0)
    first = batches.submit({"number": 0})
    assert is_first.wait(10)
    others = [batches.submit({"number": number}) for number in range(1, 5)]
    may_answer.set()
    assert [future.result(10) for future in (first, *others)] == [{"echo": {"number": number}} for number in range(5)]
    assert sizes == [1, 3, 1]
    with pytest.raises(ValueError, match="too long"):
        batches.submit({"fails": True}).result(10)


def row(server: str, *speeds: float, **others: Any) -> Row:
    return {"load": "a", "clients": 1, "server": server, "requests/s": list(speeds), "settings": "", **others}


def test_ratios_are_medians_of_rounds_of_the_same_precision() -> None:
    ours = [row("sightline", 2.0, 9.0, 6.0), row("sightline int8", 9.0, 9.0, 9.0)]
    rows = [*ours, row("one", 1.0, 3.0, 3.0), row("two", 4.0, 4.0, 4.0)]
    name = "s.a.1.requests/s"
    values = {key: figure.value for key, figure in ratios("s", rows, "sightline", ["one", "two"]).items()}
    assert values == {f"{name}.one": 2.0, f"{name}.two": 1.5, f"{name}.best": 1.5}
    assert f"{name}.best" not in ratios("s", rows[:3], "sightline", ["one", "two"])


def test_prompts_have_their_number_of_words_and_begin_differently() -> None:
    texts = prompts(["a b", "c d e"], 7)
    assert texts == ["a b c d e a b", "c d e a b c d"]


def test_a_load_with_failures_raises_an_error(small_models: Models) -> None:
    bodies = [json.dumps({"inputs": ""}).encode()]
    with (
        serving(small_models.shipped.served("shipped")) as server,
        pytest.raises(RuntimeError, match=r"2 of 2 requests failed: .*empty_input"),
    ):
        measure_load(server.url, Load(GENERATE, bodies, requests=2))


@pytest.mark.download
@pytest.mark.parametrize("peer", [CTRANSLATE2, FASTEMBED, INFINITY, LLAMA_CPP], ids=lambda peer: peer.name)
def test_the_packages_of_the_peers_can_be_installed(peer: Peer) -> None:
    """Environments are kept under build/, as by the command."""
    build = peer.build()
    assert any(package.partition("==")[2] in build for package in peer.packages)
