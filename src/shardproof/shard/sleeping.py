"""GPU memory that can be given up and taken back at the same addresses, through CUDA's own driver calls.

CUDA graphs hold addresses. An engine whose weights and cache lie here can give all of it up while the policy trains, and
replay its graphs afterwards: memory that torch allocates would come back elsewhere, and every graph would have to be
captured again. torch's allocator does not count this memory: `track_peak` and `peak_bytes` measure both together.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from typing import Any
from weakref import WeakSet

import torch

logger = logging.getLogger(__name__)

_PINNED, _ON_DEVICE, _READ_AND_WRITE = 1, 1, 3  # CUDA's numbers
_OUT_OF_MEMORY = 2


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class DriverError(RuntimeError):
    """A call of CUDA's driver failed."""

    def __init__(self, call: str, code: int):
        super().__init__(f"{call} failed with CUDA error {code}")
        self.code = code


class SleepingMemory:
    """Regions of one device's memory that sleep and wake together; awake at first."""

    def __init__(self, device: torch.device):
        self._device = device
        self._regions: WeakSet[_Region] = WeakSet()  # tensors keep them alive
        self.asleep = False

    @property
    def nbytes(self) -> int:
        """Bytes of the device that the regions take up now."""
        return 0 if self.asleep else sum(region.nbytes for region in self._regions)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A new tensor, unwritten. Its memory is freed with the last tensor that shares it."""
        assert not self.asleep
        _note_peak(self._device)
        count = torch.Size(shape).numel() * dtype.itemsize
        region = _Region(self._device, max(count, 1))
        region.take()
        self._regions.add(region)
        whole = torch.as_tensor(region, device=self._device)
        return whole[:count].view(dtype).view(shape)

    def sleep(self) -> None:
        """Give the memory up; the tensors stay, and must not be used."""
        if not self.asleep:
            _note_peak(self._device)
            for region in self._regions:
                region.give_up()
            self.asleep = True

    def wake(self) -> None:
        """Take the memory back, unwritten. Raises torch.OutOfMemoryError if there is not enough."""
        if not self.asleep:
            return
        _note_peak(self._device)
        taken = []
        try:
            for region in self._regions:
                region.take()
                taken.append(region)
        except BaseException:
            for region in taken:
                region.give_up()
            raise
        self.asleep = False


class _Region:
    """A range of addresses, with memory behind it or without."""

    def __init__(self, device: torch.device, nbytes: int):
        driver = _driver()
        torch.empty(1, device=device)  # makes the device's context current in this thread
        self.index = _index(device)
        step = ctypes.c_size_t()
        _call(driver, "cuMemGetAllocationGranularity", ctypes.byref(step), ctypes.byref(self._properties), 0)
        self.nbytes = -(-nbytes // step.value) * step.value
        pointer = ctypes.c_uint64()
        size = ctypes.c_size_t(self.nbytes)
        _call(driver, "cuMemAddressReserve", ctypes.byref(pointer), size, ctypes.c_size_t(0), *_ZEROS)
        self.address = int(pointer.value)
        self._is_there = False
        _regions.add(self)

    @property
    def _properties(self) -> _Properties:
        return _Properties(type=_PINNED, location=_Location(_ON_DEVICE, self.index))

    @property
    def held(self) -> int:
        """Bytes of memory behind the addresses now."""
        return self.nbytes if self._is_there else 0

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """What torch makes a tensor of that shares this memory and keeps this object alive."""
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def take(self) -> None:
        """Put memory behind the addresses."""
        driver, size = _driver(), ctypes.c_size_t(self.nbytes)
        handle, address = self._create(), ctypes.c_uint64(self.address)
        try:
            _call(driver, "cuMemMap", address, size, ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
        finally:
            _call(driver, "cuMemRelease", handle)  # the mapping keeps it
        self._is_there = True
        access = _Access(_Location(_ON_DEVICE, self.index), _READ_AND_WRITE)
        _call(driver, "cuMemSetAccess", address, size, ctypes.byref(access), ctypes.c_size_t(1))

    def _create(self) -> ctypes.c_uint64:
        """Memory, for which torch's allocator gives up what it does not use if there is not enough."""
        handle, size = ctypes.c_uint64(), ctypes.c_size_t(self.nbytes)
        for is_last in (False, True):
            try:
                _call(
                    _driver(),
                    "cuMemCreate",
                    ctypes.byref(handle),
                    size,
                    ctypes.byref(self._properties),
                    ctypes.c_uint64(0),
                )
                return handle
            except DriverError as error:
                if error.code != _OUT_OF_MEMORY:
                    raise
                if is_last:
                    message = (
                        f"there are no {self.nbytes / 2**30:.2f} GiB left on GPU {self.index} for the engine"
                    )
                    raise torch.OutOfMemoryError(message) from error
                torch.cuda.empty_cache()
        raise AssertionError("one of the two returns or raises")

    def give_up(self) -> None:
        """Take the memory away from behind the addresses."""
        if self._is_there:
            torch.cuda.synchronize(self.index)  # whatever uses it must have ended
            self._is_there = False
            _call(_driver(), "cuMemUnmap", ctypes.c_uint64(self.address), ctypes.c_size_t(self.nbytes))

    def __del__(self) -> None:
        try:
            self.give_up()
            _call(_driver(), "cuMemAddressFree", ctypes.c_uint64(self.address), ctypes.c_size_t(self.nbytes))
        except Exception:  # at the interpreter's end there may be no driver left, and nothing to free
            pass


_regions: WeakSet[_Region] = WeakSet()
_peaks: dict[int, int] = {}  # of the devices that are tracked, by their index
_ZEROS = (ctypes.c_uint64(0), ctypes.c_uint64(0))  # any address, no flags


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _call(driver: Any, name: str, *arguments: Any) -> None:
    code = getattr(driver, name)(*arguments)
    if code:
        raise DriverError(name, code)


@cache
def can_sleep(device: torch.device) -> bool:
    """Whether memory of this device was seen to come back at the same addresses, with what is written to it then."""
    if device.type != "cuda":
        return False
    try:
        memory = SleepingMemory(device)
        tensor = memory.empty((3, 5), torch.float32)
        for number in (1.0, 2.0):
            tensor.fill_(number)
            if float(tensor.sum()) != 15 * number:
                raise ValueError("it does not hold what is written to it")
            memory.sleep()
            memory.wake()
    except Exception as error:
        logger.info(
            "GPU memory cannot be given up and taken back in place here (%s): by default the engine does not sleep",
            error,
        )
        return False
    return True


def track_peak(device: torch.device) -> None:
    """Measure from now on; torch's own peak of the device is reset whenever memory of this kind comes or goes."""
    torch.cuda.reset_peak_memory_stats(device)
    _peaks[_index(device)] = 0


def peak_bytes(device: torch.device) -> int:
    """The most that torch's allocator and memory of this kind held at a time since `track_peak`."""
    _note_peak(device)
    return _peaks[_index(device)]


def _note_peak(device: torch.device) -> None:
    index = _index(device)
    if index in _peaks:
        held = sum(region.held for region in _regions if region.index == index)
        _peaks[index] = max(_peaks[index], torch.cuda.max_memory_allocated(device) + held)
        torch.cuda.reset_peak_memory_stats(device)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
