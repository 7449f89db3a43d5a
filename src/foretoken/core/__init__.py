"""What every other layer uses: token trees, draft laws, sampling, randomness, and what a rule and a tree must do."""
