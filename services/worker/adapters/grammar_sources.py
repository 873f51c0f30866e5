"""How a client's grammar is told to llguidance, and within which limits; for whoever compiles it. Needs the library."""

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

__all__ = ["build_matcher"]

# So that a reply that loses its way in blanks comes back to its form.
_JSON_OPTIONS = {"whitespace_flexible": True, "whitespace_pattern": r"[\x20\x0A\x0D\x09]{0,40}"}
# A lexer's state takes up to 2 kB.
_MAX_LEXER_STATES, _MAX_GRAMMAR_SIZE = 50_000, 200_000


def build_matcher(tokenizer: LLTokenizer, kind: str, text: str) -> LLMatcher:
    """The matcher of a grammar, by the name of its form in the message `Grammar`.

    Raises:
        ValueError: it is none, or the library cannot honour it.
    """
    limits = LLParserLimits(
        max_lexer_states=_MAX_LEXER_STATES, max_grammar_size=_MAX_GRAMMAR_SIZE, verbose_errors=False
    )
    matcher = LLMatcher(tokenizer, _source(kind, text), log_level=0, limits=limits)
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    return matcher


def _source(kind: str, text: str) -> str:
    if kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(text, overrides=_JSON_OPTIONS)  # type: ignore[arg-type] # a part of them
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if kind == "choices":
        return grammar_from("choice", text)
    return grammar_from("grammar", text)
