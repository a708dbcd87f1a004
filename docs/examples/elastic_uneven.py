"""An elastic job on hosts with different numbers of ranks, whose steps have the same samples however many there are.

    ringtrainrun --elastic -np 1:6 -H big:4,small:2 --batch constant python docs/examples/elastic_uneven.py
    ringtrainrun --elastic -np 1:2 --batch constant python docs/examples/elastic_uneven.py      # on this host

With --batch constant a step has BATCH samples for each of the most ranks that the job may have, dealt as evenly as whole
samples allow. The learning rate and the schedule stay as they were tuned, when a host is lost or comes back.
"""

import numpy as np

import ringtrain as rt
import ringtrain.elastic

BATCH = 30  # of each rank, when all are there


def main() -> None:
    rt.init()
    random = np.random.default_rng(1)  # the same data on all ranks
    x = random.normal(size=(1000, 8))
    y = x @ np.arange(8.0) + 0.1 * random.normal(size=1000)

    sampler = rt.elastic.BatchSampler(len(x), batch_size=BATCH)
    state = rt.elastic.State(weights=np.zeros(8), sampler=sampler)
    for epoch in state.epochs(10):
        drawn = 0
        for indices in sampler:  # this rank's share of the batch
            error = x[indices] @ state.weights - y[indices]
            gradient = x[indices].T @ error / len(indices)
            state.weights -= 0.2 * state.allreduce(gradient)  # weighed by the samples of each rank
            drawn += len(indices)
        report(state, epoch, drawn)
    rt.shutdown()


def report(state: rt.elastic.State, epoch: int, drawn: int) -> None:
    """Who has drawn how much since the ranks were these; a death between has it asked again."""
    hosts = state.survive(lambda: rt.allgather_object((rt.cross_rank(), rt.rank(), drawn)))
    if rt.rank() == 0:
        distance = np.abs(state.weights - np.arange(8.0)).max()
        shares = ", ".join(f"host {host} rank {rank}: {samples}" for host, rank, samples in hosts)
        print(f"epoch {epoch}: largest error of a weight {distance:.4f}; samples of {shares}", flush=True)


if __name__ == "__main__":
    main()
