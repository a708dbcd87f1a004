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


def streaming_by_hand(model, make, data, ranks, every, fragments=1, overlap=0, merge="additive", outer=None):
    """Each rank's parameters after each step where fragments travel: B1 of the papers, with all ranks in one process."""
    common, m = parameters(model), [torch.zeros_like(each) for each in parameters(model)]
    loads, parts = [0] * fragments, []
    for x in common:
        parts.append(loads.index(min(loads)))
        loads[parts[-1]] += x.numel()
    models = [copy.deepcopy(model) for _ in range(ranks)]
    optimizers, values = [make(each.parameters()) for each in models], [list(each.parameters()) for each in models]
    on_the_way, seen = [], []
    for step, batch in enumerate(data, 1):
        for rank, (each, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            x, y = share(batch, rank, ranks)
            optimizer.zero_grad()
            mean_square(each(x), y).backward()
            optimizer.step()
        for part in range(fragments):
            offset = (part + 1) * every // fragments
            if step >= offset and (step - offset) % every == 0:
                for place in (place for place, own in enumerate(parts) if own == part):
                    on_the_way.append((step + overlap, place, [own[place].detach().clone() for own in values]))
        for _, place, sent in [each for each in on_the_way if each[0] == step]:
            change = sum(common[place] - each for each in sent) / ranks
            m[place] = (outer.momentum if outer else 0) * m[place] + change
            common[place] = common[place] - (
                change if outer is None else outer.rate * (change + outer.momentum * m[place])
            )
            for own, was in zip(values, sent, strict=True):
                x = own[place].data
                own[place].data = (x + common[place]) / 2 if merge == "half" else x + (common[place] - was)
        on_the_way = [each for each in on_the_way if each[0] > step]
        seen.append([parameters(each) for each in models])
    return seen
