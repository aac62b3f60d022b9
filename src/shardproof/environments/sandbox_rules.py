"""What code in the sandbox may ask of the kernel: a seccomp filter of system calls, and Landlock's rights on files.

The filter names what is allowed and refuses everything else, also calls that later kernels add. It is written for one
process that computes: it may have threads, but start no process, run no other program, open no socket, signal nothing
but itself, and change no file's owner, mode, times or attributes, which Landlock does not restrict.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterable, Sequence

OWN_PROCESS = 0x7FFF1D1D  # stands for the process's own number, which only the process itself knows

# From the kernel's headers: names and numbers by machine. Those that a machine lacks are older forms of others.
_NUMBERS = {
    "x86_64": """
        read 0 write 1 close 3 fstat 5 lseek 8 mmap 9 mprotect 10 munmap 11 brk 12 rt_sigaction 13
        rt_sigprocmask 14 rt_sigreturn 15 pread64 17 pwrite64 18 readv 19 writev 20 preadv 295 pwritev 296
        preadv2 327 pwritev2 328 access 21 pipe 22 pipe2 293 select 23 pselect6 270 poll 7 ppoll 271
        sched_yield 24 mremap 25 msync 26 mincore 27 madvise 28 dup 32 dup2 33 dup3 292 pause 34 nanosleep 35
        getitimer 36 alarm 37 setitimer 38 getpid 39 sendfile 40 exit 60 exit_group 231 uname 63 flock 73
        fsync 74 fdatasync 75 ftruncate 77 fallocate 285 getdents 78 getdents64 217 getcwd 79 chdir 80 fchdir 81
        rename 82 renameat 264 renameat2 316 mkdir 83 mkdirat 258 rmdir 84 creat 85 link 86 linkat 265 unlink 87
        unlinkat 263 symlink 88 symlinkat 266 readlink 89 readlinkat 267 umask 95 gettimeofday 96 getrlimit 97
        setrlimit 160 getrusage 98 sysinfo 99 times 100 getuid 102 getgid 104 geteuid 107 getegid 108
        getppid 110 getpgrp 111 getpgid 121 getsid 124 getgroups 115 getresuid 118 getresgid 120
        rt_sigpending 127 rt_sigtimedwait 128 rt_sigsuspend 130 sigaltstack 131 statfs 137 fstatfs 138
        getpriority 140 sched_getparam 143 sched_getscheduler 145 sched_get_priority_max 146
        sched_get_priority_min 147 sched_getaffinity 204 arch_prctl 158 gettid 186 futex 202 epoll_create 213
        epoll_create1 291 epoll_ctl 233 epoll_wait 232 epoll_pwait 281 epoll_pwait2 441 set_tid_address 218
        restart_syscall 219 fadvise64 221 timer_create 222 timer_settime 223 timer_gettime 224
        timer_getoverrun 225 timer_delete 226 clock_gettime 228 clock_getres 229 clock_nanosleep 230 time 201
        open 2 openat 257 stat 4 lstat 6 newfstatat 262 statx 332 faccessat 269 faccessat2 439
        set_robust_list 273 get_robust_list 274 splice 275 tee 276 sync_file_range 277 timerfd_create 283
        timerfd_settime 286 timerfd_gettime 287 eventfd 284 eventfd2 290 signalfd 282 signalfd4 289 getcpu 309
        getrandom 318 copy_file_range 326 membarrier 324 rseq 334 close_range 436 wait4 61 waitid 247 sendto 44
        recvfrom 45 sendmsg 46 recvmsg 47 sendmmsg 307 recvmmsg 299 shutdown 48 getsockname 51 getpeername 52
        setsockopt 54 getsockopt 55 futex_waitv 449 clone 56 clone3 435 fcntl 72 ioctl 16 prctl 157 kill 62
        tgkill 234 prlimit64 302 socketpair 53 socket 41 connect 42 bind 49 listen 50 accept 43 accept4 288
    """,
    "aarch64": """
        read 63 write 64 close 57 fstat 80 lseek 62 mmap 222 mprotect 226 munmap 215 brk 214 rt_sigaction 134
        rt_sigprocmask 135 rt_sigreturn 139 pread64 67 pwrite64 68 readv 65 writev 66 preadv 69 pwritev 70
        preadv2 286 pwritev2 287 pipe2 59 pselect6 72 ppoll 73 sched_yield 124 mremap 216 msync 227 mincore 232
        madvise 233 dup 23 dup3 24 nanosleep 101 getitimer 102 setitimer 103 getpid 172 sendfile 71 exit 93
        exit_group 94 uname 160 flock 32 fsync 82 fdatasync 83 ftruncate 46 fallocate 47 getdents64 61 getcwd 17
        chdir 49 fchdir 50 renameat 38 renameat2 276 mkdirat 34 linkat 37 unlinkat 35 symlinkat 36 readlinkat 78
        umask 166 gettimeofday 169 getrlimit 163 setrlimit 164 getrusage 165 sysinfo 179 times 153 getuid 174
        getgid 176 geteuid 175 getegid 177 getppid 173 getpgid 155 getsid 156 getgroups 158 getresuid 148
        getresgid 150 rt_sigpending 136 rt_sigtimedwait 137 rt_sigsuspend 133 sigaltstack 132 statfs 43
        fstatfs 44 getpriority 141 sched_getparam 121 sched_getscheduler 120 sched_get_priority_max 125
        sched_get_priority_min 126 sched_getaffinity 123 gettid 178 futex 98 epoll_create1 20 epoll_ctl 21
        epoll_pwait 22 epoll_pwait2 441 set_tid_address 96 restart_syscall 128 fadvise64 223 timer_create 107
        timer_settime 110 timer_gettime 108 timer_getoverrun 109 timer_delete 111 clock_gettime 113
        clock_getres 114 clock_nanosleep 115 openat 56 newfstatat 79 statx 291 faccessat 48 faccessat2 439
        set_robust_list 99 get_robust_list 100 splice 76 tee 77 sync_file_range 84 timerfd_create 85
        timerfd_settime 86 timerfd_gettime 87 eventfd2 19 signalfd4 74 getcpu 168 getrandom 278
        copy_file_range 285 membarrier 283 rseq 293 close_range 436 wait4 260 waitid 95 sendto 206 recvfrom 207
        sendmsg 211 recvmsg 212 sendmmsg 269 recvmmsg 243 shutdown 210 getsockname 204 getpeername 205
        setsockopt 208 getsockopt 209 futex_waitv 449 clone 220 clone3 435 fcntl 25 ioctl 29 prctl 167 kill 129
        tgkill 131 prlimit64 261 socketpair 199 socket 198 connect 203 bind 200 listen 201 accept 202
        accept4 242
    """,
}
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
MACHINES = tuple(_NUMBERS)

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _MACHINE, _ARGUMENTS = 0, 4, 16  # places in what a filter reads

_CLONE_THREAD, _X32 = 0x00010000, 0x40000000
_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK, _SOCK_STREAM, _SOCK_TYPES = 1, 2, 10, 16, 1, 0xF
# Get and set flags, duplicate, lock; not who is sent a signal when a pipe is ready.
_FCNTL = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1032)
_IOCTL = (
    0x5401,
    0x5413,
    0x541B,
    0x5421,
    0x5450,
    0x5451,
)  # is it a terminal, how large, what is to be read; flags
_PRCTL = (15, 16, 0x53564D41)  # a thread's name; names of memory
_NETWORK = ("connect", "bind", "listen", "accept", "accept4")

_Instruction = tuple[int, int, int, int]


def system_call_filter(machine: str, network: bool) -> bytes:
    """The filter as the kernel takes it, with OWN_PROCESS in place of the process's number."""
    words = _NUMBERS[machine].split()
    numbers = dict(zip(words[::2], map(int, words[1::2])))
    rules = _rules(network)
    program: list[_Instruction] = [
        (_LOAD, 0, 0, _MACHINE),
        (_EQUAL, 1, 0, _AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),  # another numbering of the same calls
        (_RETURN, 0, 0, _KILL),
    ]
    for name, number in numbers.items():
        body = rules.get(name, [(_RETURN, 0, 0, _ALLOW)])
        program += [(_EQUAL, 0, len(body), number), *body]
    program.append(_refuse(errno.EPERM))
    return b"".join(struct.pack("=HBBI", *each) for each in program)


def _rules(network: bool) -> dict[str, list[_Instruction]]:
    """What the arguments of some calls must be."""
    rules = {
        "clone": [
            _argument(0),
            (_ANY_BIT, 0, 1, _CLONE_THREAD),
            (_RETURN, 0, 0, _ALLOW),
            _refuse(errno.EPERM),
        ],
        "clone3": [_refuse(errno.ENOSYS)],  # its arguments cannot be read; the C library then uses clone
        "fcntl": _one_of(1, _FCNTL),
        "ioctl": _one_of(1, _IOCTL),
        "prctl": _one_of(0, _PRCTL),
        "kill": _one_of(0, (OWN_PROCESS, 0)),
        "tgkill": _one_of(0, (OWN_PROCESS,)),
        "prlimit64": _one_of(0, (OWN_PROCESS, 0)),
        # A pair of streams, which event loops use. Datagrams could be sent to others from there.
        "socketpair": [
            _argument(1),
            (_AND, 0, 0, _SOCK_TYPES),
            (_EQUAL, 1, 0, _SOCK_STREAM),
            _refuse(errno.EPERM),
            *_one_of(0, (_AF_UNIX,)),
        ],
        "socket": _one_of(0, (_AF_INET, _AF_INET6, _AF_NETLINK) if network else ()),
    }
    if not network:
        rules |= {name: [_refuse(errno.EPERM)] for name in _NETWORK}
    return rules


def _argument(place: int) -> _Instruction:
    return (_LOAD, 0, 0, _ARGUMENTS + 8 * place)  # its lower half: both machines are little-endian


def _one_of(place: int, values: Iterable[int]) -> list[_Instruction]:
    tests = [each for value in values for each in ((_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ALLOW))]
    return [_argument(place), *tests, _refuse(errno.EPERM)]


def _refuse(reason: int) -> _Instruction:
    return (_RETURN, 0, 0, _ERRNO | reason)


# Landlock's rights on files, and the version of its interface that has them.
_WRITE_FILE, _READ_FILE, _READ_DIR, _REMOVE_DIR, _REMOVE_FILE = 1 << 1, 1 << 2, 1 << 3, 1 << 4, 1 << 5
_MAKE_DIR, _MAKE_FILE, _MAKE_LINK, _REFER, _TRUNCATE = 1 << 7, 1 << 8, 1 << 12, 1 << 13, 1 << 14
_ALL_RIGHTS = ((1, (1 << 13) - 1), (2, _REFER), (3, _TRUNCATE), (5, 1 << 15))
_READ = _READ_FILE | _READ_DIR
_CHANGE = (
    _READ
    | _WRITE_FILE
    | _REMOVE_DIR
    | _REMOVE_FILE
    | _MAKE_DIR
    | _MAKE_FILE
    | _MAKE_LINK
    | _REFER
    | _TRUNCATE
)
_OF_FILES = 1 | _WRITE_FILE | _READ_FILE | _TRUNCATE  # the rest is for folders
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")


def landlock_ruleset(interface: int, network: bool) -> tuple[bytes, int]:
    """Everything that a version of Landlock can forbid, as the kernel takes it, and the rights on files among it."""
    files = sum(rights for since, rights in _ALL_RIGHTS if interface >= since)
    fields = [files]
    if interface >= 4:
        fields.append(0 if network else 0b11)  # to bind and to connect with TCP
    if interface >= 6:
        fields.append(0b11)  # sockets without a path and signals, to processes outside
    return struct.pack(f"={len(fields)}Q", *fields), files


def landlock_rights(
    handled: int, readable: Sequence[str], folder: str, writable: bool
) -> list[tuple[str, int, int]]:
    """(path, rights for a folder, rights for a file) of all that may be opened."""
    rights = [(path, _READ) for path in readable]
    rights += [(path, _READ_FILE | _WRITE_FILE | _TRUNCATE) for path in _DEVICES]
    rights.append((folder, _CHANGE if writable else _READ))
    return [(path, each & handled, each & handled & _OF_FILES) for path, each in rights]
