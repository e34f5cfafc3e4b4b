"""Measure how encoders use the context of a word: how much a change of one word changes the vectors
of the others by their distance, and whether the vectors of a word with two senses tell them apart.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from lab.bench.record import Result, Row
from lab.bench.report import table
from lab.study.bleu import interval, percent, resamples
from lab.study.maps import Weights, array_of
from lab.study.runs import SOURCE, models_at_start, system_of
from lab.study.served import INPUTS_PER_CALL, Served, serve
from lab.study.step import no_pictures
from sightline.base.text.words import Word, words_of
from sightline.model.data.text import read_lines
from sightline.model.evaluation.defaults import TEST_SPLIT
from sightline.model.evaluation.share import Share

NAME = "context"
SENTENCES = 50
REPLACEMENT = "something"
DISTANCES = (0, 1, 2, 3, 4, 7, 10, 10**6)  # first distance in words of each group, and the end of the last
# Sentences with a word in two senses, four of each; the word comes first.
SENSES = """
bat
A boy swings a wooden bat at a baseball.
The player hits the ball with his bat.
A man in a helmet holds a bat over his shoulder.
The girl drops the bat and runs to the first base.
|
A black bat flies out of the dark cave.
The bat hangs from a branch with its wings closed.
A small bat eats insects at night.
A brown bat sleeps under the roof of the barn.

bow
An archer aims at the target with his bow.
The man pulls back the string of a bow.
A hunter carries a bow and some arrows.
A woman in green shoots an arrow with her bow.
|
The little girl has a pink bow in her hair.
A present with a red bow lies under the tree.
She ties a white bow on the box.
The dog wears a collar with a blue bow.

wave
A surfer rides a big wave in the ocean.
A huge wave breaks over the rocks on the beach.
The children jump over a small wave in the sea.
A man on a surfboard falls into the wave.
|
The woman gives her friends a wave from the window.
A boy says goodbye to his mother with a wave of his hand.
The singer greets the crowd with a wave.
He gives the driver of the car a friendly wave.

train
Passengers wait for the train at the station.
A red train drives through the snow on the tracks.
People get off the train with their suitcases.
An old steam train crosses a bridge.
|
The athletes train in the stadium every morning.
Two men train their dogs on the grass.
The boxers train with their coach in the gym.
Young gymnasts train for the next competition.

park
Children play under the trees in the park.
An old man sits on a bench in the park.
A couple walks their dog through the park.
People have a picnic on the grass of the park.
|
The man tries to park his car on the street.
Drivers park their trucks behind the building.
She wants to park the van in front of the house.
They park their motorcycles next to the wall.

watch
The man wears a gold watch on his wrist.
A woman looks at her watch to see the time.
He has a silver watch and a ring.
A boy with a digital watch holds his arm up.
|
Many people watch a soccer game from the stands.
Two girls watch a movie on the couch.
The fans watch the race from the side of the road.
Some children watch the animals in the zoo.

light
A lamp gives a bright light over the table.
The street light shines on the wet road at night.
A man changes the light on the ceiling.
The traffic light turns green at the crossing.
|
A woman in a light blue shirt smiles.
The man wears light brown pants and a hat.
A girl with light blond hair rides a horse.
He carries a light bag and walks quickly.

rock
A climber holds on to a steep rock.
The boy throws a rock into the water.
A goat stands on a large rock on the mountain.
Two hikers rest on a flat rock near the river.
|
A rock band plays on a big stage.
The guitarist sings at a loud rock concert.
Fans of rock music dance in front of the singer.
He plays rock songs on his electric guitar.

pool
Children swim in the pool of the hotel.
A girl jumps into the pool with a splash.
The swimmer dives into the blue water of the pool.
A boy in swimming trunks stands at the edge of the pool.
|
Two men play pool in a bar.
He leans over the pool table with a cue.
A man hits the white ball in a game of pool.
Friends drink beer and play a round of pool.

glass
A man drinks a glass of red wine.
The waiter fills her glass with water.
A woman holds a glass of beer at the party.
There is a glass of orange juice on the table.
|
A worker cleans the glass of a large window.
The building has walls of glass and steel.
A boy looks at the fish behind the glass of the tank.
The man repairs the broken glass of the door.

ring
Two boxers fight in the ring.
The wrestler throws his opponent out of the ring.
A referee stands in the ring between the fighters.
The crowd cheers as the boxer enters the ring.
|
The groom puts a ring on the finger of the bride.
She wears a gold ring and a necklace.
A woman shows her friends her wedding ring.
He gives her a ring with a diamond.

band
A band plays music on the stage.
The singer of the band holds a microphone.
A marching band with drums walks down the street.
The band has a guitarist and a drummer.
|
The girl ties her hair with a rubber band.
A runner wears a red band around his head.
He has a white band on his wrist.
She holds the papers together with an elastic band.

slide
A child sits on the yellow slide at the playground.
Two kids climb up the slide in the park.
The toddler waits at the top of the slide.
There is a swing and a slide behind the school.
|
The children slide down the hill on their sleds.
Two boys slide on the ice in their shoes.
The players slide across the muddy field.
Three girls slide down the snow and laugh.

board
A surfer carries his board into the sea.
The man stands on his board and rides the waves.
A skater does a trick with his board on the ramp.
She jumps off her board into the snow.
|
The teacher writes a word on the board.
A student solves a problem on the board in the classroom.
The pupils look at the board and copy the numbers.
A man draws with chalk on the black board.
"""

Vectors = list[tuple[Word, Weights]]  # words of a text in order, with their vectors (D,)


@dataclass(frozen=True)
class Use:
    """A sentence with a word of two senses."""

    word: str
    sense: int
    sentence: str


def uses() -> list[Use]:
    found = []
    for block in SENSES.strip().split("\n\n"):
        word, rest = block.split("\n", 1)
        for sense, lines in enumerate(rest.split("|")):
            found += [Use(word, sense, line) for line in lines.strip().splitlines()]
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "bundles", type=Path, nargs="+", help="folders of bundles; models without an encoder are skipped"
    )
    parser.add_argument("--data", type=Path, default=Path("data/multi30k"), help="folder with the test set")


def measure(arguments: argparse.Namespace) -> Result:
    """Encode the sentences with one model after another.

    Raises:
        FileNotFoundError, ValueError: the bundles cannot be served, or the test set is missing.
    """
    sentences = read_lines(arguments.data / f"{TEST_SPLIT}.{SOURCE}")[:SENTENCES]
    rows: list[Row] = []
    for folder in arguments.bundles:
        with serve(folder) as served:
            for manifest in models_at_start(folder):
                if "encode" in manifest.tasks and not manifest.is_decoder_only:
                    rows += [
                        {"model": manifest.name, **influence(served, manifest.name, sentences)},
                        {"model": manifest.name, **senses(served, manifest.name)},
                    ]
    return Result(rows=rows)


def word_vectors(served: Served, model: str, texts: Sequence[str]) -> list[Vectors]:
    """Return the words of each text with the means of the encoder's vectors of their tokens."""
    body = {"model": model, "pooling": "none", "encoding": "base64", "normalize": False}
    found = []
    for start in range(0, len(texts), INPUTS_PER_CALL):
        part = list(texts[start : start + INPUTS_PER_CALL])
        (encoded,) = served.post("/v1/encode", {**body, "inputs": part})
        (tokenized,) = served.post("/v1/tokenize", {"model": model, "inputs": part})
        for text, data, shape, tokens in zip(
            part, encoded["embeddings"], encoded["shapes"], tokenized["outputs"], strict=True
        ):
            vectors = array_of({"data": data, "shape": shape})
            words = words_of(text, [None if one["special"] else (one["start"], one["end"]) for one in tokens])
            found.append([(word, vectors[list(word.tokens)].mean(axis=0)) for word in words])
    return found


def influence(served: Served, model: str, sentences: Sequence[str]) -> Row:
    """Replace each word of each sentence and return how much the vectors of all words change, by
    their distance from it in words, as a share of the change of its own vector.

    A change is the length of the difference, divided by the length of the vector before.
    """
    counts, sums = (np.zeros((len(sentences), len(DISTANCES) - 1)) for _ in range(2))
    for number, (sentence, before) in enumerate(zip(sentences, word_vectors(served, model, sentences), strict=True)):
        places = [place for place, (word, _) in enumerate(before) if word.text.isalpha()]
        replaced = [before[place][0] for place in places]
        changed = [f"{sentence[: word.start]}{REPLACEMENT}{sentence[word.end :]}" for word in replaced]
        for place, after in zip(places, word_vectors(served, model, changed), strict=True):
            if len(after) != len(before):  # the replacement has joined the word before or after it
                continue
            for other, ((_, old), (_, new)) in enumerate(zip(before, after, strict=True)):
                group = int(np.searchsorted(DISTANCES, abs(other - place), side="right")) - 1
                counts[number, group] += 1
                sums[number, group] += np.linalg.norm(new - old) / np.linalg.norm(old)
    samples = resamples(len(sentences))
    drawn = (samples @ sums) / np.maximum(samples @ counts, 1)
    means = sums.sum(axis=0) / np.maximum(counts.sum(axis=0), 1)
    shares = drawn / drawn[:, :1]
    return {
        "quantity": "influence",
        "sentences": len(sentences),
        "value": [round(float(mean / means[0]), 4) for mean in means],
        "interval": [[round(end, 4) for end in interval(column)] for column in shares.T],
    }


def senses(served: Served, model: str) -> Row:
    """Return how often the nearest other vector of a word with two senses has the same sense."""
    every = uses()
    vectors: list[Weights] = []
    for use, words in zip(every, word_vectors(served, model, [use.sentence for use in every]), strict=True):
        vector = next(vector for word, vector in words if word.text == use.word)
        vectors.append(vector / np.linalg.norm(vector))
    correct = 0
    for number, use in enumerate(every):
        others = [other for other, one in enumerate(every) if one.word == use.word and other != number]
        nearest = max(others, key=lambda other: float(vectors[number] @ vectors[other]))
        correct += every[nearest].sense == use.sense
    share = Share(correct, len(every))
    return {"quantity": "senses", "correct": share.count, "total": share.total, "interval": list(share.interval)}


def tables(result: Result) -> Mapping[str, str]:
    groups = [
        str(first) if last == first + 1 else f"{first} or more" if last == DISTANCES[-1] else f"{first} to {last - 1}"
        for first, last in pairwise(DISTANCES)
    ][1:]
    by_model = {row["model"]: row for row in result.rows if row["quantity"] == "senses"}
    body = []
    for row in result.rows:
        if row["quantity"] == "influence":
            cells = [percent(*one, digits=1) for one in zip(row["value"][1:], row["interval"][1:], strict=True)]
            found = by_model[row["model"]]
            sense = percent(found["correct"] / found["total"], found["interval"])
            body.append([f"`{system_of(row['model'])}`", *cells, sense])
    return {NAME: table(["system", *(f"distance {group}" for group in groups), "senses correct"], body)}


draw = no_pictures
