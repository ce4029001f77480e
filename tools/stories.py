"""Simple stories and conversations, which a program writes from the texts in `story_text`, for the bundled model.

The texts are templates: `[a|b]` chooses, `[a#word=x|b#word=y]` also fills the word with x or y, and `{word}` is a word
of the story, chosen once from the list of that name in `words.txt`. `{A}` and `{B}` are the story's people: `{A}` is a
name, `{A.kind}` what he or she is, `{A.he}`, `{A.him}`, `{A.his}` and `{A.He}` the pronouns.

    python tools/stories.py --seed 1 --count 5        # prints some
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TEXTS = Path(__file__).with_name("story_text")
# Share of names that are made up, so that a model learns to copy a name and not only to choose one.
INVENTED = 0.15
Turn = tuple[str, str]
SYSTEMS = [
    "You are a helpful assistant.",
    "You are a friendly story teller.",
    "You are a helpful assistant. Answer in simple words.",
    "Be brief.",
    "You are Story.",
]


def blocks(name: str) -> list[str]:
    """Paragraph blocks of a file, without its comments."""
    lines = [line for line in (TEXTS / name).read_text().splitlines() if not line.startswith("#")]
    return [block.strip() for block in "\n".join(lines).split("\n\n") if block.strip()]


def word_lists() -> dict[str, list[str]]:
    lists: dict[str, list[str]] = {}
    for line in "\n".join(blocks("words.txt")).splitlines():
        name, words = line.split(": ", 1)
        lists.setdefault(name, []).extend(words.split(" | "))
    return lists


WORDS = word_lists()


@dataclass(frozen=True)
class Person:
    name: str
    kind: str
    is_she: bool

    def word(self, part: str) -> str:
        pronouns = ("she", "her", "her") if self.is_she else ("he", "him", "his")
        forms = {"kind": self.kind, **dict(zip(("he", "him", "his"), pronouns, strict=True))}
        return forms[part] if part in forms else forms[part.lower()].capitalize()


def invented_name(rng: random.Random) -> str:
    syllables = [rng.choice("bdfgklmnprstvz") + rng.choice(["a", "e", "i", "o", "u", "ee", "oo"]) for _ in range(2)]
    return "".join(syllables).capitalize() + rng.choice(["", "", "n", "l", "x", "s"])


def person(rng: random.Random, taken: str = "") -> Person:
    is_she = rng.random() < 0.5
    own = "girl" if is_she else "boy"
    kind = rng.choice(WORDS[rng.choices(["animal", "person", own], [6, 3, 2])[0]])
    name = taken
    while name == taken:
        name = invented_name(rng) if rng.random() < INVENTED else rng.choice(WORDS["she" if is_she else "he"])
    return Person(name, kind, is_she)


class Telling:
    """One story or exchange: what its words have become so far."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        first = person(rng)
        self._people = {"A": first, "B": person(rng, taken=first.name)}
        self.words: dict[str, str] = {}

    def word(self, name: str) -> str:
        owner, _, part = name.partition(".")
        if owner in self._people:
            return self._people[owner].word(part) if part else self._people[owner].name
        if name not in self.words:
            choices = WORDS[name] if name in WORDS else WORDS[name.rstrip("23")]
            self.words[name] = self._rng.choice([word for word in choices if word not in self.words.values()])
        return self.words[name]

    def _choose(self, match: re.Match[str]) -> str:
        text, _, bound = self._rng.choice(match[1].split("|")).partition("#")
        if bound:
            name, _, value = bound.partition("=")
            self.words[name] = value
        return text

    def tell(self, template: str) -> str:
        """The template's text, with its choices made and its words filled in."""
        text = template
        while "[" in text:
            text = re.sub(r"\[([^\[\]]*)\]", self._choose, text)
        text = re.sub(r"\{([\w.]+)\}", lambda match: self.word(match[1]), text)
        text = re.sub(r"\b([Aa]) (?=[aeiouAEIOU])(?!uni|use|one|eu)", r"\1n ", text)
        return re.sub(r" +", " ", text).strip()


@dataclass(frozen=True)
class Story:
    text: str
    subjects: list[str]  # what somebody who asks for this story may say that it is about
    questions: list[Turn]


PLOTS = [plot for plot in "\n\n".join(blocks("plots.txt")).split("== ") if plot]
TOPICS = dict(line.split(": ", 1) for line in "\n".join(blocks("topics.txt")).splitlines())
TALK = blocks("talk.txt")
VERSES: dict[str, list[str]] = {}
for _line in "\n".join(blocks("poems.txt")).splitlines():
    VERSES.setdefault(_line.split(" | ")[0], []).append(_line.split(" | ")[1].replace(" / ", "\n"))


def story(rng: random.Random) -> Story:
    telling = Telling(rng)
    _, about, rest = rng.choice(PLOTS).split("\n", 2)
    subject = telling.tell(about.removeprefix("about: "))
    lines = [line for line in rest.split("\n") if line]
    text = "\n\n".join(telling.tell(line) for line in lines if not line.startswith("? "))
    questions = []
    for line in lines:
        if line.startswith("? "):
            question, answer = line.removeprefix("? ").split(" => ")
            questions.append((telling.tell(question), telling.tell(answer)))
    names = [
        telling.tell(template)
        for template in ("a {A.kind}", "a {A.kind} named {A}", "{A} and {B}", "a {A.kind} and a {B.kind}", "{A}")
        if "{A}" in rest and ("{A.kind}" in rest or ".kind" not in template)
    ]
    if "thing" in telling.words:
        names.append(telling.tell("a {A.kind} and a {thing}"))
    return Story(text, [subject, *names], questions)


def sentence(request: str, rng: random.Random) -> str:
    """A request with a capital and an end, as people write them."""
    is_question = request.startswith(("Can", "Could", "can", "could", "What", "what", "Who", "How"))
    return request[0].upper() + request[1:] + ("?" if is_question else rng.choice([".", ".", "", "!"]))


def story_turns(rng: random.Random) -> list[Turn]:
    """Somebody asks for a story, and perhaps for what was in it."""
    told = story(rng)
    ask = Telling(rng).tell
    opening = rng.random()
    if opening < 0.12:
        first, _, _ = told.text.partition("\n\n")
        sentences = re.split(r"(?<=[.!?]) (?=[A-Z])", first)
        given = " ".join(sentences[: rng.randint(1, 2)])
        lead = rng.choice(["", "", "Continue this story: ", "Go on: ", "How does this go on? "])
        turns = [(lead + given, told.text[len(given) :].strip())]
    elif opening < 0.22:
        hello = ask("[Hello|Hi|Good day][!|.|]")
        turns = [(hello, ask("[Hello!|Good day!] Would you like a story?"))]
        turns.append((ask("[Yes|Yes, please|Please|Yes, tell me one|Of course][!|.|]"), told.text))
    else:
        about = f" about {rng.choice(told.subjects)}" if rng.random() < 0.75 else ""
        request = ask("[Tell me|Please tell me|Can you tell me|Could you tell me|Write|Write me|Please write|I want|]")
        kind = ask("a [story|story|short story|little story|bedtime story|nice story|fairy tale|tale]")
        turns = [(sentence(f"{request} {kind}{about}".strip(), rng), told.text)]
    if rng.random() < 0.45:
        turns += rng.sample(told.questions, rng.randint(1, len(told.questions)))
    return turns


def about_turns(rng: random.Random) -> list[Turn]:
    """Somebody asks what a simple thing is."""
    topic = rng.choice(list(TOPICS))
    sentences = TOPICS[topic].split(" | ")
    is_many = re.match(rf"{topic} (are|have|live)", sentences[0], re.IGNORECASE) is not None
    request = Telling(rng).tell(
        "[Tell me|Tell me something|Can you tell me something|What do you know|Please tell me|Talk to me] about"
        if rng.random() < 0.7
        else f"[What {'are' if is_many else 'is'}|Explain|Describe|]"
    )
    least = min(3, len(sentences) - 1)
    kept = sorted(rng.sample(range(1, len(sentences)), rng.randint(least, len(sentences) - 1)))
    return [(sentence(f"{request} {topic}".strip(), rng), " ".join(sentences[at] for at in [0, *kept]))]


def poem_turns(rng: random.Random) -> list[Turn]:
    """Somebody asks for a poem."""
    subject = rng.choice(list(VERSES))
    verses = rng.sample(VERSES[subject], 2)
    others = rng.sample([verse for key, of in VERSES.items() if key != subject for verse in of], 2)
    text = "\n\n".join(["\n".join(verses), "\n".join(others)] if rng.random() < 0.5 else ["\n".join(verses)])
    article = rng.choice(["the", "a"]) if subject not in ("spring", "summer", "autumn", "winter", "love") else ""
    about = re.sub(" +", " ", f" about {article} {subject}") if rng.random() < 0.85 else ""
    verb = rng.choice(["Write", "Write me", "Tell me", "Can you write", "Please write", "I would like", "Make"])
    kind = rng.choice(["a poem", "a poem", "a short poem", "a rhyme", "a little poem", "a song"])
    return [(sentence(f"{verb} {kind}{about}", rng), text)]


def sum_turns(rng: random.Random) -> list[Turn]:
    """Counting, and sums of small numbers."""
    numbers = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
    if rng.random() < 0.25:
        last = rng.randint(3, len(numbers))
        request = sentence(
            f"{rng.choice(['Count to', 'Please count to', 'Can you count to'])} {numbers[last - 1]}", rng
        )
        return [(request, ", ".join(numbers[:last]).capitalize() + ".")]
    a, b = rng.randint(0, 10), rng.randint(0, 10)
    request = rng.choice(
        ["What is {a} plus {b}?", "What is {a} + {b}?", "{a} + {b}", "How much is {a} and {b}?", "{a}+{b}=?"]
    )
    return [(request.format(a=a, b=b), rng.choice(["{a} plus {b} is {c}.", "That is {c}."]).format(a=a, b=b, c=a + b))]


def talk_turns(rng: random.Random) -> list[Turn]:
    """A greeting, a question about the model, or something that it can't do."""
    telling = Telling(rng)
    lines = rng.choice(TALK).split("\n")
    return [
        (telling.tell(ask[2:]), telling.tell(answer[2:])) for ask, answer in zip(lines[::2], lines[1::2], strict=True)
    ]


def as_typed(text: str, rng: random.Random) -> str:
    """What people make of a short request: no capital, or no mark at its end."""
    if len(text) > 80:
        return text
    if rng.random() < 0.12:
        text = text[0].lower() + text[1:]
    return text.rstrip(".?!") or text if rng.random() < 0.08 else text


def conversation(rng: random.Random) -> list[Turn]:
    """One to three exchanges; as (role, text), perhaps with a system prompt first."""
    kinds = [story_turns, about_turns, talk_turns, poem_turns, sum_turns]
    turns = rng.choices(kinds, [32, 30, 28, 5, 5])[0](rng)
    while rng.random() < 0.25:
        turns += rng.choices(kinds, [2, 3, 4, 1, 1])[0](rng)
    system = [("system", rng.choice(SYSTEMS))] if rng.random() < 0.15 else []
    return system + [pair for ask, answer in turns for pair in (("user", as_typed(ask, rng)), ("assistant", answer))]


def texts(seed: int) -> Iterator[list[Turn] | str]:
    """Yield texts without end: conversations, and now and then a story or a topic as plain text."""
    rng = random.Random(seed)
    while True:
        plain = rng.random()
        if plain < 0.22:
            yield story(rng).text
        elif plain < 0.28:
            yield about_turns(rng)[0][1]
        else:
            yield conversation(rng)


def main() -> None:
    parser = argparse.ArgumentParser(description="Print texts that the bundled model is trained on.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=5)
    args = parser.parse_args()
    for _, text in zip(range(args.count), texts(args.seed), strict=False):
        print(text if isinstance(text, str) else "\n".join(f"{role}> {words}" for role, words in text), end="\n\n---\n")


if __name__ == "__main__":
    main()
