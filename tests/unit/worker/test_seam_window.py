"""The seam window's rule against its formula, and the profile that says it."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.blob.encodings import EXACT, Precision, StateEncoding
from services.worker.engine.seam import MAX_SEAM_WINDOW, SeamWindow
from services.worker.profile import Profile, ProfileError, load_profile


@st.composite
def windows(draw: st.DrawFn) -> SeamWindow:
    """Any rule that a profile may say, shares of three decimals and others."""
    least = draw(st.integers(0, 200))
    thousandths = st.integers(0, 1000).map(lambda number: number / 1000)
    share = draw(thousandths | st.floats(0.0, 1.0))
    return SeamWindow(least, share, draw(st.integers(least, 400)))


@pytest.mark.parametrize(
    ("length", "tokens"), [(0, 32), (100, 32), (213, 32), (214, 33), (220, 33), (400, 60), (853, 128), (4000, 128)]
)
def test_a_window_grows_between_its_bounds(length: int, tokens: int) -> None:
    assert SeamWindow(32, 0.15, 128).tokens(length) == tokens


@given(st.integers(0, 200), st.integers(0, 5000))
def test_without_a_share_the_window_is_fixed(least: int, length: int) -> None:
    assert SeamWindow(least).tokens(length) == least


@given(st.integers(0, 1000), st.integers(0, 3000))
def test_the_share_is_the_decimal_that_the_profile_says(thousandths: int, length: int) -> None:
    """Where binary floats would round up: 0.07 of 100 tokens is 7."""
    assert SeamWindow(0, thousandths / 1000).tokens(length) == -(-thousandths * length // 1000)


@given(windows(), st.integers(0, 2000))
def test_a_longer_segment_never_has_a_shorter_body(window: SeamWindow, length: int) -> None:
    assert 0 <= window.tokens(length + 1) - window.tokens(length) <= 1


@given(windows(), st.integers(1, 40))
def test_the_least_segment_is_the_first_whose_body_is_long_enough(window: SeamWindow, least_body: int) -> None:
    found = window.least_segment(least_body)
    assert [length for length in range(found + 50) if length - window.tokens(length) >= least_body] == [
        *range(found, found + 50)
    ]


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ("seam_window = -1", "seam_window"),
        ("seam_window = 4097", "seam_window"),
        ("seam_window = 8.0", "seam_window"),
        ("seam_share = -0.1", "seam_share"),
        ("seam_share = 1.01", "seam_share"),
        ("seam_share = nan", "seam_share"),
        ("seam_share = 1", "seam_share"),
        ("seam_window = 32\nseam_window_max = 31", "seam_window_max"),
        ("seam_window_max = 4097", "seam_window_max"),
        ("seam_windows = 8", "seam_windows"),
        ('end_state = "float16"', "end_state"),
        ('transition = ""', "transition"),
        ("slow_transition = 8", "slow_transition"),
        ("slow_decay = 1.5", "slow_decay"),
        ("negligible_decay = nan", "negligible_decay"),
        ("negligible_decay = 0.6", "negligible_decay"),
    ],
)
def test_a_bad_profile_names_file_and_field(content: str, field: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.toml"
    path.write_text(content)
    with pytest.raises(ProfileError, match=rf"profile\.toml: .*\b{field}\b"):
        load_profile(path)


def test_a_profile_says_its_window(tmp_path: Path) -> None:
    path = tmp_path / "profile.toml"
    path.write_text("seam_window = 16\nseam_share = 0.2\nseam_window_max = 64\n")
    assert load_profile(path).seam == SeamWindow(16, 0.2, 64)
    assert Profile().seam == SeamWindow(8, 0.0, MAX_SEAM_WINDOW)


def test_a_profile_says_how_states_are_stored(tmp_path: Path) -> None:
    path = tmp_path / "profile.toml"
    path.write_text('end_state = "float8"\ntransition = "int8"\nslow_transition = "bfloat16"\nslow_decay = 0.4')
    assert load_profile(path).encoding == StateEncoding(Precision.FLOAT8, Precision.INT8, Precision.BFLOAT16, 0.4)
    assert Profile().encoding == EXACT


@pytest.mark.parametrize(
    "changed",
    [
        Profile(9),
        Profile(8, 0.1),
        Profile(8, 0.0, 64),
        Profile(prime="x"),
        Profile(end_state="float8"),
        Profile(transition="int8"),
        Profile(slow_transition="bfloat16"),
        Profile(slow_decay=0.6),
        Profile(negligible_decay=0.1),
    ],
)
def test_every_field_changes_the_digest(changed: Profile) -> None:
    assert changed.digest("revision", "float32") != Profile().digest("revision", "float32")
    assert Profile().digest("revision", "float32") == Profile().digest("revision", "float32")
