"""Metrics of the stack: sums over its services' pages, before and behind a load, and gauges while it runs."""

import asyncio
import re
import urllib.request
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

__all__ = ["COUNTERS", "GAUGES", "GaugeWatch", "difference", "read_metrics", "scrape"]

_LINE = re.compile(r"^(?P<name>[A-Za-z_]\w*)(?P<labels>\{[^}]*\})? (?P<value>\S+)")
_SCRAPE_SECONDS = 2.0
# What a level reports, by the name under which it does. With a label where one series of a metric is meant.
COUNTERS = {
    "fetched_bytes": "hypic_worker_fetched_bytes_total",
    "evicted_entries": "hypic_cache_evictions_total",
    "dropped_states": "hypic_worker_evictions_total",
    "captures": "hypic_worker_captures_total",
    "fallbacks": "hypic_fallbacks_total",
    "invalidated_entries": "hypic_cache_invalidated_entries_total",
    "combine_seconds": "hypic_worker_combine_time_seconds_sum",
    "capture_seconds": "hypic_worker_capture_time_seconds_sum",
}
GAUGES = {
    "state_bytes": "hypic_worker_state_bytes",
    "tier_bytes": "hypic_worker_tier_bytes",
    "cache_bytes": "hypic_cache_bytes",
    "cache_entries": "hypic_cache_entries",
    "page_share": "hypic_worker_kv_cache_usage_perc",
    "running": "hypic_worker_num_requests_running",
    "waiting": "hypic_worker_num_requests_waiting",
}


def read_metrics(text: str) -> dict[str, float]:
    """Sums over all label sets, by name."""
    sums: defaultdict[str, float] = defaultdict(float)
    for line in text.splitlines():
        if match := _LINE.match(line):
            sums[match["name"]] += float(match["value"])
    return dict(sums)


def scrape(addresses: Sequence[str]) -> dict[str, float]:
    """Of all pages together; one that does not answer is left out."""
    sums: defaultdict[str, float] = defaultdict(float)
    for address in addresses:
        try:
            with urllib.request.urlopen(address, timeout=_SCRAPE_SECONDS) as response:
                found = read_metrics(response.read().decode())
        except (OSError, ValueError):
            continue
        for name, value in found.items():
            sums[name] += value
    return dict(sums)


def difference(before: Mapping[str, float], behind: Mapping[str, float], names: Mapping[str, str]) -> dict[str, float]:
    """What counters have grown by; those that no page has are left out."""
    return {own: behind[name] - before.get(name, 0.0) for own, name in names.items() if name in behind}


@dataclass(slots=True)
class GaugeWatch:
    """Looks at gauges now and then while it runs; blocking reads go to a thread."""

    addresses: Sequence[str]
    seconds: float = 0.5
    _seen: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    async def run(self) -> None:
        """Until it is cancelled."""
        while self.addresses:
            found = await asyncio.to_thread(scrape, self.addresses)
            for own, name in GAUGES.items():
                if name in found:
                    self._seen[own].append(found[name])
            await asyncio.sleep(self.seconds)

    def means(self) -> dict[str, float]:
        """Of what was seen."""
        return {name: fmean(values) for name, values in self._seen.items()}

    def most(self, names: Iterable[str]) -> dict[str, float]:
        """The largest value of each."""
        return {name: max(self._seen[name]) for name in names if self._seen.get(name)}
