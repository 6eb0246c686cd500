"""Start a program in a restricted environment: `python confine.py [OPTIONS] -- PROGRAM [ARGUMENTS]`.

Each option takes away one thing that a container, a batch system or a shell may take away: system calls,
the user root, file descriptors, signals, /dev/shm, a folder that can be written, the network. The program
replaces this process, so signals, output and exit code are its own. Only the standard library is used, and no
program of the system.

Exits with NO_PRIVILEGE, and a line on stderr, where this process may not make such an environment.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import os
import platform
import resource
import signal
import socket
import struct
import sys
from collections.abc import Sequence

NO_PRIVILEGE = 77

# Numbers of the system calls, and the architecture as the kernel's filters name it.
_MACHINES = {
    "x86_64": (0xC000003E, {"process_vm_readv": 310, "process_vm_writev": 311, "memfd_create": 319}),
    "aarch64": (0xC00000B7, {"process_vm_readv": 270, "process_vm_writev": 271, "memfd_create": 279}),
}
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_EPERM = 1
_CLONE_NEWNS, _CLONE_NEWNET = 0x00020000, 0x40000000
_MS_RDONLY, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x1, 0x20, 0x1000, 0x4000, 0x40000
_SIOCSIFADDR, _SIOCSIFFLAGS = 0x8916, 0x8914
_IFF_UP = 0x1

_libc = ctypes.CDLL(None, use_errno=True)


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_ushort),
        ("if_true", ctypes.c_ubyte),
        ("if_false", ctypes.c_ubyte),
        ("operand", ctypes.c_uint32),
    )


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.POINTER(_Instruction)))


def deny_calls(names: Sequence[str]) -> None:
    """Let these system calls fail with EPERM, in this process and all that it starts."""
    architecture, numbers = _MACHINES[platform.machine()]
    lines = [
        (_LOAD_WORD, 0, 0, 4),  # the architecture
        (_JUMP_IF_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _ALLOW),
        (_LOAD_WORD, 0, 0, 0),  # the number of the call
    ]
    for name in names:
        lines += [(_JUMP_IF_EQUAL, 0, 1, numbers[name]), (_RETURN, 0, 0, _ERRNO | _EPERM)]
    lines.append((_RETURN, 0, 0, _ALLOW))
    instructions = (_Instruction * len(lines))(*lines)
    program = _Program(len(lines), instructions)
    one, nothing = ctypes.c_ulong(1), ctypes.c_ulong(0)
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, one, nothing, nothing, nothing), "set no_new_privs")
    mode = ctypes.c_ulong(_SECCOMP_MODE_FILTER)
    _check(_libc.prctl(_PR_SET_SECCOMP, mode, ctypes.byref(program), nothing, nothing), "filter system calls")


def take_shm(how: str) -> None:
    """In a mount namespace of its own: /dev/shm empty and read-only, or a folder that is not there."""
    nothing = _own_mounts()
    target = b"/dev/shm" if how == "read-only" else b"/dev"
    if how == "read-only":
        _mount(b"none", target, b"tmpfs", _MS_RDONLY)
        return
    # A /dev with nothing in it but what programs can't do without.
    kept = {name: os.open(f"/dev/{name}", os.O_PATH) for name in ("null", "zero", "urandom")}
    _mount(b"none", target, b"tmpfs", 0)
    for name, fd in kept.items():
        os.close(os.open(f"/dev/{name}", os.O_CREAT | os.O_WRONLY))
        _mount(f"/proc/self/fd/{fd}".encode(), f"/dev/{name}".encode(), nothing, _MS_BIND)
        os.close(fd)


def protect(folder: str) -> None:
    """In a mount namespace of its own: nobody can write to the folder, root included."""
    nothing, target = _own_mounts(), os.fsencode(folder)
    _mount(target, target, nothing, _MS_BIND)
    _mount(b"none", target, nothing, _MS_BIND | _MS_REMOUNT | _MS_RDONLY)


def take_network(left: str) -> None:
    """In a network namespace of its own: loopback alone, loopback without IPv4, or not even loopback."""
    _check(_libc.unshare(_CLONE_NEWNET), "unshare the network")
    if left == "nothing":
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        fcntl.ioctl(handle, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))
        if left == "ipv6":
            none = struct.pack("16sHH4s8x", b"lo", socket.AF_INET, 0, bytes(4))
            fcntl.ioctl(handle, _SIOCSIFADDR, none)


def become_user(uid: int) -> None:
    """Be another user, in no group but its own."""
    try:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    except PermissionError as error:
        _give_up(f"become user {uid}", error)


def _own_mounts() -> ctypes.c_void_p:
    """Mounts from now on are this process's alone. Gives the null pointer that mounts take for no type."""
    _check(_libc.unshare(_CLONE_NEWNS), "unshare mounts")
    nothing = ctypes.c_void_p(None)
    _mount(b"none", b"/", nothing, _MS_REC | _MS_PRIVATE)
    return nothing


def _mount(source: bytes, target: bytes, kind: object, flags: int) -> None:
    done = _libc.mount(source, target, kind, ctypes.c_ulong(flags), ctypes.c_void_p(None))
    _check(done, f"mount {target.decode()}")


def _check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        _give_up(what, OSError(code, os.strerror(code)))


def _give_up(what: str, error: OSError) -> None:
    print(f"confine: may not {what}: {error.strerror}", file=sys.stderr)
    sys.exit(NO_PRIVILEGE)


def main() -> None:
    """Take away what the options say, then become the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--deny", action="append", default=[], metavar="CALL", help="a system call")
    parser.add_argument("--shm", choices=["read-only", "missing"], help="what becomes of /dev/shm")
    parser.add_argument("--read-only", metavar="FOLDER", help="that nobody can write to")
    parser.add_argument("--network", choices=["loopback", "ipv6", "nothing"], help="what is left of it")
    parser.add_argument("--user", type=int, metavar="UID")
    parser.add_argument("--files", type=int, metavar="N", help="file descriptors")
    parser.add_argument("--ignore", action="append", default=[], metavar="SIGNAL", help="such as SIGINT")
    parser.add_argument("--umask", type=lambda text: int(text, 8), metavar="OCTAL")
    parser.add_argument("--closed", action="append", default=[], type=int, metavar="FD")
    parser.add_argument("program", nargs="+")
    options = parser.parse_args()
    for name in options.ignore:
        signal.signal(signal.Signals[name], signal.SIG_IGN)
    if options.shm is not None:
        take_shm(options.shm)
    if options.read_only is not None:
        protect(options.read_only)
    if options.network is not None:
        take_network(options.network)
    if options.user is not None:
        become_user(options.user)
    if options.umask is not None:
        os.umask(options.umask)
    if options.deny:
        deny_calls(options.deny)
    if options.files is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (options.files, options.files))
    for fd in options.closed:
        os.close(fd)
    os.execvp(options.program[0], options.program)


if __name__ == "__main__":
    main()
