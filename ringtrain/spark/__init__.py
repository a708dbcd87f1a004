"""A function on all ranks of a Spark application, its results as a list: ``ringtrain.spark.run``.

>>> import ringtrain.spark
>>> ringtrain.spark.run(train, args=(0.01,), num_proc=2)

docs/other-trainers.md is the guide.
"""

from ringtrain.spark.driver import run

__all__ = ["run"]


def __dir__() -> list[str]:
    """The public names alone."""
    return sorted(__all__)
