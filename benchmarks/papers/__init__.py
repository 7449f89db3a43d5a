"""`python -m benchmarks reproduce`: figures of the papers beside ours.

One file per artefact; the papers' numbers stand there as constants, each a citation of its table or figure, and only
ever appear in a column or a note named after the paper.
"""
