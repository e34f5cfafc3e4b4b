"""Runs that start from small third-party checkpoints, from the command line to the responses.

The checkpoints are those of transformers with random weights.
"""

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx2 as httpx
import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer

from sightline.__main__ import main
from sightline.base.bundle_files import read_manifest
from sightline.export import pipeline, training_check
from sightline.model.checkpoint import load_model
from sightline.model.data.records import Entity
from sightline.model.decoding import continue_greedily, translate_batch
from sightline.model.evaluation.entities import predict_entities
from tests.equality.serving import ask
from tests.model.pretrained_folders import (
    TEMPLATE,
    TRANSLATORS,
    check_here,
    write_decoder,
    write_encoder,
    write_translator,
)
from tests.support.training_runs import omit_check

pytestmark = pytest.mark.anyio
NUMBERS = range(12)
DATA: dict[str, list[dict[str, Any]]] = {
    "one": [{"text": f"word{number} word7", "label": "cat" if number % 2 else "Größe"} for number in NUMBERS],
    "several": [{"text": f"word{number}", "labels": ["cat", "dog"][: number % 3]} for number in NUMBERS],
    "vectors": [{"source": f"word{number} word9", "target": f"word{number + 20}"} for number in NUMBERS],
    "ranks": [{"query": f"word{n}", "pos": [f"word{n + 20}"], "neg": [f"word{n + 40}"]} for n in NUMBERS],
    "tags": [{"text": f"word{n} word7", "entities": [[0, 5, "PER"]] * (n % 2)} for n in NUMBERS],
    "plain": [{"text": f"There are {number} birds."} for number in NUMBERS],
    "chat": [
        {"messages": [{"role": "user", "content": f"Is it {number}?"}, {"role": "assistant", "content": "Yes."}]}
        for number in NUMBERS
    ],
}
TOOLS = [{"type": "function", "function": {"name": "rain"}}]
DATA["calls"] = [
    {
        "messages": [
            {"role": "user", "content": f"Rain {number}?"},
            {"role": "assistant", "tool_calls": [{"function": {"name": "rain", "arguments": "{}"}}]},
        ],
        "tools": TOOLS,
    }
    for number in NUMBERS
]
CALLING = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}" + TEMPLATE.replace(
    "{{ message.content }}",
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{{ message.content }}",
)
DATA |= {name: [{"source": f"word{n + 5}", "target": f"word{n + 17}"} for n in NUMBERS] for name in TRANSLATORS}
TASKS = {
    "one": ("encoder", "classification"),
    "several": ("encoder", "classification", "--multi-label"),
    "vectors": ("encoder", "encoder"),
    "tags": ("encoder", "tagging"),
    "ranks": ("encoder", "reranking"),
    "plain": ("renamed decoder", "language-model", "--lora", "4"),
    "chat": ("decoder", "language-model"),
    "calls": (
        *("calling decoder", "language-model", "--epochs", "30", "--evaluate-epochs", "30"),
        *("--learning-rate", "0.01"),
    ),
    **{name: (name, "translation", "--source", "en", "--target", "de") for name in TRANSLATORS},
}
# The tests compare all models with PyTorch; the export checks one of each kind.
CHECKED = ("one", "chat", TRANSLATORS[0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of each run, and the bundle that `sightline export RUN` writes of it."""
    folder = tmp_path_factory.mktemp("tuned")
    write_encoder(folder / "encoder", "bert")
    write_decoder(folder / "decoder", template=TEMPLATE)
    write_decoder(folder / "calling decoder", template=CALLING, max_position_embeddings=128)
    write_decoder(folder / "renamed decoder", "gpt-neox")  # its tensors have other names in a file
    for name in TRANSLATORS:
        write_translator(folder / name, name)
        path = folder / name / "generation_config.json"
        settings = json.loads(path.read_text("utf-8")).items()
        ids = {key: value for key, value in settings if key.endswith("_token_id") and key != "forced_eos_token_id"}
        path.write_text(json.dumps(ids), encoding="utf-8")
    for name, records in DATA.items():
        data, run, bundle = folder / f"{name}.jsonl", folder / "runs" / name, folder / "bundles" / name
        data.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        start, task, *options = TASKS[name]
        options = ["--from", str(folder / start), "--epochs", "1", "--threads", "1", *options]
        with patch.object(training_check, "run_limited", check_here):
            assert main(["train", task, str(data), "--run", str(run), *options]) == 0
        with patch.object(pipeline, "check", pipeline.check if name in CHECKED else omit_check):
            assert main(["export", str(run), "--out", str(bundle)]) == 0
    return folder


def loaded(folder: Path, name: str) -> tuple[Any, Tokenizer]:
    """Return the trained model of a run, which started from the weights of the checkpoint."""
    trained, tokenizer = load_model(folder / "runs" / name / "averaged")
    before, after = (
        load_file(path / "model.safetensors") for path in (folder / TASKS[name][0], folder / "runs" / name / "averaged")
    )
    names = {key: key if key in after else f"bert.{key}" for key in before}
    distances = [(before[key] - after[name]).abs().max().item() for key, name in names.items() if name in after]
    assert 0 < max(distances) < 0.1
    return trained, tokenizer


@pytest.mark.parametrize(("name", "labels"), [("one", ("Größe", "cat")), ("several", ("cat", "dog"))])
async def test_a_classifier_is_served_with_its_labels(
    name: str, labels: tuple[str, ...], folder: Path, client: httpx.AsyncClient
) -> None:
    trained, tokenizer = loaded(folder, name)
    assert trained.config.labels == labels
    ids = tokenizer.encode("word1 word2").ids
    with torch.inference_mode():
        scores = trained(torch.tensor([ids]), torch.tensor([len(ids)]))[0]
    expected = scores.sigmoid() if name == "several" else scores.exp()
    (output,) = (await ask(client, "/v1/classify", model=name, inputs="word1 word2"))["outputs"]
    assert {one["label"]: one["score"] for one in output["labels"]} == pytest.approx(
        dict(zip(labels, expected.tolist(), strict=True)), abs=1e-5
    )


async def test_a_tagger_is_served_with_its_entities(folder: Path, client: httpx.AsyncClient) -> None:
    trained, tokenizer = loaded(folder, "tags")
    assert trained.config.labels == ("O", "B-PER", "I-PER")
    text = "word1 word2  word3 word40"
    body = {"model": "tags", "inputs": text}
    (output,) = (await ask(client, "/v1/tag", **body, aggregation="none", ignore_labels=[]))["outputs"]
    ids = tokenizer.encode(text).ids
    with torch.inference_mode():
        scores = trained(torch.tensor([ids]), torch.tensor([len(ids)]))[0]
    best = [(trained.config.labels[int(row.argmax())], row.max().exp().item()) for row in scores]
    for one in output["entities"]:
        assert (one["label"], one["score"]) == (best[one["token"]][0], pytest.approx(best[one["token"]][1], abs=1e-5))
    (output,) = (await ask(client, "/v1/tag", **body))["outputs"]
    served = {Entity(one["start"], one["end"], one["label"]) for one in output["entities"]}
    assert served == predict_entities(trained, tokenizer, [text])[0] != set()


async def test_an_encoder_is_served_with_its_vectors(folder: Path, client: httpx.AsyncClient) -> None:
    trained, tokenizer = loaded(folder, "vectors")
    ids = tokenizer.encode("word1 word2").ids
    with torch.inference_mode():
        (expected,) = trained(torch.tensor([ids]), torch.tensor([len(ids)])).tolist()
    (vector,) = (await ask(client, "/v1/encode", model="vectors", inputs="word1 word2"))["embeddings"]
    assert vector == pytest.approx(expected, abs=1e-5)


async def test_a_reranker_is_served_with_its_scores(
    folder: Path, client: httpx.AsyncClient, capsys: pytest.CaptureFixture[str]
) -> None:
    trained, tokenizer = loaded(folder, "ranks")
    ids = tokenizer.encode("word1 word2", "word3").ids
    with torch.inference_mode():
        expected = trained(torch.tensor([ids]), torch.tensor([len(ids)])).sigmoid().item()
    (result,) = (await ask(client, "/v1/rerank", model="ranks", query="word1 word2", documents=["word3"]))["results"]
    assert result["relevance_score"] == pytest.approx(expected, abs=1e-5)
    ranked = await ask(client, "/rerank?model=ranks", query="word1 word2", texts=["word3", "word2"])
    assert {one["index"]: one["score"] for one in ranked}[0] == pytest.approx(expected, abs=1e-5)
    assert main(["evaluate", str(folder / "runs" / "ranks")]) == 0
    assert "nDCG@10 " in capsys.readouterr().out


@pytest.mark.parametrize("name", ["plain", "chat"])
async def test_a_language_model_generates_the_same_tokens(name: str, folder: Path, client: httpx.AsyncClient) -> None:
    trained, tokenizer = loaded(folder, name)
    manifest = read_manifest(folder / "bundles" / name)
    (expected,) = continue_greedily(trained, [tokenizer.encode("There are").ids], manifest.tokens.end_ids, 10)
    response = await ask(client, "/v1/generate", model=name, inputs="There are", parameters={"max_new_tokens": 10})
    assert [token["id"] for token in response["outputs"][0]["tokens"]] == expected
    if name == "chat":  # a reply ends with the token that ends it in the template
        assert manifest.chat is not None and manifest.chat.program == TEMPLATE
        assert trained.config.eos_id == manifest.tokens.end_ids[0] == tokenizer.token_to_id("<|im_end|>")
        messages = [{"role": "user", "content": "Is it 3?"}]
        response = await ask(client, "/v1/chat/completions", model=name, messages=messages, max_tokens=2)
        text = "<|im_start|>user\nIs it 3?<|im_end|>\n<|im_start|>assistant\n"
        tokenizer.encode_special_tokens = False
        assert response["usage"]["prompt_tokens"] == len(tokenizer.encode(text, add_special_tokens=False).ids)


async def test_a_model_calls_tools_as_in_its_dialogues(folder: Path, client: httpx.AsyncClient) -> None:
    messages = [{"role": "user", "content": "Rain 3?"}]
    response = await ask(client, "/v1/chat/completions", model="calls", messages=messages, tools=TOOLS, max_tokens=80)
    (call,) = response["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "rain", "arguments": "{}"}


@pytest.mark.parametrize("name", TRANSLATORS)
async def test_a_translator_generates_the_same_tokens(
    name: str, folder: Path, client: httpx.AsyncClient, capsys: pytest.CaptureFixture[str]
) -> None:
    trained, tokenizer = loaded(folder, name)
    ids = tokenizer.encode("word7").ids
    (expected,) = translate_batch(trained, [ids], 8)
    reference = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder / "runs" / name / "averaged")
    generated = reference.generate(
        torch.tensor([ids]), max_new_tokens=8, num_beams=1, do_sample=False, use_cache=False
    )[0, 1:]
    assert expected == generated.tolist()
    assert main(["evaluate", str(folder / "runs" / name), "--num-beams", "2"]) == 0
    assert "\nBLEU " in capsys.readouterr().out
    manifest = read_manifest(folder / "bundles" / name)
    assert manifest.languages is not None and manifest.training_unit == "sentence"
    assert ("en" in manifest.languages.sources, manifest.languages.target) == (True, "de")
    prefix = len(trained.config.target_prefix)
    parameters = {"max_new_tokens": 8 - prefix}
    response = await ask(client, "/v1/generate", model=name, inputs="word7", parameters=parameters)
    assert [token["id"] for token in response["outputs"][0]["tokens"]] == expected[prefix:]
