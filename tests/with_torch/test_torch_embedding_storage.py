"""Where the rows of a sharded embedding lie; also on ranks that are processes."""

import pytest
import torch
from test_torch_embedding import ROWS, WIDTH, train, whole
from worlds import World, sizes

import ringtrain.torch as hvd

torch.set_num_threads(1)


@pytest.mark.parametrize("size", sizes(2)[:1])
def test_rows_in_a_file_train_as_those_in_memory(size, tmp_path):
    def on_rank(rank):
        tables = [
            hvd.ShardedEmbedding(ROWS, WIDTH, seed=4),
            hvd.ShardedEmbedding(ROWS, WIDTH, seed=4, storage="file", path=tmp_path, resident_bytes=1),
        ]
        for table in tables:
            train(table, hvd.RowWiseAdagrad(table.parameters(), lr=0.1), size)
        assert torch.equal(whole(tables[0]), whole(tables[1]))
        assert not list(tmp_path.iterdir())  # no name, so nothing is left by a process that is killed

    with World(size) as world:
        world.run(on_rank)
