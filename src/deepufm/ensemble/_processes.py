"""Joining the processes of one computation, which then see each other's devices.

Where a peer does not come in time, `jax.distributed.initialize` ends the process (by
SIGABRT, on the coordinator as on the others), and no Python code can catch that. So the
processes meet first, by plain sockets at the coordinator's own address; only when all
are there does JAX take over that address. Whoever is missing is an ordinary exception.

A process says one line, "deepufm 1 4" for process 1 of 4, and the coordinator, which
is process 0, answers one: "all", or what is wrong.
"""

import contextlib
import socket
import time
from dataclasses import dataclass

import jax

# Seconds between two looks of the coordinator for processes that have gone again, and
# between two tries of the others.
_PAUSE = 0.2
# How long a stranger at the coordinator's port may keep everybody waiting, in seconds.
_PATIENCE = 2.0
# What JAX is given to connect processes that are all there, in seconds. It is generous,
# since JAX ends the process afterwards.
_CONNECTION_TIMEOUT = 60

_ALL, _MISSING, _REFUSED = "all", "missing ", "refused "


def join_processes(
    coordinator: str, num_processes: int, process_id: int, timeout: float = 60.0
) -> None:
    """Joins this process to others; `jax.devices()` are then those of all of them.

    Every process calls this before its first array (a `FinalTime` holds one), and then
    the same `ensemble(..., devices=jax.devices())`: each integrates a share on its own
    devices, and gets the results of all. A single process needs nothing of the kind.

    **Arguments:**

    - `coordinator`: the address of process 0, "host:port", the same everywhere. It
        listens at that port on all its interfaces, without passwords or encryption:
        for networks that are private.
    - `num_processes`: how many there are.
    - `process_id`: which of them this is, from 0.
    - `timeout`: how many seconds to wait for the others.

    **Raises:** `TimeoutError` if others do not come in time, which says who was waited
    for and where; JAX is then as it was, and this process can go on alone. `ValueError`
    for arguments out of range, or that do not fit the other processes'. `RuntimeError`
    if JAX has its devices already; `OSError` if the port is taken.

    !!! example
        ufm.join_processes("10.0.0.1:1234", 4, int(os.environ["SLURM_PROCID"]))
        path = ufm.ensemble(flow_of, depths, log_a0, stop=stop, devices=jax.devices())
    """
    meeting = Meeting(coordinator, num_processes, process_id, timeout)
    _check_not_begun()
    meeting.wait()
    jax.distributed.initialize(
        coordinator,
        num_processes,
        process_id,
        initialization_timeout=_CONNECTION_TIMEOUT,
    )


@dataclass(frozen=True)
class Meeting:
    """Where and how long processes wait for each other; see `join_processes`."""

    coordinator: str
    num_processes: int
    process_id: int
    timeout: float

    def __post_init__(self):
        host, _, port = self.coordinator.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise ValueError(
                'Argument `coordinator` must be "host:port", the address of process 0, '
                f'such as "10.0.0.1:1234", but is {self.coordinator!r}.'
            )
        if self.num_processes < 1:
            raise ValueError(
                "Argument `num_processes` must be at least 1, but is "
                f"{self.num_processes}."
            )
        if not 0 <= self.process_id < self.num_processes:
            raise ValueError(
                "Argument `process_id` must be at least 0 and less than "
                f"num_processes = {self.num_processes}, but is {self.process_id}."
            )
        if not self.timeout > 0:
            raise ValueError(
                "Argument `timeout` must be a positive number of seconds, but is "
                f"{self.timeout}."
            )

    @property
    def _address(self) -> tuple[str, int]:
        host, _, port = self.coordinator.rpartition(":")
        return host.strip("[]"), int(port)

    def wait(self) -> None:
        """Returns when all processes are there.

        **Raises:** `TimeoutError`, `ValueError` and `OSError` as `join_processes`.
        """
        deadline = time.monotonic() + self.timeout
        if self.process_id == 0:
            self._gather(deadline)
        else:
            self._report(deadline)

    def _gather(self, deadline: float) -> None:
        """Waits, as process 0, for all others, and tells them the outcome."""
        joined: dict[int, socket.socket] = {}
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(self._listening())
            server.settimeout(_PAUSE)
            while True:
                joined = {i: peer for i, peer in joined.items() if _is_there(peer)}
                missing = set(range(1, self.num_processes)) - joined.keys()
                late = bool(missing) and time.monotonic() > deadline
                if late or not missing:
                    break
                with contextlib.suppress(TimeoutError):
                    peer = stack.enter_context(server.accept()[0])
                    self._welcome(peer, joined)
            names = ", ".join(map(str, sorted(missing)))
            for peer in joined.values():
                _say(peer, _MISSING + names if late else _ALL)
        if late:
            raise TimeoutError(
                f"Process 0 of {self.num_processes} waited {self.timeout:g} s at "
                f"{self.coordinator} for the others, and did not see: {names}. Check "
                "that these were started, that all were given this very address, that "
                "it is that of this machine, and that no firewall closes the port."
            )

    def _welcome(self, peer: socket.socket, joined: dict[int, socket.socket]) -> None:
        """Takes in what has connected, if it is a process that is missing."""
        name, *words = _hear(peer, _PATIENCE).split() or [""]
        if name != "deepufm" or len(words) != 2 or not all(map(str.isdecimal, words)):
            peer.close()  # of another program
            return
        process_id, num_processes = map(int, words)
        reason = ""
        if num_processes != self.num_processes:
            reason = f"process 0 was given num_processes = {self.num_processes}"
        elif process_id in joined and _is_there(joined[process_id]):
            reason = "another process has that `process_id`"
        if reason:
            _say(peer, _REFUSED + reason)
            peer.close()
        else:
            joined[process_id] = peer

    def _report(self, deadline: float) -> None:
        """Waits, as another process than 0, for process 0 and what it says."""
        me = f"Process {self.process_id} of {self.num_processes}"
        hello = f"deepufm {self.process_id} {self.num_processes}"
        problem = "there was no time to try"
        while (left := deadline - time.monotonic()) > 0:
            answer = ""
            try:
                with socket.create_connection(self._address, timeout=left) as peer:
                    _say(peer, hello)
                    # Process 0 may have begun later, and says who is missing.
                    answer = _hear(peer, deadline - time.monotonic() + _PATIENCE)
                    problem = "it was reached, and said nothing"
            except OSError as error:
                problem = f"there was no connection ({error})"
            if answer == _ALL:
                return
            if answer.startswith(_REFUSED):
                raise ValueError(
                    f"{me} was refused at {self.coordinator}: "
                    f"{answer.removeprefix(_REFUSED)}."
                )
            if answer.startswith(_MISSING):
                raise TimeoutError(
                    f"{me} reached process 0 at {self.coordinator}, which did not see: "
                    f"{answer.removeprefix(_MISSING)}. Check that these were started, "
                    "and were given this very address."
                )
            time.sleep(_PAUSE)
        raise TimeoutError(
            f"{me} waited {self.timeout:g} s for process 0 at {self.coordinator}: "
            f"{problem}. Check that process 0 was started, that it was given this very "
            "address, that the address is that of its machine, and that no firewall "
            "closes the port."
        )

    def _listening(self) -> socket.socket:
        """Returns a socket at the coordinator's port, on all interfaces like JAX's."""
        _, port = self._address
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        try:
            return socket.create_server(
                ("", port), family=family, dualstack_ipv6=dual, backlog=128
            )
        except OSError as error:
            raise OSError(
                f"Process 0 cannot listen at port {port} of this machine "
                f"({error.strerror}). Choose another port."
            ) from error


def _check_not_begun() -> None:
    """Raises `RuntimeError` where JAX would, once the others wait for this process."""
    if jax.distributed.is_initialized():
        raise RuntimeError("This process has joined others already.")
    name = "jax_num_cpu_devices"
    before = getattr(jax.config, name)
    try:
        # What JAX refuses once it has devices; no public function says whether it has.
        jax.config.update(name, before + 1)
    except RuntimeError as error:
        raise RuntimeError(
            "Call `join_processes` before the first array: JAX has devices already, "
            "those of this process alone."
        ) from error
    jax.config.update(name, before)


def _say(peer: socket.socket, line: str) -> None:
    with contextlib.suppress(OSError):  # gone: it sees that by itself
        peer.sendall(f"{line}\n".encode())


def _hear(peer: socket.socket, seconds: float) -> str:
    """Returns one line; what there is of it where no more comes in time."""
    peer.settimeout(seconds)
    heard = b""
    with contextlib.suppress(OSError):
        while not heard.endswith(b"\n") and len(heard) < 1000:
            if not (part := peer.recv(1000)):
                break
            heard += part
    return heard.decode(errors="replace").strip()


def _is_there(peer: socket.socket) -> bool:
    """Returns whether the other end still waits: it says nothing and has not closed."""
    peer.settimeout(0)
    try:
        return peer.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False
