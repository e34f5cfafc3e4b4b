"""Choice of the languages of a translation, and of a model that translates between them."""

from typing import NamedTuple

from sightline.base.bundle import Languages, Task
from sightline.base.text.languages import find_language
from sightline.service.api_errors import ApiError
from sightline.service.inference.call import Call, Ids
from sightline.service.inference.service import ServedModel

Translators = list[tuple[str, Languages]]  # names of models that translate, and their languages
MAX_LISTED_SOURCES = 20  # an error lists the languages of at most this many source languages


class LanguageChoice(NamedTuple):
    """The languages of a generation, and the tokens that give them to the model."""

    source: str = ""
    target: str = ""
    source_prefix: Ids = ()  # precedes the tokens of the input
    source_suffix: Ids = ()  # follows the tokens of the input
    target_prefix: Ids = ()  # first tokens of the target, forced and not part of the result


def choose_languages(model: ServedModel, source: str | None, target: str | None) -> LanguageChoice:
    """Return the languages of a request to a model; the model's defaults if they are None."""
    languages = model.manifest.languages
    if languages is None:
        for field, tag in (("source_language", source), ("target_language", target)):
            if tag is not None:
                message = f"{{{field}}} is supported only by models that translate, and {model.name} does not."
                raise ApiError("unsupported_parameter", message, field=field)
        return LanguageChoice()
    found_source = _choose(source, languages.sources, "source_language", model.name)
    found_target = _choose(target, languages.targets, "target_language", model.name)
    of_target = languages.source_prefix_of_target.get(found_target, ())
    return LanguageChoice(
        found_source,
        found_target,
        (*of_target, *languages.source_prefix.get(found_source, ())),
        languages.source_suffix.get(found_source, ()),
        languages.target_prefix.get(found_target, ()),
    )


def _choose(tag: str | None, available: tuple[str, ...], field: str, model: str) -> str:
    language = available[0] if tag is None else find_language(tag, available)
    if language is None:
        message = f"{{{field}}} must be one of {', '.join(available)} for {model}."
        raise ApiError("invalid_parameter", message, field=field)
    return language


def translators(call: Call, name: str | None = None) -> Translators:
    """Return the model that a call names, or all that translate: the default one, then by name."""
    if name is None:
        found = [(model.name, model.languages) for model in call.service.require_manifests() if model.languages]
        return sorted(found, key=lambda pair: pair[0] != call.service.default_model)  # others stay sorted by name
    manifest = call.service.find_manifest(name, "generate")
    if manifest.languages is None:
        message = f"{name} does not translate; GET /v1/models lists the languages of models that do."
        raise ApiError("unsupported_task", message, field="model")
    return [(manifest.name, manifest.languages)]


def fitting_translators(call: Call, source: str | None, target: str | None) -> Translators:
    """Return the models that translate between two languages; None stands for any.

    If there is none, the error lists the languages.
    """
    fitting = [
        (name, languages)
        for name, languages in translators(call)
        if (source is None or find_language(source, languages.sources))
        and (target is None or find_language(target, languages.targets))
    ]
    if not fitting:
        is_read = source is None or any(find_language(source, languages.sources) for _, languages in translators(call))
        field = "target_language" if is_read else "source_language"
        message = f"No model translates between these languages. {describe_pairs(call)}"
        if not translators(call):
            message = "No model of this service translates; GET /v1/models lists the tasks of each model."
        raise ApiError("invalid_parameter", message, field=field)
    return fitting


async def generating_model(
    call: Call, name: str | None, source: str | None, target: str | None, task: Task = "generate"
) -> ServedModel:
    """Return the model that a call names, or the first one that translates between its languages.

    Without a name and languages it is the default model of the task.
    """
    if name is None and not (source is None and target is None):
        name = fitting_translators(call, source, target)[0][0]
    return await call.model(name, task)


def language_pairs(call: Call) -> dict[str, list[str]]:
    """Return the target languages of each source language, both sorted, also those that two models
    reach one after the other.
    """
    pairs: dict[str, set[str]] = {}
    for _, languages in translators(call):
        for source in languages.sources:
            # A multilingual model lists a language as source and target, but does not translate
            # from it to itself.
            others = set(languages.targets) - {source} or set(languages.targets)
            pairs.setdefault(source, set()).update(others)
    reached = {source: targets.union(*(pairs.get(tag, ()) for tag in targets)) for source, targets in pairs.items()}
    return {source: sorted(reached[source] - {source} or pairs[source]) for source in sorted(pairs)}


def describe_pairs(call: Call) -> str:
    """Return a sentence with the supported languages, for errors."""
    pairs = language_pairs(call)
    if len(pairs) > MAX_LISTED_SOURCES:
        return f"The source languages are {', '.join(pairs)}; GET /v1/models lists the languages of each model."
    described = [f"{source} to {', '.join(targets)}" for source, targets in pairs.items()]
    return f"Supported: {'; '.join(described)}."
