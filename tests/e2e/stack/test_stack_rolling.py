"""A rolling restart of every service under load fails no request.

`HYPIC_ROLLING_REQUESTS` asks for rounds until so many requests have been answered (`make rolling`), `HYPIC_ROLLING_OUT` for rows
in that result file.
"""

import os
import time
from pathlib import Path

from bench.results import Row, cpu_device, merge_results
from tests.e2e.stack.asking import document
from tests.e2e.stack.balancer import Balancer
from tests.e2e.stack.rolling import DirectCluster, RollingLoad, restart_each

NUM_REQUESTS = int(os.environ.get("HYPIC_ROLLING_REQUESTS", "60"))
OUT = os.environ.get("HYPIC_ROLLING_OUT", "")
ROLES = {"first": "prefill,combine", "other": "prefill,combine"}
DOCUMENTS = [document(f"rolling {index}") for index in range(6)]


def test_rolling_restarts_fail_no_request(random_checkpoint: Path, tmp_path: Path) -> None:
    num_rounds, started = 0, time.monotonic()
    with (
        DirectCluster(random_checkpoint, tmp_path, ROLES, {"HYPIC_ROUTER_WORKER_WAIT_SECONDS": "40"}) as cluster,
        Balancer([int(url.rpartition(":")[2]) for url in (cluster.base_url, cluster.second_url)]) as balancer,
    ):
        with RollingLoad(cluster, f"http://127.0.0.1:{balancer.port}", DOCUMENTS) as load:
            while not load.faults and (num_rounds == 0 or load.num_answers < NUM_REQUESTS):
                restart_each(cluster, load, max(4, NUM_REQUESTS // 50))
                num_rounds += 1
        assert load.faults == []
        assert load.num_answers >= NUM_REQUESTS
        assert set(load.kinds) == {"streams", "whole"}
        cluster.wait_idle()
    told = f"{load.num_answers} answers, {num_rounds} rounds, {balancer.num_retried} taken to the other router"
    print(told, f"in {time.monotonic() - started:.0f} s")  # noqa: T201 # make rolling
    if OUT:
        _write(load, num_rounds, balancer.num_retried)


def _write(load: RollingLoad, num_rounds: int, num_retried: int) -> None:
    restarted = "rolling restarts of two routers, the cache service over Redis, and two workers"
    rows = [
        Row(f"failed or wrong answers, {restarted}", len(load.faults), "", 0.0, better="lower"),
        Row("rounds in which each was restarted once", num_rounds, ""),
        Row("requests answered meanwhile", load.num_answers, "", 2000.0),
        Row("of them streams", load.kinds["streams"], ""),
        Row("that a gateway gave to the other router", num_retried, "", better="lower"),
    ]
    merge_results(Path(OUT), "make rolling", cpu_device(), "rolling", rows)
