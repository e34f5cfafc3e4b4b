"""Zero-shot classification: requests, scores and errors. The results equal those of Transformers in
`tests/e2e/test_imported_models.py`.
"""

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from sightline.base.text.tokenizer import TextTokenizer
from tests.service.conftest import MakeBackend, Running, Start, classifying
from tests.support.fake_runner import NLI_LABELS, fake_label_logits

pytestmark = pytest.mark.anyio
LABELS = ["dog", "Boys", "x"]
ENTAILMENT, CONTRADICTION = NLI_LABELS.index("entailment"), NLI_LABELS.index("contradiction")


@pytest.fixture
async def running(start: Start, make_backend: MakeBackend) -> AsyncIterator[Running]:
    """A service with the classifier `judge` and the model for natural language inference `nli`."""
    backend = classifying(classifying(make_backend()), "nli", labels=NLI_LABELS)
    async with start(backend, max_inputs=6) as running:
        yield running


async def classify(running: Running, **body: Any) -> dict[str, Any]:
    result: dict[str, Any] = await running.result("/v1/classify", {"candidate_labels": LABELS, **body})
    return result


def logits_of(tokenizer: TextTokenizer, text: str, template: str) -> Any:
    pairs = [tokenizer.encode_pair(text, template.replace("{}", label)) for label in LABELS]
    return np.stack([fake_label_logits(ids, 3) for ids in pairs]).astype(np.float64)


@pytest.mark.parametrize("template", [None, "{} x"])
async def test_scores_of_labels(running: Running, tokenizer: TextTokenizer, template: str | None) -> None:
    options = {} if template is None else {"hypothesis_template": template}
    for multi_label in (False, True):
        result = await classify(running, inputs=["a dog", "Hund"], multi_label=multi_label, **options)
        assert (result["model"], [one["index"] for one in result["outputs"]]) == ("nli", [0, 1])
        for text, output in zip(["a dog", "Hund"], result["outputs"], strict=True):
            logits = np.exp(logits_of(tokenizer, text, template or "This example is {}."))
            entailed, refuted = logits[:, ENTAILMENT], logits[:, CONTRADICTION]
            expected = entailed / (entailed + refuted) if multi_label else entailed / entailed.sum()
            found = {one["label"]: one["score"] for one in output["labels"]}
            assert [found[label] for label in LABELS] == pytest.approx(expected.tolist())
            assert list(found.values()) == sorted(found.values(), reverse=True)


async def test_hugging_face_returns_the_same(running: Running) -> None:
    """The body names a task, so that the URL needs no model."""
    own = await classify(running, inputs=["a dog", "Hund"], multi_label=True)
    expected = [[(one["label"], one["score"]) for one in output["labels"]] for output in own["outputs"]]
    parameters = {"candidate_labels": LABELS, "multi_label": True}
    for inputs in (["a dog", "Hund"], "a dog"):
        content = await running.result("/", {"inputs": inputs, "parameters": parameters})
        found = content if isinstance(inputs, list) else [content]
        assert [[(one["label"], one["score"]) for one in labels] for labels in found] == expected[: len(found)]


async def test_only_the_text_is_truncated(running: Running, tokenizer: TextTokenizer) -> None:
    result = await classify(running, inputs="a " * 90, truncate=True, candidate_labels=["dog"])
    assert result["usage"]["input_tokens"] == 64
    whole = tokenizer.encode_pair("a " * 90, "Hund", 64, cuts_first=True)
    hypothesis = tokenizer.encode("Hund", add_special_tokens=False)
    assert len(whole) == 64 and whole[-len(hypothesis) :] == hypothesis
