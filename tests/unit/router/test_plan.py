"""Planning as pure steps, with every outcome that the directory can give."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.domain.explain import explain_parts
from services.router.domain.model import Profile
from services.router.domain.parts import Part, PartKind, Prompt, Reason
from services.router.domain.plan import (
    CacheEntry,
    CaptureCause,
    Captured,
    EntryKind,
    Outcome,
    Plan,
    Served,
    Ticket,
    draft,
    serve_live,
    settle_captures,
    settle_prefix,
    settle_segments,
    with_true_snapshots,
    without_directory,
    without_prefix,
)
from services.router.domain.ports import PartServing, Prefilled, ServedPart
from services.router.domain.request import Reuse

PROFILE = Profile("digest", min_segment_tokens=12, min_body=8, document_open="", document_close="")
SYSTEM = Part(PartKind.PREFIX, tuple(range(20)), Reason.NOT_MARKED, ends_prefix=True)
TURN = Part(PartKind.PREFIX, tuple(range(20, 50)), Reason.NOT_MARKED, ends_prefix=True)
OPENING = Part(PartKind.LIVE, (1, 2, 3), Reason.NOT_MARKED)
SEGMENT = Part(PartKind.SEGMENT, tuple(range(100, 140)), document_id="a")
OTHER = Part(PartKind.SEGMENT, tuple(range(200, 230)), document_id="b")
QUESTION = Part(PartKind.LIVE, (4, 5, 6), Reason.NOT_MARKED, ends_prefix=True)
LAST = Part(PartKind.LIVE, (7, 8), Reason.LAST_PART)
PROMPT = Prompt((SYSTEM, TURN, OPENING, SEGMENT, OTHER, SEGMENT, QUESTION, LAST))
TICKET = Ticket("ticket", 1)


def ids(entry: CacheEntry) -> tuple[str, ...]:
    return tuple(each.document_id for each in entry.documents)


CAPTURED = Captured("w1", CaptureCause.ASSIGNED, 0.5)


def outcome(served: Served, name: bytes = b"key") -> Outcome:
    reason = Reason.SUPERSEDED if served is Served.LIVE else None
    return Outcome(served, name, "host", TICKET if served is Served.COLD else None, 1.0, reason)


def settle(plan: Plan, outcomes: list[Served]) -> Plan:
    answers = {
        entry.content_hash: outcome(served, entry.content_hash)
        for entry, served in zip(plan.entries, outcomes, strict=True)
    }
    return settle_segments(settle_prefix(plan, answers), answers)


def served(plan: Plan) -> list[Served]:
    return [each.served for each in plan.parts]


def test_compose_asks_for_prefixes_ahead_of_segments_and_each_segment_once() -> None:
    plan = draft(PROMPT, PROFILE, Reuse.COMPOSE)
    asked = [(entry.kind, entry.num_tokens, entry.after_part, ids(entry)) for entry in plan.entries]
    assert asked == [
        (EntryKind.PREFIX, 50, 2, ()),
        (EntryKind.PREFIX, 20, 1, ()),
        (EntryKind.SEGMENT, 40, 0, ("a",)),
        (EntryKind.SEGMENT, 30, 0, ("b",)),
    ]


def test_exact_asks_for_every_message_end_and_off_for_nothing() -> None:
    exact = draft(PROMPT, PROFILE, Reuse.EXACT)
    assert [(entry.kind, entry.after_part) for entry in exact.entries] == [(EntryKind.PREFIX, n) for n in (7, 2, 1)]
    off = draft(PROMPT, PROFILE, Reuse.OFF)
    assert not off.entries
    assert {each.reason for each in off.parts} == {Reason.REUSE_OFF}


def test_an_entry_names_every_document_that_stands_in_it() -> None:
    """A snapshot over documents falls with each of them, a text under two ids with both."""
    exact = draft(PROMPT, PROFILE, Reuse.EXACT)
    assert [ids(entry) for entry in exact.entries] == [("a", "b"), (), ()]
    twice = Prompt((SEGMENT, replace(SEGMENT, document_id="c"), LAST))
    assert [ids(entry) for entry in draft(twice, PROFILE, Reuse.COMPOSE).entries] == [("a", "c")]


def test_chains_depend_on_everything_before() -> None:
    swapped = Prompt((TURN, SYSTEM, *PROMPT.parts[2:]))
    hashes = [{entry.content_hash for entry in draft(each, PROFILE, Reuse.EXACT).entries} for each in (PROMPT, swapped)]
    assert not hashes[0] & hashes[1]


HISTORY = Prompt((SYSTEM, SEGMENT, QUESTION, TURN, QUESTION, LAST))


def test_behind_a_composed_segment_chains_say_so_and_the_newest_end_is_left_out() -> None:
    plan = draft(HISTORY, PROFILE, Reuse.COMPOSE)
    prefixes = [entry for entry in plan.entries if entry.kind is EntryKind.PREFIX]
    assert [(entry.after_part, entry.is_composed) for entry in prefixes] == [(4, True), (3, True), (1, False)]
    assert [[one.document_id for one in entry.documents] for entry in prefixes] == [["a"], ["a"], []]
    exact = {entry.content_hash for entry in draft(HISTORY, PROFILE, Reuse.EXACT).entries}
    assert [entry.content_hash in exact for entry in prefixes] == [False, False, True]


def test_a_covered_segment_is_composed_after_all_where_the_snapshot_is_out_of_reach() -> None:
    plan = settle(draft(HISTORY, PROFILE, Reuse.COMPOSE), [Served.HIT, Served.COLD, Served.HIT, Served.HIT])
    assert [each.served for each in plan.parts] == [Served.PREFIX] * 4 + [Served.LIVE] * 2
    without = without_prefix(plan, Reason.HELD_ELSEWHERE)
    assert [each.served for each in without.parts] == [Served.LIVE, Served.HIT] + [Served.LIVE] * 4
    assert without.parts[1].key
    assert without.parts[1].reason is None
    assert without.parts[3].reason is Reason.HELD_ELSEWHERE
    gone = settle(draft(HISTORY, PROFILE, Reuse.COMPOSE), [Served.HIT, Served.COLD, Served.HIT, Served.COLD])
    assert without_prefix(gone, Reason.HELD_ELSEWHERE).parts[1].served is Served.LIVE


def test_snapshots_are_taken_only_of_what_is_served_as_their_key_says() -> None:
    plan = settle(draft(HISTORY, PROFILE, Reuse.COMPOSE), [Served.COLD] * 4)
    assert [one.after_part for one in with_true_snapshots(plan).snapshots] == [4, 3, 1]
    fallen = serve_live(plan, lambda each: each.served is Served.COLD, Reason.FIRST_USE)
    assert [one.after_part for one in with_true_snapshots(fallen).snapshots] == [1]
    exact = settle(draft(HISTORY, PROFILE, Reuse.EXACT), [Served.COLD] * 4)
    assert with_true_snapshots(exact).snapshots == exact.snapshots


def test_short_prefixes_and_the_middle_of_long_conversations_are_not_asked_for() -> None:
    turns = tuple(Part(PartKind.PREFIX, (n, n, n), Reason.NOT_MARKED, ends_prefix=True) for n in range(30))
    entries = draft(Prompt((*turns, LAST)), PROFILE, Reuse.COMPOSE).entries
    assert [entry.after_part for entry in entries] == [30, 29, 28, 27, 26, 25, 24, 3]


def test_the_longest_hit_serves_and_longer_cold_ends_are_snapshot() -> None:
    plan = settle(draft(PROMPT, PROFILE, Reuse.EXACT), [Served.COLD, Served.COLD, Served.HIT])
    assert served(plan)[:2] == [Served.PREFIX, Served.LIVE]
    assert [snapshot.after_part for snapshot in plan.snapshots] == [7, 2]
    assert plan.parts[0].reason is None
    assert plan.parts[1].reason is Reason.FIRST_USE


def test_a_pending_prefix_is_live() -> None:
    plan = settle(draft(Prompt((SYSTEM, LAST)), PROFILE, Reuse.COMPOSE), [Served.PENDING])
    assert served(plan) == [Served.LIVE, Served.LIVE]
    assert plan.parts[0].reason is Reason.COMPUTED_ELSEWHERE
    assert not plan.snapshots


def test_an_older_version_of_a_document_is_live_and_never_a_snapshot() -> None:
    outcomes = [Served.HIT, Served.HIT, Served.LIVE, Served.HIT]
    plan = settle(draft(PROMPT, PROFILE, Reuse.COMPOSE), outcomes)
    assert served(plan)[3:6] == [Served.LIVE, Served.HIT, Served.LIVE]
    assert [plan.parts[index].reason for index in (3, 5)] == [Reason.SUPERSEDED] * 2
    exact = settle(draft(PROMPT, PROFILE, Reuse.EXACT), [Served.LIVE, Served.LIVE, Served.COLD])
    assert [snapshot.after_part for snapshot in exact.snapshots] == [1]


def test_segments_follow_their_outcome_and_repeats_share_it() -> None:
    outcomes = [Served.HIT, Served.HIT, Served.COLD, Served.PENDING]
    plan = settle(draft(PROMPT, PROFILE, Reuse.COMPOSE), outcomes)
    assert served(plan)[3:6] == [Served.COLD, Served.PENDING, Served.COLD]
    assert [each.part for each in plan.with_status(Served.COLD)] == [SEGMENT]
    later = settle_segments(plan, {plan.parts[4].content_hash: outcome(Served.HIT)})
    assert later.parts[4].served is Served.HIT
    assert later.parts[4].first is Served.PENDING
    assert later.parts[4].reason is None


def test_the_worker_is_ordered_what_is_cold_once_unless_it_is_captured_ahead() -> None:
    plan = settle(draft(PROMPT, PROFILE, Reuse.COMPOSE), [Served.HIT, Served.HIT, Served.COLD, Served.COLD])
    assert [index for index, each in enumerate(plan.parts) if each.order] == [3, 4]
    ahead = settle_captures(plan, [plan.parts[index].key for index in (3, 4)], {plan.parts[3].key: CAPTURED})
    assert not any(each.order for each in ahead.parts)
    assert served(ahead)[3:6] == [Served.COLD, Served.LIVE, Served.COLD]
    assert ahead.parts[4].reason is Reason.CAPTURE_FAILED


def test_what_somebody_else_has_stored_meanwhile_is_a_hit() -> None:
    plan = settle(draft(PROMPT, PROFILE, Reuse.COMPOSE), [Served.COLD] * 4)
    done = [
        ServedPart(PartServing.SEGMENT, 4, each.part.num_tokens - 4, "host", "")
        if each.served is Served.COLD
        else ServedPart(PartServing.LIVE, each.part.num_tokens, 0, "", "")
        for each in plan.parts
    ]
    explained = explain_parts(plan, Prefilled(tuple(done), 0.0, 0.0, 0.0))
    assert [part.served for part in explained[3:6]] == [Served.HIT] * 3
    assert not any(part.captured_tokens or part.reason for part in explained[3:6])


def test_without_a_directory_everything_is_live_with_the_reason() -> None:
    plan = without_directory(draft(PROMPT, PROFILE, Reuse.COMPOSE))
    assert set(served(plan)) == {Served.LIVE}
    reasons = [each.reason for each in plan.parts]
    down = Reason.CACHE_UNAVAILABLE
    assert reasons == [down, down, Reason.NOT_MARKED, down, down, down, Reason.NOT_MARKED, Reason.LAST_PART]


@pytest.mark.parametrize("done", [[], [ServedPart(PartServing.LIVE, 1, 0, "", "")]])
def test_a_worker_whose_counts_do_not_add_up_is_not_believed(done: list[ServedPart]) -> None:
    plan = draft(Prompt((LAST,)), PROFILE, Reuse.OFF)
    with pytest.raises(ValueError, match="the worker reports"):
        explain_parts(plan, Prefilled(tuple(done), 0.0, 0.0, 0.0))


plans = st.sampled_from(Reuse).flatmap(
    lambda reuse: st.tuples(
        st.just(draft(PROMPT, PROFILE, reuse)),
        st.lists(st.sampled_from([Served.HIT, Served.COLD, Served.PENDING]), min_size=8, max_size=8),
        st.booleans(),
        st.booleans(),
    )
)


@given(plans)
def test_counts_add_up_and_every_computed_part_has_its_reason(case: tuple[Plan, list[Served], bool, bool]) -> None:
    """Whether what is cold is captured ahead, or by the worker as it combines."""
    plan, outcomes, is_lost, is_ahead = case
    plan = settle(plan, outcomes[: len(plan.entries)])
    plan = serve_live(plan, lambda each: each.served is Served.PENDING, Reason.COMPUTED_ELSEWHERE)
    if is_ahead:
        keys = [each.key for each in plan.with_status(Served.COLD)]
        plan = settle_captures(plan, keys, dict.fromkeys(keys, CAPTURED))
    done: list[ServedPart] = []
    for each in plan.parts:
        length = each.part.num_tokens
        reused = {Served.PREFIX: length, Served.HIT: length - 4, Served.COLD: length - 4}.get(each.served, 0)
        if is_lost or not reused:
            done.append(ServedPart(PartServing.LIVE, length, 0, "", ""))
        elif each.order:
            done.append(ServedPart(PartServing.SEGMENT, length - reused, 0, "host", "", captured_tokens=reused))
        else:
            done.append(ServedPart(PartServing.SEGMENT, length - reused, reused, "host", ""))
    explained = explain_parts(plan, Prefilled(tuple(done), 0.0, 0.0, 0.0))
    for part in explained:
        assert part.tokens == part.live_tokens + part.captured_tokens + part.reused_tokens
        assert part.reason is not None or part.live_tokens <= 4
        assert not (part.reason and part.reused_tokens)
    captured = {each.content_hash for each in plan.parts if each.served is Served.COLD}
    assert sum(bool(part.captured_tokens) for part in explained) == (0 if is_lost else len(captured))


def test_a_segment_seen_too_seldom_is_live_as_on_its_first_use() -> None:
    plan = draft(PROMPT, PROFILE, Reuse.COMPOSE)
    answers = {
        entry.content_hash: Outcome(Served.LIVE, entry.content_hash, reason=Reason.FIRST_USE) for entry in plan.entries
    }
    settled = settle_segments(plan, answers)
    segments = [each for each in settled.parts if each.part.kind is PartKind.SEGMENT]
    assert {each.served for each in segments} == {Served.LIVE}
    assert {each.reason for each in segments} == {Reason.FIRST_USE}
