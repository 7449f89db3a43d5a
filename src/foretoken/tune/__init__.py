"""What pays here: recipes are run on the user's own prompts, and the better half of them goes on to the next prompt."""
