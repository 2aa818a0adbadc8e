"""How byte-level tokenizers cut text into words, under the names that GGUF files give them.

Knows patterns; the words are merged into tokens elsewhere.
"""

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANK = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _BLANK
_QWEN2 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _BLANK
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+"
_UPPER_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_TEKKEN = rf"{_LOWER_WORD}|{_UPPER_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANK}"
_GPT4O = (
    rf"{_LOWER_WORD}{_CONTRACTION}?|{_UPPER_WORD}{_CONTRACTION}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANK}"
)
# DeepSeek's first tokenizers list their letters one by one. These are the cased letters that the list lacks.
_UNLISTED = (
    r"\u0560-\u0588\u10c7-\u10ff\u1c80-\u1c8f\u2d00-\u2d2d\ua790-\ua7fa\uab30-\uab68"
    r"\x{10570}-\x{105bc}\x{16e40}-\x{16e7f}\x{1d400}-\x{1d7cb}\x{1df00}-\x{1df2a}"
)
_CASED_LETTER = rf"[\p{{Lu}}\p{{Ll}}\p{{Lt}}&&[^{_UNLISTED}]]"
_DEEPSEEK_MARK = r"[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]"
_EAST_ASIAN = r"[\u0800-\u9fa5\uac00-\ud7ff]+"
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_BLANK}"
)


@dataclass(frozen=True)
class PreTokenizer:
    """One way to cut text into words, and what goes with it in the tokenizers that use it.

    Attributes:
        patterns: regular expressions; each in turn isolates its matches within the pieces so far.
        keeps_whole_words: a word that is a token is not rebuilt by merges.
        adds_bos: a file that says nothing wants BOS.
        is_composed: text is brought to Unicode form NFC first.
    """

    patterns: tuple[str, ...]
    keeps_whole_words: bool = False
    adds_bos: bool = False
    is_composed: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        """Build the cutter, its words spelled in the byte alphabet."""
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        spelling = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*splits, spelling])

    def build_normalizer(self) -> normalizers.Normalizer | None:
        """Build what runs before the cutter; None if nothing does."""
        return normalizers.NFC() if self.is_composed else None


_WORDS = PreTokenizer((_GPT2,))
_WORDS_AND_DIGITS = PreTokenizer((r"\p{N}", _GPT2))
_LLAMA3_WORDS = PreTokenizer((_LLAMA3,))
_QWEN2_WORDS = PreTokenizer((_QWEN2,), is_composed=True)
_LLAMA3_MODEL = PreTokenizer((_LLAMA3,), keeps_whole_words=True, adds_bos=True)

# By `tokenizer.ggml.pre`. "default" is what a file gets that names none.
PRE_TOKENIZERS = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": _WORDS,
    "phi-2": _WORDS,
    "mpt": _WORDS,
    "olmo": _WORDS,
    "smollm": _WORDS_AND_DIGITS,
    "starcoder": _WORDS_AND_DIGITS,
    "refact": _WORDS_AND_DIGITS,
    "command-r": _WORDS_AND_DIGITS,
    "exaone": _WORDS_AND_DIGITS,
    "llama-bpe": _LLAMA3_MODEL,
    "llama3": _LLAMA3_MODEL,
    "llama-v3": _LLAMA3_MODEL,
    "falcon3": _LLAMA3_MODEL,
    "dbrx": _LLAMA3_WORDS,
    "smaug-bpe": _LLAMA3_WORDS,
    "glm4": _LLAMA3_WORDS,
    "qwen2": _QWEN2_WORDS,
    "deepseek-r1-qwen": _QWEN2_WORDS,
    "megrez": _QWEN2_WORDS,
    "stablelm2": PreTokenizer((_QWEN2,)),
    "tekken": PreTokenizer((_TEKKEN,), keeps_whole_words=True, adds_bos=True),
    "gpt-4o": PreTokenizer((_GPT4O,)),
    "llama4": PreTokenizer((_GPT4O,)),
    "deepseek-llm": PreTokenizer(
        (r"[\r\n]", rf"\s?{_CASED_LETTER}+", rf"\s?{_DEEPSEEK_MARK}+", r"\s+$", _EAST_ASIAN, r"\p{N}")
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}")),
    "deepseek-v3": PreTokenizer((r"\p{N}{1,3}", r"[\u4e00-\u9fa5\u3040-\u30ff]+", _DEEPSEEK3)),
}
