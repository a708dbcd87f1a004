"""Several hosts on one Linux machine: namespaces with their own names, interfaces, /dev/shm, processes and sshd.

Used by `ringtrain bench wire` and by the tests. Each host is a process that is init of its own namespaces; when it
dies, the kernel ends every process of the host and takes its interfaces away, so nothing can be left over, even if the
program that made the hosts is killed. A further process holds the switches that their interfaces are plugged into.

Needs root, util-linux (unshare, nsenter), iproute2 (ip, tc) and OpenSSH's server.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ringtrain.launch.agent.rank_command import end_with

DEBIAN_PACKAGES = {"unshare": "util-linux", "nsenter": "util-linux", "ip": "iproute2", "tc": "iproute2", "ps": "procps",
                   "sshd": "openssh-server", "ssh": "openssh-client", "ssh-keygen": "openssh-client"}  # fmt: skip
NETWORK = "10.77.0"
IPV6_NETWORK = "fd77::"
FURTHER_NETWORK = "10.78.{link}"  # of a host's second interface and those after it
START_SECONDS = 20.0
# What a link may hold back: enough for 1 ms at 1 Gbit/s, so that the shaper reaches its rate, and a switch's buffer.
BURST_BYTES, BUFFER_BYTES = 128 << 10, 512 << 10
GSO_SEGMENTS = 65535  # that a virtual interface takes at once
# Runs as init of a host: reaps what others leave to it, and goes with the process that made the host.
HOLDER = "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN); print(flush=True)\nwhile True: signal.pause()"
DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"
# Who has no key is asked for a password.
SSHD_CONFIG = """\
Port 22
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized_keys
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication yes
PermitRootLogin yes
SetEnv PATH={path} TMPDIR={folder}/tmp
LogLevel ERROR
"""


def missing() -> str:
    """What stands in the way of making hosts here; "" if nothing does."""
    if os.geteuid() != 0:
        return "hosts in network namespaces need root"
    absent = sorted({package for program, package in DEBIAN_PACKAGES.items() if not find_program(program)})
    if absent:
        return f"hosts in network namespaces need these Debian packages: {' '.join(absent)}"
    probe = subprocess.run(["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "ip", "link", "add", "type", "veth"],
                           capture_output=True, text=True)  # fmt: skip
    return f"this kernel makes no network namespace: {probe.stderr.strip()}" if probe.returncode else ""


class NotMade(RuntimeError):
    """What a benchmark runs on could not be made on this machine."""


@dataclass
class NamespaceHost:
    """One host. Its processes see its name, its interfaces and each other, and the machine's files.

    Temporary files are its own (TMPDIR), for daemons name theirs after host and process, which hosts of two networks
    share.
    """

    name: str
    address: str
    interface: str
    folder: Path
    holder: subprocess.Popen
    pid: int  # of its init
    further: list[str] = field(default_factory=list)  # addresses of its second interface and of those after it
    cores: Sequence[int] = ()  # of this machine; () for all

    @property
    def interfaces(self) -> list[str]:
        """One for each of its links."""
        return [self.interface, *(f"{self.interface}-{link}" for link in range(2, 2 + len(self.further)))]

    @property
    def addresses(self) -> list[str]:
        """One for each of its links."""
        return [self.address, *self.further]

    def command(self, *line: str, folder: str | Path | None = None) -> list[str]:
        """The command line that runs `line` on this host, in the folder (the caller's by default)."""
        on_cores = [find_program("taskset"), "--cpu-list", ",".join(map(str, self.cores))] if self.cores else []
        return [*on_cores, find_program("nsenter"), "--target", str(self.pid), "--net", "--uts", "--mount", "--ipc", "--pid",
                f"--wd={folder or os.getcwd()}", "--", find_program("env"), f"TMPDIR={self.folder}/tmp", *line]  # fmt: skip

    def run(self, *line: str, folder: str | Path | None = None, **options: Any) -> subprocess.CompletedProcess:
        """`subprocess.run` on this host; text is captured unless `options` say otherwise."""
        return subprocess.run(self.command(*line, folder=folder), **{"capture_output": True, "text": True, **options})

    def start(self, *line: str, **options: Any) -> subprocess.Popen:
        """`subprocess.Popen` on this host. Send signals with `signal_to`, as a helper stands between."""
        return subprocess.Popen(self.command(*line), **options)

    def signal_to(self, process: subprocess.Popen, number: int) -> None:
        """Sends a signal to the process itself that `start` returned; nothing if that has ended."""
        for child in _children(process):
            os.kill(child, number)

    def processes(self) -> dict[int, str]:
        """Command lines of this host's processes but its init and its sshd, by process id within the host."""
        listing = self.run("ps", "-e", "-ww", "-o", "pid=,ppid=,stat=,args=").stdout.splitlines()
        found = [line.split(None, 3) for line in listing]
        return {
            int(pid): arguments
            for pid, _, state, arguments in found
            if pid != "1" and "Z" not in state and not arguments.startswith(("sshd:", "ps -e", find_program("sshd")))
        }

    def left(self) -> list[str]:
        """What a job has left here: processes, and shared memory."""
        segments = sorted(os.listdir(Path("/proc", str(self.pid), "root", "dev", "shm")))
        return [f"process {pid}: {line}" for pid, line in self.processes().items()] + [
            f"/dev/shm/{name}" for name in segments
        ]

    @contextmanager
    def hidden(self, folder: str | Path) -> Iterator[None]:
        """Lets an empty folder stand in place of this one, on this host alone."""
        self.check("mount", "-t", "tmpfs", "none", str(folder))
        try:
            yield
        finally:
            self.check("umount", str(folder))

    @contextmanager
    def replaced(self, path: str | Path, text: str) -> Iterator[None]:
        """Lets a file hold this text, on this host alone."""
        other = self.folder / "replaced"
        other.write_text(text)
        self.check("mount", "--bind", str(other), str(path))
        try:
            yield
        finally:
            self.check("umount", str(path))

    def check(self, *line: str) -> None:
        """Runs a command on this host. Raises CalledProcessError with its words if it fails."""
        _check(self.command(*line, folder="/"))


def cores_of_each(hosts: int) -> list[Sequence[int]]:
    """Equal shares of the cores that this process may use; () for each if there is not one for each."""
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // hosts
    return [cores[number * share : (number + 1) * share] for number in range(hosts)]


class HostNetwork:
    """Hosts and the switch between them.

    >>> with HostNetwork({"node-a": "eth0", "node-b": "ens5"}, rate="1gbit") as network:
    ...     network["node-a"].run("ssh", "node-b", "hostname").stdout
    'node-b\\n'

    Args:
        interfaces: for each host the name of the interface that leads to the switch.
        rate: of each link, both ways, in tc's words; None for as fast as the machine is; or one for each link.
        links: of each host. A host whose interface is eth0 has eth0-2 too, and so on; each is on a network of its own.
        useless: name of a second interface with the same address on every host, as docker0 is; None for none.
        login_path: PATH of those who come by ssh.
        ipv6: whether the hosts' addresses on the switch are IPv6 ones.
        cores_apart: whether each host has cores of its own, if there are enough, as hosts have elsewhere.
    """

    def __init__(
        self,
        interfaces: Mapping[str, str],
        rate: str | Sequence[str | None] | None = None,
        useless: str | None = "docker0",
        login_path: str = DEFAULT_PATH,
        links: int = 1,
        ipv6: bool = False,
        cores_apart: bool = False,
    ):
        self.login_path = login_path
        self._first_network = IPV6_NETWORK if ipv6 else f"{NETWORK}."
        self.folder = Path(tempfile.mkdtemp(prefix="ringtrain-hosts-"))
        self.hosts: dict[str, NamespaceHost] = {}
        self._holders: list[subprocess.Popen] = []
        self._cores = cores_of_each(len(interfaces)) if cores_apart else [()] * len(interfaces)
        try:
            self._make(interfaces, [rate] * links if rate is None or isinstance(rate, str) else list(rate), useless)
        except BaseException:
            self.close()
            raise

    def __getitem__(self, name: str) -> NamespaceHost:
        return self.hosts[name]

    def __enter__(self) -> HostNetwork:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends every process of every host and takes the network away."""
        for holder in self._holders:
            holder.kill()  # which kills the init, see --kill-child
            holder.wait()
            assert holder.stdout is not None
            holder.stdout.close()
        self._holders.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def unplug(self, name: str, link: int = 1) -> None:
        """Takes a host off a network, as pulling its cable does."""
        self._set_port(name, "down", link)

    def plug_in(self, name: str, link: int = 1) -> None:
        """Puts a host back on a network."""
        self._set_port(name, "up", link)

    @contextmanager
    def losing_large(self, name: str, link: int = 1, mtu: int = 1200) -> Iterator[None]:
        """Has packets that are larger vanish between a host and all others, without a word, as in a tunnel behind a
        firewall that drops ICMP."""
        port, switch = self._port(name, link), f"switch-{link}"
        for line in (["add", "apart", "type", "bridge"], ["set", "apart", "up"],
                     ["add", "narrow", "mtu", str(mtu), "type", "veth", "peer", "name", "narrows", "mtu", str(mtu)],
                     ["set", "narrow", "master", switch, "up"], ["set", "narrows", "master", "apart", "up"],
                     ["set", port, "master", "apart"]):  # fmt: skip
            _check(self._in_switch("ip", "link", *line))
        self._cut_at_once(link, segments=1)
        try:
            yield
        finally:
            for line in (["set", port, "master", switch], ["delete", "narrow"], ["delete", "apart"]):
                _check(self._in_switch("ip", "link", *line))
            self._cut_at_once(link, GSO_SEGMENTS)

    def _cut_at_once(self, link: int, segments: int) -> None:
        """How many packets' bytes a host hands over in one piece: a switch lets pieces pass whatever its MTU is."""
        for host in self.hosts.values():
            host.check("ip", "link", "set", host.interfaces[link - 1], "gso_max_segs", str(segments))

    def slow_down(self, name: str, rate: str, to: str | None = None) -> None:
        """Limits what a host sends, in tc's words; or what it sends to one other host, on their first link."""
        host = self[name]
        if to is None:
            return host.check("tc", "qdisc", "replace", "dev", host.interface, "root", *_shape(rate))
        at = ["dev", host.interface]
        host.check("tc", "qdisc", "replace", *at, "root", "handle", "1:", "htb", "default", "1")
        for number, limit in (("1:1", "100gbit"), ("1:2", rate)):
            host.check("tc", "class", "add", *at, "parent", "1:", "classid", number, "htb", "rate", limit,
                       "burst", str(BURST_BYTES), "cburst", str(BURST_BYTES))  # fmt: skip
        host.check("tc", "filter", "add", *at, "parent", "1:", "protocol", "ip", "u32",
                   "match", "ip", "dst", f"{self[to].address}/32", "flowid", "1:2")  # fmt: skip

    def _port(self, name: str, link: int = 1) -> str:
        return f"to-{list(self.hosts).index(name) + 1}" + (f"-{link}" if link > 1 else "")

    def _set_port(self, name: str, state: str, link: int) -> None:
        _check(self._in_switch("ip", "link", "set", self._port(name, link), state))

    # ---- making ----

    def _make(self, interfaces: Mapping[str, str], rates: Sequence[str | None], useless: str | None) -> None:
        self.switch = self._hold("--net")
        for link in range(1, len(rates) + 1):
            _check(self._in_switch("ip", "link", "add", f"switch-{link}", "type", "bridge"))
            _check(self._in_switch("ip", "link", "set", f"switch-{link}", "up"))
        for number, (name, interface) in enumerate(interfaces.items(), start=1):
            holder = self._hold("--net", "--uts", "--mount", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc")
            folder = self.folder / name
            folder.mkdir(mode=0o700)
            init = _children(holder)
            if not init:
                raise NotMade(f"making a host: '{name}' ended with exit code {holder.returncode}.")
            self.hosts[name] = NamespaceHost(name, f"{self._first_network}{number}", interface, folder, holder, init[0],
                                    cores=self._cores[number - 1])  # fmt: skip
            for line in (["hostname", name], ["ip", "link", "set", "lo", "up"]):
                self[name].check(*line)
            self._lay_cable(self[name], f"to-{number}", 1, interface, self[name].address, rates[0])
            for link, rate in enumerate(rates[1:], start=2):
                self[name].further.append(f"{FURTHER_NETWORK.format(link=link)}.{number}")
                self._lay_cable(
                    self[name], f"to-{number}-{link}", link, f"{interface}-{link}", self[name].further[-1], rate
                )
            if useless:
                for line in (["add", useless, "type", "bridge"], ["set", useless, "up"]):
                    self[name].check("ip", "link", *line)
                self[name].check("ip", "address", "add", "172.17.0.1/16", "dev", useless)
        self._write_files()
        for host in self.hosts.values():
            self._furnish(host)

    def _hold(self, *namespaces: str) -> subprocess.Popen:
        holder = subprocess.Popen(
            [find_program("unshare"), *namespaces, sys.executable, "-I", "-S", "-c", HOLDER],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            preexec_fn=partial(end_with, os.getpid()),
        )
        self._holders.append(holder)
        assert holder.stdout is not None
        holder.stdout.readline()  # its namespaces are there now
        return holder

    def _in_switch(self, *line: str) -> list[str]:
        return [find_program("nsenter"), "--target", str(self.switch.pid), "--net", "--", *line]

    def _lay_cable(
        self, host: NamespaceHost, port: str, link: int, interface: str, address: str, rate: str | None
    ) -> None:
        """Leads a cable from a port of the switch for such links to a new interface of the host."""
        _check(
            self._in_switch(
                "ip", "link", "add", port, "type", "veth", "peer", "name", interface, "netns", str(host.pid)
            )
        )
        _check(self._in_switch("ip", "link", "set", port, "master", f"switch-{link}", "up"))
        # Without nodad the kernel asks for a second whether the IPv6 address is taken, and it is of no use until then.
        host.check(
            "ip",
            "address",
            "add",
            *([f"{address}/64", "nodad"] if ":" in address else [f"{address}/24"]),
            "dev",
            interface,
        )
        host.check("ip", "link", "set", interface, "up")
        if rate:
            host.check("tc", "qdisc", "add", "dev", interface, "root", *_shape(rate))
            _check(self._in_switch("tc", "qdisc", "add", "dev", port, "root", *_shape(rate)))

    def _write_files(self) -> None:
        """What all hosts share: names, and one user key that opens each of them."""
        names = "".join(f"{host.address} {host.name}\n" for host in self.hosts.values())
        (self.folder / "names").write_text(f"127.0.0.1 localhost\n{names}")
        (self.folder / "nsswitch").write_text("hosts: files\npasswd: files\ngroup: files\n")
        _check(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / "user_key")])

    def _furnish(self, host: NamespaceHost) -> None:
        """Gives a host its files, its shared memory and its sshd."""
        _check(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(host.folder / "host_key")])
        shutil.copy(self.folder / "user_key.pub", host.folder / "authorized_keys")
        (host.folder / "sshd_config").write_text(SSHD_CONFIG.format(folder=host.folder, path=self.login_path))
        home = host.folder / "ssh"
        for folder in (home, host.folder / "tmp"):
            folder.mkdir(mode=0o700)
        shutil.copy(self.folder / "user_key", home / "id_ed25519")
        real_home = Path("~root").expanduser()
        for folder in (real_home / ".ssh", Path("/run/sshd")):
            folder.mkdir(mode=0o700, exist_ok=True)
        for line in (["mount", "--bind", str(home), str(real_home / ".ssh")],
                     ["mount", "--bind", str(self.folder / "names"), "/etc/hosts"],
                     ["mount", "--bind", str(self.folder / "nsswitch"), "/etc/nsswitch.conf"],
                     ["mount", "-t", "sysfs", "none", "/sys"],  # which lists the interfaces of this host
                     ["mount", "-t", "tmpfs", "none", "/dev/shm"],
                     [find_program("sshd"), "-f", str(host.folder / "sshd_config")]):  # fmt: skip
            host.check(*line)
        # What the machine's own root starts in each shell is not for these: pyenv's start, for one, waits up to a
        # minute while another shell starts it too.
        if (startup := real_home / ".bashrc").exists():
            host.check("mount", "--bind", os.devnull, str(startup))


def find_program(program: str) -> str:
    """The program's path, also where root's PATH lacks /usr/sbin; "" if there is none."""
    return shutil.which(program, path=os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin") or ""


def _shape(rate: str) -> list[str]:
    return ["tbf", "rate", rate, "burst", str(BURST_BYTES), "limit", str(BUFFER_BYTES)]


def _check(line: Sequence[str]) -> None:
    done = subprocess.run([find_program(line[0]), *line[1:]], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise NotMade(f"making a host: '{' '.join(line)}' returned {done.returncode}: {done.stderr.strip()}")


def _children(process: subprocess.Popen) -> list[int]:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            return []
        listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        if listed:
            return [int(child) for child in listed]
        time.sleep(0.01)
    raise TimeoutError(f"process {process.pid}: expected a child within {START_SECONDS:g} s, but it started none.")
