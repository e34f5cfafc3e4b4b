"""Chat templates of checkpoints: those of well-known models are usable, and others refused."""

from pathlib import Path
from typing import Any

import pytest

from sightline.base.bundle import ChatTemplate
from sightline.base.text.chat import TOOL_FILE
from sightline.base.text.prompt import ChatTemplateError
from sightline.export.sources import chat_template
from sightline.export.sources.chat_template import checked, read_chat_template
from sightline.export.sources.download import TEXT_FILES
from sightline.export.sources.opened_checkpoint import FolderFiles
from tests.export.chat_templates import CHAT_MODELS, CHATML, LLAMA3, MARKED, SPECIAL, TEMPLATES, TOOLS_AS_JSON

MESSAGES = "{% for m in messages %}{{ m.content }};{% endfor %}"


def digest_of(text: str) -> str | None:
    return checked(ChatTemplate(program=text, tokens=SPECIAL)).digest


def test_templates_are_usable_and_have_digests_of_their_own() -> None:
    digests = {digest_of(text) for text in TEMPLATES.values() if text != MARKED}
    assert len(digests) == len(TEMPLATES) - 1 and digest_of(MARKED) == digest_of(CHATML)
    repositories = {path.stem.replace("--", "/") for path in Path("tests/data/configs").iterdir()}
    assert set(CHAT_MODELS) <= repositories and set(CHAT_MODELS.values()) <= set(TEMPLATES.values())


def test_the_digest_is_that_of_the_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = digest_of(MESSAGES)
    assert digest_of(MESSAGES.replace("m in", "x in").replace("m.content", "x['content']")) == before
    assert digest_of(MESSAGES.replace(";", ",")) != before
    dated = digest_of("{{ strftime_now('%d') }}" + MESSAGES)
    assert digest_of("26" + MESSAGES) == dated  # the time of the check is fixed
    tools: Any = ({"type": "function", "function": {"name": "other"}},)
    with_tools = digest_of("{{ tools | tojson }}" + MESSAGES)
    monkeypatch.setattr(chat_template, "TOOLS", tools)
    assert digest_of("{{ tools | tojson }}" + MESSAGES) != with_tools


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{% for m in messages", "not valid Jinja"),
        ("\ud800" + MESSAGES, "not valid Jinja: 'utf-8' codec can't encode"),
        ("{{ raise_exception('never') }}", "it ends with the error 'never'"),
        ("{{ functions | tojson }}" + MESSAGES, "cannot be rendered: Object of type Undefined is not JSON"),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "cannot be rendered"),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "omits messages that are texts"),
        ("{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}", "omits messages"),
        ("{% if messages[1:] %}{{ 10 ** 9999 }}{% endif %}" + MESSAGES, "powers are not supported"),
        ("{{ '%0999999999d' % 1 }}", "it needs too much memory"),
        ("{{ 'a'.center(5000000000) }}", "it needs too much memory"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "it is nested too deeply"),
        ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "it is nested too deeply"),
    ],
)
def test_a_template_that_cannot_be_used_is_an_error_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(ChatTemplateError, match=reason):
        digest_of(text)


def test_a_template_may_need_a_system_message() -> None:
    text = "{% if messages[0].role != 'system' %}{{ raise_exception('system first') }}{% endif %}" + MESSAGES
    assert digest_of(text)


def test_the_template_of_a_folder_is_read(tmp_path: Path) -> None:
    folder = FolderFiles(tmp_path)
    assert read_chat_template(folder) is None
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "x", "bos_token": {"content": "<s>"}}')
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
    with pytest.raises(ChatTemplateError, match="omits messages that are texts"):
        read_chat_template(folder)
    for text in (CHATML, LLAMA3):
        (tmp_path / "chat_template.jinja").write_text(text)
        assert read_chat_template(folder) == checked(ChatTemplate(program=text, tokens=SPECIAL))
    assert "chat_template.jinja" in folder.files
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / TOOL_FILE).write_text(TOOLS_AS_JSON)
    template = read_chat_template(folder)
    assert template is not None and (template.program, template.tool_program) == (LLAMA3, TOOLS_AS_JSON)
    assert template.takes_tools and TEXT_FILES.fullmatch(TOOL_FILE)


def test_templates_take_tools_if_they_write_definitions() -> None:
    takes = {
        name for name, text in TEMPLATES.items() if checked(ChatTemplate(program=text, tokens=SPECIAL)).takes_tools
    }
    assert takes == {"tools as JSON", "tools in user", "tools before last", "macros"}
