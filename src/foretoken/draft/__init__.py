"""The drafters: each proposes a token tree for every sequence at every step."""
