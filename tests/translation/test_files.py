"""Files of each format come back with the same structure, opened with the format's own library."""

import asyncio
import io
import json
import re
import weakref
import zipfile
from collections.abc import Callable
from typing import Any

import docx
import odfdo
import polib
import pptx
import pytest
import srt
import webvtt
import yaml  # type: ignore[import-untyped]
from docx.enum.text import WD_BREAK
from docx.oxml import OxmlElement
from docx.oxml.ns import qn
from lxml import etree
from markdown_it import MarkdownIt
from pptx.chart.data import CategoryChartData
from pptx.enum.chart import XL_CHART_TYPE

from sightline.translation.files import archive
from sightline.translation.files.document import DocumentError
from sightline.translation.files.kinds import KINDS, read_document
from sightline.translation.translator import translate_texts
from tests.translation.fakes import FakeEngine, Order, reversed_order, same_order


def translate(name: str, data: bytes | str, order: Order = same_order, language: str = "de") -> bytes:
    document = read_document(name, data.encode() if isinstance(data, str) else data)
    results = asyncio.run(translate_texts(document.texts, FakeEngine(order)))
    written = document.write([best for best, *_ in results], language)
    read = weakref.ref(document)
    del document
    assert read() is None  # its memory does not wait for the garbage collector
    return written


def bytes_of(save: Callable[[io.BytesIO], None]) -> bytes:
    stream = io.BytesIO()
    save(stream)
    return stream.getvalue()


def zipped(parts: dict[str, str]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as file:
        for name, text in parts.items():
            file.writestr(name, text, zipfile.ZIP_STORED if name == "mimetype" else zipfile.ZIP_DEFLATED)
    return stream.getvalue()


def test_plain_text_keeps_its_spacing_and_code() -> None:
    source = "Hello world.\r\n\r\n\r\nOne two.\r\n\r\n```\na b\n\nc d\n```\n\n  - item {name}\n"
    assert translate("a.TXT", source).decode() == source.replace("Hello world", "HELLO WORLD").replace(
        "One two", "ONE TWO"
    ).replace("item", "ITEM")
    assert translate("a.txt", "Hello".encode("utf-16")).decode("utf-16") == "HELLO"


MARKDOWN = """---
title: x
---
# 1. Main *title* here

A **bold word** and [link text](http://x.y "t") with `code`. Second
sentence *goes ~~on~~* ![alt](i.png) there.[^1] A [name] too.

- [ ] Do it now
- Second item
  continues here
1. 1

> [!NOTE]
> Quote one
> two \\*star\\* end.

| Name | The value |
|---|---|
| A dog | `x` cat\\|dog |

Setext head
===========

    code block

<p align="center">Html <b>text</b> here</p>

<details>
<summary>More <i>of it</i></summary>

Hard break\\
next line <kbd>Key</kbd> and ***both*** end &amp; more.

</details>
<p>After it</p>

[name]: http://x

[^1]: The note text.
"""
IN_MARKDOWN = """---
title: x
---
# 1. MAIN *TITLE* HERE

A **BOLD WORD** AND [LINK TEXT](http://x.y "t") WITH `code`. SECOND SENTENCE *GOES ~~ON~~* ![alt](i.png) THERE.[^1] A [NAME][name] TOO.

- [ ] DO IT NOW
- SECOND ITEM CONTINUES HERE
1. 1

> [!NOTE]
> QUOTE ONE TWO\\* STAR\\* END.

| NAME | THE VALUE |
|---|---|
| A DOG | `x` CAT\\|DOG |

SETEXT HEAD
===========

    code block

<p align="center">HTML <b>TEXT</b> HERE</p>

<details>
<summary>MORE <i>OF IT</i></summary>

HARD BREAK\\
NEXT LINE <kbd>Key</kbd> AND ***BOTH*** END &amp; MORE.

</details>
<p>AFTER IT</p>

[name]: http://x

[^1]: THE NOTE TEXT.
"""  # noqa: E501


def test_markdown_keeps_its_blocks_and_marks() -> None:
    written = translate("a.md", MARKDOWN).decode()
    assert written == IN_MARKDOWN
    assert translate("a.md", MARKDOWN.replace("\n", "\r\n")).decode() == IN_MARKDOWN.replace("\n", "\r\n")


SITE = """import Tabs from '@theme/Tabs';

## Heading here {#my-id}

{{< note >}}
See [a page]({{< ref "b.md" >}}) and <code>some name</code>.
{: .lead #first }
{{< /note >}}

1. Second step
   !!! note "A title"
       The text goes
       on.

       - Item

!!! warning
    Be careful.
Next text [a link](b){: .some_class } ends.
{% endraw %}
"""


def test_markdown_of_sites_keeps_templates_attributes_and_notes() -> None:
    expected = SITE.replace("text goes\n       on", "text goes on")
    words = ("Heading here", "See", "a page", "and", "Second step", "A title", "The text goes on", "Item", "Be careful")
    for word in (*words, "Next text", "a link", "ends"):
        expected = re.sub(rf"\b{word}(?=[ .\]\n\"])(?!md)", word.upper(), expected)
    assert translate("a.md", SITE).decode() == expected
    for text in ("{#my-id}\n", '({{< ref "b.md" >}})', "<code>some name</code>"):
        assert text in translate("a.md", SITE, reversed_order).decode()


@pytest.mark.parametrize(
    "source",
    [
        "[a <b>c](x) d</b> *e [f* g](y)",
        "**a *b** c*",
        "***x** y*",
        "__a__ ~~~b~~~ `` ` `` c",
        "![a *b* [c](d)](e) f *g*",
        "[![Build state](a.svg)](b) <https://x.y> \\a \\[z\\] &copy; w",
        "- a\n  - b *c*\n\n    d\n- > e\n",
        "| a |\n|-|\n| b \\| c | ||\n",
        "1) x\n2) *y*\n   z\n* * *\n",
        "a  \nb\nc",
        "<br>a<br/> <i>b <i>c</i>",
        "word `a` and `b` end.",
        "<h1>\n a\n <b>b</b>\n</h1>\n\n:::tip\na *b*.\n:::\n\nc\n",
    ],
)
@pytest.mark.parametrize("order", [same_order, reversed_order])
def test_each_mark_of_markdown_occurs_as_often_as_before(source: str, order: Order) -> None:
    written = translate("a.md", source, order).decode()

    def parts(text: str) -> list[str]:
        tokens = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(text)
        inner = [child for token in tokens for child in token.children or [] if child.type not in ("text", "softbreak")]
        return sorted(f"{token.type} {token.attrs}" for token in [*tokens, *inner] if token.type != "text_special")

    assert parts(written) == parts(source), written


SRT = """1
00:00:01,000 --> 00:00:02,000
I have never <i>seen</i>
such a big

2
00:00:02,100 --> 00:00:04,000
dog in my life.

3
00:00:05,000 --> 00:00:06,000
<i>- Who is there?
- It is me.</i>

4
00:00:07,000 --> 00:00:08,000
...
"""


def test_cues_of_subtitles_share_sentences() -> None:
    engine = FakeEngine()
    document = read_document("a.srt", SRT.encode())
    results = asyncio.run(translate_texts(document.texts, engine))
    assert engine.read[0] == "I have never seen such a big dog in my life."
    cues = list(srt.parse(document.write([best for best, *_ in results], "de").decode()))
    assert [(cue.index, cue.start, cue.end) for cue in cues] == [
        (cue.index, cue.start, cue.end) for cue in srt.parse(SRT)
    ]
    assert [cue.content for cue in cues] == [
        "I HAVE NEVER <i>SEEN</i> SUCH A BIG", "DOG IN MY LIFE.", "<i>- WHO IS THERE?\n- IT IS ME.</i>", "...",
    ]  # fmt: skip
    moved = [cue.content for cue in srt.parse(translate("a.srt", SRT, reversed_order).decode())]
    assert all(re.search("[A-Z.]", text) for text in moved) and sum(text.count("<i>") for text in moved) == 2


def test_speakers_of_a_cue_keep_their_lines_and_dashes() -> None:
    source = "1\n00:00:01,000 --> 00:00:02,000\n<b>- Stop it!</b>\n<i>- No!</i>\n-Never ever.\n"
    expected = "<b>- IT STOP!</b>\n<i>- NO!</i>\n-EVER NEVER.\n"
    assert translate("a.srt", source, reversed_order).decode().endswith(expected)


def test_webvtt_keeps_its_notes_settings_and_speakers() -> None:
    source = "WEBVTT\n\nNOTE hi there\n\nid1\n00:01.000 --> 00:02.000 align:start\n<v Bob>Hello <c.red>my</c> friend\n"
    written = translate("a.vtt", source).decode()
    assert written == source.replace("Hello", "HELLO").replace("my", "MY").replace("friend", "FRIEND")
    voices = "WEBVTT\n\n00:01.000 --> 00:02.000\n<v Ann>Yes.</v>\n<v Bob>No.</v>\n"
    assert translate("b.vtt", voices).decode() == voices.replace("Yes", "YES").replace("No.", "NO.")
    (caption,) = webvtt.from_buffer(io.StringIO(written)).captions
    assert (caption.identifier, caption.voice, caption.text) == ("id1", "Bob", "HELLO MY FRIEND")


def test_po_files_get_translations_and_plurals() -> None:
    source = (
        'msgid ""\nmsgstr ""\n"Language: en\\n"\n"Content-Type: text/plain; charset=UTF-8\\n"\n\n'
        '#: a.c:1\nmsgctxt "menu"\nmsgid "Hello %s world\\n"\nmsgstr ""\n\n'
        '#, fuzzy\nmsgid "New"\nmsgstr "Wrong"\n\n#~ msgid "Gone"\n#~ msgstr ""\n\n'
        'msgid "One file"\nmsgid_plural "%d files"\nmsgstr[0] ""\nmsgstr[1] ""\n\nmsgid "Old"\nmsgstr "Alt"\n'
    )
    file = polib.pofile(translate("a.po", source, language="pl").decode())
    entries = {entry.msgid: entry for entry in file}
    assert entries["Hello %s world\n"].msgstr == "HELLO %s WORLD\n" and entries["Hello %s world\n"].msgctxt == "menu"
    assert entries["One file"].msgstr_plural == {0: "ONE FILE", 1: "%d FILES", 2: "%d FILES"}
    assert (entries["New"].msgstr, entries["New"].flags) == ("NEW", [])
    assert entries["Old"].msgstr == "Alt" and entries["Gone"].obsolete
    assert file.metadata["Language"] == "pl" and "nplurals=3" in file.metadata["Plural-Forms"]


def test_json_changes_only_its_values() -> None:
    source = (
        '{\n  "a" : "Hello {name}.",\n\t"b": ["One two.", 3, {"c": "<b>Bold</b> word."}], "d": "x\\ny.", "e": ""}\n'
    )
    written = translate("a.json", source, reversed_order).decode()
    assert written.replace("\n", "").startswith('{  "a" : "{name} HELLO.",\t"b": ["TWO ONE."')
    assert json.loads(written)["b"] == ["TWO ONE.", 3, {"c": "WORD <b>BOLD</b>."}]
    assert json.loads(written)["d"] == "X\nY."
    tags = json.dumps({"a": "You <0>have one</0> new.\nA <b>b c</b>."})
    assert json.loads(translate("a.json", tags, reversed_order)) == {"a": "NEW <0>ONE HAVE</0> YOU.\n<b>C B</b> A."}


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (
            "{n, plural, =0 {No files.} one {# <b>new file</b>.} other {{g, select, x {His # files.} other {#}} now.}}",
            "{n, plural, =0 {FILES NO.} one {# <b>FILE NEW</b>.} other {NOW {g, select, x {FILES # HIS.} other {#}}.}}",
        ),
        (
            "See {n, plural, one {one dog.} other {# dogs.}} here.",
            "HERE {n, plural, one {DOG ONE.} other {# DOGS.}} SEE.",
        ),
        ("Save &as…", "&AS SAVE…"),
        ("E&xit it.", "IT E&XIT."),
        ("_Open it.", "IT _OPEN."),
        ("文(&F)", "文(&F)"),
        ("Go to %(name)s &now.", "&NOW %(name)s TO GO."),
        ("AT&T it.", "IT AT&T."),
        ("Rock&roll it.", "IT ROCK&ROLL."),
        ("See https://x.y/?a&b it.", "IT https://x.y/?a&b SEE."),
        ("{{#if a}}One two.{{else}}Ann Bob.{{/if}}", "{{#if a}}TWO ONE.{{else}}BOB ANN.{{/if}}"),
    ],
)
def test_messages_and_keys_of_menus_are_translated_as_such(source: str, target: str) -> None:
    assert json.loads(translate("a.json", json.dumps([source]), reversed_order)) == [target]


@pytest.mark.parametrize(
    "value",
    [
        "snake_case", "kebab-case-id", "CONSTANT", "camelCase", "app.models.User", "Admin::User", "btn-lg btn-primary",
        "v1.2", "18-alpine", "#ff8800", "rgba(0, 0, 0, .5)", "d41d8cd98f00b204", "en-US", "utf-8", "dGhpcyBpcyBh",
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["a.json", "a.yaml"])
def test_values_that_programs_read_are_copied(value: str, name: str) -> None:
    words = ["Sign-in", "Don't", "Save", "SAVE IT", "<h1>Save</h1>", "Save...", "e.g."]
    source = json.dumps({"a": value, "b": words})
    assert json.loads(translate(name, source)) == {
        "a": value,
        "b": [word.upper().replace("H1", "h1") for word in words],
    }


def test_yaml_changes_only_its_values() -> None:
    source = (
        '# Note\nen:\n  a: Hello world # comment\n  b: "Quoted: text x"\n  c: |-\n    Line one.\n    Line two.\n\n'
        "  d: >\n    Folded text\n    goes on.\n\n    Para two.\n  e: [one two, 'three: four', yes]\n  f: 12\n"
        "  g: &x Some text\n  h: *x\n  key: 'It''s me'\n"
    )
    written = translate("a.yml", source).decode()
    expected = source.replace("en:", "de:").replace("Folded text\n    goes on.", "FOLDED TEXT GOES ON.")
    for text in ("Hello world", "Line one", "Line two", "Para two", "one two", "three: four", "Some text"):
        expected = expected.replace(text, text.upper())
    expected = expected.replace("Quoted: text x", "QUOTED: TEXT X").replace("It''s me", "IT''S ME")
    assert written == expected
    assert yaml.safe_load(written)["de"]["h"] == "SOME TEXT"
    symbols = "a: One two\norder: [ :year, :month ]  # Note\nb: |\n  b: [:a]\n"
    assert translate("a.yml", symbols).decode() == symbols.replace("One two", "ONE TWO").replace("b: [:a]", "B:[: A]")
    assert yaml.safe_load(translate("a.yaml", "a: b\nb: 'no'\n")) == {"a": "B", "b": "NO"}


@pytest.mark.parametrize(
    ("source", "target", "language"),
    [
        (
            '<xliff version="1.2" xmlns="urn:oasis:names:tc:xliff:document:1.2"><file source-language="en"><body>'
            '<trans-unit id="1"><source>Hello <g id="1">big world</g> <bpt id="2"/>now<ept id="2"/> here</source>'
            '</trans-unit><trans-unit id="2"><source>A</source><target>B</target></trans-unit>'
            '<trans-unit id="3" translate="no"><source>C</source></trans-unit></body></file></xliff>',
            '<target state="translated"><bpt id="2"/>NOW<ept id="2"/> <g id="1">WORLD BIG</g> HELLO HERE</target>',
            'target-language="de"',
        ),
        (
            '<xliff version="2.0" srcLang="en" xmlns="urn:oasis:names:tc:xliff:document:2.0"><file id="f"><unit id="u">'
            '<segment><source>Hello <pc id="1">big world</pc>.</source><target/></segment></unit></file></xliff>',
            '<target><pc id="1">WORLD BIG</pc> HELLO.</target>',
            'trgLang="de"',
        ),
        (
            '<xliff version="1.2"><file source-language="en"><body><trans-unit id="1"><source>A dog. Red cat.</source>'
            '<seg-source><mrk mtype="seg">A dog.</mrk> <mrk mtype="seg">Red cat.</mrk></seg-source></trans-unit>'
            "</body></file></xliff>",
            '<target state="translated"><mrk mtype="seg">DOG A.</mrk> <mrk mtype="seg">CAT RED.</mrk></target>',
            'target-language="de"',
        ),
    ],
)
def test_xliff_gets_targets(source: str, target: str, language: str) -> None:
    written = translate("a.xlf", source, reversed_order).decode()
    assert language in written and written.count("<source>") == source.count("<source>")
    assert target in written and written.count("<target") == written.count("<source") - written.count('"no"')


def add_field(paragraph: Any, code: str, text: str) -> None:
    for kind in ("begin", "code", "separate", "text", "end"):
        run = paragraph.add_run(text if kind == "text" else "")
        if kind == "code":
            run._r.append(OxmlElement("w:instrText"))
            run._r[-1].text = code
        elif kind != "text":
            run._r.append(OxmlElement("w:fldChar"))
            run._r[-1].set(qn("w:fldCharType"), kind)


def word_file() -> bytes:
    document = docx.Document()
    document.add_heading("The title.", 1)
    paragraph = document.add_paragraph("A ")
    for part in ("big", " bro", "wn"):
        paragraph.add_run(part).bold = True
    paragraph.add_run(" dog runs\tfast. ")
    link = OxmlElement("w:hyperlink")
    link.set(qn("w:anchor"), "top")
    link.append(paragraph.add_run("See here")._r)
    link[-1].insert(0, OxmlElement("w:rPr"))
    link[-1][0].append(OxmlElement("w:u"))
    paragraph._p.append(link)
    paragraph.add_run(".\nNext line")
    add_field(paragraph, " PAGE ", "Seven")
    second = document.add_paragraph("See ")
    add_field(second, ' HYPERLINK "http://x" ', "the site")
    bold = document.add_paragraph()
    bold.add_run("All of it bold").bold = True
    bold.add_run(" but this.")
    document.add_paragraph("One").add_run().add_break(WD_BREAK.PAGE)
    document.paragraphs[-1].add_run("Two")
    number = document.add_paragraph("12 ")
    add_field(number, " PAGE ", "Eight")
    table = document.add_table(1, 2)
    table.cell(0, 0).text, table.cell(0, 1).text = "Cell one", "12"
    document.sections[0].header.paragraphs[0].text = "My header"
    return bytes_of(document.save)


@pytest.mark.parametrize("order", [same_order, reversed_order])
def test_docx_keeps_runs_links_fields_and_tables(order: Order) -> None:
    result: Any = docx.Document(io.BytesIO(translate("a.docx", word_file(), order)))
    first, second, third, fourth, broken, number = result.paragraphs
    assert [run.text for run in broken.runs] == ["ONE", "", "TWO"] and not any(run.underline for run in second.runs)
    assert first.style.name == "Heading 1"
    assert first.text == ("THE TITLE." if order is same_order else "TITLE THE.")
    assert [run.text for run in second.runs if run.bold] == ["BIG BROWN" if order is same_order else "BROWN BIG"]
    assert [link.text for link in second.hyperlinks] == ["SEE HERE" if order is same_order else "HERE SEE"]
    kinds = [each.get(qn("w:fldCharType")) for each in second._p.iter(qn("w:fldChar"))]
    assert kinds == ["begin", "separate", "end"] and "Seven" in second.text
    assert "\t" in second.text and "\n" in second.text
    names = [child.tag.partition("}")[2] for run in third.runs for child in run._r if child.tag != qn("w:rPr")]
    inner = names[names.index("separate" if "separate" in names else "instrText") : len(names)]
    assert inner.count("t") >= 1 and names.count("fldChar") == 3
    assert [run.text.strip() for run in fourth.runs if run.bold]
    assert {run.text.strip(" .") for run in fourth.runs if not run.bold} - {""} == {
        "BUT THIS" if order is same_order else "THIS BUT"
    }
    assert number.text == "12 Eight" and len(list(number._p.iter(qn("w:fldChar"), qn("w:instrText")))) == 4
    assert [cell.text for cell in result.tables[0].rows[0].cells][1] == "12"
    assert sorted(result.sections[0].header.paragraphs[0].text.split()) == ["HEADER", "MY"]


def test_docx_keeps_numbers_of_pages_in_fields_and_translates_alternative_texts() -> None:
    document = docx.Document()
    document.core_properties.title = "My report"
    paragraph = document.add_paragraph("A picture")
    link = OxmlElement("w:hyperlink")
    add_field(paragraph, " PAGEREF x ", "3")
    link.extend(paragraph._p[1:])
    paragraph._p.append(link)
    paragraph._p.append(OxmlElement("w:docPr"))
    paragraph._p[-1].set("descr", "A dog")
    result: Any = docx.Document(io.BytesIO(translate("a.docx", bytes_of(document.save))))
    assert result.core_properties.title == "MY REPORT" and result.paragraphs[0]._p[-1].get("descr") == "A DOG"
    runs = [each.tag.partition("}")[2] for each in result.paragraphs[0]._p.iter(qn("w:fldChar"), qn("w:t"))]
    assert runs == ["t", "fldChar", "fldChar", "t", "fldChar"]


def test_pptx_keeps_shapes_and_notes() -> None:
    slides = pptx.Presentation()
    slide = slides.slides.add_slide(slides.slide_layouts[1])
    slide.shapes.title.text = "The title"
    frame = slide.placeholders[1].text_frame
    frame.text = "Plain "
    run = frame.paragraphs[0].add_run()
    run.text, run.font.bold = "bold words", True
    frame.paragraphs[0].add_line_break()
    frame.paragraphs[0].add_run().text = "next"
    slide.notes_slide.notes_text_frame.text = "A note"
    data: Any = CategoryChartData()  # type: ignore[no-untyped-call]
    data.categories = ["North side", "2024"]
    data.add_series("Some costs", (1, 2))
    slide.shapes.add_chart(XL_CHART_TYPE.COLUMN_CLUSTERED, 0, 0, 9, 9, data)
    result = pptx.Presentation(io.BytesIO(translate("a.pptx", bytes_of(slides.save))))
    (slide,) = result.slides
    assert slide.shapes.title.text == "THE TITLE" and slide.notes_slide.notes_text_frame.text == "A NOTE"
    (plot,) = slide.shapes[-1].chart.plots
    assert ([*plot.categories], plot.series[0].name) == (["NORTH SIDE", "2024"], "SOME COSTS")
    paragraph = slide.placeholders[1].text_frame.paragraphs[0]
    assert paragraph.text == "PLAIN BOLD WORDS\vNEXT"
    assert [run.text for run in paragraph.runs if run.font.bold] == ["BOLD WORDS"]


def test_odt_keeps_spans_spaces_and_lists() -> None:
    document = odfdo.Document("text")
    document.body.clear()
    document.body.append(odfdo.Header(1, "The title"))
    paragraph = odfdo.Element.from_tag(
        '<text:p>A <text:span text:style-name="T1">big dog</text:span> runs. <text:s text:c="2"/>Eats<text:tab/>fast.'
        '<text:line-break/><text:a xlink:href="http://x">See it</text:a><text:bookmark text:name="b"/></text:p>'
    )
    document.body.append(paragraph)
    document.body.append(odfdo.List(["Item one"]))
    field = "<text:p>See page <text:page-number>3</text:page-number> of it.</text:p>"
    document.body.append(odfdo.Element.from_tag(field))
    written = translate("a.odt", bytes_of(document.save))
    body: Any = odfdo.Document(io.BytesIO(written)).body
    assert [str(each.text) for each in body.headers] == ["THE TITLE"]
    assert body.get_paragraph(0).serialize() == (
        '<text:p>A <text:span text:style-name="T1">BIG DOG</text:span> RUNS. <text:s text:c="2"/>EATS<text:tab/>FAST.'
        '<text:line-break/><text:a xlink:href="http://x">SEE IT</text:a><text:bookmark text:name="b"/></text:p>'
    )
    assert "ITEM ONE" in body.get_list(0).serialize()
    read = [text.text for text in read_document("a.odt", bytes_of(document.save)).texts]
    assert "See page 3 of it." in read and body.get_paragraph(2).text_recursive == "SEE PAGE 3 OF IT."
    assert zipfile.ZipFile(io.BytesIO(written)).infolist()[0].filename == "mimetype"


BOOK = {
    "mimetype": "application/epub+zip",
    "META-INF/container.xml": '<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"/>',
    "book.opf": '<package xmlns="http://www.idpf.org/2007/opf" xmlns:dc="http://purl.org/dc/elements/1.1/"><metadata>'
    "<dc:title>My book</dc:title><dc:language>en</dc:language></metadata></package>",
    "one.xhtml": '<?xml version="1.0" encoding="utf-8"?><!DOCTYPE html><html xmlns="http://www.w3.org/1999/xhtml" '
    'xmlns:epub="http://www.idpf.org/2007/ops" lang="en"><head><title>One</title></head><body><p epub:type="x">A '
    '<b>big <i>dog</i></b> runs<br/> and <a id="n"/>eats.</p><svg xmlns="http://www.w3.org/2000/svg"><text>Keep</text>'
    '</svg><p>So&nbsp;it was<a epub:type="noteref" href="#n">1</a> here.</p></body></html>',
    "toc.ncx": '<ncx xmlns="http://www.daisy.org/z3986/2005/ncx/"><text>Chapter one</text></ncx>',
    "style.css": "p { color: red }",
}


def test_epub_keeps_its_pages_as_xhtml() -> None:
    result = zipfile.ZipFile(io.BytesIO(translate("a.epub", zipped(BOOK))))
    first = result.infolist()[0]
    assert (first.filename, first.compress_type) == ("mimetype", zipfile.ZIP_STORED)
    assert result.namelist() == list(BOOK)
    page = etree.fromstring(result.read("one.xhtml"))
    source = etree.fromstring(BOOK["one.xhtml"].replace("&nbsp;", " ").encode())
    assert [element.tag for element in page.iter()] == [element.tag for element in source.iter()]
    text = etree.tostring(page, encoding="unicode")
    assert "A <b>BIG <i>DOG</i></b> RUNS<br/>" in text and ">Keep</text>" in text and 'lang="de"' in text
    assert 'SO IT WAS<a epub:type="noteref" href="#n">1</a> HERE.' in text
    assert b"<dc:title>MY BOOK</dc:title><dc:language>de<" in result.read("book.opf")
    assert b"<text>CHAPTER ONE</text>" in result.read("toc.ncx")
    assert result.read("style.css").decode() == BOOK["style.css"]


def test_html_keeps_its_encoding() -> None:
    head = '<!DOCTYPE html>\n<html lang="en"><head><meta charset="iso-8859-1"></head>'
    page = f"{head}<body><p>A <b>dög</b></p></body></html>\n"
    assert translate("a.html", page.encode("latin-1")).decode("latin-1") == (
        page.replace('"en"', '"de"').replace("dög", "DÖG")
    )


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.pdf", b"", r"has no known format; the formats are \.txt, "),
        ("a.txt", b"a\n\xff", "is not UTF-8, at line 2;"),
        ("a.json", b'{\n"a": }', "is not JSON, at line 2;"),
        ("a.yaml", b"a: 'b\n", "is not YAML, at line 2;"),
        ("a.po", b'msgid "a"\nxyz b\n', "is not a PO file, at line 2;"),
        ("a.srt", b"Hello", "has no cue with times"),
        ("a.xlf", b"<xliff>\n<a>", "is not well-formed XML, at line 2;"),
        ("a.xlf", b'<!DOCTYPE x [<!ENTITY e "f">]><xliff>&e;</xliff>', "declares entities"),
        ("a.docx", b"PK", "is damaged"),
        ("a.docx", zipped({"word/document.xml": "<a>"}), "is not well-formed XML"),
        ("a.epub", zipped({"META-INF/encryption.xml": "<a/>"}), "is encrypted"),
        ("a.html", b"<b>" * 300, "cannot be read. It must have at most 200"),
    ],
)
def test_a_file_that_cannot_be_read_is_rejected(name: str, data: bytes, message: str) -> None:
    with pytest.raises(DocumentError, match=message):
        read_document(name, data)


def test_what_an_archive_unpacks_to_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DocumentError, match="of content; make it smaller"):
        read_document("a.docx", zipped({"word/document.xml": " " * 2000}), max_unpacked_bytes=1000)
    monkeypatch.setattr(archive, "MAX_PARTS", 1)
    with pytest.raises(DocumentError, match="has 2 parts, more than 1"):
        read_document("a.odt", zipped({"a": "", "b": ""}))


@pytest.mark.parametrize(
    "extension", [each for each in KINDS if each not in ("docx", "odt", "pptx", "epub", "xlf", "xliff")]
)
def test_empty_files_stay_empty(extension: str) -> None:
    data = {"json": "{}", "po": "", "pot": ""}.get(extension, "")
    written = translate(f"a.{extension}", data)
    assert written.decode().strip() == data or extension in ("po", "pot")
