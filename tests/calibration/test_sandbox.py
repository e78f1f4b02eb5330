import os
import socket
import threading
import time

import pytest

from eexport.calibration import sandbox
from eexport.calibration.sandbox import isolation, run_limited
from eexport.runtime.errors import EexportError


def test_a_script_that_runs_to_its_end():
    assert run_limited("import math\nassert math.sqrt(9) == 3\nprint('é' * 100000)") is None


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("assert 1 == 2, 'not the same'", "AssertionError: not the same"),
        ("f(", "SyntaxError: '(' was never closed"),
        ("raise ValueError('x' * 1000)", "ValueError: " + "x" * 188),
        ("import eexport_is_not_here", "ModuleNotFoundError: No module named 'eexport_is_not_here'"),
        ("import sys\nsys.stderr.buffer.write(b'\\xff\\n')\nsys.exit(1)", "\ufffd"),
    ],
)
def test_the_last_line_of_an_error(code, error):
    assert run_limited(code) == error


@pytest.mark.parametrize("code", ["exit(0)", "import sys; sys.exit()", "import os; os._exit(0)", "raise SystemExit"])
def test_an_early_exit_is_not_the_end(code):
    assert run_limited(f"{code}\nassert False") == "exit status 0"


def test_main_blocks_do_not_run():
    assert run_limited("if __name__ == '__main__':\n    raise ValueError") is None


def test_an_endless_loop_is_ended():
    started = time.monotonic()
    assert run_limited("while True: pass", seconds=1) is not None
    assert run_limited("import time\ntime.sleep(60)", seconds=1) == "timed out after 1 s"
    assert time.monotonic() - started < 10


def test_memory_is_limited():
    assert run_limited("x = bytearray(3 << 30)") == "MemoryError"
    assert run_limited("x = bytearray(100 << 20)") is None


def test_files_are_limited():
    code = "open('big', 'wb').write(bytes(5 << 20))"
    assert run_limited(code) is not None
    assert run_limited("open('small', 'wb').write(bytes(1 << 10))") is None


def test_a_child_neither_holds_up_nor_outlives_its_parent(tmp_path):
    # The child is in the candidate's own group, and would write after the candidate's end.
    mark = tmp_path / "mark"
    code = f"import os, time\nif os.fork() == 0:\n    time.sleep(1)\n    open({str(mark)!r}, 'w')\n    time.sleep(60)"
    started = time.monotonic()
    assert run_limited(code) is None
    assert time.monotonic() - started < 1
    time.sleep(1.2)
    assert not mark.exists()


@pytest.mark.skipif("--pid" not in sandbox._prefix(), reason="no process namespaces here")
def test_a_detached_child_is_ended_too(tmp_path):
    mark = tmp_path / "mark"
    code = f"import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(1)\n    open({str(mark)!r}, 'w')"
    assert run_limited(code) is None
    time.sleep(1.2)
    assert not mark.exists()


def test_the_environment_is_not_passed_on(monkeypatch):
    monkeypatch.setenv("A_SECRET", "1")
    assert run_limited("import os\nassert 'A_SECRET' not in os.environ") is None


def test_many_at_once():
    results = []
    threads = [threading.Thread(target=lambda: results.append(run_limited("x = 1"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [None] * 4


@pytest.mark.skipif(isolation() is not None, reason="unshare does not work here")
def test_the_network_is_not_reachable():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        code = f"import socket\nsocket.create_connection({address}, timeout=2)"
        socket.create_connection(address, timeout=2).close()  # from here it is
        error = run_limited(code)
    assert error is not None and error.startswith("OSError")


@pytest.fixture
def fresh():
    sandbox._prefix.cache_clear()
    yield
    sandbox._prefix.cache_clear()


@pytest.mark.usefixtures("fresh")
def test_where_the_network_cannot_be_taken_away_it_is_said(monkeypatch):
    assert sandbox._PREFIXES[-1] == ()
    monkeypatch.setattr(sandbox, "_PREFIXES", (("no-such-command",), ("false",), ()))
    assert "can reach the network" in (isolation() or "")
    assert run_limited("x = 1") is None
    assert run_limited("x = bytearray(3 << 30)") == "MemoryError"


@pytest.mark.usefixtures("fresh")
def test_without_limits_nothing_is_run(monkeypatch, tmp_path):
    mark = tmp_path / "mark"
    monkeypatch.setattr(sandbox, "_DRIVER", "import no_resource_module")
    with pytest.raises(EexportError, match="No module named 'no_resource_module'.*leave out --run-code"):
        run_limited(f"open({str(mark)!r}, 'w')")
    assert not mark.exists()
    monkeypatch.setattr(os, "name", "nt")
    with pytest.raises(EexportError, match="cannot be run within limits"):
        isolation()
