"""The tables of the step `masking`."""

from collections.abc import Mapping, Sequence

from bench.record import Result, Row
from bench.report import table

Figures = Mapping[tuple[str | None, str], Row]  # by removal and name
REMOVALS = {"deleted": "Deleted from the source", "hidden": "Hidden from cross-attention"}
CHOICES = {
    "most attended": "the most attended token",
    "most attended, a word": "the same, if it is not `</s>`",
    "most attended, end": "the same, if it is `</s>`",
    "random other": "any other token (mean)",
    "least attended": "the least attended token",
}


def masking_tables(result: Result) -> Mapping[str, str]:
    models = list(dict.fromkeys(row["model"] for row in result.rows))
    examples = [row for row in result.rows if row["kind"] == "example"]
    return {
        "masking": "\n\n".join(_model_table(name, _figures(result.rows, name)) for name in models),
        "masking-example": "\n\n".join(map(_example, examples)),
    }


def _figures(rows: Sequence[Row], model: str) -> dict[tuple[str | None, str], Row]:
    return {(row["removal"], row["figure"]): row for row in rows if row["model"] == model and row["kind"] == "figures"}


def _model_table(name: str, figures: Figures) -> str:
    head = [
        "removed token",
        *(f"{removal}: {column}" for removal in REMOVALS for column in ("prediction changes", "nats lost")),
    ]
    body = [
        [
            text,
            *(
                _cell(figures.get((removal, f"{quantity}, {choice}")), quantity)
                for removal in REMOVALS
                for quantity in ("changed", "drop")
            ),
        ]
        for choice, text in CHOICES.items()
    ]
    names = ("largest weight", "largest on end", "weight of end", "end unlike the token before")
    largest, on_end, of_end, unlike = (figures[None, name] for name in names)
    weights = (
        f"**{name}**, {largest['tokens']:,} target tokens. The largest weight is {_number(largest)} on average. "
        f"It is on `</s>` for {_percent(on_end)} of them, and `</s>` has {_percent(of_end)} of all weight. "
        f"The weights of `</s>` and of the token before it differ by {_number(unlike)} on average."
    )
    return "\n\n".join([weights, table(head, body), "\n".join(_agreement(figures, removal) for removal in REMOVALS)])


def _agreement(figures: Figures, removal: str) -> str:
    tau, is_top = figures[removal, "tau"], figures[removal, "most attended is most important"]
    return (
        f"- {REMOVALS[removal]}: Kendall's tau between weights and nats lost is {_number(tau)}. "
        f"The token whose removal costs most has the largest weight for {_percent(is_top)} of the target tokens."
    )


def _cell(figure: Row | None, quantity: str) -> str:
    if figure is None:
        return "none"
    return _percent(figure) if quantity == "changed" else _number(figure)


def _percent(figure: Row) -> str:
    low, high = figure["interval"]
    return f"{100 * figure['value']:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"


def _number(figure: Row) -> str:
    low, high = figure["interval"]
    value, low, high = (round(number, 2) + 0.0 for number in (figure["value"], low, high))  # no -0.00
    return f"{value:.2f} [{low:.2f}, {high:.2f}]"


def _example(row: Row) -> str:
    head = [
        "token",
        "probability",
        "most attended",
        "weight",
        "if it is deleted",
        "if it is hidden",
        "most costly deletion",
    ]
    body = [
        [
            f"`{token['token']}`",
            f"{token['probability']:.2f}",
            f"`{token['most_attended']}`",
            f"{token['weight']:.2f}",
            *(_removal_cell(token, token[removal]) for removal in REMOVALS),
            f"`{token['deleted']['most_important']}`: {token['deleted']['its_probability']:.2f}",
        ]
        for token in row["tokens"]
    ]
    title = f"**{row['model']}**: “{row['sentence']}” becomes “{row['text']}”"
    return "\n\n".join([title, table(head, body), *_largest_mismatch(row["tokens"])])


def _largest_mismatch(tokens: Sequence[Row]) -> list[str]:
    """Describe the token whose strongest dependence differs most from its attention."""
    torn = [token for token in tokens if token["deleted"]["most_important"] != token["most_attended"]]
    if not torn:
        return []
    token = max(torn, key=lambda one: one["deleted"]["probability"] - one["deleted"]["its_probability"])
    without = token["deleted"]
    return [
        f"`{token['token']}` attends most to `{token['most_attended']}`, with a weight of {token['weight']:.2f}. "
        f"If that token is deleted, its probability goes from {token['probability']:.2f} to "
        f"{without['probability']:.2f}; if `{without['most_important']}` is deleted, to "
        f"{without['its_probability']:.2f}."
    ]


def _removal_cell(token: Row, effect: Row) -> str:
    probability = f"{effect['probability']:.2f}"
    is_same = effect["prediction"] == token["token"]
    return probability if is_same else f"{probability}, now `{effect['prediction']}`"
