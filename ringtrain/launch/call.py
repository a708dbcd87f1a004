"""What each rank runs for `ringtrain.run`: the function comes from a private folder of its host, where the result is left.

The launcher's agent makes the folder (0700), and gets the files (0600) when the ranks have ended; see `function`.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import traceback
from pathlib import Path


def main() -> None:
    """Calls the function; an exception is kept too, and goes on to end the rank."""
    folder, rank = Path(os.environ["RINGTRAIN_FUNCTION"]), os.environ["RINGTRAIN_RANK"]
    paths, pickled = pickle.loads((folder / "function").read_bytes())
    sys.path += [path for path in paths if path not in sys.path]
    try:
        function, arguments, keywords = pickle.loads(pickled)
        result = _dumps(function(*arguments, **keywords))
    except Exception as problem:
        with contextlib.suppress(OSError):  # a full disk must not hide it
            _leave(folder / f"failure.{rank}", _kept(problem))
        raise
    _leave(folder / f"result.{rank}", result)


def _kept(problem: Exception) -> bytes:
    """The exception with its traceback as text; as a RuntimeError if it does not pickle."""
    text = "".join(traceback.format_exception(problem))
    try:
        pickled = _dumps((problem, text))
        pickle.loads(pickled)  # some exceptions pickle and cannot be made again
        return pickled
    except Exception:
        return _dumps((RuntimeError(f"{type(problem).__name__}: {problem}"), text))


def _dumps(value: object) -> bytes:
    import cloudpickle

    return cloudpickle.dumps(value)


def _leave(path: Path, data: bytes) -> None:
    unfinished = path.with_name(path.name + ".part")
    with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
    unfinished.rename(path)


if __name__ == "__main__":
    main()
