"""The native library as Python sees it: its functions, tables and options, tensors of any library as addresses, and the log."""
