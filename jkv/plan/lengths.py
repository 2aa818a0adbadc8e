"""How long the sequences of a deployment are: lengths and the share of each.

Knows one kind of small text file; no cache.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from jkv.config.errors import ConfigError, Place, Problem
from jkv.config.source import display

# At most 18 digits: what is counted for such a length can still be shown.
_LINE = re.compile(r"(\d{1,18})\s*[,:;\s]\s*(\d{1,18}(?:\.\d{1,18})?|\.\d{1,18})\s*%?")
_HEADER = re.compile(r"[A-Za-z_]+\s*[,:;\s]\s*[A-Za-z_]+")


@dataclass(frozen=True)
class LengthMix:
    """Lengths of sequences in tokens, each with its share of all; the shares add up to 1."""

    shares: tuple[tuple[int, Fraction], ...]

    @property
    def longest(self) -> int:
        """The longest length."""
        return max(length for length, _ in self.shares)

    def mean(self, of: Callable[[int], int | Fraction]) -> Fraction:
        """Return the mean over sequences of a function of their length."""
        return sum((share * of(length) for length, share in self.shares), Fraction())


def one_length(num_tokens: int) -> LengthMix:
    """Return the mix in which all sequences are equally long."""
    return LengthMix(((num_tokens, Fraction(1)),))


def read_mix(file: Path) -> LengthMix:
    """Read a mix: a length and its share on each line, as `8192, 0.25`, `8192: 25%` or `8192 1`.

    Only the ratios of the shares count. Empty lines, what follows a `#` and one line of column names are no
    data.

    Raises:
        ConfigError: names each line that is wrong.
    """
    name, problems = display(file), []
    weights: dict[int, Fraction] = {}
    for number, line in enumerate(file.read_text("utf-8-sig", errors="replace").splitlines(), 1):
        text = line.partition("#")[0].strip()
        found = _LINE.fullmatch(text)
        length, weight = (int(found[1]), Fraction(found[2])) if found else (0, Fraction())
        if not text or (not weights and not problems and _HEADER.fullmatch(text)):
            continue
        if not length or not weight:
            reason = f"must be a length and its share, both positive, as 8192, 0.25, got {text[:40]!r}"
        elif length in weights:
            reason = f"must name each length once, got {length} again; add the shares up"
        else:
            weights[length] = weight
            continue
        problems.append(Problem(Place(name, number), "", reason))
    if not weights and not problems:
        problems.append(Problem(Place(name, 1), "", "must hold a length and its share, got none"))
    if problems:
        raise ConfigError(problems)
    total = sum(weights.values())
    return LengthMix(tuple((length, weight / total) for length, weight in sorted(weights.items())))
