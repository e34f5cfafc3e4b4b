"""Formats of calls are found in chat templates, and calls in replies, whatever the pieces are."""

from functools import cache
from typing import Any

import pytest

from sightline.base.bundle import ChatTemplate
from sightline.base.text.chat import JinjaTemplate
from sightline.base.text.tool_calls import CallParser, ToolFormat, find_tool_format
from tests.export.chat_templates import CHATML, SPECIAL, TOOLS_AS_JSON, TOOLS_BEFORE_LAST, TOOLS_IN_USER
from tests.support.tables import read_table

TEMPLATES = read_table(__file__, "templates") | {
    "Hermes": TOOLS_AS_JSON,
    "Llama 3": TOOLS_IN_USER,
    "changed JSON": TOOLS_BEFORE_LAST,
    "none": CHATML,
}
ARGUMENTS = '{"a": "</tool_call> }\\" <tool_call>é", "b": [-1.5, {"c": null}]}'
ONE = f'{{"name": "f", "arguments": {ARGUMENTS}}}'
OTHER = '{"name": "g", "arguments": {}}'
NAMES = {"f", "g"}


@cache
def format_of(name: str) -> ToolFormat:
    return find_tool_format(JinjaTemplate(ChatTemplate(program=TEMPLATES[name], tokens=SPECIAL)))


def filled(text: str) -> str:
    """Return a text of the table with the calls that it names."""
    return text.replace("@1", ONE).replace("@2", '{"arguments":{},\n"name":"g", "id": 5}').replace("@a", ARGUMENTS)


@pytest.mark.parametrize(("name", "fields"), read_table(__file__, "formats").items())
def test_the_format_is_that_of_the_template(name: str, fields: dict[str, Any]) -> None:
    assert format_of(name) == ToolFormat(**fields)


def read(parser: CallParser, pieces: list[str]) -> tuple[str, list[list[str]]]:
    """Return the text of a reply, and the name and the arguments of each call."""
    texts, calls = list[str](), list[list[str]]()
    for number, piece in enumerate([*pieces, ""]):
        text, parts = parser.read(piece, is_end=number == len(pieces))
        texts.append(text)
        for part in parts:
            assert (part.name is not None) == (part.index == len(calls))
            calls += [] if part.name is None else [[part.name, ""]]
            calls[part.index][1] += part.arguments
    assert parser.num_calls == len(calls)
    return "".join(texts), calls


@pytest.mark.parametrize("case", read_table(__file__, "replies") + read_table(__file__, "unchanged"), ids=str)
def test_calls_are_found_in_pieces_of_any_length(case: list[Any]) -> None:
    name, reply, text, calls = case if len(case) > 2 else (*case, case[1], [])
    reply, expected = filled(reply), (filled(text), [[called, filled(arguments)] for called, arguments in calls])
    cuts = [[reply[:cut], *reply[cut : cut + 5], reply[cut + 5 :]] for cut in range(len(reply))]
    for pieces in ([reply], list(reply), *cuts, *([reply[:cut], reply[cut:]] for cut in range(len(reply)))):
        assert read(CallParser(format_of(name), NAMES), pieces) == expected, pieces


@pytest.mark.parametrize(
    ("name", "reply"),
    [
        ("Hermes", f"<tool_call>\n{ONE}\n</tool_call>\n<tool_call>\n{OTHER}\n</tool_call>"),
        ("Mistral", f"[TOOL_CALLS] [{ONE}, {OTHER}]"),
        ("named", f"[TOOL_CALLS]f[ARGS]{ARGUMENTS}[TOOL_CALLS]g[ARGS]{{}}"),
        ("Llama 3", f"{ONE}; {OTHER}".replace("arguments", "parameters")),
    ],
)
def test_arguments_of_constrained_replies_are_returned_in_pieces(name: str, reply: str) -> None:
    """Also those of a reply that is cut."""
    for end in range(len(reply) + 1):
        results = [
            read(
                CallParser(format_of(name), NAMES, is_constrained=True),
                [reply[start : min(start + size, end)] for start in range(0, end, size)],
            )
            for size in (1, 3, len(reply))
        ]
        assert results[0] == results[1] == results[2]
    assert results[0] == ("", [["f", ARGUMENTS], ["g", "{}"]])
    parser = CallParser(format_of(name), NAMES, is_constrained=True)
    assert len([part for character in reply for part in parser.read(character)[1]]) > len(ARGUMENTS)


def test_text_is_not_held_back_without_need() -> None:
    for name, reply in (("Hermes", "a < b and <tool_call> is no"), ("none", "[1] and {x}: 5")):
        parser = CallParser(format_of(name), NAMES)
        assert "".join(parser.read(character)[0] for character in reply) == reply
    parser = CallParser(format_of("Hermes"), NAMES)
    pieces = [parser.read(piece)[0] for piece in ("Hm", ".\n", "\n<to", "ol_calls>", "?")]
    assert pieces == ["Hm", ".", "", "\n\n<tool_calls>", "?"]


def test_a_reply_may_be_nested_too_deeply_and_calls_may_be_too_many() -> None:
    deep = '<tool_call>{"name": "f", "arguments": ' + '{"a": ' * 60_000
    assert read(CallParser(format_of("Hermes"), NAMES), [deep]) == (deep, [])
    several = f"<tool_call>{ONE}</tool_call>\n<tool_call>{OTHER}</tool_call> x"
    assert read(CallParser(format_of("Hermes"), NAMES, 1), [several]) == (" x", [["f", ARGUMENTS]])
