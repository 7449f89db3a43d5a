"""An OpenAI-compatible server: requests over HTTP, decoded side by side by one thread that owns the model."""
