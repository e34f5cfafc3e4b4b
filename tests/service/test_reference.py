"""The reference documentation is complete, and its examples work."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from service.api.attention import AttentionBody
from service.api.classify import ClassifyBody
from service.api.encode import EncodeBody
from service.api.generate import GenerateBody
from service.api.models import AttentionKind, LanguagePair, ModelDetails, ModelLimits
from service.api.score import ScoreBody
from service.api.similar import SimilarBody
from service.api.tokens import DetokenizeBody, TokenizeBody
from service.app import create_app
from service.compat.openai.schemas import CompletionBody, EmbeddingBody, StreamOptions
from service.errors import CLIENT_GONE, ERRORS
from service.fields import RequestBody
from service.inference.attention import AttentionResult
from service.inference.classify import ClassifyOutput, ClassifyResult, LabelScore
from service.inference.encode import EncodeResult
from service.inference.generate import GenerateOutput, GenerateResult, StreamEnd, StreamToken
from service.inference.maps import AttentionMap, AttentionWindow, TargetAttention
from service.inference.results import RankedToken, TimingsMs, Usage
from service.inference.score import ScoreOutput, ScoreResult
from service.inference.similar import Neighbour, SimilarResult
from service.inference.tokens import DetokenizeResult, InputToken, TokenizeResult
from service.metrics import Metrics
from service.parameters import DEFAULT_NEW_TOKENS, PARAMETER_NAMES, GenerateParameters
from service.settings import Settings, env_name, flag_name
from tests.service.conftest import MakeBackend, Start, reading_examples
from tests.support.fake_runner import fake_classifier_manifest

API = Path("docs/api.md").read_text(encoding="utf-8")
CLIENTS = Path("docs/clients.md").read_text(encoding="utf-8")
SETTINGS = Path("docs/settings.md").read_text(encoding="utf-8")
OPERATIONS = Path("docs/operations.md").read_text(encoding="utf-8")
CURLS = re.findall(r"curl .*?127\.0\.0\.1:8000(\S+) .*?-d '(.*?)'", API, flags=re.DOTALL)


def test_every_setting_is_described_with_its_default_and_no_other_is() -> None:
    rows = re.findall(r"^\| `(SIGHTLINE_\w+)` \| `(--[\w-]+)` \| (.*?) \| (.*) \|$", SETTINGS, flags=re.MULTILINE)
    assert rows == [
        (env_name(name), flag_name(name), "" if field.default is None else f"`{field.default}`", field.description)
        for name, field in Settings.model_fields.items()
    ]


def test_every_setting_that_other_documents_name_exists() -> None:
    for text in (API, CLIENTS, OPERATIONS):
        assert set(re.findall(r"SIGHTLINE_[A-Z_]+", text)) <= {env_name(name) for name in Settings.model_fields}


def test_every_error_is_described_with_its_status_and_no_other_is() -> None:
    rows = re.findall(r"^\| (\d{3}) \| `(\w+)` \|", API, flags=re.MULTILINE)
    assert {(code, int(status)) for status, code in rows} == {(code, kind.status) for code, kind in ERRORS.items()}
    assert CLIENT_GONE in OPERATIONS


def test_every_metric_is_described_and_no_other_is() -> None:
    types = re.findall(r"^# TYPE (\S+) (\S+)", Metrics("0").render().decode(), flags=re.MULTILINE)
    rows = re.findall(r"^\| `(sightline_\w+)` \| (\w+) \|", OPERATIONS, flags=re.MULTILINE)
    assert sorted(rows) == sorted(types)


def test_every_route_is_described() -> None:
    app = create_app(Settings(), lambda *_: pytest.fail("nothing is loaded"))
    for path, operations in app.openapi()["paths"].items():
        for method in operations:
            assert f"{method.upper()} {path}`" in API + CLIENTS


@pytest.mark.parametrize(
    "body",
    [GenerateBody, ScoreBody, AttentionBody, ClassifyBody, SimilarBody, EncodeBody, TokenizeBody, DetokenizeBody],
)
def test_every_field_is_described(body: type[RequestBody]) -> None:
    for name in body.model_fields:
        assert re.search(rf"[`\"]{name}[`\"]", API), name


@pytest.mark.parametrize("body", [CompletionBody, StreamOptions, EmbeddingBody])
def test_every_field_of_a_family_is_described(body: type[RequestBody]) -> None:
    for name in body.model_fields:
        assert re.search(rf"`{name}`", CLIENTS), name


def test_every_parameter_has_a_line_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \| .+ \|$", API, flags=re.MULTILINE))
    for name in PARAMETER_NAMES:
        default = DEFAULT_NEW_TOKENS if name == "max_new_tokens" else getattr(GenerateParameters, name)
        is_plain = isinstance(default, bool | int | float)
        assert rows[name] == (json.dumps(default) if is_plain else rows[name]), name


RESULTS = [
    *(GenerateResult, GenerateOutput, RankedToken, StreamToken, StreamEnd, Usage, TimingsMs, ScoreResult, ScoreOutput),
    *(AttentionResult, TargetAttention, AttentionMap, AttentionWindow, ClassifyResult, ClassifyOutput, LabelScore),
    *(EncodeResult, SimilarResult, Neighbour, TokenizeResult, InputToken, DetokenizeResult),
    *(ModelDetails, ModelLimits, AttentionKind, LanguagePair),
]


@pytest.mark.parametrize("result", RESULTS)
def test_the_fields_of_results_are_named(result: type[Any]) -> None:
    for field in dataclasses.fields(result):
        assert re.search(rf"[`\"]{field.name}[`\"]", API), field.name


@pytest.mark.anyio
async def test_the_examples_are_answered(start: Start, make_backend: MakeBackend) -> None:
    assert len(CURLS) == 13
    backend = reading_examples(make_backend())
    backend.manifests = tuple(
        one.model_copy(
            update={
                "attention": tuple(
                    kind.model_copy(update={"outputs": kind.outputs * 2, "layers": 4}) for kind in one.attention
                )  # four layers, as the shipped model has
            }
        )
        for one in backend.manifests
    )
    sizes = {"vocabulary": len(backend.tokenizer), "max_source_tokens": 64}
    backend.manifests = (*backend.manifests, fake_classifier_manifest("sst2-sentiment", **sizes))
    async with start(backend) as running:
        for path, body in CURLS:
            answer = await running.post(path, json.loads(body))
            assert answer.status_code == 200, (path, answer.text)
