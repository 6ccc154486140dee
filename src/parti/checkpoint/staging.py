"""The memory that a training state is copied to, while training stands still.

It is kept from one checkpoint to the next: touching new memory costs more than the copy itself.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from parti.checkpoint.layout import PartLayout
from parti.checkpoint.staged import Piece, Staged, is_dense

_ROUND_BYTES = 2**21
"""A huge page."""
_ADVICE = ("MADV_HUGEPAGE", "MADV_DONTFORK")
"""Fewer pages to touch; and worker processes forked later do not turn every copy into two."""
_PORTABLE = 1
"""cudaHostRegisterPortable: registered for all devices, whichever is current."""


class Staging:
    """One block of memory, laid out like the file it is written to."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._is_pinned = False
        self._key: object = None
        self._places: list[Tensor] = []
        self._pieces: tuple[Piece, ...] = ()

    def copy(self, layout: PartLayout, tensors: Mapping[str, Tensor]) -> Staged:
        """Copy tensors to their places, as they lie."""
        specs = [spec for spec in layout.specs if spec.num_bytes]
        sources = [tensors[spec.name] for spec in specs]
        key = (layout, [source.stride() for source in sources])
        if self._memory is None or key != self._key:
            self._arrange(layout, sources)
            self._key = key
        devices = {source.device for source in sources if source.device.type != "cpu"}
        self._pin(devices)
        with torch.no_grad():
            for place, source in zip(self._places, sources, strict=True):
                place.copy_(source, non_blocking=True)
        for device in devices:
            torch.accelerator.synchronize(device)
        assert self._memory is not None
        return Staged(memory=memoryview(self._memory), pieces=self._pieces)

    def touch(self, num_bytes: int, devices: set[torch.device], stop: threading.Event) -> None:
        """Have the system give the memory before it is needed. Ends early when told to stop."""
        memory = self._grown(num_bytes)
        start = _address(memory)
        for offset in range(0, len(memory), _ROUND_BYTES):
            if stop.is_set():
                return
            ctypes.memset(start + offset, 0, _ROUND_BYTES)  # without the interpreter's lock
        self._pin(devices)

    def release(self) -> None:
        """Give the memory back; what somebody still reads stays until they are through."""
        if self._memory is not None and self._is_pinned:
            _cuda_runtime().cudaHostUnregister(_address(self._memory))
        self._places, self._key = [], None
        self._memory, self._is_pinned = None, False

    def _arrange(self, layout: PartLayout, sources: Sequence[Tensor]) -> None:
        """A view of the memory for each tensor; where it can be, with the strides it has."""
        flat = torch.frombuffer(self._grown(layout.data_bytes), dtype=torch.uint8)
        places = [
            (spec, offset)
            for spec, offset in zip(layout.specs, layout.offsets, strict=True)
            if spec.num_bytes
        ]
        pieces = []
        self._places = []
        for (spec, offset), source in zip(places, sources, strict=True):
            numbers = flat[offset : offset + spec.num_bytes].view(source.dtype)
            strides = None
            if not source.is_contiguous() and is_dense(source.shape, source.stride()):
                strides = source.stride()
                self._places.append(numbers.as_strided(source.shape, strides))
            else:
                self._places.append(numbers.view(source.shape))
            pieces.append(
                Piece(
                    offset=offset,
                    num_bytes=spec.num_bytes,
                    width=source.element_size(),
                    shape=spec.shape,
                    strides=strides,
                )
            )
        self._pieces = tuple(pieces)

    def _grown(self, num_bytes: int) -> mmap.mmap:
        if self._memory is None or len(self._memory) < num_bytes:
            self.release()  # the old block goes before the new one comes
            size = max(1, -(-num_bytes // _ROUND_BYTES)) * _ROUND_BYTES
            self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            for advice in _ADVICE:
                if hasattr(mmap, advice):
                    self._memory.madvise(getattr(mmap, advice))
        return self._memory

    def _pin(self, devices: set[torch.device]) -> None:
        """Copies from a GPU to registered memory are five times as fast; without, they work too."""
        cuda = next((device for device in devices if device.type == "cuda"), None)
        if cuda is None or self._is_pinned or self._memory is None:
            return
        with torch.cuda.device(cuda):  # else a thread would wake up device 0
            address, num_bytes = _address(self._memory), len(self._memory)
            code = _cuda_runtime().cudaHostRegister(address, num_bytes, _PORTABLE)
        self._is_pinned = int(code) == 0


def _address(memory: mmap.mmap) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
