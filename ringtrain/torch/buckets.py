"""A bucket: one flat tensor whose parts are the gradients of several parameters, so that they travel without being packed.

``gradients.Group`` takes gradients into its bucket and sends that; ``bucketing`` makes those that parameters share.
"""

from collections.abc import Sequence

import torch

from ringtrain.errors import InvalidArgumentError

_ALIGNMENT_BYTES = 64  # of each gradient in its bucket: what vector instructions and CUDA's kernels like


class Bucket:
    """The memory of the gradients of some parameters of one dtype and device, which lives as long as it is in use.

    Attributes:
        flat: all of it, one-dimensional; the gaps between gradients are zeros.
        views: a tensor for each parameter over its part, row by row whatever the parameter's strides, which may differ
            between ranks.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]):
        first = parameters[0]
        step = max(1, _ALIGNMENT_BYTES // first.element_size())
        offsets, end = [], 0
        for parameter in parameters:
            offsets.append(end)
            end += -(-parameter.numel() // step) * step
        self.flat = torch.zeros(end, dtype=first.dtype, device=first.device)
        # .data: views of one tensor would share one version, by which changes of a single gradient are recognised.
        self.views = [
            self.flat[offset : offset + parameter.numel()].view(parameter.shape).data
            for offset, parameter in zip(offsets, parameters, strict=True)
        ]

    def take_in(self, gradients: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        """Copies gradients to their places, but for those that lie there already.

        Raises InvalidArgumentError for one that is not what its place was made for.
        """
        new = []
        for view, gradient, name in zip(self.views, gradients, names, strict=True):
            if gradient is not view:
                _refuse_misfit(view, gradient, name)
                new.append((view, gradient))
        if new:
            with torch.no_grad():
                torch._foreach_copy_(*map(list, zip(*new, strict=True)))  # a few launches on a GPU, not one for each


def _refuse_misfit(view: torch.Tensor, gradient: torch.Tensor, name: str) -> None:
    found = _described(gradient)
    if found != _described(view):
        raise InvalidArgumentError(
            f"gradient of '{name}': expected {_described(view)}, as in the steps before, but found {found}. With "
            "gradient_as_bucket_view gradients keep their kind; wrap the optimizer again after a change of the model."
        )


def _described(gradient: torch.Tensor) -> str:
    layout = str(gradient.layout).removeprefix("torch.")
    dtype = str(gradient.dtype).removeprefix("torch.")
    graph = " with a graph of its own" if gradient.requires_grad else ""
    return f"a {layout} {dtype} tensor of shape {tuple(gradient.shape)} on {gradient.device}{graph}"
