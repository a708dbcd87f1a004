"""ringtrainrun: starts a command on N ranks through the mpirun that belongs to the MPI library in use.

In the order of the data flow: `cli` reads the command line, `hosts` says where the ranks go, `mpi` finds the library
that mpi4py loads and its engine (`openmpi` or `mpich`: one file each, with the engine's command line), `job` runs
the engine and listens to the ranks, `rank` is what the engine starts on each of them, `output` tags their lines.
"""
