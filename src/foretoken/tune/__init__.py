"""What pays here. objective: the draft probability of randomised drafting, exact, by the paper's rate and by ours."""
