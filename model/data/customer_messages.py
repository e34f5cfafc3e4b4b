"""Messages to a shop, each with one of five labels: data for a classifier.

Messages are drawn from sentences with gaps. They mention other topics in passing, have typing
errors, and some could have two labels, so that no classifier is always right. Every fourth sentence
is only used in dev and test.
"""

import random
from collections.abc import Mapping, Sequence

LABELS = ("billing", "delivery", "praise", "returns", "technical")

_ITEMS = (
    "kettle", "desk lamp", "office chair", "headphones", "running shoes", "coffee grinder", "backpack", "blender",
    "tablet", "smart speaker", "keyboard", "rain jacket", "bread maker", "camera", "bookshelf", "air purifier",
    "electric toothbrush", "garden hose", "monitor", "pressure cooker", "sleeping bag", "router", "vacuum cleaner",
)  # fmt: skip
_GAPS: Mapping[str, Sequence[str]] = {
    "item": _ITEMS,
    "amount": ("12.90", "49", "8.50", "120", "17.99", "230", "64.20", "5", "99.95"),
    "day": (
        "Monday",
        "Tuesday",
        "last Friday",
        "the 3rd",
        "the 14th",
        "yesterday",
        "two weeks ago",
        "Saturday morning",
    ),
    "time": ("three days", "over a week", "ten days", "a fortnight", "almost a month", "two hours", "half a day"),
    "place": ("the neighbour", "the wrong street", "a parcel shop", "the depot", "my old address", "the garage"),
    "card": ("card", "account", "credit card", "bank account", "gift card", "voucher"),
    "device": ("phone", "laptop", "browser", "television", "old tablet", "work computer"),
    "page": ("checkout", "login page", "order history", "search", "app", "password form", "wish list"),
    "who": ("Marta", "the young man on the phone", "your driver", "Mr Okafor", "the whole team", "support", "Lena"),
}
# Sentences that decide the label.
_CORES: Mapping[str, Sequence[str]] = {
    "billing": (
        "I was charged {amount} euros twice for the {item}.",
        "the invoice for the {item} shows {amount} more than the price on the site.",
        "My {card} was debited on {day} although I cancelled the order.",
        "Can you send me a receipt with VAT for the {item}?",
        "why does my statement list {amount} from you that I do not recognise",
        "The discount code was accepted, but the total is still the full price.",
        "I paid by {card} and the order is still marked as unpaid.",
        "Please change the company name on the invoice from {day}.",
        "You keep taking {amount} every month, I never signed up for a membership.",
        "The {item} was cheaper in the basket than on the confirmation. What do I really owe?",
        "Shipping was supposed to be free above 50, yet {amount} was added.",
        "I need to pay in two instalments, is that possible for the {item}?",
        "a reminder fee of {amount} was added although I paid on {day}",
        "Is the tax of {amount} included in the price of the {item}?",
        "The {card} number I have on file has expired, how do I change it?",
        "Your system says my payment was declined but the money has left my {card}.",
        "I got two invoices with different numbers for the same {item}.",
        "the voucher of {amount} was not subtracted at the end",
        "Where is the {amount} you promised to credit for the price difference?",
        "The currency on the bill is wrong, I ordered in euros.",
    ),
    "delivery": (
        "My {item} should have arrived on {day} and there is no sign of it.",
        "Tracking has not changed for {time}.",
        "The driver left the {item} with {place}, without a note.",
        "Could you deliver the {item} on {day} instead?",
        "where is my parcel?? it said out for delivery {day}",
        "the courier claims nobody was home but I waited the whole day",
        "I moved last month, please send the {item} to my new address.",
        "Only one of two boxes came, the {item} is still missing.",
        "How long does shipping to the islands take?",
        "The package was dropped at {place} in the rain.",
        "Can I collect the {item} from the depot myself?",
        "My order has been 'being prepared' for {time}.",
        "the parcel service says it has no record of the {item}",
        "Do you ship the {item} abroad, and how fast?",
        "It was handed to {place}, who knows nothing about it.",
        "I ordered express for {day} and it has not even left the warehouse.",
        "The estimated date keeps moving, now it is {day}.",
        "Please ring the bell next time, the {item} went back to the depot again.",
        "The box with the {item} was open and half empty when it came.",
        "can someone tell me which carrier brings the {item}",
    ),
    "returns": (
        "I would like to send the {item} back, it is too small.",
        "How do I get a label to return the {item}?",
        "I sent the {item} back {time} ago and have heard nothing.",
        "The {item} is not what the picture showed, I want to exchange it.",
        "can i swap the {item} for another colour",
        "You received my return on {day}, when do I get my money back?",
        "Do I have to pay the postage if I do not keep the {item}?",
        "The {item} broke on the first day, I want a replacement.",
        "I threw the packaging away, can I still give back the {item}?",
        "Your shop refused to take the {item} back although I have the receipt.",
        "I ordered two sizes of the {item} and will keep only one.",
        "how many days do i have to change my mind about the {item}",
        "The refund for the {item} is {amount} short of what I paid.",
        "Wrong model: I ordered the black {item} and got a white one. Please exchange.",
        "The return portal does not list my {item} as eligible.",
        "The courier never came to pick up the {item} that I am sending back.",
        "It was a present and she already has a {item}, what can we do?",
        "I changed my mind, the {item} is still sealed.",
        "Has my warranty claim for the {item} been approved?",
        "You sent the repaired {item} back with the same fault, I want my money.",
    ),
    "technical": (
        "The {page} shows a blank screen on my {device}.",
        "I cannot log in since {day}, the reset mail never arrives.",
        "The {item} does not connect to my {device}.",
        "After the update the {page} closes by itself.",
        "The {item} turns off after {time}, is there a setting?",
        "how do i pair the {item} with a second {device}",
        "Every time I press pay, the {page} throws an error 502.",
        "The firmware of the {item} cannot be installed, it stops at 40 percent.",
        "My {device} says the site certificate is invalid.",
        "the buttons in the {page} do nothing on my {device}",
        "The confirmation code comes only after it has expired.",
        "I deleted the cache and the {page} is still in the wrong language.",
        "The light on the {item} blinks red, the manual does not explain it.",
        "What does error E04 on the {item} mean?",
        "The filter in the {page} shows products that are sold out.",
        "My account is locked after three attempts, please unlock it.",
        "The {item} makes a loud noise when it starts, did I assemble it wrongly?",
        "I get signed out whenever I open the {page}.",
        "The companion app does not find the {item} any more.",
        "uploading a photo of the {item} freezes the {page}",
    ),
    "praise": (
        "Just wanted to say that the {item} is wonderful.",
        "{who} solved my problem in five minutes, thank you!",
        "Best {item} I have ever had.",
        "Ordered on {day}, here the next morning. Impressive.",
        "the {item} works perfectly, even better than described",
        "Please tell {who} that I am very grateful.",
        "I have been a customer for years and you never disappoint.",
        "My daughter loves the {item}, we are all happy.",
        "what a lovely handwritten card in the box!",
        "Great service: {who} even called back on {day}.",
        "I recommended you to all my colleagues.",
        "The new {page} is so much easier to use, well done.",
        "You credited the {amount} without any discussion. That is how it should be.",
        "Never had such an easy exchange, thanks to {who}.",
        "Five stars from me for the {item}.",
        "So well packed that nothing could happen to the {item}.",
        "{who} was patient with all my questions about the {item}.",
        "Honestly the nicest shop on the internet.",
        "I was sceptical about the {item}, but I take it all back.",
        "no complaints at all, keep going",
    ),
}  # fmt: skip
# Sentences about other things, which any message may have.
_ASIDES = (
    "The {item} itself is fine.", "Delivery was quick, by the way.", "I paid with my {card}.",
    "I bought it on {day}.", "The order also had a {item} in it.", "I already wrote to you {time} ago.",
    "Your colleague told me to send a mail.", "I tried the chat first, without luck.", "It was a gift for my sister.",
    "The tracking said {day}.", "The invoice says {amount}.", "I have used the {page} before.",
    "I do not want to send it back yet.", "Last time everything went well.", "The support line was busy.",
    "I am not angry, only confused.", "The site was slow when I ordered.", "The driver was friendly.",
)  # fmt: skip
_OPENINGS = ("Hello,", "Hi there,", "Good morning,", "Dear team,", "hey", "To whom it may concern:", "", "", "", "")
_CLOSINGS = (
    "Thanks.", "Please reply soon.", "Kind regards", "What now?", "Thank you in advance!", "Best, Tom", "", "", "", "",
)  # fmt: skip
# Messages that could have either of two labels; the writer of the data has chosen one of them.
_UNCLEAR: Mapping[tuple[str, str], Sequence[str]] = {
    ("billing", "returns"): (
        "I am still waiting for {amount} for the {item}.",
        "When will the money for the {item} be on my {card}?",
    ),
    ("delivery", "returns"): (
        "The {item} arrived broken.",
        "There is a scratch on the {item} from the transport, what do you suggest?",
    ),
    ("billing", "technical"): (
        "The {page} does not accept my {card}.",
        "I cannot download the invoice for the {item}.",
    ),
    ("delivery", "praise"): ("The {item} came earlier than I thought.", "Your driver left the {item} with {place}."),
    ("returns", "technical"): ("The {item} does not work.", "The {item} stopped working after {time}."),
}
_SHARE_UNCLEAR = 0.05


def draw_messages(seed: int, sizes: Mapping[str, int]) -> dict[str, list[tuple[str, str]]]:
    """Return texts and labels by part, without duplicates; `sizes` has the number of each label."""
    draw = random.Random(seed)  # noqa: S311 - not for security
    seen = set[str]()
    parts: dict[str, list[tuple[str, str]]] = {}
    for part, size in sizes.items():
        rows = []
        for label in LABELS:
            cores = [core for index, core in enumerate(_CORES[label]) if part != "train" or index % 4 != 3]
            unclear = [sentence for pair, sentences in _UNCLEAR.items() if label in pair for sentence in sentences]
            count = 0
            while count < size:
                text = _message(draw, draw.choice(unclear if draw.random() < _SHARE_UNCLEAR else cores))
                if text not in seen:
                    seen.add(text)
                    rows.append((text, label))
                    count += 1
        draw.shuffle(rows)
        parts[part] = rows
    return parts


def _message(draw: random.Random, core: str) -> str:
    asides = draw.sample(_ASIDES, k=draw.choice((0, 0, 1, 1, 2)))
    sentences = [core, *asides]
    draw.shuffle(sentences)
    text = " ".join(filter(None, [draw.choice(_OPENINGS), *sentences, draw.choice(_CLOSINGS)]))
    # Each gap has its own value.
    while "{" in text:
        before, _, rest = text.partition("{")
        name, _, after = rest.partition("}")
        text = before + draw.choice(_GAPS[name]) + after
    return _mistyped(draw, text) if draw.random() < 0.3 else text


def _mistyped(draw: random.Random, text: str) -> str:
    """Swap two neighbouring letters, leave out one, or write everything in lower case."""
    index = draw.randrange(1, len(text) - 2)
    return draw.choice(
        (
            text.lower(),
            text[:index] + text[index + 1] + text[index] + text[index + 2 :],
            text[:index] + text[index + 1 :],
        )
    )
