"""From measurements to the files that a deployment takes: profile, card, and the card for people."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from eval.calibrate.candidates import refresh_blocks
from eval.calibrate.choice import Measured, front
from eval.settings import encoding_name
from eval.statistics import Interval
from services.worker.calibration import CalibrationCard, CardSetting, Estimate
from services.worker.profile import Profile, ProfileError, load_profile

__all__ = ["card_setting", "card_text", "setting_line", "write_profile"]

HEAD = "| | setting | live | predicted | KL, nats a token | KL, first token | same beginning |"


def card_setting(measured: Measured, *, on_front: bool, state_bytes: int | None = None) -> CardSetting:
    """As the card has it."""
    setting = measured.setting
    return CardSetting(
        name=setting.name,
        prime=str(setting.prime),
        seam_window=setting.seam_window.least,
        seam_share=setting.seam_window.share,
        seam_window_max=setting.seam_window.most,
        refresh=refresh_blocks(setting),
        encoding=encoding_name(setting.encoding),
        prompts=measured.prompts,
        live_share=measured.live_share,
        kl=_estimate(measured.kl),
        first_kl=_estimate(measured.first_kl),
        agreement=_estimate(measured.agreement),
        seconds=measured.seconds,
        state_bytes=state_bytes,
        on_front=on_front,
    )


def _estimate(interval: Interval) -> Estimate:
    return Estimate(value=interval.value, low=interval.low, high=interval.high)


def write_profile(profile: Profile, path: Path, why: str) -> None:
    """A file that `load_profile` reads as this profile.

    Raises:
        ProfileError: it would be read as another one.
    """
    lines = [
        "# What changes the bytes of a segment state of this model; every key contains this file's digest.",
        f"# {why}",
    ]
    lines += [f"{field.name} = {_toml(getattr(profile, field.name))}" for field in fields(profile)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if load_profile(path) != profile:
        raise ProfileError(f"{path}: a field cannot be written as TOML; write the profile by hand")


def _toml(value: str | float) -> str:
    # A JSON string is a TOML string but for the one control character that JSON leaves as it is.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f") if isinstance(value, str) else repr(value)


def setting_line(own: CardSetting, full_seconds: float | None) -> str:
    """One row of the table under `HEAD`."""
    predicted = "" if own.seconds is None else f"{1000 * own.seconds:.0f} ms"
    if own.seconds is not None and full_seconds:
        predicted += f", {100 * own.seconds / full_seconds:.0f} %"
    cells = [
        "front" if own.on_front else "",
        own.name,
        f"{100 * own.live_share:.1f} %",
        predicted,
        _interval(own.kl),
        _interval(own.first_kl),
        f"{100 * own.agreement.value:.0f} %",
    ]
    return f"| {' | '.join(cells)} |"


def _interval(own: Estimate) -> str:
    return f"{own.value:.4f} [{own.low:.4f}, {own.high:.4f}]"


def card_text(card: CalibrationCard) -> str:
    """The card as a page."""
    chosen, model, asked = card.chosen, card.model, card.prompts
    system = "" if asked.system_digest is None else f", behind the system prompt `{asked.system_digest[:12]}`"
    refresh = f" and `HYPIC_ROUTER_REFRESH={chosen.refresh}`" if chosen.refresh else ""
    lines = [
        f"# Calibration of {model.name}",
        "",
        f"`{chosen.name}`: {_loss(card)}. Chosen as {card.rule}. Served with `profile.toml` beside this card{refresh}.",
        "",
        f"- **Model**: {model.family}, weights `{model.revision[:12]}`, {model.dtype}, profile `{card.profile_digest[:12]}`",
        f"- **Prompts**: {asked.asked} of {asked.in_file} of `{asked.file}` (`{asked.digest[:12]}`){system};"
        f" {asked.prompt_tokens:.0f} tokens a prompt, {asked.document_tokens:.0f} of them documents'",
        f"- **Compared**: the first {card.tokens} tokens of a full recompute's greedy reply; *KL* is how far a setting's"
        " distribution is from the full recompute's along them, *same beginning* the share of prompts whose own greedy tokens"
        " are all equal. Intervals of 95 %: a bootstrap over prompts, and an upper end that reckons with one more prompt of"
        f" {card.cut:g} nats. Each speaks of one setting alone: the best of many looks a little better than it is",
        f"- **Time**: {_time(card)}",
        f"- **Where**: {card.device}, {card.date}, {card.seconds:.0f} s, {_versions(card.versions)}",
        f"- `{card.command}`",
        "",
        HEAD,
        f"| --- | --- |{' ---: |' * 5}",
        *(setting_line(own, card.full_seconds) for own in card.settings if own.state_bytes is None),
        *_encodings(card),
        "",
        "![divergence against cost](front.png)",
        "",
        f"Card `{card.digest[:12]}`; what programs read stands in `calibration.json`.",
    ]
    return "\n".join(lines) + "\n"


def _loss(card: CalibrationCard) -> str:
    chosen = card.chosen
    return (
        f"KL {_interval(chosen.kl)} nats a token, {100 * chosen.agreement.value:.0f} % of prompts begin alike,"
        f" {100 * chosen.live_share:.1f} % of document tokens live"
    )


def _time(card: CalibrationCard) -> str:
    cost = card.cost
    if cost is None or card.full_seconds is None:
        return "not measured; the share of live document tokens stands for it"
    return (
        f"{1000 * cost.pass_seconds:.1f} ms and {1e6 * cost.token_seconds:.0f} µs a live token, so that a full recompute takes"
        f" {1000 * card.full_seconds:.0f} ms; {cost.how}; no point is farther than {100 * cost.worst_error:.0f} % from the line."
        " To the first token of a prompt whose segments are all in memory, without waiting"
    )


def _versions(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _encodings(card: CalibrationCard) -> list[str]:
    rows = [own for own in card.settings if own.state_bytes is not None]
    if not rows:
        return []
    return [
        "",
        "Encodings of transitions and end states, under what was chosen:",
        "",
        "| encoding | linear layers of a segment | prompts | KL, nats a token | same beginning |",
        f"| --- |{' ---: |' * 4}",
        *(
            f"| {own.encoding} | {(own.state_bytes or 0) / 2**20:.2f} MiB | {own.prompts} | {_interval(own.kl)} |"
            f" {100 * own.agreement.value:.0f} % |"
            for own in rows
        ),
    ]


@dataclass(frozen=True, slots=True)
class Compared:
    """Settings in the order measured, and the encodings of the chosen one with bytes of a segment's linear layers.

    encoded: numbers of the prompts that were asked under every encoding.
    """

    settings: Sequence[Measured]
    encodings: Sequence[Measured] = ()
    sizes: Sequence[int] = ()
    encoded: frozenset[int] = frozenset()

    def rows(self) -> tuple[CardSetting, ...]:
        """Of the card."""
        best = {own.setting for own in front(self.settings)}
        plain = [card_setting(own, on_front=own.setting in best) for own in self.settings]
        pairs = zip(self.encodings, self.sizes, strict=True)
        return (*plain, *(card_setting(own, on_front=False, state_bytes=size) for own, size in pairs))
