"""A slot's memory by the page: touched once by the store, mapped at almost no cost by everybody else.

Mapping a payload anew in 4 KiB pages costs a reader as much as the copy it spares, and unmapping it half of that. So the store asks
the kernel to back a fresh slot with huge pages (``MADV_COLLAPSE``, Linux 6.1; it needs no administrator and no mount option), and
maps begin where huge pages fit, which only a fixed address achieves and hence not the `mmap` module. Measured for 256 MB, over a
copy between private buffers: reading through a fresh map 2.0 to 2.5 with small pages, 1.0 with huge ones. Where the kernel cannot
or will not, all works the same in small pages.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import weakref
from pathlib import Path

_MADV_POPULATE_READ = 22  # Linux 5.14; the mmap module does not name these two
_MADV_COLLAPSE = 25
_MAP_FIXED = 0x10  # on every architecture that torch is built for
_PROT_NONE = 0
_MAP_FAILED = ctypes.c_void_p(-1).value

_TOUCH_BYTES = 1 << 20
_COLLAPSE_BYTES = 64 << 20

FileMap = ctypes.Array[ctypes.c_ubyte]


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.restype, libc.mmap.argtypes = address, (address, size, number, number, number, ctypes.c_long)
    libc.munmap.restype, libc.munmap.argtypes = number, (address, size)
    libc.madvise.restype, libc.madvise.argtypes = number, (address, size, number)
    return libc


@functools.cache
def huge_page_bytes() -> int | None:
    """Size of the huge pages that shared memory can have here: 2 MiB on x86. None if the kernel has none."""
    try:
        return int(Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size").read_text())
    except FileNotFoundError:
        return None


def map_file(fd: int, num_bytes: int, *, private: bool) -> FileMap:
    """Map the first ``num_bytes`` of an open file for reading and writing, aligned to huge pages.

    Args:
        fd: The open file. It may be closed afterwards: the map keeps the open file, and with it a lock that was taken on it.
        num_bytes: At least 1.
        private: Whether what is written stays in this process (the file may then be open for reading only).

    Returns:
        The mapped bytes. They are unmapped when nobody refers to them any more; a `torch.frombuffer` tensor and its views do.

    Raises:
        OSError: if the kernel refuses.
    """
    align = huge_page_bytes() or mmap.PAGESIZE
    if num_bytes < align:
        align = mmap.PAGESIZE
    size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    libc = _libc()
    # Reserve more than is needed, map over the aligned part of it, give the rest back: no other thread can get in between.
    reserved = _mapped(None, size + align, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    start = -(-reserved // align) * align
    try:
        kind = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
        _mapped(start, size, mmap.PROT_READ | mmap.PROT_WRITE, kind | _MAP_FIXED, fd)
    except BaseException:
        libc.munmap(reserved, size + align)
        raise
    if start > reserved:
        libc.munmap(reserved, start - reserved)
    if (rest := reserved + align - start) > 0:
        libc.munmap(start + size, rest)
    mapped = (ctypes.c_ubyte * num_bytes).from_address(start)
    # Not at exit: tensors may outlive the finalizers there, and the kernel unmaps everything anyway.
    weakref.finalize(mapped, libc.munmap, start, size).atexit = False
    return mapped


def _mapped(address: int | None, size: int, protection: int, flags: int, fd: int) -> int:
    got = _libc().mmap(address, size, protection, flags, fd, 0)
    if got == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"{size} bytes could not be mapped: {os.strerror(code)}")
    return int(got)


def map_pages_in(mapped: FileMap) -> None:
    """Enter all pages of a shared map into this process's page table, if the kernel knows how (Linux 5.14).

    Reading a shared page in maps sixteen at a time, and writably; the first writes would fault them in one by one, at three times the cost.
    """
    _advise(ctypes.addressof(mapped), ctypes.sizeof(mapped), _MADV_POPULATE_READ)


def reserve(fd: int, num_bytes: int) -> None:
    """Give an empty file ``num_bytes`` of memory, all or nothing, and touch all of it once, in huge pages where there are some.

    Reserved pages still have to be cleared at first touch, which takes several times as long as a copy into them.

    Raises:
        OSError: ``ENOSPC`` among others, if there is not that much.
    """
    os.posix_fallocate(fd, 0, num_bytes)
    huge = huge_page_bytes() or num_bytes + 1
    whole = num_bytes // huge * huge
    if whole:
        mapped = map_file(fd, num_bytes, private=False)
        step = max(huge, _COLLAPSE_BYTES)
        for start in range(0, whole, step):
            stop = min(start + step, whole)
            # Refused where huge pages are switched off or unknown, or memory is too scattered just now: then small ones do.
            if not _advise(ctypes.addressof(mapped) + start, stop - start, _MADV_COLLAPSE):
                _touch(fd, start, stop)
    _touch(fd, whole, num_bytes)


def _touch(fd: int, start: int, stop: int) -> None:
    # Writing zeros maps nothing, is three times faster than page faults, and lets other threads run.
    zeros = memoryview(bytes(min(stop - start, _TOUCH_BYTES)))
    while start < stop:
        start += os.pwrite(fd, zeros[: stop - start], start)


def _advise(address: int, size: int, advice: int) -> bool:
    if _libc().madvise(address, size, advice) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.EAGAIN, errno.ENOMEM, errno.EBUSY):
        return False
    raise OSError(code, f"madvise({advice}) of {size} bytes: {os.strerror(code)}")
