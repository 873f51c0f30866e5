"""What the start-up check refuses, and where messages end."""

import json
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from services.router.adapters.template import JinjaChatTemplate
from services.router.adapters.tokenizer import TwoWayTokenizer
from services.router.domain.model import ModelRefusedError
from services.router.domain.request import Role
from services.router.domain.template_check import find_message_ends
from services.router.domain.text_ports import TemplateError, TemplateMessage
from tests.stub_worker import CHATML, SPECIAL_TOKENS, train_tokenizer

LOOP = "{% for message in messages %}"


@pytest.mark.parametrize(
    "source",
    [
        "",
        "{% if %}",
        "static text",
        LOOP + "{{ message.content | upper }}{% endfor %}",
        LOOP + "{{ message.content[:8] }}{% endfor %}",
        LOOP + "{{ message.content }}{{ message.content }}{% endfor %}",
        "{{ messages[-1].content }}",
        "{% for message in messages | reverse %}{{ message.content }}{% endfor %}",
        LOOP
        + "{% if message.role == 'assistant' %}{{ raise_exception('no') }}{% endif %}{{ message.content }}{% endfor %}",
        LOOP + "{{ message.content.__class__.__mro__ }}{% endfor %}",
    ],
)
def test_refused_templates(source: str) -> None:
    with pytest.raises(ModelRefusedError):
        find_message_ends(JinjaChatTemplate(source, "", ""))


def test_message_ends_of_chatml() -> None:
    ends = find_message_ends(JinjaChatTemplate(CHATML, "", ""))
    assert ends == dict.fromkeys(set(Role) - {Role.TOOL}, "<|im_end|>\n")


def test_a_template_that_refuses_a_lone_system_message_still_ends_it() -> None:
    picky = "{% if messages | length == 1 and messages[0].role == 'system' %}{{ raise_exception('x') }}{% endif %}"
    ends = find_message_ends(JinjaChatTemplate(picky + CHATML, "", ""))
    assert ends[Role.SYSTEM] == "<|im_end|>\n"


def test_a_role_whose_end_depends_on_what_follows_has_none() -> None:
    source = LOOP + "[{{ message.content }}{% if loop.last %}!{% endif %}]{% endfor %}"
    assert find_message_ends(JinjaChatTemplate(source, "", "")) == {}


def test_template_helpers_and_sandbox() -> None:
    message = TemplateMessage(Role.USER, "x")
    rendered = JinjaChatTemplate("{{ strftime_now('%Y') | length }}{{ messages | tojson }}", "", "")
    assert rendered.render_history([message]) == '4[{"role": "user", "content": "x"}]'
    for escape in ("{{ messages.append(1) }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}"):
        with pytest.raises(TemplateError):
            JinjaChatTemplate(escape, "", "").render_history([message])


def tokenizer_json(**changes: Any) -> bytes:  # noqa: ANN401 # any JSON value
    return json.dumps(json.loads(train_tokenizer().to_str()) | changes).encode()


def test_special_tokens_come_from_template_text_only() -> None:
    tokenizer = TwoWayTokenizer(tokenizer_json())
    for index, token in enumerate(SPECIAL_TOKENS):
        assert tokenizer.encode_template(token) == (index,)
        assert not set(tokenizer.encode_plain(f"{token} a{token}")) & set(range(len(SPECIAL_TOKENS)))


def test_a_tokenizer_whose_plain_text_makes_special_tokens_is_refused() -> None:
    words = {"<unk>": 0, "<|end|>": 1}
    forgeable = Tokenizer(models.WordLevel(words, "<unk>"))
    forgeable.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    forgeable.add_special_tokens([AddedToken("<|end|>", special=True)])
    with pytest.raises(ModelRefusedError, match="spells"):
        TwoWayTokenizer(forgeable.to_str().encode())
    with pytest.raises(ModelRefusedError):
        TwoWayTokenizer(b"{}")


def test_truncation_and_padding_of_the_file_do_not_apply() -> None:
    cutting = train_tokenizer()
    cutting.enable_truncation(3)
    cutting.enable_padding(length=50)
    tokenizer = TwoWayTokenizer(cutting.to_str().encode())
    assert len(tokenizer.encode_plain("x y z " * 5)) == 30
    assert len(tokenizer.encode_template("x y z " * 5)) == 30


def test_fewest_tokens_is_a_lower_bound() -> None:
    tokenizer = TwoWayTokenizer(tokenizer_json())
    for text in ("the answer is in the document " * 20, "漢字" * 50, "x"):
        assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode_plain(text))


def test_normalizers_of_the_file_stay() -> None:
    lowering = train_tokenizer()
    lowering.normalizer = normalizers.Lowercase()
    tokenizer = TwoWayTokenizer(lowering.to_str().encode())
    assert tokenizer.encode_plain("CITY") == tokenizer.encode_plain("city")
