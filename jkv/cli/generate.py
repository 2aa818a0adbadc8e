"""`jkv generate`: continues prompts or answers a chat message.

Knows prompts and terminals; jkv.decode.text does the work.
"""

import itertools
import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jkv.cli.fits import check_tokens
from jkv.cli.options import (
    Flag,
    HostOptions,
    RandomOptions,
    find_tokenizer,
    meet,
    parse,
    read_text,
    resolve,
    show_progress,
)
from jkv.config import DecodeConfig
from jkv.decode.configured import (
    configured_model,
    configured_spec,
    end_ids,
    load_configured,
    make_decoding,
    make_sampling,
)
from jkv.decode.generate import check_stop_ids
from jkv.decode.params import SamplingParams
from jkv.decode.text import TextGeneration, TextStream, check_stop_strings
from jkv.models.load import LanguageModel, load_tokenizer
from jkv.models.tokenizer import Tokenizer
from jkv.models.weights.locate import resolve_model

_KEYS = {
    "max_new_tokens": "engine.sampling.max-new-tokens",
    "seed": "engine.seed",
    **{
        name: f"engine.sampling.{name.replace('_', '-')}"
        for name in (
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        )
    },
}


@dataclass(frozen=True, kw_only=True)
class Arguments(RandomOptions, HostOptions):
    """Continue prompts, or answer a chat message, as tokens come."""

    prompt: tuple[str, ...] = ()
    """Texts to continue."""
    prompts: Path | None = None
    """File with one text to continue a line; empty lines are skipped."""
    chat: str | None = None
    """Message to answer, by the model's chat template."""
    prompt_tokens: tuple[str, ...] = ()
    """Prompts of token ids, each as 1,2,3."""
    system: str | None = None
    """System message before --chat."""
    special: Flag = False
    """Prompt text that spells a control token is that token."""
    max_new_tokens: int | None = None
    """New tokens at most."""
    ignore_eos: Flag = False
    """Do not end at the model's own end tokens."""
    stop: tuple[str, ...] = ()
    """Texts that end the output, and are left out of it; the first to be complete wins."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the output, beside the model's own."""
    temperature: float | None = None
    """Divides the logits; 0 takes the likeliest token."""
    top_k: int | None = None
    """Likeliest tokens kept; 0 keeps all."""
    top_p: float | None = None
    """Probability kept, likeliest tokens first; 1 keeps all."""
    min_p: float | None = None
    """Least probability kept, as a share of the likeliest token's; 0 keeps all."""
    repetition_penalty: float | None = None
    """Divides positive and multiplies negative logits of tokens seen; 1 is none."""
    presence_penalty: float | None = None
    """Subtracted from the logits of tokens generated."""
    frequency_penalty: float | None = None
    """Subtracted from a logit for each time its token was generated."""
    logit_bias: tuple[str, ...] = ()
    """Added to a token's logit, each as ID=VALUE; -inf bans the token."""
    seed: int | None = None
    """Start of every random choice."""
    logprobs: int | None = None
    """With --json, each token's log-probability, and those of so many of the likeliest."""
    json: Flag = False
    """Print one JSON object a prompt."""


def run(argv: Sequence[str]) -> None:
    """Generate as the command line says, and print text as it comes, or JSON."""
    arguments, overrides = parse(Arguments, argv, "generate")
    meet(arguments)
    _check_source(arguments)
    config = resolve(arguments, overrides, _KEYS)
    sampling = _sampling(arguments, config)
    tokenizer = _tokenizer(arguments, config)
    texts, prompts = read_prompts(arguments, tokenizer)
    sizes = configured_model(config)
    sampling.check(sizes.vocab_size)
    check_stop_ids(arguments.stop_token_ids, sizes.vocab_size)
    check_stop_strings(arguments.stop, tokenizer)
    check_tokens(
        config,
        sizes,
        prompts,
        config.engine.sampling.max_new_tokens,
        remedy=" with the new ones; shorten the prompt or lower --max-new-tokens",
        max_rows=config.engine.max_sequences,
    )
    with show_progress(f"loading {config.model.path}"):
        model = load_configured(config)
    began = time.perf_counter()
    for start in range(0, len(prompts), config.engine.max_sequences):
        turn = range(len(prompts))[start : start + config.engine.max_sequences]
        waited = time.perf_counter() - began
        with show_progress("reading prompts, compiling where they are the first of their size"):
            own = [prompts[index] for index in turn]
            stream = stream_text(arguments, config, model, tokenizer, own, sampling, first_request=start)
            steps = iter(stream)
            latest = next(steps)
        display = _Display(texts, turn, is_silent=arguments.json or tokenizer is None)
        for step in itertools.chain([latest], steps):
            display.step(step.pieces, step.finish_reasons)
        generations = stream.generations()
        if arguments.json:
            pages = stream.pages and [{"peak": peak, "pool": pool} for peak, pool in stream.pages]
            common = {
                "pages": pages,
                "pool_layout": configured_spec(config, sizes).layout,
                "random_weights": config.model.has_random_weights,
            }
            for index, generation, size in zip(turn, generations, stream.cache_bytes, strict=True):
                row = (texts[index], prompts[index], generation, size)
                print(json.dumps(describe(*row, arguments.logprobs, waited=waited) | common), flush=True)
        elif tokenizer is None:
            for generation in generations:
                print(",".join(map(str, generation.tokens)), flush=True)
        # Its cache makes room for that of the next turn.
        del stream, steps


def _tokenizer(arguments: Arguments, config: DecodeConfig) -> Tokenizer | None:
    """Return the model's tokenizer, which prompts of token ids can do without."""
    if config.model.has_random_weights:
        if not arguments.prompt_tokens:
            raise ValueError("random weights have no tokenizer; give --prompt-tokens, as 1,2,3")
        print(f"weights: random, of the sizes of {config.model.path}", file=sys.stderr)
        return None
    location = resolve_model(config.model.path)
    return find_tokenizer(location) if arguments.prompt_tokens else load_tokenizer(location)


def read_prompts(
    arguments: Arguments, tokenizer: Tokenizer | None
) -> tuple[list[str | None], list[list[int]]]:
    """Return the texts of the prompts, None where ids were given, and their token ids.

    Raises:
        ValueError: a text cannot be encoded, or an id is no number.
    """
    if tokenizer is None or arguments.prompt_tokens:
        prompts = [_ids(text) for text in arguments.prompt_tokens]
        return [None] * len(prompts), prompts
    if arguments.chat is not None:
        system = [] if arguments.system is None else [{"role": "system", "content": arguments.system}]
        messages = [*system, {"role": "user", "content": arguments.chat}]
        return [arguments.chat], [tokenizer.encode_chat(messages, special_content=arguments.special)]
    texts = list(arguments.prompt)
    if arguments.prompts is not None:
        texts = [line for line in read_text(arguments.prompts).split("\n") if line]
        if not texts:
            raise ValueError(f"{arguments.prompts} must hold a prompt a line, got none")
    return list(texts), [tokenizer.encode(text, special=arguments.special) for text in texts]


def stream_text(
    arguments: Arguments,
    config: DecodeConfig,
    model: LanguageModel,
    tokenizer: Tokenizer | None,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    *,
    first_request: int = 0,
) -> TextStream:
    """Read the prompts into the cache and return the stream of their continuations; see `TextStream`.

    Raises:
        ValueError: a stop token is unknown, or there are stop strings and no tokenizer.
    """
    model_ends = () if arguments.ignore_eos else end_ids(model, tokenizer)
    return TextStream(
        make_decoding(config, model, stop_ids=(*model_ends, *arguments.stop_token_ids)),
        tokenizer,
        prompts,
        max_new_tokens=config.engine.sampling.max_new_tokens,
        sampling=sampling,
        stop_strings=arguments.stop,
        seed=config.engine.seed,
        first_request=first_request,
    )


def describe(
    text: str | None,
    prompt: Sequence[int],
    generation: TextGeneration,
    cache_bytes: int,
    logprobs: int | None,
    *,
    waited: float = 0.0,
) -> dict[str, Any]:
    """Return what `--json` prints of one prompt.

    Args:
        text: the prompt; None where it was ids.
        prompt: its token ids.
        generation: its continuation.
        cache_bytes: bytes of its pages.
        logprobs: likeliest tokens listed for each place; None leaves log-probabilities out.
        waited: seconds that the prompt waited for its turn.
    """
    first, *rest = (1e3 * second for second in generation.seconds)
    p50, p95 = np.percentile(rest, [50, 95]).tolist() if rest else (None, None)
    described = {
        "prompt": text,
        "prompt_tokens": list(prompt),
        "text": generation.text,
        "tokens": list(generation.tokens),
        "finish_reason": generation.finish_reason,
        "num_prompt_tokens": len(prompt),
        "num_new_tokens": len(generation.tokens),
        "ttft_ms": 1e3 * waited + first,
        "itl_ms": {"p50": p50, "p95": p95},
        "tokens_per_second": 1e3 * len(rest) / sum(rest) if rest else None,
        "cache_bytes": cache_bytes,
    }
    if logprobs is not None:
        described["logprobs"] = _describe_logprobs(generation)
    return described


class _Display:
    """Writes text to the terminal as it comes: one sequence's at once, several each when it ends."""

    def __init__(self, texts: Sequence[str | None], turn: range, *, is_silent: bool):
        """Show the prompts of a turn among all texts."""
        self._texts = texts
        self._turn = turn
        self._is_silent = is_silent
        self._waiting: dict[int, list[str]] = {index: [] for index in turn}

    def step(self, pieces: Sequence[str], finish_reasons: Sequence[str | None]) -> None:
        """Show what one step brought."""
        if self._is_silent:
            return
        if len(self._texts) == 1:
            print(pieces[0], end="" if finish_reasons[0] is None else "\n", flush=True)
            return
        for index, piece, reason in zip(self._turn, pieces, finish_reasons, strict=True):
            if index not in self._waiting:
                continue
            self._waiting[index].append(piece)
            if reason is not None:
                text = "".join(self._waiting.pop(index))
                header = "" if self._texts[index] is None else f": {self._texts[index]}"
                print(f"[{index}]{header}\n{text}\n", flush=True)


def _check_source(arguments: Arguments) -> None:
    sources = {
        "--prompt": arguments.prompt,
        "--prompts": arguments.prompts,
        "--chat": arguments.chat is not None,
        "--prompt-tokens": arguments.prompt_tokens,
    }
    given = [flag for flag, value in sources.items() if value]
    if len(given) != 1:
        raise ValueError(
            f"exactly one of {', '.join(sources)} must be given, got {' and '.join(given) or 'none'}"
        )
    if arguments.special and arguments.prompt_tokens:
        raise ValueError("--special reads text; give --prompt, --prompts or --chat, or drop it")
    if arguments.logprobs is not None and not arguments.json:
        raise ValueError("--logprobs is printed by --json alone; give --json, or drop it")
    if arguments.system is not None and arguments.chat is None:
        raise ValueError("--system goes before a chat message; give --chat, or drop it")


def _sampling(arguments: Arguments, config: DecodeConfig) -> SamplingParams:
    bias = tuple(map(_bias, arguments.logit_bias))
    return replace(make_sampling(config), logit_bias=bias, num_logprobs=arguments.logprobs or 0)


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        (token_id,) = _ids(token)
        return token_id, float(value)
    except ValueError:
        raise ValueError(f"--logit-bias must be ID=VALUE, as 42=-1.5, got {text!r}") from None


def _ids(text: str) -> list[int]:
    # int() alone would read 1_0 as 10.
    if not re.fullmatch(r"(-?\d+ *(, *-?\d+ *)*)?", text, re.ASCII):
        raise ValueError(f"--prompt-tokens must be numbers with commas, as 1,2,3, got {text!r}")
    return [int(part) for part in text.split(",")] if text else []


def _describe_logprobs(generation: TextGeneration) -> list[dict[str, Any]]:
    places = zip(generation.tokens, generation.logprobs, generation.top_logprobs, strict=True)
    return [
        {
            "token": token,
            "logprob": logprob,
            "top": [{"token": other, "logprob": value} for other, value in top],
        }
        for token, logprob, top in places
    ]
