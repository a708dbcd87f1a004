"""Results that lie beside their gradients until they are released: how one takes the other's place."""

import torch


def take_place(gradient: torch.Tensor, twin: torch.Tensor) -> torch.Tensor:
    """Gives a gradient its twin's values; returns memory that is free for the next twin.

    The two exchange their memory, so that nothing is copied, unless other tensors may lie in the gradient's.
    """
    if gradient._is_view() or gradient.untyped_storage().nbytes() != gradient.nbytes:
        with torch.no_grad():
            gradient.copy_(twin)
        return twin
    spare = torch.empty(0, dtype=gradient.dtype, device=gradient.device).set_(gradient.detach())
    gradient.data = twin
    return spare
