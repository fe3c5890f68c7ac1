"""Runs inside the sandbox process: give up every right, then become the Python that runs the policy's code.

Started by `lit_rl.tools.sandbox` as a script, with a JSON object of limits as its argument. It imports nothing of
lit_rl. Three layers, none of which needs privileges: resource limits; Landlock, which leaves the system's libraries
to read and the working folder to write (the environment of other processes is a file too); a seccomp filter without
sockets, new processes, signals to others and ways into other processes. Exit status 97 means that the isolation
could not be set up.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import struct
import sys

SETUP_FAILED = 97

_PR_SET_PDEATHSIG, _SIGKILL = 1, 9
_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 24, 38, 22, 2
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_EXECUTE, _READ_FILE, _READ_DIR, _WRITE_FILE = 1 << 0, 1 << 2, 1 << 3, 1 << 1
_ALL_RIGHTS_BY_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1}
_ALL_RIGHTS = (1 << 16) - 1

_CLONE_THREAD = 0x10000
_EPERM, _ENOSYS = 1, 38
# Numbers of system calls; "clone" is allowed for threads, "prlimit64" for the own process, "clone3" falls back to
# clone.
_SYSTEM_CALLS = {
    "x86_64": {
        "arch": 0xC000003E,
        "clone": 56,
        "clone3": 435,
        "prlimit64": 302,
        # sockets; fork, vfork; kill and its kin; ptrace and its kin; sessions; namespaces; keys; shared memory;
        # schedulers
        "refused": (
            *(41, 42, 43, 44, 49, 50, 53),
            *(57, 58),
            *(62, 129, 200, 234, 297, 424, 434, 438),
            *(101, 310, 311, 312, 440, 448),
            *(109, 112),
            *(155, 161, 165, 272, 308),
            *(248, 249, 250, 298, 321, 323, 425),
            *(29, 64, 68, 133, 259, 319),
            *(141, 142, 144, 203, 251, 256, 279, 314),
        ),
    },
    "aarch64": {
        "arch": 0xC00000B7,
        "clone": 220,
        "clone3": 435,
        "prlimit64": 261,
        "refused": (
            *(198, 199, 200, 201, 202, 203, 206),
            *(129, 130, 131, 138, 240, 424, 434, 438),
            *(117, 270, 271, 272, 440, 448),
            *(154, 157),
            *(40, 41, 51, 97, 268),
            *(217, 218, 219, 241, 280, 282, 425),
            *(186, 190, 194, 33, 279),
            *(30, 118, 119, 122, 140, 238, 239, 274),
        ),
    },
}

_libc = ctypes.CDLL(None, use_errno=True)


def set_limits(limits: dict[str, int]) -> None:
    """Set the resource limits; sizes in bytes, time in seconds."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The hard limit is later: at the soft one the kernel sends SIGXCPU, at the hard one it kills.
    resource.setrlimit(resource.RLIMIT_CPU, (limits["cpu_s"], limits["cpu_s"] + 1))
    resource.setrlimit(resource.RLIMIT_AS, (limits["memory"], limits["memory"]))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits["file"], limits["file"]))
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))


def drop_capabilities() -> None:
    """Empty the bounding set, so that root loses its rights at the exec; without effect for other users."""
    for capability in range(64):
        _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)


def restrict_files(readable: list[str], writable: str) -> None:
    """Allow reading below ``readable`` and everything below ``writable``, and no other file.

    Raises:
        OSError: If the kernel has no Landlock (before 5.13, or switched off).
    """
    abi = _libc.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
    if abi < 1:
        raise OSError(ctypes.get_errno(), "the kernel offers no Landlock")
    rights = _ALL_RIGHTS_BY_ABI.get(abi, _ALL_RIGHTS)
    attribute = struct.pack("=Q", rights)
    ruleset = _check(_libc.syscall(_LANDLOCK_CREATE, attribute, ctypes.c_size_t(len(attribute)), 0))
    for path in readable:
        allowed = _EXECUTE | _READ_FILE | _READ_DIR if os.path.isdir(path) else _READ_FILE
        _allow(ruleset, path, allowed)
    _allow(ruleset, "/dev/null", _READ_FILE | _WRITE_FILE)
    _allow(ruleset, writable, rights & ~_EXECUTE)
    _check(_libc.syscall(_LANDLOCK_RESTRICT, ruleset, 0))
    os.close(ruleset)


def restrict_system_calls() -> None:
    """Refuse the system calls that reach out of the process.

    Raises:
        OSError: If the kernel or the processor is not supported.
    """
    table = _SYSTEM_CALLS.get(platform.machine())
    if table is None:
        raise OSError(f"no list of system calls for {platform.machine()}")
    program = _filter(table)
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("@HP", len(program), ctypes.addressof(buffer))
    _check(_libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header, 0, 0))


def _filter(table: dict) -> list[tuple[int, int, int, int]]:
    """Return the filter: instructions of (code, jump if true, jump if false, value)."""
    load, equal, greater_equal, has_bits, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, missing, kill = 0x7FFF0000, 0x00050000 | _EPERM, 0x00050000 | _ENOSYS, 0x80000000
    number, arch, first_argument = 0, 4, 16
    program = [(load, 0, 0, arch), (equal, 1, 0, table["arch"]), (answer, 0, 0, kill), (load, 0, 0, number)]
    if platform.machine() == "x86_64":
        # The x32 numbers name the same calls once more.
        program += [(greater_equal, 0, 1, 0x40000000), (answer, 0, 0, refuse)]
    for refused in table["refused"]:
        program += [(equal, 0, 1, refused), (answer, 0, 0, refuse)]
    program += [(equal, 0, 1, table["clone3"]), (answer, 0, 0, missing)]
    program += [
        (equal, 0, 3, table["clone"]),
        (load, 0, 0, first_argument),
        (has_bits, 1, 0, _CLONE_THREAD),
        (answer, 0, 0, refuse),
        (load, 0, 0, number),
        (equal, 0, 3, table["prlimit64"]),
        (load, 0, 0, first_argument),
        (equal, 1, 0, 0),
        (answer, 0, 0, refuse),
    ]
    return [*program, (answer, 0, 0, allow)]


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        rule = struct.pack("=Qi", rights, folder)
        _check(_libc.syscall(_LANDLOCK_ADD, ruleset, 1, rule, 0))
    finally:
        os.close(folder)


def _check(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def main() -> None:
    """Set everything up and become ``python main.py``."""
    options = json.loads(sys.argv[1])
    # A killed worker watches no clock any more; a program that sleeps would stay for ever.
    _libc.prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
    try:
        if options["is_isolated"]:
            drop_capabilities()
            _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
            try:
                restrict_files(options["readable"], os.getcwd())
            except OSError:
                if options["needs_landlock"]:  # else bubblewrap has hidden the files already
                    raise
            restrict_system_calls()
        set_limits(options["limits"])
    except (OSError, ValueError) as error:
        print(f"sandbox: {error}", file=sys.stderr)
        sys.exit(SETUP_FAILED)
    os.execv(sys.executable, [sys.executable, "-I", "-B", "main.py"])


if __name__ == "__main__":
    main()
