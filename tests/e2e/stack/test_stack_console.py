"""The console of a served stack: who may see it, what it shows, what it never shows, and how it looks in a browser."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import httpx2
import pytest

from tests.e2e.stack.callers import secret_of
from tests.e2e.stack.observed import Observed

CHROMIUM = shutil.which("chromium") or ""
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --window-size=1440,1180 --enable-logging=stderr"
).split()
# Where the docs' picture is to be written anew.
PICTURE = os.environ.get("HYPIC_CONSOLE_PICTURE", "")
# Fills of the page's style sheet, as 8-bit colours.
COLOURS = {
    "hit": (0x4F, 0xAE, 0x7B),
    "cold": (0xEB, 0xA2, 0x4A),
    "seam": (0xF3, 0xD3, 0x6B),
    "live": (0xC3, 0xCA, 0xD2),
}


def test_only_an_administrator_sees_it(observed: Observed) -> None:
    url = f"{observed.stack.base_url}/console"
    nobody = httpx2.get(url, timeout=20)
    assert nobody.status_code == 401
    assert nobody.headers["www-authenticate"].startswith("Basic ")
    assert observed.clients["acme"].http.get("/console").status_code == 403
    assert httpx2.get(url, auth=("anybody", secret_of("acme")), timeout=20).status_code == 403
    assert httpx2.get(url, auth=("anybody", "wrong"), timeout=20).status_code == 401
    assert httpx2.get(url, headers={"authorization": "Basic ???"}, timeout=20).status_code == 401
    assert httpx2.get(url, auth=("anybody", secret_of("root")), timeout=20).status_code == 200
    assert observed.clients["root"].http.get("/console").status_code == 200


def test_the_page_allows_itself_nothing_but_its_own_style(observed: Observed) -> None:
    first, second = (observed.clients["root"].http.get("/console") for _ in range(2))
    policies = [answer.headers["content-security-policy"] for answer in (first, second)]
    assert policies[0] != policies[1]
    nonce = re.search(r"style-src 'nonce-([^']+)'", policies[0])
    assert nonce is not None
    assert policies[0].startswith("default-src 'none';")
    assert "unsafe" not in policies[0]
    assert first.text.count(f'<style nonce="{nonce[1]}">') == 1
    assert "<script" not in first.text
    assert " style=" not in first.text
    assert '<meta http-equiv="refresh"' in first.text
    assert '<meta http-equiv="refresh"' not in observed.clients["root"].http.get("/console?refresh=off").text


def test_it_shows_requests_tiers_workers_and_evictions_and_no_text(observed: Observed) -> None:
    page = observed.clients["root"].http.get("/console").text
    for served in ("hit", "cold", "seam", "live", "prefix"):
        assert f'<rect class="{served}"' in page
    for words in (
        "worker-0",
        "worker-1",
        "handbook-3",
        "context_length_exceeded",
        "<td>combine</td>",
        "<td>prefill</td>",
        "cache service",
    ):
        assert words in page
    for tier in ("host", "disk"):
        assert f"<tr><td>{tier}</td>" in page
    rows = observed.clients["root"].call("GET", "/admin/evictions")["data"]
    assert {(row["evictor"], row["victim"]) for row in rows} & {("acme", "beta"), ("beta", "acme")}
    for row in rows:
        assert f"<tr><td>{row['evictor']}</td><td>{row['victim']}</td>" in page
    for words in observed.secret_words:
        assert words not in page
    assert secret_of("acme") not in page


def test_a_strip_is_as_long_as_its_parts(observed: Observed) -> None:
    page = observed.clients["root"].http.get("/console").text
    strips = re.findall(r'aria-label="parts">(.*?)</svg>', page, re.S)
    assert len(strips) >= 10
    for strip in strips:
        ends = [(float(x), float(width)) for x, width in re.findall(r'x="([\d.]+)" y="0" width="([\d.]+)"', strip)]
        assert ends[0][0] == 0
        for (start, width), (following, _) in zip(ends, [*ends[1:], (1000.0, 0.0)], strict=True):
            assert start + width == pytest.approx(following, abs=0.1)


@pytest.mark.skipif(not CHROMIUM, reason="needs chromium")
def test_a_browser_draws_it(observed: Observed, tmp_path: Path) -> None:
    """With its policy in force: a style that it refused would leave no colours."""
    image = pytest.importorskip("matplotlib.image")
    picture = tmp_path / "console.png"
    address = observed.stack.base_url.replace("http://", "http://operator:secret%20of%20root@")
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={picture}"]
    done = subprocess.run([*command, f"{address}/console"], capture_output=True, text=True, timeout=100, check=False)
    assert picture.exists(), done.stderr
    assert "Content Security Policy" not in done.stderr
    pixels = (image.imread(picture)[..., :3] * 255).round().astype(int)
    for name, colour in COLOURS.items():
        assert (pixels == colour).all(axis=-1).sum() > 100, name
    # A light page.
    assert (pixels.min(axis=-1) > 240).mean() > 0.8
    if PICTURE:
        shutil.copy(picture, PICTURE)
