"""Freed blocks stay with the process."""

from __future__ import annotations

import ctypes
import resource
import sys

import pytest

from parti.engine.allocator import keep_freed_blocks, kept_bytes

BLOCK_BYTES = 64 << 20

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"),
    reason="the allocator is not glibc's",
)


def faults_of_a_step() -> int:
    """Pages that the kernel hands out while a large block is taken, filled and given back."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = bytearray(BLOCK_BYTES)
    del block
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_a_block_is_used_again_without_asking_the_kernel() -> None:
    assert keep_freed_blocks()
    faults_of_a_step()
    assert min(faults_of_a_step() for _ in range(3)) < 100  # of 16,384 pages


def test_what_is_held_and_not_used_can_be_told() -> None:
    assert keep_freed_blocks()
    block = bytearray(BLOCK_BYTES)
    before = kept_bytes()
    del block
    after = kept_bytes()
    if before is None or after is None:
        pytest.skip("glibc is older than 2.33 and cannot say")
    assert after - before >= BLOCK_BYTES
