"""Slurm's host lists: expansion as scontrol has it, and compression as its exact inverse."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parti.cluster import compress_hostlist, expand_hostlist
from parti.cluster.hostlist import expand_counts
from parti.errors import ConfigError

# What `scontrol show hostnames` of Slurm 22.05 prints; tests/slurm asks it again.
BY_SCONTROL = {
    "rack[1-2]node[01-03,7]": "rack1node01 rack1node02 rack1node03 rack1node7 "
    "rack2node01 rack2node02 rack2node03 rack2node7",
    "n[08-11]": "n08 n09 n10 n11",
    "n[8-11],login": "n8 n9 n10 n11 login",
    "n[99-101]": "n99 n100 n101",
    "n[099-101]": "n099 n100 n101",
    "n[1-02]": "n1 n2",
    "n[1-3,07]": "n1 n2 n3 n07",
    "n[007]": "n007",
    "n[1,1]": "n1 n1",
    "n[1-2][3-4]": "n13 n14 n23 n24",
    "a[3,1-2]": "a3 a1 a2",
    "a,b,c[1-2],d": "a b c1 c2 d",
    "a,,b": "a b",
    "n[1-2], m": "n1 n2 m",
    "[1-3]": "1 2 3",
    "": "",
}
# Suffixes are older Slurms' and other tools' syntax; Slurm 22.05 itself refuses them.
WITH_SUFFIXES = {
    "n[1-2]-ib": "n1-ib n2-ib",
    "n[1-2]-ib[0-1].cluster": "n1-ib0.cluster n1-ib1.cluster n2-ib0.cluster n2-ib1.cluster",
}

letters = st.text(alphabet="abcxyz-._", max_size=3)
numbers = st.one_of(
    st.integers(0, 12).map(str),
    st.integers(95, 105).map(str),
    st.from_regex(r"[0-9]{1,4}", fullmatch=True),
    st.from_regex(r"[0-9]{17,22}", fullmatch=True),
)
# Few prefixes and close numbers, so that neighbours often fold, in one and in two places.
hosts = st.one_of(
    st.builds("n{}".format, st.integers(0, 12)),
    st.builds("n{:02d}".format, st.integers(0, 12)),
    st.builds("r{}n{:02d}-ib".format, st.integers(1, 3), st.integers(8, 11)),
    st.builds("{}{}{}{}".format, letters, numbers, letters, numbers),
    st.text(min_size=1, max_size=6).filter(lambda text: not set(text) & set(",[]")),
).filter(lambda host: not any(character.isspace() for character in host))


@pytest.mark.parametrize(("hostlist", "names"), (BY_SCONTROL | WITH_SUFFIXES).items())
def test_expands(hostlist: str, names: str) -> None:
    assert expand_hostlist(hostlist) == tuple(names.split())


@pytest.mark.parametrize(
    ("names", "hostlist"),
    {
        "n1 n2 n3": "n[1-3]",
        "n08 n09 n10": "n[08-10]",
        "n9 n10 n11": "n[9-11]",
        "n3 n2 n1": "n[3,2,1]",
        "n1 n02": "n[1,02]",
        "n1 n1": "n[1,1]",
        "a n1 n2 b n4": "a,n[1-2],b,n4",
        "r1n1 r1n2 r2n1 r2n2": "r[1-2]n[1-2]",
        "r1n1 r2n1": "r[1-2]n1",
        "n1-ib n2-ib": "n[1-2]-ib",
        "login": "login",
        "": "",
    }.items(),
)
def test_compresses(names: str, hostlist: str) -> None:
    assert compress_hostlist(names.split()) == hostlist


@settings(deadline=None)
@given(st.lists(hosts, max_size=30))
def test_expanding_undoes_compressing(names: list[str]) -> None:
    assert expand_hostlist(compress_hostlist(names)) == tuple(names)


@settings(deadline=None)
@given(st.integers(1, 3), st.integers(0, 90), st.integers(1, 40), st.integers(1, 3))
def test_a_grid_of_hosts_is_one_item(racks: int, low: int, count: int, width: int) -> None:
    names = [
        f"rack{rack}n{node:0{width}d}x" for rack in range(racks) for node in range(low, low + count)
    ]
    hostlist = compress_hostlist(names)
    assert expand_hostlist(hostlist) == tuple(names)
    assert hostlist.count("rack") == 1


@settings(deadline=None)
@given(st.text(alphabet="na01-9[],( x", max_size=20))
def test_any_text_is_a_list_or_an_error(text: str) -> None:
    try:
        names = expand_hostlist(text)
    except ConfigError:
        return
    assert all(name and not set(name) & set(" ,[]") for name in names)


@pytest.mark.parametrize(
    ("hostlist", "fact"),
    {
        "n[3-1]": "'3-1' runs backwards",
        "n[]": "'' is no range",
        "n[1-]": "'1-' is no range",
        "n[a-b]": "'a-b' is no range",
        "n[1-2/2]": "'1-2/2' is no range",
        "n[1": "not closed",
        "n1]": "closes nothing",
        "a[1-2,b[3-4]]": "a bracket within a bracket",
        "n [1-2]": "a blank within",
        "n[0-999999999]": "beyond 1,048,576 hosts",
        "n[0-9999][0-9999]": "beyond 1,048,576 hosts",
    }.items(),
)
def test_refuses(hostlist: str, fact: str) -> None:
    with pytest.raises(ConfigError, match="Host list") as caught:
        expand_hostlist(hostlist)
    assert fact in str(caught.value)


@pytest.mark.parametrize("host", ["", "a b", "a,b", "a[1]"])
def test_refuses_to_compress_what_is_no_host(host: str) -> None:
    with pytest.raises(ConfigError, match="a host name"):
        compress_hostlist(["n1", host])


def test_repeated_counts() -> None:
    assert expand_counts("2(x3),1") == (2, 2, 2, 1)
    assert expand_counts("1") == (1,)
    assert expand_counts("16(x2),8,4(x1)") == (16, 16, 8, 4)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 200), st.integers(1, 5)), min_size=1, max_size=6))
def test_repeated_counts_add_up(runs: list[tuple[int, int]]) -> None:
    text = ",".join(f"{count}(x{times})" for count, times in runs)
    assert expand_counts(text) == tuple(count for count, times in runs for _ in range(times))


@pytest.mark.parametrize("counts", ["", "2(x)", "2x3", "-1", "two", "2(x3", "1(x999999999)"])
def test_refuses_counts(counts: str) -> None:
    with pytest.raises(ConfigError):
        expand_counts(counts)
