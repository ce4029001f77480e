"""Sources of prompts' tokens: a tokenizer's words as text, its ids, or plain words without a tokenizer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from headway.load.errors import BenchError
from headway.load.request import Prompt
from headway.load.workload.prompts import MadePrompt, Members, TokenSource
from headway.text.tokenizer import Tokenizer

_TEXT = """
air apple arm art autumn baby back bag ball bank base bath bean bear bed bell belt bench bird black blade block
blood blue board boat body bone book boot bottle bowl box boy branch brass bread brick bridge brother brown brush
bucket bus butter button cake camera candle car card cart cat chain chair chalk cheese chest chin church circle
city clay clock cloth cloud coal coast coat coffee collar color copper cord cork corn cotton cover cow cup curtain
cushion dance day desk dog door dream dress drop dust ear earth edge egg engine eye face family farm father
feather field finger fire fish flag flame floor flower fly foot forest fork fowl frame friend fruit garden girl
glass glove goat gold grain grass green gun hair hammer hand harbor hat head heart hill hole honey hook horn horse
hour house ice iron island jewel journey juice key king kitchen knee knife lake lamp land leaf leather leg letter
library light line lion lip list lock low machine map market mass meal meat metal milk mind mist money month moon
morning mother mountain mouth music nail name neck needle nerve nest net night noise north nose note number oil
orange oven page paint paper park part pen pencil picture pig pin pipe place plane plant plate plow pocket point
pot potato price queen rail rain record red rice ring river road roof room root rose salt sand school sea seat
seed sheep shelf ship shirt shoe silk silver sister skin sky sleep small smoke snow soap sock soup south space
spade spoon spring square star station steam stem step stick stone store storm story street summer sun table tail
thread thumb ticket time tooth town train tree truck valley village voice wall war watch water wave west wheel
wind window wing winter wire woman wood wool word work yard year yellow
"""
WORDS: tuple[str, ...] = tuple(_TEXT.split())
# A tokenizer's commonest words are in front; more than these do not make prompts any more varied.
MOST_MEMBERS = 16384
FEWEST_WORDS = 32
MOST_ADJUSTMENTS = 10


@dataclass(frozen=True, slots=True)
class Alphabet:
    """Tokens that prompts are made of."""

    # ids, texts: the ids and texts of each member, as lists of the same length.
    ids: list[int]
    texts: list[str]
    openers: Members  # members that stay one token when a chat template trims the space in front of them
    # Members written one after the other become the same tokens again, whatever they are. Then the length of a text is
    # known without looking.
    stable: bool
    trims: bool  # the first member's space is the tokenizer's own and is not written

    def text(self, members: Sequence[int]) -> str:
        joined = "".join([self.texts[member] for member in members])
        return joined.removeprefix(" ") if self.trims else joined


def alphabet_of(tokenizer: Tokenizer) -> Alphabet:
    """The tokenizer's words where they come back as they are; else all its ordinary tokens.

    Raises:
        BenchError: when it has not even two of those.
    """
    added = tokenizer.backend.get_added_tokens_decoder().keys() | tokenizer.special_ids
    texts = {i: tokenizer.token_text(i) for i in range(tokenizer.vocab_size) if i not in added}
    spaced = {i: text for i, text in texts.items() if text[:1] == " " and len(text) > 2 and _is_word(text[1:])}
    # Where a tokenizer drops spaces, its words have none and need one between them.
    bare = {i: " " + text for i, text in texts.items() if _is_word(text)}
    return _stable_words(tokenizer, spaced) or _stable_words(tokenizer, bare) or _ordinary_tokens(tokenizer, texts)


def _is_word(text: str) -> bool:
    return text.isascii() and text.isalnum() and not text.isdigit()


def _stable_words(tokenizer: Tokenizer, words: dict[int, str]) -> Alphabet | None:
    """The words that stay one token beside any other; None when there are too few."""
    ids = _round_tripping(tokenizer, words)
    if len(ids) < FEWEST_WORDS:
        return None
    texts = [words[i] for i in ids]
    trimmed = tokenizer.backend.encode_batch_fast([text[1:] for text in texts], add_special_tokens=False)
    openers = np.flatnonzero([len(encoded.ids) == 1 for encoded in trimmed])
    for trims in (False, True):
        alphabet = Alphabet(ids, texts, openers, stable=True, trims=trims)
        if _is_stable(tokenizer, alphabet):
            return alphabet
    return None


def _ordinary_tokens(tokenizer: Tokenizer, texts: dict[int, str]) -> Alphabet:
    printable = {i: text for i, text in texts.items() if text.isprintable() and text and text[:6] != "bytes:"}
    ids = _round_tripping(tokenizer, printable)
    if len(ids) < FEWEST_WORDS:
        ids = list(printable)
    if len(ids) < 2:
        raise BenchError(f"the tokenizer in {tokenizer.folder} has no ordinary tokens to make prompts of; use another")
    alphabet = Alphabet(ids, [texts[i] for i in ids], np.arange(len(ids)), stable=False, trims=False)
    return replace(alphabet, stable=_is_stable(tokenizer, alphabet))


def _round_tripping(tokenizer: Tokenizer, texts: dict[int, str]) -> list[int]:
    """The ids, of the first MOST_MEMBERS, whose text alone is that token again."""
    ids = list(itertools.islice(texts, MOST_MEMBERS))
    alone = tokenizer.backend.encode_batch_fast([tokenizer.decode([i]) for i in ids], add_special_tokens=False)
    return [i for i, encoded in zip(ids, alone, strict=True) if encoded.ids == [i]]


def _is_stable(tokenizer: Tokenizer, alphabet: Alphabet) -> bool:
    """Each member beside several others: a tokenizer that merges across members would show it."""
    size = len(alphabet.ids)
    sample = np.concatenate([np.random.default_rng(each).permutation(size) for each in range(3)]).tolist()
    encoded = tokenizer.encode(alphabet.text(sample), add_special_tokens=False)
    return encoded == [alphabet.ids[member] for member in sample]


class TokenizerSource(TokenSource):
    """Text measured with the model's tokenizer.

    With an alphabet of words that come back as they are a prompt's length is exact. With any other tokenizer each
    prompt is measured, and its end adjusted up to MOST_ADJUSTMENTS times; what comes out is reported.

    Args:
        added_tokens: what the server puts around a prompt; None for what the tokenizer adds to a plain text, as
            /v1/completions does. A chat template adds more.
    """

    def __init__(self, tokenizer: Tokenizer, added_tokens: int | None = None, alphabet: Alphabet | None = None) -> None:
        self.tokenizer = tokenizer
        self.alphabet = alphabet or alphabet_of(tokenizer)
        self.size = len(self.alphabet.ids)
        self.openers = self.alphabet.openers
        self.added_tokens = len(tokenizer.encode("a")) - self.count("a") if added_tokens is None else added_tokens

    def render(self, members: Members, tokens: int, fixed: int, spare: np.random.Generator) -> MadePrompt:
        chosen = members.tolist()
        if self.alphabet.stable:
            return MadePrompt(Prompt(text=self.alphabet.text(chosen)), len(chosen))
        for _ in range(MOST_ADJUSTMENTS):
            length = self.count(self.alphabet.text(chosen))
            # A member may be more or less than a token.
            change = math.ceil(abs(tokens - length) * len(chosen) / max(length, 1))
            if length > tokens and len(chosen) > max(fixed, 1):
                del chosen[max(len(chosen) - change, fixed, 1) :]
            elif length < tokens:
                chosen += self._more(chosen[-1], change, spare)
            else:
                break
        text = self.alphabet.text(chosen)
        return MadePrompt(Prompt(text=text), self.count(text))

    def _more(self, last: int, count: int, spare: np.random.Generator) -> list[int]:
        """Members to go on with."""
        found: list[int] = spare.integers(0, self.size, count).tolist()
        return found

    def of_text(self, text: str) -> MadePrompt:
        return MadePrompt(Prompt(text=text), self.count(text) + self.added_tokens)

    def count(self, text: str) -> int:
        return len(self.tokenizer.encode(text, add_special_tokens=False))


class ProseSource(TokenizerSource):
    """Stretches of a text, each from the begin of a sentence, measured with the model's tokenizer.

    Speculation finds drafts in it as in other texts, which it does not among random words. A stretch that is longer
    than the text goes on from its start.
    """

    is_text = True

    def __init__(self, tokenizer: Tokenizer, text: str, added_tokens: int | None = None) -> None:
        encoded = tokenizer.backend.encode(text, add_special_tokens=False)
        starts = [start for start, _ in encoded.offsets]
        pieces = [text[start:end] for start, end in itertools.pairwise((*starts, len(text)))]
        alphabet = Alphabet(encoded.ids, pieces, sentence_starts(pieces), stable=False, trims=True)
        super().__init__(tokenizer, added_tokens, alphabet)

    def _more(self, last: int, count: int, spare: np.random.Generator) -> list[int]:
        return [(last + step) % self.size for step in range(1, count + 1)]


def sentence_starts(pieces: Sequence[str]) -> Members:
    """Places of the pieces that follow the end of a sentence; all, where none does."""
    ends = [piece.rstrip()[-1:] in (".", "?", "!") for piece in pieces]
    found = [place for place in range(1, len(pieces)) if ends[place - 1] and pieces[place].strip()[:1].isupper()]
    return np.array(found) if len(found) > 1 else np.arange(len(pieces))


class TokenIdSource(TokenSource):
    """Token ids, for /v1/completions: exact by construction, and nothing is added to them.

    Args:
        ids: the ids of ordinary tokens, 2 or more.
        openers: positions in `ids` that a prompt may start with; None for all.
        tokenizer: a tokenizer for texts that must become ids.
    """

    token_ids = True
    added_tokens = 0

    def __init__(self, ids: Sequence[int], openers: Members | None = None, tokenizer: Tokenizer | None = None) -> None:
        self.ids = list(ids)
        self.tokenizer = tokenizer
        self.size = len(self.ids)
        self.openers = np.arange(self.size) if openers is None else openers

    @classmethod
    def of_tokenizer(cls, tokenizer: Tokenizer) -> TokenIdSource:
        """The ids of what a TokenizerSource writes: the same prompts in the other form."""
        alphabet = alphabet_of(tokenizer)
        return cls(alphabet.ids, alphabet.openers, tokenizer)

    def render(self, members: Members, tokens: int, fixed: int, spare: np.random.Generator) -> MadePrompt:
        ids = self.ids
        return MadePrompt(Prompt(token_ids=tuple([ids[member] for member in members.tolist()])), len(members))

    def of_text(self, text: str) -> MadePrompt:
        ids = self._encoded(text, add_special_tokens=True)
        return MadePrompt(Prompt(token_ids=tuple(ids)), len(ids))

    def count(self, text: str) -> int:
        return len(self._encoded(text, add_special_tokens=False))

    def _encoded(self, text: str, add_special_tokens: bool) -> list[int]:
        if self.tokenizer is None:
            raise BenchError("this dataset's texts cannot become token ids without a tokenizer; give --tokenizer")
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)


class WordSource(TokenSource):
    """Everyday words, for a server whose tokenizer is not at hand: lengths are as good as the calibration.

    Args:
        tokens_per_word: mean over the words of `calibration_text`.
        added_tokens: what the server puts around a prompt.
    """

    estimates = True
    words: Sequence[str] = WORDS

    def __init__(self, tokens_per_word: float = 1.0, added_tokens: int = 0) -> None:
        self.tokens_per_word = tokens_per_word
        self.added_tokens = added_tokens
        self.size = len(self.words)
        self.openers = np.arange(self.size)

    @classmethod
    def calibrated(cls, short: tuple[int, int], long: tuple[int, int]) -> WordSource:
        """Make a source from the words and the prompt tokens, by the server's `usage`, of a short and a long text."""
        words, counted = long[0] - short[0], long[1] - short[1]
        return cls(counted / words, max(round(short[1] - short[0] * counted / words), 0))

    @staticmethod
    def calibration_text(words: int) -> str:
        """A text of so many words, each of the list as often as any other."""
        return " ".join(WORDS[i % len(WORDS)] for i in range(words))

    def members_for(self, tokens: int) -> int:
        return max(round(tokens / self.tokens_per_word), 1)

    def render(self, members: Members, tokens: int, fixed: int, spare: np.random.Generator) -> MadePrompt:
        text = " ".join([self.words[member] for member in members.tolist()])
        return MadePrompt(Prompt(text=text), round(len(members) * self.tokens_per_word))

    def of_text(self, text: str) -> MadePrompt:
        return MadePrompt(Prompt(text=text), None)

    def count(self, text: str) -> int:
        return round(len(text.split()) * self.tokens_per_word)


class ProseWordSource(WordSource):
    """Stretches of a text for a server whose tokenizer is not at hand.

    Args:
        words: those of the text, in their order.
    """

    is_text = True

    def __init__(self, words: Sequence[str], tokens_per_word: float, added_tokens: int = 0) -> None:
        self.words = words
        super().__init__(tokens_per_word, added_tokens)
        self.openers = sentence_starts(words)
