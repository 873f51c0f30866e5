"""The error tree of the router; `adapters/http_errors.py` maps it once to OpenAI's envelope.

RouterError
├── PromptError        the client must change the request
├── TemplateError      the chat template refuses a sequence of messages
├── ModelRefusedError  the model's template or tokenizer cannot keep client text apart from control tokens
├── HttpError          an error as the client sees it
└── ClientGoneError    the client closed the connection before it had its reply

Each is defined beside what raises it.
"""

__all__ = ["RouterError"]


class RouterError(Exception):
    """The root of the router's errors."""
