"""check_replicas and check_finite: silent where all is well, and the same text with tensor and rank on every rank where not."""

import ml_dtypes
import numpy as np
import pytest

import ringtrain as rt
from ringtrain.errors import InvalidArgumentError, MismatchError


def parameters() -> dict[str, np.ndarray]:
    """A small model, with values that repeat: a digest that ignores places would not see two of them exchanged."""
    weight = np.tile(np.arange(8, dtype=np.float32), 3).reshape(4, 6)
    return {"fc1.weight": weight, "fc1.bias": np.zeros(4), "steps": np.array(7), "empty": np.empty((0, 3))}


def text_of(call, kind=MismatchError) -> str:
    """The error's text, which must be the same on all ranks."""
    with pytest.raises(kind) as raised:
        call()
    assert len(set(rt.allgather_object(str(raised.value)))) == 1
    return str(raised.value)


@pytest.mark.least_ranks(2)
def test_flipped_bit_is_seen_and_the_odd_rank_named(world):
    def on_rank(rank):
        odd, own = rt.size() - 1, parameters()
        rt.check_replicas(own)
        if rank == odd:
            own["fc1.weight"].view(np.uint8)[2, 5] ^= 1
            own["steps"] += 1
        text = text_of(lambda: rt.check_replicas(own.items()))
        assert "check_replicas 'fc1.weight'" in text and " 1 more tensor differs. " in text
        expected = f"rank {odd} differ from those of rank" if odd > 1 else "those of rank 0 and of rank 1 differ"
        assert expected in text, text
        rt.check_replicas(parameters())

    world.run(on_rank)


def exchange(own):
    """Two neighbours: their sum, and any digest that ignores places, stays."""
    own["fc1.weight"][0, [0, 1]] = own["fc1.weight"][0, [1, 0]]


def reshape(own):
    """The same bytes."""
    own["fc1.weight"] = own["fc1.weight"].reshape(6, 4)


def negate_zero(own):
    """Equal as a number, and yet 1 / x differs."""
    own["fc1.bias"][0] = -0.0


@pytest.mark.least_ranks(2)
@pytest.mark.parametrize("change", [exchange, reshape, negate_zero])
def test_small_differences_are_seen(world, change):
    def on_rank(rank):
        own = parameters()
        if rank == 1:
            change(own)
        assert "'fc1." in text_of(lambda: rt.check_replicas(own))

    world.run(on_rank)


@pytest.mark.least_ranks(2)
def test_every_nth_call_compares(world):
    def on_rank(rank):
        own, failed = parameters(), []
        own["steps"] += rank
        for call in range(7):
            try:
                rt.check_replicas(own, every=3)
            except MismatchError:
                failed.append(call)
        assert failed == [0, 3, 6]
        with pytest.raises(InvalidArgumentError, match="every must be at least 1, but is 0"):
            rt.check_replicas(own, every=0)

    world.run(on_rank)


@pytest.mark.least_ranks(2)
@pytest.mark.parametrize("check", [rt.check_replicas, rt.check_finite])
def test_the_same_tensors_must_be_there_on_all_ranks(world, check):
    def on_rank(rank):
        last, own = rt.size() - 1, parameters()
        names = [*own]
        less = {name: own[name] for name in (names[:1] + names[2:] if rank == last else names)}
        assert f"'fc1.bias' is missing on rank {last}" in text_of(lambda: check(less))
        turned = {name: own[name] for name in (names[::-1] if rank == last else names)}
        assert f"in the same order on all ranks, but not on rank {last}." in text_of(lambda: check(turned))
        check(own)

    world.run(on_rank)


@pytest.mark.least_ranks(2)
def test_what_cannot_be_looked_at_on_one_rank_fails_on_all(world):
    def on_rank(rank):
        own = parameters()
        if rank == 1:
            own["fc1.bias"] = np.array(["text"])
        text = text_of(lambda: rt.check_finite(own), InvalidArgumentError)
        assert "'fc1.bias': dtype must be one of" in text

    world.run(on_rank)


@pytest.mark.least_ranks(2)
def test_a_missing_gradient_is_finite_but_equal_to_no_other(world):
    def on_rank(rank):
        own = {"used": np.ones(3)[::2], "unused": None if rank == 1 else np.ones(2)}
        rt.check_finite(own)
        assert "'unused'" in text_of(lambda: rt.check_replicas(own))

    world.run(on_rank)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16"])
def test_what_is_not_finite_is_named(world, dtype, value):
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype

    def on_rank(rank):
        own = {
            "count": np.array(1),
            "bias": np.ones(5, kind),
            "weight": np.full(3, 3e38 if dtype == "float32" else 1, kind),
        }
        rt.check_finite(own)
        if rank == rt.size() - 1:
            own["bias"][4] = value
        text = text_of(lambda: rt.check_finite(own))
        assert text.startswith(f"check_finite 'bias': all elements must be finite, but rank {rt.size() - 1} has")
        assert " more " not in text
        own |= {"scale": own["bias"], "shift": own["bias"]}
        assert " or a NaN. 2 more tensors have one. Look " in text_of(lambda: rt.check_finite(own))

    world.run(on_rank)
