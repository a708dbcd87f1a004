"""The table of gradients that some ranks lack, which every adapter is held to, and what one process makes of it.

Zeros where another rank has one, None where nobody has. Weights show which it was: with weight decay, a gradient of
zeros moves a weight and None does not. All numbers are exact.
"""

RANKS = 2
WEIGHT_DECAY = 0.5

# For each step and weight the gradients of rank 0 and rank 1. The first weight is always used.
CHANGING = [
    [(1.0, 1.0), (2.0, 4.0), (4.0, None), (None, 4.0), (None, None)],
    [(1.0, 1.0), (4.0, None), (None, None), (2.0, 4.0), (None, 4.0)],
    [(1.0, 1.0), (None, None), (None, 8.0), (4.0, None), (2.0, 4.0)],
]
# A graph that was traced once has the same gradients in each step.
STEADY = [CHANGING[0]] * 3
COUNT = len(CHANGING[0])


def passes_of(step, rank, passes):
    """What a rank's backward passes give: all in the first, and then what is always used."""
    own = [gradients[rank] for gradients in step]
    return [own] + [[own[0]] + [None] * (COUNT - 1)] * (passes - 1)


def expected(steps, passes=1):
    """The weights, from 1 on, that one process reaches with the batches of all ranks."""
    weights = [1.0] * COUNT
    for step in steps:
        for place, gradients in enumerate(step):
            if gradients != (None,) * RANKS:
                total = sum(gradient or 0.0 for gradient in gradients) / RANKS
                total *= passes if place == 0 else 1
                weights[place] -= total + WEIGHT_DECAY * weights[place]
    return weights
