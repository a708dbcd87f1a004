"""The agent's program, which `reach` runs by its path: `python -I -S .../ringtrain/launch/agent/__main__.py TOKEN`.

The package is found from this file, as the launcher has it under the same path, whether it is installed there or not. What
goes wrong is told as it is, also by a Python that cannot read the package: this file has nothing that an old one lacks.
TOKEN is not read: by it the launcher finds the shell that was to run this, should that never come to it.
"""

import json
import os
import sys
import traceback

MARK = b"\x1eringtrain-agent "  # as in `link`, which an old Python cannot read


def find_package():
    # type: () -> None
    """Has the package that this file is of imported, behind all modules of Python's own."""
    folder = os.path.abspath(__file__)
    for _ in range(4):
        folder = os.path.dirname(folder)
    sys.path.append(folder)


def main():
    # type: () -> None
    """Runs the agent, and tells the launcher why if that fails."""
    try:
        find_package()
        from ringtrain.launch.agent.main import run

        run()
    except Exception:
        fault = {"fault": traceback.format_exc(), "python": sys.version.split()[0]}
        os.write(1, MARK + json.dumps(fault).encode() + b"\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
