"""`foretoken rules`: which verification rule accepts most, on toy distributions and on a real pair of models.

rows       -> (p, q) rows: of two models over a text, truncated or not; of the toy distributions of paper 000
exactly    -> what a rule does on one (p, q): enumerated over all draws, or averaged over sampled draws
contenders -> a way to draft and verify k tokens; rules alone, budgeted drafting, the better of two, the optima
measure    -> every contender x k x temperature
table, plot
"""
