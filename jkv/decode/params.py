"""What a request asks of the sampler, and what it may ask.

Knows no JAX: the host holds these, and `jkv.decode.sampling` turns them into arrays.
"""

import math
from dataclasses import dataclass


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
        """Raise ValueError for the first value that no sampler over `vocab_size` tokens can honour."""
        _require(0 <= self.temperature < math.inf, "temperature", "at least 0 and finite", self.temperature)
        _require(self.top_k >= 0, "top_k", "at least 0", self.top_k, hint="use 0 to keep all tokens")
        _require(
            0 < self.top_p <= 1, "top_p", "above 0 and at most 1", self.top_p, hint="use 1 to keep all tokens"
        )
        _require(0 <= self.min_p <= 1, "min_p", "from 0 to 1", self.min_p, hint="use 0 to keep all tokens")
        _require(
            0 < self.repetition_penalty < math.inf,
            "repetition_penalty",
            "above 0 and finite",
            self.repetition_penalty,
            hint="use 1 for none",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(math.isfinite(value), name, "finite", value, hint="use 0 for none")
        self._check_bias(vocab_size)
        _require(
            self.seed is None or -(2**63) <= self.seed < 2**63, "seed", "a signed 64-bit integer", self.seed
        )
        _require(
            0 <= self.num_logprobs <= vocab_size,
            "num_logprobs",
            f"from 0 to the vocabulary's {vocab_size}",
            self.num_logprobs,
        )

    def _check_bias(self, vocab_size: int) -> None:
        ids = [token_id for token_id, _ in self.logit_bias]
        _require(len(set(ids)) == len(ids), "logit_bias", "given once for each token", ids)
        for token_id, bias in self.logit_bias:
            _require(
                0 <= token_id < vocab_size,
                "a token id in logit_bias",
                f"at least 0 and below the vocabulary's {vocab_size}",
                token_id,
            )
            _require(
                bias < math.inf,
                "a bias in logit_bias",
                "below infinity",
                bias,
                hint="use -inf to ban a token",
            )


def _require(
    holds: bool, name: str, rule: str, value: object, *, hint: str = "change it or leave it out"
) -> None:
    if not holds:
        raise ValueError(f"{name} must be {rule}, got {value}; {hint}")
