"""What a run computes: plain PyTorch and DeepSpeed. No Ray, no MLflow, no NVML."""
