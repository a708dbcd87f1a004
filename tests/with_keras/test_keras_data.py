"""``ringtrain.shard`` for ``tf.data``: the same elements as for indices, and ``fit`` on uneven data ends everywhere."""

import keras
import keras_runs as runs
import numpy as np
import pytest
import tensorflow as tf

import ringtrain as rt
import ringtrain.keras as hvd
from ringtrain._training import sharding
from ringtrain.testing import World


@pytest.mark.parametrize("policy", sharding.POLICIES)
@pytest.mark.parametrize("count, start", [(7, 0), (6, 0), (7, 3), (2, 0)])
def test_streams_are_shared_out_as_indices_are(policy, count, start):
    if policy == "truncate" and count == 2:
        count = 3

    def body(rank):
        share = rt.shard(tf.data.Dataset.range(count), policy, start=start)
        elements = [int(element) for element in share]
        assert elements == rt.shard(count, policy, seed=None, start=start).tolist()
        assert int(share.cardinality()) == len(elements)

    with World(3) as world:
        world.run(body)


def test_endless_and_unmeasured_streams():
    def body(rank):
        endless = rt.shard(tf.data.Dataset.range(3).repeat(), start=1)
        assert [int(element) for element in endless.take(3)] == [[1, 0, 2], [2, 1, 0]][rank]
        with pytest.raises(rt.RingtrainError, match="assert_cardinality"):
            rt.shard(tf.data.Dataset.range(5).filter(lambda element: True))

    with World(2) as world:
        world.run(body)


@pytest.mark.parametrize("policy, steps", [("pad", 4), ("truncate", 3)])
def test_fit_on_uneven_data_ends_on_all_ranks(policy, steps):
    def body(rank):
        model = runs.dense_model(seed=rank)
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), "mse", run_eagerly=True)
        data = tf.data.Dataset.from_tensor_slices((runs.X[:13], runs.Y[:13]))
        model.fit(rt.shard(data, policy).batch(2), verbose=0, callbacks=runs.start_callbacks())
        return int(model.optimizer.iterations), [np.array(weight) for weight in model.get_weights()]

    with World(2) as world:
        (taken, weights), (same, others) = world.run(body)
    assert taken == same == steps
    for mine, theirs in zip(weights, others, strict=True):
        np.testing.assert_array_equal(mine, theirs)
