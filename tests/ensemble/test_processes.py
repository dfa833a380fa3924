"""Processes that share an ensemble, and what is said of those that do not come."""

import os
import socket
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest
from compiling import QUICK_FLAGS

import deepufm as ufm
from deepufm.ensemble._processes import Meeting

NUM_MEMBERS = 5
# argv: folder, process, number of processes, coordinator
PROGRAM = f"""
import sys
from pathlib import Path
import diffrax, jax, numpy as np
import deepufm as ufm

jax.config.update("jax_enable_x64", True)
folder, coordinator = Path(sys.argv[1]), sys.argv[4]
process, processes = int(sys.argv[2]), int(sys.argv[3])
name = f"{{process}}of{{processes}}"
if processes > 1:
    ufm.join_processes(coordinator, processes, process, timeout=120.0)
else:
    for absent in (0, 1):
        try:
            ufm.join_processes(coordinator, 2, absent, timeout=0.2)
        except TimeoutError as error:
            (folder / f"alone{{absent}}").write_text(str(error))
starts = np.linspace(-3.0, -1.0, {3 * NUM_MEMBERS}).reshape({NUM_MEMBERS}, 3)
depths = np.asarray([1.0, 2.5, 2.0, 4.0, 1.5])

def run(devices, solver=diffrax.Heun()):
    return ufm.ensemble(
        lambda depth: ufm.HadamardFlow(4, depth), depths, jax.numpy.asarray(starts),
        stop=ufm.FinalTime(1e3), saves=3, solver=solver, rtol=1e-3, devices=devices,
    )

def refused(name, *arguments):
    try:
        run(*arguments)
    except ValueError as error:
        (folder / name).write_text(str(error))

leaves = jax.tree.leaves(run(jax.devices()))
devices = {{device.process_index for leaf in leaves for device in leaf.devices()}}
np.savez(
    folder / f"{{name}}.npz",
    *leaves,
    devices=len(jax.devices()),
    local=devices == {{process}},
    joined=jax.distributed.is_initialized(),
)
if processes > 1:
    others = [d for d in jax.devices() if d.process_index != process]
    refused(f"others{{process}}", others)
    refused(f"implicit{{process}}", jax.devices(), diffrax.Kvaerno5())
"""


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def _start(folder, process: int, processes: int, address: str) -> subprocess.Popen:
    flags = f"--xla_force_host_platform_device_count=2 {QUICK_FLAGS}"
    # JAX looks for a cluster's own variables, and two processes are none.
    ours = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    arguments = [str(folder), str(process), str(processes), address]
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        env=os.environ | ours,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where two processes that joined each other, and one alone, left their results."""
    folder = tmp_path_factory.mktemp("processes")
    address = f"127.0.0.1:{_free_port()}"
    programs = [_start(folder, 0, 2, address), _start(folder, 1, 2, address)]
    programs.append(_start(folder, 0, 1, f"127.0.0.1:{_free_port()}"))
    try:
        for program in programs:
            said, _ = program.communicate(timeout=300)
            assert program.returncode == 0, said
    finally:
        for program in programs:
            program.kill()
            program.wait()
    return folder


def _results(folder, name: str) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    """Returns the leaves of the `Path`, and what else was written down."""
    with np.load(folder / f"{name}.npz") as file:
        leaves = [file[key] for key in file if key.startswith("arr_")]
        return leaves, {key: file[key] for key in file if not key.startswith("arr_")}


def test_two_processes_give_what_one_gives(folder):
    (first, notes), (second, _) = _results(folder, "0of2"), _results(folder, "1of2")
    alone, _ = _results(folder, "0of1")
    assert notes["devices"] == 4
    assert len(first) == len(alone) > 5
    for mine, theirs, expected in zip(first, second, alone, strict=True):
        assert len(mine) == NUM_MEMBERS
        np.testing.assert_array_equal(mine, theirs)
        # Shares of other sizes: products of other shapes, and rounding.
        np.testing.assert_allclose(mine, expected, rtol=1e-13, atol=1e-14)


def test_every_process_holds_all_results_on_its_own_devices(folder):
    for name in ("0of2", "1of2"):
        _, notes = _results(folder, name)
        assert notes["joined"]
        assert notes["local"]


def test_a_single_process_never_joins(folder):
    _, notes = _results(folder, "0of1")
    assert notes["devices"] == 2
    assert not notes["joined"]


@pytest.mark.parametrize(
    ("absent", "problem"),
    [(0, "0 of 2 waited 0.2 s at .* and did not see: 1"), (1, "0.2 s for process 0")],
)
def test_a_process_whose_peer_is_absent_is_told_and_goes_on_alone(
    folder, absent, problem
):
    """JAX itself would end it by SIGABRT; here it then runs its ensemble."""
    with pytest.raises(TimeoutError, match=problem):
        raise TimeoutError((folder / f"alone{absent}").read_text())


def test_devices_of_other_processes_alone_are_refused(folder):
    for process in (0, 1):
        said = (folder / f"others{process}").read_text()
        assert f"none is of process {process}" in said


def test_implicit_solvers_are_refused_across_processes(folder):
    for process in (0, 1):
        said = (folder / f"implicit{process}").read_text()
        assert "Implicit solvers run on devices of this process only" in said


def _meet(*meetings: Meeting) -> list[Exception | None]:
    """Returns how each process that waits in a meeting fared, `None` for well."""
    fared: list[Exception | None] = [None] * len(meetings)

    def wait(i: int) -> None:
        try:
            meetings[i].wait()
        except (OSError, ValueError) as error:
            fared[i] = error

    threads = [threading.Thread(target=wait, args=(i,)) for i in range(len(meetings))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return fared


def test_processes_meet_in_any_order():
    address = f"127.0.0.1:{_free_port()}"
    processes = [Meeting(address, 4, i, 20.0) for i in (3, 1, 0, 2)]
    assert _meet(*processes) == [None] * 4


def test_everyone_is_told_which_process_is_missing():
    address = f"127.0.0.1:{_free_port()}"
    first, second = _meet(Meeting(address, 4, 0, 0.6), Meeting(address, 4, 2, 0.6))
    assert isinstance(first, TimeoutError)
    assert isinstance(second, TimeoutError)
    assert f"waited 0.6 s at {address} for the others" in str(first)
    assert "did not see: 1, 3. Check that these were started" in str(first)
    assert f"reached process 0 at {address}, which did not see: 1, 3." in str(second)


def test_waiting_ends_in_time():
    start = time.monotonic()
    _meet(Meeting(f"127.0.0.1:{_free_port()}", 2, 0, 0.3))
    _meet(Meeting(f"127.0.0.1:{_free_port()}", 2, 1, 0.3))
    assert 0.6 <= time.monotonic() - start < 5


def _call(port: int, words: bytes, seconds: float = 0.0) -> None:
    """Connects once someone listens, says something, and leaves."""
    for _ in range(1000):
        try:
            peer = socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            time.sleep(0.01)
            continue
        with peer:
            peer.sendall(words)
            time.sleep(seconds)
        return


def test_a_process_that_left_may_come_again():
    """A process 1 that was killed while it waited does not count, nor is in the way."""
    port = _free_port()
    processes = [Meeting(f"127.0.0.1:{port}", 3, i, 20.0) for i in range(3)]
    fared = []

    def others():
        _call(port, b"deepufm 1 3\n", 0.3)
        fared.extend(_meet(*processes[1:]))

    thread = threading.Thread(target=others)
    thread.start()
    fared += _meet(processes[0])
    thread.join()
    assert fared == [None] * 3


def test_a_process_that_does_not_fit_is_refused():
    address = f"127.0.0.1:{_free_port()}"
    # One of the two with `process_id` 1 comes first, and is missed by nobody.
    processes = [(3, 0), (3, 1), (3, 1), (4, 2)]
    fared = _meet(*[Meeting(address, *numbers, 0.6) for numbers in processes])
    said = "\n".join(map(str, fared))
    assert "Process 0 of 3 waited" in said
    assert said.count("of 3 was refused") == 1
    assert f"refused at {address}: another process has that `process_id`." in said
    assert "4 was refused at" in said
    assert "process 0 was given num_processes = 3." in said


def test_strangers_at_the_port_are_no_processes():
    port = _free_port()
    processes = [Meeting(f"127.0.0.1:{port}", 2, i, 20.0) for i in (0, 1)]
    fared = []

    def others():
        for words in (b"GET / HTTP/1.1\r\n\r\n", b"deepufm one 2\n", b"\n", b""):
            _call(port, words)
        fared.extend(_meet(processes[1]))

    thread = threading.Thread(target=others)
    thread.start()
    fared += _meet(processes[0])
    thread.join()
    assert fared == [None, None]


def test_a_port_in_use_is_named():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(OSError, match=f"listen at port {port} .* another port"):
            Meeting(f"127.0.0.1:{port}", 2, 0, 5.0).wait()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("10.0.0.1", 2, 0), '`coordinator` must be "host:port"'),
        ((":1234", 2, 0), '`coordinator` must be "host:port"'),
        (("10.0.0.1:http", 2, 0), '`coordinator` must be "host:port"'),
        (("10.0.0.1:65536", 2, 0), '`coordinator` must be "host:port"'),
        (("10.0.0.1:1234", 0, 0), "`num_processes` must be at least 1"),
        (("10.0.0.1:1234", 2, 2), "`process_id` must be at least 0 and less than"),
        (("10.0.0.1:1234", 2, -1), "`process_id` must be at least 0 and less than"),
        (("10.0.0.1:1234", 2, 0, 0.0), "`timeout` must be a positive number"),
        (("10.0.0.1:1234", 2, 0, float("nan")), "`timeout` must be a positive number"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        ufm.join_processes(*arguments)


def test_joining_is_refused_once_jax_has_its_devices():
    jax.devices()
    before = jax.config.values["jax_num_cpu_devices"]
    with pytest.raises(RuntimeError, match="before the first array"):
        ufm.join_processes("127.0.0.1:1", 2, 0)
    assert jax.config.values["jax_num_cpu_devices"] == before
