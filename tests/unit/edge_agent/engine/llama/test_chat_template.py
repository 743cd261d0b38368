import pytest

from edge_agent.engine.base import Message
from edge_agent.engine.llama.chat_template import ChatTemplate, TemplateError

CHATML = """{% for message in messages %}
{{ bos_token + message['role'] + '\\n' + message['content'] + eos_token }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<assistant>' }}
{% endif %}"""


def test_a_chat_is_rendered_up_to_where_the_answer_begins() -> None:
    template = ChatTemplate(CHATML, "<s>", "</s>")
    rendered = template.render([Message("system", "Be brief."), Message("user", "1 < 2 & 3?")])
    assert rendered == "<s>system\nBe brief.</s>\n<s>user\n1 < 2 & 3?</s>\n<assistant>\n"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{% for m in messages %}{{ m.content }}", "does not compile"),
        ("{% generation_of_tomorrow %}", "does not compile"),
        ("{{ messages[0].content | no_such_filter }}", "does not compile"),
        ("{{ undefined_function() }}", "refuses"),
        ("{{ 1 / 0 }}", "faulty: ZeroDivisionError"),
        ("always the same", "leaves out"),
    ],
)
def test_a_template_that_cannot_be_used_says_why(source: str, why: str) -> None:
    """P6."""
    with pytest.raises(TemplateError, match=why):
        ChatTemplate(source, "", "")


def test_a_template_may_refuse_a_chat() -> None:
    source = (
        "{% for m in messages %}"
        "{% if m.role == 'system' %}{{ raise_exception('No system turns') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    template = ChatTemplate(source, "", "")
    assert template.render([Message("user", "Hi")]) == "Hi"
    with pytest.raises(TemplateError, match="No system turns"):
        template.render([Message("system", "x")])


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append({'role': 'user', 'content': 'more'}) }}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_a_template_cannot_reach_out_of_its_sandbox(attack: str) -> None:
    with pytest.raises(TemplateError):
        ChatTemplate(attack + "{% for m in messages %}{{ m.content }}{% endfor %}", "", "")


def test_templates_may_use_what_the_usual_ones_use() -> None:
    source = (
        "{%- set ns = namespace(n=0) -%}"
        "{% for m in messages %}{% if loop.index0 > 9 %}{% break %}{% endif %}"
        "{% set ns.n = ns.n + 1 %}{{ m | tojson }}{% endfor %}"
        "{{ ns.n }} {{ strftime_now('%Y') | length }}"
    )
    template = ChatTemplate(source, "", "")
    assert template.render([Message("user", "é")]) == '{"role": "user", "content": "é"}1 4'
