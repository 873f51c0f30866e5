"""The error tree of the router; `adapters/http_errors.py` maps it once to OpenAI's envelope.

RouterError
├── PromptError        the client must change the request
├── TemplateError      the chat template refuses a sequence of messages
├── ModelRefusedError  the model's template or tokenizer cannot keep client text apart from control tokens
├── DirectoryLostError the cache service does not answer a call about documents
├── DocumentNotFoundError  nothing is known of a document
├── PinRefusedError    pins would keep more than they may
├── TooBusyError       a tenant, or everybody, asks for more than is let in
├── KeyFileError       the file of API keys cannot be read
├── HttpError          an error as the client sees it
└── ClientGoneError    the client closed the connection before it had its reply

Each is defined beside what raises it.
"""

__all__ = ["RouterError"]


class RouterError(Exception):
    """The root of the router's errors."""
