"""The tokenizer of a model: text to token ids, token ids to text, messages to token ids.

Knows one model's vocabulary and what its files ask for; knows no model.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from jkv.models.chat import ChatTemplate, Message
from jkv.models.control_tokens import ControlTokens, choose_mark
from jkv.models.folder_tokenizer import spec_from_folder
from jkv.models.gguf_tokenizer import spec_from_gguf
from jkv.models.tokenizer_spec import TokenizerSpec


class Tokenizer:
    """A model's tokenizer, offline.

    *Control tokens* (`<|im_end|>`) steer the model. Text that merely looks like one is text, unless the
    caller says that it is special.

        tokenizer = Tokenizer.from_gguf(gguf_metadata("model.gguf"))
        tokenizer.decode(tokenizer.encode("Hello"))  # "Hello"
    """

    def __init__(self, spec: TokenizerSpec):
        if spec.adds_bos and spec.bos_id is None:
            raise ValueError(
                "a tokenizer that begins texts with BOS must name the BOS token, but its files do not"
            )
        self._spec = spec
        self._control = ControlTokens(spec.control_tokens)
        self._ids = {text: token_id for token_id, text in enumerate(spec.texts) if text is not None}

    @classmethod
    def from_folder(cls, path: str | Path) -> "Tokenizer":
        """Read a model's folder in Hugging Face's layout; it must have a tokenizer.json."""
        return cls(spec_from_folder(path))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        """Rebuild the tokenizer that a GGUF file's metadata describes (see `gguf_metadata`)."""
        return cls(spec_from_gguf(metadata))

    @property
    def vocab_size(self) -> int:
        """One more than the highest id."""
        return len(self._spec.texts)

    @property
    def bos_id(self) -> int | None:
        """The token that begins a text; None if there is none."""
        return self._spec.bos_id

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The tokens that end a generation, the end of a text first."""
        return self._spec.eos_ids

    @property
    def adds_bos(self) -> bool:
        """Whether the model wants a text to begin with BOS."""
        return self._spec.adds_bos

    @property
    def strips_first_space(self) -> bool:
        """Whether `decode` drops one space at the beginning, the one that `encode` put there."""
        return self._spec.strips_first_space

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The model's chat template; a ValueError if it has none or an invalid one."""
        if self._spec.chat_template is None:
            raise ValueError(
                "a chat needs a model with a chat template, but its files have none; encode text instead"
            )
        return ChatTemplate(self._spec.chat_template, **self._spec.named_tokens)

    def is_special(self, token_id: int) -> bool:
        """Whether the id is a control token, which `decode` hides."""
        return token_id in self._spec.control_tokens

    def has_token(self, token_id: int) -> bool:
        """Whether the id is a token's; a model's logits may be of more ids."""
        return self._spec.has_token(token_id)

    def token_text(self, token_id: int) -> str:
        """The token as the model's files spell it; a ValueError for an id outside the vocabulary."""
        return self._spec.text(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to a text; a ValueError for an id outside the vocabulary."""
        return self._spec.token_bytes(token_id)

    def token_id(self, text: str) -> int:
        """The id of the token that the model's files spell so; a ValueError if there is none."""
        if text not in self._ids:
            raise ValueError(f"a token must be one of the vocabulary, got {text!r}")
        return self._ids[text]

    def encode(self, text: str, *, special: bool = False, add_bos: bool | None = None) -> list[int]:
        """Turn text into token ids; EOS never ends them, whatever the files say, since the text is to go on.

        Args:
            text: Unicode text; lone surrogates, and bytes that the vocabulary lacks, are a ValueError.
            special: text that spells a control token is that token.
            add_bos: begin with BOS, if the text does not already; None is what the model wants.
        """
        parts = self._control.split(text) if special else [text]
        return self._begin(self._encode_parts(parts), add_bos)

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        special_content: bool = False,
        add_bos: bool | None = None,
        **variables: Any,
    ) -> list[int]:
        """Turn messages into the token ids of a prompt, by the model's chat template.

        Args:
            messages: what was said; see `ChatTemplate.render`, also for the other arguments.
            add_generation_prompt: end where the model's reply begins.
            tools: JSON schemas of the functions that the model may call.
            special_content: control tokens in messages, tools and variables are parsed; otherwise only the
                template's own are, and such text stays text.
            add_bos: begin with BOS, if the template does not already; None is what the model wants.
            **variables: whatever else the template reads.
        """
        values = {"messages": messages, "tools": tools, **variables}
        mark = choose_mark(values, self.chat_template.source)
        if not special_content:
            values = {name: self._control.cover(value, mark) for name, value in values.items()}
        prompt = self.chat_template.render(add_generation_prompt=add_generation_prompt, **values)
        parts = [
            part.replace(mark, "") if isinstance(part, str) else part for part in self._control.split(prompt)
        ]
        return self._begin(self._encode_parts(parts), add_bos)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Turn token ids into text; bytes that are no UTF-8 become U+FFFD.

        Args:
            ids: token ids; one outside the vocabulary is a ValueError.
            skip_special: control tokens give no text.
        """
        shown = (token_id for token_id in ids if not (skip_special and self.is_special(token_id)))
        text = b"".join(map(self.token_bytes, shown)).decode(errors="replace")
        return text.removeprefix(" ") if self.strips_first_space else text

    def _encode_parts(self, parts: Sequence[int | str]) -> list[int]:
        ids: list[int] = []
        for index, part in enumerate(parts):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += self._encode_plain(part, is_first=index == 0)
        return ids

    def _encode_plain(self, text: str, *, is_first: bool) -> list[int]:
        self._check(text)
        encoder = self._spec.encoder if is_first else self._spec.rest_encoder
        return encoder.encode(text, add_special_tokens=False).ids

    def _check(self, text: str) -> None:
        try:
            lost = self._spec.unencodable_bytes.intersection(text.encode())
        except UnicodeEncodeError as error:
            raise ValueError(f"text must be Unicode, got a lone surrogate at {error.start}") from error
        if lost:
            raise ValueError(f"text must be of bytes that the vocabulary has, got {bytes(sorted(lost))!r}")

    def _begin(self, ids: list[int], add_bos: bool | None) -> list[int]:
        wants_bos = self.adds_bos if add_bos is None else add_bos
        if not wants_bos or ids[:1] == [self.bos_id]:
            return ids
        if self.bos_id is None:
            raise ValueError("add_bos needs a vocabulary with a BOS token, but this one has none")
        return [self.bos_id, *ids]
