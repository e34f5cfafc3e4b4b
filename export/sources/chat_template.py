"""Chat templates of checkpoints, which the import runs within limits, and templates of rerankers.

The program of a template becomes part of the bundle. Before, it renders fixed dialogues, whose
digest shows later whether another version of Jinja or of this program renders other prompts.
"""

import hashlib
import json
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

from sightline.base.bundle import ChatTemplate, PairTemplate
from sightline.base.machine import bounded_memory
from sightline.base.text.chat import TOOL_FILE, JinjaTemplate, find_template
from sightline.base.text.prompt import ChatTemplateError, TemplateLimitError
from sightline.export.sources.opened_checkpoint import FolderFiles

MAX_BYTES = 256 << 20
TIME = datetime(2024, 7, 26, 9, 5, 3)
TEXTS = ("Hello!", "Hi there.", "Tell me more.", "No.", "Bye.")
THOUGHT = "<think>\nFirst.\n</think>\n\nBecause."
_PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
_FUNCTION = {"name": "weather", "description": "Weather of a city.", "parameters": _PARAMETERS}
TOOLS = ({"type": "function", "function": _FUNCTION},)
_CALL = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}


def _dialogue(roles: str, *texts: str) -> list[dict[str, Any]]:
    """Return a dialogue; the roles are the first letters of system, user and assistant."""
    names = {"s": "system", "u": "user", "a": "assistant"}
    return [{"role": names[role], "content": text} for role, text in zip(roles, texts or TEXTS, strict=False)]


# A dialogue that ends with a reply is continued.
DIALOGUES = (
    *map(_dialogue, ("u", "su", "uau", "suau", "ua", "sua", "ssu", "uu", "uaau")),
    _dialogue("su", "Answer briefly,\nplease. /no_think", "  Hello!\n"),
    _dialogue("uauau", "Why?", THOUGHT, "And?", "", "\n\nSo. "),
    _dialogue("ua", "Why?", THOUGHT),
    _dialogue("uau", "long " * 20_000, "r" * 100_000, "<tool_response>5</tool_response>"),
    _dialogue("ua" * 50 + "u", *["\\n\u2028'\" 🙂 {{ 7 * 7 }}"] * 101),
)
TOOL_DIALOGUES = (
    DIALOGUES[0],
    DIALOGUES[1],
    [
        *DIALOGUES[0],
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "call00001", "name": "weather", "content": '{"degrees": 20}'},
    ],
)


def read_chat_template(folder: FolderFiles) -> ChatTemplate | None:
    """Read and check the chat template of a checkpoint; return None if it has none.

    Raises `ChatTemplateError` if it cannot be used.
    """
    template = _find(folder)
    return None if template is None else checked(template)


def _find(folder: FolderFiles) -> ChatTemplate | None:
    settings = folder.json("tokenizer_config.json")
    special = folder.json("special_tokens_map.json")
    return find_template(
        folder.text("chat_template.jinja"),
        settings if isinstance(settings, dict) else {},
        special if isinstance(special, dict) else {},
        folder.text(TOOL_FILE),
    )


def checked(template: ChatTemplate) -> ChatTemplate:
    """Render fixed dialogues, some of which a template may reject; return it with their digest.

    Raises `ChatTemplateError` if it exceeds a limit, or renders none of the dialogues.
    """
    rendered, error, has_text = list[str | None](), None, False
    with bounded_memory(MAX_BYTES):
        program = JinjaTemplate(template, lambda: TIME)
        cases = [(messages, None) for messages in DIALOGUES] + [(messages, TOOLS) for messages in TOOL_DIALOGUES]
        for messages, tools in cases:
            continues = messages[-1]["role"] == "assistant"
            try:
                text = program.render(messages, tools=tools, reply=not continues, continues=continues)
            except TemplateLimitError:
                raise
            except ChatTemplateError as rejection:
                error = error or rejection
                rendered.append(None)
            else:
                has_text |= any(one in text for one in TEXTS)
                rendered.append(text)
    if not has_text:
        raise error if error and rendered[0] is None else ChatTemplateError("it omits messages that are texts")
    # The first two dialogues are rendered without tools and with them.
    plain, with_tools = rendered[:2], rendered[len(DIALOGUES) : len(DIALOGUES) + 2]
    takes_tools = any(text is not None and text != other for text, other in zip(with_tools, plain, strict=True))
    digest = hashlib.sha256(json.dumps(rendered).encode()).hexdigest()
    return template.model_copy(update={"takes_tools": takes_tools, "digest": digest})


# Templates of rerankers, whose messages have the roles query and document

_PAIRS = (
    ("Find passages.", "How many?", "Three of 4."),
    ("Answer:\n\nbriefly", " x\n", "\n\n y "),
    ("x", "Two\nlines", "<b>one</b>\n"),
)


def read_pair_template(folder: FolderFiles, instruction: str, special_tokens: Collection[str]) -> PairTemplate:
    """Convert the chat template of a reranker that sentence-transformers saved.

    `instruction` is the content of the system message, "" if there is none. Raises
    `ChatTemplateError` if the template cannot be converted.
    """
    template = _find(folder)
    if template is None:
        raise ChatTemplateError("there is no chat template")
    with bounded_memory(MAX_BYTES):
        renderer = JinjaTemplate(template, lambda: TIME)
        text = _pair_text(renderer, has_instruction=bool(instruction))
        if not instruction:
            with suppress(ChatTemplateError):
                with_slot = _pair_text(renderer, has_instruction=True)
                before, _, after = with_slot.partition("{instruction}")
                if text.startswith(before) and text.endswith(after) and len(text) >= len(before) + len(after):
                    text, instruction = with_slot, text[len(before) : len(text) - len(after)]
    after_document = text.partition("{document}")[2]
    if after_document and not after_document.startswith(tuple(special_tokens)):
        raise ChatTemplateError("no special token follows the document")
    return PairTemplate(text=text, instruction=instruction)


def _pair_text(renderer: JinjaTemplate, *, has_instruction: bool) -> str:
    """Return the text of a template with slots for the contents of its messages."""
    roles = {"instruction": "system", "query": "query", "document": "document"}
    slots = [slot for slot in roles if slot != "instruction" or has_instruction]

    def render(contents: Sequence[str]) -> str:
        return renderer.render(
            [{"role": roles[slot], "content": content} for slot, content in zip(slots, contents, strict=True)]
        )

    text = render([f"[[{slot}]]" for slot in slots])
    for slot in slots:
        if text.count(f"[[{slot}]]") != 1 or f"{{{slot}}}" in text:
            raise ChatTemplateError(f"it omits or repeats the message of the role {roles[slot]!r}")
        text = text.replace(f"[[{slot}]]", f"{{{slot}}}")
    for pair in _PAIRS:
        contents = dict(zip(slots, pair[-len(slots) :], strict=True))
        parts = re.split(r"\{(instruction|query|document)\}", text)
        filled = "".join(contents[part] if index % 2 else part for index, part in enumerate(parts))
        if filled != render(list(contents.values())):
            raise ChatTemplateError("it changes the query, the document or the instruction")
    return text
