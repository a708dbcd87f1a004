"""Local steps of all ranks in one process: the oracle of ``DistributedOptimizer(every=H)``."""

import copy

import torch
from torch_models import mean_square, parameters, share


def by_hand(model, make, data, groups, every, outer=None, warmup=0, samples=lambda worker, step: 1):
    """What all ranks have after each synchronisation. ``groups``: the ranks of each worker, whose gradients are exact."""
    ranks = sum(map(len, groups))
    models = [copy.deepcopy(model) for _ in groups]
    optimizers = [make(each.parameters()) for each in models]
    common, m = parameters(model), [torch.zeros_like(each) for each in parameters(model)]
    weights, seen = [0.0] * len(groups), []
    for step, batch in enumerate(data):
        for worker, (each, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            taking = range(ranks) if step < warmup else groups[worker]
            optimizer.zero_grad()
            for rank in taking:
                x, y = share(batch, rank, ranks)
                (mean_square(each(x), y) / len(taking)).backward()
            optimizer.step()
            weights[worker] += samples(worker, step)
        if step < warmup:
            common, weights = parameters(models[0]), [0.0] * len(groups)
        elif (step + 1 - warmup) % every == 0:
            for place, x in enumerate(common):
                changed = [
                    weight * (x - list(each.parameters())[place].detach())
                    for weight, each in zip(weights, models, strict=True)
                ]
                change = sum(changed) / sum(weights)
                if outer is None:
                    x -= change
                else:
                    m[place] = outer.momentum * m[place] + change
                    x -= outer.rate * (change + outer.momentum * m[place])
                for each in models:
                    list(each.parameters())[place].data.copy_(x)
            weights = [0.0] * len(groups)
            seen.append([x.clone() for x in common])
    return seen
