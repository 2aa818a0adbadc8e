"""What a request asks of the sampler, and what it may ask.

Knows no JAX: the host holds these, and `jkv.decode.sampling` turns them into arrays.
"""

import math
import reprlib
from dataclasses import dataclass
from numbers import Integral, Real

# Bounds of what changes logits. In float32 a reciprocal then stays finite, and so does a finite logit to
# which LARGEST is added 2**31 times: that is less than half the spacing of the largest numbers.
LEAST, LARGEST = 1e-20, 1e20

_REALS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_KEEP_ALL = "use 0 to keep all tokens"


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen; the defaults take the likeliest token.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest token, the lowest id among equals.
        top_k: likeliest tokens kept; 0 keeps all, as does a number past the vocabulary.
        top_p: probability kept, likeliest tokens first, of what top_k leaves; 1 keeps all.
        min_p: least probability kept, as a share of the likeliest token's; 0 keeps all.
        repetition_penalty: divides positive and multiplies negative logits of tokens in the prompt or the
            output (Keskar et al. 2019, section 4.1); 1 is none.
        presence_penalty: subtracted from the logits of tokens in the output.
        frequency_penalty: subtracted from a logit for each time its token is in the output.
        logit_bias: (token id, bias) pairs, added to the logits; a bias of -inf bans the token.
        seed: of the request's own random stream; None draws one from the base seed and the request's index.
        num_logprobs: likeliest tokens whose log-probabilities are returned beside the chosen token's.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    num_logprobs: int = 0

    @property
    def has_penalties(self) -> bool:
        """Whether the request's earlier tokens change its logits."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    def check(self, vocab_size: int) -> None:
        """Raise ValueError for the first value that no sampler over `vocab_size` tokens can honour.

        What passes keeps finite logits finite in float32.
        """
        for name in _REALS:
            _require(isinstance(getattr(self, name), Real), name, "a number", getattr(self, name))
        scale, added = f"from {LEAST:g} to {LARGEST:g}", f"from {-LARGEST:g} to {LARGEST:g}"
        is_scale = self.temperature == 0 or LEAST <= self.temperature <= LARGEST
        _require(is_scale, "temperature", f"0 or {scale}", self.temperature)
        require_whole("top_k", self.top_k, at_least=0, hint=_KEEP_ALL)
        _require(
            0 < self.top_p <= 1, "top_p", "above 0 and at most 1", self.top_p, hint="use 1 to keep all tokens"
        )
        is_share = self.min_p == 0 or LEAST <= self.min_p <= 1
        _require(is_share, "min_p", f"0 or from {LEAST:g} to 1", self.min_p, hint=_KEEP_ALL)
        is_scale = LEAST <= self.repetition_penalty <= LARGEST
        _require(is_scale, "repetition_penalty", scale, self.repetition_penalty, hint="use 1 for none")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(abs(value) <= LARGEST, name, added, value, hint="use 0 for none")
        self._check_bias(vocab_size, added)
        if self.seed is not None:
            require_whole("seed", self.seed, at_least=-(2**63), at_most=2**63 - 1)
        require_whole("num_logprobs", self.num_logprobs, at_least=0, at_most=vocab_size)

    def _check_bias(self, vocab_size: int, added: str) -> None:
        try:
            pairs = [(token_id, bias) for token_id, bias in self.logit_bias]
        except (TypeError, ValueError):
            raise ValueError(
                f"logit_bias must be (token id, bias) pairs, got {reprlib.repr(self.logit_bias)}; "
                "write ((42, -1.5),) for one"
            ) from None
        name, hint = "a bias in logit_bias", "use -inf to ban a token"
        for token_id, bias in pairs:
            require_whole("a token id in logit_bias", token_id, at_least=0, at_most=vocab_size - 1)
            is_added = isinstance(bias, Real) and (bias == -math.inf or abs(bias) <= LARGEST)
            _require(is_added, name, f"-inf or {added}", bias, hint=hint)
        ids = [token_id for token_id, _ in pairs]
        _require(len(set(ids)) == len(ids), "logit_bias", "given once for each token", ids)
        if sum(bias == -math.inf for _, bias in pairs) == vocab_size:
            raise ValueError(
                f"logit_bias must leave a token to choose, got -inf for all {vocab_size} of the vocabulary; "
                "ban fewer"
            )


def require_whole(
    name: str,
    value: int,
    *,
    at_least: int,
    at_most: int | None = None,
    unit: str = "",
    hint: str = "change it or leave it out",
) -> int:
    """Return an integer, Python's or NumPy's, as Python's; raise ValueError unless it is in bounds."""
    _require(isinstance(value, Integral), name, "a whole number", value, hint=hint)
    if at_most is None:
        _require(at_least <= value, name, f"at least {at_least}{unit}", value, hint=hint)
    else:
        _require(at_least <= value <= at_most, name, f"from {at_least} to {at_most}{unit}", value, hint=hint)
    return int(value)


def _require(
    holds: bool, name: str, rule: str, value: object, *, hint: str = "change it or leave it out"
) -> None:
    if not holds:
        raise ValueError(f"{name} must be {rule}, got {reprlib.repr(value)}; {hint}")
