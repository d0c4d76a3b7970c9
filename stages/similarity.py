"""Similarity of residual states: cosine and angular distance of every pair, summed over tokens in float64."""

import math

import torch
from torch import Tensor


def similarity_sums(states: Tensor, chunk: int = 256) -> tuple[Tensor, Tensor]:
    """Sums over tokens of cos(h_i, h_j) and of arccos(cos(h_i, h_j)) / pi.

    `states` is [S, tokens, C] in float64; both results are [S, S]. Cosines are clamped to [-1, 1] first. `chunk` is the
    number of tokens whose S x S cosines are held at once.
    """
    count = len(states)
    cosine = torch.zeros(count, count, dtype=torch.float64, device=states.device)
    angular = torch.zeros_like(cosine)
    for part in torch.split(states, chunk, dim=1):
        unit = torch.nn.functional.normalize(part, dim=-1).transpose(0, 1)
        cosines = (unit @ unit.transpose(1, 2)).clamp(-1, 1)
        cosine += cosines.sum(dim=0)
        angular += cosines.arccos().sum(dim=0) / math.pi
    return cosine, angular
