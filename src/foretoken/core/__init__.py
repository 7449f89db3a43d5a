"""What all other rooms speak of: token trees, draft laws, sampling, randomness, and what a rule and a tree must do."""
