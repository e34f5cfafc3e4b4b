"""Translation between languages: over one model, or over two with a language between them."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sightline.service.api_errors import ApiError
from sightline.service.body_fields import Texts
from sightline.service.inference import glossaries
from sightline.service.inference.call import Call, UsageRecord
from sightline.service.inference.generate import parameters_for
from sightline.service.inference.language_choice import Translators, fitting_translators, translators
from sightline.service.inference.results import TimingsMs, Usage
from sightline.service.inference.translation import (
    NO_TERMS,
    DetectedLanguage,
    TranslateOutput,
    TranslationStep,
    translate_documents,
)
from sightline.translation.detection import detect_languages
from sightline.translation.markup import Tags
from sightline.translation.routes import Step, find_route

AUTO = "auto"  # in place of a source language


async def translate_between(
    call: Call,
    inputs: Texts,
    requested: Mapping[str, Any],
    name: str | None = None,
    markup: Tags | None = None,
    glossary: Mapping[str, str] = NO_TERMS,
    glossary_id: str | None = None,
) -> tuple[list[list[TranslateOutput]], Usage, TimingsMs]:
    """Translate texts between the languages that the parameters of a request name.

    Without a name, the languages choose the models. The source language may be `AUTO`. Terms of the
    `glossary` precede those of a stored one.
    """
    if markup is not None and requested.get("return_coverage"):
        message = "{return_coverage} cannot be combined with {markup}; leave out one of them."
        raise ApiError("unsupported_parameter", message, field="return_coverage")
    stored = None if glossary_id is None else await glossaries.use_glossaries(call, glossaries.find, glossary_id)
    routes = await routes_of(call, inputs.texts, requested, name)
    groups: dict[tuple[Step, ...], list[int]] = {}
    for index, (_, route) in enumerate(routes):
        groups.setdefault(route, []).append(index)
    record, results = UsageRecord(call), dict[int, list[TranslateOutput]]()
    steps = list[TranslationStep]()
    for ways, indices in groups.items():
        if len(ways) > 1 and requested.get("return_coverage"):
            message = "Two models translate one after the other, and only one can have {return_coverage}; leave it out."
            raise ApiError("unsupported_parameter", message, field="return_coverage")
        steps = await load_steps(call, ways, requested)
        texts = inputs.select(indices) if len(groups) > 1 else inputs
        terms = {**stored.terms(ways[0].source, ways[-1].target), **glossary} if stored else glossary
        translated = await translate_documents(call, steps, texts, markup, record, terms)
        for index, ranks in zip(indices, translated, strict=True):
            results[index] = [replace(one, index=index, detected=routes[index][0], route=ways) for one in ranks]
    return [results[index] for index in range(len(inputs))], *record.write(steps[-1].model)


async def routes_of(
    call: Call, texts: Sequence[str], requested: Mapping[str, Any], name: str | None = None
) -> list[tuple[DetectedLanguage | None, tuple[Step, ...]]]:
    """Return the language of each text, if it is detected, and the way of its translation."""
    source, target = requested.get("source_language"), requested.get("target_language")
    models = translators(call, name)
    detected: list[DetectedLanguage | None] = [None] * len(texts)
    if source == AUTO:
        sources = source_languages(call, target, name)
        if len(sources) == 1:  # there is no choice
            source = sources[0]
        else:
            detected = [found[0] for found in await detect(texts, sources)]
    return [
        (found, tuple(_route(call, models, name, source if found is None else found.language, target)))
        for found in detected
    ]


async def translate_by_languages(
    call: Call,
    inputs: Texts,
    source: str,
    target: str,
    markup: Tags | None = None,
    *,
    glossary_id: str | None = None,
    **parameters: Any,
) -> list[list[TranslateOutput]]:
    """Translate texts by the models that their languages choose; the source may be `AUTO`.

    Return `num_return_sequences` translations of each text, the best first.
    """
    requested = {"source_language": source, "target_language": target, **parameters}
    results, _, _ = await translate_between(call, inputs, requested, markup=markup, glossary_id=glossary_id)
    return results


async def detect(texts: Sequence[str], available: Sequence[str]) -> list[list[DetectedLanguage]]:
    """Return those of some languages that each text may have, the best first."""
    found = await asyncio.to_thread(lambda: [detect_languages(text, available) for text in texts])
    return [[DetectedLanguage(tag, round(value, 4)) for tag, value in of_text] for of_text in found]


def source_languages(call: Call, target: str | None, name: str | None = None) -> list[str]:
    """Return the languages from which the models of a call translate into another one."""
    models = translators(call, name)
    sources = dict.fromkeys(source for _, languages in models for source in languages.sources)
    found = [source for source in sources if target is None or find_route(models, source, target)]
    if not found:
        fitting_translators(call, None, target)  # raises the error
    return found


def _route(call: Call, models: Translators, name: str | None, source: str | None, target: str | None) -> list[Step]:
    """Return the way between two languages; a model has a default for each that is absent."""
    if name is not None:
        [(_, languages)] = models
        return [Step(name, source or languages.source, target or languages.target)]
    if source is not None and target is not None and (route := find_route(models, source, target)):
        return route
    name, languages = fitting_translators(call, source, target)[0]
    return [Step(name, source or languages.source, target or languages.target)]


async def load_steps(call: Call, route: Sequence[Step], requested: Mapping[str, Any]) -> list[TranslationStep]:
    """Return the models of a route, loaded, with the parameters of a request; all but the last one
    return one translation of each text.
    """
    steps = [await _step(call, each, {**requested, "num_return_sequences": 1}) for each in route[:-1]]
    return [*steps, await _step(call, route[-1], requested)]


async def _step(call: Call, step: Step, requested: Mapping[str, Any]) -> TranslationStep:
    model = await call.model(step.model, "generate")
    added: dict[str, Any] = {
        "split_sentences": True,
        "source_language": step.source,
        "target_language": step.target,
    }
    if (number := requested.get("num_return_sequences", 1)) > 1:  # these are the best ones of a beam search
        added["num_beams"] = max(number, parameters_for(model, {}).num_beams)
    return TranslationStep(model, parameters_for(model, {**requested, **added}))
