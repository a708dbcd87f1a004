"""A name has one meaning: modules and classes of the same name play one part, in each adapter or at both ends of one thing."""

import ast
import collections
import pathlib

import pytest

PACKAGE = pathlib.Path(__file__).parents[2] / "ringtrain"

# Names that several modules have, and what they are in each of their rooms.
MODULES = {
    "accumulation": "gradients of several passes, added up",
    "adasum": "`op=Adasum`",
    "arrays": "a framework's arrays, as ways of training ask for them",
    "autograd": "gradients of the operations",
    "basics": "what a world tells of itself, as Horovod's scripts ask for it",
    "callbacks": "callbacks of `fit`",
    "compression": "the compressors, as Horovod's scripts name them",
    "drift": "whether replicas are still equal",
    "elastic": "the names of Horovod's elastic module",
    "functions": "broadcasts at the start of a training, as Horovod names the module",
    "gathering": "`gather_with_gradient`",
    "gradients": "a gradient's way to the other ranks",
    "library": "the native library for a framework",
    "local_steps": "the mode, for a framework's optimizer",
    "meeting": "ranks that meet by an agent: a rank's end, and the launcher's",
    "mpi_ops": "the names of Horovod's module",
    "names": "names of operations in a framework's graphs",
    "on_host": "gradients that are reduced on the host",
    "operations": "the collective operations for a kind of tensor",
    "optimizer": "`DistributedOptimizer`",
    "presence": "which gradients of a step there are",
    "process_sets": "process sets, and Horovod's names of them",
    "sampler": "which samples a rank reads",
    "sparse": "reduction of sparse gradients",
    "state": "the state of an elastic job",
    "sync_batch_norm": "`SyncBatchNormalization`",
    "trainer": "a trainer of another package",
    "transparent": "`State` whose steps survive deaths",
    "types": "a framework's types, as far as they are used",
    "util": "the names of Horovod's module",
    "watching": "settings and parameters compared in a framework's steps",
}  # fmt: skip

# The same of classes. Those of tf.keras have the names that Horovod gives them in both of its Keras packages.
CLASSES = {
    "Accumulation": "sums of several passes",
    "BestModelCheckpoint": "of Keras and of tf.keras",
    "BroadcastGlobalVariablesCallback": "of Keras and of tf.keras",
    "Cast": "a compressor that casts",
    "CommitStateCallback": "of Keras and of tf.keras",
    "Compression": "the compressors that there are",
    "Compressor": "the base of compressors",
    "Elastic": "of Keras and of tf.keras",
    "ErrorOfAPeer": "a framework's error that says what became of another rank",
    "LearningRateScheduleCallback": "of Keras and of tf.keras",
    "LearningRateWarmupCallback": "of Keras and of tf.keras",
    "MetricAverageCallback": "of Keras and of tf.keras",
    "MovingStatisticsAverageCallback": "of Keras and of tf.keras",
    "RowWiseAdagrad": "the rule for tables, and torch's optimizer that follows it",
    "ShardedEmbedding": "the layer of a framework",
    "State": "`elastic.State`",
    "TransparentState": "`State` whose steps survive deaths",
    "UpdateBatchStateCallback": "of Keras and of tf.keras",
    "UpdateEpochStateCallback": "of Keras and of tf.keras",
    "_Distributed": "methods around those of the user's optimizer",
    "_Eager": "the scope outside of programs, of a backend of Keras",
    "_MeetsErrorsOfPeers": "the class of `ErrorOfAPeer`",
}  # fmt: skip


def shared(pairs):
    """The names that occur in more than one place, with these places."""
    places = collections.defaultdict(set)
    for name, place in pairs:
        places[name].add(place)
    return {name: sorted(found) for name, found in places.items() if len(found) > 1}


def module_names(package):
    for path in package.rglob("*.py"):
        if not path.stem.startswith("__"):
            yield path.stem, str(path.relative_to(package))


def class_names(package):
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                yield node.name, str(path.relative_to(package))


def check(found, table):
    for name, places in sorted(found.items()):
        assert name in table, f"'{name}' is the name of {' and of '.join(places)}: rename one, or say what both are"
    assert sorted(found) == sorted(table), "a row is of a name that has one place"


@pytest.mark.parametrize("names, table", [(module_names, MODULES), (class_names, CLASSES)])
def test_a_name_has_one_meaning(names, table):
    check(shared(names(PACKAGE)), table)


def test_the_check_finds_names_that_two_things_have(tmp_path):
    for room in ("launch", "torch"):
        (tmp_path / room).mkdir()
        (tmp_path / room / "plan.py").write_text("class Plan:\n    pass\n")
    for names, name in ((module_names, "plan"), (class_names, "Plan")):
        with pytest.raises(AssertionError, match=f"^'{name}' is the name of launch/plan.py and of torch/plan.py"):
            check(shared(names(tmp_path)), {})
        with pytest.raises(AssertionError, match="one place"):
            check({}, {name: "of one thing"})
