"""Hosts that whoever has started the launcher has named: an operator of Kubernetes by a host file, SageMaker by a list. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ringtrain.launch.hosts import Host, HostsError, parse_hostfile, parse_hosts

# Where mpirun and mpiexec find their hosts if nobody names them; Kubeflow's operators set one for the MPI in use.
HOSTFILE_VARIABLES = (
    "OMPI_MCA_orte_default_hostfile",
    "PRTE_MCA_prte_default_hostfile",
    "OMPI_MCA_prte_default_hostfile",
    "HYDRA_HOST_FILE",
    "I_MPI_HYDRA_HOST_FILE",
)


class Named(NamedTuple):
    """Hosts, which may come up later than the launcher.

    Attributes:
        source: who names them, for people.
        hosts: as in ``-H``.
    """

    source: str
    hosts: list[Host]


def named_hosts(environ: Mapping[str, str], slots: int, read: Callable[[str, str], str]) -> Named | None:
    """What the environment names; None without such a variable. Raises HostsError.

    Args:
        environ: of the launcher.
        slots: of a host without a number.
        read: the text of a file, given the variable that names it.
    """
    for variable in HOSTFILE_VARIABLES:
        if path := environ.get(variable, ""):
            return Named(f"{path}, of {variable}", parse_hostfile(read(variable, path), path, slots))
    if "SM_HOSTS" not in environ:
        return None
    names = _of_sagemaker(environ["SM_HOSTS"])
    _refuse_another_launcher(names[0], environ.get("SM_CURRENT_HOST", names[0]))
    return Named("SM_HOSTS", parse_hosts(",".join(names), _slots_of_sagemaker(environ, slots)))


def comes_late(environ: Mapping[str, str]) -> bool:
    """Whether hosts and their names may come up after the launcher: in a pod the cluster's DNS learns names meanwhile."""
    return "KUBERNETES_SERVICE_HOST" in environ


def _refuse_another_launcher(first: str, here: str) -> None:
    """SageMaker starts the same program on every host: each would start a job on all of them. Raises HostsError."""
    if here != first:
        raise HostsError(
            f"SM_CURRENT_HOST '{here}': one host must start the job, '{first}', the first of SM_HOSTS, but this is another. "
            "Start ringtrainrun there alone, and on the others an sshd, or name the hosts with -H."
        )


def _of_sagemaker(text: str) -> list[str]:
    try:
        names = json.loads(text)
    except ValueError:
        names = None
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise HostsError(
            f"SM_HOSTS '{text}': expected a list of hosts in JSON, but found something else. Name them with -H."
        )
    return names


def _slots_of_sagemaker(environ: Mapping[str, str], slots: int) -> int:
    gpus = environ.get("SM_NUM_GPUS", "")
    return max(slots, int(gpus)) if gpus.isdecimal() else slots
