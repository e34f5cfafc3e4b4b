"""Markup comes back well-formed, with each tag once, around the words that it was around."""

import asyncio
import random
import re
from collections import Counter

import pytest

from sightline.translation.marks import as_source, chained
from sightline.translation.markup import HTML, Markup, MarkupError, MarkupKind, Tags
from sightline.translation.translator import translate_texts
from tests.translation.fakes import FakeEngine, Order, reversed_order, same_order


def translate(source: str, order: Order = same_order, kind: MarkupKind = "html", language: str = "de") -> str:
    markup = Markup(source, Tags(kind))
    results = asyncio.run(translate_texts(markup.texts, FakeEngine(order)))
    return markup.write([best for best, *_ in results], language)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('Hello <b>big world</b>, <a href="x">link</a>.', '<a href="x">LINK</a>, <b>WORLD BIG</b> HELLO.'),
        ("<p>One <b>two <i>three</b> four</i> five", "<p>FOUR <b><i>THREE</i> TWO</b> ONE FIVE</p>"),
        ("<p>A dog<br>runs <img alt='A cat'> fast.</p>end", '<p>A DOG<br><img alt="A CAT"> FAST RUNS.</p>END'),
        ("<ul><li>One two<li><b>Three</b></ul>", "<ul><li>ONE TWO</li><li><b>THREE</b></li></ul>"),
        ("<p translate=no>Keep <b>me</b></p>", '<p translate="no">Keep <b>me</b></p>'),
        (
            '<p>Not <span translate="no">me <i>too</i></span> but <code>x = 1</code> you</p>',
            '<p><code>x = 1</code> BUT <span translate="no">me <i>too</i></span> NOT YOU</p>',
        ),
        ('<script>if (a<b) "</html>"</script><!-- A note -->', '<script>if (a<b) "</html>"</script><!-- A note -->'),
        ("<p>Say<!-- d --> it</p>", "<p>SAY<!-- d --> IT</p>"),
        ("<p>a &lt;b&gt; c</p>", "<p>&lt;b&gt; A C</p>"),
        ("x</div></body></html>late", "XLATE"),
        ("<a href=x><div>Block text</div></a>", '<a href="x"><div>BLOCK TEXT</div></a>'),
        ("<p>x <i></i>empty</p>", "<p>X <i></i>EMPTY</p>"),
        (
            "<input type=submit value='Send it' placeholder='Name'>",
            '<input type="submit" value="SEND IT" placeholder="NAME">',
        ),
        ("<p><img> Hello <b><i></i> you</b> <br> </p>", "<p><img> HELLO <b><i></i> YOU</b> <br> </p>"),
        ("<p> Hello\n   world </p>", "<p> HELLO WORLD </p>"),
        ("", ""),
        ("<p>a<sup><a>1</a></sup> <a>#</a> b", "<p>A<sup><a>1</a></sup> <a>#</a> B</p>"),
        ("<pre>a\n  b</pre>", "<pre>a\n  b</pre>"),
        ("<p>a<wbr>b", "<p>AB<wbr></p>"),
    ],
)  # fmt: skip
def test_html(source: str, expected: str) -> None:
    assert translate(source, reversed_order) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('Hello <x id="1"/>big <g id="2">world</g>.', 'HELLO <x id="1"/>BIG <g id="2">WORLD</g>.'),
        ('Press <x id="1"/>. Then go <y/> on', 'PRESS <x id="1"/>. THEN GO <y/> ON'),
        ("<d><p>Hello <b>x y</b> z</p><p>Two</p></d>", "<d><p>HELLO <b>X Y</b> Z</p><p>TWO</p></d>"),
        ('<?xml version="1.0" encoding="UTF-8"?>\n<a>Foo</a>', '<?xml version="1.0" encoding="UTF-8"?>\n<a>FOO</a>'),
        ('<x:g id="1">Hello</x:g> you', '<x:g id="1">HELLO</x:g> YOU'),
        (
            '<!DOCTYPE a [\n<!ENTITY e SYSTEM "file:///etc/passwd">\n]>\n<a>Foo &e; bar</a>',
            '<!DOCTYPE a [\n<!ENTITY e SYSTEM "file:///etc/passwd">\n]>\n<a>FOO &e; BAR</a>',
        ),
    ],
)
def test_xml(source: str, expected: str) -> None:
    assert translate(source, kind="xml") == expected


@pytest.mark.parametrize("source", ["<a><b></a>", "<a>&nbsp;</a>", "a < b"])
def test_xml_that_is_not_well_formed_is_rejected_with_its_line(source: str) -> None:
    with pytest.raises(MarkupError, match=r"^It is not well-formed XML, at line 1: .+\.$"):
        Markup(source, Tags("xml"))


def test_a_document_gets_the_language_and_the_direction_of_its_translation() -> None:
    page = '<!DOCTYPE html><html lang="en"><head><title>My page</title></head><body><p>Hi there</p></body></html>'
    arabic = translate(page, language="ar")
    assert arabic.startswith('<!DOCTYPE html>\n<html lang="ar" dir="rtl"><head><title>MY PAGE</title>')
    assert "dir" not in translate(page)


def test_too_deep_markup_is_rejected() -> None:
    with pytest.raises(MarkupError, match="at most 200 elements inside of each other"):
        Markup("<b>" * 1000 + "x", HTML)


@pytest.mark.parametrize("order", [same_order, reversed_order])
def test_each_tag_occurs_once_in_damaged_markup(order: Order) -> None:
    parts = [
        *("<b>", "</b>", "<i>", "</i>", '<a href="x">', "</a>", "<p>", "</p>", "<br>"),
        *("one two. ", "{x} ", "three ", "<li>", "</div>"),
    ]
    for seed in range(3, 300):
        source = "".join(parts[(seed * step * step + step) % len(parts)] for step in range(seed % 23))
        result = translate(source, order)
        tags = Counter(re.findall(r"<(\w+)", source))
        assert Counter(re.findall(r"<(\w+)", result)) == tags, (source, result)
        words, found = (re.findall(r"[a-z]+|\{x\}", re.sub(r"<[^>]*>", " ", text).lower()) for text in (source, result))
        assert len(found) <= len(words)
        again = Markup(result, HTML).write([], "de") if not Markup(result, HTML).texts else None
        assert again in (None, result)


def odd_words_first(size: int) -> list[int]:
    return [*range(1, size, 2), *range(0, size, 2)]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('<b id="x">one two</b> three', '<b id="x">TWO ONE</b> THREE'),  # next to each other
        ('one <b id="x">two three</b> four five', '<b id="x">TWO</b> FOUR ONE <b>THREE</b> FIVE'),
        ("one <a>two three</a> four five", "<a>TWO</a> FOUR ONE THREE FIVE"),
        ("one <b>two <i>three</i></b> four", "<b><i></i>TWO</b> FOUR ONE THREE"),  # another tag is inside
        ("one <i><b>two three</b> four</i> five", "<i><b>TWO</b> FOUR ONE <b>THREE</b></i> FIVE"),
    ],
)
def test_tags_that_only_format_may_surround_several_parts(source: str, expected: str) -> None:
    markup = Markup(source, Tags("html", splits_formats=True))
    results = asyncio.run(translate_texts(markup.texts, FakeEngine(odd_words_first)))
    assert markup.write([best for best, *_ in results], "de") == expected


def test_split_tags_lose_and_double_nothing() -> None:
    """Also if a second model translates the translation of the first."""
    num_split, rng = 0, random.Random(5)
    for _ in range(200):
        parts = [" ".join(rng.choices(("one", "two", "{x}", "three"), k=rng.randrange(1, 5))) for _ in range(6)]
        tags = [rng.choice(("b", "i", "a", "")) for _ in parts]
        numbered = enumerate(zip(parts, tags, strict=True))
        source = " ".join(f'<{tag} id="{n}">{part}</{tag}>' if tag else part for n, (part, tag) in numbered)
        written = []
        for splits in (False, True):
            markup = Markup(source, Tags("html", splits_formats=splits))
            engine = FakeEngine(odd_words_first)
            first = [best for best, *_ in asyncio.run(translate_texts(markup.texts, engine))]
            again = [
                best for best, *_ in asyncio.run(translate_texts(list(map(as_source, markup.texts, first)), engine))
            ]
            written.append(markup.write(list(map(chained, first, again)), "de"))
        whole, split = written
        counts = [Counter(re.findall(r"<(/?\w+)", each)) for each in written]
        num_split += counts[0] != counts[1]
        assert counts[0] <= counts[1] and all(counts[1][tag] == counts[1][f"/{tag}"] for tag in "abi")
        assert counts[0]["a"] == counts[1]["a"] and whole.count(" id=") == split.count(" id=") == len("".join(tags))
        assert re.sub(r"<[^>]*>", "", whole) == re.sub(r"<[^>]*>", "", split), source
    assert num_split > 50


@pytest.mark.parametrize(
    ("tags", "source", "expected"),
    [
        (Tags("xml", kept=frozenset({"k"})), "<r>a <k>b</k> c<k>d</k></r>", "<r><k>d</k> C <k>b</k> A</r>"),
        (Tags("html", kept=frozenset({"b"})), "<p>a <b>b</b></p><b>c</b>", "<p><b>b</b> A</p><b>c</b>"),
        (Tags("xml", blocks=frozenset({"s"})), "<r>a b <s>c d</s></r>", "<r>B A <s>D C</s></r>"),
        (Tags("xml"), "<r>a b <s>c d</s></r>", "<r><s>D C</s> B A</r>"),
        (Tags("xml"), "<r><s>a b</s><s>c d</s></r>", "<r><s>B A</s><s>D C</s></r>"),
        (Tags("xml", has_outline=False), "<r><s>a b</s><s> c d</s></r>", "<r><s>D C</s> <s>B A</s></r>"),
        (Tags("html", inline=frozenset({"p"})), "a b <p>c d</p>", "<p>D C</p> B A"),
    ],
)
def test_requests_can_name_what_elements_are(tags: Tags, source: str, expected: str) -> None:
    markup = Markup(source, tags)
    results = asyncio.run(translate_texts(markup.texts, FakeEngine(lambda size: range(size - 1, -1, -1))))
    assert markup.write([best for best, *_ in results], "de") == expected
