"""Slurm across hosts of `ringtrain.bench.namespaces`, for the tests: munged and slurmctld on the first host, a slurmd on each.

All of it runs as root with files in one folder, and ends with the hosts. Needs Debian's slurm-wlm, munge and
libpmix-dev.
"""

from __future__ import annotations

import glob
import os
import subprocess
import time

from ringtrain.bench.namespaces import HostNetwork, NamespaceHost, find_program

PROGRAMS = ("slurmctld", "slurmd", "srun", "salloc", "munged", "mungekey")
PMIX = "/usr/lib/*/pmix2/lib/libpmix.so"  # by this name Slurm's plug-in loads it
START_SECONDS = 60.0
SLURM_CONF = """\
ClusterName=test
SlurmctldHost={controller}
SlurmctldPort=26817
SlurmdPort=26818
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
SlurmdUser=root
ReturnToService=2
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
TmpFS={folder}/tmp.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
NodeName={nodes} CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def missing() -> str:
    """What stands in the way of a cluster here, besides what hosts need; "" if nothing does."""
    absent = [program for program in PROGRAMS if not find_program(program)]
    absent += [] if glob.glob(PMIX) else [PMIX]
    return f"needs Slurm, of which {' '.join(absent)} is not here: bin/test --long installs it" if absent else ""


class Cluster:
    """A cluster on all hosts of a network, with two cores a node. `environment` is what its commands run with."""

    def __init__(self, network: HostNetwork):
        self.folder = network.folder / "slurm"
        self.hosts = list(network.hosts.values())
        self.controller = self.hosts[0]
        self.environment = dict(os.environ, SLURM_CONF=str(self.folder / "slurm.conf"))
        self._make_folder([host.name for host in self.hosts])
        self._start(self.controller, "munged", f"--key-file={self.folder}/munge.key", f"--socket={self.folder}/munge.socket",
                    f"--pid-file={self.folder}/munge.pid", f"--log-file={self.folder}/munge.log",
                    f"--seed-file={self.folder}/munge.seed", "--force")  # fmt: skip
        self._start(self.controller, "slurmctld", "-c")
        for host in self.hosts:
            host.check(
                "mount", "-t", "tmpfs", "none", "/sys/fs/cgroup"
            )  # slurmd wants one, though it puts nothing there
            host.check("mkdir", "/sys/fs/cgroup/systemd")
            self._start(host, "slurmd", "-N", host.name)
        self._await_nodes(len(self.hosts))

    def run(self, *line: str, **options) -> subprocess.CompletedProcess:
        """Runs a command of Slurm's on the first host; text is captured."""
        options.setdefault("env", self.environment)
        return self.controller.run(*line, **options)

    def _make_folder(self, names: list[str]) -> None:
        of_nodes = [f"{kind}.{name}" for kind in ("spool", "tmp") for name in names]
        for folder in (".", "state", *of_nodes):
            (self.folder / folder).mkdir(mode=0o755)
        self.folder.parent.chmod(0o755)  # munge wants its socket to be reachable
        text = SLURM_CONF.format(folder=self.folder, controller=self.controller.name, nodes=",".join(names))
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        subprocess.run([find_program("mungekey"), "--create", f"--keyfile={self.folder}/munge.key"], check=True)

    def _start(self, host: NamespaceHost, program: str, *arguments: str) -> None:
        """Starts a daemon, which goes into the background by itself."""
        done = host.run(find_program(program), *arguments, env=self.environment, stdin=subprocess.DEVNULL)
        if done.returncode:
            logs = "".join(log.read_text() for log in self.folder.glob("*.log"))
            raise RuntimeError(f"Slurm: '{program}' on {host.name} returned {done.returncode}: {done.stderr}{logs}")

    def _await_nodes(self, count: int) -> None:
        deadline = time.monotonic() + START_SECONDS
        while (shown := self.run("sinfo", "--noheader", "--Node", "--format=%t")).stdout.split() != ["idle"] * count:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"Slurm: {count} nodes must be idle within {START_SECONDS:g} s, but it says: "
                    f"{shown.stdout}{shown.stderr}"
                )
            time.sleep(0.2)
