"""The formula of every method that is a single function, by the method's name."""

from compress.methods.gate_fisher import fisher_scores
from compress.methods.gate_taylor import taylor_scores
from compress.methods.hc_smoe import hc_smoe
from compress.methods.m_smoe import m_smoe
from compress.methods.ream import ream
from compress.methods.s_smoe import s_smoe
from compress.methods.saliency import frequency, mean_output_norm, probability, reap, significance

SCORES = {
    "frequency": frequency,
    "probability": probability,
    "reap": reap,
    "man": mean_output_norm,
    "mc-moe": significance,
}
"""Functions of one layer's statistics that return a score for each expert."""
GRADIENT_SCORES = {"fisher": fisher_scores, "taylor": taylor_scores}
"""Functions of a decoder, a text and a seed that return scores by layer."""
GROUPS = {"m-smoe": m_smoe, "s-smoe": s_smoe, "hc-smoe": hc_smoe, "ream": ream}
"""Functions of one layer's statistics and a number of experts that return as many groups."""
