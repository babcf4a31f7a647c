"""The parallelisms, one idea a file; none imports another. Placement says who holds what."""
