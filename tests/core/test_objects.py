"""Python objects between ranks."""

import ringtrain as rt

OBJECTS = [None, 17, "Grüße", {"lr": 0.1, "steps": [1, 2]}, b"x" * 300_000, [], ("a", {1, 2}), 2.5 + 1j]


def test_broadcast_object(world):
    def on_rank(rank):
        for root in {0, rt.size() - 1}:
            for obj in OBJECTS:
                assert rt.broadcast_object(obj if rank == root else "other", root) == obj

    world.run(on_rank)


def test_only_the_root_pickles(world):
    def on_rank(rank):
        unpicklable = (part for part in ())
        assert rt.broadcast_object("fine" if rank == 0 else unpicklable, 0) == "fine"

    world.run(on_rank)


def test_allgather_object(world):
    def on_rank(rank):
        found = rt.allgather_object({"rank": rank, "payload": "x" * (rank * 1000)})
        assert [each["rank"] for each in found] == list(range(rt.size()))
        assert [len(each["payload"]) for each in found] == [1000 * other for other in range(rt.size())]
        assert rt.allgather_object(None) == [None] * rt.size()

    world.run(on_rank)


def test_names_let_objects_cross(world):
    """Two threads' worth of objects, told apart by their names."""

    def on_rank(rank):
        assert rt.broadcast_object(rank, 0, name="epoch") == 0
        assert rt.broadcast_object(rank, rt.size() - 1, name="step") == rt.size() - 1

    world.run(on_rank)


def test_lambda_with_cloudpickle(world):
    def on_rank(rank):
        assert rt.broadcast_object(lambda x: x + 40, 0)(2) == 42

    world.run(on_rank)
