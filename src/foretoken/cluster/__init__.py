"""Many engines on a Ray cluster: files of prompts (batch.py), and the server in replicas (app.py)."""
