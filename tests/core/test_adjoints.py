"""What carries gradients backwards, by the table, and that the adapters perform it."""

import pytest

from ringtrain._binding import tables
from ringtrain._runtime.operations import Adasum, Average, Max, Sum
from ringtrain._training.adapter import adjoints
from ringtrain._training.adapter.adjoints import Adjoint, Takes, adjoint_of
from ringtrain.errors import UnsupportedError


def test_adjoints_of_the_table():
    assert {row.name: adjoint_of(row.name) for row in tables.OPERATIONS.values() if row.adjoint} == {
        "allreduce": Adjoint("allreduce", averages=False, scales=False, takes=Takes.ALL),
        "allgather": Adjoint("allreduce", averages=True, scales=False, takes=Takes.OWN_ROWS),
        "broadcast": Adjoint("allreduce", averages=True, scales=False, takes=Takes.ROOTS),
        "alltoall": Adjoint("alltoall", averages=False, scales=False, takes=Takes.ALL),
        "reducescatter": Adjoint("allgather", averages=False, scales=True, takes=Takes.ALL),
    }


def test_factors_are_horovods():
    assert adjoints.factor(Sum, 3.0, 0.5, 4) == 6.0
    assert adjoints.factor(Average, 3.0, 0.5, 4) == 1.5
    assert adjoints.factor(Average, 3.0, 0.5, 4, weighted=True) == 6.0
    for op in (Sum, Average):
        adjoints.require_linear("allreduce", op, "Detach the tensor")
    for op, name in ((Max, "Max"), (Adasum, "Adasum")):
        with pytest.raises(UnsupportedError, match=f"it is {name}. Detach the tensor before the operation"):
            adjoints.require_linear("allreduce", op, "Detach the tensor")


FORWARD = {
    "allreduce": lambda hvd, x: hvd.allreduce(x, name="f"),
    "allgather": lambda hvd, x: hvd.allgather(x, name="f"),
    "broadcast": lambda hvd, x: hvd.broadcast(x, 0, name="f"),
    "alltoall": lambda hvd, x: hvd.alltoall(x, name="f"),
    "reducescatter": lambda hvd, x: hvd.reducescatter(x, name="f"),
}


def submitted_backward(monkeypatch, world, operation):
    """The operation under the name of the gradients, as the ranks of this process submit it."""
    import torch

    import ringtrain.torch as hvd
    from ringtrain._runtime.context import Context

    seen, submit = {}, Context.submit_with  # which `submit` calls too

    def noting(self, attributes, kind, name, *arguments, **keywords):
        seen[name] = kind
        return submit(self, attributes, kind, name, *arguments, **keywords)

    monkeypatch.setattr(Context, "submit_with", noting)

    def on_rank(_):
        x = torch.ones(2 * world.size, 2, requires_grad=True)
        FORWARD[operation](hvd, x).sum().backward()

    world.run(on_rank)
    return seen["f.gradient"]


@pytest.mark.parametrize("operation", FORWARD)
def test_torch_carries_gradients_by_the_tables_operation(world, monkeypatch, operation):
    assert submitted_backward(monkeypatch, world, operation) == tables.OPERATIONS[operation].adjoint


def test_torch_follows_the_table(world, monkeypatch):
    """Under a table that says otherwise, another operation carries the gradients: one that gives as many rows."""
    row = tables.OPERATIONS["alltoall"]._replace(adjoint="allreduce")
    monkeypatch.setitem(tables.OPERATIONS, "alltoall", row)
    assert submitted_backward(monkeypatch, world, "alltoall") == "allreduce"
