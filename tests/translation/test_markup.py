"""Markup comes back well-formed, with each tag once, around the words that it was around."""

import asyncio
import re
from collections import Counter

import pytest

from sightline.translation.markup import Markup, MarkupError, MarkupKind
from sightline.translation.translator import translate_texts
from tests.translation.fakes import FakeEngine, Order, reversed_order, same_order


def translate(source: str, order: Order = same_order, kind: MarkupKind = "html", language: str = "de") -> str:
    markup = Markup(source, kind)
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
        ("<p> Hello\n   world </p>", "<p> HELLO WORLD </p>"),
        ("", ""),
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
        Markup(source, "xml")


def test_a_document_gets_the_language_and_the_direction_of_its_translation() -> None:
    page = '<!DOCTYPE html><html lang="en"><head><title>My page</title></head><body><p>Hi there</p></body></html>'
    arabic = translate(page, language="ar")
    assert arabic.startswith('<!DOCTYPE html>\n<html lang="ar" dir="rtl"><head><title>MY PAGE</title>')
    assert "dir" not in translate(page)


def test_too_deep_markup_is_rejected() -> None:
    with pytest.raises(MarkupError, match="at most 200 elements inside of each other"):
        Markup("<b>" * 1000 + "x", "html")


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
        words = Counter(re.findall(r"[a-z]+|\{x\}", re.sub(r"<[^>]*>", " ", source).lower()))
        assert (
            sum(Counter(re.findall(r"[a-z]+|\{x\}", re.sub(r"<[^>]*>", "", result).lower())).values()) <= words.total()
        )
        again = Markup(result, "html").write([], "de") if not Markup(result, "html").texts else None
        assert again in (None, result)
