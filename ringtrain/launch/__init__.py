"""ringtrainrun: starts a command on N ranks through the mpirun that belongs to the MPI library in use, or srun.

In the order of the data flow: `cli` reads the command line (`settings` has the tables of its flags), `hosts` says where
the ranks go, all of which is the `plan`; `mpi_installation` finds the library that mpi4py loads and its engine (`openmpi`, `mpich`
and `srun`: one file each, with the engine's command line); `reach` starts an `agent` on every host, with whose help
`preflight` checks the hosts and `networks` decides what carries the tensors; `environment` is what the ranks get; `job`
runs the engine and listens to the agents, `rank` is what the engine starts on each rank, `output` tags their lines,
`writing` writes them without making anybody wait, and `signals` knows what ends a job.
"""
