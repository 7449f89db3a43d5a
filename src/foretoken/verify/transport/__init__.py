"""Optimal transport between the draws and the emitted token: the rules that accept as much as can be."""
