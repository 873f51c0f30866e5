"""A real Prometheus that scrapes a served stack, with the rules of deploy/monitoring."""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import httpx2

from services.cli.ports import free_port
from tests.e2e.stack.served import wait_until

__all__ = ["MONITORING", "Prometheus"]

MONITORING = Path(__file__).parents[3] / "deploy" / "monitoring"
_INTERVAL = "1s"


class Prometheus:
    """Serves until its context is left. targets: host:port by the name of the job."""

    def __init__(self, program: str, folder: Path, targets: Mapping[str, list[str]]) -> None:
        self._program = program
        self._folder = folder
        self._targets = targets
        self._address = f"127.0.0.1:{free_port()}"

    def __enter__(self) -> Self:
        config = {
            "global": {"scrape_interval": _INTERVAL, "evaluation_interval": _INTERVAL},
            "rule_files": [str(MONITORING / "rules" / "hypic.yaml")],
            "scrape_configs": [
                {"job_name": job, "static_configs": [{"targets": targets}]} for job, targets in self._targets.items()
            ],
        }
        path = self._folder / "prometheus.yml"
        # YAML holds JSON.
        path.write_text(json.dumps(config))
        options = [f"--config.file={path}", f"--storage.tsdb.path={self._folder / 'tsdb'}"]
        self._log = (self._folder / "prometheus.log").open("wb")
        self._process = subprocess.Popen(
            [self._program, *options, f"--web.listen-address={self._address}"], stdout=self._log, stderr=self._log
        )
        self._http = httpx2.Client(base_url=f"http://{self._address}", timeout=20)
        wait_until(self._is_ready, 60)
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()
        self._process.terminate()
        self._process.wait(30)
        self._log.close()

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, (self._folder / "prometheus.log").read_text()
        try:
            return self._http.get("/-/ready").status_code == 200
        except httpx2.TransportError:
            return False

    def query(self, expression: str) -> list[float]:
        """The values of an instant query, NaN left out; fails the test where Prometheus refuses it."""
        answer = self._http.get("/api/v1/query", params={"query": expression}).json()
        assert answer["status"] == "success", (expression, answer)
        result = answer["data"]["result"]
        samples = [result] if answer["data"]["resultType"] == "scalar" else [one["value"] for one in result]
        values = [float(value) for _, value in samples]
        return [value for value in values if value == value]

    def rules(self) -> list[dict[str, Any]]:
        """Every rule, as it was evaluated last."""
        groups = self._http.get("/api/v1/rules").json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def num_scrapes(self) -> int:
        """Of the target that was scraped least often."""
        counts = self.query("count_over_time(up[10m])")
        wanted = sum(map(len, self._targets.values()))
        return int(min(counts)) if len(counts) == wanted else 0
