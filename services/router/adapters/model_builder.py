"""From a worker's description to what the router speaks for its model with."""

import time

from services.router.adapters.clients import Description
from services.router.adapters.template import JinjaChatTemplate
from services.router.adapters.tokenizer import TwoWayTokenizer
from services.router.domain.assembly import Assembler
from services.router.domain.known_parts import KnownParts
from services.router.domain.template_check import find_message_ends
from services.router.served_model import ServedModel

__all__ = ["build_model"]


def build_model(description: Description, memo_bytes: int) -> ServedModel:
    """Everything that the router needs to speak for the described model.

    Raises:
        ModelRefusedError: its template or tokenizer fails the start-up check.
    """
    info = description.info
    tokenizer = TwoWayTokenizer(description.tokenizer_json)
    template = JinjaChatTemplate(info.chat_template, info.bos_token, info.eos_token)
    ends = find_message_ends(template)
    assembler = Assembler(tokenizer, template, ends, info.profile, info.context_length, KnownParts(memo_bytes))
    return ServedModel(info, assembler, tokenizer.new_detokenizer, int(time.time()))
