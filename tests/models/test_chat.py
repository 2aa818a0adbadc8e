from datetime import datetime

import pytest

from jkv.models.chat import ChatTemplate


def test_blocks_leave_no_blank_lines():
    source = "{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}\n"
    assert ChatTemplate(source).render([{"content": "a"}, {"content": "b"}]) == "a\nb\n"


def test_a_template_sees_messages_tools_named_tokens_and_variables():
    source = (
        "{{ bos_token }}{{ messages[0].content }}{{ tools[0].name }}{{ add_generation_prompt }}{{ mood }}"
    )
    prompt = ChatTemplate(source, bos_token="<s>").render(
        [{"content": "hi"}], tools=[{"name": "f"}], add_generation_prompt=False, mood="!"
    )
    assert prompt == "<s>hifFalse!"


def test_json_keeps_html_and_letters_as_they_are():
    assert ChatTemplate("{{ messages | tojson }}").render([{"a": "<é&'>"}]) == """[{"a": "<é&'>"}]"""
    assert ChatTemplate("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}").render([]) == (
        '{\n "a": 2,\n "b": 1\n}'
    )


def test_loops_may_break_and_continue():
    source = (
        "{% for i in numbers %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}"
        "{{ i }}{% endfor %}"
    )
    assert ChatTemplate(source).render([], numbers=range(5)) == "02"


def test_the_generation_tag_renders_its_inside_in_a_scope():
    source = "{% set x = 1 %}{% generation %}{% set x = 2 %}[{{ x }}]{% endgeneration %}{{ x }}"
    assert ChatTemplate(source).render([]) == "[2]1"


def test_the_date_is_of_now_unless_given():
    template = ChatTemplate("{{ strftime_now('%Y') }}")
    assert template.render([]) == str(datetime.now().year)
    assert template.render([], strftime_now=lambda layout: "1970") == "1970"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ missing.field }}", "'missing' is undefined"),
        ("{{ 1 // 0 }}", "zero"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "recursion"),
        ("{{ messages.append(1) }}", "not safely callable|unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages[0].content | truncate(1) }}", "expected length"),
    ],
)
def test_what_a_template_raises_is_one_value_error(source, reason):
    with pytest.raises(ValueError, match=f"must accept these messages, but fails: .*({reason})"):
        ChatTemplate(source).render([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    "source",
    ["{% for %}", "{{ " + "(" * 5000 + ")" * 5000 + " }}", "{% for b in a %}" * 30 + "{% endfor %}" * 30],
)
def test_a_broken_template_is_refused(source):
    with pytest.raises(ValueError, match="must be Jinja, but does not compile"):
        ChatTemplate(source)
