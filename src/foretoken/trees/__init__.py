"""The shapes of token trees: how many children a node gets, decided before they are drawn."""
