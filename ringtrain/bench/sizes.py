"""Numbers of bytes as people write them, in powers of 1024: on the command line and in tables."""

_UNITS = {"GB": 1 << 30, "MB": 1 << 20, "KB": 1 << 10, "B": 1}


def bytes_text(count: int) -> str:
    """A number of bytes in its largest unit: ``64MB``."""
    for unit, factor in _UNITS.items():
        if count >= factor:
            return f"{count / factor:.4g}{unit}"
    return "0B"


def parse_bytes(text: str) -> int:
    """The number behind ``4KB``, ``64MB`` or ``1000``; raises ValueError for anything else."""
    for unit, factor in _UNITS.items():
        if text.upper().endswith(unit):
            return int(float(text[: -len(unit)]) * factor)
    return int(text)
