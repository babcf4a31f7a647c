"""Sharded, checksummed checkpoints: written, committed, verified, retained."""
