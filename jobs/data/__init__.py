"""From text to batches: tokenizers, memory-mapped shards, sampler, packing."""
