"""Flower app for federated averaging on a star, as users of Flower write it."""
