"""What can be checked of a request once its model is known."""

from services.router.domain.request import PromptError, Sampling

__all__ = ["check_sampling", "grammar_fault"]

# As the worker begins such a refusal.
_GRAMMAR = "grammar: "


def check_sampling(sampling: Sampling, max_tokens: int, vocab_size: int) -> None:
    """Token ids are the model's, and the least length of the reply is within its greatest.

    Raises:
        PromptError: names the field.
    """
    if sampling.min_tokens > max_tokens:
        raise PromptError(
            f"min_tokens is {sampling.min_tokens}, more than the {max_tokens} tokens that the reply may have",
            param="min_tokens",
        )
    named = {"logit_bias": [token for token, _ in sampling.logit_bias], "stop_token_ids": sampling.stop_token_ids}
    for param, token_ids in named.items():
        if token_ids and max(token_ids) >= vocab_size:
            raise PromptError(
                f"{param}: the model has no token {max(token_ids)}; ids lie below {vocab_size}", param=param
            )


def grammar_fault(sampling: Sampling, message: str) -> PromptError | None:
    """The client's error of a worker's refusal, if it is the grammar that was refused."""
    if sampling.grammar is None or not message.startswith(_GRAMMAR):
        return None
    param = sampling.grammar.param
    return PromptError(f"{param}: {message.removeprefix(_GRAMMAR)}", param=param, code="invalid_grammar")
