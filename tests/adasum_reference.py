"""Adasum as arXiv:2006.02924 has it, in NumPy and in double; it shares nothing with the product.

Where two vectors stand for unequal numbers of ranks, each counts by that number instead of by half.
"""

import numpy as np


def pair(a, b, share=0.5):
    """Of two vectors; one of zeros leaves the other as it is."""
    product, square_a, square_b = float(a @ b), float(a @ a), float(b @ b)
    factor_a = 1.0 - share * product / square_a if square_a != 0 else 1.0
    factor_b = 1.0 - (1.0 - share) * product / square_b if square_b != 0 else 1.0
    return factor_a * a + factor_b * b


def reference(vectors):
    """Up the tree in rank order: the first ranks fold in pairs where there is no power of two of them."""
    vectors = [np.asarray(vector, np.float64).ravel() for vector in vectors]
    places = 1 << (len(vectors).bit_length() - 1)
    folded = len(vectors) - places
    counts = [2] * folded + [1] * (places - folded)
    vectors = [pair(vectors[2 * i], vectors[2 * i + 1]) for i in range(folded)] + vectors[2 * folded :]
    while len(vectors) > 1:
        pairs = range(0, len(vectors), 2)
        vectors = [pair(vectors[i], vectors[i + 1], counts[i] / (counts[i] + counts[i + 1])) for i in pairs]
        counts = [counts[i] + counts[i + 1] for i in pairs]
    return vectors[0]
