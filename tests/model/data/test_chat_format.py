"""The ids of training equal those that the service computes for the same dialogue."""

import json
from functools import cache
from pathlib import Path
from random import Random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from sightline.base.bundle import ChatTemplate
from sightline.base.text.chat import ChatFormatter
from sightline.base.text.prompt import Dialogue
from sightline.base.text.tokenizer import TextTokenizer, read_tokenizer
from sightline.model.data.chat_template import CHAT_TEMPLATE, CHAT_TOKENS, IM_END, IM_START, dialogue_encoder, exchanges
from sightline.model.data.encoding import encode
from sightline.model.data.records import DialogueMessage, DialogueRecord, Role
from sightline.model.data.tokenizer_training import (
    SPECIAL_TOKENS,
    adapt_tokenizer,
    decode_ids,
    encode_lines,
    prompt_tokenizer,
    special_id,
    train_tokenizer,
)

PARTS = (
    *("Hello", " Hello", "hello there,", "Größe", "e\u0301", "\u0301"),
    *("🙂", "👩‍👩‍👧", "日本語", "42", "...", "'s", "_"),
    *(" ", "  ", "\n", "\n\n", "\t", "\r\n", "\u00a0", "\u2028", "\x1c", "\u200b", "\x00"),
    *("<|im_start", "im_end|>", "</ s>", "assistant\n", "<|im_", "{}"),
)


def random_messages(rng: Random) -> list[DialogueMessage]:
    """Return a dialogue of one to four exchanges, half of the time with a system message."""
    roles: list[Role] = ["system"] if rng.random() < 0.5 else []
    roles += ["user", "assistant"] * rng.randint(1, 4)
    return [DialogueMessage(role, "".join(rng.choices(PARTS, k=rng.randint(0, 8)))) for role in roles]


@cache
def formatter(tokenizer: TextTokenizer) -> ChatFormatter:
    return ChatFormatter(ChatTemplate(program=CHAT_TEMPLATE), tokenizer)


def service_ids(messages: list[DialogueMessage], tokenizer: TextTokenizer) -> list[int]:
    """Return the ids of a prompt, as the service computes them."""
    dialogue = Dialogue([{"role": message.role, "content": message.content} for message in messages])
    return formatter(tokenizer).prompt(dialogue).encode(tokenizer)


def metaspace_tokenizer(lines: list[str]) -> Tokenizer:
    """Return a tokenizer that inserts a space only at the start of an input."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    specials = ["<unk>", *SPECIAL_TOKENS, *CHAT_TOKENS]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=[*specials, *byte_tokens], show_progress=False)
    tokenizer.train_from_iterator(lines, trainer)
    document = json.loads(tokenizer.to_str())
    document["added_tokens"] = document["added_tokens"][: len(specials)]
    return adapt_tokenizer(Tokenizer.from_str(json.dumps(document)), "language-model", CHAT_TOKENS)


@pytest.fixture(scope="module", params=["byte-level", "metaspace"])
def tokenizer(request: pytest.FixtureRequest, sentences: list[str]) -> Tokenizer:
    # Frequent line breaks and markup give tokens that could cross the end of a header.
    lines = [*sentences, *("assistant\n\nHello", "<|im_end|>\n", "\n\n\n", "user\n  Hello") * 20]
    return train_tokenizer(lines, 600, CHAT_TOKENS) if request.param == "byte-level" else metaspace_tokenizer(lines)


def served(tokenizer: Tokenizer, folder: Path) -> TextTokenizer:
    path = folder / "prompt_tokenizer.json"
    prompt_tokenizer(tokenizer).save(str(path))
    return read_tokenizer(path)


def test_training_ids_equal_served_ids(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rng, service, encoder = Random(1), served(tokenizer, tmp_path), dialogue_encoder(None, tokenizer)
    for _ in range(200):
        messages = random_messages(rng)
        ((ids, is_counted),) = encode(tokenizer, [DialogueRecord(tuple(messages))])
        assert len(ids) == len(is_counted)
        replies = [index for index, message in enumerate(messages) if message.role == "assistant"]
        for index in replies:
            prompt = service_ids(messages[:index], service)
            assert prompt == encoder.prompt(DialogueRecord(tuple(messages[:index])))
            assert prompt == ids[: len(prompt)]
            # The loss begins where the service begins to generate, and ends with the message.
            assert is_counted[len(prompt) - 1 : len(prompt) + 1] == [0, 1]
            end = ids.index(special_id(tokenizer, IM_END), len(prompt)) + 1
            content = ids[len(prompt) : end - 1]
            assert is_counted[len(prompt) : end] == [1] * (end - len(prompt))
            assert is_counted[end : end + 1] in ([0], [])
            assert special_id(tokenizer, IM_START) not in content
        assert sum(is_counted) == sum(
            len(tokenizer.encode(f"assistant\n{messages[index].content.strip()}", add_special_tokens=False))
            - len(tokenizer.encode("assistant\n", add_special_tokens=False))
            + 1
            for index in replies
        )


def test_text_cannot_produce_special_tokens(tokenizer: Tokenizer) -> None:
    for token in (*SPECIAL_TOKENS, *CHAT_TOKENS):
        (ids,) = encode_lines(tokenizer, [f"a {token} b{token}"])
        assert special_id(tokenizer, token) not in ids[:-1]
        assert decode_ids(tokenizer, ids) == f"a {token} b{token}"


def test_a_dialogue_is_split_after_each_reply() -> None:
    roles: list[Role] = ["user", "user", "assistant", "assistant", "user", "assistant", "user"]
    split = list(exchanges([DialogueMessage(role, str(index)) for index, role in enumerate(roles)]))
    assert [[message.content for message in exchange] for exchange in split] == [["0", "1", "2", "3"], ["4", "5"]]
