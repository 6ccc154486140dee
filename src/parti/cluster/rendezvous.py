"""Addresses where ranks meet, and names of jobs: how they are written, checked and derived."""

from __future__ import annotations

import hashlib
import re

from parti.cluster.spec import is_address
from parti.cluster.variables import Variables

_UNFIT = re.compile(r"[^A-Za-z0-9._-]+")


def tcp(host: str, port: int) -> str:
    """tcp://host:port, with an IPv6 address in brackets."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def job_name(*parts: object) -> str:
    """A name for a job that is fit for a file name; different parts give different names."""
    plain = "-".join(str(part) for part in parts)
    fit = _UNFIT.sub("-", plain)
    if fit == plain and len(plain) <= 80:
        return plain
    return f"{fit[:60]}-{_digest(plain):08x}"


def derived_port(job: str) -> int:
    """The same port on every host of `job`, and most likely another one for another job.

    Below the kernel's ephemeral ports (from 32768), so that no outgoing connection holds it.
    """
    return 20000 + _digest(job) % 10000


def given(variables: Variables) -> tuple[str, str] | None:
    """The meeting place in PARTI_RENDEZVOUS and where it was read, if a person has set one."""
    url = variables.text("PARTI_RENDEZVOUS")
    if url is None:
        return None
    directory = url.removeprefix("file://")
    if directory != url and directory.startswith("/"):
        return url, "PARTI_RENDEZVOUS"
    address = url.removeprefix("tcp://")
    if address != url and is_address(address):
        return url, "PARTI_RENDEZVOUS"
    if url.startswith("etcd://"):
        return url, "PARTI_RENDEZVOUS"  # who connects checks the rest
    raise variables.wrong(
        "PARTI_RENDEZVOUS",
        "tcp://host:port, etcd://host:port/prefix, or file:///directory on one host",
    )


def meeting_place(
    variables: Variables, *, port: int, host: str | None = None, source: str = ""
) -> tuple[str, str] | None:
    """Where the ranks meet and which variable says so; None where no host is known.

    What a person sets goes first: PARTI_RENDEZVOUS, then MASTER_ADDR and MASTER_PORT, which
    many batch scripts export. `host` (found in `source`) and `port` stand in for what is missing.
    """
    chosen = given(variables)
    if chosen is not None:
        return chosen
    master = variables.host("MASTER_ADDR")
    if master is not None:
        host, source = master, "MASTER_ADDR"
    master_port = variables.port("MASTER_PORT")
    if host is None:
        return None
    return tcp(host, port if master_port is None else master_port), source


def across_hosts(variables: Variables, url: str) -> str:
    """`url`, which must be reachable from several hosts."""
    if url.startswith("file://"):
        raise variables.wrong("PARTI_RENDEZVOUS", "tcp://host:port, as the job has several hosts")
    return url


def _digest(text: str) -> int:
    digest = hashlib.sha256(text.encode(errors="backslashreplace")).digest()
    return int.from_bytes(digest[:4], "big")
