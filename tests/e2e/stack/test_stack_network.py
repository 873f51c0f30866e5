"""The network to a worker is cut: packets vanish, and nobody is told."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.stack.cluster import Cluster
from tests.e2e.stack.fault_rig import PREFILL, VARIABLES, Rig, held, reached, release
from tests.e2e.stack.network import Namespace, why_no_namespaces
from tests.e2e.stack.served import wait_until

# The first worker is the one behind the cable.
LONELY, OTHER = PREFILL


@pytest.fixture(scope="module")
def network() -> Iterator[Namespace]:
    if reason := why_no_namespaces():
        pytest.skip(reason)
    with Namespace("cut") as network:
        yield network


@pytest.fixture(scope="module")
def rig(network: Namespace, random_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    roles = {LONELY: "prefill", OTHER: "prefill", "c0": "combine"}
    with Cluster(random_checkpoint, tmp_path_factory.mktemp("network"), roles, VARIABLES, network) as cluster:
        rig = Rig(cluster)
        rig.learn()
        yield rig
        cluster.forget_everything()


def heal(rig: Rig, network: Namespace) -> None:
    """All is as before: the worker registers again, and what it held is known or dropped."""
    network.plug()
    rig.cluster.restore()
    rig.cluster.wait_idle()
    rig.check(rig.ask(rig.new_salt()))


def test_a_prefill_worker_is_cut_off_before_it_is_asked(rig: Rig, network: Namespace) -> None:
    """Until the router notices, and after."""
    network.cut()
    for _ in range(3):
        with rig.asking(rig.new_salt()) as asking:
            asking.answer()
    wait_until(lambda: rig.cluster.ready_roles() == 2)
    with rig.asking(rig.new_salt()) as asking:
        answer = asking.answer()
    assert answer.served == ["cold"]
    heal(rig, network)


def test_a_prefill_worker_is_cut_off_under_a_transfer(rig: Rig, network: Namespace) -> None:
    faults = rig.at(held, (LONELY,))
    # Whoever is asked first, the capture comes to the one behind the cable.
    rig.cluster.signal(OTHER, signal.SIGSTOP)
    with rig.asking(rig.new_salt()) as asking:
        reached(faults)
        rig.cluster.signal(OTHER, signal.SIGCONT)
        network.cut()
        # What is in flight is lost too.
        time.sleep(0.2)
        release(faults)
        asking.answer()
    heal(rig, network)


def test_copies_behind_the_cut_are_not_waited_for(rig: Rig, network: Namespace) -> None:
    """The directory lists them until it misses the worker's heartbeats."""
    salts = [rig.new_salt() for _ in range(4)]
    for salt in salts:
        rig.check(rig.ask(salt))
    network.cut()
    for salt in salts:
        with rig.asking(salt) as asking:
            asking.answer()
    heal(rig, network)
