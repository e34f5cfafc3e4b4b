"""Marks of a sentence in its translation, where alignment says that their words went."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from sightline.base.text.words import Span
from sightline.translation.alignment import best_range, share_of
from sightline.translation.marks import Mark, PlacedMark
from sightline.translation.stand_ins import Aligned

_REQUIRED = 1e6  # value of a word that belongs to a mark for certain


@dataclass
class _Node:
    """A mark in one sentence, with the marks inside of it."""

    index: int  # of the mark
    start: int  # in the source sentence
    end: int
    continues: tuple[bool, bool]  # it began before the sentence; it ends after it
    may_split: bool
    children: list["_Node"]
    exact: Span | None = None  # target characters of a mark inside of what is kept

    @property
    def is_point(self) -> bool:
        return self.start == self.end


def place_marks(aligned: Aligned, size: int, marks: dict[int, Mark]) -> list[PlacedMark]:
    """Return where the marks of a sentence are in its translation.

    `marks` are by their index, with ranges in the sentence, which has `size` characters. A range
    that exceeds the sentence is that of a mark of several sentences.
    """
    placer = _Placer(aligned, size)
    nodes: dict[int, _Node] = {}
    roots: list[_Node] = []
    for index, mark in marks.items():
        continues = mark.start < 0, mark.end > size
        may_split = mark.may_split and not any(continues)
        node = _Node(index, max(mark.start, 0), min(mark.end, size), continues, may_split, [])
        placer.snap(node)
        nodes[index] = node
        parent = mark.parent
        (nodes[parent].children if parent is not None and parent in nodes else roots).append(node)
    whole = _Node(-1, 0, size, (True, True), False, roots)
    placer.place_children(whole, (0, len(aligned.target_words)), (0, len(aligned.text)))
    return placer.placed


class _Placer:
    """Places marks, the outer ones before those inside of them."""

    def __init__(self, aligned: Aligned, size: int) -> None:
        self._aligned, self._size = aligned, size
        self.placed: list[PlacedMark] = []

    def snap(self, node: _Node) -> None:
        """Find the place of a mark inside of what is kept; move an edge that is there out of it."""
        for source in self._aligned.source_words:
            if source.kept is None:
                continue
            start, end = source.kept
            if node.is_point and node.start in (start, end):
                continue
            if start <= node.start and node.end <= end:
                target = next(word.start for word in self._aligned.target_words if word.kept == source.kept)
                node.exact = target + node.start - start, target + node.end - start
            elif start < node.start < end:
                node.start = start
            elif start < node.end < end:
                node.end = end

    def place_children(self, parent: _Node, words: Span, characters: Span) -> None:
        """Place the marks inside of a mark that has these words and characters of the target."""
        required = {child.index: self._required(child) for child in parent.children}
        taken: set[int] = set()
        places: list[Span] = []

        def certainty(child: _Node) -> int:
            return child.is_point + 2 * (not required[child.index]) - 4 * any(child.continues)

        spans = [child for child in parent.children if not child.is_point or child.exact]
        for child in sorted(spans, key=certainty):
            others = set().union(*[words for index, words in required.items() if index != child.index]) | taken
            ranges, confidence = self._ranges(parent, child, words, characters, required[child.index], others)
            for own_words, own_characters in ranges:
                self.placed.append(PlacedMark(child.index, *own_characters, confidence))
                if own_characters[0] < own_characters[1]:
                    taken.update(range(*own_words))
                    places.append(own_characters)
            self.place_children(child, *ranges[0])
        for child in parent.children:
            if child.is_point and not child.exact:
                position = self._outside(self._point(parent, child.start, words, characters), places)
                self.placed.append(PlacedMark(child.index, position, position))
                self.place_children(child, (words[0], words[0]), (position, position))

    def _required(self, node: _Node) -> set[int]:
        """Return the target words of what is kept inside of a mark."""
        return {
            index
            for index, word in enumerate(self._aligned.target_words)
            if word.kept and not node.is_point and node.start < word.kept[1] and word.kept[0] < node.end
        }

    def _ranges(
        self, parent: _Node, child: _Node, words: Span, characters: Span, required: set[int], others: set[int]
    ) -> tuple[list[tuple[Span, Span]], float]:
        """Return the words and the characters of each part of a mark, and the confidence.

        There is one part, unless the mark may split.
        """
        target = self._aligned.target_words
        if child.exact is not None:
            own = min(required, default=words[0])
            return [((own, own + 1), child.exact)], 1.0
        if (child.start, child.end) == (parent.start, parent.end) and not others:
            return [(words, characters)], 1.0
        columns = [
            index
            for index, word in enumerate(self._aligned.source_words)
            if word.start < child.end and child.start < word.end
        ]
        shares = share_of(self._aligned.shares, columns)
        values = [
            -np.inf if index in others else _REQUIRED if index in required else 0.0 if word.is_mark else share - 0.5
            for index, (word, share) in enumerate(zip(target, shares, strict=True))
        ]
        found, may_split = list[Span](), child.may_split and not child.children
        while (may_split or not found) and (best := self._best(values, words, child.continues)) is not None:
            found.append(best)
            values[slice(*best)] = [-np.inf] * (best[1] - best[0])
        if found:
            parts = [(best, self._characters(child, best, words, characters, others)) for best in sorted(found)]
            return parts, self._confidence(shares, found, words)
        if any(child.continues):
            place = characters[0] if child.continues[0] else characters[1]
        else:
            places = [(target[index].start, target[index].end) for index in others if index < len(target)]
            place = self._outside(self._point(parent, child.start, words, characters), places)
        return [((words[0], words[0]), (place, place))], 0.0

    def _best(self, values: Sequence[float], words: Span, continues: tuple[bool, bool]) -> Span | None:
        """Return the best range of words; one that continues has the first or the last of them."""
        if words[0] == words[1] or all(continues):
            return words if words[0] < words[1] else None
        if any(continues):
            sums = np.cumsum(values[slice(*words)] if continues[0] else values[slice(*words)][::-1])
            count = int(sums.argmax()) + 1
            if sums[count - 1] <= 0:
                return None
            return (words[0], words[0] + count) if continues[0] else (words[1] - count, words[1])
        found = best_range(values, *words)
        if found is None:
            return None
        first, last = found
        while first < last - 1 and self._aligned.target_words[first].is_mark:
            first += 1
        while last - 1 > first and self._aligned.target_words[last - 1].is_mark:
            last -= 1
        return first, last

    def _characters(self, child: _Node, own: Span, words: Span, characters: Span, others: set[int]) -> Span:
        """Return the characters of a range of words, with the marks that the source has there."""
        target, text = self._aligned.target_words, self._aligned.text
        source = [word for word in self._aligned.source_words if word.start >= child.start and word.end <= child.end]
        first, last = own
        if source and source[-1].is_mark and last < words[1] and last not in others and target[last].is_mark:
            last += target[last].end == len(text) or child.end < self._size
        if source and source[0].is_mark and first > words[0] and first - 1 not in others and target[first - 1].is_mark:
            first -= 1
        start = characters[0] if child.continues[0] else target[first].start
        end = characters[1] if child.continues[1] else target[last - 1].end
        return start, end

    def _confidence(self, shares: Iterable[float], found: Sequence[Span], words: Span) -> float:
        """Return the smallest share on the right side of the edges."""
        sides = [
            share if any(first <= index < last for first, last in found) else 1 - share
            for index, share in enumerate(shares)
            if words[0] <= index < words[1] and not self._aligned.target_words[index].is_mark
        ]
        return round(float(min(sides, default=1.0)), 4)

    def _point(self, parent: _Node, position: int, words: Span, characters: Span) -> int:
        """Return the place of a point: with the word that touches it, else before the next word."""
        if position <= parent.start:
            return characters[0]
        if position >= parent.end:
            return characters[1]
        source = self._aligned.source_words
        before = [index for index, word in enumerate(source) if word.end <= position and word.start >= parent.start]
        after = [index for index, word in enumerate(source) if word.start >= position and word.end <= parent.end]
        touches = bool(before) and source[before[-1]].end == position
        is_first = not after or (touches and (source[after[0]].start > position or source[after[0]].is_mark))
        for column, is_before in [(c, True) for c in before[-1:] if is_first] + [(c, False) for c in after[:1]]:
            word = self._target_of(column, words)
            if word is not None:
                found = self._aligned.target_words[word]
                return min(max(found.end if is_before else found.start, characters[0]), characters[1])
        return characters[0] if after and not before else characters[1]

    def _target_of(self, column: int, words: Span) -> int | None:
        """Return the target word with the largest share of a source word."""
        shares = self._aligned.shares
        if words[0] >= words[1]:
            return None
        word = words[0] + int(shares[slice(*words), column].argmax())
        return word if shares[word, column] > 0 else None

    @staticmethod
    def _outside(position: int, places: Sequence[Span]) -> int:
        """Move a place inside of a mark to its nearer edge."""
        for start, end in places:
            if start < position < end:
                return start if position - start < end - position else end
        return position
