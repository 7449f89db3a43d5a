"""Pretrained models that are known by a short name: where they are downloaded, and the folders that they become."""
