"""The search for the fastest recipe: recipes run on the user's own prompts, the faster half goes on to the next one."""
