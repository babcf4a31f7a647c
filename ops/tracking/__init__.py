"""Where the figures of a run go: JSON lines on disk first, MLflow from there."""
