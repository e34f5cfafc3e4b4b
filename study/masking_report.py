"""What the step `masking` found, as tables."""

from collections.abc import Mapping, Sequence

from bench.record import Result, Row
from bench.report import table

Figures = Mapping[tuple[str | None, str], Row]  # by removal and name
HOW = {"deleted": "Deleted from the source", "hidden": "Hidden from cross-attention"}
CHOICES = {
    "most attended": "the most attended token",
    "most attended, a word": "the same, where it is not `</s>`",
    "most attended, end": "the same, where it is `</s>`",
    "random other": "any other token (mean)",
    "least attended": "the least attended token",
}


def masking_tables(result: Result) -> Mapping[str, str]:
    models = list(dict.fromkeys(row["model"] for row in result.rows))
    examples = [row for row in result.rows if row["kind"] == "example"]
    return {
        "masking": "\n\n".join(_of_model(name, _figures(result.rows, name)) for name in models),
        "masking-example": "\n\n".join(map(_example, examples)),
    }


def _figures(rows: Sequence[Row], model: str) -> dict[tuple[str | None, str], Row]:
    return {(row["removal"], row["figure"]): row for row in rows if row["model"] == model and row["kind"] == "figures"}


def _of_model(name: str, figures: Figures) -> str:
    head = [
        "what is removed",
        *(f"{removal}: {what}" for removal in HOW for what in ("another token comes", "nats lost")),
    ]
    body = [
        [
            text,
            *(
                _cell(figures.get((removal, f"{what}, {choice}")), what)
                for removal in HOW
                for what in ("changed", "drop")
            ),
        ]
        for choice, text in CHOICES.items()
    ]
    names = ("largest weight", "largest on end", "weight of end", "end unlike the token before")
    largest, on_end, of_end, unlike = (figures[None, what] for what in names)
    weights = (
        f"**{name}**, {largest['tokens']:,} target tokens. The largest weight is {_number(largest)} in the mean. "
        f"It lies on `</s>` for {_percent(on_end)} of them, and `</s>` has {_percent(of_end)} of all weight. "
        f"The weights of `</s>` and of the token before it differ by {_number(unlike)} in the mean."
    )
    return "\n\n".join([weights, table(head, body), "\n".join(_agreement(figures, removal) for removal in HOW)])


def _agreement(figures: Figures, removal: str) -> str:
    tau, is_top = figures[removal, "tau"], figures[removal, "most attended is most important"]
    return (
        f"- {HOW[removal]}: Kendall's tau between weights and nats lost is {_number(tau)}. "
        f"The token whose removal costs most is the most attended one for {_percent(is_top)} of the target tokens."
    )


def _cell(figure: Row | None, what: str) -> str:
    if figure is None:
        return "none"
    return _percent(figure) if what == "changed" else _number(figure)


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
        "without it, deleted",
        "without it, hidden",
        "costs most if deleted",
    ]
    body = [
        [
            f"`{token['token']}`",
            f"{token['probability']:.2f}",
            f"`{token['most_attended']}`",
            f"{token['weight']:.2f}",
            *(_without(token, token[removal]) for removal in HOW),
            f"`{token['deleted']['most_important']}`: {token['deleted']['its_probability']:.2f}",
        ]
        for token in row["tokens"]
    ]
    title = f"**{row['model']}**: “{row['sentence']}” becomes “{row['text']}”"
    return "\n\n".join([title, table(head, body), *_plainest(row["tokens"])])


def _plainest(tokens: Sequence[Row]) -> list[str]:
    """The token that depends most on another than it looks at, in words."""
    torn = [token for token in tokens if token["deleted"]["most_important"] != token["most_attended"]]
    if not torn:
        return []
    token = max(torn, key=lambda one: one["deleted"]["probability"] - one["deleted"]["its_probability"])
    without = token["deleted"]
    return [
        f"`{token['token']}` looks most at `{token['most_attended']}`, with a weight of {token['weight']:.2f}. "
        f"If that is deleted its probability goes from {token['probability']:.2f} to {without['probability']:.2f}; if "
        f"`{without['most_important']}` is, to {without['its_probability']:.2f}."
    ]


def _without(token: Row, effect: Row) -> str:
    probability = f"{effect['probability']:.2f}"
    is_same = effect["prediction"] == token["token"]
    return probability if is_same else f"{probability}, now `{effect['prediction']}`"
