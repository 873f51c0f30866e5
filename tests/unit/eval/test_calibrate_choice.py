"""What a calibration chooses: against the definition, tried on every set of settings."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.calibrate.choice import Keep, Measured, MostLive, MostLoss, choose, choose_encoding, front
from eval.calibrate.cost import CostCurve, Pass, fit_curve
from eval.calibrate.summary import CostModel, guarded_interval, least_prompts, summarise, upper_bound
from eval.pack import NumberedPrompt
from eval.prompts import EvalPrompt
from eval.scoring import Outcome, Scores
from eval.settings import Mode, Prime, Refresh, Selection, Setting
from eval.statistics import Interval
from services.worker.engine.seam import SeamWindow

# Few values, so that ties are common.
_VALUES = st.sampled_from([0.0, 0.1, 0.2, 0.5])
NOTHING = Interval(0.0, 0.0, 0.0)


@st.composite
def measured(draw: st.DrawFn) -> list[Measured]:
    timed = draw(st.booleans())
    return [
        Measured(
            Setting(Mode.COMPOSE, Prime.NONE, SeamWindow(width)),
            live_share=draw(_VALUES),
            kl=Interval(value := draw(_VALUES), 0.0, value + draw(_VALUES)),
            first_kl=NOTHING,
            agreement=NOTHING,
            seconds=draw(_VALUES) if timed else None,
        )
        for width in range(draw(st.integers(1, 6)))
    ]


def _betters(other: Measured, own: Measured) -> bool:
    no_worse = other.cost <= own.cost and other.kl.value <= own.kl.value
    return no_worse and (other.cost < own.cost or other.kl.value < own.kl.value)


@given(measured())
def test_the_front_is_what_nothing_betters(settings: list[Measured]) -> None:
    unbeaten = [own for own in settings if not any(_betters(other, own) for other in settings)]
    firsts = {(own.cost, own.kl.value): own for own in reversed(unbeaten)}
    assert front(settings) == sorted(firsts.values(), key=lambda own: own.cost)


@given(measured(), _VALUES)
def test_the_choice_is_the_first_of_the_best_that_keep_to_the_rule(settings: list[Measured], bound: float) -> None:
    def first_best(within: Sequence[Measured], better: str) -> Measured | None:
        for own in within:
            key = (own.cost, own.kl.value) if better == "cost" else (own.kl.value, own.cost)
            others = [(o.cost, o.kl.value) if better == "cost" else (o.kl.value, o.cost) for o in within]
            if all(key <= other for other in others):
                return own
        return None

    assert choose(settings, Keep()) is settings[0]
    cheapest = first_best([own for own in settings if own.kl.high < bound], "cost")
    assert choose(settings, MostLoss(bound)) is cheapest
    best = first_best([own for own in settings if own.live_share <= bound], "kl")
    assert choose(settings, MostLive(bound)) is best


@given(measured(), st.data())
def test_the_encoding_is_the_smallest_that_keeps_to_a_loss(settings: list[Measured], data: st.DataObject) -> None:
    sizes = [data.draw(st.integers(1, 3)) for _ in settings]
    within = [(size, number) for number, size in enumerate(sizes) if settings[number].kl.high < 0.2]
    expected = settings[min(within)[1] if within else 0]
    assert choose_encoding(settings, sizes, MostLoss(0.2)) is expected
    for rule in (Keep(), MostLive(0.2)):
        assert choose_encoding(settings, sizes, rule) is settings[0]


def test_prompts_of_which_none_diverges_prove_as_much_as_their_number() -> None:
    """A bootstrap alone would call them perfect; one in four may go astray unseen in ten."""
    assert guarded_interval([0.0] * 10, 1.0).high == pytest.approx(1 - 0.025 ** (1 / 10), rel=0.05)
    for nats in (0.01, 0.05):
        cut = 12 * nats
        least = least_prompts(nats, cut)
        assert cut * (1 - 0.025 ** (1 / least)) < nats <= cut * (1 - 0.025 ** (1 / (least - 1)))


@pytest.mark.parametrize("rate", [0.02, 0.1, 0.5])
def test_the_upper_end_lies_above_the_mean_as_often_as_it_says(rate: float) -> None:
    drawn = np.random.default_rng(1).random((150, 40)) < rate
    covered = np.mean([upper_bound(own.astype(np.float64), 1.0) >= rate for own in drawn])
    assert covered >= 0.96


def test_an_interval_holds_its_value_and_no_rounding_below_nothing() -> None:
    found = guarded_interval([-1e-9, 0.3, 4.0], 0.6)
    assert 0.0 <= found.low <= found.value <= found.high
    assert found.value == pytest.approx(4.3 / 3, abs=1e-6)
    assert guarded_interval([-1e-9], 0.6).value == 0.0


def test_a_line_is_found_again() -> None:
    curve = fit_curve([Pass(n, 0.02 + 0.001 * n) for n in (40, 80, 400, 1_200)])
    assert curve.pass_seconds == pytest.approx(0.02)
    assert curve.token_seconds == pytest.approx(0.001)
    assert curve.worst_error < 1e-6
    assert curve.seconds(100) == pytest.approx(0.12)


def test_what_disturbs_some_passes_does_not_count() -> None:
    passes = [Pass(n, delay + 0.02 + 0.001 * n) for n in (40, 80, 400) for delay in (0.5, 0.0, 3.0)]
    assert fit_curve(passes).pass_seconds == pytest.approx(0.02)


@pytest.mark.parametrize("passes", [[(10, 0.001), (100, 0.5)], [(10, 0.5), (100, 0.001)]])
def test_no_part_of_a_cost_is_negative(passes: list[tuple[int, float]]) -> None:
    curve = fit_curve([Pass(*own) for own in passes])
    assert min(curve.pass_seconds, curve.token_seconds) == 0.0
    assert curve.worst_error > 0.1


def test_one_point_is_no_line() -> None:
    with pytest.raises(ValueError, match="two numbers"):
        fit_curve([Pass(10, 0.1), Pass(10, 0.2)])


PLAIN = Setting(Mode.COMPOSE, Prime.NONE, SeamWindow(8))
REFRESHED = replace(PLAIN, refresh=Refresh(Selection.FIRST_LAYER, 1.0, most_blocks=4))


def _outcome(question: int, setting: str, divergence: float, live: int) -> Outcome:
    return Outcome(question, setting, Scores("", False, 0.0, divergence == 0.0, divergence, divergence / 2), live, 100)


def test_settings_are_compared_on_prompts_asked_under_all_of_them() -> None:
    """The third prompt was cut off by the end of the time, and was the worst."""
    prompt = EvalPrompt((1,) * 6, ((2,) * 100,), (3,) * 4, (0,), (), "", "chat", ())
    prompts = [NumberedPrompt(number, prompt) for number in range(3)]
    outcomes = [_outcome(number, "off", 0.0, 100) for number in range(3)]
    outcomes += [_outcome(number, PLAIN.name, [0.0, 0.4, 9.0][number], 20) for number in range(3)]
    outcomes += [_outcome(number, REFRESHED.name, 0.0, 60) for number in range(2)]
    curve = CostCurve(0.1, 0.01, 4, 0.0)
    plain, refreshed = summarise(outcomes, prompts, [PLAIN, REFRESHED], CostModel(curve, 0.25), cut=0.6)
    assert plain.kl.value == pytest.approx(0.2)
    assert plain.first_kl.value == pytest.approx(0.1)
    assert plain.agreement.value == 0.5
    assert plain.agreement.low < 0.5 < plain.agreement.high <= 1.0
    assert plain.live_share == pytest.approx(0.2)
    assert refreshed.live_share == pytest.approx(0.6)
    # 30 live tokens with question and template; a refresh looks first, through a quarter of the layers.
    assert plain.seconds == pytest.approx(0.1 + 0.3)
    assert refreshed.seconds == pytest.approx(0.1 + 0.7 + 0.25 * 0.4)
    untimed = summarise(outcomes, prompts, [PLAIN], CostModel(None, 0.25), cut=0.6)[0]
    assert (untimed.seconds, untimed.cost) == (None, untimed.live_share)
