"""The launcher's agent on one host: checks the host before the job, listens to its ranks during it, ends them after it.

`reach` starts it on every host of a job, on the launcher's own as a child and elsewhere through ssh or srun, and sends
it this file as text, so that nothing but Python must be there. It never starts a rank: the MPI's engine does that.

Requests come in on stdin, one JSON object a line; the end of stdin, or a long silence, means that the launcher is gone.
Answers and news go out on stdout: a JSON line each, and after one that has "bytes" as many bytes of a rank's output.
The ranks of the host (see `rank`) connect to a Unix socket in the abstract namespace, which leaves no file behind.
"""

import base64
import itertools
import json
import os
import platform
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time

START_MARK = b"\x1eringtrain-agent\n"  # what a login shell prints stands before it
SECONDS_TO_KILL = 5.0  # from the request to end until what is left is killed; the ranks' supervisors take 3
SECONDS_TO_CONNECT = 3.0
DAEMONS = {"prted", "orted", "hydra_pmi_proxy"}  # by which engines start ranks on a host; srun's is Slurm's own to end
NONCE_BYTES = 16


class Launcher:
    """The launcher's end, over stdin and stdout."""

    def __init__(self):
        self.pending = b""
        os.write(1, START_MARK)

    def requests(self):
        """The requests that have arrived by now; waits for one. Raises EOFError if the launcher is gone."""
        data = os.read(0, 1 << 16)
        if not data:
            raise EOFError
        *lines, self.pending = (self.pending + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def tell(self, data=None, **facts):
        """Sends facts, and bytes after them."""
        if data is not None:
            facts["bytes"] = len(data)
        left = memoryview(json.dumps(facts).encode() + b"\n" + (data or b""))
        while left:
            left = left[os.write(1, left):]


def main():
    """Answers requests until the launcher is gone or the job is over."""
    launcher, networks, waiting = Launcher(), Networks(), []
    while True:
        while not waiting:
            waiting = launcher.requests()
        request = waiting.pop(0)
        if request["do"] == "describe":
            launcher.tell(**describe(request))
        elif request["do"] == "listen":
            launcher.tell(addresses=networks.listen(**request["listener"]), rdma_ports=rdma_ports())
        elif request["do"] == "connect":
            launcher.tell(reached=connect_all(request["targets"]))
        elif request["do"] == "tell time":
            launcher.tell(clock=time.monotonic())
        elif request["do"] == "serve":
            networks.close()
            Ears(launcher, request).run()
            return


# ---- before the job ----

def describe(request):
    """Facts about this host, or "problem": what keeps a rank from running here, as (subject, expected, found)."""
    directory = request["directory"]
    if not os.path.isdir(directory):
        return {"problem": ["working directory", directory, "it must exist there, but does not"]}
    if not os.access(directory, os.X_OK):
        return {"problem": ["working directory", directory, "the user must be able to enter it there, but is not"]}
    for path in request["files"]:
        if not os.path.exists(path):
            return {"problem": ["file", path, "it must exist there as here, but does not"]}
    facts = {"name": socket.gethostname(), "python": platform.python_version(), "cores": len(os.sched_getaffinity(0)),
             **visible_gpus(dict(os.environ, **request["environment"])),
             "machine": [boot_id(), os.stat("/proc/self/ns/net").st_ino]}
    if request["probe"] is None:
        return facts
    environment = dict(os.environ, **request["environment"])
    probe = subprocess.run([sys.executable, "-c", request["probe"]], cwd=directory, env=environment,
                           stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if probe.returncode != 0:
        last_line = (probe.stderr.strip().splitlines() or ["no output"])[-1]
        return {"problem": ["environment", sys.prefix, f"ringtrain and MPI must load there, but it says: {last_line}"]}
    return dict(facts, **json.loads(probe.stdout.strip().splitlines()[-1]))


def boot_id():
    """What no other running machine has."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def visible_gpus(environment, devices="/dev"):
    """Number of GPUs that a rank with this environment sees, and whether CUDA_VISIBLE_DEVICES says so.

    Else they are counted by their device files, which a container has only of the GPUs that were given to it.
    """
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        files = [name for name in os.listdir(devices) if name.startswith("nvidia") and name[6:].isdigit()]
        return {"gpus": len(files), "gpus_are_chosen": False}
    # CUDA ignores what stands behind a name that is none.
    names = itertools.takewhile(lambda name: name.strip() not in ("", "-1", "NoDevFiles"), chosen.split(","))
    return {"gpus": len(list(names)), "gpus_are_chosen": True}


class Networks:
    """Finds out which hosts can reach this one, by a listener on each of its addresses that says who it is."""

    def __init__(self):
        self.listeners = []

    def listen(self, nonce, ports, interfaces):
        """Listens on every address that --network-interfaces allows; returns (interface, address, prefix length, port) of each."""
        found = []
        for interface, address, prefix in ipv4_addresses() + ipv6_addresses():
            listener = bind_within(address, ports) if is_allowed(interface, address, interfaces) else None
            if listener is not None:
                self.listeners.append(listener)
                found.append((interface, address, prefix, listener.getsockname()[1]))
        selector = selectors.DefaultSelector()
        for listener in self.listeners:
            listener.setblocking(False)
            selector.register(listener, selectors.EVENT_READ)
        threading.Thread(target=self._answer, args=(selector, bytes.fromhex(nonce)), daemon=True).start()
        return found

    def close(self):
        """Stops listening."""
        for listener in self.listeners:
            listener.close()
        self.listeners = []

    def _answer(self, selector, nonce):
        """Sends the nonce to whoever connects, and reads nothing."""
        while self.listeners:
            for key, _ in selector.select(1.0):
                try:
                    connection, _ = key.fileobj.accept()
                    with connection:
                        connection.send(nonce)
                except OSError:  # whoever it was has gone, or the test is over
                    pass


def is_allowed(interface, address, wanted):
    """Whether an interface, or a network that contains the address, is among those wanted; () for any."""
    if not wanted or interface in wanted:
        return True
    import ipaddress  # takes milliseconds, and few jobs name networks

    return any(
        ipaddress.ip_address(address) in ipaddress.ip_network(name, strict=False) for name in wanted if "/" in name)


def ipv4_addresses():
    """(interface, address, prefix length) of each interface that is up, but the loopback."""
    import fcntl

    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        def ask(request, name):
            return fcntl.ioctl(asked, request, struct.pack("256s", name.encode()))

        for _, name in socket.if_nameindex():
            try:
                flags = struct.unpack("H", ask(0x8913, name)[16:18])[0]  # SIOCGIFFLAGS
                address, mask = (ask(request, name)[20:24] for request in (0x8915, 0x891B))  # SIOCGIFADDR, -NETMASK
            except OSError:  # no IPv4 address
                continue
            if flags & 1 and not flags & 8:  # up, and not the loopback
                found.append((name, socket.inet_ntoa(address), bin(int.from_bytes(mask, "big")).count("1")))
    return found


def ipv6_addresses(table="/proc/net/if_inet6"):
    """(interface, address, prefix length) of each IPv6 address that is good for more than one cable or this host."""
    try:
        with open(table) as file:  # address, number of the interface, prefix length, scope, flags, interface
            rows = [line.split() for line in file]
    except OSError:  # this kernel has no IPv6
        return []
    return [(name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address)), int(prefix, 16))
            for address, _, prefix, scope, _, name in rows if int(scope, 16) == 0]


def rdma_ports(folder="/sys/class/infiniband"):
    """Ports of InfiniBand and its relatives, as UCX calls them: mlx5_0:1."""
    return [f"{device}:{port}" for device in sorted(list_folder(folder))
            for port in sorted(list_folder(os.path.join(folder, device, "ports")))]


def list_folder(folder):
    """Names in a folder; none if it is not there."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def new_socket(address):
    """A TCP socket of the address's family."""
    return socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)


def bind_within(address, ports):
    """A listener on the address at a free port within (first, last); None if there is none."""
    for port in range(ports[0], ports[1] + 1):
        listener = new_socket(address)
        try:
            listener.bind((address, port))
            listener.listen(1024)
            return listener
        except OSError:
            listener.close()
    return None


def connect_all(targets):
    """Tries to connect to each (address, port, nonce) at once; for each "" if the right host answered, else why not."""
    selector, results = selectors.DefaultSelector(), ["no answer"] * len(targets)
    for index, (address, port, _) in enumerate(targets):
        attempt = new_socket(address)
        attempt.setblocking(False)
        error = attempt.connect_ex((address, port))
        if error in (0, 115):  # EINPROGRESS
            selector.register(attempt, selectors.EVENT_READ, index)
        else:
            results[index] = os.strerror(error)
            attempt.close()
    deadline = time.monotonic() + SECONDS_TO_CONNECT
    while selector.get_map() and time.monotonic() < deadline:
        for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
            results[key.data] = answer_of(key.fileobj, bytes.fromhex(targets[key.data][2]))
            selector.unregister(key.fileobj)
            key.fileobj.close()
    for key in list(selector.get_map().values()):
        key.fileobj.close()
    return results


def answer_of(connection, nonce):
    """"" if the peer sent this nonce, else what happened instead."""
    try:
        answer = connection.recv(NONCE_BYTES)
    except OSError as error:
        return os.strerror(error.errno)
    return "" if answer == nonce else "another host answered"


# ---- during the job ----

class Rank:
    """What is known of a rank of this host."""

    def __init__(self):
        self.number = None
        self.group = 0  # process group of its command
        self.has_ended = False
        self.pending = b""


class Ears:
    """One selector around the launcher, the ranks' sockets and the pipes of their output."""

    def __init__(self, launcher, request):
        self.launcher = launcher
        self.function_folder = private_folder_with(request["function"]) if request["function"] else None
        environment = request["environment"]
        if self.function_folder:
            environment["RINGTRAIN_FUNCTION"] = self.function_folder
        self.welcome = json.dumps({"environment": environment, "directory": request["directory"]}).encode()
        self.ranks = {}  # by socket
        self.segments = set()  # (path, inode) of shared memory that the ranks' MPI has made
        self.daemons = {}  # descriptors of the engine's, by process id
        self.pipes = {}  # (rank, stream) by descriptor
        self.heard_at = time.monotonic()
        self.patience = request["patience"] or float("inf")
        self.is_cut_off = False  # the launcher may live, but cannot be heard
        self.kill_at = None
        self.selector = selectors.DefaultSelector()
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind("\0" + request["socket"])
        self.listener.listen(4096)
        self.selector.register(self.listener, selectors.EVENT_READ, self._accept)
        self.selector.register(0, selectors.EVENT_READ, self._hear_launcher)
        launcher.tell(serving=True)

    def run(self):
        """Returns when the job is over here: asked to end, and no rank is left."""
        try:
            while self.kill_at is None or (self.ranks and time.monotonic() < self.kill_at):
                self._step()
        except OSError:  # stdout broke: the launcher is gone
            self.end()
            self._wait_without_launcher()
        for connection in list(self.ranks):
            self._forget(connection)
        for path, inode in self.segments:
            remove_file(path, inode)
        if self.is_cut_off:
            self._end_daemons()
        try:
            for descriptor in list(self.pipes):
                while self._read(descriptor):
                    pass
            self._hand_in()
        except OSError:  # the launcher is gone
            pass
        if self.function_folder:
            shutil.rmtree(self.function_folder, ignore_errors=True)

    def end(self):
        """Asks every rank to end: its supervisor does so when its socket closes."""
        if self.kill_at is None:
            self.kill_at = time.monotonic() + SECONDS_TO_KILL
            self.selector.unregister(self.listener)
            self.listener.close()  # a rank that only starts finds nobody, and gives up
            for connection in self.ranks:
                try:
                    connection.shutdown(socket.SHUT_WR)
                except OSError:  # it has just left
                    pass

    def _forget(self, connection):
        """Ends what there may still be of a rank whose supervisor is gone, or is not waited for any longer."""
        rank = self.ranks.pop(connection)
        if rank.group and not rank.has_ended:
            kill_group(rank.group)
        return rank

    def _note_daemon(self, connection):
        """The engine's daemon is whoever has started the rank's supervisor. A descriptor tells it from later processes."""
        try:
            _, daemon = name_and_parent_of(peer_of(connection)[0])
            if daemon not in self.daemons and name_and_parent_of(daemon)[0] in DAEMONS:
                self.daemons[daemon] = os.pidfd_open(daemon)
        except OSError:  # one of them has ended, or another user's processes cannot be seen
            pass

    def _end_daemons(self):
        """They would wait for minutes for a launcher that they cannot hear either, and have no ranks any more."""
        for descriptor in self.daemons.values():
            try:
                signal.pidfd_send_signal(descriptor, signal.SIGTERM)
            except ProcessLookupError:
                pass

    def _hand_in(self):
        """Sends what the ranks of `ringtrain.run` have left: a result or a failure each."""
        for name in sorted(os.listdir(self.function_folder) if self.function_folder else ()):
            kind, _, rank = name.partition(".")
            if rank.isdigit():
                with open(os.path.join(self.function_folder, name), "rb") as file:
                    self.launcher.tell(file.read(), rank=int(rank), left=kind)

    def _step(self):
        silent = self.heard_at + self.patience
        deadline = silent if self.kill_at is None else self.kill_at
        timeout = None if deadline == float("inf") else max(0.0, deadline - time.monotonic())
        for key, _ in self.selector.select(timeout):
            key.data()
        if time.monotonic() > silent:
            self.end()
            self.is_cut_off = True

    def _wait_without_launcher(self):
        for descriptor in self.pipes:
            os.close(descriptor)  # a rank that writes on gets SIGPIPE
        self.pipes.clear()
        while self.ranks and time.monotonic() < self.kill_at:
            time.sleep(0.05)
            for connection, rank in list(self.ranks.items()):
                if not is_open(connection):
                    self._forget(connection)

    def _hear_launcher(self):
        self.heard_at = time.monotonic()
        try:
            requests = self.launcher.requests()
        except EOFError:
            self.selector.unregister(0)
            requests = [{"do": "end"}]
        for request in requests:
            if request["do"] == "beat":
                self.launcher.tell(clock=time.monotonic(), asked=request["at"])
            if request["do"] == "end":
                self.end()
            if request["do"] == "kill":
                self.end()
                self.kill_at = self.heard_at

    def _accept(self):
        connection, _ = self.listener.accept()
        if peer_of(connection)[1] != os.getuid():  # the name can be seen by others
            connection.close()
            return
        self.ranks[connection] = Rank()
        self.selector.register(connection, selectors.EVENT_READ, lambda: self._hear_rank(connection))

    def _hear_rank(self, connection):
        """Takes what a rank says about itself: one JSON object a line."""
        rank = self.ranks[connection]
        try:
            data = connection.recv(65536)
        except ConnectionError:
            data = b""
        *lines, rank.pending = (rank.pending + data).split(b"\n")
        for line in lines:
            self._take(json.loads(line), rank, connection)
        if not data:
            self.selector.unregister(connection)
            connection.close()
            self._forget(connection)
            if rank.number is not None and not rank.has_ended:
                self.launcher.tell(rank=rank.number, lost=True, at=time.monotonic())

    def _take(self, facts, rank, connection):
        """Passes facts about a rank on. A rank's own program may tell of its failure and its segments alone."""
        if "segments" in facts:
            self.segments.update(map(tuple, facts["segments"]))
            return
        if "starts" in facts:
            rank.number = facts["rank"]
            self._note_daemon(connection)
            self._greet(rank, connection)
        rank.group = facts.get("group", rank.group)
        rank.has_ended = rank.has_ended or "ended" in facts
        self.launcher.tell(**facts)

    def _greet(self, rank, connection):
        """Gives a starting rank its environment and the pipes for its output."""
        write_ends = []
        for stream in (1, 2):
            read_end, write_end = os.pipe()
            os.set_blocking(read_end, False)
            self.pipes[read_end] = (rank.number, stream)
            self.selector.register(read_end, selectors.EVENT_READ, lambda descriptor=read_end: self._read(descriptor))
            write_ends.append(write_end)
        socket.send_fds(connection, [struct.pack("I", len(self.welcome))], write_ends)
        connection.sendall(self.welcome)
        for descriptor in write_ends:
            os.close(descriptor)

    def _read(self, descriptor):
        """Passes on what a rank wrote; False at the end of the stream or if nothing is there."""
        try:
            data = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return False
        rank, stream = self.pipes[descriptor]
        if data:
            self.launcher.tell(data, rank=rank, stream=stream)
            return True
        self.selector.unregister(descriptor)
        os.close(descriptor)
        del self.pipes[descriptor]
        return False


def private_folder_with(function):
    """Makes a folder for this user alone, with the function that `ringtrain.run` wants called in it."""
    folder = tempfile.mkdtemp(prefix="ringtrain-run-")
    path = os.path.join(folder, "function")
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(base64.b64decode(function))
    return folder


def peer_of(connection):
    """Process id and user id of the process at the other end of a Unix socket."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[:2]


def name_and_parent_of(process):
    """The name of a process's program and the id of its parent process."""
    with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:  # id (name) state parent ...
        name, _, others = file.read().partition("(")[2].rpartition(")")
    return name, int(others.split()[1])


def is_open(connection):
    """Whether the peer of a socket is still there; what it sends is thrown away."""
    connection.setblocking(False)
    try:
        return connection.recv(65536) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def remove_file(path, inode):
    """Removes a file that this user has left, unless its name is another one's by now."""
    try:
        found = os.stat(path, follow_symlinks=False)
        if (found.st_ino, found.st_uid) == (inode, os.getuid()):
            os.unlink(path)
    except OSError:  # it was not left
        pass


def kill_group(group):
    """Kills a process group, if there is something left of it."""
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the launcher decides when the ranks end
    try:
        main()
    except (EOFError, BrokenPipeError):  # the launcher is gone before the job began
        pass
