"""Local steps: workers train alone for some steps, and then average what they have changed.

Stich, "Local SGD Converges Fast and Communicates Little" (arXiv:1805.09767); with exact steps first Lin et al.
(arXiv:1808.07217); with an outer optimizer Douillard et al., "DiLoCo" (arXiv:2311.08105). No framework is imported here:
``period`` counts, ``negotiation`` and ``terms`` decide what ranks must agree on, ``outer`` has the update, all pure;
``worker`` does it for the tensors that an adapter gives.
"""
