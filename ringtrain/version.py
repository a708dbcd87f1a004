"""The version of this package; setup.py and ``ringtrain.__version__`` read it here."""

__version__ = "0.1.0"
