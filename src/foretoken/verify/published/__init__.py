"""Published solvers of optimal transport between the draws and the emitted token, by enumeration of the draws."""
