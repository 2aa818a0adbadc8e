from jkv.models.pretokenizers import PRE_TOKENIZERS


def cut(name, text):
    """The words that `text` is cut into, ASCII only: the byte alphabet spells a space Ġ and a newline Ċ."""
    words = PRE_TOKENIZERS[name].build().pre_tokenize_str(text)
    return [word.replace("Ġ", " ").replace("Ċ", "\n") for word, _ in words]


def test_gpt2_words_keep_their_leading_space():
    assert cut("gpt-2", "It's 1234   x.") == ["It", "'s", " 1234", "  ", " x", "."]


def test_smollm_cuts_numbers_into_digits():
    assert cut("smollm", "It's 12 x") == ["It", "'s", " ", "1", "2", " x"]


def test_llama3_cuts_numbers_in_threes_and_ignores_case():
    assert cut("llama-bpe", "WE'RE 12345.\n\n x") == ["WE", "'RE", " ", "123", "45", ".\n\n", " x"]


def test_qwen2_cuts_numbers_into_digits():
    assert cut("qwen2", "ab 123") == ["ab", " ", "1", "2", "3"]


def test_tekken_and_gpt4o_cut_words_where_lower_case_ends():
    assert cut("tekken", "camelCaseHTTP it's") == ["camel", "Case", "HTTP", " it", "'s"]
    assert cut("gpt-4o", "camelCaseHTTP it's") == ["camel", "Case", "HTTP", " it's"]


def test_deepseek_cuts_at_marks_and_newlines():
    assert cut("deepseek-llm", "a, b\n\nc12") == ["a", ",", " b", "\n", "\n", "c", "1", "2"]
    assert cut("deepseek-coder", "a, b\nc12") == ["a", ",", " b", "\n", "c", "1", "2"]
    assert cut("deepseek-v3", "f(.x) 1234") == ["f", "(.", "x", ")", " ", "123", "4"]


def test_default_cuts_long_numbers_in_threes():
    assert cut("default", "a 1234!b") == ["a", " ", "123", "4", "!", "b"]


def test_no_pre_tokenizer_loses_text():
    text = " It's \t\n\n  1234,5 x.y!\n"
    for name in PRE_TOKENIZERS:
        assert "".join(cut(name, text)).replace("ĉ", "\t") == text, name
