"""Detokenizing and stop strings."""

from hypothesis import given
from hypothesis import strategies as st

from services.router.adapters.tokenizer import TwoWayTokenizer
from services.router.domain.stops import StopFilter
from tests.stub_worker import train_tokenizer

TOKENIZER = TwoWayTokenizer(train_tokenizer().to_str().encode())


@given(st.text(max_size=60))
def test_text_comes_whole_and_characters_are_never_torn(text: str) -> None:
    detokenizer = TOKENIZER.new_detokenizer()
    pieces = [detokenizer.push([token_id]) for token_id in TOKENIZER.encode_plain(text)]
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_special_tokens_give_no_text_and_unfinished_characters_none_either() -> None:
    detokenizer = TOKENIZER.new_detokenizer()
    owl = TOKENIZER.encode_plain("🦉")
    assert len(owl) > 1
    assert (
        detokenizer.push([*TOKENIZER.encode_template("<|im_end|>"), *TOKENIZER.encode_plain("ok"), *owl[:-1]]) == "ok"
    )


def test_a_stop_string_ends_the_text_before_it() -> None:
    stops = StopFilter(["END", "\n\n"])
    assert stops.push("one E").text == "one "
    assert stops.push("N").text == ""
    assert stops.push("ough\n").text == "ENough"
    result = stops.push("\nmore END")
    assert (result.text, result.is_stopped) == ("", True)


def test_what_was_held_back_comes_when_the_reply_ends() -> None:
    stops = StopFilter(["END"])
    assert stops.push("the EN").text == "the "
    assert stops.flush() == "EN"
    assert stops.flush() == ""


letters = st.text("ab", min_size=1, max_size=4)


@given(st.lists(st.text("ab", max_size=5), max_size=12), st.lists(letters, max_size=4))
def test_streaming_equals_cutting_the_whole_text(pieces: list[str], stops: list[str]) -> None:
    whole = "".join(pieces)
    ends = [whole.find(stop) for stop in stops if stop in whole]
    # The stream stops at the piece that completes the first stop string; within it the earliest start counts.
    completed = [whole.find(stop) + len(stop) for stop in stops if stop in whole]
    stop_filter, shown, is_stopped = StopFilter(stops), "", False
    for piece in pieces:
        result = stop_filter.push(piece)
        shown += result.text
        is_stopped = result.is_stopped
        assert not any(stop in shown for stop in stops)
        if is_stopped:
            break
    shown += "" if is_stopped else stop_filter.flush()
    assert is_stopped == bool(ends)
    assert whole.startswith(shown)
    if not ends:
        assert shown == whole
    else:
        assert min(ends) <= len(shown) <= min(completed)
