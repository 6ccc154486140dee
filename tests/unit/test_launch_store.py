"""The key-value store of the supervisors: its table, and client and server over a socket."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator

import msgspec
import pytest

from parti.errors import CommError, CommTimeout, ConfigError, PeerLost
from parti.launch.store import (
    Add,
    Answer,
    CompareSet,
    Delete,
    End,
    Get,
    Grant,
    Keys,
    Renew,
    Set,
    Store,
    Subscribe,
    Will,
    connect,
    frame,
    parse_url,
    take_frames,
)
from parti.launch.store_server import Client, Server, Table

DEADLINE_S = 20.0


class Script:
    """A table with clients, and what they were answered."""

    def __init__(self) -> None:
        self.table = Table()

    def ask(self, client: Client, request: object, now_s: float = 0.0) -> Answer | None:
        self.table.apply(client, request, now_s)  # type: ignore[arg-type]
        return answered(client)


def answered(client: Client) -> Answer | None:
    answers = [msgspec.msgpack.decode(b, type=Answer) for b in take_frames(client.to_send)]
    assert len(answers) <= 1
    return answers[0] if answers else None


def test_a_get_waits_for_its_key() -> None:
    script, waiting, setting = Script(), Client(), Client()
    assert script.ask(waiting, Get("k", 5.0), now_s=10.0) is None
    assert script.table.next_expiry_s() == 15.0
    assert script.ask(setting, Set("other", b"x")) == Answer()
    assert answered(waiting) is None
    script.ask(setting, Set("k", b"v"))
    assert answered(waiting) == Answer(value=b"v")
    assert script.table.next_expiry_s() is None


def test_a_get_gives_up_at_its_deadline() -> None:
    script, waiting = Script(), Client()
    script.ask(waiting, Get("k", 5.0), now_s=10.0)
    script.table.expire(14.9)
    assert answered(waiting) is None
    script.table.expire(15.0)
    assert answered(waiting) == Answer()
    assert script.ask(waiting, Get("k", 0.0)) == Answer()


def test_the_first_to_compare_and_set_wins() -> None:
    script, client = Script(), Client()
    assert script.ask(client, CompareSet("k", None, b"1")) == Answer(value=b"1")
    assert script.ask(client, CompareSet("k", None, b"2")) == Answer(value=b"1")
    assert script.ask(client, CompareSet("k", b"1", b"3")) == Answer(value=b"3")
    assert script.ask(client, CompareSet("new", b"1", b"3")) == Answer()


def test_counting_deleting_and_listing() -> None:
    script, client = Script(), Client()
    assert script.ask(client, Add("n", 2)) == Answer(number=2)
    assert script.ask(client, Add("n", -5)) == Answer(number=-3)
    script.ask(client, Set("text", b"x"))
    answer = script.ask(client, Add("text", 1))
    assert answer is not None
    assert "not a number" in answer.problem
    script.ask(client, Set("a/1", b""))
    script.ask(client, Set("a/0", b""))
    assert script.ask(client, Keys("a/")) == Answer(keys=("a/0", "a/1"))
    assert script.ask(client, Delete("a/1")) == Answer(number=1)
    assert script.ask(client, Delete("a/1")) == Answer(number=0)
    assert script.ask(client, Keys("a/")) == Answer(keys=("a/0",))


def test_a_will_is_carried_out_unless_it_is_taken_back_or_too_late() -> None:
    script, gone, late, tidy = Script(), Client(), Client(), Client()
    waiting = Client()
    script.ask(waiting, Get("over", 9.0))
    script.ask(gone, Will("over", b"gone"))
    script.ask(late, Will("over", b"late"))
    script.ask(tidy, Will("tidy", b"tidy"))
    script.ask(tidy, Will(None, b""))
    for client in (gone, late, tidy):
        script.table.forget(client)
    assert answered(waiting) == Answer(value=b"gone")
    assert script.ask(waiting, Keys("")) == Answer(keys=("over",))


def test_one_that_is_gone_is_not_answered() -> None:
    script, gone = Script(), Client()
    script.ask(gone, Get("k", 9.0))
    script.table.forget(gone)
    script.ask(Client(), Set("k", b"v"))
    assert answered(gone) is None


def test_frames_that_are_cut_or_too_long() -> None:
    sent = frame(Answer(value=b"abc")) + frame(Answer(number=3))
    buffer = bytearray()
    bodies: list[bytes] = []
    for byte in sent:
        buffer.append(byte)
        bodies += take_frames(buffer)
    assert len(bodies) == 2
    assert not buffer
    with pytest.raises(CommError, match="a frame of 1195725856 bytes"):
        list(take_frames(bytearray(b"GET / HTTP/1.1\r\n")))


@pytest.mark.parametrize("url", ["tcp://h", "h:1", "tcp://:1", "file:///x", "tcp://h:x"])
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(ConfigError, match="is not an address"):
        parse_url(url)


def test_addresses() -> None:
    assert parse_url("tcp://node-0.svc:29400") == ("node-0.svc", 29400)
    assert parse_url("tcp://[::1]:5") == ("::1", 5)


@pytest.fixture
def server() -> Iterator[Server]:
    served = Server("127.0.0.1", 0)
    yield served
    served.close()


def client_of(server: Server) -> Store:
    return connect(f"tcp://{server.host}:{server.port}", timeout_s=DEADLINE_S)


def test_a_value_arrives_with_one_who_waits_for_it(server: Server) -> None:
    with client_of(server) as one, client_of(server) as other:
        found: list[bytes] = []
        thread = threading.Thread(target=lambda: found.append(one.get("k", DEADLINE_S)))
        thread.start()
        other.set("k", b"v" * 1_000_000)
        thread.join(DEADLINE_S)
        assert found == [b"v" * 1_000_000]


def test_a_key_that_is_not_set_in_time(server: Server) -> None:
    with client_of(server) as store:
        with pytest.raises(TimeoutError, match="'k' was not set"):
            store.get("k", 0.01)
        assert store.add("n", 1) == 1  # the connection is still good


def test_a_watch_becomes_readable(server: Server) -> None:
    with client_of(server) as store:
        watch = store.watch("over", timeout_s=DEADLINE_S)
        assert watch.poll() is None
        store.set("over", b"yes")
        assert select.select([watch], [], [], DEADLINE_S)[0]
        assert watch.poll() == b"yes"
        watch.close()


def test_a_vanished_client_leaves_its_will(server: Server) -> None:
    with client_of(server) as store:
        vanishing = client_of(server)
        vanishing.leave_will("over", b"lost")
        vanishing.abandon()
        assert store.get("over", DEADLINE_S) == b"lost"


def test_a_client_that_says_goodbye_leaves_none(server: Server) -> None:
    with client_of(server) as store:
        leaving = client_of(server)
        leaving.leave_will("over", b"lost")
        leaving.close()
        assert store.keys("") == ()


def test_a_server_that_is_gone_is_an_error() -> None:
    server = Server("127.0.0.1", 0)
    store = client_of(server)
    watch = store.watch("k", timeout_s=DEADLINE_S)
    server.close()
    assert select.select([watch], [], [], DEADLINE_S)[0]
    with pytest.raises(PeerLost, match="is gone"):
        watch.poll()
    for _ in range(2):
        with pytest.raises(PeerLost, match="is gone"):
            store.get("k", DEADLINE_S)
    watch.close()
    store.abandon()


def test_nobody_there() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        with pytest.raises(CommTimeout, match=f"no store at 127.0.0.1:{port} within 0.1 s"):
            connect(f"tcp://127.0.0.1:{port}", timeout_s=0.1)


def test_a_port_in_use(server: Server) -> None:
    with pytest.raises(ConfigError, match=f"port {server.port} of 127.0.0.1 is in use"):
        Server("127.0.0.1", server.port)


def test_strangers_do_not_disturb(server: Server) -> None:
    with client_of(server) as store:
        with socket.create_connection((server.host, server.port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            stranger.settimeout(DEADLINE_S)
            assert stranger.recv(1) == b""
        store.set("k", b"v")
        assert store.get("k", DEADLINE_S) == b"v"


def test_a_lease_lasts_as_long_as_it_is_renewed() -> None:
    script, owner = Script(), Client()
    assert script.ask(owner, Grant("k", b"v", 5.0), now_s=10.0) == Answer(number=1)
    script.table.forget(owner)  # a lease is bound to no connection
    assert script.table.next_expiry_s() == 15.0
    assert script.ask(Client(), Renew(1), now_s=14.0) == Answer(number=1)
    script.table.expire(18.9)
    assert script.ask(Client(), Keys("")) == Answer(keys=("k",))
    script.table.expire(19.0)
    assert script.ask(Client(), Keys("")) == Answer()
    assert script.ask(Client(), Renew(1), now_s=19.0) == Answer(number=0)
    assert script.table.next_expiry_s() is None


def test_a_server_that_was_held_up_extends_leases_but_no_waits() -> None:
    script, waiting = Script(), Client()
    script.ask(Client(), Grant("k", b"v", 5.0), now_s=10.0)
    script.ask(waiting, Get("other", 5.0), now_s=10.0)
    script.table.extend(100.0)
    script.table.expire(114.9)
    assert answered(waiting) == Answer()
    assert script.ask(Client(), Keys("")) == Answer(keys=("k",))
    script.table.expire(115.0)
    assert script.ask(Client(), Keys("")) == Answer()


@pytest.mark.parametrize(
    "another", [Set("k", b"2"), Add("k", 1), CompareSet("k", b"1", b"2"), Grant("k", b"2", 9.0)]
)
def test_a_key_that_is_set_leaves_its_lease(another: object) -> None:
    script, client = Script(), Client()
    script.ask(client, Grant("k", b"1", 5.0))
    script.ask(client, another)
    assert script.ask(client, End(1)) == Answer(number=1)
    assert script.ask(client, Get("k", 0.0)) == Answer(value=b"2")
    assert script.ask(client, End(1)) == Answer(number=0)


def test_a_key_that_was_deleted_does_not_take_a_later_one_with_it() -> None:
    script, client = Script(), Client()
    script.ask(client, Grant("k", b"1", 5.0))
    script.ask(client, Delete("k"))
    script.ask(client, Set("k", b"2"))
    script.table.expire(5.0)
    assert script.ask(client, Get("k", 0.0)) == Answer(value=b"2")


def heard(client: Client) -> list[tuple[str, bytes | None]]:
    """What a subscriber is sent, until there is no more."""
    changes: list[tuple[str, bytes | None]] = []
    while client.load():
        for body in take_frames(client.to_send):
            changes += msgspec.msgpack.decode(body, type=Answer).changes
    return changes


def test_a_subscriber_hears_what_is_there_and_what_changes() -> None:
    script, one, other = Script(), Client(), Client()
    script.ask(one, Set("a/1", b"1"))
    script.ask(one, Set("b", b"1"))
    script.table.apply(one, Subscribe("a/"), 0.0)
    script.table.apply(other, Subscribe(""), 0.0)
    assert heard(one) == [("a/1", b"1")]
    assert heard(other) == [("a/1", b"1"), ("b", b"1")]
    leaving = Client()
    script.ask(leaving, Will("a/will", b"w"))
    script.ask(leaving, Grant("a/lease", b"l", 5.0))
    script.table.forget(leaving)
    script.table.expire(5.0)
    script.ask(leaving, Delete("a/1"))
    script.ask(leaving, Delete("a/1"))
    last = [("a/will", b"w"), ("a/lease", None), ("a/1", None)]
    assert heard(one) == heard(other) == last
    script.table.forget(one)
    script.ask(leaving, Set("a/1", b"2"))
    assert heard(one) == []


def test_a_slow_subscriber_costs_no_more_than_the_last_values() -> None:
    script, slow, client = Script(), Client(), Client()
    script.table.apply(slow, Subscribe(""), 0.0)
    assert slow.load()
    num_bytes = len(slow.to_send)
    for k in range(1000):
        script.ask(client, Set("a", b"%d" % k))
        script.ask(client, Set("b", b"%d" % k))
    assert slow.load()
    assert len(slow.to_send) == num_bytes  # nothing, until it has read
    assert heard(slow) == [("a", b"999"), ("b", b"999")]


def test_much_news_comes_in_frames_that_a_store_may_send() -> None:
    script, client = Script(), Client()
    for k in range(100):
        script.ask(client, Set(f"{k:02}", b"x" * 1_000_000))
    script.table.apply(client, Subscribe(""), 0.0)
    assert [key for key, _ in heard(client)] == [f"{k:02}" for k in range(100)]


def test_a_client_that_a_server_refused_something_goes_on(server: Server) -> None:
    with client_of(server) as store:
        store.set("text", b"x")
        store.leave_will("over", b"lost")
        with pytest.raises(CommError, match="'text' is not a number"):
            store.add("text", 1)
        assert store.look("text") == b"x"
        assert store.look("over") is None
