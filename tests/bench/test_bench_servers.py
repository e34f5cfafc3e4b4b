import json
from pathlib import Path
from typing import Any

import pytest

from bench.libraries.contender import Setup
from bench.load import GENERATE, measure_load, with_client
from bench.models import Models, Subject
from bench.server import RunningServer, serving
from bench.servers.setups import ServerSetup, fastapi_setups, litserve_setups, sightline_setups
from loadtest.client import Client
from loadtest.load import Load

NUM_BEAMS = 2
PARAMETERS = {"num_beams": NUM_BEAMS, "early_stopping": True}


@pytest.fixture(scope="module")
def subject(bundle: Path, toy_sentences: list[str], tmp_path_factory: pytest.TempPathFactory) -> Subject:
    scratch = tmp_path_factory.mktemp("models")
    return Models(scratch, bundle, toy_sentences).tiny


def ask(server: RunningServer, body: dict[str, Any]) -> dict[str, Any]:
    async def post(client: Client) -> Any:
        return await client.post(GENERATE, json.dumps(body).encode())

    response = with_client(server.url, post)
    assert response.status == 200, response.body
    content: dict[str, Any] = json.loads(response.body)
    return content


def test_the_peers_give_the_same_outputs_as_the_service(subject: Subject, toy_sentences: list[str]) -> None:
    library = Setup("ctranslate2", "float32", subject.ctranslate2)
    setups: list[ServerSetup] = [
        sightline_setups(subject, "float32", threads=1)[0],
        litserve_setups(subject, library, NUM_BEAMS, threads=1)[0],
        fastapi_setups(subject, library, NUM_BEAMS, threads=1)[0],
    ]
    responses = []
    for setup in setups:
        with setup.start() as server:
            responses.append(ask(server, {"inputs": toy_sentences[0], "parameters": PARAMETERS}))
    texts = [response["outputs"][0]["text"] for response in responses]
    tokens = [[token["id"] for token in response["outputs"][0]["tokens"]] for response in responses]
    assert texts == texts[:1] * 3
    assert tokens == tokens[:1] * 3
    assert [response["usage"] for response in responses] == [responses[0]["usage"]] * 3


def test_every_setting_of_the_peers_is_tried(subject: Subject) -> None:
    library = Setup("ctranslate2", "int8", subject.ctranslate2, environment={"CT2_FORCE_CPU_ISA": "AVX2"})
    settings = [setup.settings for setup in litserve_setups(subject, library, 1, threads=2)]
    assert len(set(settings)) == 9
    assert settings[0] == "ctranslate2 int8 AVX2, batch 16, 1 ms"
    assert [setup.settings.rpartition(", ")[2] for setup in fastapi_setups(subject, library, 1, threads=2)] == [
        "1 x 2 threads",
        "2 x 1 threads",
    ]


def test_the_fake_server_serves_the_same_api(subject: Subject, toy_sentences: list[str]) -> None:
    with serving(subject.bundles["float32"].parent, "bench.fake_server") as server:
        length = {"max_new_tokens": 5, "min_new_tokens": 5}
        response = ask(server, {"inputs": toy_sentences[0], "parameters": length})
    assert response["model"] == "fake"
    assert response["usage"]["output_tokens"] == 5


def test_a_load_with_failures_raises_an_error(subject: Subject) -> None:
    bodies = [json.dumps({"inputs": ""}).encode()]
    with (
        serving(subject.bundles["float32"].parent) as server,
        pytest.raises(RuntimeError, match=r"2 of 2 requests failed: .*empty_input"),
    ):
        measure_load(server.url, Load(GENERATE, bodies, requests=2))
