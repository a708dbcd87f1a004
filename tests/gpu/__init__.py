"""The plan of checks for a machine with one GPU: what bin/gpu-check runs there, and CI on the fakes."""
