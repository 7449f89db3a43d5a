"""Pretrained models that are known by a short name: where they are got, and the folders that they become."""
