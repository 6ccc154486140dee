"""One suite for every store that hosts can agree through: Parti's own, and a real etcd."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from parti.errors import CommError, CommTimeout, ConfigError, PeerLost
from parti.launch.agreement import Agreement, Changes, Lease, LeaseLost, connect
from parti.launch.store_server import Server

from ..etcd_server import Etcd, NoEtcd, find_etcd, serve_etcd

DEADLINE_S = 30.0
"""For what must come. Reached only where a test fails."""
PATIENCE_S = 0.2

OWNER = """
import sys, time
from parti.launch.agreement import LeaseLost, connect
lease = connect(sys.argv[1]).lease("owner", b"here", float(sys.argv[2]))
print("owns", flush=True)
try:
    while True:
        lease.renew()
        time.sleep(lease.ttl_s / 5)
except LeaseLost:
    print("lost", flush=True)
"""
RACER = """
import sys
from parti.launch.agreement import connect
store, me = connect(sys.argv[1]), sys.argv[2].encode()
store.add("ready", 1)
store.get("go", 30.0)
print(*(k for k in range(int(sys.argv[3])) if store.compare_set(f"k/{k}", None, me) == me))
for _ in range(10):
    store.add("count", 1)
"""
SERVER = """
import time
from parti.launch.store_server import Server
print(Server("127.0.0.1", 0).port, flush=True)
time.sleep(600)
"""


@contextlib.contextmanager
def python(source: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", source, *arguments], stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], DEADLINE_S)[0], "no word from the process"
    return process.stdout.readline().strip()


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.fixture(scope="session")
def etcd_program() -> Path:
    try:
        return find_etcd()
    except NoEtcd as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def etcd(etcd_program: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with serve_etcd(etcd_program, tmp_path_factory.mktemp("etcd")) as served:
        yield served


@dataclass(frozen=True)
class Place:
    """A store of one kind, empty."""

    url: str
    least_ttl_s: float
    """The shortest lease it grants, or a short one."""


@pytest.fixture(params=["parti", "etcd"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    if request.param == "etcd":
        port = request.getfixturevalue("etcd").port
        yield Place(f"etcd://127.0.0.1:{port}/test/{uuid.uuid4()}", 1.0)
        return
    server = Server("127.0.0.1", 0)
    yield Place(f"tcp://127.0.0.1:{server.port}", 0.3)
    server.close()


@pytest.fixture
def store(place: Place) -> Iterator[Agreement]:
    client = connect(place.url, timeout_s=DEADLINE_S)
    yield client
    client.close()


@contextlib.contextmanager
def other_client(place: Place) -> Iterator[Agreement]:
    client = connect(place.url, timeout_s=DEADLINE_S)
    yield client
    client.close()


class Hearer:
    """Follows changes, and knows what is there."""

    def __init__(self, changes: Changes) -> None:
        self.changes = changes
        self.heard: list[tuple[str, bytes | None]] = []

    def until(self, is_enough: Callable[[dict[str, bytes]], bool]) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not is_enough(self.there):
            left_s = max(0.0, deadline_s - time.monotonic())
            assert select.select([self.changes], [], [], left_s)[0], f"heard only {self.heard}"
            self.heard += self.changes.poll()

    @property
    def there(self) -> dict[str, bytes]:
        return {key: value for key, value in dict(self.heard).items() if value is not None}


@pytest.fixture
def hearer(store: Agreement) -> Iterator[Hearer]:
    with contextlib.closing(store.changes("")) as changes:
        yield Hearer(changes)


# Keys and values


def test_keys_and_values(store: Agreement) -> None:
    assert store.look("k") is None
    store.set("k", b"")
    assert store.look("k") == b""
    store.set("k", b"\x00\xff" * 1000)
    assert store.look("k") == store.get("k", 0.0) == b"\x00\xff" * 1000
    store.set("ä/1", b"")
    store.set("ä/0", b"")
    store.set("ä", b"")
    assert store.keys("ä/") == ("ä/0", "ä/1")
    assert store.keys("") == ("k", "ä", "ä/0", "ä/1")
    assert store.delete("k")
    assert not store.delete("k")
    assert store.look("k") is None


def test_counting(store: Agreement) -> None:
    assert store.add("n", 2) == 2
    assert store.add("n", -5) == -3
    store.set("text", b"x")
    with pytest.raises(CommError, match=r"'text'.* is not a number"):
        store.add("text", 1)
    assert store.add("n", 1) == -2


def test_compare_and_set(store: Agreement) -> None:
    assert store.compare_set("k", b"1", b"2") is None
    assert store.compare_set("k", None, b"1") == b"1"
    assert store.compare_set("k", None, b"2") == b"1"
    assert store.compare_set("k", b"1", b"") == b""
    assert store.compare_set("k", None, b"3") == b""
    assert store.compare_set("k", b"", b"3") == b"3"


def test_of_several_processes_exactly_one_sets_a_key(place: Place, store: Agreement) -> None:
    num_keys, names = 40, ("a", "b", "c")
    with contextlib.ExitStack() as racers:
        started = [
            racers.enter_context(python(RACER, place.url, name, str(num_keys))) for name in names
        ]
        deadline_s = time.monotonic() + DEADLINE_S
        while store.look("ready") != b"%d" % len(names):
            assert time.monotonic() < deadline_s
        store.set("go", b"")
        won = {
            name: [int(word) for word in process.communicate(timeout=DEADLINE_S)[0].split()]
            for name, process in zip(names, started, strict=True)
        }
    assert sorted(k for keys in won.values() for k in keys) == list(range(num_keys))
    for name, keys in won.items():
        assert {store.look(f"k/{k}") for k in keys} <= {name.encode()}
    assert store.look("count") == b"%d" % (10 * len(names))


def test_a_value_arrives_with_one_who_waits_for_it(place: Place, store: Agreement) -> None:
    found: list[bytes] = []
    with other_client(place) as waiting:
        thread = threading.Thread(target=lambda: found.append(waiting.get("k", DEADLINE_S)))
        thread.start()
        store.set("kk", b"another")
        store.set("k", b"v" * 500_000)
        thread.join(DEADLINE_S)
    assert found == [b"v" * 500_000]


def test_a_key_that_is_not_set_in_time(store: Agreement) -> None:
    with pytest.raises(TimeoutError, match=r"'k' was not set in .* within 0.05 s"):
        store.get("k", 0.05)
    assert store.add("n", 1) == 1  # the client is still good


# Changes


def test_changes_begin_with_what_is_there(store: Agreement) -> None:
    store.set("a/1", b"1")
    store.set("a/0", b"0")
    store.set("b", b"")
    with contextlib.closing(store.changes("a/")) as changes:
        assert select.select([changes], [], [], DEADLINE_S)[0]
        assert sorted(changes.poll()) == [("a/0", b"0"), ("a/1", b"1")]


def test_changes_have_what_was_there_at_once(store: Agreement) -> None:
    for k in range(5):
        store.set(f"{k}", b"x" * 400_000)  # more than one frame
    with contextlib.closing(store.changes("")) as changes:
        assert len(changes.poll()) == 5


def test_changes_come_in_order_to_every_hearer(store: Agreement, hearer: Hearer) -> None:
    with contextlib.closing(store.changes("a")) as only_a:
        one = Hearer(only_a)
        store.set("a", b"1")
        store.set("b", b"2")
        store.compare_set("b", b"2", b"3")
        store.add("c", 1)
        store.delete("a")
        store.set("end", b"")
        hearer.until(lambda there: "end" in there)
        store.set("a/end", b"")
        one.until(lambda there: "a/end" in there)
    last = list({key: None for key, _ in reversed(hearer.heard)})[::-1]  # the last word on each
    assert last == ["b", "c", "a", "end"]
    assert hearer.there == {"b": b"3", "c": b"1", "end": b""}
    assert {key for key, _ in one.heard} == {"a", "a/end"}


def test_every_final_value_is_heard(place: Place, hearer: Hearer) -> None:
    def write(name: str) -> None:
        with other_client(place) as client:
            for k in range(100):
                client.set(f"{name}/{k % 3}", b"%d" % k)
            client.delete(f"{name}/0")

    threads = [threading.Thread(target=write, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    final = {f"{name}/{k}": value for name in "abc" for k, value in ((1, b"97"), (2, b"98"))}
    hearer.until(lambda there: there == final and len(dict(hearer.heard)) == 9)
    for thread in threads:
        thread.join(DEADLINE_S)
    assert hearer.there == final


def test_one_that_hears_late_hears_the_last(store: Agreement, hearer: Hearer) -> None:
    for k in range(30):
        store.set("k", b"%d" % k + b"x" * 300_000)
    hearer.until(lambda there: there.get("k", b"").startswith(b"29x"))


# Leases


def test_a_lease_keeps_its_key_for_as_long_as_it_is_renewed(place: Place, store: Agreement) -> None:
    """Where this process itself was held up for too long, the test says nothing: once more."""
    for _ in range(10):
        lease = store.lease("k", b"v", place.least_ttl_s)
        assert lease.ttl_s >= place.least_ttl_s
        if was_in_time(lease):
            assert store.look("k") == b"v"
            lease.renew()
            return
    pytest.fail("a lease that was renewed in time was lost, or this machine is too busy")


def was_in_time(lease: Lease) -> bool:
    """Renew for longer than it lasts by itself."""
    started_s = renewed_s = time.monotonic()
    while time.monotonic() < started_s + 1.4 * lease.ttl_s:
        try:
            lease.renew()
        except LeaseLost:
            assert time.monotonic() - renewed_s > 0.9 * lease.ttl_s, "lost, though renewed in time"
            return False
        renewed_s = time.monotonic()
        time.sleep(lease.ttl_s / 20)
    return True


def test_a_lease_that_is_ended(store: Agreement, hearer: Hearer) -> None:
    lease = store.lease("k", b"v", 60.0)
    assert store.look("k") == b"v"
    lease.end()
    assert store.look("k") is None
    with pytest.raises(LeaseLost, match=r"the lease of 'k' was not renewed within 60 s"):
        lease.renew()
    lease.end()
    store.set("end", b"")
    hearer.until(lambda there: "end" in there)
    assert hearer.there == {"end": b""}


def test_a_key_that_somebody_sets_leaves_its_lease(store: Agreement) -> None:
    first = store.lease("k", b"1", 60.0)
    second = store.lease("k", b"2", 60.0)
    first.end()
    assert store.look("k") == b"2"
    store.set("k", b"3")
    second.renew()
    second.end()
    assert store.look("k") == b"3"


def test_a_lease_survives_the_end_of_its_connection(place: Place, store: Agreement) -> None:
    client = connect(place.url, timeout_s=DEADLINE_S)
    client.lease("k", b"v", 60.0)
    client.abandon()
    assert store.look("k") == b"v"


def test_a_lease_of_no_length(store: Agreement) -> None:
    with pytest.raises(ConfigError, match="ttl_s=0: a lease lasts for more than 0 s"):
        store.lease("k", b"v", 0.0)


def test_an_owner_that_falls_silent_loses_its_key(place: Place, hearer: Hearer) -> None:
    with python(OWNER, place.url, str(place.least_ttl_s)) as owner:
        assert line_of(owner) == "owns"
        hearer.until(lambda there: there == {"owner": b"here"})
        with frozen(owner.pid):
            hearer.until(lambda there: there == {})
        assert line_of(owner) == "lost"


def test_an_owner_that_is_killed_loses_its_key(place: Place, hearer: Hearer) -> None:
    with python(OWNER, place.url, str(place.least_ttl_s)) as owner:
        assert line_of(owner) == "owns"
        hearer.until(lambda there: there == {"owner": b"here"})
        owner.kill()
        hearer.until(lambda there: there == {})


# Servers that are held up, gone, or something else


@pytest.fixture(params=["parti", "etcd"])
def process_of_server(request: pytest.FixtureRequest) -> Iterator[tuple[str, int]]:
    """Its URL and process id."""
    if request.param == "etcd":
        served = request.getfixturevalue("etcd")
        yield f"etcd://127.0.0.1:{served.port}/test/{uuid.uuid4()}", served.pid
        return
    with python(SERVER) as server:
        yield f"tcp://127.0.0.1:{line_of(server)}", server.pid


def test_a_server_that_is_held_up_is_an_error_in_time(process_of_server: tuple[str, int]) -> None:
    url, pid = process_of_server
    client = connect(url, timeout_s=DEADLINE_S, patience_s=PATIENCE_S)
    changes = client.changes("")
    lease = client.lease("lease", b"", 30.0)
    calls: tuple[Callable[[], object], ...] = (
        lambda: client.set("k", b"1"),
        lambda: client.look("k"),
        lambda: client.get("k", 0.1),
        lambda: client.add("n", 1),
        lambda: client.compare_set("c", None, b"1"),
        lambda: client.changes(""),
        lease.renew,
    )
    with frozen(pid):
        for call in calls:
            started_s = time.monotonic()
            with pytest.raises(CommTimeout, match=r"did not answer within 0\.[23] s"):
                call()
            assert time.monotonic() - started_s < 10 * PATIENCE_S
    patient = connect(url, timeout_s=DEADLINE_S)
    patient.set("after", b"1")
    hearer = Hearer(changes)
    hearer.until(lambda there: there.get("after") == b"1")
    deadline_s = time.monotonic() + DEADLINE_S
    while True:  # the same client goes on, as soon as the server has caught up
        with contextlib.suppress(CommTimeout):
            client.set("k", b"2")
            lease.renew()
            break
        assert time.monotonic() < deadline_s
    assert client.look("k") == b"2"
    changes.close()
    client.close()
    patient.close()


def test_a_server_that_was_held_up_lets_no_lease_expire() -> None:
    ttl_s = 1.5
    with python(SERVER) as server:
        url = f"tcp://127.0.0.1:{line_of(server)}"
        with contextlib.closing(connect(url, timeout_s=DEADLINE_S)) as store:
            lease = store.lease("k", b"v", ttl_s)
            with frozen(server.pid):
                time.sleep(ttl_s * 1.2)  # the subject: time that passes without the server
            lease.renew()
            assert store.look("k") == b"v"


def test_a_server_that_is_gone(etcd_program: Path, tmp_path: Path) -> None:
    with serve_etcd(etcd_program, tmp_path) as served:
        see_it_go(f"etcd://127.0.0.1:{served.port}/x", served.pid)
    with python(SERVER) as server:
        see_it_go(f"tcp://127.0.0.1:{line_of(server)}", server.pid)


def see_it_go(url: str, pid: int) -> None:
    client = connect(url, timeout_s=DEADLINE_S)
    lease = client.lease("k", b"", 30.0)
    changes = client.changes("")
    assert changes.poll() == [("k", b"")]
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(PeerLost):
        Hearer(changes).until(lambda there: "never" in there)
    for call in (lambda: client.look("k"), lambda: client.add("n", 1), lease.renew):
        with pytest.raises(PeerLost, match="is gone"):
            call()
    with pytest.raises(PeerLost, match="is gone"):
        client.changes("")
    changes.close()
    client.close()


@pytest.mark.parametrize("scheme", ["tcp://127.0.0.1:{}", "etcd://127.0.0.1:{}/x"])
def test_nobody_there(scheme: str) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        with pytest.raises(CommTimeout, match=rf"no \w+ at 127.0.0.1:{port} within 0.1 s"):
            connect(scheme.format(port), timeout_s=0.1)


def test_the_wrong_kind_of_server(etcd: Etcd) -> None:
    server = Server("127.0.0.1", 0)
    with pytest.raises(CommError, match=f"what answers at 127.0.0.1:{server.port} is not etcd"):
        connect(f"etcd://127.0.0.1:{server.port}/x", timeout_s=0.1)
    server.close()
    client = connect(f"tcp://127.0.0.1:{etcd.port}", patience_s=PATIENCE_S)
    with pytest.raises(CommError, match="is no store"):
        client.look("k")
    client.abandon()


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("127.0.0.1:5", "no kind of store; expected tcp://host:port"),
        ("http://h:5", "'http' is no kind of store"),
        ("tcp://h", "expected tcp://host:port"),
        ("etcd://h:5", "names no prefix; expected etcd://"),
        ("etcd://h:5/", "names no prefix"),
        ("etcd://h/x", "is not an address; expected etcd://"),
        ("etcd://h:5,/x", "is not an address"),
        ("etcd://h:5,i:z/x", "is not an address: .*z"),
        ("etcd://ann@h:5/x", "lacks a user or a password"),
        ("etcd://ann:secret@h/x", r"'etcd://ann:\*\*\*@h/x' is not an address"),
    ],
)
def test_urls_that_are_none(url: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as raised:
        connect(url)
    assert "secret" not in str(raised.value)


# etcd only


def test_prefixes_keep_jobs_apart(etcd: Etcd) -> None:
    urls = [f"etcd://127.0.0.1:{etcd.port}/{uuid.uuid4()}{end}" for end in ("", "0")]
    with (
        contextlib.closing(connect(urls[0])) as one,
        contextlib.closing(connect(urls[1])) as other,
    ):
        other.set("k", b"")
        assert one.keys("") == ()
        with contextlib.closing(one.changes("")) as changes:
            assert changes.poll() == []


def test_another_endpoint_takes_over(etcd: Etcd, etcd_program: Path, tmp_path: Path) -> None:
    """One that is there, held up, or gone, before one that is there. (Two etcds, not a cluster:
    each answers for itself, which shows who was asked.)"""
    with serve_etcd(etcd_program, tmp_path) as first:
        url = f"etcd://127.0.0.1:{first.port},127.0.0.1:{etcd.port}/{uuid.uuid4()}"
        client = connect(url, timeout_s=DEADLINE_S, patience_s=4 * PATIENCE_S)
        changes = client.changes("")
        client.set("who", b"first")
        Hearer(changes).until(lambda there: there == {"who": b"first"})
        with frozen(first.pid):
            assert client.look("who") is None  # the other was asked
        client.close()
        client = connect(url, timeout_s=DEADLINE_S)
        assert client.look("who") == b"first"
        os.kill(first.pid, signal.SIGKILL)
        client.set("who", b"second")
        assert client.get("who", DEADLINE_S) == b"second"
        hearer = Hearer(changes)
        hearer.until(lambda there: there == {"who": b"second"})
        client.delete("who")
        hearer.until(lambda there: there == {})
        changes.close()
        client.close()


def test_who_asks(etcd_program: Path, tmp_path: Path) -> None:
    with serve_etcd(etcd_program, tmp_path) as served:
        place = f"127.0.0.1:{served.port}"
        with contextlib.closing(connect(f"etcd://ann:x@{place}/job")) as store:
            store.set("k", b"nobody is asked who he is")
        for path, body in (
            ("user/add", {"name": "root", "password": "r"}),
            ("user/grant", {"user": "root", "role": "root"}),
            ("user/add", {"name": "ann", "password": "a@/b"}),
            ("user/add", {"name": "bob", "password": "b"}),
            ("role/add", {"name": "jobs"}),
            (
                "role/grant",
                # from /job/ to /job0
                {
                    "name": "jobs",
                    "perm": {"permType": "READWRITE", "key": "L2pvYi8=", "range_end": "L2pvYjA="},
                },
            ),
            ("user/grant", {"user": "ann", "role": "jobs"}),
            ("enable", {}),
        ):
            connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=DEADLINE_S)
            connection.request("POST", f"/v3/auth/{path}", json.dumps(body))
            assert connection.getresponse().status == 200, path
            connection.close()
        with contextlib.closing(connect(f"etcd://ann:a%40%2Fb@{place}/job")) as store:
            store.lease("k", b"v", 30.0).renew()
            assert store.get("k", DEADLINE_S) == b"v"
            with contextlib.closing(store.changes("")) as changes:
                Hearer(changes).until(lambda there: there == {"k": b"v"})
        for credentials, problem in (
            ("", "user name is empty.*expected etcd://"),
            ("ann:wrong@", "user 'ann' or the password is wrong"),
            ("bob:b@", "permission denied.*give the role of user 'bob' the right"),
        ):
            with pytest.raises(ConfigError, match=problem):
                connect(f"etcd://{credentials}{place}/job")


def test_what_is_imported() -> None:
    source = (
        "import sys; from parti.launch.agreement import connect; import parti.launch.store; "
        "assert 'parti.launch.etcd' not in sys.modules; assert 'http.client' not in sys.modules; "
        "import parti.launch.etcd; print('torch' in sys.modules)"
    )
    with python(source) as process:
        assert line_of(process) == "False"
