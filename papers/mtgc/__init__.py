"""Fang et al., MTGC (NeurIPS 2024): its experiments, numbers, claims and figures."""
