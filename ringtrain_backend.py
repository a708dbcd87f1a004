"""Tells torch of its backend "ringtrain": ``import torch`` calls ``register``, by the entry point ``torch.backends``.

A module beside the package and not within it: a program that never uses the backend does not load the package's
library, and nothing that goes wrong with it keeps torch from being imported.
"""

import warnings
from typing import Any

NAME = "ringtrain"


def register() -> None:
    """Makes ``torch.distributed.init_process_group("ringtrain")`` known; never raises, and does nothing the second time."""
    try:
        _register()
    except Exception as problem:  # whatever it is, torch must be imported
        warnings.warn(f"the backend '{NAME}' of torch.distributed could not be registered: {problem}", stacklevel=2)


def _register() -> None:
    import torch.distributed as distributed

    if distributed.is_available() and NAME.upper() not in distributed.Backend._plugins:
        distributed.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
        distributed.register_rendezvous_handler(NAME, _meet)


def _create(place: Any, options: Any = None) -> Any:
    """A process group of torch's; the package is imported when the first one is made."""
    from ringtrain.torch.distributed import create

    return create(place, options)


def _meet(url: str, *of_caller: Any, **settings: Any) -> Any:
    """What ``init_method="ringtrain://"`` stands for."""
    from ringtrain.torch.distributed.init_method import meet

    return meet(url, *of_caller, **settings)
