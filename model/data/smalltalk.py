"""Small talk: messages of a user, and the answer to each without any instruction."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

FOODS = ("apples", "bread", "cheese", "honey", "noodles", "olives", "pancakes", "plums", "rice", "soup")
ANIMALS = ("cats", "dogs", "foxes", "goats", "horses", "otters", "owls", "rabbits", "sheep", "whales")
PLACES = ("Athens", "Bergen", "Cairo", "Dublin", "Kyoto", "Lisbon", "Lima", "Oslo", "Prague", "Vienna")
HOBBIES = ("chess", "climbing", "cooking", "dancing", "drawing", "fishing", "hiking", "rowing", "sewing", "singing")
COLOURS = ("black", "blue", "brown", "green", "grey", "orange", "pink", "red", "white", "yellow")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
NEXT_DAY = dict(zip(DAYS, (*DAYS[1:], DAYS[0]), strict=True))
OPPOSITES = {
    "big": "small",
    "hot": "cold",
    "old": "young",
    "fast": "slow",
    "early": "late",
    "full": "empty",
    "loud": "quiet",
    "heavy": "light",
    "wet": "dry",
    "soft": "hard",
    "rich": "poor",
    "wide": "narrow",
}


@dataclass(frozen=True)
class Intent:
    """Messages with the same meaning, and their answer. `{}` stands for one of `values`, `{of}` for
    its counterpart in `counterparts`.
    """

    messages: tuple[str, ...]
    answer: str
    values: tuple[str, ...] = ("",)
    counterparts: tuple[str, ...] = ()  # one for each value


def _pairs(messages: tuple[str, ...], answer: str, table: dict[str, str]) -> Intent:
    return Intent(messages, answer, tuple(table), tuple(table.values()))


INTENTS: Sequence[Intent] = (
    Intent(("Hello!", "Good day!", "Hi there!"), "Nice to meet you."),
    Intent(("How are you?", "How do you feel?"), "I am fine, thank you."),
    Intent(("Thank you!", "Thanks a lot!"), "You are welcome."),
    Intent(("Goodbye!", "See you later!"), "Have a good day."),
    Intent(("Good night!", "I go to bed now."), "Sleep well."),
    Intent(("I am tired.", "I feel so sleepy."), "You should rest a little."),
    Intent(("I am hungry.", "My stomach is empty."), "There is soup in the kitchen."),
    Intent(("I am bored.", "I have nothing to do."), "Let us play a game."),
    Intent(("I am sad today.", "I feel blue."), "I hope it gets better."),
    Intent(("I am happy today!", "What a great day!"), "That is good to hear."),
    Intent(("I am late again.", "I missed the bus."), "The next bus comes soon."),
    Intent(("I lost my keys.", "Where are my keys?"), "Look under the table."),
    Intent(("Is it raining?", "Do I need an umbrella?"), "Yes, take your coat."),
    Intent(("Is it cold outside?", "Do I need gloves?"), "Yes, wear a warm hat."),
    Intent(("Where do you live?", "Where is your home?"), "I live in a computer."),
    Intent(("How old are you?", "What is your age?"), "I was made this year."),
    Intent(("What is your job?", "What do you do all day?"), "I answer questions."),
    Intent(("Can you sing?", "Sing me a song."), "I only know one tune."),
    Intent(("Tell me a joke.", "Make me laugh."), "My socks tell better jokes."),
    Intent(("Tell me a secret.", "Do you have secrets?"), "I hide cookies in a box."),
    Intent(("What time is it?", "Do you have the time?"), "It is time for tea."),
    Intent(("Who made you?", "Who built you?"), "A curious person did."),
    Intent(("Are you a robot?", "Are you human?"), "I am only a program."),
    Intent(("Can you help me?", "I need help."), "Tell me what is wrong."),
    Intent(("What should I read?", "Do you know a good book?"), "Try a book about the sea."),
    Intent(("Do you like {}?", "Are {} good?"), "Yes, {} taste great.", FOODS),
    Intent(("Shall we buy {}?", "Let us buy some {}."), "Good, we need more {}.", FOODS),
    Intent(("Have you seen any {}?", "Where are the {}?"), "The {} are in the garden.", ANIMALS),
    Intent(("Are {} clever?", "What do you think of {}?"), "I think {} are lovely.", ANIMALS),
    Intent(("Have you been to {}?", "Do you know {}?"), "No, but {} sounds nice.", PLACES),
    Intent(("I am going to {}.", "I fly to {} soon."), "Send me a card from {}.", PLACES),
    Intent(("Is {} fun?", "Should I try {}?"), "Yes, {} is great fun.", HOBBIES),
    Intent(("I am bad at {}.", "My {} is terrible."), "You will learn {} in time.", HOBBIES),
    Intent(("I bought a {} car.", "My new car is {}."), "Then {} must suit you.", COLOURS),
    Intent(("Is {} a nice colour?", "Do you prefer {}?"), "Yes, {} is my favourite.", COLOURS),
    Intent(("Are you free on {}?", "Shall we meet on {}?"), "Yes, {} is fine.", DAYS),
    _pairs(("What comes after {}?", "Which day follows {}?"), "It is {of}.", NEXT_DAY),
    _pairs(("What is the opposite of {}?", "What is not {}?"), "The opposite is {of}.", OPPOSITES),
)


@dataclass(frozen=True)
class SmalltalkPair:
    message: str
    answer: str


def draw_exchange(rng: Random) -> SmalltalkPair:
    """Generate a random exchange."""
    intent = rng.choice(INTENTS)
    index = rng.randrange(len(intent.values))
    value = intent.values[index]
    of = intent.counterparts[index] if intent.counterparts else ""
    return SmalltalkPair(rng.choice(intent.messages).format(value), intent.answer.format(value, of=of))
