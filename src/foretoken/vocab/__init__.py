"""Drafters with another vocabulary than the target's: SLEM, SLRS, TLI, and the translation that they rest on."""
