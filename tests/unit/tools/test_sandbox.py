"""Code in the sandbox: what it may do, and the ways out that are refused."""

import asyncio
import os
import socket
import subprocess
import sys
import sysconfig
import time

import psutil
import pytest

from lit_rl.tools import ToolSession
from lit_rl.tools.bubblewrap import bubblewrap_prefix
from lit_rl.tools.sandbox import SandboxLimits, SandboxTool, SandboxUnavailable, run_python

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")


def run(code, stdin="", **limits):
    try:
        return asyncio.run(run_python(code, stdin=stdin, limits=SandboxLimits(**limits)))
    except SandboxUnavailable as error:
        pytest.skip(str(error))


def test_a_program_computes_reads_and_writes():
    result = run(
        "import json, math, threading\n"
        "open('a.txt', 'w').write('é' + input())\n"
        "t = threading.Thread(target=lambda: print(open('a.txt').read())); t.start(); t.join()\n"
        "print(__name__, math.sqrt(16))",
        stdin="hello\n",
    )
    assert (result.status, result.stdout, result.stderr) == ("finished", "éhello\n__main__ 4.0\n", "")


def test_errors_are_shown_as_python_shows_them():
    result = run("x = 1\nx / 0")
    assert (result.status, result.exit_code) == ("failed", 1)
    assert "line 2" in result.stderr
    assert "ZeroDivisionError" in result.stderr
    assert run("import sys; sys.exit(97)").status == "failed"


ESCAPES = {
    "network": "import socket; socket.socket()",
    "unix socket": "import socket; socket.socketpair()",
    "fork": "import os; os.fork()",
    "process": "import subprocess; subprocess.run(['/bin/ls'])",
    "kill the parent": "import os; os.kill(os.getppid(), 9)",
    "limit the parent": "import resource, os; resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))",
    "parent's environment": "import os; open(f'/proc/{os.getppid()}/environ', 'rb').read()",
    "own environment file": "open('/proc/self/environ', 'rb').read()",
    "passwords": "open('/etc/passwd').read()",
    "home": "import os; os.listdir('/root')",
    "write outside": "open('/tmp/lit_rl_escape', 'w')",
    "list outside": "import os; os.listdir('/tmp')",
    "leave the session": "import os; os.setsid()",
    "raise the memory limit": "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))",
    "namespace": "import ctypes, os\nif ctypes.CDLL(None).unshare(0x10000000): raise PermissionError",
    "ptrace": "import ctypes, os\nif ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0): raise PermissionError",
    "memfd": "import os; os.memfd_create('x')",
}


# The last one where bubblewrap hides the files.
REFUSALS = ("PermissionError", "Operation not permitted", "ValueError", "FileNotFoundError")


@pytest.mark.parametrize("name", ESCAPES)
def test_a_way_out_is_refused(name):
    result = run(f"{ESCAPES[name]}\nprint('escaped')")
    assert "escaped" not in result.stdout
    assert result.status == "failed", result
    assert any(word in result.stderr for word in REFUSALS), result


def test_nothing_of_the_environment_is_inherited(monkeypatch):
    monkeypatch.setenv("LIT_RL_SECRET", "hunter2")
    result = run("import os; print(sorted(os.environ), os.getcwd())")
    assert "LIT_RL_SECRET" not in result.stdout
    assert os.getcwd() not in result.stdout


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("while True: pass", "timeout"),
        ("import time; time.sleep(60)", "timeout"),
        ("import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass", "timeout"),
        ("x = bytearray(2**32)", "memory"),
        ("b = b'x' * 2**20\nfor i in range(99): open(f'{i}', 'wb').write(b)\nimport time; time.sleep(9)", "disk"),
    ],
)
def test_limits_end_the_program(code, status):
    started = time.monotonic()
    result = run(code, wall_s=2.0, cpu_s=1, memory_mb=512, disk_mb=8)
    assert result.status == status, result
    assert time.monotonic() - started < 30


def test_a_flood_of_output_is_cut():
    result = run("print('x' * 10**7)", output_chars=1000)
    assert result.stdout == "x" * 1000
    assert result.status == "finished"


def test_cancelling_ends_the_process():
    async def main():
        task = asyncio.ensure_future(run_python("import time; time.sleep(60)"))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises((asyncio.CancelledError, SandboxUnavailable)):
            await asyncio.wait_for(task, timeout=10)

    asyncio.run(main())


@pytest.mark.parametrize("has_bubblewrap", [True, False])
def test_a_killed_worker_leaves_no_program_behind(has_bubblewrap):
    off = "" if has_bubblewrap else "sandbox.bubblewrap_prefix = lambda readable, writable: []\n"
    code = (
        f"import asyncio\nfrom lit_rl.tools import sandbox\n{off}"
        "async def main():\n"
        "    run = asyncio.ensure_future(sandbox.run_python('import time; time.sleep(600)', "
        "limits=sandbox.SandboxLimits(wall_s=600)))\n"
        "    await asyncio.sleep(2)\n"
        "    print('running' if not run.done() else run.exception(), flush=True)\n"
        "    await run\n"
        "asyncio.run(main())"
    )
    worker = psutil.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        answer = worker.stdout.readline().strip()
        programs = worker.children(recursive=True)
    finally:
        worker.kill()
    worker.wait(30)
    if answer != "running":
        pytest.skip(answer)
    assert programs
    _, alive = psutil.wait_procs(programs, timeout=20)
    for program in alive:
        program.kill()
    assert alive == []


def test_the_tool_answers_what_was_printed():
    async def main():
        tool = SandboxTool({"default_timeout": 1})
        async with ToolSession({tool.name: tool}) as session:
            codes = ["print(6 * 7)", "pass", "1/0", "print('a', flush=True)\nwhile True: pass"]
            return [await session.call(tool.name, {"code": code}) for code in codes]

    results = asyncio.run(main())
    if "SandboxUnavailable" in results[0].text:
        pytest.skip(results[0].text)
    assert results[0].text == "42\n"
    assert results[1].text == "no stdout here"
    assert "ZeroDivisionError" in results[2].text
    assert results[3].text == "a\n\n[stopped: timeout limit]"
    with pytest.raises(ValueError, match="isolation"):
        SandboxTool({"isolation": "some"})


def test_bubblewrap_alone_hides_files_processes_and_network(tmp_path):
    """The layer in front of the others, without them."""
    readable = ["/usr", "/lib", "/lib64", "/bin", sys.prefix, sys.base_prefix, *sysconfig.get_paths().values()]
    folder = tmp_path / "work"
    folder.mkdir()
    (tmp_path / "secret").write_text("hunter2")
    prefix = bubblewrap_prefix(readable, str(folder))
    if not prefix:
        pytest.skip("bubblewrap is not installed, or may not make namespaces here")
    # Something that listens here: only a network of one's own refuses it.
    with socket.create_server(("127.0.0.1", 0)) as listener:
        run = run_wrapped(prefix, listener.getsockname()[1], str(tmp_path / "secret"))
    assert run.returncode == 0, run.stderr
    first, network, write = run.stdout.splitlines()
    assert first == "True False False False"
    assert network == "ConnectionRefusedError"
    assert write in ("OSError", "PermissionError")
    assert (folder / "out").read_text() == "written"


def run_wrapped(prefix: list[str], port: int, secret: str) -> "subprocess.CompletedProcess[str]":
    code = f"""
import os, socket
open("out", "w").write("written")
print(os.getpid() < 10, *map(os.path.exists, ({secret!r}, "/etc/passwd", "/proc/1")))
try:
    socket.create_connection(("127.0.0.1", {port}), timeout=5)
except OSError as error:
    print(type(error).__name__)
try:
    open("/usr/lit_rl_escape", "w")
except OSError as error:
    print(type(error).__name__)
"""
    command = [*prefix, sys.executable, "-I", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_without_bubblewrap_the_other_layers_hold(monkeypatch):
    monkeypatch.setattr("lit_rl.tools.sandbox.bubblewrap_prefix", lambda readable, writable: [])
    for name in ("network", "parent's environment", "write outside", "fork"):
        result = run(f"{ESCAPES[name]}\nprint('escaped')")
        assert result.status == "failed"
        assert "escaped" not in result.stdout
