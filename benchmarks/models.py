"""Parameter shapes of two well-known models, in the order of their layers, from the published architectures; and many small ones."""

Shape = tuple[int, ...]


def resnet50() -> list[Shape]:
    """ResNet-50 for 1,000 classes: 161 tensors, 25,557,032 parameters."""
    shapes: list[Shape] = [(64, 3, 7, 7), (64,), (64,)]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += _bottleneck(channels, width, has_shortcut=block == 0)
            channels = 4 * width
    return [*shapes, (1000, channels), (1000,)]


def bert_base() -> list[Shape]:
    """BERT-base, uncased, with its pooler: 199 tensors, 109,482,240 parameters."""
    hidden, inner = 768, 3072
    norm: list[Shape] = [(hidden,), (hidden,)]
    embeddings: list[Shape] = [(30522, hidden), (512, hidden), (2, hidden), *norm]
    attention: list[Shape] = [(hidden, hidden), (hidden,)] * 4 + norm
    feed_forward: list[Shape] = [(inner, hidden), (inner,), (hidden, inner), (hidden,), *norm]
    return embeddings + (attention + feed_forward) * 12 + [(hidden, hidden), (hidden,)]


def thousand() -> list[Shape]:
    """1,000 tensors of 1 KB, which cost what each operation costs."""
    return [(256,)] * 1000


def _bottleneck(channels: int, width: int, has_shortcut: bool) -> list[Shape]:
    """Three convolutions, each with scale and shift of its batch norm, and a fourth where the shape changes."""
    convolutions = [(width, channels, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
    if has_shortcut:
        convolutions.append((4 * width, channels, 1, 1))
    return [shape for convolution in convolutions for shape in (convolution, convolution[:1], convolution[:1])]


MODELS = {"resnet50": resnet50, "bert-base": bert_base, "thousand": thousand}
