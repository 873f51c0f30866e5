"""API keys: the file, its rotation, what a key allows, and that no secret is written anywhere."""

import os
import re
from pathlib import Path

import pytest
from starlette.types import ASGIApp, Message
from structlog.testing import capture_logs
from typer.testing import CliRunner

from services.cli.main import app
from services.common.settings import SettingsError
from services.router.adapters.http import Draining
from services.router.adapters.key_file import FileKeys, KeyFileError, NoKeys, SingleKey, load_keys
from services.router.bootstrap import create_app
from services.router.domain.rates import Rates
from services.router.domain.tenancy import ANY_PRIORITY, Caller, Quotas, Scope, hash_key
from services.router.settings import RouterSettings


def section(key: str, tenant: str = "acme", scopes: str = '"generate"') -> str:
    return f'[[keys]]\nname = "k"\ntenant = "{tenant}"\nscopes = [{scopes}]\nsha256 = "{hash_key(key).hex()}"\n'


def write(path: Path, text: str) -> None:
    """Replace a file as a mounted secret is replaced; its time is another one in any case."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    fresh.replace(path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.toml"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_key_is_its_tenants(path: Path) -> None:
    path.write_text(
        "[tenants.acme]\nmax_requests_in_flight = 3\nmax_state_bytes = 1_000\n"
        + section("one")
        + section("two", "other", '"documents", "admin"')
    )
    ring = load_keys(path)
    acme, other = ring.find("one"), ring.find("two")
    assert acme == Caller("acme", frozenset({Scope.GENERATE}), Quotas(3, 1000), "k")
    assert acme.namespace().budget_bytes == 1000
    assert other is not None
    assert other.quotas == Quotas()
    assert [acme.may(scope) for scope in Scope] == [True, False, False]
    assert all(other.may(scope) for scope in Scope)
    for unknown in ("", "three", "One", "one ", hash_key("one").hex()):
        assert ring.find(unknown) is None


def test_rotation_needs_no_restart(path: Path) -> None:
    clock = Clock()
    path.write_text(section("old"))
    keys = FileKeys(path, clock)
    write(path, section("old") + section("new"))
    clock.now += 1.1
    assert keys.find("old")
    assert keys.find("new")
    write(path, section("new"))
    clock.now += 1.1
    assert keys.find("old") is None
    assert keys.find("new")


@pytest.mark.parametrize("broken", ["[[keys]", '[[keys]]\nname = "k"\n', ""])
def test_a_broken_file_leaves_the_keys_as_they_are(path: Path, broken: str) -> None:
    clock = Clock()
    path.write_text(section("old"))
    keys = FileKeys(path, clock)
    if broken:
        write(path, broken)
    else:
        path.unlink()
    clock.now += 1.1
    with capture_logs() as logs:
        assert keys.find("old")
    assert [log["event"] for log in logs] == ["api_keys_not_reloaded"]
    write(path, section("new"))
    clock.now += 1.1
    assert keys.find("old") is None


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (section("a").replace("sha256", "key"), "keys.0"),
        (section("a", "public"), "keys.0.tenant"),
        (section("a", scopes='"everything"'), "keys.0.scopes.0"),
        (section("a", scopes=""), "keys.0.scopes"),
        (section("a") + section("b", ""), "keys.1.tenant"),
        ("[tenants.acme]\nmax_state_bytes = -1\n", "tenants.acme.max_state_bytes"),
        ("[tenant]\n", "tenant"),
        ("keys = 1", "keys"),
        ("=", "line 1"),
    ],
)
def test_a_malformed_file_is_refused_with_its_place(path: Path, text: str, place: str) -> None:
    path.write_text(text)
    with pytest.raises(KeyFileError, match=re.escape(place)):
        FileKeys(path)


def test_a_key_pasted_for_its_hash_is_not_repeated(path: Path) -> None:
    path.write_text(section("a").replace(hash_key("a").hex(), "hypic-the-secret-itself"))
    with pytest.raises(KeyFileError) as caught:
        load_keys(path)
    assert "the-secret" not in str(caught.value)
    chain = [caught.value, caught.value.__cause__]
    assert "keys.0.sha256" in str(chain[0])


def test_digests_are_not_shown(path: Path) -> None:
    path.write_text(section("a"))
    shown = repr(load_keys(path))
    assert hash_key("a").hex() not in shown
    assert repr(hash_key("a")) not in shown


def test_one_key_or_none() -> None:
    single = SingleKey(hash_key("secret"), "mine")
    assert single.find("secret") == Caller("mine", frozenset(Scope), Quotas(min_priority=ANY_PRIORITY), "api_key")
    assert single.find("") is None
    assert NoKeys("mine").find("") == Caller("mine", frozenset(Scope), Quotas(min_priority=ANY_PRIORITY))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.org"])
def test_without_keys_only_loopback_is_served(host: str) -> None:
    with pytest.raises(SettingsError, match="api_keys_file"):
        RouterSettings.from_environment(host=host)
    assert RouterSettings.from_environment(host=host, api_key="secret").host == host
    assert RouterSettings.from_environment(host=host, api_keys_file=Path("keys.toml")).host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.1.2.3"])
def test_loopback_needs_no_keys(host: str) -> None:
    assert RouterSettings.from_environment(host=host).api_keys_file is None


async def _start_and_end(app: ASGIApp) -> None:
    """As a server does."""
    told = iter(["lifespan.startup", "lifespan.shutdown"])
    heard: list[str] = []

    async def receive() -> Message:
        return {"type": next(told)}

    async def send(message: Message) -> None:
        heard.append(message["type"])

    await app({"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}, receive, send)
    assert heard == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


@pytest.mark.parametrize(("api_key", "events"), [("", ["authentication_is_off"]), ("hypic-a-secret", [])])
async def test_a_router_without_keys_says_so(api_key: str, events: list[str]) -> None:
    with capture_logs() as logs:
        app = create_app(RouterSettings.from_environment(api_key=api_key), Draining())
        await _start_and_end(app)
    assert [log["event"] for log in logs if log["event"].startswith("authentication")] == events
    assert "a-secret" not in repr(logs)


def test_keys_come_from_one_place() -> None:
    with pytest.raises(SettingsError, match="exclude"):
        RouterSettings.from_environment(api_key="secret", api_keys_file=Path("keys.toml"))
    with pytest.raises(SettingsError, match="public"):
        RouterSettings.from_environment(tenant="public")


def test_the_command_makes_keys_that_the_router_knows(path: Path) -> None:
    runner = CliRunner()
    command = ["keys", "new", "--file", str(path), "--tenant", 'a "quoted" tenänt']
    made = runner.invoke(app, [*command, "--scope", "documents", "--scope", "admin", "--name", "first"])
    again = runner.invoke(app, command)
    keys = [made.stdout.strip(), again.stdout.strip()]
    assert len(set(keys)) == 2
    assert all(re.fullmatch(r"hypic-[\w-]{43}", key) for key in keys)
    first, second = (load_keys(path).find(key) for key in keys)
    assert first == Caller('a "quoted" tenänt', frozenset({Scope.DOCUMENTS, Scope.ADMIN}), key_name="first")
    assert second is not None
    assert second.scopes == {Scope.GENERATE}
    assert not any(key in path.read_text() for key in keys)
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(path.parent) == [path.name]


def test_the_command_leaves_a_file_whole(path: Path) -> None:
    path.write_text("[broken")
    done = CliRunner().invoke(app, ["keys", "new", "--file", str(path), "--tenant", "acme"])
    assert done.exit_code == 2
    assert path.read_text() == "[broken"
    public = CliRunner().invoke(app, ["keys", "new", "--file", str(path.with_name("new")), "--tenant", "public"])
    assert public.exit_code == 2
    assert os.listdir(path.parent) == [path.name]


def test_the_command_shows_the_section_without_a_file() -> None:
    done = CliRunner().invoke(app, ["keys", "new", "--tenant", "acme"])
    assert hash_key(done.stdout.strip()).hex() in done.stderr
    assert done.stdout.strip() not in done.stderr


def test_the_command_sets_limits_in_place_of_those_before(path: Path) -> None:
    path.write_text('# Ours.\n[tenants.other]\nmax_state_bytes = 5\n\n[tenants."acme"]\nmax_requests_in_flight = 3\n')
    runner = CliRunner()
    runner.invoke(app, ["keys", "new", "--file", str(path), "--tenant", "acme"])
    done = runner.invoke(
        app,
        [
            "keys",
            "limit",
            "--file",
            str(path),
            "--tenant",
            "acme",
            "--requests-per-minute",
            "60",
            "--tokens-per-minute",
            "9",
            "--min-priority",
            "-4",
        ],
    )
    assert done.exit_code == 0
    ring = load_keys(path)
    assert ring.quotas_of("acme") == Quotas(rates=Rates(60, 9), min_priority=-4)
    assert ring.quotas_of("other") == Quotas(max_state_bytes=5)
    assert len(ring.keys) == 1
    assert path.read_text().startswith("# Ours.")


def test_limits_of_the_file_go_before_the_usual_ones() -> None:
    usual = Quotas(4, 0, Rates(10, 20))
    assert Quotas(0, 7, Rates(99, 0)).or_else(usual) == Quotas(4, 7, Rates(99, 20))


def test_the_command_does_not_start_in_the_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends before it listens, and says what to do."""
    monkeypatch.setenv("HYPIC_ROUTER_HOST", "0.0.0.0")
    done = CliRunner().invoke(app, ["router"])
    assert done.exit_code == 2
    assert "host 0.0.0.0 is reached by other machines: set api_keys_file" in done.stderr
