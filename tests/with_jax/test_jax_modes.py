"""Each pair that the table of modes excludes raises its sentence: JAX's."""

import re

import optax
import pytest

import ringtrain as rt
import ringtrain.jax as hvd
from ringtrain._training.needs import NEEDS, TRAITS
from ringtrain.errors import UnsupportedError

MODES = {
    "LocalSteps": rt.LocalSteps(2), "OneStepLate": rt.OneStepLate(), "ShardedStep": rt.ShardedStep(),
    "gradient_as_bucket_view": rt.Synchronous(gradient_as_bucket_view=True),
}  # fmt: skip
PAIRS = {
    ("LocalSteps", "jax"): 1, ("OneStepLate", "jax"): 1, ("ShardedStep", "jax"): 1, ("gradient_as_bucket_view", "jax"): 1,
}  # fmt: skip


@pytest.mark.parametrize("pair", PAIRS, ids=" with ".join)
def test_a_pair_that_cannot_be_raises_its_sentence(pair):
    column, key = pair
    found = (
        f"DistributedGradientTransformation: {column} cannot be used with {TRAITS[key].words}: {NEEDS[column][key]}."
    )
    with pytest.raises(UnsupportedError, match=re.escape(found)):
        hvd.DistributedGradientTransformation(optax.sgd(0.1), mode=MODES[column])
