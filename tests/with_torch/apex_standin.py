"""The part of NVIDIA Apex's ``amp`` that scripts for Horovod use, as small as its behaviour towards an optimizer allows.

Like Apex it replaces methods on the optimizer object, puts float32 masters of float16 parameters into its param groups
at the first ``scale_loss`` (O2), and replaces ``step`` for one call when a gradient has overflowed.
"""

import types
from contextlib import contextmanager

import torch


def initialize(model, optimizer, opt_level="O1", scale=2.0**8):
    """Prepares model and optimizer in place, and returns them."""
    stash = types.SimpleNamespace(
        opt_level=opt_level, scale=scale, ready=False, params_have_scaled_gradients=False,
        all_fp16_params=[], all_fp32_from_fp16_params=[],
    )  # fmt: skip
    optimizer._amp_stash = stash
    if opt_level == "O2":
        model.half()
        forward = model.forward
        model.forward = lambda x: forward(x.half()).float()
        _patch_for_masters(optimizer)
    return model, optimizer


@contextmanager
def scale_loss(loss, optimizer, delay_unscale=False):
    stash = optimizer._amp_stash
    if stash.opt_level == "O2" and not stash.ready:
        _make_masters(optimizer)
    stash.ready = True
    if not stash.params_have_scaled_gradients:
        for parameter in stash.all_fp16_params:
            parameter.grad = None
    yield loss.float() * stash.scale
    stash.params_have_scaled_gradients = delay_unscale
    if not delay_unscale and _unscale(optimizer):
        stash.scale /= 2
        _skip_one_step(optimizer)


def _make_masters(optimizer):
    stash = optimizer._amp_stash
    for group in optimizer.param_groups:
        for index, parameter in enumerate(group["params"]):
            master = parameter.detach().clone().float().requires_grad_()
            group["params"][index] = master
            stash.all_fp16_params.append(parameter)
            stash.all_fp32_from_fp16_params.append(master)
            if parameter in optimizer.state:
                optimizer.state[master] = optimizer.state.pop(parameter)


def _pairs(optimizer):
    stash = optimizer._amp_stash
    if stash.all_fp16_params:
        return list(zip(stash.all_fp16_params, stash.all_fp32_from_fp16_params, strict=True))
    return [(parameter, parameter) for group in optimizer.param_groups for parameter in group["params"]]


def _unscale(optimizer):
    """Whether a gradient had overflowed."""
    overflow = False
    for parameter, owner in _pairs(optimizer):
        if parameter.grad is not None:
            overflow |= not bool(torch.isfinite(parameter.grad).all())
            owner.grad = parameter.grad.float() / optimizer._amp_stash.scale
    return overflow


def _skip_one_step(optimizer):
    step = optimizer.step

    def skip(self, closure=None):
        optimizer.step = step

    optimizer.step = types.MethodType(skip, optimizer)


def _patch_for_masters(optimizer):
    step, stash = optimizer.step, optimizer._amp_stash

    def stepping(self, closure=None):
        step()
        for parameter, master in _pairs(self):
            parameter.data.copy_(master.data)

    def zeroing(self, set_to_none=True):
        for parameter, master in _pairs(self):
            parameter.grad = master.grad = None
        stash.params_have_scaled_gradients = False

    optimizer.step = types.MethodType(stepping, optimizer)
    optimizer.zero_grad = types.MethodType(zeroing, optimizer)
