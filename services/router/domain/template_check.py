"""The start-up check of a chat template, and what it reveals: where each role's messages end."""

import re
import secrets
from collections.abc import Mapping, Sequence

from services.router.domain.model import ModelRefusedError
from services.router.domain.request import Role
from services.router.domain.text_ports import ChatTemplate, TemplateError, TemplateMessage

__all__ = ["find_message_ends", "new_placeholder"]

_PROBE = (Role.SYSTEM, Role.USER, Role.ASSISTANT, Role.USER)


def new_placeholder() -> str:
    """128 random bits that stand for one client string while the template is rendered."""
    return secrets.token_hex(16)


def find_message_ends(template: ChatTemplate) -> Mapping[Role, str]:
    """Check the template, and return the template text that closes a message of each role.

    A role is absent when the text after a message depends on what follows; no snapshot then stands there.

    Raises:
        ModelRefusedError: the template fails, or alters, drops or repeats what stands in a message.
    """
    placeholders = [(new_placeholder(), new_placeholder()) for _ in _PROBE]
    messages = [TemplateMessage(role, "".join(pair)) for role, pair in zip(_PROBE, placeholders, strict=True)]
    for count in (2, len(_PROBE)):
        _check_placeholders(template, messages[:count], placeholders[:count])
    _check_placeholders(template, messages[1:2], placeholders[1:2])
    return _message_ends(template, messages, [last for _, last in placeholders])


def _check_placeholders(
    template: ChatTemplate, messages: Sequence[TemplateMessage], placeholders: Sequence[tuple[str, str]]
) -> None:
    roles = " + ".join(message.role for message in messages)
    try:
        rendered = template.render_prompt(messages)
    except TemplateError as error:
        raise ModelRefusedError(f"the chat template fails for {roles}: {error}") from error
    wanted = [name for pair in placeholders for name in pair]
    found = re.findall("|".join(wanted), rendered)
    if found != wanted:
        raise ModelRefusedError(f"the chat template alters, drops, repeats or reorders message content for {roles}")


def _message_ends(
    template: ChatTemplate, messages: Sequence[TemplateMessage], last_placeholders: Sequence[str]
) -> dict[Role, str]:
    whole = template.render_prompt(messages)
    ends: dict[Role, str] = {}
    unstable: set[Role] = set()
    for index, (message, placeholder) in enumerate(zip(messages, last_placeholders, strict=True)):
        history = _render_history(template, messages[: index + 1])
        if history is None:
            continue
        end = history.rpartition(placeholder)[2]
        if not end or not whole.startswith(history) or ends.setdefault(message.role, end) != end:
            unstable.add(message.role)
    stable = {role: end for role, end in ends.items() if role not in unstable}
    return _lend_user_end(stable, whole, messages, last_placeholders)


def _render_history(template: ChatTemplate, messages: Sequence[TemplateMessage]) -> str | None:
    try:
        return template.render_history(messages)
    except TemplateError:
        return None


def _lend_user_end(
    ends: dict[Role, str], whole: str, messages: Sequence[TemplateMessage], last_placeholders: Sequence[str]
) -> dict[Role, str]:
    """Templates that refuse a lone system message close it, as a rule, as they close the user's."""
    user_end = ends.get(Role.USER)
    if user_end is None:
        return ends
    following = {
        message.role: whole.partition(placeholder)[2]
        for message, placeholder in zip(messages, last_placeholders, strict=True)
    }
    return {role: user_end for role, text in following.items() if text.startswith(user_end)} | ends
