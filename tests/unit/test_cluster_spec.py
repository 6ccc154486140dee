"""ClusterSpec: the value tf.distribute users know, and what it refuses."""

import json
import pickle

import pytest

from parti.cluster import ClusterSpec
from parti.errors import ConfigError

JOBS = {"worker": ["b:2222", "c:2222"], "chief": ["a:2222"]}


def test_answers_what_tf_users_ask() -> None:
    spec = ClusterSpec(JOBS)
    assert spec.task_address("worker", 1) == "c:2222"
    assert spec.num_tasks("worker") == 2
    assert spec.as_dict() == JOBS
    assert dict(spec.jobs) == {"chief": ("a:2222",), "worker": ("b:2222", "c:2222")}
    assert repr(spec) == "ClusterSpec({'chief': ['a:2222'], 'worker': ['b:2222', 'c:2222']})"


def test_is_a_value() -> None:
    spec = ClusterSpec(JOBS)
    again = ClusterSpec(dict(reversed(JOBS.items())))
    assert spec == again
    assert hash(spec) == hash(again)
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert spec != ClusterSpec({"worker": ["b:2222"]})
    with pytest.raises(AttributeError):
        spec._jobs = ()  # type: ignore[misc]


def test_is_not_changed_through_what_it_hands_out() -> None:
    spec = ClusterSpec(JOBS)
    spec.as_dict()["worker"].append("d:2222")
    assert spec.num_tasks("worker") == 2
    with pytest.raises(TypeError):
        spec.jobs["ps"] = ("e:2222",)  # type: ignore[index]


def test_reads_json_and_tasks_by_index() -> None:
    assert ClusterSpec.from_json(json.dumps(JOBS)) == ClusterSpec(JOBS)
    by_index = {"worker": {1: "c:2222", 0: "b:2222"}, "chief": {"0": "a:2222"}}
    assert ClusterSpec(by_index) == ClusterSpec(JOBS)
    assert ClusterSpec({"worker": ["[2001:db8::1]:2222"]}).num_tasks("worker") == 1


@pytest.mark.parametrize(
    ("jobs", "said"),
    [
        ("worker", "expected a mapping"),
        ({"worker": "a:2222"}, "expected a list of addresses"),
        ({"worker": 3}, "expected a list of addresses"),
        ({"worker": [3]}, "Task 0 of job 'worker' is 3: expected host:port"),
        ({"worker": ["a:2222", "b"]}, "Task 1 of job 'worker' is 'b': expected host:port"),
        ({"worker": ["a:0"]}, "expected host:port"),
        ({"worker": ["a:70000"]}, "expected host:port"),
        ({"worker": ["http://a:1"]}, "expected host:port"),
        ({"worker": ["2001:db8::1:2222"]}, "expected host:port"),
        ({"worker": {0: "a:1", 2: "b:1"}}, "without a gap"),
        ({"worker": ["a:1"], "ps": ["a:1"]}, "both task 0 of job 'ps' and task 0 of job 'worker'"),
        ({"": ["a:1"]}, "Job name ''"),
        ({1: ["a:1"]}, "Job name 1"),
    ],
)
def test_refuses(jobs: object, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ClusterSpec(jobs)  # type: ignore[arg-type]
    assert said in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "[]", "3"])
def test_refuses_json(text: str) -> None:
    with pytest.raises(ConfigError):
        ClusterSpec.from_json(text)


def test_names_what_is_there() -> None:
    spec = ClusterSpec(JOBS)
    with pytest.raises(ConfigError, match="no job 'ps': its jobs are chief, worker"):
        spec.num_tasks("ps")
    with pytest.raises(ConfigError, match="no task 2: expected an index from 0 to 1"):
        spec.task_address("worker", 2)
    with pytest.raises(ConfigError, match="no task -1"):
        spec.task_address("worker", -1)
