"""The parts of a `tokenizer.json`: limits of their rules, and changes of them.

The parts are the normalizer, the pre-tokenizer, the post-processor and the decoder. This module
does not tokenize texts.
"""

import base64
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any

from tokenizers import Regex, Tokenizer, models, pre_tokenizers

# Rules of a tokenizer may make a text this many times longer. They are applied to all of it while
# Python's global lock is held.
MAX_GROWTH = 1000
MAX_TOKENS = 1 << 22  # of a vocabulary
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")  # a token of byte fallback
# The byte for each character of the byte-level BPE alphabet of GPT-2 (Radford et al. 2019, section
# 2.2). Printable bytes are represented by their own character, other bytes by those from U+0100 on.
_VISIBLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
_HIDDEN = [byte for byte in range(256) if byte not in _VISIBLE]
BYTE_OF = {chr(byte): byte for byte in _VISIBLE} | {chr(256 + index): byte for index, byte in enumerate(_HIDDEN)}


def config_of(part: Any) -> dict[str, Any]:
    """Return the configuration of a part of a tokenizer; it is empty for None."""
    return dict(json.loads(part.__getstate__())) if part is not None else {}


def steps_of(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the steps of a part of a tokenizer in order; sequences are flattened."""
    if config.get("type") == "Sequence":
        for name in ("normalizers", "pretokenizers", "processors", "decoders"):
            for step in config.get(name) or ():
                yield from steps_of(step)
    elif config:
        yield config


def checked_names(tokenizer: Tokenizer) -> dict[int, str]:
    """Return the name of each token by its id.

    Raises `ValueError` unless the work and the memory of the tokenizer are bounded. Tables have a
    row for each id. A few rules that each double a text lengthen it much.
    """
    names = {id_: name for name, id_ in tokenizer.get_vocab(with_added_tokens=True).items()}
    if not names:
        raise ValueError("it has no tokens")
    if max(names) >= MAX_TOKENS:
        raise ValueError(f"it has the token id {max(names)}; ids must be less than {MAX_TOKENS}")
    for name in ("normalizer", "pre-tokenizer", "post-processor", "decoder"):
        part = getattr(tokenizer, name.replace("-", "_"))
        growth = math.prod(map(_growth_of, steps_of(config_of(part))))
        if growth > MAX_GROWTH:
            raise ValueError(f"its {name} can make a text {growth:.3g} times longer; at most {MAX_GROWTH} is allowed")
    return names | {id_: added.content for id_, added in tokenizer.get_added_tokens_decoder().items()}


def _growth_of(step: dict[str, Any]) -> float:
    """Return how many times longer a step can make a text, without what it adds once."""
    kind = step["type"]
    if kind == "Replace":
        ((pattern_kind, pattern),) = step["pattern"].items()
        if pattern_kind == "String" and pattern:
            return max(1.0, len(step["content"]) / len(pattern))
        try:
            matches_nothing = re.match(pattern, "") is not None  # it can match where there is no character
        except re.error:  # another syntax than Python's
            matches_nothing = True
        return float(max(1, len(step["content"]) + matches_nothing))
    if kind == "TemplateProcessing":
        counts = Counter(
            piece["Sequence"]["id"] for part in ("single", "pair") for piece in step[part] if "Sequence" in piece
        )
        return max(1.0, *(count / 2 for count in counts.values()))
    if kind == "Precompiled":
        # The rules of SentencePiece: the size of a trie in four bytes, the trie, and texts that are
        # inserted, each with a zero at its end.
        rules = base64.b64decode(step["precompiled_charsmap"])
        texts = rules[4 + int.from_bytes(rules[:4], "little") :].decode(errors="replace")
        return float(max(1, *map(len, texts.split("\0"))))
    # A character has at most 4 bytes in UTF-8.
    return {"ByteLevel": 4.0, "Metaspace": 2.0}.get(kind, 1.0)


def check_decoder(config: dict[str, Any]) -> None:
    """Raise `ValueError` unless a decoder converts each token but the first one on its own."""
    steps = list(steps_of(config))
    is_fused = has_bytes = False
    for step in steps:
        kind = step["type"]
        if kind == "ByteLevel" and len(steps) == 1:
            continue
        if kind in ("Metaspace", "WordPiece", "Replace", "ByteFallback") and not is_fused:
            has_bytes = has_bytes or kind == "ByteFallback"
        elif kind == "Strip" and (step["start"] <= 1 and step["stop"] == 0 if is_fused else not has_bytes):
            continue
        elif kind == "Fuse":
            is_fused = True
        else:
            raise ValueError(
                f"its decoder has the step {kind}, which is not supported here; supported are ByteLevel, WordPiece, "
                "Metaspace, and sequences of Replace, ByteFallback, Fuse and Strip(start=1, stop=0)"
            )


def split_special_tokens(tokenizer: Tokenizer, special_ids: Collection[int]) -> None:
    """Make a model unable to find its special tokens in a text.

    The option `encode_special_tokens` keeps the library from looking for them, but a Unigram model
    finds all pieces of its vocabulary, also `</s>` and `<0x0A>`, which SentencePiece excludes. A
    last pre-tokenizer therefore separates the first character of such a name from the rest.
    """
    model = tokenizer.model
    is_unigram = isinstance(model, models.Unigram)
    names = [tokenizer.id_to_token(id_) or "" for id_ in special_ids]
    if is_unigram:
        names += [f"<0x{byte:02X}>" for byte in range(256)]
    rests: dict[str, list[str]] = {}  # of the names, by their first character
    for name in sorted(names):
        id_ = model.token_to_id(name)
        is_known = len(name) > 1 and id_ is not None
        if is_known and (is_unigram or id_ in tokenizer.encode(name, add_special_tokens=False).ids):
            rests.setdefault(name[0], []).append(re.escape(name[1:]))
    if not rests:
        return
    pattern = "|".join(f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in rests.items())
    split = pre_tokenizers.Split(Regex(pattern), "merged_with_previous")
    existing = tokenizer.pre_tokenizer
    tokenizer.pre_tokenizer = split if existing is None else pre_tokenizers.Sequence([existing, split])


def without_first_space(tokenizer: Tokenizer) -> Tokenizer:
    """Return a tokenizer for texts after special tokens.

    A pre-tokenizer Metaspace with the `prepend_scheme` "first" inserts a space only at the start of
    the whole input. The tokenizer is copied only in this case.
    """
    if all(step.get("prepend_scheme") != "first" for step in steps_of(config_of(tokenizer.pre_tokenizer))):
        return tokenizer
    config = json.loads(tokenizer.to_str())
    for step in steps_of(config["pre_tokenizer"]):
        if step.get("prepend_scheme") == "first":
            step["prepend_scheme"] = "never"
    copied = Tokenizer.from_str(json.dumps(config))
    copied.encode_special_tokens = tokenizer.encode_special_tokens
    return copied


def token_bytes(token: str) -> bytes:
    try:
        return bytes(BYTE_OF[character] for character in token)
    except KeyError:  # an added token is stored as plain text
        return token.encode()
