"""Who is here: the place of a process in a job, read from its environment.

Knows the conventions of launchers and schedulers; starts nothing, opens nothing, and never
imports torch. Everything is a function of a mapping, which is `os.environ` where none is given.
"""

from parti.cluster.hostlist import compress as compress_hostlist
from parti.cluster.hostlist import expand as expand_hostlist
from parti.cluster.place import Level, Origin, Place
from parti.cluster.resolver import resolve
from parti.cluster.spec import ClusterSpec

__all__ = [
    "ClusterSpec",
    "Level",
    "Origin",
    "Place",
    "compress_hostlist",
    "expand_hostlist",
    "resolve",
]
