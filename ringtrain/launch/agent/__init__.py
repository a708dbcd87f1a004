"""The launcher's agent on one host: checks the host before the job, listens to its ranks during it, ends them after it.

`reach` starts it on every host of a job, on the launcher's own as a child and elsewhere through ssh or srun, by the path
that the package has here. It says first of which edition it is (see `link`). The MPI's engine starts the ranks; in a job
without MPI the agent does (see `children`).

Requests come in on stdin, one JSON object a line; the end of stdin, or a long silence, means that the launcher is gone.
Answers and news go out on stdout: a JSON line each, and after one that has "bytes" as many bytes of a rank's output.
What they say is described in `ringtrain._rendezvous.agent_protocol`. The ranks of the host (see `rank`) connect to a Unix socket in
the abstract namespace, which leaves no file behind.
"""
