"""Modules at the places where Horovod's scripts import them from; the package itself needs none of them.

They re-export what stands elsewhere, and hold the two exceptions that only Horovod's scripts know.
"""
