"""How a run is kept alive and remembered: values, pure decisions, checkpoints, tracking. No Ray."""
