"""XLIFF 1.2 and 2.0."""

import copy
from collections.abc import Sequence
from typing import Any

from sightline.translation.elements import PAIR, add_content
from sightline.translation.files.document import parse_xml, xml_bytes
from sightline.translation.marks import Texts, TranslatedText

_SPACE = "{http://www.w3.org/XML/1998/namespace}space"


class Xliff(Texts):
    """An XLIFF file, 1.2 or 2.0: the targets of the segments that have none."""

    def __init__(self, data: bytes) -> None:
        from lxml import etree

        super().__init__()
        self._root = parse_xml(data)
        space = f"{{{etree.QName(self._root).namespace}}}" if etree.QName(self._root).namespace else ""
        self._is_old = self._root.get("version", "").startswith("1")

        def stands_for(element: Any) -> str | None:
            is_fixed = element.get("translate") == "no" or element.get("mtype") == "protected"
            is_around = element.tag in (f"{space}g", f"{space}pc", f"{space}mrk", PAIR) and not is_fixed
            return None if is_around else ""

        for source in list(self._root.iter(f"{space}source")):
            unit = source.getparent()
            is_fixed = any(element.get("translate") == "no" for element in [source, *source.iterancestors()])
            if etree.QName(unit).localname not in ("trans-unit", "segment") or is_fixed:
                continue
            target = unit.find(f"{space}target")
            if target is not None and ("".join(target.itertext()).strip() or len(target)):
                continue
            segmented = unit.find(f"{space}seg-source")
            written = copy.deepcopy(source if segmented is None else segmented)
            written.tag, written.tail = f"{space}target", source.tail
            if target is not None:
                written.attrib.update(target.attrib)
                unit.remove(target)
            written.attrib.pop(_SPACE, None)
            (source if segmented is None else segmented).addnext(written)
            if self._is_old:
                written.set("state", "translated")
            elif unit.get("state") in (None, "initial"):
                unit.set("state", "translated")
            add_content(self, written, None, list(written), stands_for, collapses=False)

    def write(self, translations: Sequence[TranslatedText], language: str) -> bytes:
        self.apply(translations)
        if self._is_old:
            for file in self._root.iter("{*}file"):
                file.set("target-language", language)
        else:
            self._root.set("trgLang", language)
        return xml_bytes(self._root)
