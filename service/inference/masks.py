"""Compiled constraints, which allow or forbid each token of a model's vocabulary."""

import functools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import llguidance
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from sightline.base.text.tokenizer import TextTokenizer
from sightline.service.api_errors import ApiError
from sightline.service.constraints import Constraint

KEPT = 64  # compiled constraints of a model
# Whitespace between two parts of a JSON text. Without a limit, weak models write nothing else.
WHITESPACE = r" |\n[ \t]{0,40}"
# Every token that continues a text is allowed, not only those that the tokenizer would choose.
HEADER = '%llguidance {"no_forcing": true}\n'
# Some milliseconds for compilation and for each step, and at most some 20 MB.
LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000, step_lexer_fuel=200_000, max_lexer_states=10_000, max_grammar_size=100_000
)
OPEN = {"additionalProperties", "patternProperties", "minProperties", "$ref", "anyOf", "oneOf"}
INNER = {"items", "prefixItems", "anyOf", "oneOf", "additionalProperties"}
# Parts of the library's errors that may be text of the client: only short words are shown.
CLIENT_TEXT = re.compile(r"""(?P<quote>["'/`])(.*)(?P=quote)|(?<=format: )(.*)|(?<=type: )(.*)""")
SHOWN = re.compile(r"""["'/`]?[\w$-]{1,24}["'/`]?""")


class TokenMatcher:
    """A `Matcher` of llguidance, whose copies cost microseconds."""

    def __init__(self, matcher: LLMatcher, vocabulary: "Vocabulary", *, is_first: bool = True) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._is_first = is_first  # no token so far

    @property
    def is_complete(self) -> bool:
        return self._matcher.is_accepting()

    def allowed(self) -> NDArray[np.bool_]:
        bits, size = np.frombuffer(self._matcher.compute_bitmask(), np.uint8), len(self._vocabulary.tokens)
        allowed = np.unpackbits(bits, count=size, bitorder="little").view(np.bool_)
        if self._is_first:
            allowed[self._vocabulary.other_first_ids] = False
        return allowed

    def update(self, token_id: int) -> None:
        if token_id not in self._vocabulary.end_ids:
            self._matcher.consume_token(token_id)
            self._is_first = False

    def copy(self) -> "TokenMatcher":
        return TokenMatcher(self._matcher.deep_copy(), self._vocabulary, is_first=self._is_first)

    def after(self, prefix: Sequence[int]) -> "TokenMatcher":
        """Return the state after a prefix. Raises `ApiError` if no allowed text begins with it."""
        matcher = self.copy()
        for token_id in prefix:
            if not matcher.allowed()[token_id]:
                message = "It is no beginning of a text that {constraint} allows; change one of them."
                raise ApiError("invalid_parameter", message, field="target_prefix")
            matcher.update(token_id)
        return matcher


class Vocabulary:
    """The bytes of each token; has the attributes that `llguidance.TokenizerWrapper` reads."""

    bos_token_id = None

    def __init__(self, tokenizer: TextTokenizer, size: int, end_ids: tuple[int, ...]) -> None:
        self.end_ids = end_ids
        self.eos_token_id = end_ids[0]
        self.special_token_ids = sorted(id_ for id_ in {*tokenizer.special_ids, *end_ids} if id_ < size)
        self.tokens = [tokenizer.bytes_of(id_) for id_ in range(size)]
        self.strips_leading_space = strips = tokenizer.strips_leading_space
        # Tokens that begin a text with other bytes, apart from the space.
        self.other_first_ids = [
            id_
            for id_, token in enumerate(self.tokens)
            if tokenizer.bytes_of(id_, is_first=True) != (token.removeprefix(b" ") if strips else token)
        ]
        # Special tokens have their names, which the library marks so that no text is one of them.
        for id_ in self.special_token_ids:
            self.tokens[id_] = tokenizer.name(id_).encode()

    def __call__(self, text: object) -> list[int]:
        return []  # read only for tokens that are forced, which HEADER disables


def compiler_of(tokenizer: TextTokenizer, size: int, end_ids: tuple[int, ...]) -> Callable[[Constraint], TokenMatcher]:
    """Return the function that compiles the constraints of a model, and keeps the last ones.

    `size` is the number of the model's logits. The function raises `ApiError` for a constraint that
    cannot be compiled. It takes milliseconds, so call it in a thread, and copy the result.
    """
    vocabulary = Vocabulary(tokenizer, size, end_ids)
    library = LLTokenizer(llguidance.TokenizerWrapper(vocabulary), n_vocab=size, eos_token=list(end_ids))

    @functools.lru_cache(KEPT)
    def compiled(constraint: Constraint) -> TokenMatcher:
        text = grammar_of(constraint, strips_leading_space=vocabulary.strips_leading_space)
        matcher = LLMatcher(library, LLMatcher.grammar_from_lark(HEADER + text), limits=LIMITS, log_level=0)
        if matcher.is_error():
            raise ApiError("unsupported_parameter", reason_of(matcher.get_error()), field="constraint")
        return TokenMatcher(matcher, vocabulary)

    return compiled


def grammar_of(constraint: Constraint, *, strips_leading_space: bool) -> str:
    """Return the Lark grammar of a constraint.

    If the tokenizer strips a leading space from a text, the grammar has one more of them.
    """
    space = '" "? ' if strips_leading_space else ""
    if constraint.json_schema is not None:
        schema = json.loads(constraint.json_schema)
        if '"allOf"' not in constraint.json_schema:  # whose parts may have each other's properties
            close_objects(schema)
        schema["x-guidance"] = {"whitespace_pattern": WHITESPACE}
        return f"start: {space}text\ntext: %json {json.dumps(schema)}"
    if constraint.regex is not None:
        # A first space is the one that is stripped, not one of the text.
        text = '" " TEXT | (TEXT & /[^ ](?s:.*)|/)' if strips_leading_space else "TEXT"
        regex = llguidance.regex_to_lark(constraint.regex)
        return f"start: ALL\nALL: {text}\nTEXT: /{regex}/"
    assert constraint.lark is not None
    return re.sub(r"^start\s*:", f"start: {space}text\ntext:", constraint.lark, count=1, flags=re.MULTILINE)


def close_objects(schema: Any) -> None:
    """Allow only the properties that a schema has, unless it says which others it allows.

    This is what clients mean that send the schema of a class. All texts still match the schema.
    """
    if isinstance(schema, list):
        for part in schema:
            close_objects(part)
    if isinstance(schema, dict):
        properties: Any = schema.get("properties")
        required = schema.get("required", [])
        is_object = isinstance(properties, dict) and isinstance(required, list)
        if is_object and not OPEN & schema.keys() and all(name in list(properties) for name in required):
            schema["additionalProperties"] = False
        for name in INNER & schema.keys():
            close_objects(schema[name])
        for name in ("properties", "patternProperties", "$defs", "definitions"):
            if isinstance(schema.get(name), dict):
                close_objects([*schema[name].values()])


def reason_of(error: str) -> str:
    """Return the message for an error of the library, without text of the client."""
    lines = error.splitlines()
    line = next((line for line in reversed(lines) if line.startswith("error: ")), lines[0])
    if match := re.search(r"Unimplemented keys: \[(.*)\]", line):
        return f"It uses keywords that are not supported: {match[1].replace(chr(34), '')}."
    line = re.sub("^error: |^at [0-9()]+: |failed to compile JSON schema: ", "", line)
    line = re.sub(r"\. Enable 'coerce_one_of'.*", " for alternatives that overlap; use anyOf", line)
    line = CLIENT_TEXT.sub(lambda match: match[0] if SHOWN.fullmatch(match[0]) else "…", line)
    return f"It cannot be used: {line[:200]}."
