"""Names of settings, which join results over runs, and that the default of the evaluation is the served one."""

from pathlib import Path

import pytest

from eval.presets import DEFAULT_SETTING, Preset, settings_of
from eval.settings import Mode, Prime, Refresh, Selection, Setting
from services.worker.engine.seam import SeamWindow
from services.worker.profile import load_profile


def test_the_default_is_what_the_demo_model_serves() -> None:
    assert DEFAULT_SETTING.seam_window == load_profile(Path("models/demo/profile.toml")).seam


@pytest.mark.parametrize(
    ("window", "name"),
    [
        (SeamWindow(32), "compose w32 prime start"),
        (SeamWindow(32, 0.15, 128), "compose w32..128 15% prime start"),
        (SeamWindow(8, 0.125, 64), "compose w8..64 12.5% prime start"),
    ],
)
def test_a_name_says_the_window(window: SeamWindow, name: str) -> None:
    assert Setting(Mode.COMPOSE, Prime.START, window).name == name


@pytest.mark.parametrize("preset", Preset)
def test_names_are_unique(preset: Preset) -> None:
    names = [setting.name for setting in settings_of(preset)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("preset", Preset)
def test_every_preset_asks_for_the_default(preset: Preset) -> None:
    assert DEFAULT_SETTING in settings_of(preset)


def test_a_refresh_needs_a_fixed_window() -> None:
    with pytest.raises(ValueError, match="seam_window"):
        Setting(Mode.COMPOSE, Prime.START, SeamWindow(8, 0.1), refresh=Refresh(Selection.BOTH, 0.3))
